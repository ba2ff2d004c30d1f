"""Claims of CPO: the step solves the local problem, and on Point-Circle the cost of an episode comes down to its limit while the return rises. Runs of
40 iterations of 1920 steps (16 environments, two episodes each), limit 5."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.control.point_circle import PointCircle
from anypo.domains.control.setup import build
from anypo.methods.control.cpo import METHOD, cpo_step
from anypo.methods.control.trpo import full_step
from anypo.reproductions.common import train_on
from anypo.run import Run

LIMIT = 5.0
SEEDS = (0, 1)
DELTA = 0.02


def _solver(constrained: bool) -> Evidence:
    """10 random problems of 4 parameters, violations from -0.9 to 0.9 of what the region can mend: against 20000 random points of the region."""
    better, violated = 0, 0.0
    for seed in range(10):
        g = torch.Generator().manual_seed(seed)
        reward, cost = (torch.randn(4, generator=g, dtype=torch.float64) for _ in range(2))
        root = torch.randn(4, 4, generator=g, dtype=torch.float64)
        matrix = root @ root.T + 0.3 * torch.eye(4, dtype=torch.float64)
        c = (-0.9 + 0.2 * seed) * math.sqrt(2 * DELTA * float(cost @ torch.linalg.solve(matrix, cost)))
        found = cpo_step(reward, cost, matrix, c, DELTA).step if constrained else full_step(matrix, reward, DELTA).step
        points = torch.randn(20000, 4, generator=g, dtype=torch.float64)
        points *= (2 * DELTA / torch.einsum("np,pq,nq->n", points, matrix, points)).sqrt()[:, None]
        points *= torch.rand(20000, 1, generator=g, dtype=torch.float64) ** 0.25
        feasible = points[c + points @ cost <= 0]
        better += int((feasible @ reward > reward @ found + 1e-12).sum())
        violated = max(violated, float(c + cost @ found), float(0.5 * found @ matrix @ found - DELTA))
    measured = {"better points": better, "largest violation": float(f"{violated:.2g}")}
    return Evidence(measured, "no better feasible point; constraint and region hold to 1e-8", better == 0 and violated <= 1e-8)


@claim(
    "The closed-form step meets the linear constraint and the region to 1e-8, and no feasible point of 20000 is better, in 10 random problems"
)
def step_is_optimal() -> Evidence:
    return _solver(constrained=True)


@ablation(step_is_optimal, "the multiplier of the cost is 0")
def step_without_constraint() -> Evidence:
    return _solver(constrained=False)


def _infeasible(recovery: bool) -> Evidence:
    """Where no point of the region meets the constraint, the change of the cost against the least possible one, in 5 random problems."""
    shares = []
    for seed in range(5):
        g = torch.Generator().manual_seed(seed)
        reward, cost = (torch.randn(4, generator=g, dtype=torch.float64) for _ in range(2))
        root = torch.randn(4, 4, generator=g, dtype=torch.float64)
        matrix = root @ root.T + 0.3 * torch.eye(4, dtype=torch.float64)
        reach = math.sqrt(2 * DELTA * float(cost @ torch.linalg.solve(matrix, cost)))
        found = cpo_step(reward, cost, matrix, 1.5 * reach, DELTA).step if recovery else full_step(matrix, reward, DELTA).step
        shares.append(float(-cost @ found) / reach)
    return Evidence([round(s, 4) for s in shares], "all of what the region allows, to 1e-8", min(shares) >= 1 - 1e-8)


@claim("Where no step meets the constraint, the recovery step lowers the linear cost as far as the region allows")
def recovery_is_optimal() -> Evidence:
    return _infeasible(recovery=True)


@ablation(recovery_is_optimal, "a step for the reward instead")
def recovery_left_out() -> Evidence:
    return _infeasible(recovery=False)


class Course(NamedTuple):
    cost: list[float]  # mean cost of the episodes that ended in each iteration
    reward: list[float]  # and their mean return
    recovery: list[float]


@functools.cache
def circle(seed: int, limit: float = LIMIT) -> Course:
    """A run on Point-Circle; a limit of 1e9 makes it TRPO, exactly."""
    torch.set_num_threads(1)
    method = METHOD.set("update.minibatches", 8).set("update.limit", limit)
    policy, task = build(PointCircle, None, seed=seed, envs=16, horizon=120, hidden=(32, 32), normalize_rewards=False, initial_log_std=-0.5)

    def look(run: Run, batch: Batch) -> tuple[float, float, float]:
        record = run.history[-1]
        return record["episode_cost"], record["reward"], record["recovery"]

    return Course(*(list(c) for c in zip(*train_on(method, policy, task, steps=40, seed=seed, watch=look), strict=True)))


def _last(values: list[float], count: int = 10) -> float:
    return round(sum(values[-count:]) / count, 2)


def _near_the_limit(limit: float) -> Evidence:
    runs = [circle(seed, limit) for seed in (SEEDS if limit == LIMIT else SEEDS[:1])]
    costs, returns = [_last(r.cost) for r in runs], [_last(r.reward) for r in runs]
    holds = max(costs) <= 1.3 * LIMIT and min(returns) > 15
    return Evidence({"cost": costs, "return": returns}, "mean cost of the last 10 iterations at most 6.5, mean return above 15", holds)


@claim("On Point-Circle the mean cost of an episode ends within 1.3 times its limit while the return rises from 0 to above 15", slow=True)
def limit_is_nearly_met() -> Evidence:
    return _near_the_limit(LIMIT)


@ablation(limit_is_nearly_met, "no limit (TRPO)")
def trpo_leaves_the_corridor() -> Evidence:
    return _near_the_limit(1e9)


def _recovers(limit: float) -> Evidence:
    """The mean cost in the iterations of the first recovery phase and in the one after it (of a run without one: in the first four)."""
    falls = []
    for seed in SEEDS if limit == LIMIT else SEEDS[:1]:
        course = circle(seed, limit)
        first = next(i for i, case in enumerate(course.recovery) if not case)
        falls.append([round(c, 1) for c in course.cost[: (first or 3) + 1]])
    lower = all(after < before for f in falls for before, after in zip(f, f[1:], strict=False))
    return Evidence(falls, "lower at every iteration, in both seeds", lower)


@claim("From an infeasible start every recovery step lowers the cost of an episode, until the constraint can be met", slow=True)
def recovery_lowers_the_cost() -> Evidence:
    return _recovers(LIMIT)


@ablation(recovery_lowers_the_cost, "no limit, so no recovery (TRPO)")
def without_recovery() -> Evidence:
    return _recovers(1e9)
