"""Monotone submodular functions of the states that a path has visited, and the marginal gain of every new state (arXiv:2307.13372).

All values are of whole prefixes at once: F(s_0), F(s_0 s_1), ... as one tensor [N,H], from which gains are differences. F(empty) is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

KINDS = ("coverage", "items", "information")
MODULAR = "modular_"  # before a kind: every visit counts in full, as if nothing had been visited before


class Gains(NamedTuple):
    first: Tensor  # [N] F of the first state
    gains: Tensor  # [N,H-1] what each further state adds


def coverage(states: Int[Tensor, "N H"], cover: Float[Tensor, "S C"], weight: Float[Tensor, " C"]) -> Float[Tensor, "N H"]:
    """Weight of the cells that the states of each prefix cover. `cover` in [0,1] (a cell counts as its best cover), `weight` >= 0."""
    return cover[states].cummax(1).values @ weight


def items(
    states: Int[Tensor, "N H"], groups: Sequence[Sequence[int]], cap: Int[Tensor, " K"], count: int | None = None
) -> Float[Tensor, "N H"]:
    """Sum over groups of states of min(distinct visited members, cap). `groups`: K lists of states; `count`: number of states, if larger."""
    size = max(int(states.max()) + 1, count or 0, 1 + max((s for group in groups for s in group), default=0))
    member = torch.zeros(size, len(groups), dtype=torch.float64)
    for k, group in enumerate(groups):
        member[list(group), k] = 1.0
    visited = torch.nn.functional.one_hot(states, size).to(torch.uint8).cummax(1).values.double()
    return torch.minimum(visited @ member, torch.as_tensor(cap).double()).sum(-1)


def information(states: Int[Tensor, "N H"], kernel: Float[Tensor, "S S"], noise: float) -> Float[Tensor, "N H"]:
    """1/2 log det(I + K / noise) over the distinct states of each prefix, `noise` the variance > 0.

    A repeated state's row and column are taken out of K, where it adds nothing; the leading minors of one Cholesky factor are all prefixes.
    """
    same = states[:, :, None] == states[:, None, :]
    new = ~same.tril(-1).any(-1)
    among = kernel[states[:, :, None], states[:, None, :]] * (new[:, :, None] & new[:, None, :])
    factor = torch.linalg.cholesky(torch.eye(states.shape[1], dtype=kernel.dtype) + among / noise)
    return factor.diagonal(dim1=-2, dim2=-1).log().cumsum(-1)


FUNCTIONS = {"coverage": coverage, "items": items, "information": information}


def prefix_values(states: Int[Tensor, "N H"], kind: str, **what: Any) -> Float[Tensor, "N H"]:
    """F of every prefix of the paths. Raises ValueError for an unknown kind."""
    base = kind.removeprefix(MODULAR)
    if base not in FUNCTIONS:
        raise ValueError(f"unknown set function '{kind}'; use {', '.join(KINDS)}, or one of them with {MODULAR} before it")
    if base == kind:
        return FUNCTIONS[base](states, **what)  # type: ignore[operator]
    alone = FUNCTIONS[base](states.reshape(-1, 1), **what)  # type: ignore[operator]
    return alone.reshape(states.shape).cumsum(1)


def set_value(states: Int[Tensor, "N H"], kind: str, **what: Any) -> Float[Tensor, " N"]:
    """F of whole paths."""
    return prefix_values(states, kind, **what)[:, -1]


def marginals(states: Int[Tensor, "N H"], kind: str, **what: Any) -> Gains:
    """F(tau_0..i + s_i+1) - F(tau_0..i) along each path, and F of the first state (equation 2)."""
    values = prefix_values(states, kind, **what)
    return Gains(values[:, 0], values.diff(dim=1))


@dataclass(frozen=True)
class SetFunction:
    """One of the functions with what it is defined by."""

    kind: str  # coverage, items, information, each also with modular_ before it
    what: dict[str, Any]  # keyword arguments of the function

    def value(self, states: Int[Tensor, "N H"]) -> Float[Tensor, " N"]:
        return set_value(states, self.kind, **self.what)

    def gains(self, states: Int[Tensor, "N H"]) -> Gains:
        return marginals(states, self.kind, **self.what)

    def modular(self) -> SetFunction:
        """The same with every visit counted in full."""
        return self if self.kind.startswith(MODULAR) else replace(self, kind=MODULAR + self.kind)


def curvature(function: SetFunction, states: int) -> float:
    """1 - min over s of [F(V) - F(V without s)] / F({s}), V all states, over those with F({s}) > 0 (equation 6); in [0,1], 0 for a modular F."""
    everything = torch.arange(states)
    whole = function.value(everything[None])
    without = torch.stack([everything[everything != s] for s in range(states)])
    alone = function.value(everything[:, None])
    counts = alone > 0
    return float(1 - ((whole - function.value(without))[counts] / alone[counts]).min())
