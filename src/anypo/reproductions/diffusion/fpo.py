"""What FPO must show: the ratio needs the same pairs for both losses; at a saddle between two goals the flow keeps both; how actions are sampled may
be changed after training; it learns a continuous task nearly as PPO does.

On the two-goal grid: 64 environments times 32 steps a batch, two layers of 64, 4 pairs an action, 10 epochs of 8 minibatches, Adam 1e-3 for the flow
and PPO's own 3e-4 for the Gaussian, which learns faster. The discount is 0.9: with 0.995 a step lost at the saddle costs half a percent, so that both
policies stay wide there and reach both goals by wandering. The point task is Point-Circle (without its cost) in place of a reacher: 32 environments
times 60 steps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from statistics import fmean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from anypo.claims import Evidence, ablation, claim
from anypo.domains.control import two_goals
from anypo.domains.control.collect import episodes
from anypo.domains.control.setup import build
from anypo.domains.diffusion.denoise import uniform_levels
from anypo.loops.on_policy import step
from anypo.method import Method
from anypo.methods.control.ppo import METHOD as PPO
from anypo.methods.diffusion.fpo import METHOD, cfm_loss, ratio
from anypo.reproductions.common import ShuffledCredit
from anypo.run import Run

SEEDS = (0, 1, 2)
STEPS = 60
WATCHED = 10  # last steps over which the shares of the goals are averaged
ATTEMPTS = 200
TOY = METHOD.set("rollout.draws", 4).set("update.learning_rate", 1e-3).set("update.minibatches", 8).set("credit.gamma", 0.9)
GAUSSIAN = PPO.set("update.minibatches", 8).set("credit.gamma", 0.9)


def _run(method: Method, environment: str, seed: int, steps: int, **options: Any) -> Run:
    needs = {name.removeprefix("old_") for name in method.needs()}
    policy, task = build(environment, None, needs=needs, seed=seed, **options)
    return Run(method, policy, task, steps=steps, seed=seed)


def from_the_saddle(run: Run) -> tuple[float, float, float]:
    """Shares of attempts from the very middle of the grid that end at the upper and the lower goal, and their mean length."""
    policy: Any = run.policy
    environments: Any = run.task.environments(ATTEMPTS)  # type: ignore[attr-defined]
    environments.state = np.full((2, ATTEMPTS), two_goals.MIDDLE)
    rng, act = np.random.default_rng(run.step), policy.actor()
    observation, going = np.zeros((ATTEMPTS, 2), np.float32), np.arange(ATTEMPTS)
    while len(going):
        seen = environments.step(policy.for_environment(act(observation, policy.noise(rng, (len(going),)))), going)
        left = ~(seen.terminated | seen.truncated)
        going, observation = going[left], seen.observation[left]
    height = environments.state[1]
    return float((height > two_goals.SIZE - 1.5).mean()), float((height < 0.5).mean()), float(environments.elapsed.mean())


@cache
def _on_the_grid(gaussian: bool, seed: int) -> tuple[Run, float]:
    """A trained policy and the mean share of its rarer goal over the last steps."""
    run = _run(GAUSSIAN if gaussian else TOY, two_goals.NAME, seed, STEPS, envs=64, horizon=32)
    rarer = []
    while not run.finished:
        step(run)
        if run.step > STEPS - WATCHED:
            rarer.append(min(from_the_saddle(run)[:2]))
    return run, fmean(rarer)


def _both_goals(gaussian: bool) -> Evidence:
    shares = [round(_on_the_grid(gaussian, seed)[1], 3) for seed in SEEDS]
    return Evidence(shares, "the rarer goal gets at least 0.15 of the attempts, mean of 3 seeds", fmean(shares) >= 0.15)


@claim(
    "From the saddle between two goals the trained flow policy reaches its rarer goal in at least 15% of attempts, mean of 3 seeds",
    slow=True,
)
def keeps_both_goals() -> Evidence:
    return _both_goals(gaussian=False)


@ablation(keeps_both_goals, "a Gaussian policy of equal size, trained by PPO")
def gaussian_policy() -> Evidence:
    return _both_goals(gaussian=True)


CIRCLE = "PointCircle-v0"
POINT_STEPS = 20
POINT = METHOD.set("objective.eps", 0.1).set("update.learning_rate", 2e-3).set("update.minibatches", 8).set("rollout.draws", 4)


@cache
def _on_the_circle(name: str, seed: int) -> tuple[Run, float, float]:
    """A run on the point task, and its mean held-out return before and after."""
    method = {"fpo": POINT, "ppo": PPO.set("update.minibatches", 8), "shuffled": POINT.but(credit=ShuffledCredit(POINT.credit))}[name]
    run = _run(method, CIRCLE, seed, POINT_STEPS, envs=32, horizon=60)
    before = run.task.evaluate(run)["return"]
    while not run.finished:
        step(run)
    return run, before, run.task.evaluate(run)["return"]


def _learns(name: str) -> Evidence:
    shares = []
    for seed in (0, 1):
        _, before, after = _on_the_circle(name, seed)
        shares.append(round((after - before) / (_on_the_circle("ppo", seed)[2] - before), 3))
    return Evidence(shares, "at least half of the way from the untrained policy to PPO's return, both of 2 seeds", min(shares) >= 0.5)


@claim("On Point-Circle FPO covers at least half of the way to PPO's return after the same 38400 steps", slow=True)
def learns_a_point_task() -> Evidence:
    return _learns("fpo")


@ablation(learns_a_point_task, "advantages dealt to the wrong environments")
def point_task_without_credit() -> Evidence:
    return _learns("shuffled")


def _sampled_return(run: Run, act: Callable[..., NDArray]) -> float:
    """Mean return of 64 held-out episodes with sampled actions."""
    policy, rng = run.policy, np.random.default_rng(0)
    environments = run.task.environments(64)  # type: ignore[attr-defined]
    seen = episodes(environments, list(range(10**6, 10**6 + 64)), act, policy.for_environment, lambda n: policy.noise(rng, (n,)))
    return float(seen.reward.sum(1).mean())


def _followed(policy: Any, steps: int, integrator: str) -> Callable[..., NDArray]:
    """The policy's actor with another sampler than in training."""
    twin = policy.snapshot()
    twin.sampling_steps, twin.integrator = steps, integrator
    return twin.actor()


