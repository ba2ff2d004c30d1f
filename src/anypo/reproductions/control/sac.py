"""What SAC and GAE must show: truncation is no termination, lambda trades bias for variance, Pendulum is solved in 8000 steps, the temperature holds
the entropy at its target."""

from __future__ import annotations

import functools
from statistics import fmean
from typing import NamedTuple

import numpy as np
import torch

from anypo.claims import Evidence, ablation, claim
from anypo.domains.control.setup import build
from anypo.loops import off_policy
from anypo.method import Method
from anypo.methods.control.sac import METHOD, Temperature
from anypo.run import Run
from anypo.seams.credit import gae

ITERATIONS = 125  # of 64 environment steps each: 8000 in all
TARGET_ENTROPY = -1.0  # nats, for one action dimension


def fitted_chain_value(truncation_ends_the_problem: bool, gamma: float = 0.9, limit: int = 10, sweeps: int = 200) -> float:
    """Mean fitted value of a ring of 5 states with reward 1 a step for ever, watched in episodes of 10 steps that begin anywhere."""
    generator = torch.Generator().manual_seed(0)
    value = torch.zeros(5, dtype=torch.float64)
    for _ in range(sweeps):
        start = torch.randint(5, (20, 1), generator=generator)
        state = (start + torch.arange(limit + 1)) % 5
        last = torch.zeros(20, limit)
        last[:, -1] = 1
        nothing = torch.zeros_like(last)
        ends = (last, nothing) if truncation_ends_the_problem else (nothing, last)
        ones = torch.ones(20, limit, dtype=torch.float64)
        found = gae(ones, value[state[:, :-1]], *ends, ones.bool(), gamma, 0.9, next_value=value[state[:, 1:]])
        for s in range(5):
            value[s] += 0.5 * (found.returns[state[:, :-1] == s].mean() - value[s])
    return float(value.mean())


@claim(
    "With truncation told apart from termination, the fitted value of an endless task watched for 10 steps at a time is 1/(1-gamma), within 5%"
)
def truncation_keeps_the_bootstrap() -> Evidence:
    measured = fitted_chain_value(truncation_ends_the_problem=False)
    return Evidence(round(measured, 3), "9.5 to 10.5", 9.5 <= measured <= 10.5)


@ablation(truncation_keeps_the_bootstrap, "truncation is treated as termination")
def truncation_treated_as_termination() -> Evidence:
    measured = fitted_chain_value(truncation_ends_the_problem=True)
    return Evidence(round(measured, 3), "9.5 to 10.5", 9.5 <= measured <= 10.5)


class Spread(NamedTuple):
    bias: float  # of the estimated worth of the first step, absolute
    variance: float


def walk_estimates(lam: float, value_error: float, seed: int = 0, walks: int = 10000) -> Spread:
    """Estimates of the first step's worth on a random walk over 9 states from the middle; +1 at the right end, noise of deviation 0.5 on every
    reward.

    The true value of state i is (i+1)/10, so the first step to the right is worth 0.6. The critic errs by `value_error` times a fixed random number
    in every state. The worth is the advantage plus the critic's own value of the start, whose error is the same for every lambda.
    """
    rng = np.random.default_rng(seed)
    horizon = 150
    position = np.full(walks, 4)
    states, rewards, ends, mask = (np.zeros((walks, horizon)) for _ in range(4))
    following = np.zeros((walks, horizon), dtype=int)
    alive = np.ones(walks, dtype=bool)
    for t in range(horizon):
        states[:, t] = position
        mask[:, t] = alive
        position = np.where(alive, position + rng.choice([-1, 1], walks), position)
        out = (position < 0) | (position > 8)
        rewards[:, t] = ((position > 8) + 0.5 * rng.standard_normal(walks)) * alive
        ends[:, t] = out & alive
        alive &= ~out
        following[:, t] = position.clip(0, 8)
        position = following[:, t]
    critic = torch.from_numpy((np.arange(9) + 1) / 10 + value_error * np.random.default_rng(seed + 1).standard_normal(9))
    as_tensor = torch.from_numpy
    found = gae(
        as_tensor(rewards), critic[as_tensor(states).long()], as_tensor(ends), torch.zeros(walks, horizon), as_tensor(mask).bool(), 1.0, lam,
        next_value=critic[as_tensor(following)],
    )  # fmt: skip
    right = as_tensor(following[:, 0] > 4)
    first = found.returns[:, 0][right]
    return Spread(abs(float(first.mean()) - 0.6), float(first.var()))


