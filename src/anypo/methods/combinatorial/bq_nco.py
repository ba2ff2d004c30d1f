"""BQ-NCO: constructive solvers whose state is what is left of the problem (arXiv:2301.03313).

A solution is built step by step. Of the partial solution only a part matters for what follows: for a tour the present city, the last one and the cities
that remain. States that agree in it are one state of a smaller process (bisimulation quotienting), and that state is again a problem of the same kind.
So every stretch of an optimal solution is an optimal solution of a smaller problem, and a network that looks anew at what is left at each step learns
all of them by imitation, and goes on to larger problems. No rollouts, no reward.
Equations 1-5; the reduced processes of the five problems are here, the networks and the exact solvers in domains/combinatorial/{tour_policy,tours}.py.
Left out: networks for problems other than the Euclidean tour, beam search, and the restriction to the nearest cities.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypedDict

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.combinatorial.tours import held_karp
from anypo.method import Method, Paper
from anypo.policy import Loss, Signals
from anypo.seams.credit import NoCredit
from anypo.seams.reward import TaskReward
from anypo.seams.select import UniformPrompts
from anypo.seams.update import GradientSteps
from anypo.task import Prompt

if TYPE_CHECKING:
    from anypo.run import Run

Matrix = Float[Tensor, "n n"]
TOLERANCE = 1e-9  # of feasibility


class PathState(TypedDict):
    origin: int
    destination: int
    remaining: list[int]


class TourRollout(NamedTuple):
    rewards: Tensor  # [n]; the last closes the tour
    total: Tensor
    states: list[PathState]  # before each action


class RouteRollout(NamedTuple):
    rewards: Tensor  # [m+1]; the last returns to the depot
    capacity_left: Tensor  # [m]
    total: Tensor


class OrienteeringRollout(NamedTuple):
    rewards: Tensor  # [m]
    budget_left: Tensor  # [m]
    feasible_after: Tensor  # [m,n] bool: where one may still go


class KnapsackRollout(NamedTuple):
    rewards: Tensor  # [m]
    capacity_left: Tensor  # [m]
    remaining: Tensor  # [m,n] bool: items that are left and still fit


def tsp_rollout(distance: Matrix, tour: Int[Tensor, " n"]) -> TourRollout:
    """Equation 2, (asymmetric) tours: going to city j of the remaining costs its distance from the origin, and j becomes the origin."""
    stops, cities = tour.tolist(), range(len(distance))
    states = [
        PathState(origin=stops[k], destination=stops[0], remaining=[c for c in cities if c not in stops[: k + 1]])
        for k in range(len(stops))
    ]
    rewards = -distance[tour, tour.roll(-1)]
    return TourRollout(rewards, rewards.sum(), states)


def cvrp_rollout(distance: Matrix, demand: Float[Tensor, " n"], capacity: float, actions: Int[Tensor, "m 2"]) -> RouteRollout:
    """Equation 2, vehicle routes from depot 0: actions (customer, 1 when by way of the depot, where the vehicle is filled again).

    Raises ValueError for a customer whose demand is more than what is left.
    """
    at, left = 0, float(capacity)
    rewards, capacities = [], []
    for j, via in actions.tolist():
        if via:
            left = float(capacity)
        if float(demand[j]) > left + TOLERANCE:
            raise ValueError(f"customer {j} asks for {float(demand[j]):g}, but the vehicle has {left:g} left; go by way of the depot")
        left -= float(demand[j])
        rewards.append(-(distance[at, 0] + distance[0, j]) if via else -distance[at, j])
        capacities.append(left)
        at = j
    found = torch.stack([*rewards, -distance[at, 0]])
    return RouteRollout(found, found.new_tensor(capacities), found.sum())


def op_rollout(distance: Matrix, prize: Float[Tensor, " n"], budget: float, actions: Int[Tensor, " m"]) -> OrienteeringRollout:
    """Equation 2, orienteering from depot 0: a node may be visited if the way to it and on to the depot is within what is left of the length.

    Raises ValueError for a node that may not.
    """
    left, at = float(budget), 0
    gone = torch.zeros(len(prize), dtype=torch.bool)
    gone[0] = True
    budgets, feasible = [], []
    for j in actions.tolist():
        if not bool(_reachable(distance, at, left, gone)[j]):
            raise ValueError(f"node {j} was visited, or the way to it and back to the depot is longer than the {left:g} that are left")
        left -= float(distance[at, j])
        gone[j], at = True, j
        budgets.append(left)
        feasible.append(_reachable(distance, at, left, gone))
    return OrienteeringRollout(prize[actions], prize.new_tensor(budgets), torch.stack(feasible))


def _reachable(distance: Tensor, at: int, left: float, gone: Tensor) -> Tensor:
    return (distance[at] + distance[:, 0] <= left + TOLERANCE) & ~gone


def kp_rollout(weight: Float[Tensor, " n"], value: Float[Tensor, " n"], capacity: float, actions: Int[Tensor, " m"]) -> KnapsackRollout:
    """Equation 2, knapsack: items that no longer fit leave the state. Raises ValueError for an item that is gone or too heavy."""
    left = float(capacity)
    there = weight <= left + TOLERANCE
    capacities, remaining = [], []
    for i in actions.tolist():
        if not bool(there[i]):
            raise ValueError(f"item {i} was taken, or weighs more than the {left:g} that are left")
        left -= float(weight[i])
        there = there & (torch.arange(len(weight)) != i) & (weight <= left + TOLERANCE)
        capacities.append(left)
        remaining.append(there)
    return KnapsackRollout(value[actions], value.new_tensor(capacities), torch.stack(remaining))


def path_value(distance: Matrix, origin: int, destination: int, remaining: Int[Tensor, " r"]) -> float:
    """Equation 3: the smallest cost from the origin through all that remain to the destination, the same for every partial tour with this state."""
    cost, left = np.asarray(distance), np.asarray(remaining, dtype=np.int64)
    if not len(left):
        return float(cost[origin, destination])
    return float(held_karp(cost[None, origin, left], cost[None, left[:, None], left], cost[None, left, destination]).value[0])


def imitation_loss(logits: Float[Tensor, "B n"], feasible: Bool[Tensor, "B n"], targets: Float[Tensor, "B n"]) -> Float[Tensor, ""]:
    """Equation 5: the mean of -log of the probability that one of a state's optimal actions is taken."""
    possible = logits.masked_fill(~feasible.bool(), -torch.inf)
    optimal = possible.masked_fill(targets == 0, -torch.inf)
    return (possible.logsumexp(1) - optimal.logsumexp(1)).mean()


