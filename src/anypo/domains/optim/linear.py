"""Smooth convex problems f(x) = loss(A x): least squares, logistic and multi-class logistic regression, label propagation on a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class LinearModel:
    """The loss and its slope take the predictions z = A x [N]; `curvature` bounds the loss's second derivative in z from above."""

    matrix: Float[Tensor, "N n"]
    loss: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    curvature: float

    def gradient(self, z: Float[Tensor, " N"]) -> Float[Tensor, " n"]:
        return self.matrix.mT @ self.slope(z)

    @cached_property
    def lipschitz(self) -> Float[Tensor, " n"]:
        """Bounds of the second derivative along each coordinate."""
        return self.curvature * self.matrix.square().sum(0)

    @cached_property
    def hessian(self) -> Float[Tensor, "n n"]:
        """An upper bound of the Hessian at every x; for least squares the Hessian itself."""
        return self.curvature * self.matrix.mT @ self.matrix


def least_squares(matrix: Float[Tensor, "N n"], target: Float[Tensor, " N"]) -> LinearModel:
    """|A x - b|^2 / 2."""
    return LinearModel(matrix, lambda z: 0.5 * (z - target).square().sum(), lambda z: z - target, 1.0)


def logistic(matrix: Float[Tensor, "N n"], labels: Float[Tensor, " N"]) -> LinearModel:
    """Sum of log(1 + exp(-y a.x)) for labels y of +1 and -1."""
    softplus = torch.nn.functional.softplus
    return LinearModel(matrix, lambda z: softplus(-labels * z).sum(), lambda z: -labels * (-labels * z).sigmoid(), 0.25)


def softmax(matrix: Float[Tensor, "N n"], classes: Int[Tensor, " N"], count: int) -> LinearModel:
    """Cross-entropy of `count` classes; the coefficients of a feature for all classes are neighbours in x."""
    identity = torch.eye(count, dtype=matrix.dtype)

    def loss(z: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(z.view(-1, count), classes, reduction="sum")

    def slope(z: Tensor) -> Tensor:
        return (z.view(-1, count).softmax(1) - identity[classes]).flatten()

    return LinearModel(torch.kron(matrix.contiguous(), identity), loss, slope, 0.5)


def label_propagation(
    edges: Int[Tensor, "E 2"], weights: Float[Tensor, " E"], known: dict[int, float], nodes: int
) -> tuple[LinearModel, Sequence[int]]:
    """Sum of w (x_i - x_j)^2 / 2 over the edges in the unknown nodes, and those nodes' numbers in the order of x."""
    rows, root = torch.arange(len(edges)), weights.sqrt()
    incidence = weights.new_zeros(len(edges), nodes)
    incidence[rows, edges[:, 0]], incidence[rows, edges[:, 1]] = root, -root
    unknown = [node for node in range(nodes) if node not in known]
    fixed = incidence[:, list(known)] @ weights.new_tensor(list(known.values()))
    return least_squares(incidence[:, unknown], -fixed), unknown
