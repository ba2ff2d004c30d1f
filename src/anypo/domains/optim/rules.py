"""Update rules of memory-efficient optimizers, in full precision and without storage: Adam, Adafactor, CAME and Adam in a projected space.

A rule turns a gradient and its states into a direction; the states are tensors by name, and `kinds` says what each is, so that storage can be chosen
by kind: momentum (signed), second (non-negative, one entry a parameter), factored and confidence (non-negative vectors). A state without a kind is
kept as it is. Left out: schedules, relative step sizes and decay, which belong to the optimizer around the rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

States = dict[str, Tensor]


class Rule(Protocol):
    """The mathematics of an optimizer for one parameter."""

    kinds: ClassVar[dict[str, str]]  # state name -> momentum, second, factored or confidence

    def direction(self, gradient: Tensor, states: States, t: int) -> Tensor:
        """The step at learning rate 1 (to be subtracted) at step `t` >= 1. `states`, empty at first, is updated in place."""
        ...


class Factored(NamedTuple):
    row: Tensor  # [r]
    col: Tensor  # [c]
    update: Tensor  # [r,c]


def factored_v(row: Float[Tensor, " r"], col: Float[Tensor, " c"]) -> Float[Tensor, "r c"]:
    """Adafactor's estimate of a matrix from its row and column means: R_i C_j / mean R (zero where the mean is zero)."""
    return row[:, None] * col / row.mean().clamp(min=torch.finfo(row.dtype).tiny)


def factored_root(row: Float[Tensor, " r"], col: Float[Tensor, " c"]) -> Float[Tensor, "r c"]:
    """The root of `factored_v` as a product of roots, which does not underflow where a row and a column are both tiny."""
    return (row / row.mean().clamp(min=torch.finfo(row.dtype).tiny)).sqrt()[:, None] * col.sqrt()


def averaged_factors(x: Float[Tensor, "r c"], row: Tensor, col: Tensor, decay: float) -> tuple[Tensor, Tensor]:
    """Exponential averages of the row means [r] and column means [c] of a non-negative matrix."""
    return decay * row + (1 - decay) * x.mean(1), decay * col + (1 - decay) * x.mean(0)


def clip_rms(update: Tensor, clip: float) -> Tensor:
    """Divide by the root mean square over `clip` where that is above 1."""
    return update / (update.square().mean().sqrt() / clip).clamp(min=1.0)


def adafactor(
    g: Float[Tensor, "r c"],
    row: Float[Tensor, " r"],
    col: Float[Tensor, " c"],
    beta2: float = 0.999,
    eps1: float = 1e-30,
    clip: float = 1.0,
) -> Factored:
    """One step of Adafactor (arXiv:1804.04235): averages of g^2 + eps1 by row and column, and g / sqrt(vhat) clipped to a mean square of clip^2."""
    row, col = averaged_factors(g.square() + eps1, row, col, beta2)
    return Factored(row, col, clip_rms(g / factored_root(row, col), clip))


def _zeros(states: States, gradient: Tensor, **shapes: tuple[int, ...]) -> None:
    for name, shape in shapes.items():
        if name not in states:
            states[name] = gradient.new_zeros(shape)


@dataclass
class Adam:
    """Adam's direction; decay is the optimizer's."""

    betas: tuple[float, float] = (0.9, 0.999)  # in [0,1)
    eps: float = 1e-8  # >= 0

    kinds: ClassVar[dict[str, str]] = {"m": "momentum", "v": "second"}

    def __post_init__(self) -> None:
        if not all(0 <= beta < 1 for beta in self.betas) or self.eps < 0:
            raise ValueError(f"Adam needs betas in [0,1) and eps >= 0, not {self.betas}, {self.eps}")

    def direction(self, gradient: Tensor, states: States, t: int) -> Tensor:
        b1, b2 = self.betas
        _zeros(states, gradient, m=tuple(gradient.shape), v=tuple(gradient.shape))
        m = states["m"].mul_(b1).add_(gradient, alpha=1 - b1)
        v = states["v"].mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
        return (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt_() + self.eps)


