"""GDPO: group reward-decoupled normalization policy optimization (arXiv:2601.05242).

With several rewards GRPO sums them first and normalizes the sum, so distinct combinations collapse onto the same advantage. GDPO normalizes every
reward separately inside the group, adds them with weights, and normalizes the total over the whole batch so that its scale does not grow with
their number. An easy reward can be made conditional on a hard one, so that it cannot be farmed. The two usual baselines, combining rewards
first or advantages first, are the same pipeline with steps left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.seams.groups import broadcast, standardize
from anypo.seams.reward import objectives

if TYPE_CHECKING:
    from anypo.run import Run

Rewards = Float[Tensor, "N K"]
Group = Int[Tensor, " N"]
Condition = Sequence[float]  # (easy objective, hard objective, threshold)


def condition(reward: Rewards, conditions: Sequence[Condition]) -> Rewards:
    """Equation 1: an easy reward counts only where the hard one, as it was given, reaches its threshold. Raises ValueError for an unknown one."""
    out = reward.clone()
    for easy, hard, threshold in conditions:
        missing = [int(k) for k in (easy, hard) if not 0 <= k < reward.shape[1]]
        if missing:
            raise ValueError(f"a condition names objective {missing[0]}, but there are {reward.shape[1]}, numbered from 0")
        out[:, int(easy)] = torch.where(reward[:, int(hard)] >= threshold, reward[:, int(easy)], torch.zeros_like(reward[:, 0]))
    return out


def advantages(
    reward: Rewards, group: Group, weights: Tensor | Sequence[float], ddof: int = 0, eps: float = 1e-6, batch_norm: bool = True,
    conditions: Sequence[Condition] = (),
) -> Float[Tensor, " N"]:  # fmt: skip
    """Equations 1-4 -> [N]. `batch_norm` is equation 4, over all rows of the batch, those without an advantage included."""
    total = advantage_combination(condition(reward, conditions), group, weights, ddof, eps)
    if not batch_norm:
        return total
    return standardize(total, torch.zeros_like(group), ddof, eps)


def advantage_combination(
    reward: Rewards, group: Group, weights: Tensor | Sequence[float], ddof: int = 0, eps: float = 1e-6
) -> Float[Tensor, " N"]:
    """Equations 2-3: normalize each reward in its group, then add with weights."""
    return standardize(reward, group, ddof, eps) @ torch.as_tensor(weights, dtype=reward.dtype)


def reward_combination(
    reward: Rewards, group: Group, weights: Tensor | Sequence[float], ddof: int = 0, eps: float = 1e-6
) -> Float[Tensor, " N"]:
    """The GRPO way: add the weighted rewards first, then normalize the sum in its group."""
    return standardize(reward @ torch.as_tensor(weights, dtype=reward.dtype), group, ddof, eps)


@dataclass
class DecoupledNormalization:
    """Every reward normalized by itself in its group, added with weights, normalized over the batch."""

    weights: tuple[float, ...] | None = None  # priorities of the K rewards; None = all 1
    ddof: int = 0  # 0 population, 1 sample standard deviation
    eps: float = 1e-6  # > 0
    batch_norm: bool = True  # equation 4
    conditions: tuple[tuple[float, ...], ...] = ()  # (easy objective, hard objective, threshold) each

    compares_group = True

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        reward = objectives(batch)
        weights = self.weights or (1.0,) * reward.shape[1]
        if len(weights) != reward.shape[1]:
            raise ValueError(f"{len(weights)} weights for {reward.shape[1]} rewards; give one weight for each reward")
        total = advantages(reward, batch.group, weights, self.ddof, self.eps, self.batch_norm, self.conditions)
        return broadcast(total, batch.mask)


METHOD = GRPO.but(
    name="gdpo",
    paper=Paper("GDPO: Group reward-Decoupled Normalization Policy Optimization for Multi-reward RL Optimization", "2601.05242", 2026),
    summary="several rewards are normalized one by one before they are added",
    credit=DecoupledNormalization(),
)
