"""Finite-horizon Markov decision processes, exactly: who is where, what a policy is worth, what the best one is worth.

Pure functions. All tables may have the same leading dimensions (`...`: independent copies of a problem), so many problems cost as many calls as
one. H steps, S states, A actions. Left out: discounted problems without an end.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

Transition = Float[
    Tensor, "... H S A S"
]  # [h,s,a,s']: chance of being in s' at step h + 1; each row sums to 1; the last step's is not used
Table = Float[Tensor, "... H S A"]


class Values(NamedTuple):
    q: Tensor  # [...,H,S,A] payoff from here on, of this action and then the policy
    v: Tensor  # [...,H,S]


class Optimum(NamedTuple):
    q: Tensor  # [...,H,S,A]
    v: Tensor  # [...,H,S]
    policy: Tensor  # [...,H,S,A] one-hot, the first of equally good actions


def occupancy(transition: Transition, policy: Table, start: Float[Tensor, "... S"]) -> Float[Tensor, "... H S"]:
    """Probability of being in each state at each step when `start` [...,S] is the distribution of the first state."""
    here, rows = start, [start]
    for h in range(policy.shape[-3] - 1):
        moves = here[..., None] * policy[..., h, :, :]
        here = (moves[..., None] * transition[..., h, :, :, :]).sum((-3, -2))
        rows.append(here)
    return torch.stack(rows, dim=-2)


def expected_next(transition: Float[Tensor, "... S A S"], value: Float[Tensor, "... S"]) -> Float[Tensor, "... S A"]:
    """Mean over the next state of a step's `value`."""
    return (transition * value[..., None, None, :]).sum(-1)


def evaluate(transition: Transition, policy: Table, payoff: Table) -> Values:
    """Exact expected sum of `payoff` (rewards or losses) under the policy, from every step and state."""
    qs: list[Tensor] = []
    vs: list[Tensor] = []
    for h in range(policy.shape[-3] - 1, -1, -1):
        q = payoff[..., h, :, :]
        if vs:
            q = q + expected_next(transition[..., h, :, :, :], vs[-1])
        qs.append(q)
        vs.append((policy[..., h, :, :] * q).sum(-1))
    return Values(torch.stack(qs[::-1], dim=-3), torch.stack(vs[::-1], dim=-2))


def optimum(transition: Transition, reward: Table) -> Optimum:
    """Values and a policy of the largest expected reward (for losses, pass their negative)."""
    qs: list[Tensor] = []
    vs: list[Tensor] = []
    for h in range(reward.shape[-3] - 1, -1, -1):
        q = reward[..., h, :, :]
        if vs:
            q = q + expected_next(transition[..., h, :, :, :], vs[-1])
        qs.append(q)
        vs.append(q.amax(-1))
    q = torch.stack(qs[::-1], dim=-3)
    return Optimum(q, torch.stack(vs[::-1], dim=-2), torch.nn.functional.one_hot(q.argmax(-1), q.shape[-1]).to(q.dtype))


def from_start(v: Float[Tensor, "... H S"], start: Float[Tensor, "... S"]) -> Float[Tensor, ...]:
    """Expected value at the first step."""
    return (start * v[..., 0, :]).sum(-1)
