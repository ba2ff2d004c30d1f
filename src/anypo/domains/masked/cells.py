"""Cells: a space of 4096 small architectures over the scikit-learn digits, whose accuracy is a ridge regression away, as a task of graphs.

A cell has nodes 0 (the image) to 3; node j is the sum of operations on the nodes before it, one for each of the six slots (0,1), (0,2), (1,2), (0,3),
(1,3), (2,3): nothing, the node itself, relu(W x) with one fixed random W, a 3x3 average. Features are those of node 3; a linear classifier on them is
fitted to 900 images and its accuracy measured on the other 897. As a graph: input, the six slots as nodes of their operation's type, output.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.masked.graphs import STATE, TIME, Denoiser, GraphPolicy
from anypo.task import Prompt

if TYPE_CHECKING:
    from anypo.run import Run

SLOTS = ((0, 1), (0, 2), (1, 2), (0, 3), (1, 3), (2, 3))
OPERATIONS = 4  # nothing, skip, relu(W x), average
INPUT, OUTPUT, NODES = OPERATIONS, OPERATIONS + 1, len(SLOTS) + 2
VALID = "valid_graph"  # signal [N] bool
WORST = 0.879  # accuracy that the lowest 7% of the space do not exceed


def averaging() -> Float[Tensor, "64 64"]:
    """The 3x3 average of an 8x8 image, zeros around it, as a matrix."""
    image = torch.eye(64, dtype=torch.float64).view(64, 1, 8, 8)
    return torch.nn.functional.avg_pool2d(image, 3, stride=1, padding=1).view(64, 64).T


def cell_output(x: Float[Tensor, "*N 64"], ops: Any, W: Float[Tensor, "64 64"]) -> Float[Tensor, "*N 64"]:
    """Features of node 3 of a cell with operations `ops` [6]."""
    nodes = [x] + [torch.zeros_like(x) for _ in range(3)]
    for (start, end), op in zip(SLOTS, [int(o) for o in ops], strict=True):
        given = nodes[start]
        if op == 1:
            nodes[end] = nodes[end] + given
        if op == 2:
            nodes[end] = nodes[end] + (given @ W.T).relu()
        if op == 3:
            nodes[end] = nodes[end] + given @ averaging().to(x.dtype).T
    return nodes[3]


class Digits:
    """The images, split for good, and the accuracies that were asked for."""

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        found: Any = load_digits()
        rng = np.random.default_rng(0)
        order = rng.permutation(len(found.data))
        self.x, self.y = torch.tensor(found.data[order] / 16), torch.tensor(found.target[order])
        self.random = torch.tensor(rng.normal(size=(64, 64)) / 8)
        self.memo: dict[tuple[int, ...], float] = {}

    def accuracy(self, ops: tuple[int, ...]) -> float:
        """Validation accuracy of a cell."""
        if ops not in self.memo:
            features = cell_output(self.x, ops, self.random)
            features = torch.cat([features, torch.ones(len(features), 1, dtype=features.dtype)], 1)
            train = features[:900]
            target = torch.nn.functional.one_hot(self.y[:900]).double()
            weights = torch.linalg.solve(train.T @ train + torch.eye(65, dtype=torch.float64), train.T @ target)
            self.memo[ops] = float(((features[900:] @ weights).argmax(1) == self.y[900:]).double().mean())
        return self.memo[ops]


@cache
def digits() -> Digits:
    """One memo for the process: an accuracy is a constant. Raises ValueError without scikit-learn."""
    try:
        return Digits()
    except ImportError:
        raise ValueError("the task of cells reads the digits of scikit-learn; pip install scikit-learn") from None


def random_cells(count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Different cells [count,6], uniform over the space."""
    every = np.array(list(product(range(OPERATIONS), repeat=len(SLOTS))))
    return every[rng.choice(len(every), count, replace=False)]


def as_graphs(ops: Int[Tensor, "M 6"]) -> Int[Tensor, "M 8"]:
    """Node types: input, operations, output."""
    ends = [torch.full((len(ops), 1), kind) for kind in (INPUT, OUTPUT)]
    return torch.cat([ends[0], ops, ends[1]], 1)


def valid_graphs(graphs: Int[Tensor, "M 8"]) -> Tensor:
    """[M] bool: the input first, the output last, operations between."""
    return (graphs[:, 0] == INPUT) & (graphs[:, -1] == OUTPUT) & (graphs[:, 1:-1] < OPERATIONS).all(1)


