"""Multi-goal: a point in the middle of eight goals on a circle, all of which pay alike (after the environment of arXiv:1702.08165, which has four).

From the centre every goal is as good as any other, so that how many of them a policy goes to says how many ways of acting it has kept. From the command
line: `--env MultiGoal-v0`.
"""

from __future__ import annotations

from dataclasses import dataclass

import gymnasium
import numpy as np
from numpy.typing import NDArray

from anypo.domains.control.array_environment import ArrayEnvironment
from anypo.domains.control.classic import Array, Moved

NAME = "MultiGoal-v0"
GOALS, RADIUS = 8, 5.0  # how many, on a circle of this radius around the centre
REACH = 0.5  # distance at which a goal is reached
SPEED = 1.0  # distance of a whole action along each axis; the original environment may differ
STEPS = 50  # of an episode
BONUS, EFFORT = 10.0, 0.3  # reward of a goal, price of |action|^2
ANGLES = 2 * np.pi * np.arange(GOALS) / GOALS
PLACES = RADIUS * np.stack([np.cos(ANGLES), np.sin(ANGLES)], axis=1)  # [8,2]


def goal_distances(state: Array) -> NDArray:
    """Distances [8,N] of states [2,N] from the goals."""
    return np.hypot(state[0] - PLACES[:, :1], state[1] - PLACES[:, 1:])


@dataclass(frozen=True)
class Ring:
    """State: x and y. The start is (0,0), give or take 0.1."""

    def reset(self, generator: np.random.Generator) -> Array:
        return 0.1 * generator.standard_normal(2)

    def step(self, state: Array, action: NDArray) -> Moved:
        action = action.T.clip(-1.0, 1.0)
        state = state + SPEED * action
        reached = goal_distances(state).min(0) < REACH
        return Moved(state, BONUS * reached - EFFORT * (action**2).sum(0), reached)

    def observe(self, state: Array) -> NDArray[np.float32]:
        return (state.T / RADIUS).astype(np.float32)


class MultiGoal(ArrayEnvironment):
    """Observation: the position in radii of the circle. Action: the step, in [-1,1]^2. Reward 10 at a goal, which ends the episode, less the effort."""

    dynamics = Ring()

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)


if NAME not in gymnasium.registry:
    gymnasium.register(NAME, entry_point="anypo.domains.control.multi_goal:MultiGoal", max_episode_steps=STEPS)
