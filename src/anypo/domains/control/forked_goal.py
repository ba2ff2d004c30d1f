"""Forked-Goal: a point that may walk to either of two goals, of which only the upper one pays, with demonstrations that go to both alike (after the
multimodal toys on which policies that imitate are steered, arXiv:2506.15799).

From the command line: `--env ForkedGoal-v0`.
"""

from __future__ import annotations

from dataclasses import dataclass

import gymnasium
import numpy as np
from numpy.typing import NDArray

from anypo.domains.control.array_environment import ArrayEnvironment
from anypo.domains.control.classic import Array, Moved
from anypo.domains.control.replay import Recording

NAME = "ForkedGoal-v0"
GOAL = np.array([0.8, 0.6])  # the one that pays; the other is its mirror image below
GOAL_RADIUS = 0.15
SPEED = 0.1  # distance of a whole action along each axis
STEPS = 22  # of an episode
DEMONSTRATIONS = 60  # episodes
UNSTEADINESS = 0.1  # standard deviation of the demonstrator's actions


@dataclass(frozen=True)
class Fork:
    """State: x and y. The start is (0,0), give or take 0.01."""

    def reset(self, generator: np.random.Generator) -> Array:
        return 0.01 * generator.standard_normal(2)

    def step(self, state: Array, action: NDArray) -> Moved:
        state = state + SPEED * action.T.clip(-1.0, 1.0)
        x, y = state
        beside = np.hypot(x - GOAL[0], np.abs(y) - GOAL[1]) < GOAL_RADIUS
        return Moved(state, (beside & (y > 0)).astype(np.float64), beside)

    def observe(self, state: Array) -> NDArray[np.float32]:
        return state.T.astype(np.float32)


class ForkedGoal(ArrayEnvironment):
    """Observation: the position. Action: the step in tenths, in [-1,1]^2. Reward 1 at the upper goal; at either an episode ends."""

    dynamics = Fork()

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def demonstrate(self, rng: np.random.Generator) -> Recording:
        """The steps of `DEMONSTRATIONS` episodes of an unsteady hand, to the upper goal and to the lower one by turns."""
        goal = GOAL * np.where(np.arange(DEMONSTRATIONS)[:, None] % 2, 1.0, [1.0, -1.0])
        state = 0.01 * rng.standard_normal((2, DEMONSTRATIONS))
        going = np.arange(DEMONSTRATIONS)
        taken: list[tuple[NDArray, ...]] = []
        for t in range(STEPS):
            towards = goal[going] - state.T
            towards = towards / np.linalg.norm(towards, axis=1, keepdims=True)
            action = (0.9 * towards + UNSTEADINESS * rng.standard_normal(towards.shape)).clip(-1, 1)
            moved = self.dynamics.step(state, action)
            cut = ~moved.terminated & (t + 1 == STEPS)
            seen, following = self.dynamics.observe(state), self.dynamics.observe(moved.state)
            taken.append((going, seen, action.astype(np.float32), moved.reward.astype(np.float32), following, moved.terminated, cut))
            going, state = going[~moved.terminated], moved.state[:, ~moved.terminated]
            if not len(going):
                break
        who, *parts = (np.concatenate(x) for x in zip(*taken, strict=True))
        order = np.argsort(who, kind="stable")  # episode by episode
        return Recording(*(x[order] for x in parts))


if NAME not in gymnasium.registry:
    gymnasium.register(NAME, entry_point="anypo.domains.control.forked_goal:ForkedGoal", max_episode_steps=STEPS)
