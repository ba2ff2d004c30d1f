"""HGPO: hierarchy-of-groups policy optimization (arXiv:2602.22817).

Stepwise group methods compare all steps of a task that share the present state. When the policy also remembers the last K states, two such steps
can have different contexts, and the comparison is biased. HGPO places each step in nested groups, by the present state alone up to the last K + 1
states; deeper groups are less biased but smaller. Their relative advantages are mixed with weights that grow with depth; groups too small to
compare are skipped. Against GRPO it changes the credit. Equations 1-6 from the authors' code.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.seams.groups import group_max, group_mean, group_min, group_size, group_std

if TYPE_CHECKING:
    from anypo.run import Run

EPS = 1e-6
MODES = ("mean_std_norm", "mean_norm")
Steps = Float[Tensor, " S"]
Ids = Int[Tensor, " S"]


class Depths(NamedTuple):
    size: Tensor  # [S,K+1] members of each step's group at each depth, 0 where the history is too short
    A: Tensor  # [S,K+1] relative advantage there, 0 for lone members


def returns(step_reward: Steps, traj: Ids, gamma: float = 0.95) -> Steps:
    """Equation 1: discounted return of every step inside its trajectory; rows of a trajectory in time order."""
    out, following = torch.zeros_like(step_reward), _previous(traj.flip(0)).flip(0)
    after = torch.where(following < 0, following, len(traj) - 1 - following)
    for row in range(len(traj) - 1, -1, -1):
        out[row] = step_reward[row] + (gamma * out[after[row]] if after[row] >= 0 else 0.0)
    return out


def depth_advantages(returns: Steps, group: Ids, traj: Ids, obs: Ids, K: int = 2, mode: str = "mean_std_norm") -> Depths:
    """Equations 2-3: the groups of the last 1 ... K+1 observations, and each step's return relative to them. Raises ValueError for another mode."""
    if mode not in MODES:
        raise ValueError(f"unknown mode '{mode}'; use {' or '.join(MODES)}")
    before = _previous(traj)
    defined = torch.ones_like(traj, dtype=torch.bool)
    key = _pair(group, obs)
    sizes, found = [], []
    for depth in range(K + 1):
        if depth:  # the key of the step before, followed by the present observation
            defined = defined[before] & (before >= 0)
            key = _pair(key[before], obs)
        members = torch.where(defined, key, -1 - torch.arange(len(key)))  # a step without this much history is alone
        size = group_size(members)
        relative = _relative(returns, members, mode)
        sizes.append(torch.where(defined, size, torch.zeros_like(size)))
        found.append(torch.where(defined & (size >= 2), relative, torch.zeros_like(relative)))
    return Depths(torch.stack(sizes, dim=1), torch.stack(found, dim=1))


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


def _relative(values: Steps, group: Ids, mode: str) -> Steps:
    """Value minus group mean, over the standard deviation in "mean_std_norm"; exactly 0 in a group of equal values, whatever the rounding."""
    centred = torch.where(group_max(values, group) == group_min(values, group), 0.0, values - group_mean(values, group))
    return centred / (group_std(values, group) + EPS) if mode == "mean_std_norm" else centred


def _previous(traj: Ids) -> Ids:
    """Row of the step before in the same trajectory, -1 for its first."""
    order = traj.argsort(stable=True)
    same = torch.cat([torch.zeros(1, dtype=torch.bool), traj[order][1:] == traj[order][:-1]])[: len(traj)]
    before = torch.full_like(traj, -1)
    before[order[1:]] = torch.where(same[1:], order[:-1], -1)
    return before


def _pair(first: Ids, second: Ids) -> Ids:
    """One number for each distinct pair."""
    return torch.unique(torch.stack([first, second], dim=1), dim=0, return_inverse=True)[1]


def state_ids(batch: Batch) -> Int[Tensor, "N turns"]:
    """An integer for the state before each turn, -1 where there was no such turn: the signal `state_id`, or a checksum of `turn_state`."""
    if "state_id" in batch.signals:
        return batch.signals["state_id"]
    rows: list[list[Any]] = batch.signal("turn_state")
    width = max(map(len, rows))
    return torch.tensor([[zlib.crc32(repr(state).encode()) for state in row] + [-1] * (width - len(row)) for row in rows])


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
