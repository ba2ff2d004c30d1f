"""Multi-block bilevel problems: F(x) = mean_i f_i(x, y_i(x)) with y_i(x) the minimum of g_i(x, y), seen through noisy oracles of some blocks.

`Quadratic` has closed forms for everything. Left out: constraints and minima that are not unique.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor


class Oracles(Protocol):
    """First and second derivatives of I blocks at one point, from one sample. `fx` [I,n], `fy` and `gy` [I,d]."""

    @property
    def fx(self) -> Tensor: ...

    @property
    def fy(self) -> Tensor: ...

    @property
    def gy(self) -> Tensor: ...

    def hessian(self) -> Float[Tensor, "I d d"]:
        """grad_yy g as a matrix; only asked for where d is small."""
        ...

    def times_hessian(self, v: Float[Tensor, "I d"]) -> Float[Tensor, "I d"]:
        """grad_yy g times v."""
        ...

    def times_mixed(self, v: Float[Tensor, "I d"]) -> Float[Tensor, "I n"]:
        """grad_xy g [n,d] times v."""
        ...


class Bilevel(Protocol):
    @property
    def blocks(self) -> int: ...

    def at(self, x: Float[Tensor, " n"], y: Float[Tensor, "I d"], block: Int[Tensor, " I"], sample: Any) -> Oracles:
        """The oracles of the blocks `block`; the same `sample` gives the same noise at every point."""
        ...


class Hypergradient(NamedTuple):
    objective: Tensor
    gradient: Tensor  # [n]


class Dense(NamedTuple):
    """Oracles whose second derivatives are matrices."""

    fx: Tensor
    fy: Tensor
    gy: Tensor
    gyy: Tensor  # [I,d,d]
    gxy: Tensor  # [I,n,d]

    def hessian(self) -> Tensor:
        return self.gyy

    def times_hessian(self, v: Tensor) -> Tensor:
        return (self.gyy @ v[..., None]).squeeze(-1)

    def times_mixed(self, v: Tensor) -> Tensor:
        return (self.gxy @ v[..., None]).squeeze(-1)


@dataclass(frozen=True)
class Quadratic:
    """f_i = |y - t_i|^2 / 2 + c_i.x + rx |x|^2 / 2 and g_i = y.A_i y / 2 - y.(B_i x + e_i), with A_i positive definite.

    A sample is one number a block: fx, fy and gy get 0.1 of it, gyy 0.05 of it on the diagonal, gxy is multiplied by 1 + 0.05 of it.
    """

    A: Float[Tensor, "m d d"]
    B: Float[Tensor, "m d n"]
    e: Float[Tensor, "m d"]
    t: Float[Tensor, "m d"]
    c: Float[Tensor, "m n"]
    rx: float

    @classmethod
    def random(cls, seed: int, blocks: int = 10, n: int = 5, d: int = 4) -> Quadratic:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        q = normal(blocks, d, d)
        return cls(
            q @ q.mT / d + torch.eye(d, dtype=q.dtype),
            normal(blocks, d, n),
            normal(blocks, d),
            normal(blocks, d),
            0.1 * normal(blocks, n),
            0.2,
        )

    @property
    def blocks(self) -> int:
        return len(self.A)

    @cached_property
    def _identity(self) -> Tensor:
        return torch.eye(self.A.shape[-1], dtype=self.A.dtype)

    def at(self, x: Tensor, y: Tensor, block: Tensor, sample: Float[Tensor, " I"]) -> Dense:
        A, B, noise = self.A[block], self.B[block], sample[:, None]
        gy = (A @ y[..., None]).squeeze(-1) - B @ x - self.e[block] + 0.1 * noise
        return Dense(
            self.c[block] + self.rx * x + 0.1 * noise,
            y - self.t[block] + 0.1 * noise,
            gy,
            A + 0.05 * noise[..., None] * self._identity,
            -B.mT * (1 + 0.05 * noise[..., None]),
        )

    def lower(self, x: Tensor) -> Float[Tensor, "m d"]:
        """The exact minima y_i(x)."""
        return torch.linalg.solve(self.A, self.B @ x + self.e)

    def inverse_product(self, y: Tensor) -> Float[Tensor, "m d"]:
        """The exact (grad_yy g_i)^-1 grad_y f_i at y."""
        return torch.linalg.solve(self.A, y - self.t)

    def hypergradient(self, x: Tensor) -> Hypergradient:
        """F and its exact gradient, equation 1."""
        y = self.lower(x)
        value = (0.5 * (y - self.t).square().sum(1) + self.c @ x).mean() + 0.5 * self.rx * x @ x
        implicit = (self.B.mT @ self.inverse_product(y)[..., None]).squeeze(-1)
        return Hypergradient(value, (self.c + implicit).mean(0) + self.rx * x)
