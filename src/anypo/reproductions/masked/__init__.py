"""Claims of the masked-diffusion methods, one file a paper."""
