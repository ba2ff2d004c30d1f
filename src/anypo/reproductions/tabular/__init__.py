"""Claims of the tabular methods, one file a paper."""
