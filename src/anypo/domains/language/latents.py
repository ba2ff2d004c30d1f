"""Latent codes: rows that are written, and later read, under a vector of their own.

A policy that is `Injectable` lets a code z act inside it; what the code does is the policy's business. Codes are in force while a task samples inside
`injected`, and belong to their rows afterwards: `batch.signals["latent"]` [N,m] and `batch.signals["has_latent"]` [N]. Such a policy provides "latent".
`Codes` is a conditional variational autoencoder that finds codes for what may follow a beginning.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from anypo.batch import Batch


class Injectable:
    """Mixin of policies with codes."""

    codes: tuple[Tensor, Tensor] | None = None  # in force: [N,m], and [N] bool which rows have one

    @contextmanager
    def injected(self, code: Float[Tensor, "N m"], has: Bool[Tensor, " N"] | None = None) -> Iterator[None]:
        """Rows that are sampled or evaluated inside the block are written under these codes, one a row in the same order."""
        before = self.codes
        self.codes = (code, torch.ones(len(code), dtype=torch.bool) if has is None else has)
        try:
            yield
        finally:
            self.codes = before

    @contextmanager
    def injected_in(self, batch: Batch) -> Iterator[None]:
        """The batch's own codes, where it has any; else those in force."""
        if "latent" not in batch.signals:
            yield
            return
        with self.injected(batch.signals["latent"], batch.signals["has_latent"]):
            yield

    def codes_of(self, rows: Tensor | None, count: int) -> tuple[Tensor | None, Tensor | None]:
        """The codes of `rows` (None = all), and which have one; (None, None) without any. Raises ValueError when they are not as many as the rows."""
        if self.codes is None or not bool(self.codes[1].any()):
            return None, None
        code, has = self.codes if rows is None else (self.codes[0][rows], self.codes[1][rows])
        if len(code) != count:
            raise ValueError(f"{len(code)} latent codes for {count} rows; every row sampled under codes needs one of its own")
        return code, has


def cvae_kl(
    mu_q: Float[Tensor, "N m"], lv_q: Float[Tensor, "N m"], mu_p: Float[Tensor, "N m"], lv_p: Float[Tensor, "N m"]
) -> Float[Tensor, " N"]:
    """KL from the posterior to the prior, diagonal Gaussians given by means and log-variances."""
    return 0.5 * (lv_p - lv_q + (lv_q.exp() + (mu_q - mu_p) ** 2) / lv_p.exp() - 1).sum(-1)


def latent(mu_p: Float[Tensor, "*B m"], lv_p: Float[Tensor, "*B m"], eps: Float[Tensor, "*B m"]) -> Float[Tensor, "*B m"]:
    """Codes from standard normal numbers."""
    return mu_p + (lv_p / 2).exp() * eps


class Codes(nn.Module):
    """Posterior q(z | beginning, rest), prior p(z | beginning), and a decoder of the rest, over embeddings of width d (arXiv:2601.05870)."""

    def __init__(self, width: int, codes: int, hidden: int = 64, seed: int = 0) -> None:
        """`width` of the embeddings d, of the codes m."""
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.posterior, self.prior, self.decoder = (
                nn.Sequential(nn.Linear(into, hidden), nn.Tanh(), nn.Linear(hidden, out))
                for into, out in ((2 * width, 2 * codes), (width, 2 * codes), (width + codes, width))
            )

    @staticmethod
    def of(state: dict[str, Tensor]) -> Codes:
        """Frozen, from its weights."""
        found = Codes(state["prior.0.weight"].shape[1], state["prior.2.bias"].shape[0] // 2, state["prior.0.bias"].shape[0])
        found.load_state_dict(state)
        return found.requires_grad_(False)

    def loss(self, prefix: Float[Tensor, "N d"], rest: Float[Tensor, "N d"], eps: Float[Tensor, "N m"], beta: float) -> Tensor:
        """Squared error of the decoded rest plus beta times the KL."""
        mean, log_variance = self.posterior(torch.cat([prefix, rest], 1)).chunk(2, 1)
        found = self.decoder(torch.cat([prefix, latent(mean, log_variance, eps)], 1))
        return ((rest - found) ** 2).sum(1).mean() + beta * cvae_kl(mean, log_variance, *self.prior(prefix).chunk(2, 1)).mean()
