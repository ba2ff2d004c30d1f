"""Collection: the inner loops in which a policy meets its environments. NumPy only; a step costs tens of microseconds for a row of environments.

`Segments` are fixed lengths that run across episode ends (actor-critic methods), `episodes` are whole ones from given start seeds (group methods,
evaluation). Arrays are filled time first and handed over row first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from anypo.domains.control.envs import Environments, Step

Actor = Callable[[NDArray, "NDArray | None"], NDArray]


class Trajectories(NamedTuple):
    """N rows of T actions. `following` is the true next observation of every action, before any reset."""

    observation: NDArray[np.float32]  # [N,T,O]
    following: NDArray[np.float32]  # [N,T,O]
    action: NDArray  # [N,T] or [N,T,D]
    reward: NDArray[np.float32]  # [N,T]
    terminated: NDArray[np.bool_]  # [N,T]
    truncated: NDArray[np.bool_]  # [N,T]
    mask: NDArray[np.bool_]  # [N,T]
    cost: NDArray[np.float32] | None  # [N,T]


class Beginning(NamedTuple):
    """How N episodes begin: row i with the first `depth[i]` of its actions."""

    action: NDArray  # [N,T] or [N,T,D], as a batch stores them
    depth: NDArray[np.int64]  # [N], at most T


@dataclass
class Finished:
    """Episodes that ended while steps were collected: undiscounted returns and lengths."""

    returns: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)


class Stream:
    """N environments that run on from segment to segment, with the running return and length of each episode."""

    def __init__(self, environments: Environments, seeds: list[int]) -> None:
        self.environments, self.seeds = environments, list(seeds)
        self.observation = np.stack([environments.reset(row, seed) for row, seed in enumerate(seeds)])
        self.returns, self.lengths = np.zeros(len(seeds)), np.zeros(len(seeds), dtype=np.int64)

    def collect(self, actor: Actor, for_environment: Callable[[NDArray], NDArray], noise: NDArray, finished: Finished) -> Trajectories:
        """One segment of T steps; `noise` [T,N,...]. Raises EnvironmentFailed unless the environments are tolerant."""
        horizon, count = noise.shape[:2]
        size = self.observation.shape[1]
        seen, following = np.empty((horizon, count, size), np.float32), np.empty((horizon, count, size), np.float32)
        reward = np.empty((horizon, count), np.float32)
        terminated, truncated = np.empty((horizon, count), bool), np.empty((horizon, count), bool)
        mask = np.ones((horizon, count), bool)
        actions: list[NDArray] = []
        costs: list[NDArray | None] = []
        for t in range(horizon):
            seen[t] = self.observation
            action = actor(self.observation, noise[t])
            actions.append(action)
            step = self.environments.step(for_environment(action))
            following[t], reward[t], terminated[t], truncated[t] = step.observation, step.reward, step.terminated, step.truncated
            costs.append(step.cost)
            self.returns += step.reward
            self.lengths += 1
            self.observation = step.observation
            ended = step.terminated | step.truncated
            if ended.any():
                if step.failed is not None:
                    mask[t] = ~step.failed  # nothing is known of what such an action led to
                self._restart(ended, step.failed, finished)
        return Trajectories(
            _rows(seen),
            _rows(following),
            _rows(np.stack(actions)),
            _rows(reward),
            _rows(terminated),
            _rows(truncated),
            _rows(mask),
            _costs(costs),
        )

    def _restart(self, ended: NDArray[np.bool_], failed: NDArray[np.bool_] | None, finished: Finished) -> None:
        """Begin a new episode in the rows that ended; those that failed are not counted among the finished ones."""
        self.observation = self.observation.copy()
        for row in ended.nonzero()[0].tolist():
            if failed is None or not failed[row]:
                finished.returns.append(float(self.returns[row]))
                finished.lengths.append(int(self.lengths[row]))
            self.observation[row] = self.environments.reset(row)
            self.returns[row], self.lengths[row] = 0.0, 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "environments": [self.environments.get_state(row) for row in range(len(self.seeds))],
            "seeds": self.seeds,
            "returns": self.returns.copy(),
            "lengths": self.lengths.copy(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seeds = list(state["seeds"])
        self.observation = np.stack([self.environments.set_state(row, s) for row, s in enumerate(state["environments"])])
        if self.environments.restorable:
            self.returns, self.lengths = np.array(state["returns"]), np.array(state["lengths"])
        else:
            self.returns, self.lengths = np.zeros(len(self.seeds)), np.zeros(len(self.seeds), dtype=np.int64)


def episodes(
    environments: Environments, seeds: list[int], actor: Actor, for_environment: Callable[[NDArray], NDArray],
    noise: Callable[[int], NDArray] | None, limit: int | None = None, beginning: Beginning | None = None,
) -> Trajectories:  # fmt: skip
    """One whole episode from each seed, rows padded to the longest; `noise(n)` draws for n rows, None acts by the likeliest action.

    `limit`: cut episodes after so many actions (they count as truncated). `beginning`: actions that are taken before the actor's own. Raises
    EnvironmentFailed.
    """
    count = len(seeds)
    running = np.arange(count)
    observation = np.stack([environments.reset(row, seed) for row, seed in enumerate(seeds)])
    taken: list[tuple[NDArray, NDArray, NDArray, Step]] = []
    while len(running) and (limit is None or len(taken) < limit):
        action = actor(observation, noise(len(running)) if noise else None)
        if beginning is not None and len(taken) < beginning.action.shape[1]:
            given = beginning.depth[running] > len(taken)
            action[given] = beginning.action[running[given], len(taken)]
        step = environments.step(for_environment(action), running)
        taken.append((running, observation, action, step))
        going = ~(step.terminated | step.truncated)
        running, observation = running[going], step.observation[going]
    horizon, size = len(taken), observation.shape[1]
    first = taken[0][2]
    out = Trajectories(
        np.zeros((horizon, count, size), np.float32), np.zeros((horizon, count, size), np.float32),
        np.zeros((horizon, count, *first.shape[1:]), first.dtype), np.zeros((horizon, count), np.float32), np.zeros((horizon, count), bool),
        np.zeros((horizon, count), bool), np.zeros((horizon, count), bool),
        np.zeros((horizon, count), np.float32) if any(s.cost is not None for *_, s in taken) else None,
    )  # fmt: skip
    for t, (rows, seen, action, step) in enumerate(taken):
        out.observation[t, rows], out.following[t, rows], out.action[t, rows] = seen, step.observation, action
        out.reward[t, rows], out.terminated[t, rows], out.truncated[t, rows] = step.reward, step.terminated, step.truncated
        out.mask[t, rows] = True if step.failed is None else ~step.failed
        if out.cost is not None and step.cost is not None:
            out.cost[t, rows] = step.cost
    out.truncated[-1, running] = True  # cut by `limit`
    return Trajectories(*(None if x is None else _rows(x) for x in out))  # type: ignore[arg-type]


def _rows(time_first: NDArray) -> NDArray:
    return np.ascontiguousarray(time_first.swapaxes(0, 1))


def _costs(steps: list[NDArray | None]) -> NDArray | None:
    if all(cost is None for cost in steps):
        return None
    count = next(len(cost) for cost in steps if cost is not None)
    return _rows(np.stack([np.zeros(count) if cost is None else cost for cost in steps]).astype(np.float32))
