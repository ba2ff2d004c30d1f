"""Claims of SPOT. On a two-dimensional bandit whose recorded actions lie on two thin arcs: the actor stays on them where TD3 leaves, and the density
tells actions on the arcs from others (4000 recorded steps). On Pendulum-v1: learning from a mixture of good and random episodes, and going on from a
recording online (recordings of a controller written by hand). Networks (64,64), minibatches of 128, Adam 1e-3; half of the spec's updates and online steps."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.control.collect import episodes
from anypo.domains.control.replay import Recording, as_batch, joined
from anypo.domains.control.setup import build
from anypo.domains.control.tasks import GymTask
from anypo.loops import off_policy
from anypo.method import Method
from anypo.methods.control.spot import FINE_TUNING, METHOD, density_of
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
    """A task with its recorded steps in memory."""

    def __init__(self, environment: Any, recording: Recording, **options: Any) -> None:
        super().__init__(environment, data="in memory", **options)
        self.recording = recording

    def dataset(self, run: Run) -> Batch:
        return as_batch(self.recording, run.policy)  # type: ignore[arg-type]


def arcs() -> Recorded:
    state, action = recorded(4000, seed=0)
    ended, none = np.ones(len(state), bool), np.zeros(len(state), bool)
    return Recorded(Arcs, Recording(state, action, (state * action).sum(1), state, ended, none))


def distance(action: Tensor) -> Tensor:
    """From each action [M,2] to the nearest recorded one."""
    return torch.cdist(action, torch.from_numpy(recorded(4000, seed=0)[1])).min(1).values


class Learned(NamedTuple):
    near: float  # share of 500 states whose action is near a recorded one
    reward: float  # mean true reward
    run: Any


def sized(method: Method, lam: float) -> Method:
    """The method with the sizes of all runs here and the weight `lam` of the support."""
    method = method.set("objective.lam", lam).set("rollout.batch_size", 128).set("update.learning_rate", 1e-3)
    return method.set("prepare.0.steps", 2000 if lam else 1).set("prepare.0.batch_size", 128)


@functools.cache
def learned(seed: int, lam: float, density_steps: int = 3000, steps: int = 40) -> Learned:
    """Offline SPOT on the arcs, 64 updates a step; `lam` 0 is TD3."""
    torch.set_num_threads(1)
    task = arcs()
    method = sized(METHOD, lam).set("objective.samples", 4).set("prepare.0.beta", BETA).set("prepare.0.steps", density_steps if lam else 1)
    policy, _ = build(task, None, needs=method.needs(), seed=seed, hidden=(64, 64))
    run = off_policy.train(Run(method, policy, task, steps=steps, seed=seed))
    state = torch.from_numpy(recorded(500, seed=1)[0])
    action = torch.from_numpy(policy.actor()(state.numpy(), None))  # type: ignore[operator]
    far = distance(action)
    return Learned(float((far < NEAR).double().mean()), float(torch.where(far < NEAR, (state * action).sum(1), -1.0).mean()), run)


def _support(lam: float, seeds: tuple[int, ...]) -> Evidence:
    shares = [round(learned(seed, lam).near, 3) for seed in seeds]
    return Evidence(shares, f"at least 95% of the actions within {NEAR} of a recorded one, in every seed", min(shares) >= 0.95)


@claim("On the arcs bandit at least 95% of SPOT's actions lie within 0.15 of a recorded action", slow=True)
def actions_stay_in_the_support() -> Evidence:
    return _support(0.1, SEEDS)


@ablation(actions_stay_in_the_support, "no density penalty (TD3)")
def td3_leaves_the_support() -> Evidence:
    return _support(0.0, SEEDS[:1])


def _reward(lam: float, seeds: tuple[int, ...]) -> Evidence:
    state, action = recorded(4000, seed=0)
    cloning = float((state * action).sum(1).mean())
    rewards = [round(learned(seed, lam).reward, 3) for seed in seeds]
    measured = {"spot": rewards, "recorded actions": round(cloning, 3)}
    return Evidence(measured, "above that of the recorded actions by 0.3, in every seed", min(rewards) > cloning + 0.3)


@claim("SPOT's true reward is above that of acting as the recording did by more than 0.3 (the best possible is about 0.55)", slow=True)
def it_beats_cloning() -> Evidence:
    return _reward(0.1, SEEDS)


@ablation(it_beats_cloning, "no density penalty (TD3)")
def td3_falls_for_the_false_peak() -> Evidence:
    return _reward(0.0, SEEDS[:1])


def _auc(density: Any) -> Evidence:
    """Chance that a fresh action of the arcs has a higher estimated density than a uniform one at least 0.15 away from all recorded ones."""
    generator = torch.Generator().manual_seed(0)
    state, inside = (torch.from_numpy(x) for x in recorded(500, seed=2))
    anywhere = 2 * torch.rand(2000, 2, generator=generator) - 1
    outside = anywhere[distance(anywhere) > NEAR][:500]
    with torch.no_grad():
        found = [density.log_density(state, a, torch.randn(500, 16, density.latent, generator=generator)) for a in (inside, outside)]
    area = float((found[0][:, None] > found[1][None]).double().mean())
    return Evidence(round(area, 4), "above 0.95", area > 0.95)


@claim("The estimated density ranks actions on the arcs above actions off them with an AUC above 0.95", slow=True)
def density_knows_the_support() -> Evidence:
    return _auc(density_of(learned(0, 0.1).run))


@ablation(density_knows_the_support, "the density is not trained")
def untrained_density() -> Evidence:
    return _auc(density_of(learned(0, 0.1, density_steps=1, steps=1).run))


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


def controller(observation: np.ndarray) -> np.ndarray:
    """Torques [N,1] that swing the pendulum up by its energy and hold it near the top; about -140 an episode."""
    angle, speed = np.arctan2(observation[:, 1], observation[:, 0]), observation[:, 2]
    missing = speed**2 / 6 + 5 * (observation[:, 0] - 1)  # energy beyond that of the upright pendulum at rest
    swing, hold = -6 * missing * np.sign(speed + 1e-9), -(12 * angle + 2.5 * speed)
    return np.where(np.abs(angle) < 0.5, hold, swing).clip(-2, 2)[:, None]


def record(act: Callable[[np.ndarray], np.ndarray], count: int, first_seed: int) -> Recording:
    """`count` whole episodes of Pendulum."""
    environments = GymTask("Pendulum-v1").environments(count)
    seeds = list(range(first_seed, first_seed + count))
    seen = episodes(environments, seeds, lambda x, noise: act(x).astype(np.float32), lambda action: action, None)
    kept = (seen.observation, seen.action, seen.reward, seen.following, seen.terminated, seen.truncated)
    return Recording(*(part[seen.mask] for part in kept))


@functools.cache
def mixture() -> Recording:
    """20000 steps: 30 episodes of the controller and 70 of uniform torques."""
    rng = np.random.default_rng(0)
    return joined([record(controller, 30, 0), record(lambda x: rng.uniform(-2, 2, (len(x), 1)), 70, 100)])


def offline(recording: Recording, lam: float, steps: int) -> Run:
    task = Recorded("Pendulum-v1", recording)
    method = sized(METHOD, lam)
    policy, _ = build(task, None, needs=method.needs(), seed=0, hidden=(64, 64))
    return off_policy.train(Run(method, policy, task, steps=steps, seed=0))


def held_out(run: Run) -> float:
    """Mean return over 20 held-out starts."""
    return float(run.task.held_out(run.policy, 20)[0].mean())


@functools.cache
def on_mixture(lam: float) -> float:
    """The return after 5120 offline updates."""
    torch.set_num_threads(1)
    return held_out(offline(mixture(), lam, 80))


@functools.cache
def cloned() -> float:
    """The return of the same actor fitted to the recorded actions by least squares."""
    task = Recorded("Pendulum-v1", mixture())
    policy: Any = build(task, None, needs=METHOD.needs(), seed=0, hidden=(64, 64))[0]
    batch, generator = as_batch(mixture(), policy), torch.Generator().manual_seed(0)
    observation, action = batch.context[:, 0], batch.action[:, 0]
    optimizer = torch.optim.Adam(policy.actor_network.parameters(), 1e-3, fused=True)
    for _ in range(3000):
        chosen = torch.randint(len(action), (256,), generator=generator)
        optimizer.zero_grad()
        (torch.tanh(policy.actor_network(observation[chosen])) - action[chosen]).square().mean().backward()
        optimizer.step()
    return float(task.held_out(policy, 20)[0].mean())


def _above_cloning(lam: float) -> Evidence:
    found = {"spot": round(on_mixture(lam)), "cloning": round(cloned())}
    return Evidence(found, "above cloning by more than 300", found["spot"] > found["cloning"] + 300)


@claim("From 30% good and 70% random Pendulum episodes SPOT's return is above that of behaviour cloning by more than 300", slow=True)
def better_than_cloning_a_mixture() -> Evidence:
    return _above_cloning(0.05)


@ablation(better_than_cloning_a_mixture, "the density alone counts (its weight is 100)")
def density_alone_is_cloning() -> Evidence:
    return _above_cloning(100.0)


# Uniform torques leave no action unseen, so on this mixture there is no support to stay in, and the penalty only slows TD3 down.
@claim("From the same mixture SPOT's return is above that of plain TD3", slow=True, reproduced=False)
def better_than_td3_on_a_mixture() -> Evidence:
    found = {"spot": round(on_mixture(0.05)), "td3": round(on_mixture(0.0))}
    return Evidence(found, "above TD3's", found["spot"] > found["td3"])


@functools.cache
def weak_start() -> Run:
    """Offline SPOT, weight 1, on 50 episodes of the controller with at most 0.8 of the torque of 2, and noise of 0.2."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    return offline(record(lambda x: (controller(x).clip(-0.8, 0.8) + 0.2 * rng.standard_normal((len(x), 1))).clip(-2, 2), 50, 0), 1.0, 52)


