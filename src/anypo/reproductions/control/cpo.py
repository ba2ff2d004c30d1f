"""Claims of CPO: the step solves the local problem, and on Point-Circle the cost of an episode comes down to its limit and stays there while the return
rises. Runs of 50 iterations of 3840 steps (32 environments, two episodes each), limit 5: from half of that the cost of an episode is not known well
enough to be held."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.control.point_circle import PointCircle
from anypo.domains.control.setup import build
from anypo.methods.control.cpo import METHOD, RewardAndCost, cpo_step
from anypo.methods.control.trpo import TrustRegionStep, full_step
from anypo.reproductions.common import train_on
from anypo.run import Run
from anypo.seams.credit import GAE, whiten

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


@dataclass
class PrimalDual(RewardAndCost):
    """TRPO with a multiplier: the advantage of the reward minus nu times that of the cost; nu follows the violation."""

    rate: float = 0.05  # of the multiplier, for each unit of cost beyond the limit

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        reward, nu = super().__call__(batch, run), run.state.get("nu", 0.0)
        run.state["nu"] = max(0.0, nu + self.rate * (self.last[0] - LIMIT))
        return whiten((reward - nu * batch.signals["cost_advantage"]) / (1 + nu), batch.mask)


class Course(NamedTuple):
    cost: list[float]  # mean cost of the episodes that ended in each iteration
    reward: list[float]  # and their mean return
    recovery: list[float]


@functools.cache
def circle(kind: str, seed: int) -> Course:
    """A run on Point-Circle by "cpo"; by "trpo", which is CPO with a limit of 1e9, exactly; or "primal-dual"."""
    torch.set_num_threads(1)
    method = METHOD.set("update.minibatches", 8).set("update.limit", 1e9 if kind == "trpo" else LIMIT)
    if kind == "primal-dual":
        fields = {name: getattr(method.update, name) for name in TrustRegionStep.__dataclass_fields__}
        method = method.but(credit=PrimalDual(inner=GAE(gamma=0.995, lam=0.95, normalize=False)), update=TrustRegionStep(**fields))
    policy, task = build(PointCircle, None, seed=seed, envs=32, horizon=120, hidden=(32, 32), normalize_rewards=False, initial_log_std=-0.5)

    def look(run: Run, batch: Batch) -> tuple[float, float, float]:
        record = run.history[-1]
        return record["episode_cost"], record["reward"], record.get("recovery", 0.0)

    return Course(*(list(c) for c in zip(*train_on(method, policy, task, steps=50, seed=seed, watch=look), strict=True)))


def _last(values: list[float], count: int = 10) -> float:
    return round(sum(values[-count:]) / count, 2)


def _near_the_limit(kind: str, seeds: tuple[int, ...]) -> Evidence:
    runs = [circle(kind, seed) for seed in seeds]
    costs, returns = [_last(r.cost) for r in runs], [_last(r.reward) for r in runs]
    holds = max(costs) <= 1.3 * LIMIT and min(returns) > 15
    return Evidence({"cost": costs, "return": returns}, "mean cost of the last 10 iterations at most 6.5, mean return above 15", holds)


@claim("On Point-Circle the mean cost of an episode ends within 1.3 times its limit while the return rises from 0 to above 15", slow=True)
def limit_is_nearly_met() -> Evidence:
    return _near_the_limit("cpo", SEEDS)


@ablation(limit_is_nearly_met, "no limit (TRPO)")
def trpo_leaves_the_corridor() -> Evidence:
    return _near_the_limit("trpo", SEEDS[:1])


def _far_beyond(kind: str) -> Evidence:
    cost = _last(circle(kind, 0).cost)
    return Evidence(cost, "mean cost of the last 10 iterations above 15", cost > 3 * LIMIT)


@claim("TRPO, which knows of no limit, ends on Point-Circle with more than 3 times the cost", slow=True)
def trpo_exceeds_the_limit() -> Evidence:
    return _far_beyond("trpo")


@ablation(trpo_exceeds_the_limit, "CPO with the limit")
def cpo_does_not() -> Evidence:
    return _far_beyond("cpo")


def _seldom_beyond(kind: str, seeds: tuple[int, ...]) -> Evidence:
    shares = [round(sum(c > 1.5 * LIMIT for c in circle(kind, seed).cost) / 50, 2) for seed in seeds]
    return Evidence(shares, "share of iterations above 1.5 times the limit below 0.15, in every seed", max(shares) < 0.15)


@claim("From start to end the cost exceeds its limit by more than half in fewer than 15% of the iterations on Point-Circle", slow=True)
def limit_is_seldom_exceeded() -> Evidence:
    return _seldom_beyond("cpo", SEEDS)


@ablation(limit_is_seldom_exceeded, "a learned multiplier in the reward in place of the constrained step (primal-dual TRPO)")
def primal_dual_exceeds_it_more() -> Evidence:
    return _seldom_beyond("primal-dual", SEEDS[:1])


def _recovers(kind: str, seeds: tuple[int, ...]) -> Evidence:
    """The mean cost in the iterations of the first recovery phase and in the one after it (of a run without one: in the first four)."""
    falls = []
    for seed in seeds:
        course = circle(kind, seed)
        first = next(i for i, case in enumerate(course.recovery) if not case)
        falls.append([round(c, 1) for c in course.cost[: (first or 3) + 1]])
    lower = all(after < before for f in falls for before, after in zip(f, f[1:], strict=False))
    return Evidence(falls, "lower at every iteration, in every seed", lower)


@claim("From an infeasible start every recovery step lowers the cost of an episode, until the constraint can be met", slow=True)
def recovery_lowers_the_cost() -> Evidence:
    return _recovers("cpo", SEEDS)


@ablation(recovery_lowers_the_cost, "no limit, so no recovery (TRPO)")
def without_recovery() -> Evidence:
    return _recovers("trpo", SEEDS[:1])
