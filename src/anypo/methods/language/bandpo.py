"""BandPO: band-constrained policy optimization (arXiv:2603.04918).

GRPO's clip lets the ratio of every token move by the same share, so a token of probability p may move by eps * p: rare tokens can hardly rise even
when they pay, and entropy collapses. BandPO gives each sampled token the interval of ratios that an f-divergence trust region of one radius around
the old distribution allows: wide for rare tokens, narrow for likely ones, never outside the simplex. Against GRPO it changes the objective
(the bounds become tensors; token mean, no KL term). Equations 1-3: the paper's convex program; numerical limits, relaxation and final clamp
(4-6): the authors' code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.policy import Loss, Signals
from anypo.seams.groups import broadcast
from anypo.seams.objective import aggregate, clipped, ratio_metrics, token_ratio

if TYPE_CHECKING:
    from anypo.run import Run

DIVERGENCES = ("kl", "tv", "chi2")
EDGE = 1e-6  # probabilities nearer than this to 0 or 1 take the limits of equation 4
BISECTIONS = 60  # halvings of an interval no longer than 1 / EDGE: accurate to 1e-12


class Band(NamedTuple):
    lower: Tensor  # smallest ratio allowed, in [0,1]
    upper: Tensor  # largest ratio allowed, >= 1


class LossValue(NamedTuple):
    loss: Tensor  # scalar, differentiable in logp


def divergence(old_logp: Tensor, ratio: Tensor, kind: str = "kl") -> Tensor:
    """Equation 1: the smallest f-divergence (old first) at which a token of the old log-probability has `ratio` times its probability.

    The other tokens are all rescaled by (1 - ratio p) / (1 - p). Shapes broadcast; 0 <= ratio <= 1/p. Raises ValueError for another kind.
    """
    p, others = old_logp.exp(), -torch.expm1(old_logp)
    rest = ((1 - ratio * p) / others).clamp(min=0.0)
    if kind == "kl":
        return -p * ratio.clamp(min=1e-12).log() - others * rest.clamp(min=1e-12).log()
    if kind == "tv":
        return (p * (ratio - 1).abs() + others * (rest - 1).abs()) / 2
    if kind == "chi2":
        return p * (ratio - 1) ** 2 + others * (rest - 1) ** 2
    raise ValueError(f"unknown divergence '{kind}'; use one of {', '.join(DIVERGENCES)}")


@torch.no_grad()
def band(
    old_logp: Float[Tensor, "*S"], divergence: str = "kl", delta: float = 0.05, relax: bool = False, eps_low: float = 0.2, eps_high: float = 0.28,
    upper_max: float = 100.0,
) -> Band:  # fmt: skip
    """Equations 2-6: the ratios within divergence `delta` of the old policy, as detached bounds of `old_logp`'s shape.

    `relax` widens the band to at least [1 - eps_low, 1 + eps_high]. Solved in float64 whatever the input. Raises ValueError for another divergence.
    """
    if divergence not in DIVERGENCES:
        raise ValueError(f"unknown divergence '{divergence}'; use one of {', '.join(DIVERGENCES)}")
    logp = old_logp.double().clamp(max=0.0)
    p = logp.exp()
    inner = logp.clamp(math.log(EDGE), -EDGE)
    lower, upper = _interior(inner, divergence, delta)
    certain = {"kl": math.exp(-delta), "tv": max(1 - delta, 0.0), "chi2": 1.0}[divergence]
    likely, rare = -torch.expm1(logp) < EDGE, p < EDGE
    lower = torch.where(rare, 0.0, torch.where(likely, certain, lower))
    upper = torch.where(rare, 1 / p.clamp(min=1e-12), torch.where(likely, 1.0, upper))
    if relax:
        lower, upper = lower.clamp(max=1 - eps_low), upper.clamp(min=1 + eps_high)
    return Band(lower.clamp(0.0, 1.0).to(old_logp.dtype), upper.clamp(1.0, upper_max).to(old_logp.dtype))


def _interior(logp: Tensor, kind: str, delta: float) -> Band:
    """Equation 3 for probabilities away from 0 and 1: closed forms for TV and chi-square, bisection for KL."""
    p, others = logp.exp(), -torch.expm1(logp)
    if kind != "kl":
        width = delta / p if kind == "tv" else (delta * others / p).sqrt()
        return Band((1 - width).clamp(min=0.0), torch.minimum(1 + width, 1 / p))
    lower = _bisect(logp, delta, torch.zeros_like(p), torch.ones_like(p))
    return Band(lower, _bisect(logp, delta, 1 / p, torch.ones_like(p)))


def _bisect(logp: Tensor, delta: float, far: Tensor, near: Tensor) -> Tensor:
    """The ratio between `far` and `near` (divergence 0) at which the divergence is delta; `far` itself when the whole side is allowed."""
    edge, saturated = far, divergence(logp, far) <= delta
    for _ in range(BISECTIONS):
        middle = (far + near) / 2
        beyond = divergence(logp, middle) > delta
        far, near = torch.where(beyond, middle, far), torch.where(beyond, near, middle)
    return torch.where(saturated, edge, near)


def loss(
    logp: Float[Tensor, "N T"], old_logp: Float[Tensor, "N T"], advantages: Float[Tensor, " N"], mask: Tensor, divergence: str = "kl",
    delta: float = 0.05, relax: bool = False, eps_low: float = 0.2, eps_high: float = 0.28, upper_max: float = 100.0,
) -> LossValue:  # fmt: skip
    """Equation 7: the token mean of max(-A rho, -A clip(rho, lower, upper)) with the bounds of `band`."""
    bounds = band(torch.where(mask.bool(), old_logp, torch.zeros_like(old_logp)), divergence, delta, relax, eps_low, eps_high, upper_max)
    value = clipped(token_ratio(logp, old_logp, mask), broadcast(advantages, mask), bounds.lower, bounds.upper)
    return LossValue(aggregate(-value, mask, "token_mean"))


@dataclass
class BandClip:
    """The clipped surrogate whose bounds are the band of every token's old probability."""

    divergence: str = "kl"  # kl (old to new), tv or chi2
    delta: float = 0.05  # radius of the trust region, > 0
    relax: bool = False  # widen the band to at least [1 - eps_low, 1 + eps_high]
    eps_low: float = 0.2  # in [0,1], used when relax
    eps_high: float = 0.28  # >= 0, used when relax
    upper_max: float = 100.0  # largest ratio allowed at all, >= 1
    aggregation: str = "token_mean"  # token_mean, seq_mean or constant (divided by the batch's horizon)

    needs = frozenset({"logp"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        mask = batch.counted
        if "band_lower" not in batch.signals:  # the bounds depend on the old policy alone: once a batch, not once an epoch
            bounds = band(batch.logp, self.divergence, self.delta, self.relax, self.eps_low, self.eps_high, self.upper_max)
            batch.signals |= {"band_lower": bounds.lower, "band_upper": bounds.upper}
        lower, upper = batch.signals["band_lower"], batch.signals["band_upper"]
        ratio = token_ratio(new.logp, batch.logp, mask)
        value = aggregate(-clipped(ratio, batch.advantage, lower, upper), mask, self.aggregation, batch.horizon)
        return Loss(value, ratio_metrics(ratio, lower, upper, mask))


METHOD = GRPO.but(
    name="bandpo",
    paper=Paper(
        "BandPO: Bridging Trust Regions and Ratio Clipping via Probability-Aware Bounds for LLM Reinforcement Learning", "2603.04918", 2026
    ),
    summary="each token's clip bounds are the ratios that an f-divergence trust region allows it: wide for rare tokens, narrow for likely ones",
    objective=BandClip(),
    regularize=(),
)
