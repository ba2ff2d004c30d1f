"""The problems on which the claims about coordinate descent are measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from anypo.domains.optim.forest import message_passing
from anypo.domains.optim.linear import LinearModel, label_propagation, least_squares, logistic, softmax
from anypo.methods.optim.greedy_bcd import scaled_least_squares


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def models(seed: int) -> dict[str, LinearModel]:
    g = generator(seed)
    a = torch.randn(120, 30, generator=g, dtype=torch.float64)
    labels = torch.randint(0, 3, (120,), generator=g)
    return {
        "least squares": scaled_least_squares(g),
        "logistic": logistic(a, (labels > 0).double() * 2 - 1),
        "softmax": softmax(a[:, :10], labels, 3),
    }


def random_forest(seed: int, size: int = 200) -> tuple[list[float], list[tuple[int, int, float]], list[float]]:
    """A positive definite matrix whose graph is a random forest: diagonal, edges, and a right-hand side."""
    g = generator(seed)
    values, right = (
        torch.randn(size, generator=g, dtype=torch.float64).tolist(),
        torch.randn(size, generator=g, dtype=torch.float64).tolist(),
    )
    edges = [(int(torch.randint(i, (1,), generator=g)), i, values[i]) for i in range(1, size) if i % 17]
    diagonal = [1.0] * size
    for i, j, value in edges:
        diagonal[i] += abs(value)
        diagonal[j] += abs(value)
    return diagonal, edges, right


def path_system(size: int) -> Callable[[], object]:
    diagonal, edges, right = [3.0] * size, [(i, i + 1, -1.0) for i in range(size - 1)], [1.0] * size
    return lambda: message_passing(diagonal, edges, right)


def dense_path_system(size: int) -> Callable[[], object]:
    ones = torch.ones(size - 1, dtype=torch.float64)
    matrix = 3 * torch.eye(size, dtype=torch.float64) - ones.diag(1) - ones.diag(-1)
    return lambda: torch.linalg.solve(matrix, torch.ones(size, dtype=torch.float64))


def grid(seed: int, side: int = 16) -> LinearModel:
    """Label propagation on a grid in which a tenth of the nodes have labels of +1 or -1. (The specification gives no size.)"""
    g, number = generator(seed), torch.arange(side * side).view(side, side)
    edges = torch.cat(
        [torch.stack([number[:, :-1], number[:, 1:]], -1).view(-1, 2), torch.stack([number[:-1], number[1:]], -1).view(-1, 2)]
    )
    chosen = torch.randperm(side * side, generator=g)[: side * side // 10].tolist()
    labels = (2.0 * torch.randint(0, 2, (len(chosen),), generator=g) - 1).tolist()
    weights = torch.rand(len(edges), generator=g, dtype=torch.float64) + 0.5
    return label_propagation(edges, weights, dict(zip(chosen, labels, strict=True)), side * side)[0]


def lasso(seed: int, rows: int = 80, columns: int = 40) -> tuple[LinearModel, float]:
    """Unit columns, six true coefficients, noise 0.1; lam is a tenth of the smallest that leaves nothing. (The specification gives no size.)"""
    g = generator(seed)
    a = torch.randn(rows, columns, generator=g, dtype=torch.float64)
    a = a / a.norm(dim=0)
    truth = torch.zeros(columns, dtype=torch.float64)
    truth[:6] = torch.randn(6, generator=g, dtype=torch.float64).sign() * (1 + torch.rand(6, generator=g, dtype=torch.float64))
    b = a @ truth + 0.1 * torch.randn(rows, generator=g, dtype=torch.float64)
    return least_squares(a, b), 0.1 * float((a.T @ b).abs().max())


def subgradient_descend(model: LinearModel, lam: float) -> Iterator[Tensor]:
    """An ablation: steps on the coordinate of the largest subgradient whose updates never land on zero."""
    x = torch.zeros(model.matrix.shape[1], dtype=torch.float64)
    while True:
        slope = model.gradient(model.matrix @ x) + lam * x.sign()
        i = int((slope.square() / model.lipschitz).argmax())
        x = x.clone()
        x[i] -= slope[i] / model.lipschitz[i]
        yield x