@dataclass
class Adafactor:
    """`adafactor` on matrices (more axes: the first against the rest); vectors keep a whole second moment. No momentum."""

    beta2: float = 0.999  # in [0,1); not bias-corrected: the clip bounds the first steps
    eps1: float = 1e-30  # added to g^2
    clip: float = 1.0  # largest root mean square of the update, > 0

    kinds: ClassVar[dict[str, str]] = {"row": "factored", "col": "factored", "v": "second"}

    def direction(self, gradient: Tensor, states: States, t: int) -> Tensor:
        if gradient.dim() < 2:
            _zeros(states, gradient, v=tuple(gradient.shape))
            states["v"] = self.beta2 * states["v"] + (1 - self.beta2) * (gradient.square() + self.eps1)
            return clip_rms(gradient / states["v"].sqrt(), self.clip)
        g = gradient.flatten(1)
        _zeros(states, g, row=(g.shape[0],), col=(g.shape[1],))
        states["row"], states["col"], update = adafactor(g, states["row"], states["col"], self.beta2, self.eps1, self.clip)
        return update.view_as(gradient)


def confident(m: Tensor, row: Tensor, col: Tensor) -> Tensor:
    """CAME's update (arXiv:2307.02047): momentum over the root of its factored instability, for factors [r], [c] of (u - m)^2."""
    return m / factored_root(row, col)


@dataclass
class Came:
    """Adafactor with momentum that is trusted less where it disagrees with the update. Vectors keep momentum without confidence."""

    betas: tuple[float, float, float] = (0.9, 0.999, 0.9999)  # momentum, second moment, instability; in [0,1)
    eps1: float = 1e-30  # added to g^2
    eps2: float = 1e-16  # added to (u - m)^2
    clip: float = 1.0  # largest root mean square of u, > 0

    # all four factors are as delicate as the confidence: the update divides by the roots of two products of them
    kinds: ClassVar[dict[str, str]] = {"m": "momentum", "v": "second"} | dict.fromkeys(
        ("row", "col", "instability_row", "instability_col"), "confidence"
    )

    def direction(self, gradient: Tensor, states: States, t: int) -> Tensor:
        b1, b2, b3 = self.betas
        update = Adafactor(b2, self.eps1, self.clip).direction(gradient, states, t)
        _zeros(states, gradient, m=tuple(gradient.shape))
        m = states["m"].mul_(b1).add_(update, alpha=1 - b1)
        if gradient.dim() < 2:
            return m.clone()
        flat, disagreement = m.flatten(1), (update - m).flatten(1).square() + self.eps2
        _zeros(states, flat, instability_row=(flat.shape[0],), instability_col=(flat.shape[1],))
        row, col = averaged_factors(disagreement, states["instability_row"], states["instability_col"], b3)
        states["instability_row"], states["instability_col"] = row, col
        return confident(flat, row, col).view_as(gradient)


@dataclass
class ProjectedAdam:
    """Adam in the space of the gradient's leading left singular vectors (arXiv:2403.03507), found anew every `every` steps.

    The moments follow a change of the projection: with Q = P_new^T P_old, m becomes Q m and v becomes (Q*Q) v, which stays non-negative.
    Vectors, and matrices of no more rows than `rank`, take plain Adam.
    """

    rank: int = 32  # >= 1
    every: int = 200  # steps between projections, >= 1
    betas: tuple[float, float] = (0.9, 0.999)  # in [0,1)
    eps: float = 1e-8  # >= 0

    kinds: ClassVar[dict[str, str]] = Adam.kinds

    def direction(self, gradient: Tensor, states: States, t: int) -> Tensor:
        adam, g = Adam(self.betas, self.eps), gradient.flatten(1) if gradient.dim() > 1 else gradient
        if g.dim() < 2 or g.shape[0] <= self.rank:
            return adam.direction(gradient, states, t)
        if (t - 1) % self.every == 0:
            fresh = torch.linalg.svd(g, full_matrices=False).U[:, : self.rank].contiguous()
            if "projection" in states:
                turn = fresh.T @ states["projection"]
                states["m"], states["v"] = turn @ states["m"], turn.square() @ states["v"]
            states["projection"] = fresh
        projection = states["projection"]
        return (projection @ adam.direction(projection.T @ g, states, t)).view_as(gradient)
