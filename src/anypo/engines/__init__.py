"""engines of anypo."""