def slot_wiring() -> Int[Tensor, " 28"]:
    """Edges between the 8 nodes: a slot feeds those that begin where it ends."""
    starts, ends = [-1, *[s for s, _ in SLOTS], 3], [0, *[e for _, e in SLOTS], 99]
    upper = torch.triu_indices(NODES, NODES, 1).T.tolist()
    return torch.tensor([int(ends[i] == starts[j]) for i, j in upper])


class CellTask:
    """Graphs of cells. The reward is the accuracy, -1 for a graph that is no cell (signal `valid_graph`). `worst`: known architectures, which a method
    may pre-train on, are those with an accuracy of at most 0.879 among 1024 random ones; else 1024 random ones."""

    objectives = ("accuracy",)
    prompts_per_step = 1

    def __init__(self, worst: bool = False, evaluation_samples: int = 128) -> None:
        self.worst, self.evaluation_samples = worst, evaluation_samples

    @property
    def name(self) -> str:
        return "cells:worst" if self.worst else "cells"

    def known(self) -> Int[Tensor, "M 8"]:
        """The architectures to pre-train on, always the same ones."""
        ops = random_cells(1024, np.random.default_rng(0))
        if self.worst:
            ops = ops[[digits().accuracy(tuple(cell)) <= WORST for cell in ops.tolist()]]
        return as_graphs(torch.tensor(ops))

    def policy(self, seed: int = 0, **options: Any) -> GraphPolicy:
        """A fresh denoiser for these graphs. `options`: width, layers, positions of the network, `steps` of the diffusion."""
        steps = options.pop("steps", 25)
        return GraphPolicy(Denoiser(NODES, OPERATIONS + 2, seed=seed, **options), steps, slot_wiring())

    def prompts(self, count: int, rng: np.random.Generator) -> list[Prompt]:
        return [Prompt(0, "a cell")] * count

    def collect(self, prompts: list[Prompt], run: Run) -> Batch:
        """Sampled graphs, one row each. Signals: `states` [N,T,A] (noisy graphs at t = T ... 1), `valid_graph`, and `state`, `time` of pure noise."""
        policy: Any = run.policy
        group = torch.repeat_interleave(torch.arange(len(prompts)), torch.tensor([p.samples for p in prompts]))
        found = policy.sample(len(group), run.generator)
        count = len(group)
        signals = {
            "states": found.states, STATE: found.states[:, 0], TIME: torch.full((count,), policy.steps), VALID: valid_graphs(found.graph),
            "prompt_id": torch.zeros(count, dtype=torch.int64),
        }  # fmt: skip
        ones = torch.ones(found.graph.shape, dtype=torch.bool)
        batch = Batch(
            action=found.graph, mask=ones, logp=torch.zeros(ones.shape), group=group, terminated=ones[:, 0], truncated=~ones[:, 0],
            segment=(torch.arange(policy.width) >= policy.nodes).long().expand(ones.shape),
            version=torch.full((count,), run.version), signals=signals,
        )  # fmt: skip
        return batch.but(logp=policy.observe(batch, {"logp"}).logp)

    def score(self, batch: Batch, run: Run) -> Float[Tensor, " N"]:
        return accuracies(batch.action)

    def evaluate(self, run: Run) -> dict[str, float]:
        return self.measure(run.policy)  # type: ignore[arg-type]

    def measure(self, policy: GraphPolicy, seed: int = 1_000_003) -> dict[str, float]:
        """Mean and best accuracy of valid samples, and the share that is valid."""
        graphs = policy.sample(self.evaluation_samples, torch.Generator().manual_seed(seed)).graph
        valid = valid_graphs(graphs)
        found = accuracies(graphs)[valid]
        none = len(found) == 0
        return {
            "accuracy": 0.0 if none else float(found.mean()),
            "best": 0.0 if none else float(found.max()),
            "valid": float(valid.double().mean()),
        }


def accuracies(graphs: Int[Tensor, "M 8"]) -> Float[Tensor, " M"]:
    """Accuracy of every cell, -1 for graphs that are none."""
    valid = valid_graphs(graphs).tolist()
    cells = graphs[:, 1:-1].tolist()
    return torch.tensor([digits().accuracy(tuple(c)) if ok else -1.0 for c, ok in zip(cells, valid, strict=True)], dtype=torch.float64)
