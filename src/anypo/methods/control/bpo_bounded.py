"""BPO and GBPO: bounded ratio reinforcement learning (arXiv:2604.18578).

The surrogate advantage is maximized subject to every probability ratio staying in a band around 1. The solution is bang-bang: ratio 1 + eps for the
actions above the old policy's median value, 1 - eps for those below. BPO, which is PPO with another loss, fits the policy to that solution by an
advantage-weighted absolute error; GBPO does so for language models with the group's mean and median. An asymmetric band gives the elite selection of
the cross-entropy method. Equations 1 to 5 from the paper; the value of ties is forced by normalization; how the sign of the median advantage is
estimated from samples, and GBPO's statistics, are [reconstructed].
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Credit, Paper
from anypo.methods.control.ppo import METHOD as PPO
from anypo.policy import Gradient, Loss, Signals
from anypo.seams.credit import GroupRelative, group_relative
from anypo.seams.groups import broadcast, masked_mean
from anypo.seams.objective import LOG_RATIO_LIMIT, ratio_metrics, token_ratio
from anypo.seams.select import UniformPrompts
from anypo.seams.update import GradientSteps

if TYPE_CHECKING:
    from anypo.run import Run

MASS_TOLERANCE = 1e-12  # a sum of probabilities this close below the wanted mass reaches it


class Target(NamedTuple):
    ratio: Tensor  # [...,A]
    threshold: Tensor  # [...] the value that separates the raised actions from the lowered ones
    gain: Tensor  # [...] sum of p (ratio - 1) Q, >= 0


class LossValue(NamedTuple):
    loss: Tensor  # scalar, differentiable in logp


class Advantages(NamedTuple):
    advantages: Tensor  # [N] from the group's mean, standardized
    median_advantages: Tensor  # [N] from the group's median


def target_ratio(prob: Float[Tensor, "*S A"], q_value: Float[Tensor, "*S A"], c_low: float = 0.8, c_high: float = 1.2) -> Target:
    """Equation 2: the ratios in [c_low, c_high] (c_low < 1 < c_high) that maximize sum p ratio Q with sum p ratio = 1. `prob` > 0."""
    mass = (1 - c_low) / (c_high - c_low)
    at_least = (prob[..., None, :] * (q_value[..., None, :] >= q_value[..., :, None])).sum(-1)  # [...,A] mass of {Q >= Q_a}
    threshold = torch.where(at_least >= mass - MASS_TOLERANCE, q_value, float("-inf")).amax(-1, keepdim=True)
    above, below = q_value > threshold, q_value < threshold
    spent = c_high * (prob * above).sum(-1, keepdim=True) + c_low * (prob * below).sum(-1, keepdim=True)
    tie = (1 - spent) / (prob * ~(above | below)).sum(-1, keepdim=True)
    ratio = torch.where(above, c_high, torch.where(below, c_low, tie))
    return Target(ratio, threshold.squeeze(-1), (prob * (ratio - 1) * q_value).sum(-1))


def loss(
    logp: Float[Tensor, "N T"],
    old_logp: Float[Tensor, "N T"],
    advantages: Tensor,
    median_advantages: Tensor,
    mask: Tensor,
    eps: float = 0.2,
) -> LossValue:
    """Equation 5: masked mean of |A| |ratio - (1 + eps sign(median advantage))|. Advantages [N] or [N,T], constants; sign(0) = 0 holds in place."""
    a, centred = (broadcast(x, mask) if x.dim() == 1 else x for x in (advantages.detach(), median_advantages.detach()))
    ratio = token_ratio(logp, old_logp, mask)
    return LossValue(masked_mean(a.abs() * (ratio - (1 + eps * centred.sign())).abs(), mask))


def group_median(values: Float[Tensor, " N"], group: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
    """Median of each row's group, the mean of the two middle values where their number is even."""
    _, index, counts = torch.unique(group, return_inverse=True, return_counts=True)
    order = values.argsort(stable=True)
    ranked = values[order[index[order].argsort(stable=True)]]  # by group, ascending inside
    first = counts.cumsum(0) - counts
    return (0.5 * (ranked[first + (counts - 1) // 2] + ranked[first + counts // 2]))[index]


def gbpo(reward: Float[Tensor, " N"], group: Int[Tensor, " N"], eps: float = 1e-6) -> Advantages:
    """Equation 9: rewards standardized by group (ddof 0), and rewards from the group's median."""
    return Advantages(group_relative(reward, group, eps=eps), reward - group_median(reward, group))


@dataclass
class MedianCentred:
    """An inner credit, beside which the signal `median_advantage` [N,T] tells what lies above the median of the group's rewards or of the batch's
    advantages (equation 8)."""

    inner: Credit = field(default_factory=GroupRelative)
    by: str = "group"  # group (rewards) or batch (advantages)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset(getattr(self.inner, "needs", ()))

    @property
    def compares_group(self) -> bool:
        return self.by == "group"

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        advantage = self.inner(batch, run)
        if self.by == "group":
            reward = batch.outcome
            batch.signals["median_advantage"] = broadcast((reward - group_median(reward, batch.group)).to(advantage.dtype), batch.mask)
        elif self.by == "batch":
            counted = advantage[batch.counted]
            middle = group_median(counted, torch.zeros_like(counted, dtype=torch.int64))[:1].sum()  # 0 when nothing counts
            batch.signals["median_advantage"] = torch.where(batch.mask, advantage - middle, torch.zeros_like(advantage))
        else:
            raise ValueError(f"credit.by is group or batch, not '{self.by}'")
        return advantage


@dataclass
class BoundedRatio:
    """Absolute error between the ratio and its target, weighted by |A|; the target's side is the sign of the signal `median_advantage` where the
    credit left one, else of the advantage itself."""

    eps: float = 0.2  # targets are 1 + eps and 1 - eps, in (0,1)

    needs = frozenset({"logp"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        mask = batch.counted
        centred = batch.signals.get("median_advantage", batch.advantage)
        value = loss(new.logp, batch.logp, batch.advantage, centred, mask, self.eps).loss
        return Loss(value, ratio_metrics(token_ratio(new.logp.detach(), batch.logp, mask), 1 - self.eps, 1 + self.eps, mask))

    def gradient(self, batch: Batch, new: dict[str, NDArray], run: Run) -> Gradient:
        """In closed form: |A| ratio sign(ratio - target) / count."""
        assert batch.advantage is not None
        weight, count = np.abs(batch.advantage.numpy()), batch.advantage.numel()
        centred = batch.signals.get("median_advantage", batch.advantage).numpy()
        ratio = np.exp((new["logp"] - batch.logp.numpy()).clip(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
        error = ratio - (1 + self.eps * np.sign(centred))
        metrics = {
            "clip_fraction": int(np.count_nonzero(np.abs(ratio - 1) > self.eps)) / count,
            "approx_kl": float((ratio - 1 - np.log(ratio)).sum()) / count,
        }
        return Gradient(float((weight * np.abs(error)).sum()) / count, {"logp": weight * ratio * np.sign(error) / count}, metrics)


METHOD = PPO.but(
    name="bpo_bounded",
    paper=Paper("Bounded Ratio Reinforcement Learning", "2604.18578", 2026),
    summary="the ratio is fitted to its best value inside the band, 1 + eps or 1 - eps, by an advantage-weighted absolute error",
    objective=BoundedRatio(),
)

# GBPO: no critic; mean and median of the attempts at the same prompt.
FOR_DOMAIN = {
    "language": METHOD.but(
        domain="language",
        base=None,
        summary="GBPO: the group's attempts above its median are fitted to ratio 1 + eps, the others to 1 - eps",
        select=UniformPrompts(group_size=8),
        credit=MedianCentred(),
        regularize=(),
        update=GradientSteps(epochs=2, minibatches=2),
    )
}