def _fine_tuned(cool_steps: int | None) -> Evidence:
    """3008 online steps from the offline policy; the weight of the support falls to a fifth within 1200 of them, or stays."""
    start = weak_start()
    before = held_out(start)
    task = Recorded("Pendulum-v1", start.task.recording, envs=1)
    run = Run(sized(FINE_TUNING, 1.0).set("objective.cool_steps", cool_steps), copy.deepcopy(start.policy), task, steps=47, seed=0)
    run.state["spot.density"] = start.state["spot.density"]
    returns = []
    while not run.finished:
        off_policy.step(run)
        if run.step % 5 == 0:
            returns.append(held_out(run))
    end = sum(returns[-3:]) / 3
    measured = {"start": round(before), "lowest": round(min(returns)), "end": round(end)}
    # returns are negative: 70% of one is a 0.7th of its size
    return Evidence(
        measured,
        "ends above 0.5 times the start's loss, and is never below the start / 0.7",
        end > 0.5 * before and min(returns) > before / 0.7,
    )


@claim(
    "Fine-tuning online with a cooled weight halves the loss within 3000 steps and never falls below 70% of the offline start", slow=True
)
def cooling_lets_it_improve() -> Evidence:
    return _fine_tuned(1500)


@ablation(cooling_lets_it_improve, "the weight of the support stays")
def fixed_weight_holds_it_back() -> Evidence:
    return _fine_tuned(None)
