"""A point mass that is paid for being near the origin, with noise on every reward ("point mass batch" for arXiv:2603.06009; [reconstructed]).

The best policy is linear and the noise says nothing about the actions, so how far learning gets is a matter of step size and batch size alone. From
the command line: `--env NoisyPoint-v0`.
"""

from __future__ import annotations

from dataclasses import dataclass

import gymnasium
import numpy as np
from numpy.typing import NDArray

from anypo.domains.control.array_environment import ArrayEnvironment
from anypo.domains.control.classic import Array, Moved

NAME = "NoisyPoint-v0"
STEPS = 50  # of an episode
INTERVAL = 0.1
FORCE = 10.0  # largest force in each direction


@dataclass(frozen=True)
class Point:
    """State: position and velocity in the plane, steps taken, and the noise of all of the episode's rewards, which is drawn when it begins."""

    noise: float = 2.0  # standard deviation, >= 0

    def reset(self, generator: np.random.Generator) -> Array:
        start = generator.uniform(-1.0, 1.0, 2)
        return np.concatenate([start, np.zeros(3), self.noise * generator.standard_normal(STEPS)])

    def step(self, state: Array, action: NDArray) -> Moved:
        out = state.copy()
        force = action.T.clip(-FORCE, FORCE)
        out[2:4] += INTERVAL * force
        out[:2] += INTERVAL * out[2:4]
        out[4] += 1
        noise = state[5:][state[4].astype(np.int64) % STEPS, np.arange(state.shape[1])]
        reward = noise - (out[:2] ** 2).sum(0) - 0.01 * (force**2).sum(0)
        return Moved(out, reward, np.zeros(len(reward), dtype=bool))

    def observe(self, state: Array) -> NDArray[np.float32]:
        return state[:4].T.astype(np.float32)


class NoisyPoint(ArrayEnvironment):
    """Observation: position and velocity. Action: a force. Reward -|x|^2 - 0.01 |a|^2 plus noise. Episodes of 50 steps are cut, not ended."""

    def __init__(self, render_mode: str | None = None, noise: float = 2.0) -> None:
        super().__init__(render_mode)
        self.dynamics = Point(noise)  # type: ignore[misc]
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.action_space = gymnasium.spaces.Box(-FORCE, FORCE, (2,), np.float32)


if NAME not in gymnasium.registry:
    gymnasium.register(NAME, entry_point="anypo.domains.control.noisy_point:NoisyPoint", max_episode_steps=STEPS)
