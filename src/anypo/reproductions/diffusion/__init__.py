"""Claims of the diffusion methods, one file a paper."""
