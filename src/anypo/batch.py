"""Batch: the one data structure that flows through the loop.

A batch is N trajectories by T actions. An action is a token, an environment step, a denoising step or a construction step; nothing here
knows which. Left out on purpose: devices policies, ragged storage and anything a single method needs (that lives in `signals`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor


@dataclass
class Batch:
    """N trajectories of up to T actions, with everything the seams hand to one another.

    Three masks, never to be confused: `valid` is what exists (and is attended to), `mask` is what the policy wrote (and so may be trained),
    `keep` is what counts in the loss and in its denominator (a detached choice of the method; None means `mask`).
    `logp` belongs to the policy that acted; other log-prob sets are named signals (`ref_logp`, `behaviour_logp`, ...).
    """

    action: Tensor  # [N,T] integer tokens or moves, or [N,T,D] continuous
    mask: Tensor  # [N,T] bool, written by the policy
    logp: Tensor  # [N,T] log-prob under the policy that acted, 0 where mask is False
    group: Tensor  # [N] int64, rows compared with one another share a number; adjacency means nothing
    context: Any = None  # what the first action is conditioned on: a tensor [N,...] or a list of length N, read by the policy alone
    valid: Tensor | None = None  # [N,T] bool, positions that exist; None means `mask`
    reward: Tensor | None = None  # [N], [N,K] objectives, or [N,T] dense
    advantage: Tensor | None = None  # [N,T]
    keep: Tensor | None = None  # [N,T] bool; None means `mask`
    segment: Tensor | None = None  # [N,T] int64, turn or segment index
    parent: Tensor | None = None  # [N] int64, the row this one branched from, -1 for a root
    branch_at: Tensor | None = None  # [N] int64, number of leading actions shared with the parent
    terminated: Tensor | None = None  # [N] bool (language) or [N,T] (control): the problem ended
    truncated: Tensor | None = None  # same shape: a limit cut it short
    next_value: Tensor | None = None  # [N,T] value of the true next observation, before an auto-reset
    version: Tensor | None = None  # [N] int64, version of the policy that acted
    objectives: tuple[str, ...] = ()  # names of the K rewards when `reward` is [N,K]; empty when it is [N] or [N,T]
    signals: dict[str, Any] = field(default_factory=dict)  # named extras: tensors [N,...] or lists of length N

    def __len__(self) -> int:
        return self.mask.shape[0]

    @property
    def horizon(self) -> int:
        """T, the padded number of actions."""
        return self.mask.shape[1]

    @property
    def counted(self) -> Tensor:
        """[N,T] bool: the actions that count in a loss (`keep`, else `mask`), never outside `mask`."""
        return self.mask if self.keep is None else self.keep & self.mask

    @property
    def attended(self) -> Tensor:
        """[N,T] bool: the positions that exist (`valid`, else `mask`)."""
        return self.mask if self.valid is None else self.valid

    @property
    def lengths(self) -> Tensor:
        """[N] int64: number of actions the policy wrote in each row."""
        return self.mask.sum(dim=1)

    @property
    def limit(self) -> int:
        """The number of actions a row may have: the largest of the signal `limit` [N] where the task gives it, else the padded length."""
        return int(self.signals["limit"].max()) if "limit" in self.signals else self.horizon

    @property
    def reward_is_dense(self) -> bool:
        """Whether `reward` is [N,T], one number an action, rather than [N] or [N,K]."""
        return self.reward is not None and self.reward.dim() == 2 and not self.objectives

    @property
    def outcome(self) -> Tensor:
        """[N]: one number a row. The reward itself, the sum of its objectives or of its dense values."""
        if "outcome" in self.signals:
            return self.signals["outcome"]
        if self.reward is None:
            raise ValueError("the batch has no reward yet; the reward seam runs before this one")
        return self.reward if self.reward.dim() == 1 else self.reward.sum(dim=1)

    def __getitem__(self, index: Any) -> Batch:
        """The rows named by a slice, a boolean mask [N] or an index tensor; every per-row field and signal follows."""
        if isinstance(index, int):
            index = slice(index, index + 1)
        picked = {name: _take(getattr(self, name), index) for name in PER_ROW}
        return Batch(**picked, objectives=self.objectives, signals={name: _take(value, index) for name, value in self.signals.items()})

    def split(self, sizes: Sequence[int]) -> list[Batch]:
        """The rows in consecutive pieces of these sizes, which sum to their number. Tensors are views; one call a field cuts all pieces."""
        fields_cut = {name: _cut(getattr(self, name), sizes) for name in PER_ROW}
        signals_cut = {name: _cut(value, sizes) for name, value in self.signals.items()}
        return [
            Batch(
                **{name: parts[i] for name, parts in fields_cut.items()},
                objectives=self.objectives,
                signals={name: parts[i] for name, parts in signals_cut.items()},
            )
            for i in range(len(sizes))
        ]

    def but(self, **changes: Any) -> Batch:
        """A copy with some fields replaced; unknown names raise TypeError."""
        return replace(self, **changes)

    def state_dict(self) -> dict[str, Any]:
        """All fields by name, for a component that keeps trajectories between steps; `Batch(**state)` is the inverse."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def signal(self, name: str) -> Any:
        """A named signal, or a sentence that says which one is missing. Raises KeyError."""
        if name not in self.signals:
            have = ", ".join(sorted(self.signals)) or "none"
            raise KeyError(f"this batch carries no signal '{name}' (it has: {have}); declare it in the component's `needs`")
        return self.signals[name]

    @staticmethod
    def concat(batches: Sequence[Batch], pad_action: int = 0) -> Batch:
        """Rows of several batches in one, padded to the longest horizon. Group numbers are kept as they are.

        An optional field or a signal must be present in all or in none of them (`keep`, `valid` and `segment` are filled in).
        """
        horizon = max(b.horizon for b in batches)
        longest = [_fill_optional(b, batches) for b in batches]
        merged = {}
        for f in fields(Batch):
            if f.name in ("signals", "objectives"):
                continue
            values = [getattr(b, f.name) for b in longest]
            merged[f.name] = _join(f.name, values, horizon, [b.horizon for b in batches], pad_action if f.name == "action" else 0)
        names = set().union(*(b.signals for b in batches))
        for name in names:
            lacking = [i for i, b in enumerate(batches) if name not in b.signals]
            if lacking:
                raise ValueError(f"cannot join batches: signal '{name}' is missing from batch {lacking[0]}")
        signals = {n: _join(n, [b.signals[n] for b in batches], horizon, [b.horizon for b in batches], 0) for n in sorted(names)}
        return Batch(**merged, objectives=batches[0].objectives, signals=signals)


