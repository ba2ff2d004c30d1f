"""Claims of reduced states: they keep the optimal value, names of cities mean nothing, and what is imitated on ten cities carries to twenty."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import cache
from itertools import permutations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anypo.claims import Evidence, ablation, claim
from anypo.domains.combinatorial.tour_policy import ENDS, TourPolicy
from anypo.domains.combinatorial.tour_tasks import Solved, TourTask, gaps, held_out
from anypo.domains.combinatorial.tours import distances, nearest_neighbour, tour_length
from anypo.methods.combinatorial.bq_nco import METHOD, cvrp_rollout, kp_rollout, op_rollout, path_value, tsp_rollout
from anypo.reproductions.common import train_on

Complete = Iterator[tuple[list[Hashable], list[Tensor]]]  # of every complete solution: states and rewards, step by step


def _tours(distance: Tensor) -> Complete:
    for order in permutations(range(1, len(distance))):
        done = tsp_rollout(distance, torch.tensor([0, *order]))
        yield [(s["origin"], frozenset(s["remaining"])) for s in done.states], list(done.rewards)


def _routes(distance: Tensor, demand: Tensor, capacity: float) -> Complete:
    customers = len(demand) - 1
    for order in permutations(range(1, customers + 1)):
        for stops in range(1 << (customers - 1)):
            actions = torch.tensor([[j, 1 if k == 0 or stops >> (k - 1) & 1 else 0] for k, j in enumerate(order)])
            try:
                done = cvrp_rollout(distance, demand, capacity, actions)
            except ValueError:
                continue
            left = [capacity, *done.capacity_left.tolist()]
            yield [(([0, *order][k], frozenset(order[k:])), round(left[k], 9)) for k in range(customers + 1)], list(done.rewards)


def _knapsacks(weight: Tensor, value: Tensor, capacity: float) -> Complete:
    for order in permutations(range(len(weight))):
        chosen: list[int] = []
        for item in order:  # take them in this order until nothing fits
            if float(weight[[*chosen, item]].sum()) <= capacity:
                chosen.append(item)
        done = kp_rollout(weight, value, capacity, torch.tensor(chosen))
        left = [frozenset(np.flatnonzero(weight <= capacity).tolist()), *(frozenset(r.nonzero()[:, 0].tolist()) for r in done.remaining)]
        capacities = [capacity, *(round(float(c), 9) for c in done.capacity_left)]
        yield [(s, c) for s, c in zip(left, capacities, strict=True)], [*done.rewards, torch.tensor(0.0)]


def _prizes(distance: Tensor, prize: Tensor, budget: float) -> Complete:
    for order in permutations(range(1, len(prize))):
        for count in range(1, len(prize)):
            try:
                done = op_rollout(distance, prize, budget, torch.tensor(order[:count]))
            except ValueError:
                break
            left = [budget, *(round(float(b), 9) for b in done.budget_left)]
            open_ = [frozenset(range(1, len(prize))), *(frozenset(f.nonzero()[:, 0].tolist()) for f in done.feasible_after)]
            states: list[Hashable] = [(([0, *order][k], open_[k]), left[k]) for k in range(count + 1)]
            yield states, [*done.rewards, torch.tensor(0.0)]


def _values(solutions: Complete, reduce: Callable[[Any], Hashable]) -> dict[Hashable, list[float]]:
    """By state: the best completion of every partial solution that has it. A partial solution is the whole history of states."""
    best: dict[tuple[Hashable, ...], float] = {}
    for states, rewards in solutions:
        to_go = torch.stack(rewards).double().flip(0).cumsum(0).flip(0).tolist()
        for k in range(len(states)):
            history = tuple(states[: k + 1])
            best[history] = max(best.get(history, -np.inf), to_go[k])
    by_state: dict[Hashable, list[float]] = {}
    for history, value in best.items():
        by_state.setdefault(reduce(history[-1]), []).append(value)
    return by_state


def _exactness(forgetful: bool) -> Evidence:
    """`forgetful`: the state lacks what the partial solution left behind (the present city; for the knapsack what is left of the capacity)."""
    g = torch.Generator().manual_seed(0)
    points, numbers = torch.rand(6, 2, generator=g, dtype=torch.float64), torch.rand(2, 6, generator=g, dtype=torch.float64)
    distance, crooked = torch.cdist(points, points), torch.rand(6, 6, generator=g, dtype=torch.float64)
    demand = torch.tensor([0.0, 3.0, 1.0, 2.0, 4.0])
    blocks = torch.randint(0, 4, (6, 2), generator=g).double()  # whole lengths, or no two partial solutions would have the same length left
    problems: dict[str, tuple[Complete, Callable[[Any], Hashable]]] = {
        "tour": (_tours(distance), lambda s: s[1]),
        "asymmetric tour": (_tours(crooked), lambda s: s[1]),
        "vehicle routes": (_routes(distance[:5, :5], demand, 5.0), lambda s: s[0][1]),
        "orienteering": (_prizes(torch.cdist(blocks, blocks, p=1), numbers[0], 12.0), lambda s: s[0][1]),
        "knapsack": (_knapsacks(torch.tensor([4.0, 2.0, 3.0, 5.0, 1.0, 2.0]), numbers[1], 8.0), lambda s: s[0]),
    }
    measured: dict[str, Any] = {}
    for name, (solutions, forget) in problems.items():
        values = _values(solutions, forget if forgetful else lambda s: s)
        spread = max(max(v) - min(v) for v in values.values())
        measured[name] = {
            "largest difference": float(f"{spread:.2g}"),
            "partial solutions": sum(map(len, values.values())),
            "states": len(values),
        }
        if name == "asymmetric tour" and not forgetful:
            known: dict[Any, list[float]] = values  # type: ignore[assignment]
            errors = [abs(v[0] + path_value(crooked, at, 0, torch.tensor(sorted(left)))) for (at, left), v in known.items()]
            measured["Held-Karp on asymmetric tours"] = {"largest difference": float(f"{max(errors):.2g}")}
    worst = max(m["largest difference"] for m in measured.values())
    return Evidence(measured, "best completions of partial solutions with the same state differ by less than 1e-9", worst < 1e-9)


@claim("all partial solutions with the same reduced state have the same best completion, in all five problems")
def reduced_states_are_exact() -> Evidence:
    return _exactness(False)


@ablation(reduced_states_are_exact, "the state also forgets the present place, or what is left of the capacity")
def forgetful_states() -> Evidence:
    return _exactness(True)


def _renaming(positions: bool) -> Evidence:
    g = torch.Generator().manual_seed(0)
    policy = TourPolicy(layers=2, width=32)
    with torch.no_grad():
        for layer in policy.body:
            layer.weight.fill_(1.0)
    points, order = torch.rand(20, 12, 2, generator=g), torch.randperm(10, generator=g)
    everything = torch.ones(20, 10, dtype=torch.bool)
    place = 0.1 * torch.randn(12, 2, generator=g) if positions else torch.zeros(12, 2)
    renamed = torch.cat([points[:, :ENDS], points[:, ENDS:][:, order]], dim=1)
    with torch.no_grad():
        error = policy.scores(renamed + place, everything) - policy.scores(points + place, everything)[:, order]
    worst = float(error.abs().max())
    return Evidence(float(f"{worst:.2g}"), "logits of renamed cities are the renamed logits, within 1e-4", worst < 1e-4)


@claim("permuting the remaining cities permutes the policy's output")
def names_mean_nothing() -> Evidence:
    return _renaming(False)


@ablation(names_mean_nothing, "the input depends on a city's place in the list")
def names_with_places() -> Evidence:
    return _renaming(True)


STEPS, LABELLED = 600, 4000
DIRECT = METHOD.set("rollout.smallest", 9).set("rollout.steps", None)  # whole tours, all decisions of each
STARTS = METHOD.set("rollout.smallest", 9)  # whole tours, the first decision of each


@cache
def _test(cities: int) -> Solved:
    return held_out(cities, 200 if cities == 10 else 60, seed=31)


@cache
def trained(kind: str, seed: int = 0) -> tuple[float, float]:
    """Mean greedy excess on 10 and on 20 cities after imitation on 4000 tours of 10. `kind`: reduced, direct, or starts.

    A step of the direct policy learns nine decisions of a tour, one of the others a single one; it takes half of the steps, in two thirds of the time or more.
    """
    method = {"reduced": METHOD, "direct": DIRECT, "starts": STARTS}[kind]
    policy = TourPolicy(state="direct" if kind == "direct" else "reduced", seed=seed)
    task = TourTask(labelled=LABELLED, seed=seed, evaluation_instances=1)
    train_on(method, policy, task, steps=STEPS // 2 if kind == "direct" else STEPS, seed=seed, watch=lambda run, batch: None)
    return float(gaps(policy, _test(10)).mean()), float(gaps(policy, _test(20)).mean())


def _nearest(cities: int) -> float:
    solved = _test(cities)
    distance = distances(solved.points)
    return float((tour_length(distance, nearest_neighbour(distance)) / tour_length(distance, solved.tours) - 1).mean())


def _near_optimal(kind: str) -> Evidence:
    found = trained(kind)
    measured = {f"excess on {n} cities": round(x, 4) for n, x in zip((10, 20), found, strict=True)}
    measured |= {f"nearest neighbour on {n}": round(_nearest(n), 4) for n in (10, 20)}
    return Evidence(measured, "less than 6% on 10 cities and less than 12% on 20", found[0] < 0.06 and found[1] < 0.12)


@claim("after imitation on tours of 10 cities, greedy tours are near the shortest, and still on 20 cities", slow=True)
def near_optimal() -> Evidence:
    return _near_optimal("reduced")


@ablation(near_optimal, "only whole tours are shown, no stretches of them: the recursion is not used")
def near_optimal_from_starts() -> Evidence:
    return _near_optimal("starts")


def _against_direct(kind: str) -> Evidence:
    reduced, direct = trained(kind)[1], trained("direct")[1]
    measured = {"reduced on 20 cities": round(reduced, 4), "direct on 20 cities": round(direct, 4)}
    return Evidence(measured, "the reduced state's excess is at most 0.85 of the direct one's", reduced <= 0.85 * direct)


@claim(
    "on twice the size it is nearer to the shortest than a network that sees the whole problem once, trained on the same tours", slow=True
)
def better_than_direct() -> Evidence:
    return _against_direct("reduced")


@ablation(better_than_direct, "only whole tours are shown, no stretches of them: the recursion is not used")
def starts_against_direct() -> Evidence:
    return _against_direct("starts")
