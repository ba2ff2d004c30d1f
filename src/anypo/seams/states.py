"""Turns that begin in the same state, compared with one another: by the present state alone (as in GiGPO), or by the last few."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.seams.groups import group_max, group_mean, group_min, group_size, group_std

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
