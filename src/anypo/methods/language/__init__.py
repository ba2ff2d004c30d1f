"""language of anypo."""
