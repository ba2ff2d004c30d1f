"""Claims of zeroth-order queue scheduling: costs after training, stability by the guard, variance of the estimators, PPO, other services.

Costs are means over 64 copies of 6000 steps that training has not seen, the same for all rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.combinatorial.queue_tasks import QueueTask
from anypo.domains.combinatorial.queues import FEATURES, NETWORKS, average_cost
from anypo.domains.combinatorial.setup import build
from anypo.loops.on_policy import train
from anypo.methods.combinatorial.zeroth_order_queue import METHOD, PerturbedRollout, query_costs, zo_gradient
from anypo.methods.control.ppo import METHOD as PPO
from anypo.run import Run

SEEDS = (0, 1)
GUARD, UNSEEN = 30.0, 5_000_000  # jobs beyond which back-pressure decides; first seed of the copies that costs are measured on
NO_RULE = np.zeros((3, FEATURES))  # a random choice among the waiting classes


@cache
def _measured(rule: tuple[float, ...], guard: float, services: str) -> float:
    task = QueueTask(services=services)
    points = np.broadcast_to(np.array(rule), (64, len(rule)))
    return float(average_cost(task.network, task.simulate(list(range(UNSEEN, UNSEEN + 64)), points, guard, 6000)).mean())


def _cost(rule: NDArray, guard: float = GUARD, services: str = "exponential") -> float:
    return _measured(tuple(rule.ravel().tolist()), guard, services)


@dataclass
class NoFeedback:
    """The ablation of learning: every run is said to have cost the same."""

    def __call__(self, batch: Batch, run: Run) -> torch.Tensor:
        return torch.zeros(len(batch))


@cache
def _trained(seed: int, kind: str = "zeroth", steps: int = 60, **options: Any) -> tuple[NDArray, int]:
    """Weights after training and simulated steps. `kind`: zeroth, silent (the ablation of learning) or ppo."""
    method = {"zeroth": METHOD, "silent": METHOD.but(reward=NoFeedback()), "ppo": PPO}[kind]
    policy, task = build("queue:criss_cross", None, needs=method.needs(), seed=seed, **options)
    run = train(Run(method, policy, task, steps=steps, seed=seed))
    return policy.theta.detach().double().numpy(), run.actions


def _gains(kind: str) -> Evidence:
    before = _cost(NO_RULE)
    after = [_cost(_trained(seed, kind, 60 if kind == "zeroth" else 2)[0]) for seed in SEEDS]  # silent weights stay, however many steps
    measured = {"before": round(before, 3), "after": [round(x, 3) for x in after]}
    return Evidence(measured, "at least 0.05 below the start with every seed", max(after) < before - 0.05)


@claim("criss-cross network: 60 iterations from average costs alone lower the cost of a random choice by at least 0.05", slow=True)
def learns_from_costs() -> Evidence:
    return _gains("zeroth")


@ablation(learns_from_costs, "every run is said to have cost the same")
def learns_nothing() -> Evidence:
    return _gains("silent")


def _below_back_pressure(guard: float) -> Evidence:
    reference = _cost(NO_RULE, 0.0)
    after = [_cost(_trained(seed, "zeroth", 60)[0], guard) for seed in SEEDS]
    measured = {"back-pressure": round(reference, 3), "random choice": round(_cost(NO_RULE), 3), "after": [round(x, 3) for x in after]}
    return Evidence(measured, "at least 8% below back-pressure with every seed", max(after) < 0.92 * reference)


# 11% below, but a random choice that nothing has trained is 9% below already: the guard's rule is a weak one here, and training adds 2 points.
@claim("criss-cross network: the trained rule costs at least 8% less than back-pressure", slow=True, reproduced=False)
def beats_back_pressure() -> Evidence:
    return _below_back_pressure(GUARD)


@ablation(beats_back_pressure, "the guard always decides")
def guard_alone() -> Evidence:
    return _below_back_pressure(0.0)


def _backlog(guard: float) -> Evidence:
    """Rybko-Stolyar network under priority for the classes that leave."""
    task = QueueTask(NETWORKS["rybko_stolyar"])
    priority = np.zeros((4, FEATURES))
    priority[[1, 3], 0] = 8.0

    def backlog(threshold: float) -> NDArray:
        points = np.broadcast_to(priority.reshape(1, -1), (10, priority.size))
        return task.simulate(list(range(10)), points, threshold, 20000).queues.sum(2)

    guarded, reference = backlog(guard), backlog(0.0).max(1)
    largest = guarded.max(1)
    measured = {
        "largest backlog": [int(largest.min()), int(largest.max())],
        "of back-pressure": [int(reference.min()), int(reference.max())],
        "mean at step 5000": float(guarded[:, 5000].mean()),
        "mean at the end": float(guarded[:, -1].mean()),
    }
    return Evidence(measured, "in every copy at most 3 times the largest backlog of back-pressure", bool((largest <= 3 * reference).all()))


@claim("a priority rule that makes the Rybko-Stolyar network unstable stays within 3 times the backlog of back-pressure under the guard")
def guard_keeps_it_stable() -> Evidence:
    return _backlog(GUARD)


@ablation(guard_keeps_it_stable, "no guard")
def unstable_without_guard() -> Evidence:
    return _backlog(float("inf"))


def _variance(kind: str, common: bool) -> float:
    """Total variance of the estimated slope at the random choice over 60 single directions, 8 copies of 500 steps a run."""
    rollout = PerturbedRollout(directions=60, kind=kind, common=common)
    policy, task = build("queue:criss_cross", None, horizon=500, copies=480)
    run = Run(METHOD.but(rollout=rollout), policy, task, steps=1)
    batch = rollout(task.prompts(480, run.rng), run)
    batch.reward = METHOD.reward(batch, run)
    plus = query_costs(batch)
    minus = query_costs(batch, -1.0) if kind == "two_point" else plus
    units = batch.signals["direction"][:60]
    slopes = [zo_gradient(plus[m : m + 1], minus[m : m + 1], units[m : m + 1], rollout.delta, kind).gradient for m in range(60)]
    return float(torch.stack(slopes).var(0).sum())


def _variances(common: bool) -> Evidence:
    found = {
        "common": _variance("two_point", common),
        "independent": _variance("two_point", False),
        "one point": _variance("one_point", True),
    }
    holds = 5 * found["common"] <= found["independent"] < found["one point"]
    return Evidence({k: round(v, 2) for k, v in found.items()}, "common at least 5 times below independent; one point above both", holds)


@claim("pairs that meet the same events have at least 5 times less variance than independent ones, and single runs have more than both")
def common_events_help() -> Evidence:
    return _variances(common=True)


@ablation(common_events_help, "the two runs of a pair meet different events")
def independent_pairs() -> Evidence:
    return _variances(common=False)


STEPS, COPIES, HORIZON = 10, 16, 1000  # of the zeroth-order run; PPO has as many copies, of twice the length


# 8.05 against 8.68, but with so few steps PPO ends above a random choice (8.18; with a discount of 0.999 too), so nothing of the method need be on.
@claim(
    "after as many simulated steps, the guarded rule costs at least 5% less than with PPO at its usual settings",
    slow=True,
    reproduced=False,
)
def better_than_ppo() -> Evidence:
    theta, spent = _trained(0, "zeroth", STEPS, copies=COPIES, horizon=HORIZON)
    other, spent_by_other = _trained(0, "ppo", STEPS, copies=COPIES, horizon=2 * HORIZON, reward_scale=0.01)
    costs = {"zeroth-order": _cost(theta), "PPO": _cost(other), "random choice": _cost(NO_RULE)}
    measured = {name: round(cost, 3) for name, cost in costs.items()} | {"simulated steps": [spent, spent_by_other]}
    below = costs["zeroth-order"] < 0.95 * costs["PPO"] and spent == spent_by_other
    return Evidence(measured, "at least 5% below PPO's, with as many simulated steps", below)


def _other_services(guard: float) -> Evidence:
    services = "hyperexponential"
    theta, _ = _trained(0, "zeroth", 8, services=services)
    cost, start, reference = _cost(theta, guard, services), _cost(NO_RULE, GUARD, services), _cost(NO_RULE, 0.0, services)
    measured = {"after": round(cost, 2), "random choice": round(start, 2), "back-pressure": round(reference, 2)}
    return Evidence(measured, "at least 5% below back-pressure", cost < 0.95 * reference)


# 14% below, a random choice 10%.
@claim("hyperexponential services: a rule trained on them costs at least 5% less than back-pressure", slow=True, reproduced=False)
def other_services() -> Evidence:
    return _other_services(GUARD)


@ablation(other_services, "the guard always decides")
def other_services_guard_alone() -> Evidence:
    return _other_services(0.0)
