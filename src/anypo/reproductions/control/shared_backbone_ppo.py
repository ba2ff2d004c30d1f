"""Claims of shared-backbone PPO on a small swarm: five drones, networks of 64 x 2, Adam at 2e-3 (at the paper's-like 3e-4 little is learned in this time)."""

from __future__ import annotations

from functools import cache
from statistics import fmean
from typing import NamedTuple

import numpy as np
import torch
from gymnasium.wrappers import TimeLimit

from anypo.claims import Evidence, ablation, claim
from anypo.domains.control.tasks import GymTask
from anypo.domains.control.teams import Teams
from anypo.domains.control.uav_swarm import RADIUS, STEPS, UavSwarm, coverage, parts
from anypo.loops.on_policy import step
from anypo.methods.control.shared_backbone_ppo import METHOD, SharedBackbonePolicy
from anypo.run import Run

SEEDS = (0, 1, 2)
TEAM, ENVS, EPISODES = 5, 8, 16
METHOD_HERE = METHOD.set("update.learning_rate", 2e-3)


class Flight(NamedTuple):
    coverage: float  # mean over steps and held-out episodes
    single: float  # share of the served users whom one drone alone serves
    connected: float  # share of steps


def swarm(preserve: bool = False, weight: float = 1.0) -> GymTask:
    return GymTask(
        lambda **options: TimeLimit(UavSwarm(preserve=preserve, connection_weight=weight, **options), STEPS), envs=ENVS, horizon=STEPS
    )


