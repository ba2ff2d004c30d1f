"""Objectives: one surrogate from which most papers' losses are composed.

A ratio (per token, per sequence, ...), bounds as numbers or tensors [N,T], a rule at the bound, an aggregation. The functions are the parts;
`ClippedSurrogate` is the component that PPO, GRPO and their nearest relatives share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor

from anypo.batch import Batch
from anypo.policy import Gradient, Loss, Signals
from anypo.seams.groups import broadcast, masked_mean, whole

if TYPE_CHECKING:
    from anypo.run import Run

AGGREGATIONS = ("token_mean", "seq_mean", "constant")
LOG_RATIO_LIMIT = 20.0  # exp(20) is already far outside every trust region; keeps exp finite


def log_ratio(logp: Tensor, old_logp: Tensor, mask: Tensor) -> Float[Tensor, "N T"]:
    """log pi_new - log pi_old [N,T], 0 outside the mask (padding may hold -inf) and clamped to +-20."""
    if whole(mask):
        return (logp - old_logp).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    inside = mask.bool()
    zero = logp.new_zeros(())
    difference = torch.where(inside, logp, zero) - torch.where(inside, old_logp, zero)
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def token_ratio(logp: Tensor, old_logp: Tensor, mask: Tensor) -> Float[Tensor, "N T"]:
    """pi_new / pi_old of each action; 1 outside the mask."""
    return log_ratio(logp, old_logp, mask).exp()


def clipped(
    ratio: Tensor, advantage: Tensor, low: float | Tensor, high: float | Tensor, dual_clip: float | None = None
) -> Float[Tensor, "N T"]:
    """The pessimistic surrogate min(ratio A, clip(ratio, low, high) A) to maximize (arXiv:1707.06347 eq. 7).

    `low` and `high` bound the ratio itself (0.8 and 1.2, not 0.2), as numbers or tensors [N,T].
    With `dual_clip` c > 1 the value is at least c A where A < 0.
    """
    bounded = ratio.clamp(_like(low, ratio), _like(high, ratio))
    value = torch.minimum(ratio * advantage, bounded * advantage)
    if dual_clip is not None:
        value = torch.where(advantage < 0, torch.maximum(value, dual_clip * advantage), value)
    return value


def outside(ratio: Tensor, advantage: Tensor, low: float | Tensor, high: float | Tensor) -> Bool[Tensor, "N T"]:
    """Where the clipped surrogate has no gradient: the ratio already left the band on the side the advantage pushes to."""
    return ((advantage > 0) & (ratio > high)) | ((advantage < 0) & (ratio < low))


def aggregate(values: Tensor, mask: Tensor, how: str, max_len: int | None = None) -> Tensor:
    """Per-action values [N,T] as one number.

    "token_mean": mean over the batch's actions. "seq_mean": mean over rows of each row's mean. "constant": sum / (rows * max_len).
    Rows without actions count in none of them. Raises ValueError for another name, or for "constant" without `max_len`.
    """
    if how == "token_mean":
        return masked_mean(values, mask)
    inside = mask.bool()
    values = torch.where(inside, values, torch.zeros_like(values))
    length = inside.sum(dim=1)
    rows = (length > 0).sum().clamp(min=1)
    if how == "seq_mean":
        return (values.sum(dim=1) / length.clamp(min=1)).sum() / rows
    if how == "constant" and max_len:
        return values.sum() / (rows * max_len)
    if how == "constant":
        raise ValueError("aggregation 'constant' needs max_len, the constant number of actions to divide by")
    raise ValueError(f"unknown aggregation '{how}'; use one of {', '.join(AGGREGATIONS)}")


def kl_estimate(logp: Tensor, ref_logp: Tensor, mask: Tensor, kind: str = "k3") -> Float[Tensor, "N T"]:
    """Per-action estimate of KL(new || ref) from the sampled action: k1 = log ratio, k2 = half its square, k3 = exp(-l) - 1 + l >= 0.

    Source: Schulman, "Approximating KL divergence" (2020). Raises ValueError for another kind.
    """
    difference = log_ratio(logp, ref_logp, mask)
    if kind == "k1":
        return difference
    if kind == "k2":
        return 0.5 * difference**2
    if kind == "k3":
        return torch.exp(-difference) - 1 + difference
    raise ValueError(f"unknown KL estimator '{kind}'; use k1, k2 or k3")


def ratio_metrics(ratio: Tensor, low: float | Tensor, high: float | Tensor, mask: Tensor) -> dict[str, float]:
    """Numbers for the log: how many ratios left the band, and the estimated KL from the old policy to the new."""
    with torch.no_grad():
        inside = ratio.detach().flatten() if whole(mask) else ratio.detach()[mask.bool()]
        bounds = [b.expand_as(ratio)[mask.bool()] if isinstance(b, Tensor) else b for b in (low, high)]
        count = max(len(inside), 1)
        left = torch.count_nonzero((inside < bounds[0]) | (inside > bounds[1]))
        return {"clip_fraction": int(left) / count, "approx_kl": float((inside - 1 - inside.log()).sum()) / count}


@dataclass
class ClippedSurrogate:
    """Clipped token-ratio surrogate over the batch's advantages [N,T] (PPO, GRPO, Dr. GRPO, DAPO)."""

    clip_low: float = 0.2  # the ratio may fall to 1 - clip_low, in [0,1]
    clip_high: float = 0.2  # and rise to 1 + clip_high, >= 0
    aggregation: str = "seq_mean"  # token_mean, seq_mean or constant
    dual_clip: float | None = None  # > 1, bound for negative advantages; None = off
    max_len: int | None = None  # the constant of aggregation "constant"; None = the task's limit (`batch.limit`)

    needs = frozenset({"logp"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        mask = batch.counted
        ratio = token_ratio(new.logp, batch.logp, mask)
        low, high = 1 - self.clip_low, 1 + self.clip_high
        value = clipped(ratio, batch.advantage, low, high, self.dual_clip)
        loss = aggregate(-value, mask, self.aggregation, self.max_len or batch.limit)
        return Loss(loss, ratio_metrics(ratio, low, high, mask))

    def gradient(self, batch: Batch, new: dict[str, NDArray], run: Run) -> Gradient | None:
        """In closed form: -ratio * advantage / count where the ratio has not left the band on the side the advantage pushes to, else 0."""
        if self.aggregation != "token_mean" or self.dual_clip is not None:
            return None
        assert batch.advantage is not None
        advantage, count = batch.advantage.numpy(), batch.advantage.numel()
        ratio = np.exp((new["logp"] - batch.logp.numpy()).clip(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
        low, high = 1 - self.clip_low, 1 + self.clip_high
        above, below = ratio > high, ratio < low
        gain = ratio * advantage
        value = np.minimum(gain, ratio.clip(low, high) * advantage)
        slope = np.where(np.where(advantage > 0, above, below), 0, gain / -count)
        metrics = {
            "clip_fraction": int(np.count_nonzero(above | below)) / count,
            "approx_kl": float((ratio - 1 - np.log(ratio)).sum()) / count,
        }
        return Gradient(-float(value.sum()) / count, {"logp": slope}, metrics)


def sequence_reinforce(logp: Float[Tensor, "N T"], mask: Tensor, advantages: Tensor) -> Tensor:
    """REINFORCE, on-policy: minus the mean over non-empty rows of advantage times the row's log-prob. `advantages` [N] or [N,T] -> scalar."""
    inside = torch.where(mask.bool(), logp, torch.zeros_like(logp))
    weights = broadcast(advantages, mask) if advantages.dim() == 1 else torch.where(mask.bool(), advantages, torch.zeros_like(advantages))
    return -(weights * inside).sum() / (mask.sum(1) > 0).sum().clamp(min=1)


@dataclass
class SequenceReinforce:
    """Advantage-weighted log-probability of the whole response."""

    needs = frozenset({"logp"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        return Loss(sequence_reinforce(new.logp, batch.counted, batch.advantage))


def _like(bound: float | Tensor, ratio: Tensor) -> Tensor:
    return bound if isinstance(bound, Tensor) else ratio.new_tensor(bound)
