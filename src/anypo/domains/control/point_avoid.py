"""Point-Avoid: a point that must get around a disc to a goal behind it, with demonstrations that pass on either side (after the avoiding tasks of
arXiv:2409.00588).

From the command line: `--env PointAvoid-v0`.
"""

from __future__ import annotations

from dataclasses import dataclass

import gymnasium
import numpy as np
from numpy.typing import NDArray

from anypo.domains.control.array_environment import ArrayEnvironment
from anypo.domains.control.classic import Array, Moved
from anypo.domains.control.replay import Recording

NAME = "PointAvoid-v0"
GOAL = np.array([1.0, 0.0])
GOAL_RADIUS = 0.1
OBSTACLE = np.array([0.5, 0.0])
OBSTACLE_RADIUS = 0.2
SPEED = 0.05  # distance of a whole action along each axis
STEPS = 80  # of an episode
DEMONSTRATIONS = 50  # episodes
CLEARANCE = (0.01, 0.06)  # how far from the disc demonstrations pass it
UNSTEADINESS = 0.2  # standard deviation of the demonstrator's actions


@dataclass(frozen=True)
class Plane:
    """State: x and y. The start is (0,0), give or take 0.01."""

    def reset(self, generator: np.random.Generator) -> Array:
        return 0.01 * generator.standard_normal(2)

    def step(self, state: Array, action: NDArray) -> Moved:
        state = state + SPEED * action.T.clip(-1.0, 1.0)
        reached = distance(state, GOAL) < GOAL_RADIUS
        return Moved(state, reached.astype(np.float64), reached | (distance(state, OBSTACLE) < OBSTACLE_RADIUS))

    def observe(self, state: Array) -> NDArray[np.float32]:
        return state.T.astype(np.float32)


class PointAvoid(ArrayEnvironment):
    """Observation: the position. Action: the step in twentieths, in [-1,1]^2. Reward 1 at the goal (1,0); there and in the disc an episode ends."""

    dynamics = Plane()

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def demonstrate(self, rng: np.random.Generator) -> Recording:
        """The steps of `DEMONSTRATIONS` successful episodes of an unsteady hand, above the disc and below it by turns."""
        episodes: list[Recording] = []
        while len(episodes) < DEMONSTRATIONS:
            shown = _episode(self.dynamics, 1.0 if len(episodes) % 2 else -1.0, rng)
            if shown.reward[-1] > 0:
                episodes.append(shown)
        return Recording(*(np.concatenate(parts) for parts in zip(*episodes, strict=True)))


def distance(state: Array, point: NDArray) -> Array:
    """Euclidean distance of states [2,N] from a point [2]."""
    return np.hypot(state[0] - point[0], state[1] - point[1])


def _episode(dynamics: Plane, side: float, rng: np.random.Generator) -> Recording:
    """One attempt: aside, past the disc above (`side` 1) or below (-1), then to the goal."""
    state = dynamics.reset(rng)[:, None]
    beside = side * (OBSTACLE_RADIUS + rng.uniform(*CLEARANCE))
    seen, actions, following, rewards, ends = [], [], [], [], []
    for t in range(STEPS):
        x, y = state[:, 0]
        target = np.array([0.25, beside]) if x < 0.2 else np.array([0.8, beside]) if x < 0.7 else GOAL
        towards = target - (x, y)
        action = (0.8 * towards / max(np.hypot(*towards), 0.1) + UNSTEADINESS * rng.standard_normal(2)).clip(-1, 1)
        moved = dynamics.step(state, action[None])
        seen.append(dynamics.observe(state)[0])
        actions.append(action)
        following.append(dynamics.observe(moved.state)[0])
        rewards.append(moved.reward[0])
        ends.append((moved.terminated[0], t + 1 == STEPS and not moved.terminated[0]))
        state = moved.state
        if moved.terminated[0]:
            break
    terminated, truncated = np.array(ends, dtype=bool).T
    return Recording(
        np.stack(seen), np.stack(actions).astype(np.float32), np.array(rewards, np.float32), np.stack(following), terminated, truncated
    )


if NAME not in gymnasium.registry:
    gymnasium.register(NAME, entry_point="anypo.domains.control.point_avoid:PointAvoid", max_episode_steps=STEPS)
