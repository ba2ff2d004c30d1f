"""methods of anypo."""
