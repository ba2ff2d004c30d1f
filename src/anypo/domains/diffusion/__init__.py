"""Diffusion: an action is a denoising step, a trajectory the way from noise to a picture."""
