"""loops of anypo."""
