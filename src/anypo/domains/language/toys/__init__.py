"""Small problems on which the claims of many methods are checked: exact where possible, seconds a run, the same loop as a real model."""
