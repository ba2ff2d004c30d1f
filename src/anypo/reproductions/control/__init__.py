"""control of anypo."""
