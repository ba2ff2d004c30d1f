"""Methods for diffusion and flow models, one file a paper."""
