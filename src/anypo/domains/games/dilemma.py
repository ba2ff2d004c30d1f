"""A one-shot social dilemma with partners that can be left: payoffs, rules of leaving, and matched agents who play.

R: both cooperate, S: alone in cooperating, T: alone in defecting, P: both defect; T > R > P > S. A rule gives the chance that a pair stays together.
Left out: games of more than two players or actions, reputations.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

RULES = ("out_for_tat", "one_sided", "always_stay", "always_switch")


class Played(NamedTuple):
    action: Tensor  # [L,B,N] 1: cooperate
    reward: Tensor  # [L,B,N]
    order: Tensor  # [B,N] agents by seat, from here on; seats 2k and 2k+1 are partners


def payoff(x: Tensor, y: Tensor, R: float = 3.0, S: float = 0.0, T: float = 5.0, P: float = 1.0) -> Tensor:
    """Expected payoff of cooperating with probability x against one who does with probability y."""
    return x * y * R + x * (1 - y) * S + (1 - x) * y * T + (1 - x) * (1 - y) * P


def keep(x: Tensor, y: Tensor, rule: str, delta: float) -> Tensor:
    """Probability that the match goes on. `delta` in [0,1). Raises ValueError for an unknown rule or another delta."""
    if rule not in RULES:
        raise ValueError(f"unknown rule '{rule}'; use {', '.join(RULES)}")
    if not 0 <= delta < 1:
        raise ValueError(f"the continuation probability is {delta}; it must be at least 0 and below 1, or a match never ends")
    both = torch.ones_like(x * y)
    return delta * {"out_for_tat": x * y, "one_sided": y * both, "always_stay": both, "always_switch": 0 * both}[rule]


def seat(batch: int, agents: int, generator: torch.Generator) -> Int[Tensor, "B N"]:
    """Agents in random pairs. Raises ValueError for an odd number."""
    if agents % 2:
        raise ValueError(f"{agents} agents do not go into pairs; give an even number")
    return torch.rand(batch, agents, generator=generator).argsort(-1)


def play(
    x: Float[Tensor, "B N"], order: Int[Tensor, "B N"], rounds: int, rule: str, delta: float, generator: torch.Generator,
    R: float = 3.0, S: float = 0.0, T: float = 5.0, P: float = 1.0,
) -> Played:  # fmt: skip
    """`rounds` rounds of all agents; after each, pairs that do not stay are matched anew among themselves, uniformly.

    Raises ValueError for one_sided, where it is not said which of the two leaves."""
    if rule == "one_sided":
        raise ValueError("one_sided says nothing about a pair of agents who both choose; use out_for_tat, always_stay or always_switch")
    batch, agents = x.shape
    luck = torch.rand(3, rounds, batch, agents, generator=generator, dtype=x.dtype)
    table = torch.tensor([P, T, S, R], dtype=x.dtype)  # by 2 own + other
    stays = keep(torch.tensor([0, 0, 1, 1]).to(x), torch.tensor([0, 1, 0, 1]).to(x), rule, delta)
    front = torch.arange(agents, dtype=x.dtype) - agents  # pairs that stay go first, in their order
    orders, cells = [], []
    for k in range(rounds):
        act = (luck[0, k] < x.gather(1, order)).long().view(batch, -1, 2)
        cell = (2 * act + act.flip(-1)).view(batch, agents)
        orders.append(order)
        cells.append(cell)
        stay = luck[1, k].view(batch, -1, 2)[..., :1] < stays[cell].view(batch, -1, 2)  # one draw a pair; the rule is the same for both
        order = order.gather(1, torch.where(stay.reshape(batch, agents), front, luck[2, k]).argsort(-1))
    seats, cell = torch.stack(orders), torch.stack(cells)
    empty = torch.zeros(rounds, batch, agents, dtype=x.dtype)
    return Played(empty.scatter(-1, seats, (cell >= 2).to(x)), empty.scatter(-1, seats, table[cell]), order)
