"""TourTask: the Euclidean travelling salesman as a task of the common loop. A trajectory is a tour, an action the next city; optimal tours are known."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.combinatorial.tour_policy import ENDS, TourPolicy
from anypo.domains.combinatorial.tours import distances, optimal_tours, tour_length
from anypo.run import Run
from anypo.task import Prompt

EVALUATION_SEED = 1_000_000  # held-out cities have seeds from here on; those to train on the task's own, below it


class Solved(NamedTuple):
    points: NDArray  # [I,n,2] float64 in the unit square
    tours: NDArray  # [I,n] int64, optimal, from city 0


class TourTask:
    """A fixed set of instances with their optimal tours to train on, and held-out ones of the same and of twice the size.

    Rewards are dense [N,T]: minus the length of each step, that of the last with the way to the destination. The policy is a `TourPolicy`.
    """

    objectives: tuple[str, ...] = ("reward",)
    name = "tsp:random"
    domain = "combinatorial"

    def __init__(
        self, *, cities: int = 10, labelled: int = 4000, batch: int = 128, evaluation_instances: int = 50, seed: int = 0
    ) -> None:  # fmt: skip
        """`labelled`: instances to train on; `batch`: how many a step. Raises ValueError for what is out of range."""
        if not 4 <= cities <= 11 or min(labelled, batch, evaluation_instances) < 1 or not 0 <= seed < EVALUATION_SEED:
            raise ValueError(
                "a tour task has 4 to 11 cities, a seed below 1000000, and labelled, batch and evaluation_instances of at least 1"
            )
        self.cities, self.labelled, self.prompts_per_step, self.seed = cities, labelled, batch, seed
        self.evaluation_instances = evaluation_instances

    @cached_property
    def solved(self) -> Solved:
        """The instances to train on."""
        points = np.random.default_rng(self.seed).random((self.labelled, self.cities, 2))
        return Solved(points, optimal_tours(distances(points)))

    @cached_property
    def held_out(self) -> dict[str, Solved]:
        """Of the size of training and of twice that; the same for every policy and run."""
        return {
            name: held_out(cities, self.evaluation_instances) for name, cities in (("gap", self.cities), ("gap_twice", 2 * self.cities))
        }

    def prompts(self, count: int, rng: np.random.Generator) -> list[Prompt]:
        """Training instances by number, drawn with repetition."""
        return [Prompt(id=int(i), content=int(i)) for i in rng.integers(self.labelled, size=count)]

    def collect(self, prompts: list[Prompt], run: Run) -> Batch:
        policy: TourPolicy = run.policy  # type: ignore[assignment]
        group = torch.repeat_interleave(torch.arange(len(prompts)), torch.tensor([p.samples for p in prompts]))
        ids = torch.tensor([p.id for p in prompts])[group]
        points = closed(torch.from_numpy(self.solved.points[ids]).float())
        batch = path_batch(points, policy.construct(points, run.generator), group, run.version, {"prompt_id": ids})
        found = policy.observe(batch, {"logp", "entropy"})
        batch.logp, batch.signals["old_entropy"] = found["logp"], found["entropy"]
        return batch

    def score(self, batch: Batch, run: Run) -> Tensor:
        """Dense rewards [N,T]; those of a whole tour add up to minus its length."""
        points, size = batch.context, batch.signal("size")
        stops = torch.cat([torch.zeros_like(batch.action[:, :1]), batch.action + ENDS], dim=1)
        path = points.gather(1, stops[..., None].expand(*stops.shape, 2))
        step = (path[:, 1:] - path[:, :-1]).norm(dim=-1)
        home = (path[:, 1:] - points[:, 1:2]).norm(dim=-1)
        last = torch.arange(1, batch.horizon + 1) == size[:, None]
        return -torch.where(batch.mask, step + torch.where(last, home, 0.0), 0.0)

    def measure(self, policy: TourPolicy) -> dict[str, NDArray]:
        """Greedy tours' excess over the shortest, an entry a held-out instance: 0.05 is 5% longer. `gap_twice`: with twice as many cities."""
        return {name: gaps(policy, solved) for name, solved in self.held_out.items()}

    def evaluate(self, run: Run) -> dict[str, float]:
        """Mean excess of greedy tours over the shortest on held-out instances."""
        return {name: float(found.mean()) for name, found in self.measure(run.policy).items()}  # type: ignore[arg-type]


def held_out(cities: int, count: int, seed: int = EVALUATION_SEED) -> Solved:
    """Instances with their optimal tours; those of another size have nothing in common with them."""
    points = np.random.default_rng((seed, cities)).random((count, cities, 2))
    return Solved(points, optimal_tours(distances(points)))


def closed(points: Tensor) -> Tensor:
    """Cities [N,n,2] as problems [N,1+n,2] of a path from city 0 back to it."""
    return torch.cat([points[:, :1], points], dim=1)


def path_batch(points: Tensor, action: Tensor, group: Tensor, version: int, signals: dict[str, Any]) -> Batch:
    """Whole paths through all remaining cities of problems [N,2+R,2] as a batch."""
    mask = torch.ones(action.shape, dtype=torch.bool)
    last = torch.zeros_like(mask)
    last[:, -1] = True
    size = torch.full((len(action),), action.shape[1])
    return Batch(
        action=action, mask=mask, logp=torch.zeros(action.shape), group=group, context=points, terminated=last, truncated=torch.zeros_like(mask),
        version=torch.full((len(action),), version), signals=signals | {"size": size},
    )  # fmt: skip


def gaps(policy: TourPolicy, solved: Solved) -> NDArray:
    """[I]: excess of the policy's greedy tours over the shortest ones."""
    distance = distances(solved.points)
    order = policy.construct(closed(torch.from_numpy(solved.points).float())).numpy() + 1
    tour = np.concatenate([np.zeros((len(order), 1), dtype=np.int64), order], axis=1)
    return tour_length(distance, tour) / tour_length(distance, solved.tours) - 1
