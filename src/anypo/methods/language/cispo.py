"""CISPO: clipped importance-sampling-weight policy optimization (arXiv:2506.13585, MiniMax-M1).

PPO's clip removes the whole gradient of a token once its ratio leaves the band, which silences the rare, pivotal tokens whose probability moves
most. CISPO clips the importance weight instead and stops its gradient: every token keeps a REINFORCE gradient with a bounded weight. The loss
value is no surrogate of the return.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.language.dapo import METHOD as DAPO
from anypo.policy import Loss, Signals
from anypo.seams.groups import broadcast, masked_mean
from anypo.seams.objective import outside, token_ratio

if TYPE_CHECKING:
    from anypo.run import Run


class LossValue(NamedTuple):
    loss: Tensor  # scalar, differentiable in logp


def loss(
    logp: Float[Tensor, "N T"], old_logp: Float[Tensor, "N T"], mask: Tensor, advantages: Tensor, eps_low: float, eps_high: float
) -> LossValue:
    """Equations 1-2: minus the token mean of sg[clip(ratio, 1-eps_low, 1+eps_high)] A logp. `advantages` [N] or [N,T]."""
    weight = token_ratio(logp, old_logp, mask).detach().clamp(1 - eps_low, 1 + eps_high)
    return LossValue(_weighted(logp, mask, weight, advantages))


def masked_loss(
    logp: Float[Tensor, "N T"], old_logp: Float[Tensor, "N T"], mask: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> LossValue:
    """Equation 4 with the unclipped detached weight: tokens outside PPO's trust region are masked; the gradient is GRPO's clip exactly."""
    weight = token_ratio(logp, old_logp, mask).detach()
    inside = ~outside(weight, _per_token(advantages, mask), 1 - clip_low, 1 + clip_high)
    return LossValue(_weighted(logp, mask, weight * inside, advantages))


def _per_token(advantages: Tensor, mask: Tensor) -> Tensor:
    return broadcast(advantages, mask) if advantages.dim() == 1 else advantages


def _weighted(logp: Tensor, mask: Tensor, weight: Tensor, advantages: Tensor) -> Tensor:
    inside = torch.where(mask.bool(), logp, torch.zeros_like(logp))
    return -masked_mean(weight * _per_token(advantages, mask) * inside, mask)


@dataclass
class ClippedWeight:
    """REINFORCE with clipped, detached importance weights; token mean."""

    eps_low: float = 1.0  # the weight is at least 1 - eps_low, in [0,1]; 1 = no lower bound
    eps_high: float = 0.28  # and at most 1 + eps_high, > 0

    needs = frozenset({"logp"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        mask = batch.counted
        value = loss(new.logp, batch.logp, mask, batch.advantage, self.eps_low, self.eps_high).loss
        ratio = token_ratio(new.logp.detach(), batch.logp, mask)
        truncated = ((ratio < 1 - self.eps_low) | (ratio > 1 + self.eps_high)).to(ratio.dtype)
        return Loss(value, {"truncated_weights": float(masked_mean(truncated, mask))})


METHOD = DAPO.but(
    name="cispo",
    paper=Paper("MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention", "2506.13585", 2025),
    summary="the importance weight is clipped and detached, so that every token keeps a gradient",
    objective=ClippedWeight(),
)
