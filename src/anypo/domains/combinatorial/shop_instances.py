"""Job shops to train and test on, drawn from a seed each: machines that are alike, or jobs and machines that differ widely."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from anypo.domains.combinatorial.shop import Instances

KINDS = ("homogeneous", "heterogeneous")
SIMILAR = tuple(range(3, 8))  # times on machines that are alike
SHORT, LONG = tuple(range(1, 5)), tuple(range(8, 21))  # base times of the two classes of jobs
SPEEDS = (0.5, 1.0, 2.0)  # factors of the machines' times


@dataclass(frozen=True)
class ShopSetting:
    """A distribution of instances. Jobs arrive as a Poisson stream, the first at time 0."""

    kind: str = "heterogeneous"
    load: float = 3.0  # > 0; work that arrives a unit of time over what the machines can do; below 1 the arrivals decide the makespan
    jobs: int = 20
    operations: int = 3
    machines: int = 4

    def __post_init__(self) -> None:
        """Raises ValueError for what is out of range."""
        if self.kind not in KINDS:
            raise ValueError(f"there are {' and '.join(KINDS)} shops, not '{self.kind}'")
        if min(self.jobs, self.operations) < 1 or self.machines < 2 or self.load <= 0:
            raise ValueError("a shop needs at least 1 job, 1 operation a job and 2 machines, and a load above 0")

    @property
    def mean_time(self) -> float:
        """P: the exact mean of the processing times."""
        if self.kind == "homogeneous":
            return fmean(SIMILAR)
        return fmean(fmean(math.ceil(base * speed) for base, speed in product(times, SPEEDS)) for times in (SHORT, LONG))

    def draw(self, seeds: Sequence[int]) -> Instances:
        """One instance for each seed, the same whatever the others are."""
        drawn = [self._one(np.random.default_rng(seed)) for seed in seeds]
        return Instances(*(np.stack(x) for x in zip(*drawn, strict=True)))

    def _one(self, rng: np.random.Generator) -> tuple[NDArray, NDArray, NDArray]:
        shape = (self.jobs, self.operations, self.machines)
        order = rng.random(shape).argsort(-1)  # a random rank for every machine: those of low rank are eligible
        if self.kind == "homogeneous":
            time = rng.choice(SIMILAR, size=shape).astype(np.float64)
            eligible = order < 2
        else:
            long = rng.random((self.jobs, 1, 1)) < 0.5
            base = np.where(long, rng.choice(LONG, size=shape[:2])[..., None], rng.choice(SHORT, size=shape[:2])[..., None])
            time = np.ceil(base * rng.choice(SPEEDS, size=self.machines))
            eligible = order < rng.integers(1, self.machines + 1, size=(*shape[:2], 1))
        rate = self.load * self.machines / (self.operations * self.mean_time)
        arrival = np.concatenate([[0.0], rng.exponential(1 / rate, size=self.jobs - 1).cumsum()])
        return np.where(eligible, time, 0.0), np.full(self.jobs, self.operations), arrival
