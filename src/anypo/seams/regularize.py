"""Regularizers: what else is in the loss. Each is an objective of its own, added to the main one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from numpy.typing import NDArray
from torch import Tensor

from anypo.batch import Batch
from anypo.policy import Gradient, Loss, Signals
from anypo.seams.groups import masked_mean, masked_std
from anypo.seams.objective import aggregate, kl_estimate

if TYPE_CHECKING:
    from anypo.run import Run


def gaussian_kl(mean: Tensor, log_std: Tensor, other_mean: Tensor, other_log_std: Tensor) -> Tensor:
    """Exact KL from the diagonal Gaussian of the first two [...,D] to that of the last two, summed over D. With equal deviations it is the sum of
    (mean - other_mean)^2 / (2 std^2)."""
    difference = log_std - other_log_std
    shift = ((mean - other_mean) * (-other_log_std).exp()) ** 2
    return 0.5 * ((2 * difference).exp() + shift - 1 - 2 * difference).sum(-1)


@dataclass
class KLPenalty:
    """beta times the estimated KL from the current policy to the frozen reference."""

    beta: float = 0.04  # >= 0; 0 switches it off and no reference is kept
    estimator: str = "k3"  # k1, k2 or k3
    aggregation: str = "seq_mean"  # token_mean, seq_mean or constant
    max_len: int | None = None  # the constant of aggregation "constant"; None = the task's limit (`batch.limit`)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"logp", "ref_logp"}) if self.beta else frozenset()

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        if not self.beta:
            return Loss(batch.logp.new_zeros(()))
        mask = batch.counted
        kl = kl_estimate(new.logp, batch.signal("ref_logp"), mask, self.estimator)
        return Loss(
            self.beta * aggregate(kl, mask, self.aggregation, self.max_len or batch.limit), {"kl": float(masked_mean(kl.detach(), mask))}
        )


@dataclass
class EntropyBonus:
    """Minus coefficient times the mean entropy of the policy at the batch's actions."""

    coefficient: float = 0.01  # >= 0

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"entropy"}) if self.coefficient else frozenset()

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        if not self.coefficient:
            return Loss(batch.logp.new_zeros(()))
        entropy = masked_mean(new.entropy, batch.counted)
        return Loss(-self.coefficient * entropy, {"entropy": float(entropy.detach())})


def value_loss(value: Tensor, returns: Tensor, mask: Tensor, old_value: Tensor | None = None, clip: float | None = None) -> Tensor:
    """Mean squared error of the critic over the mask, [N,T] each; with `clip` the larger of the plain and the clipped error (PPO, eq. 9 and code)."""
    error = (value - returns) ** 2
    if clip is not None and old_value is not None:
        moved = old_value + (value - old_value).clamp(-clip, clip)
        error = torch.maximum(error, (moved - returns) ** 2)
    return masked_mean(error, mask)


@dataclass
class ValueLoss:
    """Critic regression onto the returns that the credit left in `batch.signals["returns"]` [N,T]."""

    coefficient: float = 0.5  # >= 0
    clip: float | None = None  # > 0, how far a value may move from the old one; None = no clipping

    needs = frozenset({"value"})
    wants = frozenset({"returns"})  # left in the batch by the credit

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        returns = batch.signal("returns")
        old_value = batch.signals.get("old_value")
        loss = value_loss(new.value, returns, batch.counted, old_value, self.clip)
        residual = loss.detach() if self.clip is None else masked_mean((new.value.detach() - returns) ** 2, batch.counted)
        spread = float(masked_std(returns, batch.counted)) ** 2
        explained = 1 - float(residual) / spread if spread > 0 else 0.0
        return Loss(self.coefficient * loss, {"value_loss": float(loss.detach()), "explained_variance": explained})

    def gradient(self, batch: Batch, new: dict[str, NDArray], run: Run) -> Gradient | None:
        """In closed form: 2 coefficient (value - return) / count, without clipping alone."""
        if self.clip is not None:
            return None
        returns = batch.signal("returns").numpy()
        error, count = new["value"] - returns, returns.size
        loss = float((error * error).sum()) / count
        spread = float(((returns - returns.sum() / count) ** 2).sum()) / count
        explained = 1 - loss / spread if spread > 0 else 0.0
        slope = 2 * self.coefficient / count * error
        return Gradient(self.coefficient * loss, {"value": slope}, {"value_loss": loss, "explained_variance": explained})
