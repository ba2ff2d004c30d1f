"""The velocity network of small flow models: a perceptron that sees the point, the level and a condition.

Left out: convolutions and attention; real image models come through `pipelines.py`.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

FREQUENCIES = 6  # sine and cosine pairs that describe a level


def level_features(level: Float[Tensor, "*N"]) -> Float[Tensor, "*N F"]:
    """A level in [0,1] as F = 1 + 2 * FREQUENCIES smooth features."""
    angles = level[..., None] * (math.pi * torch.arange(1, FREQUENCIES + 1, dtype=level.dtype, device=level.device))
    return torch.cat([level[..., None], angles.sin(), angles.cos()], dim=-1)


class VelocityNetwork(nn.Module):
    """velocity(x, level, condition) for points of `size` numbers. Weights depend on `seed` alone."""

    def __init__(self, size: int, *, condition: int = 0, hidden: tuple[int, ...] = (128, 128), seed: int = 0) -> None:
        """`condition`: length of the condition vector, 0 for none."""
        super().__init__()
        self.size, self.condition, self.hidden = size, condition, tuple(hidden)
        sizes = (size + 1 + 2 * FREQUENCIES + condition, *hidden, size)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes[:-1], sizes[1:], strict=True))

    def forward(
        self, x: Float[Tensor, "*N D"], level: Float[Tensor, "*N"], condition: Float[Tensor, "*N C"] | None = None
    ) -> Float[Tensor, "*N D"]:
        """`level` and `condition` broadcast against the leading axes of x."""
        kind, lead = next(self.parameters()).dtype, x.shape[:-1]
        parts = [x.to(kind), level_features(torch.as_tensor(level, device=x.device).to(kind).expand(lead))]
        if self.condition:
            if condition is None:
                raise ValueError(f"this network takes a condition of {self.condition} numbers, and none was given")
            parts.append(condition.to(kind).expand(*lead, self.condition))
        h = torch.cat(parts, dim=-1)
        for layer in self.layers[:-1]:
            h = nn.functional.silu(layer(h))
        return self.layers[-1](h)
