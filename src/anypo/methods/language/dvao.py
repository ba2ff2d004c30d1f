"""DVAO: dynamic variance-adaptive advantage optimization (arXiv:2605.25604).

GRPO with several rewards. Adding the rewards before they are normalized lets partly cancelling rewards blow up the advantage; adding normalized
rewards with fixed weights keeps a saturated objective at full weight. DVAO adds normalized rewards with weights proportional to each reward's
standard deviation inside the group: what separates the responses now counts, what is saturated vanishes. The advantage never exceeds, in any
row, the one of the summed rewards. Equations 1-3 and the bounds from the abstract and a transcription of the paper; the form of `sensitivity` is
[derived]. A reward of pure noise has a high deviation too and is weighted up: choose its base weight with care. Small groups (4 or fewer) give
noisy weights.
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
from anypo.seams.groups import broadcast, group_std, standardize
from anypo.seams.objective import ClippedSurrogate
from anypo.seams.reward import objectives

if TYPE_CHECKING:
    from anypo.run import Run

Weights = Tensor | Sequence[float]


def adaptive_weights(
    reward: Float[Tensor, "N K"], group: Int[Tensor, " N"], weights: Weights, eps: float = 1e-8, ddof: int = 0
) -> Float[Tensor, "N K"]:
    """Equation 2: base weight times the reward's standard deviation in each row's group, scaled to sum to 1; all 0 where no reward varies."""
    spread = torch.as_tensor(weights, dtype=reward.dtype) * group_std(reward, group, ddof)
    total = spread.sum(dim=1, keepdim=True)
    return torch.where(total > 0, spread / (total + eps).clamp(min=torch.finfo(reward.dtype).tiny), torch.zeros_like(spread))


def advantages(
    reward: Float[Tensor, "N K"], group: Int[Tensor, " N"], weights: Weights, eps: float = 1e-8, ddof: int = 0
) -> Float[Tensor, " N"]:
    """Equations 1-3: the rewards normalized one by one in their group, added with the adaptive weights."""
    return (adaptive_weights(reward, group, weights, eps, ddof) * standardize(reward, group, ddof, eps)).sum(dim=1)


def sensitivity(reward: Float[Tensor, "G K"], weights: Weights) -> Float[Tensor, "G K"]:
    """dA_i/dR_ik inside one group whose rewards vary (eps 0, population std): w_k/S (1 - 1/G - A_i A_ik/G), S = sum of w_l sigma_l.

    The cross term A_i A_ik couples the objectives: a row that already stands out gains less from one more unit of any reward.
    """
    base = torch.as_tensor(weights, dtype=reward.dtype)
    group = torch.zeros(len(reward), dtype=torch.int64)
    each = standardize(reward, group, ddof=0, eps=0.0)
    total = advantages(reward, group, base, eps=0.0, ddof=0)
    scale = (base * group_std(reward, group, ddof=0)[0]).sum()
    return base / scale * (1 - 1 / len(reward) - total[:, None] * each / len(reward))


@dataclass
class VarianceAdaptive:
    """Rewards normalized one by one, added with weights that follow their standard deviation in the group."""

    weights: tuple[float, ...] | None = None  # base weights of the K rewards, > 0; None = 1/K each
    eps: float = 1e-8  # >= 0, in denominators alone
    ddof: int = 0  # 0 population (the bounds hold for it), 1 sample standard deviation

    compares_group = True

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        reward = objectives(batch)
        count = reward.shape[1]
        base = self.weights or (1 / count,) * count
        if len(base) != count:
            raise ValueError(f"{len(base)} weights for {count} rewards; give credit.weights one number for each reward")
        mean_weight = adaptive_weights(reward, batch.group, base, self.eps, self.ddof).mean(dim=0)
        run.log(**{f"weight/{name}": float(mean_weight[k]) for k, name in enumerate(batch.objectives)})
        return broadcast(advantages(reward, batch.group, base, self.eps, self.ddof), batch.mask)


METHOD = GRPO.but(
    name="dvao",
    paper=Paper("DVAO: Dynamic Variance-adaptive Advantage Optimization for Multi-reward Reinforcement Learning", "2605.25604", 2026),
    summary="several rewards are normalized one by one and weighted by their standard deviation in the group",
    credit=VarianceAdaptive(),
    objective=ClippedSurrogate(clip_low=0.2, clip_high=0.2, aggregation="token_mean"),
).set("select.group_size", 16)
