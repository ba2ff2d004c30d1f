"""What the reproductions share: training on a stand-in while watching an exact quantity."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.loops.on_policy import step
from anypo.method import Method
from anypo.policy import Policy
from anypo.run import Run
from anypo.task import Task


def plain_sgd(method: Method, step_size: float, epochs: int = 1, group_size: int | None = None) -> Method:
    """The method with plain SGD (no momentum, no gradient clipping) of the given step, `epochs` optimizer steps a batch."""
    changes: dict[str, Any] = {"optimizer": "sgd", "learning_rate": step_size, "max_grad_norm": None, "epochs": epochs}
    for name, value in changes.items():
        method = method.set(f"update.{name}", value)
    return method.set("select.group_size", group_size) if group_size else method


def train_on(
    method: Method, policy: Policy, task: Task, *, steps: int, seed: int = 0, watch: Callable[[Run, Batch], Any] | None = None,
    stop: Callable[[Any], bool] | None = None,
) -> list[Any]:  # fmt: skip
    """Run the on-policy loop; after every step note `watch(run, batch)` (default: the task's exact `expected_success`), until `stop` of it."""
    run = Run(method, policy, task, steps=steps, seed=seed)
    seen = []
    for _ in range(steps):
        batch = step(run)
        seen.append(watch(run, batch) if watch else task.expected_success(policy))  # type: ignore[attr-defined]
        if stop is not None and stop(seen[-1]):
            break
    return seen


def steps_to(curve: list[float], threshold: float) -> float:
    """First step (from 1) at which the curve reaches the threshold; infinity when it never does."""
    return next((i + 1 for i, value in enumerate(curve) if value >= threshold), math.inf)


def mean_over(seeds: Iterable[int], experiment: Callable[[int], float]) -> float:
    """Mean of an experiment over seeds."""
    return fmean(experiment(seed) for seed in seeds)


@dataclass
class ShuffledCredit:
    """An ablation: the inner credit's advantages, dealt to the wrong rows, so that nothing can be learned from them."""

    inner: Any

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        advantage = self.inner(batch, run)
        return advantage[torch.randperm(len(batch), generator=run.generator)] * batch.mask


@dataclass
class CoinReward:
    """A reward drawn at random, 1 with probability `chance`, independent of the response: nothing to learn, so every drift is a bias."""

    chance: float = 0.2  # in [0,1]

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        return torch.bernoulli(torch.full((len(batch),), self.chance, dtype=torch.float64), generator=run.generator)
