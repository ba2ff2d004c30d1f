"""Action chunks: one decision of the policy is several steps of the environment.

A chunked environment looks like any other: its action holds H actions in a row, its reward is their sum, and an episode that ends inside a chunk
leaves the rest of it unused. So every policy and every method can act in chunks (arXiv:2303.04137 calls H the action horizon).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anypo.domains.control.envs import Environments, Spaces, Step
from anypo.domains.control.replay import Recording


def chunked_spaces(spaces: Spaces, chunk: int) -> Spaces:
    """The spaces of chunks of `chunk` actions. Raises ValueError for discrete actions."""
    if spaces.low is None or spaces.high is None:
        raise ValueError(f"{spaces.name} has discrete actions; action_chunk takes continuous ones, such as those of Pendulum-v1")
    return replace(spaces, low=np.tile(spaces.low, chunk), high=np.tile(spaces.high, chunk), chunk=chunk)


class Chunked:
    """N environments whose action [N,H*D] is H actions, the first first."""

    def __init__(self, inner: Environments, chunk: int) -> None:
        self.inner, self.chunk = inner, chunk
        self.count, self.restorable = inner.count, inner.restorable

    @property
    def failures(self) -> int:
        return self.inner.failures

    def reset(self, row: int, seed: int | None = None) -> NDArray[np.float32]:
        return self.inner.reset(row, seed)

    def step(self, action: NDArray, rows: NDArray[np.int64] | None = None) -> Step:
        chosen = np.arange(self.count) if rows is None else rows
        pieces = action.reshape(len(chosen), self.chunk, -1)
        total: Step | None = None
        going = np.arange(len(chosen))  # positions in `chosen` whose episode goes on
        for i in range(self.chunk):
            step = self.inner.step(pieces[going, i], chosen[going])
            total = step if total is None else _added(total, step, going)
            going = going[~(step.terminated | step.truncated)]
            if not len(going):
                break
        assert total is not None
        return total

    def get_state(self, row: int) -> dict[str, Any]:
        return self.inner.get_state(row)

    def set_state(self, row: int, state: dict[str, Any]) -> NDArray[np.float32]:
        return self.inner.set_state(row, state)


def _added(total: Step, step: Step, rows: NDArray[np.int64]) -> Step:
    """What happened so far and a further step of some of the rows, as one."""

    def sums(before: NDArray | None, now: NDArray | None) -> NDArray | None:
        if before is None and now is None:
            return None
        out = np.zeros(len(total.reward)) if before is None else before.astype(np.float64)
        out[rows] += 0.0 if now is None else now
        return out

    def latest(before: NDArray, now: NDArray) -> NDArray:
        out = before.copy()
        out[rows] = now
        return out

    failed = sums(total.failed, step.failed)
    return Step(
        latest(total.observation, step.observation), sums(total.reward, step.reward), latest(total.terminated, step.terminated),  # type: ignore[arg-type]
        latest(total.truncated, step.truncated), sums(total.cost, step.cost), None if failed is None else failed > 0,
    )  # fmt: skip


def windows(recording: Recording, chunk: int) -> Recording:
    """Recorded steps as chunks: from every step the `chunk` actions that followed, with the sum of their rewards and where they led.

    Beyond an episode's end the last action is repeated and nothing is earned.
    """
    if chunk == 1:
        return recording
    count = len(recording.reward)
    ends = recording.terminated | recording.truncated
    ends[-1] = True
    last = np.flatnonzero(ends)[np.searchsorted(np.flatnonzero(ends), np.arange(count))]  # the final step of each step's episode
    index = np.arange(count)[:, None] + np.arange(chunk)
    inside = index <= last[:, None]
    index = np.minimum(index, last[:, None])
    final = index[:, -1]
    return Recording(
        recording.observation, recording.action[index].reshape(count, -1), (recording.reward[index] * inside).sum(1, dtype=np.float32),
        recording.next_observation[final], recording.terminated[final], recording.truncated[final],
    )  # fmt: skip
