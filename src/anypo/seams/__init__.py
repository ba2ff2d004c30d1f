"""seams of anypo."""
