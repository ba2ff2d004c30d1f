"""Methods for games, one file a paper."""
