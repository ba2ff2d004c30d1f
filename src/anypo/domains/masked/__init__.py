"""Masked-diffusion language models: text is written block after block, and inside a block many tokens at once."""