def fly(task: GymTask, policy: SharedBackbonePolicy) -> Flight:
    """Held-out episodes by the likeliest actions, step by step."""
    environments = task.environments(TEAM * EPISODES)
    assert isinstance(environments, Teams)
    swarms, act = environments.inner, policy.actor()
    seen = np.stack([environments.reset(row, 1_000_000 + row // TEAM) for row in range(TEAM * EPISODES)])
    found = []
    for _ in range(STEPS):
        seen = environments.step(act(seen, None)).observation
        places, users = swarms.dynamics.places(swarms.state)  # type: ignore[attr-defined]
        served = coverage(places, users, RADIUS)
        found.append((served.coverage.mean(), served.single_share.mean(), (parts(places, swarms.dynamics.comm_range) == 1).mean()))  # type: ignore[attr-defined]
    return Flight(*np.mean(found, axis=0).tolist())


@cache
def trained(shared: bool, aggregation: str, seed: int, steps: int = 40, preserve: bool = False, weight: float = 1.0) -> tuple[Flight, ...]:
    """Flights after every eighth of the steps, each of 2400 actions of single drones."""
    task = swarm(preserve, weight)
    policy = SharedBackbonePolicy(task.spaces, hidden=(64, 64), shared=shared, aggregation=aggregation, seed=seed)
    run, seen = Run(METHOD_HERE, policy, task, steps=steps, seed=seed), []
    for i in range(steps):
        step(run)
        if (i + 1) % max(steps // 8, 1) == 0:
            seen.append(fly(task, policy))
    return tuple(seen)


def _last(flights: tuple[Flight, ...]) -> Flight:
    """The mean of the last two flights: a single one depends on the moment."""
    return Flight(*np.mean(flights[-2:], axis=0).tolist())


def _against_separate(shared: bool) -> Evidence:
    mine = fmean(_last(trained(shared, "none", seed)).coverage for seed in SEEDS)
    theirs = fmean(_last(trained(False, "none", seed)).coverage for seed in SEEDS)
    return Evidence({"coverage": round(mine, 3), "separate networks": round(theirs, 3)}, "more, mean of 3 seeds", mine > theirs)


# The seeds on which the setting was chosen said the opposite (0.315 to 0.455, and 0.324 to 0.330): a lead on other seeds is within the noise.
@claim(
    "After 96k actions a swarm whose actor and critic share a trunk covers more than one with separate networks",
    slow=True,
    reproduced=False,
)
def covers_more() -> Evidence:
    return _against_separate(True)


@ablation(covers_more, "separate networks")
def covers_more_separately() -> Evidence:
    return _against_separate(False)


def _cooperation(aggregation: str) -> Evidence:
    with_, without = ([_last(trained(True, how, seed)) for seed in SEEDS] for how in (aggregation, "none"))
    cover, single = (
        [round(fmean(getattr(f, name) for f in flights), 3) for flights in (with_, without)] for name in ("coverage", "single")
    )
    holds = cover[0] >= 0.97 * cover[1] and single[0] > single[1]
    return Evidence(
        {"coverage with and without": cover, "single share with and without": single},
        "at least 97% of the coverage, and a larger share",
        holds,
    )


# The larger share holds; the coverage falls short of 97%.
@claim(
    "With messages between drones the swarm covers as much, and more of the served users have one drone to themselves",
    slow=True,
    reproduced=False,
)
def cooperates_more() -> Evidence:
    return _cooperation("mean")


@ablation(cooperates_more, "no messages")
def cooperates_without() -> Evidence:
    return _cooperation("none")


def _size(shared: bool) -> int:
    return sum(p.numel() for p in SharedBackbonePolicy(swarm().spaces, hidden=(64, 64), shared=shared, aggregation="none").parameters())


def _critic_reaches(shared: bool) -> Evidence:
    """One gradient step of the value loss alone: how far the actor's features move, and the gradient of the trunk."""
    task = swarm()
    policy = SharedBackbonePolicy(task.spaces, hidden=(64, 64), shared=shared, seed=0)
    batch = step(Run(METHOD_HERE, policy, task, steps=1))
    before = policy.observe(batch, {"hidden"}).hidden
    policy.zero_grad()
    ((policy.evaluate(batch, {"shared_value"}).shared_value - batch.signal("returns")) ** 2).mean().backward()
    gradient = policy.actor_network.layers[0].weight.grad
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter -= 0.01 * (0 if parameter.grad is None else parameter.grad)
    moved = float((policy.observe(batch, {"hidden"}).hidden - before).abs().max())
    norm = 0.0 if gradient is None else float(gradient.norm())
    measured = {
        "trunk's gradient": round(norm, 4),
        "features moved": round(moved, 4),
        "parameters": _size(shared),
        "separate": _size(False),
    }
    return Evidence(
        measured,
        "a gradient, features that move by over 0.001, and fewer parameters",
        norm > 0 and moved > 1e-3 and _size(shared) < _size(False),
    )


@claim("The critic's loss trains what the actor sees, with fewer parameters than two networks have")
def trains_the_trunk() -> Evidence:
    return _critic_reaches(True)


@ablation(trains_the_trunk, "separate networks")
def trains_its_own() -> Evidence:
    return _critic_reaches(False)


def _relabelled(order_within_team: bool) -> Evidence:
    """Drones of one swarm in another order, or (off) drones of two swarms mixed."""
    task = swarm()
    policy = SharedBackbonePolicy(task.spaces, hidden=(64, 64), seed=0)
    x = step(Run(METHOD_HERE, policy, task, steps=1)).context
    within = torch.cat([TEAM * i + torch.randperm(TEAM, generator=torch.Generator().manual_seed(i)) for i in range(ENVS)])
    order = within if order_within_team else torch.randperm(TEAM * ENVS, generator=torch.Generator().manual_seed(0))
    error = float((policy.values(x[order]) - policy.values(x)[order]).abs().max().detach())
    return Evidence({"largest difference": f"{error:.1e}"}, "below 1e-5", error < 1e-5)


@claim("Drones of a swarm in another order get the same outputs in that order")
def is_equivariant() -> Evidence:
    return _relabelled(True)


@ablation(is_equivariant, "drones dealt to other swarms")
def mixed_swarms() -> Evidence:
    return _relabelled(False)


def _connected(preserve: bool) -> Evidence:
    found = [trained(True, "none", seed, 16, preserve, 0.0)[-1].connected for seed in SEEDS]
    return Evidence({"share of steps connected": [round(x, 3) for x in found]}, "1 in each of 3 seeds", min(found) == 1.0)


@claim("Trained without a charge for breaking, a swarm whose breaking moves are held back is connected at every step", slow=True)
def stays_connected() -> Evidence:
    return _connected(True)


@ablation(stays_connected, "moves not held back")
def breaks() -> Evidence:
    return _connected(False)
