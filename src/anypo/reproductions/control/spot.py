"""Claims of SPOT on a two-dimensional bandit whose recorded actions lie on two thin arcs: the actor stays on them where TD3 leaves, and the density
tells actions on the arcs from others. 4000 recorded steps, (64,64) networks, 2560 updates, minibatches of 128."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.control.replay import Recording, as_batch
from anypo.domains.control.setup import build
from anypo.domains.control.tasks import GymTask
from anypo.loops import off_policy
from anypo.methods.control.spot import METHOD, density_of
from anypo.run import Run

SEEDS = (0, 1)
NEAR = 0.15  # from the nearest recorded action
BETA = 0.02  # the arcs are thin, so the decoder's standard deviation, sqrt(beta / 4), has to be: 0.07


class Arcs(gymnasium.Env):
    """One action: the state is a direction s, and s . a is paid for actions a on the arcs; elsewhere the reward is -1, which no recorded step shows."""

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)


def recorded(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Directions and actions [M,2]: angles of 30 to 150 and of 210 to 330 degrees, radius 0.6, noise of 0.02; actions do not depend on directions."""
    rng = np.random.default_rng(seed)
    heading = rng.uniform(0, 2 * math.pi, count)
    angle = np.deg2rad(rng.uniform(30, 150, count) + 180 * rng.integers(2, size=count))
    action = 0.6 * np.stack([np.cos(angle), np.sin(angle)], 1) + 0.02 * rng.standard_normal((count, 2))
    return np.stack([np.cos(heading), np.sin(heading)], 1).astype(np.float32), action.astype(np.float32)


class Recorded(GymTask):
    """The bandit with its recorded steps in memory."""

    def dataset(self, run: Run) -> Batch:
        state, action = recorded(4000, seed=0)
        ended, none = np.ones(len(state), bool), np.zeros(len(state), bool)
        recording = Recording(state, action, (state * action).sum(1), state, ended, none)
        return as_batch(recording, run.policy)  # type: ignore[arg-type]


def distance(action: Tensor) -> Tensor:
    """From each action [M,2] to the nearest recorded one."""
    return torch.cdist(action, torch.from_numpy(recorded(4000, seed=0)[1])).min(1).values


class Learned(NamedTuple):
    near: float  # share of 500 states whose action is near a recorded one
    reward: float  # mean true reward
    run: Any


@functools.cache
def learned(seed: int, lam: float, density_steps: int = 3000) -> Learned:
    """Offline SPOT; `lam` 0 is TD3."""
    torch.set_num_threads(1)
    task = Recorded(Arcs, data="in memory")
    method = METHOD.set("objective.lam", lam).set("objective.samples", 4).set("prepare.0.beta", BETA).set("prepare.0.steps", density_steps)
    method = method.set("rollout.batch_size", 128).set("update.learning_rate", 1e-3).set("prepare.0.batch_size", 128)
    policy, _ = build(task, None, needs=method.needs(), seed=seed, hidden=(64, 64))
    run = off_policy.train(Run(method, policy, task, steps=40, seed=seed))
    state = torch.from_numpy(recorded(500, seed=1)[0])
    action = torch.from_numpy(policy.actor()(state.numpy(), None))  # type: ignore[operator]
    far = distance(action)
    return Learned(float((far < NEAR).double().mean()), float(torch.where(far < NEAR, (state * action).sum(1), -1.0).mean()), run)


def _support(lam: float) -> Evidence:
    shares = [round(learned(seed, lam).near, 3) for seed in SEEDS]
    return Evidence(shares, f"at least 95% of the actions within {NEAR} of a recorded one, in both seeds", min(shares) >= 0.95)


@claim("On the arcs bandit at least 95% of SPOT's actions lie within 0.15 of a recorded action", slow=True)
def actions_stay_in_the_support() -> Evidence:
    return _support(0.1)


@ablation(actions_stay_in_the_support, "no density penalty (TD3)")
def td3_leaves_the_support() -> Evidence:
    return _support(0.0)


def _reward(lam: float) -> Evidence:
    state, action = recorded(4000, seed=0)
    cloning = float((state * action).sum(1).mean())
    rewards = [round(learned(seed, lam).reward, 3) for seed in SEEDS]
    measured = {"spot": rewards, "recorded actions": round(cloning, 3)}
    return Evidence(measured, "above that of the recorded actions by 0.3, in both seeds", min(rewards) > cloning + 0.3)


@claim("SPOT's true reward is above that of acting as the recording did by more than 0.3 (the best possible is about 0.55)", slow=True)
def it_beats_cloning() -> Evidence:
    return _reward(0.1)


@ablation(it_beats_cloning, "no density penalty (TD3)")
def td3_falls_for_the_false_peak() -> Evidence:
    return _reward(0.0)


def _auc(density_steps: int) -> Evidence:
    """Chance that a fresh action of the arcs has a higher estimated density than a uniform one at least 0.15 away from all recorded ones."""
    density, generator = density_of(learned(0, 0.1, density_steps).run), torch.Generator().manual_seed(0)
    state, inside = (torch.from_numpy(x) for x in recorded(500, seed=2))
    anywhere = 2 * torch.rand(2000, 2, generator=generator) - 1
    outside = anywhere[distance(anywhere) > NEAR][:500]
    with torch.no_grad():
        found = [density.log_density(state, a, torch.randn(500, 16, density.latent, generator=generator)) for a in (inside, outside)]
    area = float((found[0][:, None] > found[1][None]).double().mean())
    return Evidence(round(area, 4), "above 0.95", area > 0.95)


@claim("The estimated density ranks actions on the arcs above actions off them with an AUC above 0.95", slow=True)
def density_knows_the_support() -> Evidence:
    return _auc(3000)


@ablation(density_knows_the_support, "the density is not trained")
def untrained_density() -> Evidence:
    return _auc(1)


def _tighter(samples: int) -> Evidence:
    density, generator = density_of(learned(0, 0.1).run), torch.Generator().manual_seed(0)
    state, action = (torch.from_numpy(x) for x in recorded(300, seed=3))
    noise = torch.randn(300, samples, density.latent, generator=generator)
    with torch.no_grad():
        gap = float((density.log_density(state, action, noise) - density.log_density(state, action, noise, importance=False)).mean())
    return Evidence(round(gap, 3), "higher by more than 0.05 nats on average", gap > 0.05)


@claim(
    "With 500 samples the importance-weighted bound of the log-density is higher than the evidence lower bound by more than 0.05 nats",
    slow=True,
)
def importance_sampling_is_tighter() -> Evidence:
    return _tighter(500)


@ablation(importance_sampling_is_tighter, "one sample")
def one_sample_is_not() -> Evidence:
    return _tighter(1)
