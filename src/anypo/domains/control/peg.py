"""Peg: a point that must be lowered into a narrow slot and jams when it hits the table too fast, with a scripted, imperfect person who takes over
when it is about to miss (after the contact tasks of arXiv:2605.15971; [reconstructed]).

From the command line: `--env Peg-v0`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anypo.domains.control.array_environment import ArrayEnvironment
from anypo.domains.control.classic import Array, Moved
from anypo.domains.control.collect import episodes
from anypo.domains.control.envs import describe, make_environments
from anypo.domains.control.replay import Recording

NAME = "Peg-v0"
SPEED = 0.1  # distance of a whole action along each axis
TABLE = -0.6  # height of the table that the slot is in
HALF_WIDTH = 0.06  # of the slot, whose middle is x = 0
BOTTOM = -0.9  # below it the peg is in
FAST = 0.07  # vertical distance in a step that jams the peg when it meets the table
STEPS = 60  # of an episode
DEMONSTRATIONS = 10  # attempts that the person shows


class PegStep(NamedTuple):
    next: Tensor  # [2]
    reward: float
    terminated: bool


@dataclass(frozen=True)
class Table:
    """State: x and y in [-1,1]. The start is uniform over y > 0."""

    def reset(self, generator: np.random.Generator) -> Array:
        return np.array([generator.uniform(-1.0, 1.0), generator.uniform(0.0, 1.0)])

    def step(self, state: Array, action: NDArray) -> Moved:
        move = SPEED * action.T.clip(-1.0, 1.0)
        x, y = (state + move).clip(-1.0, 1.0)
        contact = (y < TABLE) & (np.abs(x) > HALF_WIDTH)
        success = (y < BOTTOM) & ~contact
        jam = contact & (np.abs(move[1]) > FAST)
        return Moved(np.stack([x, np.where(contact, TABLE, y)]), success.astype(np.float64), success | jam)

    def observe(self, state: Array) -> NDArray[np.float32]:
        return state.T.astype(np.float32)


def peg_step(state: Tensor, action: Tensor) -> PegStep:
    """One step of one peg: position [2] and action [2]."""
    moved = Table().step(np.asarray(state, dtype=np.float64)[:, None], np.asarray(action, dtype=np.float64)[None])
    return PegStep(torch.from_numpy(moved.state[:, 0]), float(moved.reward[0]), bool(moved.terminated[0]))


@dataclass
class Person:
    """Who watches N pegs, and takes over for a few steps from one that is low and beside the slot: towards the slot, unsteadily.

    A takeover ends early when the peg is up again, which is a new attempt. After some straight successes nobody is helped until the next failure.
    """

    chance: float = 0.7  # of taking over at a step that calls for it, in [0,1]
    duration: int = 5  # steps of a takeover, >= 1
    noise: float = 0.3  # standard deviation of the actions, >= 0
    bias: float = 0.0  # constant error of the actions along both axes
    gain: float = 10.0  # action for each unit of distance, > 0
    trust: int = 3  # straight successes after which nobody is helped, >= 1
    remaining: NDArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64), init=False, repr=False)  # [N] steps of the takeovers
    straight: int = field(default=0, init=False, repr=False)  # successes since the last failure

    def __call__(self, observation: NDArray, rng: np.random.Generator) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Positions [N,2] -> what the person would do [N,2], and in which rows it is done [N]."""
        x, y = observation.T
        if len(self.remaining) != len(x):
            self.remaining = np.zeros(len(x), dtype=np.int64)
        self.remaining[y > 0] = 0
        willing = (np.abs(x) > 0.15) & (y < -0.4) & (rng.random(len(x)) < self.chance) & (self.straight < self.trust)
        self.remaining[willing & (self.remaining == 0)] = self.duration
        taken = self.remaining > 0
        self.remaining[taken] -= 1
        return self.steer(observation, rng), taken

    def steer(self, observation: NDArray, rng: np.random.Generator) -> NDArray[np.float32]:
        """What the person would do at positions [N,2]: above the slot first, then down."""
        x, y = observation.T
        towards = np.stack([-x, np.where(np.abs(x) < HALF_WIDTH, -1.0, TABLE + 0.05) - y], axis=1)
        action = self.gain * towards + self.bias + self.noise * rng.standard_normal(towards.shape)
        return action.clip(-1.0, 1.0).astype(np.float32)

    def judge(self, rewards: list[float]) -> None:
        """Last rewards of episodes, in the order in which they ended."""
        for reward in rewards:
            self.straight = self.straight + 1 if reward > 0 else 0

    def state_dict(self) -> dict[str, Any]:
        return {"remaining": self.remaining.tolist(), "straight": self.straight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.remaining, self.straight = np.array(state["remaining"], dtype=np.int64), state["straight"]


class Peg(ArrayEnvironment):
    """Observation: the position. Action: the step in tenths, in [-1,1]^2. Reward 1 in the slot's bottom; there and at a jam an episode ends."""

    dynamics = Table()

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def demonstrate(self, rng: np.random.Generator) -> Recording:
        """The steps of `DEMONSTRATIONS` whole attempts of the person."""
        seen, seeds = make_environments(Peg, describe(Peg), DEMONSTRATIONS, False), rng.integers(2**31, size=DEMONSTRATIONS).tolist()
        shown = episodes(seen, seeds, lambda observation, _: self.person().steer(observation, rng), lambda action: action, None)
        keep = shown.mask
        return Recording(
            shown.observation[keep],
            shown.action[keep],
            shown.reward[keep],
            shown.following[keep],
            shown.terminated[keep],
            shown.truncated[keep],
        )

    def person(self) -> Person:
        """Who may take over from a policy."""
        return Person()


if NAME not in gymnasium.registry:
    gymnasium.register(NAME, entry_point="anypo.domains.control.peg:Peg", max_episode_steps=STEPS)
