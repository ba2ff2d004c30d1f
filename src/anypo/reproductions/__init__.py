"""reproductions of anypo."""
