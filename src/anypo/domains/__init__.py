"""domains of anypo."""
