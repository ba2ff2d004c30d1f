"""Claims of CAL. A convex problem on a line: the augmented form damps the oscillation of primal and dual. Choices among actions with uncertain costs:
the upper value undoes the choice's preference for errors. On Point-Circle (limit 5 of 60 steps, 100 episodes, networks (32,32), minibatches of 64)
the limit is met; whether the augmented weight brings return is open, and fewer underestimates and violations than of SAC with a Lagrange multiplier do
not show in 6000 updates."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from statistics import fmean, pvariance

import numpy as np
import torch

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.control.costly import CostAwareActorCritic
from anypo.domains.control.point_circle import STEPS, PointCircle
from anypo.domains.control.setup import build
from anypo.loops import off_policy
from anypo.method import Method
from anypo.methods.control.cal import METHOD, augmented_lagrangian, upper_cost
from anypo.run import Run

LIMIT, EPISODES, GAMMA, K = 5.0, 100, 0.95, 0.5
SIZES = {  # 6000 updates in place of a million: a larger step, quicker targets, and a buffer of 30 episodes, whose mean cost the multiplier follows
    "rollout.steps": STEPS, "rollout.batch_size": 64, "rollout.warmup": 600, "rollout.capacity": 30 * STEPS, "update.learning_rate": 1e-3,
    "update.tau": 0.02,
}  # fmt: skip
SEEDS = (0, 1)
KINDS = {"cal": (K, 10.0), "conservative": (K, 0.0), "lagrangian": (0.0, 0.0), "unlimited": (K, 10.0)}  # name -> k, c


def on_a_line(c: float, steps: int = 2000, primal: float = 0.01, dual: float = 0.2) -> tuple[float, float, float]:
    """Gradient steps on min (x-2)^2 with x <= 1 from x = lam = 0: last x, last lam, and the variance of x after step 50."""
    x, lam, seen = 0.0, 0.0, []
    for _ in range(steps):
        weight = augmented_lagrangian(0.0, x - 1, lam, c).multiplier
        x -= primal * (2 * (x - 2) + weight)
        lam = max(0.0, lam + dual * (x - 1))
        seen.append(x)
    return x, lam, pvariance(seen[50:])


def _damped(c: float) -> Evidence:
    (x, lam, spread), plain = on_a_line(c), on_a_line(0.0)[2]
    measured = {"x": round(x, 4), "lam": round(lam, 4), "variance": round(spread, 6), "variance of plain primal-dual": round(plain, 6)}
    holds = abs(x - 1) < 0.01 and abs(lam - 2) < 0.01 and plain > 5 * spread
    return Evidence(measured, "x = 1 and lam = 2 within 0.01, and a variance below a fifth of the plain one's", holds)


@claim("On a convex problem the augmented weight ends at the solution with less than a fifth of plain primal-dual's variance of x")
def oscillation_is_damped() -> Evidence:
    return _damped(10.0)


@ablation(oscillation_is_damped, "no quadratic term (c = 0)")
def oscillation_of_the_plain_form() -> Evidence:
    return _damped(0.0)


def _choices(k: float, problems: int = 4000, actions: int = 20, error: float = 0.4) -> Evidence:
    """The best-paid of 20 actions whose estimated cost is at most 1, true costs uniform in [0,2], the members' errors independent: how often the
    estimate of the chosen action is too low, and how often its true cost is above the limit."""
    g = torch.Generator().manual_seed(1)
    true, reward = 2 * torch.rand(problems, actions, generator=g), torch.rand(problems, actions, generator=g)
    members = true + error * torch.randn(4, problems, actions, generator=g)

    def rates(k: float) -> tuple[float, float]:
        value = upper_cost(members.flatten(1), k).view(problems, actions)
        chosen = torch.where(value <= 1, reward + true, -torch.inf).argmax(1, keepdim=True)  # what pays, costs
        at = [x.gather(1, chosen) for x in (value, true)]
        return float((at[0] < at[1]).float().mean()), float((at[1] > 1).float().mean())

    (low, above), (low_mean, above_mean) = rates(k), rates(0.0)
    measured = {"too low": [round(low, 3), round(low_mean, 3)], "above the limit": [round(above, 3), round(above_mean, 3)]}
    holds = low < 0.5 < low_mean and above <= 0.6 * above_mean
    return Evidence(measured, "the mean too low in more than half, the upper value in fewer; at most 60% of the mean's violations", holds)


@claim(
    "Of the best-paid actions within an estimated limit the ensemble's mean underestimates most, the upper value fewer than half, with 60% of the violations"
)
def upper_value_undoes_the_choice() -> Evidence:
    return _choices(K)


@ablation(upper_value_undoes_the_choice, "the mean (k = 0)")
def mean_of_the_ensemble() -> Evidence:
    return _choices(0.0)


@dataclass
class Course:
    cost: list[float] = field(default_factory=list)  # of each episode
    reward: list[float] = field(default_factory=list)  # and its return
    mean: list[float] = field(default_factory=list)  # at every fifth episode: what the ensemble's mean is above the true cost
    upper: list[float] = field(default_factory=list)  # the same of the upper value
    spread: list[float] = field(default_factory=list)  # mean standard deviation of the ensemble on these states


def look(policy: CostAwareActorCritic, seed: int, starts: int = 16) -> tuple[float, float, float]:
    """How far mean and upper value lie above the Monte-Carlo cost on fresh states of the policy's own episodes, and the spread there.

    An environment goes on past its limit of steps, so that the discounted cost to go of a state within it misses 5% at most."""
    rng, act = np.random.default_rng(seed), policy.actor()
    environments = [PointCircle() for _ in range(starts)]
    seen = np.stack([e.reset(seed=seed + i)[0] for i, e in enumerate(environments)])
    states, actions, costs = [], [], []
    for _ in range(2 * STEPS):
        action = act(seen, policy.noise(rng, (starts,)))
        moved = [e.step(a) for e, a in zip(environments, action, strict=True)]
        states.append(seen)
        actions.append(action)
        costs.append([m[4]["cost"] for m in moved])
        seen = np.stack([m[0] for m in moved])
    cost, togo = np.array(costs), np.zeros((2 * STEPS, starts))
    togo[-1] = cost[-1]
    for t in range(2 * STEPS - 2, -1, -1):
        togo[t] = cost[t] + GAMMA * togo[t + 1]
    context, acted = (torch.from_numpy(np.stack(x[:STEPS])) for x in (states, actions))
    mask = torch.ones(STEPS, starts, dtype=torch.bool)
    found = policy.observe(Batch(acted, mask, torch.zeros(mask.shape), torch.arange(STEPS), context=context), {"cost_q"}).cost_q
    ensemble, true = found.flatten(0, 1).T, float(togo[:STEPS].mean())
    return float(ensemble.mean()) - true, float(upper_cost(ensemble, K).mean()) - true, float(ensemble.std(0).mean())


@functools.cache
def circle(kind: str, seed: int, episodes: int = EPISODES) -> Course:
    """A run on Point-Circle with the parts of `kind`; an iteration is an episode. "unlimited" has a limit of 1e9."""
    torch.set_num_threads(1)
    method: Method = METHOD.set("credit.limit", 1e9 if kind == "unlimited" else LIMIT).set("credit.cost_gamma", GAMMA)
    for path, value in (SIZES | dict(zip(("objective.k", "objective.c"), KINDS[kind], strict=True))).items():
        method = method.set(path, value)
    policy, task = build(PointCircle, None, needs=method.needs(), seed=seed, envs=1, hidden=(32, 32))
    run, course = Run(method, policy, task, steps=episodes, seed=seed), Course()
    for episode in range(episodes):
        batch = off_policy.step(run)
        course.cost.append(float(batch.signals["cost"].sum()))
        course.reward.append(float(batch.signals["raw_reward"].sum()))
        if episode >= 20 and episode % 5 == 4:
            for values, value in zip((course.mean, course.upper, course.spread), look(policy, 1000 * seed + episode), strict=True):  # type: ignore[arg-type]
                values.append(value)
    return course


def _limit_is_met(kind: str, seeds: tuple[int, ...], episodes: int = EPISODES) -> Evidence:
    costs = [round(fmean(circle(kind, seed, episodes).cost[-20:]), 2) for seed in seeds]
    return Evidence(costs, "mean of the seeds at most 6", fmean(costs) <= 1.2 * LIMIT)


@claim("On Point-Circle the mean cost of CAL's last 20 episodes, over two seeds, is at most 1.2 times the limit", slow=True)
def limit_is_met() -> Evidence:
    return _limit_is_met("cal", SEEDS)


@ablation(limit_is_met, "a limit that nothing exceeds")
def without_a_limit() -> Evidence:
    return _limit_is_met("unlimited", SEEDS[:1], 60)


def _convexified(kind: str) -> Evidence:
    """It held on these two seeds (30.5 and 35.8 against 22.7 and 21.7; spreads 0.3 and 0.5); of two further ones, on which the sizes were chosen,
    one had the return the other way round (33 and 39), so two seeds do not decide it."""
    ends = {k: [round(fmean(circle(k, seed).reward[-20:]), 1) for seed in SEEDS] for k in (kind, "conservative")}
    spread = {k: [round(fmean(circle(k, seed).spread), 2) for seed in SEEDS] for k in (kind, "conservative")}
    holds = fmean(ends[kind]) > fmean(ends["conservative"]) and fmean(spread[kind]) < fmean(spread["conservative"])
    return Evidence({"return": ends, "spread": spread}, "a higher return and a smaller spread, on the mean of the seeds", holds)


@claim(
    "CAL ends with a higher return, and a smaller spread of the ensemble on its states, than conservative costs with a plain multiplier",
    slow=True,
    reproduced=False,
)
def convexification_helps() -> Evidence:
    return _convexified("cal")


@ablation(convexification_helps, "no quadratic term (c = 0)")
def without_convexification() -> Evidence:
    return _convexified("conservative")


# The last two do not show at this size. Every method spends the first 20 episodes until its critics know the costs, and circles around the limit
# afterwards. Half a standard deviation of the ensemble is small against what its mean is off, so it changes the sign of few errors.


@claim(
    "In SAC-Lagrangian's evaluations the mean cost is mostly too low; CAL's upper value is so at most half as often",
    slow=True,
    reproduced=False,
)
def costs_are_not_underestimated() -> Evidence:
    plain = [sum(gap < 0 for gap in circle("lagrangian", seed).mean) for seed in SEEDS]
    upper, count = [sum(gap < 0 for gap in circle("cal", seed).upper) for seed in SEEDS], len(SEEDS) * len(circle("cal", SEEDS[0]).mean)
    holds = sum(plain) > count / 2 and sum(upper) <= 0.5 * sum(plain)
    return Evidence({"SAC-Lagrangian": plain, "CAL": upper, "of": count}, "more than half, and at most half as many", holds)


@claim("During training CAL has at most 60% of SAC-Lagrangian's episodes above the limit", slow=True, reproduced=False)
def fewer_violations() -> Evidence:
    count = {kind: [sum(cost > LIMIT for cost in circle(kind, seed).cost) for seed in SEEDS] for kind in ("cal", "lagrangian")}
    return Evidence(count, "at most 60%", sum(count["cal"]) <= 0.6 * sum(count["lagrangian"]))