@dataclass
class OptimalPaths:
    """Stretches of the prompts' optimal tours: from a random city, in a random direction, of a random length, each a problem with its solution.

    Rows have their first `steps` decisions as actions. Nothing is generated, and log-probs stay 0.
    """

    smallest: int = 2  # fewest cities between the ends, >= 1
    largest: int | None = None  # most of them; None = all cities of the tour but one, which is both ends
    steps: int | None = 1  # decisions of a path that are imitated, >= 1; None = all

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        if not hasattr(run.task, "solved"):
            raise ValueError(f"{run.method.name} imitates optimal tours, which the task '{run.task.name}' does not have; take tsp:random")
        points, tours = run.task.solved
        count, cities, rng = len(prompts), tours.shape[1], run.rng
        most = self.largest or cities - 1
        if not 1 <= self.smallest <= most < cities:
            raise ValueError(f"rollout.smallest and rollout.largest must be in 1..{cities - 1}, in this order")
        chosen = np.array([p.content for p in prompts])
        size = rng.integers(self.smallest, most + 1, size=count)
        turn = rng.choice([-1, 1], size=count)[:, None]
        place = (rng.integers(cities, size=count)[:, None] + turn * np.arange(cities + 1)) % cities
        path = points[chosen[:, None], tours[chosen[:, None], place]]  # [N,n+1,2], back to where it began
        rows = np.arange(count)
        hidden = np.argsort(rng.random((count, cities - 1)) + (np.arange(cities - 1) >= size[:, None]), axis=1)  # the order tells nothing
        problem = np.concatenate([path[:, :1], path[rows, size + 1][:, None], path[rows[:, None], 1 + hidden]], axis=1)
        action = torch.from_numpy(np.argsort(hidden, axis=1)[:, : self.steps or cities - 1])
        mask = torch.arange(action.shape[1]) < torch.from_numpy(size)[:, None]
        return Batch(
            action=torch.where(mask, action, 0), mask=mask, logp=torch.zeros(mask.shape), group=torch.arange(count),
            context=torch.from_numpy(problem).float(), version=torch.full((count,), run.version),
            signals={"size": torch.from_numpy(size), "prompt_id": torch.from_numpy(chosen)},
        )  # fmt: skip


@dataclass
class Imitation:
    """Cross-entropy of the demonstrated actions over all states of the batch."""

    needs = frozenset({"logits"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        logits, action = new.logits[batch.counted], batch.action[batch.counted]
        targets = torch.nn.functional.one_hot(action, logits.shape[1])
        right = float((logits.detach().argmax(1) == action).float().mean())
        return Loss(imitation_loss(logits, torch.isfinite(logits), targets), {"accuracy": right})


METHOD = Method(
    name="bq_nco",
    paper=Paper("BQ-NCO: Bisimulation Quotienting for Efficient Neural Combinatorial Optimization", "2301.03313", 2023),
    domain="combinatorial",
    kind="system",
    task="tsp:random",
    summary="imitate every stretch of optimal tours with a network that sees only what is left of the problem",
    select=UniformPrompts(group_size=1),
    rollout=OptimalPaths(),
    reward=TaskReward(),
    credit=NoCredit(),
    objective=Imitation(),
    update=GradientSteps(learning_rate=2e-3, optimizer="adam"),
)
