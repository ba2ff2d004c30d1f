"""SpaFreq: an attribute classifier that looks at a picture and at its fine detail (arXiv:2605.24687, equation 10; sizes [reconstructed]).

Generated pictures betray themselves in their high frequencies, so a second branch sees the magnitudes of the three detail bands of a Haar transform.
Left out: the paper's backbones; the branches are one layer each, for small pictures.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from anypo.domains.diffusion.attributes import Readings


def haar_bands(picture: Float[Tensor, "*N H W"]) -> tuple[Float[Tensor, "*N H/2 W/2"], Float[Tensor, "*N 3 H/2 W/2"]]:
    """One level of the orthonormal 2-D Haar transform: the coarse band, and detail along the width, along the height and along both.

    Raises ValueError for odd sizes.
    """
    if picture.shape[-1] % 2 or picture.shape[-2] % 2:
        raise ValueError(f"the Haar transform halves height and width, which must be even, not {tuple(picture.shape[-2:])}")
    a, b = picture[..., ::2, ::2], picture[..., ::2, 1::2]
    c, d = picture[..., 1::2, ::2], picture[..., 1::2, 1::2]
    return (a + b + c + d) / 2, torch.stack([a - b + c - d, a + b - c - d, a - b - c + d], dim=-3) / 2


class SpaFreq(nn.Module):
    """Logits [N,K_a] of every attribute from pictures [N,H,W]. Weights depend on `seed` alone."""

    def __init__(self, shape: tuple[int, int], classes: tuple[int, ...], *, hidden: int = 64, seed: int = 0) -> None:
        """`shape`: height and width, even. `classes`: number of classes of every attribute."""
        super().__init__()
        self.classes, pixels = tuple(classes), shape[0] * shape[1]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.spatial = nn.Linear(pixels, hidden)
            self.frequency = nn.Linear(3 * pixels // 4, hidden)
            self.head = nn.Linear(2 * hidden, sum(self.classes))

    def forward(self, picture: Float[Tensor, "N H W"]) -> tuple[Float[Tensor, "N K"], ...]:
        detail = haar_bands(picture)[1].abs()
        features = torch.cat([self.spatial(picture.flatten(1)), self.frequency(detail.flatten(1))], dim=-1)
        return self.head(features.relu()).split(self.classes, dim=-1)

    @torch.no_grad()
    def read(self, picture: Float[Tensor, "N H W"]) -> Readings:
        """The likeliest class of every attribute, and its probability."""
        found = [logits.softmax(-1).max(-1) for logits in self(picture)]
        return Readings(torch.stack([f.indices for f in found], dim=1), torch.stack([f.values for f in found], dim=1))
