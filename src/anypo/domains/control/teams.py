"""Teams: environments in which several agents act at once, shown to the loop as one row an agent.

A team environment says its `team_size` U; its spaces are those of one agent, its observations [U,O] and actions [U,...] those of all. The agents of a
team are U rows one after another with the same reward and the same end, so every method trains them as one policy with shared parameters, and a
policy that looks at rows together can let them talk. Left out: environments that are not stepped as arrays, agents that leave early.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from anypo.domains.control.envs import Classic, Environments, Step


class Teams:
    """N*U rows over N team environments."""

    restorable = True
    failures = 0

    def __init__(self, inner: Environments, size: int) -> None:
        """Raises ValueError for environments that are not stepped as arrays."""
        if not isinstance(inner, Classic):
            raise ValueError("an environment with several agents must be an ArrayEnvironment (its equations for many rows at once)")
        self.inner, self.size, self.count = inner, size, inner.count * size
        self.last: dict[int, NDArray[np.float32]] = {}  # by team: the observations [U,O] at a reset, which the agents' rows ask for in turn

    def reset(self, row: int, seed: int | None = None) -> NDArray[np.float32]:
        """The team begins anew with its first agent; the others' rows, which come next, see what it left."""
        team, agent = divmod(row, self.size)
        if agent == 0:
            self.last[team] = self.inner.reset(team, seed)
        return self.last[team][agent]

    def step(self, action: NDArray, rows: NDArray[np.int64] | None = None) -> Step:
        """`rows` holds whole teams."""
        teams = None if rows is None else rows[:: self.size] // self.size
        step = self.inner.step(action.reshape(-1, self.size, *action.shape[1:]), teams)
        observation = step.observation.reshape(-1, step.observation.shape[-1])
        return Step(observation, step.reward.repeat(self.size), step.terminated.repeat(self.size), step.truncated.repeat(self.size))

    def get_state(self, row: int) -> dict[str, Any]:
        return self.inner.get_state(row // self.size) if row % self.size == 0 else {}

    def set_state(self, row: int, state: dict[str, Any]) -> NDArray[np.float32]:
        team, agent = divmod(row, self.size)
        if agent == 0:
            self.last[team] = self.inner.set_state(team, state)
        return self.last[team][agent]
