"""Claims of the methods for games, one file a paper."""
