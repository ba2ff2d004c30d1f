"""Methods for masked-diffusion language models, one file a paper."""
