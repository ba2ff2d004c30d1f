"""SPO: simple policy optimization (arXiv:2401.16025).

PPO's clip stops the gradient outside the band, but nothing pulls a ratio back that left it. SPO is PPO with another loss: a quadratic penalty on
ratio - 1, scaled by |A| / (2 eps), so that every action's objective has its maximum exactly on the border of the band and what lies beyond gets a
corrective gradient. Against PPO it changes the objective alone. Equations 1 to 6 from the paper and its code. Two methods of other papers are called
SPO too: `spo_single` and `spo_segment`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.control.ppo import METHOD as PPO
from anypo.policy import Gradient, Loss, Signals
from anypo.seams.credit import GroupRelative
from anypo.seams.groups import masked_mean
from anypo.seams.objective import LOG_RATIO_LIMIT, token_ratio
from anypo.seams.select import UniformPrompts
from anypo.seams.update import GradientSteps

if TYPE_CHECKING:
    from anypo.run import Run

PerAction = Float[Tensor, "N T"]


class PolicyLoss(NamedTuple):
    loss: Tensor  # scalar, differentiable in logp


class Deviation(NamedTuple):
    mean_abs: Tensor  # mean |ratio - 1|
    fraction_outside: Tensor  # share of actions with |ratio - 1| > eps
    tv_bound: Tensor  # estimate of the mean total variation between the old and the new policy


def objective(ratio: Tensor, advantages: Tensor, eps: float = 0.2) -> Tensor:
    """Equation 1, to maximize: ratio A - |A| (ratio - 1)^2 / (2 eps). Strictly concave in the ratio where A != 0."""
    return ratio * advantages - advantages.abs() * (ratio - 1) ** 2 / (2 * eps)


def policy_loss(logp: PerAction, old_logp: PerAction, advantages: PerAction, mask: Tensor, eps: float = 0.2) -> PolicyLoss:
    """Equation 2: minus the masked mean of the objective; the log-ratio is clamped to +-20."""
    return PolicyLoss(-masked_mean(objective(token_ratio(logp, old_logp, mask), advantages, eps), mask))


def optimal_ratio(advantages: Tensor, eps: float = 0.2) -> Tensor:
    """Equation 4: where each action's objective is largest, 1 + sign(A) eps; 1 where A = 0, which nothing pulls."""
    return 1 + advantages.sign() * eps


def deviation(logp: PerAction, old_logp: PerAction, mask: Tensor, eps: float = 0.2) -> Deviation:
    """How far the ratios are from 1 over the mask, and equation 6: half of the mean |ratio - 1| estimates the total variation."""
    moved = (token_ratio(logp, old_logp, mask) - 1).abs()
    mean = masked_mean(moved, mask)
    return Deviation(mean, masked_mean((moved > eps).to(moved.dtype), mask), mean / 2)


@dataclass
class QuadraticPenalty:
    """The surrogate with a quadratic pull to the border of the band; mean over actions."""

    eps: float = 0.2  # the ratio's optimum is 1 + eps or 1 - eps, > 0

    needs = frozenset({"logp"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        mask = batch.counted
        loss = policy_loss(new.logp, batch.logp, batch.advantage, mask, self.eps).loss
        moved = deviation(new.logp.detach(), batch.logp, mask, self.eps)
        return Loss(loss, {"ratio_deviation": float(moved.mean_abs), "fraction_outside": float(moved.fraction_outside)})

    def gradient(self, batch: Batch, new: dict[str, NDArray], run: Run) -> Gradient:
        """In closed form (equation 3): -ratio (A - |A| (ratio - 1) / eps) / count."""
        assert batch.advantage is not None
        advantage, count = batch.advantage.numpy(), batch.advantage.numel()
        ratio = np.exp((new["logp"] - batch.logp.numpy()).clip(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
        moved, pull = ratio - 1, np.abs(advantage) / self.eps
        value = ratio * advantage - pull / 2 * moved * moved
        away = np.abs(moved)
        metrics = {"ratio_deviation": float(away.sum()) / count, "fraction_outside": int(np.count_nonzero(away > self.eps)) / count}
        return Gradient(-float(value.sum()) / count, {"logp": ratio * (advantage - pull * moved) / -count}, metrics)


METHOD = PPO.but(
    name="spo_simple",
    paper=Paper("Simple Policy Optimization", "2401.16025", 2024),
    summary="PPO with a quadratic penalty on the ratio in place of the clip, which pulls back what left the band",
    objective=QuadraticPenalty(),
)

# On a language model: credit relative to the other attempts at the prompt in place of the critic.
FOR_DOMAIN = {
    "language": METHOD.but(
        domain="language",
        base=None,
        select=UniformPrompts(group_size=8),
        credit=GroupRelative(),
        regularize=(),
        update=GradientSteps(epochs=2, minibatches=2),
    )
}
