"""Replay: what off-policy methods roll out into, and learn from.

A buffer holds single actions as rows of numbers, so that drawing a minibatch is one gather; the oldest rows are overwritten. `Replay` is the rollout
component that fills it and deals minibatches. Left out: priorities and multi-step returns, which the rows that need them bring.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.task import Prompt

if TYPE_CHECKING:
    from anypo.run import Run


class ReplayBuffer:
    """Up to `capacity` rows with named parts, each a tensor [M,...]; storage grows by doubling. Integers and booleans come back as they went in."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"the capacity of a replay buffer must be at least 1, not {capacity}")
        self.capacity, self.filled, self.next_row = capacity, 0, 0
        self.layout: dict[str, tuple[list[int], str]] = {}  # name -> shape of one entry, dtype
        self.rows = torch.empty(0, 0)

    def __len__(self) -> int:
        return self.filled

    def add(self, parts: dict[str, Tensor]) -> None:
        """Rows of several tensors [M,...] that agree in M; the first call fixes names and shapes."""
        if not self.layout:
            self.layout = {name: (list(value.shape[1:]), str(value.dtype).removeprefix("torch.")) for name, value in parts.items()}
        new = torch.cat([parts[name].reshape(len(parts[name]), -1).to(torch.float32) for name in self.layout], dim=1)[-self.capacity :]
        self._make_room(min(self.capacity, self.filled + len(new)), new.shape[1])
        where = (self.next_row + torch.arange(len(new))) % self.capacity
        self.rows[where] = new
        self.next_row = int((self.next_row + len(new)) % self.capacity)
        self.filled = min(self.capacity, self.filled + len(new))

    def take(self, index: Tensor) -> dict[str, Tensor]:
        """The named parts of the rows `index` [B], each [B,...]."""
        picked, start, parts = self.rows[index], 0, {}
        for name, (shape, kind) in self.layout.items():
            width = int(torch.Size(shape).numel())
            part = picked[:, start : start + width].reshape(len(index), *shape)
            parts[name] = part if kind == "float32" else part.to(getattr(torch, kind))
            start += width
        return parts

    def _make_room(self, wanted: int, width: int) -> None:
        if len(self.rows) < wanted:
            larger = torch.empty(min(self.capacity, max(wanted, 2 * len(self.rows), 1024)), width)
            if self.filled:
                larger[: self.filled] = self.rows[: self.filled]
            self.rows = larger

    def state_dict(self) -> dict[str, Any]:
        return {"layout": self.layout, "filled": self.filled, "next_row": self.next_row, "rows": self.rows[: self.filled].clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.layout, self.filled, self.next_row, self.rows = state["layout"], state["filled"], state["next_row"], state["rows"].clone()


@dataclass
class Replay:
    """A few steps of every environment into the buffer, then minibatches out of it. Where the task brings recorded data, the buffer is filled with
    it once and no step is collected: offline learning is the same loop with a fixed buffer."""

    steps: int = 64  # actions of each environment between updates, >= 1
    warmup: int = 1000  # actions in the buffer before the first update, >= 0
    capacity: int = 1_000_000  # actions the buffer holds, >= 1
    batch_size: int = 256  # actions in a minibatch, >= 1
    updates_per_action: float = 1.0  # minibatches dealt for every collected action, > 0
    extra: tuple[str, ...] = ()  # further signals [N,T,...] of the batch to keep
    buffer: ReplayBuffer | None = field(default=None, init=False, repr=False)

    needs = frozenset({"batch_next_context"})

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        """Fresh trajectories, `steps` actions of every prompt."""
        return run.collect([prompt.but(max_actions=self.steps) for prompt in prompts])

    def is_fixed(self, run: Run) -> bool:
        """Whether the task brings recorded steps, so that nothing is collected; fills the buffer with them once."""
        if getattr(run.task, "data", None) is None:
            return False
        if self.buffer is None:
            self.remember(run.task.dataset(run))  # type: ignore[attr-defined]
        return True

    def remember(self, batch: Batch) -> None:
        """Put every counted action of a batch with its reward [N,T] into the buffer."""
        assert batch.reward is not None and batch.terminated is not None
        if not batch.reward_is_dense:
            raise ValueError("a replay buffer needs one reward for each action; this task gives one for each trajectory")
        missing = [name for name in self.extra if name not in batch.signals]
        if missing:
            hint = "; let the environment report info['cost'] at every step, or take PointCircle-v0" if missing[0] == "cost" else ""
            raise ValueError(f"this method learns from the {missing[0]} of every action, and the task gives none{hint}")
        if self.buffer is None:
            self.buffer = ReplayBuffer(self.capacity)
        chosen = batch.counted
        parts = {"context": batch.context, "action": batch.action, "reward": batch.reward, "terminated": batch.terminated}
        parts |= {name: batch.signal(name) for name in ("next_context", *self.extra)}
        self.buffer.add({name: value[chosen] for name, value in parts.items()})

    def minibatches(self, run: Run, fresh: int) -> Iterator[Batch]:
        """Random minibatches for `fresh` new actions, each a batch of B trajectories of one action; none before the warm-up is over, which recorded
        steps do not need."""
        recorded = getattr(run.task, "data", None) is not None
        if self.buffer is None or len(self.buffer) < max(0 if recorded else self.warmup, 1):
            return
        for _ in range(max(1, round(fresh * self.updates_per_action))):
            yield self.draw(run)

    def draw(self, run: Run) -> Batch:
        """One minibatch."""
        assert self.buffer is not None
        index = torch.randint(len(self.buffer), (self.batch_size,), generator=run.generator)
        parts = {name: value.unsqueeze(1) for name, value in self.buffer.take(index).items()}
        action, mask = parts.pop("action"), torch.ones(self.batch_size, 1, dtype=torch.bool)
        return Batch(
            action=action, mask=mask, logp=torch.zeros(mask.shape), group=index, context=parts.pop("context"), reward=parts.pop("reward"),
            terminated=parts.pop("terminated"), signals=parts,
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        return {"buffer": self.buffer.state_dict() if self.buffer is not None else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.buffer = None
        if state["buffer"] is not None:
            self.buffer = ReplayBuffer(self.capacity)
            self.buffer.load_state_dict(state["buffer"])