@claim("On a noisy random walk a larger lambda raises the variance of the estimate and, with a wrong critic, lowers its bias")
def lambda_trades_bias_for_variance() -> Evidence:
    spreads = [walk_estimates(lam, value_error=0.3) for lam in (0.0, 0.5, 0.9, 1.0)]
    variance, bias = [s.variance for s in spreads], [s.bias for s in spreads]
    rises = all(a < b for a, b in zip(variance, variance[1:], strict=False))
    measured = {"variance": [round(v, 2) for v in variance], "bias": [round(b, 3) for b in bias]}
    return Evidence(
        measured, "variance rises with lambda 0, 0.5, 0.9, 1; bias at 0 more than 3 times that at 1", rises and bias[0] > 3 * bias[3]
    )


@ablation(lambda_trades_bias_for_variance, "the critic is right, so that there is no bias to trade")
def no_bias_without_an_error() -> Evidence:
    spreads = [walk_estimates(lam, value_error=0.0) for lam in (0.0, 1.0)]
    return Evidence([round(s.bias, 3) for s in spreads], "bias at 0 more than 3 times that at 1", spreads[0].bias > 3 * spreads[1].bias)


class Learned(NamedTuple):
    before: float
    after: float  # mean evaluation return
    entropy: float  # mean of -log pi over the last 1000 updates


@functools.cache
def pendulum(seed: int, gamma: float = 0.99, tuned: bool = True) -> Learned:
    """SAC on Pendulum-v1: (64,64) networks, minibatches of 128, Adam 1e-3; networks this small want a larger step than the paper's 3e-4."""
    torch.set_num_threads(1)
    method: Method = METHOD.set("rollout.batch_size", 128).set("update.learning_rate", 1e-3).set("credit.gamma", gamma)
    if not tuned:
        method = method.but(regularize=tuple(r for r in method.regularize if not isinstance(r, Temperature)))
    policy, task = build("Pendulum-v1", None, needs={"q_new"}, seed=seed, hidden=(64, 64))
    run = Run(method, policy, task, steps=ITERATIONS, seed=seed)
    before = task.evaluate(run)["return"]
    off_policy.train(run)
    entropies = [record["entropy"] for record in run.history if "entropy" in record]
    return Learned(before, task.evaluate(run)["return"], fmean(entropies[-(1000 // 64 + 1) :]))


@claim("SAC reaches a mean evaluation return above -300 on Pendulum-v1 in 8000 steps, from about -1200 untrained", slow=True)
def pendulum_is_solved() -> Evidence:
    found = [pendulum(seed) for seed in (0, 1)]
    measured = {"before": round(fmean(f.before for f in found)), "after": [round(f.after) for f in found]}
    return Evidence(
        measured, "after > -300 for both seeds, before < -1000", min(f.after for f in found) > -300 and measured["before"] < -1000
    )


@ablation(pendulum_is_solved, "the target does not bootstrap (gamma 0)")
def pendulum_without_bootstrap() -> Evidence:
    found = pendulum(0, gamma=0.0)
    return Evidence(round(found.after), "> -300", found.after > -300)


@claim("The learned temperature holds the mean of -log pi over the last 1000 updates within 0.3 of the target entropy", slow=True)
def entropy_is_held() -> Evidence:
    found = [pendulum(seed).entropy for seed in (0, 1)]
    return Evidence([round(e, 2) for e in found], f"within 0.3 of {TARGET_ENTROPY}", all(abs(e - TARGET_ENTROPY) < 0.3 for e in found))


@ablation(entropy_is_held, "the temperature stays at 1")
def entropy_without_tuning() -> Evidence:
    found = pendulum(0, tuned=False).entropy
    return Evidence(round(found, 2), f"within 0.3 of {TARGET_ENTROPY}", abs(found - TARGET_ENTROPY) < 0.3)
