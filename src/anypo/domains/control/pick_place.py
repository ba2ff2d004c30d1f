"""Pick and place along a line: four phases of which one decides, and a policy that is good at the others (a stand-in for the fine-tuning of robot
policies, arXiv:2605.16154; [reconstructed]).

An episode has 60 action chunks, 15 each to reach, grasp, lift and place. In the critical phase the sign of the first action chooses one of two grasps
for good; elsewhere actions must not drift from their nominal values. The reward is 1 for the right grasp without drift. `pretrained` gives the policy
that the fine-tuning begins with, `success_chance` its success, exactly. From the command line: `--env PickPlace-v0`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray

from anypo.domains.control.array_environment import ArrayEnvironment
from anypo.domains.control.classic import Array, Moved
from anypo.domains.control.envs import describe, maker
from anypo.domains.control.policy import ControlPolicy

NAME = "PickPlace-v0"
PHASES, EACH = 4, 15  # chunks of a phase
STEPS = PHASES * EACH
NOMINAL = np.array([0.6, -0.6, 0.3, -0.3])  # actions of the phases that are not critical
GAIN = 0.3  # what an action adds to the drift, which begins anew with each phase
SPREAD = 0.2  # standard deviation of the pretrained policy's actions
UNDECIDED = -0.5244005 * SPREAD  # its mean where the grasp is chosen: 30% of its actions there are positive
OBSERVED = PHASES + 2


@dataclass(frozen=True)
class Arm:
    """State: chunks taken, the grasp (-1, 1, or 0 before the choice), drift in this phase, and 1 once it was more than 1."""

    critical: int = 1  # the phase that decides, 0 to 3

    def reset(self, generator: np.random.Generator) -> Array:
        return np.zeros(4)

    def step(self, state: Array, action: NDArray) -> Moved:
        taken, grasp, drift, failed = state
        phase, first = (taken // EACH).astype(np.int64) % PHASES, taken % EACH == 0
        critical, force = phase == self.critical, action[:, 0].astype(np.float64)
        grasp = np.where(critical & first, np.where(force > 0, 1.0, -1.0), grasp)
        drift = np.where(first, 0.0, drift) + np.where(critical, 0.0, GAIN * (force - NOMINAL[phase]))
        failed = np.maximum(failed, np.abs(drift) > 1)
        ended = taken + 1 >= STEPS
        return Moved(np.stack([taken + 1, grasp, drift, failed]), (ended & (grasp > 0) & (failed == 0)).astype(np.float64), ended)

    def observe(self, state: Array) -> NDArray[np.float32]:
        phase = (state[0] // EACH).astype(np.int64).clip(max=PHASES - 1)
        critical, first = phase == self.critical, state[0] % EACH == 0
        grasp = np.where(critical & ~first, state[1], 0.0)
        return np.concatenate([np.eye(PHASES)[phase], np.stack([critical & first, grasp], axis=1)], axis=1).astype(np.float32)


class PickPlace(ArrayEnvironment):
    """Observation: the phase (one of four numbers is 1), whether the grasp is to be chosen now, the chosen grasp. Action: a number in [-2,2]."""

    def __init__(self, render_mode: str | None = None, critical: int = 1) -> None:
        super().__init__(render_mode)
        self.dynamics = Arm(critical)  # type: ignore[misc]
        self.observation_space = gymnasium.spaces.Box(-1.0, 1.0, (OBSERVED,), np.float32)
        self.action_space = gymnasium.spaces.Box(-2.0, 2.0, (1,), np.float32)


def observations() -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Every observation there is, four a phase [16,6]: not critical, to be chosen, right grasp, wrong grasp; and the pretrained means [16]."""
    kinds = np.array([[0, 0], [1, 0], [0, 1], [0, -1]])
    seen = np.concatenate([np.eye(PHASES).repeat(4, axis=0), np.tile(kinds, (PHASES, 1))], axis=1)
    means = np.stack([NOMINAL, *(np.full(PHASES, x) for x in (UNDECIDED, 1.0, -1.0))], axis=1)
    return seen.astype(np.float32), means.flatten().astype(np.float32)


def pretrained(seed: int = 0, hidden: tuple[int, ...] = (32, 32)) -> ControlPolicy:
    """A policy that chooses the right grasp in 30% of its episodes and is near-perfect otherwise, whichever phase is critical: least squares for the
    last layer over random features."""
    policy = ControlPolicy(describe(maker(NAME)), hidden=hidden, normalize_observations=False, initial_log_std=math.log(SPREAD), seed=seed)
    seen, means = (torch.from_numpy(x) for x in observations())
    last: torch.nn.Linear = policy.actor_network.layers[-1]  # type: ignore[assignment]
    with torch.no_grad():
        features = torch.cat([policy.actor_network.hidden(seen), torch.ones(len(seen), 1)], dim=1).double()
        solved = torch.linalg.lstsq(features, means[:, None].double(), driver="gelsd").solution[:, 0]
        last.weight.copy_(solved[None, :-1])
        last.bias.copy_(solved[-1:])
    return policy


def success_chance(policy: ControlPolicy, critical: int = 1) -> float:
    """The chance that an episode succeeds, to about 1e-3: the Gaussian's for the grasp times those of no drift, carried along on a grid."""
    with torch.no_grad():
        means = policy.actor_network(torch.from_numpy(observations()[0]))[:, 0].view(PHASES, 4).double().numpy()
    assert policy.log_std is not None
    deviation = float(policy.log_std.detach().exp())
    chance = 0.5 * (1 + math.erf(means[critical, 1] / deviation / math.sqrt(2)))
    grid = np.linspace(-1, 1, 401)
    for phase in set(range(PHASES)) - {critical}:
        moved = (grid[None] - grid[:, None]) - GAIN * (means[phase, 0] - NOMINAL[phase])
        kernel = np.exp(-0.5 * (moved / (GAIN * deviation)) ** 2) * (grid[1] - grid[0]) / (GAIN * deviation * math.sqrt(2 * math.pi))
        place = np.zeros(len(grid))
        place[len(grid) // 2] = 1.0
        for _ in range(EACH):
            place = place @ kernel
        chance *= place.sum()
    return float(chance)


if NAME not in gymnasium.registry:
    gymnasium.register(NAME, entry_point="anypo.domains.control.pick_place:PickPlace", max_episode_steps=STEPS)
