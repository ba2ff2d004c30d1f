"""Claims of DGPO on the digits' cells: tuning up, down, and beyond what pre-training saw; validity; and what positions are good for.

25 denoising steps, 32 samples a step. Accuracies are exact (a table of 4096 cells); means are over the valid ones of 128 samples of the tuned
model, and say nothing about a model that has lost its validity.

Settings were chosen on seed 100, on which validity stayed. On seeds 0 and 1 it did not always: a negative advantage also lowers the likelihood of
the input and output nodes that every cell has, invalid graphs are excluded from the updates, and nothing pulls such a model back.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.masked.cells import VALID, WORST, CellTask, accuracies, as_graphs, digits, random_cells
from anypo.domains.masked.graphs import Denoiser, GraphPolicy, graph_loss, pretrain
from anypo.method import Method
from anypo.methods.masked.dgpo import METHOD as DGPO
from anypo.reproductions.common import ShuffledCredit, train_on
from anypo.run import Run

SEEDS = (0, 1)
PRETRAINING = 400
CHANCE = 0.1  # ten digits
ENOUGH = 0.5  # share of valid samples under which a mean over them counts for nothing
BEST_CELL = (3, 1, 2, 2, 3, 1)  # of all 4096
UP = DGPO.but(prepare=()).set("update.learning_rate", 4e-4)
FAST = DGPO.but(prepare=()).set("update.learning_rate", 1e-3)


class Tuned(NamedTuple):
    mean: float  # accuracy of valid samples afterwards
    valid: float
    best: float  # of all that was sampled on the way
    cells: int  # different ones that were sampled on the way


@cache
def _base(worst: bool) -> GraphPolicy:
    task = CellTask(worst)
    policy = task.policy(0)
    pretrain(policy, task.known(), PRETRAINING)
    return policy


def _tune(method: Method, worst: bool, steps: int, seed: int) -> Tuned:
    task, policy = CellTask(worst), copy.deepcopy(_base(worst))
    cells, best = set[tuple[int, ...]](), 0.0

    def watch(run: Run, batch: Batch) -> None:
        nonlocal best
        valid = batch.signals[VALID]
        cells.update(tuple(graph) for graph in batch.action[valid].tolist())
        best = max(best, float(batch.signals["task_reward"].max()))

    train_on(method, policy, task, steps=steps, seed=seed, watch=watch)
    after = task.measure(policy)
    return Tuned(after["accuracy"], after["valid"], best, len(cells))


def _enough(found: list[Tuned]) -> bool:
    return min(t.valid for t in found) >= ENOUGH


def _shuffled(method: Method) -> Method:
    return method.but(credit=ShuffledCredit(method.credit))


@cache
def _up() -> list[Tuned]:
    return [_tune(UP, False, 60, seed) for seed in SEEDS]


@cache
def _beyond() -> list[Tuned]:
    return [_tune(FAST, True, 30, seed) for seed in SEEDS]


@cache
def _down() -> list[Tuned]:
    return [_tune(FAST.set("reward.inverse", True), False, 30, seed) for seed in SEEDS]


def _shown(found: list[Tuned]) -> list[dict[str, float]]:
    return [{name: round(value, 4) for name, value in t._asdict().items()} for t in found]


def _raised(found: list[Tuned]) -> Evidence:
    count = max(t.cells for t in found)
    random = accuracies(as_graphs(torch.tensor(random_cells(count, np.random.default_rng(0)))))
    most = digits().accuracy(BEST_CELL)
    measured = {
        "before": round(CellTask().measure(_base(False))["accuracy"], 4), "after": _shown(found), "maximum": round(most, 4),
        f"{count} random cells": {"mean": round(float(random.mean()), 4), "best": round(float(random.max()), 4)},
    }  # fmt: skip
    holds = min(t.mean for t in found) >= 0.94 and min(t.best for t in found) >= most - 0.002 and count <= 2000 and _enough(found)
    return Evidence(
        measured,
        "a mean of at least 0.940 and a best cell within 0.002 of the maximum on every seed, at most 2000 cells, at least half of the samples valid",
        holds,
    )


# Not reproduced: means of 0.944 and best cells of 0.9543 on both seeds, but on seed 0 only 6% of the samples are valid.
@claim(
    "tuning raises the mean accuracy of sampled cells to 0.940 and finds a cell within 0.002 of the best one, from 2000 cells or fewer",
    slow=True,
    reproduced=False,
)
def raised() -> Evidence:
    return _raised(_up())


@ablation(raised, "advantages dealt to the wrong graphs")
def raised_by_chance() -> Evidence:
    return _raised([_tune(_shuffled(UP), False, 60, SEEDS[0])])


def _extrapolates(found: list[Tuned]) -> Evidence:
    known = float(accuracies(CellTask(True).known()).max())
    before = CellTask(True).measure(_base(True))["accuracy"]
    measured = {"best known": round(known, 4), "before": round(before, 4), "after": _shown(found)}
    return Evidence(
        measured, "a mean at least 0.03 above the best known on every seed", known <= WORST and min(t.mean for t in found) >= known + 0.03
    )


# Not reproduced: 0.926 on both seeds against 0.879, but with shuffled advantages the collapsing model ends at 0.927 too.
@claim(
    "pre-trained on the worst 7% alone, tuned samples are on average 3 points above the best cell that pre-training saw",
    slow=True,
    reproduced=False,
)
def extrapolates() -> Evidence:
    return _extrapolates(_beyond())


@ablation(extrapolates, "advantages dealt to the wrong graphs")
def extrapolates_by_chance() -> Evidence:
    return _extrapolates([_tune(_shuffled(FAST), True, 30, SEEDS[0])])


def _fallen(found: list[Tuned]) -> Evidence:
    return Evidence(
        _shown(found),
        "a mean of at most 0.13 on every seed, at least half of the samples valid",
        max(t.mean for t in found) <= CHANCE + 0.03 and _enough(found),
    )


# Not reproduced: 0.094 on seed 1, but no valid sample at all on seed 0.
@claim("with the reward negated the mean accuracy falls to within 3 points of chance", slow=True, reproduced=False)
def fallen() -> Evidence:
    return _fallen(_down())


@ablation(fallen, "the reward as it is")
def not_negated() -> Evidence:
    return _fallen(_up())


def _valid(shares: list[float]) -> Evidence:
    return Evidence([round(s, 3) for s in shares], "at least 0.95 each", min(shares) >= 0.95)


# Not reproduced: 0.06, 0.97 (up), 0.99, 1.00 (beyond), 0.00, 0.98 (down) on seeds 0 and 1.
@claim("at least 95% of the graphs of all tuned models are valid", slow=True, reproduced=False)
def valid() -> Evidence:
    return _valid([t.valid for t in (*_up(), *_beyond(), *_down())])


@ablation(valid, "no training at all")
def untrained() -> Evidence:
    return _valid([CellTask().measure(CellTask().policy(0))["valid"]])


def _chains(count: int, seed: int) -> Tensor:
    """Graphs [M,5+10] of one node type with an edge from i to i + 1 in nine of ten, any other in one of five."""
    upper = torch.triu_indices(5, 5, 1)
    chance = torch.where(upper[1] == upper[0] + 1, 0.9, 0.2).expand(count, -1)
    edges = torch.bernoulli(chance, generator=torch.Generator().manual_seed(seed)).long()
    return torch.cat([torch.zeros(count, 5, dtype=torch.int64), edges], 1)


@cache
def _likelihood(positions: int, seed: int) -> float:
    """Mean cross-entropy of an edge of 4000 fresh graphs at uniform times."""
    policy = GraphPolicy(Denoiser(5, 1, positions=positions, seed=seed))
    pretrain(policy, _chains(2000, 10 + seed), 300, seed)
    with torch.no_grad():
        return float(graph_loss(policy, _chains(4000, 20 + seed), torch.Generator().manual_seed(seed), edge_weight=1.0))


def _positions(columns: int) -> Evidence:
    gain = [_likelihood(0, seed) - _likelihood(columns, seed) for seed in SEEDS]
    return Evidence([round(g, 4) for g in gain], "a cross-entropy at least 0.05 lower on every seed", min(gain) >= 0.05)


@claim("positions at the nodes raise the pre-training likelihood of directed graphs with variable edges", slow=True)
def positions() -> Evidence:
    return _positions(8)


@ablation(positions, "no positions on either side")
def without_positions() -> Evidence:
    return _positions(0)
