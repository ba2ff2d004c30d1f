"""Two goals: a point on a 25x25 grid with a goal in the middle of the top row and one in the middle of the bottom row (after the grid of
arXiv:2507.21053).

From the middle of the grid both goals are equally far, so the best behaviour there has two modes, and their mean leads nowhere. From the command line:
`--env TwoGoals-v0`.
"""

from __future__ import annotations

from dataclasses import dataclass

import gymnasium
import numpy as np
from numpy.typing import NDArray

from anypo.domains.control.array_environment import ArrayEnvironment
from anypo.domains.control.classic import Array, Moved

NAME = "TwoGoals-v0"
SIZE = 25  # cells a side
MIDDLE = (SIZE - 1) / 2
REACH = 2.5  # how far a goal extends to each side of the middle column: five cells
STEPS = 100  # of an episode


@dataclass(frozen=True)
class Grid:
    """State: x and y in cells, from 0 to 24. A step moves by the action, at most one cell along each side, and stops at the walls."""

    def reset(self, generator: np.random.Generator) -> Array:
        """A row of the middle column that is no goal."""
        return np.array([MIDDLE, float(generator.integers(1, SIZE - 1))])

    def step(self, state: Array, action: NDArray) -> Moved:
        state = (state + action.T.clip(-1.0, 1.0)).clip(0.0, SIZE - 1)
        x, y = state
        reached = (np.abs(x - MIDDLE) < REACH) & ((y > SIZE - 1.5) | (y < 0.5))
        return Moved(state, reached.astype(np.float64), reached)

    def observe(self, state: Array) -> NDArray[np.float32]:
        return (state.T / MIDDLE - 1).astype(np.float32)


class TwoGoals(ArrayEnvironment):
    """Observation: the position, each side scaled to [-1,1]. Action: the step, in cells. Reward 1 at a goal, which ends the episode."""

    dynamics = Grid()

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)


if NAME not in gymnasium.registry:
    gymnasium.register(NAME, entry_point="anypo.domains.control.two_goals:TwoGoals", max_episode_steps=STEPS)
