"""HGPO: hierarchy-of-groups policy optimization (arXiv:2602.22817).

Stepwise group methods compare all steps of a task that share the present state. When the policy also remembers the last K states, two such steps
can have different contexts, and the comparison is biased. HGPO places each step in nested groups, by the present state alone up to the last K + 1
states; deeper groups are less biased but smaller. Their relative advantages are mixed with weights that grow with depth; groups too small to
compare are skipped. Against GRPO it changes the credit. Equations 1-6 from the authors' code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.seams.groups import group_mean, group_size, group_std
from anypo.seams.states import EPS, Ids, Steps, depth_advantages, returns, state_ids

if TYPE_CHECKING:
    from anypo.run import Run


def mixture(items: Float[Tensor, "S D"], depth: Int[Tensor, " D"], alpha: float = 1.0) -> Steps:
    """Equations 5-6: the items that are not exactly 0, weighted by (depth + 1)^alpha; 0 where there is none."""
    weight = (depth + 1.0).to(items) ** alpha * (items != 0)
    return (weight * items).sum(1) / (weight.sum(1) + EPS)


def advantages(returns: Steps, group: Ids, traj: Ids, obs: Ids, K: int = 2, alpha: float = 1.0, mode: str = "mean_std_norm") -> Steps:
    """Equations 2-6 -> [S]."""
    found = depth_advantages(returns, group, traj, obs, K, mode).A
    return mixture(found, torch.arange(1, K + 2), alpha)


def base_group(
    returns: Steps, group: Ids, traj: Ids, obs: Ids, total_reward: Steps, K: int = 2, alpha: float = 1.0, mode: str = "mean_std_norm"
) -> Steps:
    """Equations 2-6 with the trajectory's total reward, relative to the task's step rows, as one more item of depth 0 (equation 4)."""
    lone = group_size(group) == 1
    centred = torch.where(lone, total_reward, total_reward - group_mean(total_reward, group))
    if mode == "mean_std_norm":
        spread = group_std(total_reward, group, ddof=1)
        centred = centred / (torch.where(lone, torch.ones_like(spread), spread) + EPS)
    items = torch.cat([centred[:, None], depth_advantages(returns, group, traj, obs, K, mode).A], dim=1)
    return mixture(items, torch.arange(K + 2), alpha)


@dataclass
class HierarchyOfGroups:
    """The mixture over nested groups of every turn, given to all actions of the turn. Needs the states and rewards of turns (an agent task)."""

    memory: int = 2  # K, states that the policy remembers beside the present one, >= 0
    alpha: float = 1.0  # how much more deeper groups weigh, >= 0
    gamma: float = 0.95  # discount a turn, in [0,1]
    mode: str = "mean_std_norm"  # or mean_norm
    base: bool = False  # add the trajectory's own group-relative reward as an item of depth 0

    compares_group = True

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        if batch.segment is None or not {"state_id", "turn_state"} & set(batch.signals):
            raise ValueError(
                "hgpo compares turns in the same state, but this task has no turns; use an agent task such as calculator or grid"
            )
        states = state_ids(batch)
        traj, turn = (states >= 0).nonzero(as_tuple=True)
        rewards = batch.signal("turn_reward").double()
        group, obs, gain = batch.group[traj], states[traj, turn], returns(rewards[traj, turn], traj, self.gamma)
        if self.base:
            value = base_group(gain, group, traj, obs, rewards.sum(1)[traj], self.memory, self.alpha, self.mode)
        else:
            value = advantages(gain, group, traj, obs, self.memory, self.alpha, self.mode)
        table = torch.zeros(states.shape, dtype=value.dtype)
        table[traj, turn] = value
        return (table.gather(1, batch.segment.clamp(max=states.shape[1] - 1)) * batch.mask).to(batch.logp.dtype)


METHOD = GRPO.but(
    name="hgpo",
    paper=Paper("Hierarchy-of-Groups Policy Optimization for Long-Horizon Agentic Tasks", "2602.22817", 2026),
    summary="turns are compared in nested groups of ever longer common history, mixed with weights that grow with depth",
    credit=HierarchyOfGroups(),
).set("regularize.0.beta", 0.01)