def _half_way(policy: Any) -> Callable[..., NDArray]:
    """The actor that leaves the path after five of ten Euler steps."""
    normalize, given = policy._normalizer(), policy.actor_network.at_levels(uniform_levels(10))

    def act(observation: NDArray, noise: NDArray) -> NDArray:
        velocity, x = given(normalize(observation)), noise
        for k in range(5):
            x = x - velocity(k, x) / 10
        return x

    return act


def _another_sampler(*others: Callable[[Any], Callable[..., NDArray]]) -> Evidence:
    changes = []
    for seed in (0, 1):
        run = _on_the_circle("fpo", seed)[0]
        trained = _sampled_return(run, _followed(run.policy, 10, "euler"))
        changes += [round(_sampled_return(run, other(run.policy)) / trained - 1, 3) for other in others]
    return Evidence(changes, "the mean return changes by less than 10%, both of 2 seeds", max(map(abs, changes)) < 0.1)


@claim("A flow trained with 10 Euler steps earns the same within 10% when it is followed by 5 Heun or 50 Euler steps", slow=True)
def sampler_is_free() -> Evidence:
    return _another_sampler(lambda policy: _followed(policy, 5, "heun"), lambda policy: _followed(policy, 50, "euler"))


# A single Euler step is no ablation here: the trained paths are so straight that it earns the same.
@ablation(sampler_is_free, "a sampler that leaves the path half way")
def no_path() -> Evidence:
    return _another_sampler(_half_way)


def _log_ratio_spread(paired: bool) -> Evidence:
    """Standard deviation over actions of the log-ratio of a policy to itself."""
    run = _run(METHOD, CIRCLE, 0, 1, envs=8, horizon=60)
    batch = run.method.rollout(run.method.select(run.task, run), run)
    run.prepare_signals(batch, run.method.needs("objective"))
    if not paired:
        shape = batch.signals["flow_noise"].shape
        fresh = batch.signals | {
            "flow_noise": torch.randn(shape, generator=run.generator),
            "flow_level": torch.rand(shape[:3], generator=run.generator),
        }
    else:
        fresh = batch.signals
    again = run.score(batch.but(signals=fresh), {"flow_velocity"})
    old = cfm_loss(batch.action, batch.signals["flow_noise"], batch.signals["flow_level"], batch.signals["old_flow_velocity"])
    new = cfm_loss(batch.action, fresh["flow_noise"], fresh["flow_level"], again.flow_velocity)
    spread = float(ratio(old, new).log().std())
    return Evidence(round(spread, 4), "0 exactly", spread == 0)


@claim("With the same pairs for the old and the new loss, the ratio of a policy to itself is 1 for every action")
def pairs_make_the_ratio_exact() -> Evidence:
    return _log_ratio_spread(paired=True)


@ablation(pairs_make_the_ratio_exact, "fresh pairs for the new loss")
def fresh_pairs() -> Evidence:
    return _log_ratio_spread(paired=False)
