"""Mahalanobis distances as rewards: of vectors, of classes as one-hot vectors, and a matrix U that is learned.

Positive definiteness of a given U is not checked; a learned one has it by its form.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


def mahalanobis(guess: Float[Tensor, "... n"], target: Float[Tensor, "... n"], matrix: Float[Tensor, "n n"]) -> Float[Tensor, ...]:
    """-(guess - target)^T U (guess - target)."""
    gap = guess - target
    return -((gap @ matrix) * gap).sum(-1)


def reward_table(matrix: Float[Tensor, "C C"]) -> Float[Tensor, "C C"]:
    """The Mahalanobis reward between one-hot vectors, guess by truth."""
    own = matrix.diagonal()
    return matrix + matrix.T - own[:, None] - own[None]


def factored(raw: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    """L L^T with the lower triangle of `raw`, its diagonal through a softplus: positive definite."""
    lower = raw.tril(-1) + torch.diag(torch.nn.functional.softplus(raw.diagonal()))
    return lower @ lower.T


class LearnedMatrix:
    """U = factored(raw) from a positive definite start, moved uphill by Adam (betas 0.9 and 0.99). Raises torch's LinAlgError for another start."""

    def __init__(self, start: Float[Tensor, "n n"]) -> None:
        lower = torch.linalg.cholesky(start)
        self.raw = lower.tril(-1) + torch.diag(lower.diagonal().expm1().log())
        self.first, self.second, self.taken = torch.zeros_like(start), torch.zeros_like(start), 0

    @property
    def matrix(self) -> Float[Tensor, "n n"]:
        return factored(self.raw)

    def ascend(self, slope: Float[Tensor, "n n"], learning_rate: float) -> None:
        """One step along the gradient in `raw`."""
        self.first, self.second, self.taken = 0.9 * self.first + 0.1 * slope, 0.99 * self.second + 0.01 * slope**2, self.taken + 1
        step = self.first / (1 - 0.9**self.taken) / ((self.second / (1 - 0.99**self.taken)).sqrt() + 1e-12)
        self.raw = self.raw + learning_rate * step

    def state_dict(self) -> dict[str, Any]:
        return {"raw": self.raw, "first": self.first, "second": self.second, "taken": self.taken}

    @classmethod
    def restored(cls, state: dict[str, Any]) -> LearnedMatrix:
        """From a `state_dict`."""
        found = cls(torch.eye(len(state["raw"]), dtype=state["raw"].dtype))
        for name, value in state.items():
            setattr(found, name, value)
        return found