PER_ROW = tuple(f.name for f in fields(Batch) if f.name not in ("signals", "objectives"))  # the fields with one entry a row


def whole(mask: Tensor) -> bool:
    """Whether every position of a boolean mask counts (and there are any). Asked on the CPU alone, where small steps gain more than the answer costs."""
    return mask.dtype == torch.bool and mask.device.type == "cpu" and mask.numel() > 0 and bool(mask.all())


def _take(value: Any, index: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, Tensor):
        return value[index]
    if isinstance(index, slice):
        return value[index]
    rows = torch.as_tensor(index)
    rows = rows.nonzero().flatten() if rows.dtype == torch.bool else rows
    return [value[i] for i in rows.tolist()]


def _cut(value: Any, sizes: Sequence[int]) -> Sequence[Any]:
    if value is None:
        return [None] * len(sizes)
    if isinstance(value, Tensor):
        return value.split(list(sizes))
    ends = list(accumulate(sizes, initial=0))
    return [value[start:end] for start, end in pairwise(ends)]


def _fill_optional(batch: Batch, among: Sequence[Batch]) -> Batch:
    changes = {}
    if any(b.keep is not None for b in among) and batch.keep is None:
        changes["keep"] = batch.mask
    if any(b.valid is not None for b in among) and batch.valid is None:
        changes["valid"] = batch.mask
    if any(b.segment is not None for b in among) and batch.segment is None:
        changes["segment"] = torch.zeros_like(batch.mask, dtype=torch.int64)
    return batch.but(**changes) if changes else batch


def _join(name: str, values: list[Any], horizon: int, horizons: list[int], pad: int) -> Any:
    if all(v is None for v in values):
        return None
    if any(v is None for v in values):
        raise ValueError(f"cannot join batches: '{name}' is set in some of them and missing in others")
    if not isinstance(values[0], Tensor):
        return [item for v in values for item in v]
    padded = []
    for value, own in zip(values, horizons, strict=True):
        per_action = value.dim() >= 2 and value.shape[1] == own
        if per_action and own < horizon:
            tail = value.new_full((value.shape[0], horizon - own, *value.shape[2:]), pad)
            value = torch.cat([value, tail], dim=1)
        padded.append(value)
    return torch.cat(padded)
