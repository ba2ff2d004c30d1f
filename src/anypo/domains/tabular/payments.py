"""A payments processor as a contextual bandit: transactions, actions that are not always available, approvals, and a regression oracle for them.

n transactions, d features, K actions. The oracle is one ridge logistic regression per action on (context, 1); it is misspecified, the true log-odds
have a square. Left out: boosted trees as the oracle, the cost of an action, drift of the world itself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

AVAILABLE = 0.7  # chance that an action can be taken
RIDGE = 1.0  # precision of the normal prior on every coefficient; an action that was never taken keeps the prior's 1/2


class Approval(NamedTuple):
    probability: Tensor  # [n,K]


class World(NamedTuple):
    linear: Tensor  # [K,d]
    quadratic: Tensor  # [K,d]
    offset: float  # added to the log-odds; about 1 gives the approval rates of payments


class Transactions(NamedTuple):
    context: Tensor  # [n,d]
    available: Tensor  # [n,K] bool, at least one a row
    approval: Tensor  # [n,K] true probabilities


def true_reward(
    context: Float[Tensor, "n d"], linear: Float[Tensor, "K d"], quadratic: Float[Tensor, "K d"], offset: float = 0.0
) -> Approval:
    """sigmoid(W x + (V x)^2 - 1 + offset) of every action."""
    return Approval((context @ linear.T + (context @ quadratic.T) ** 2 - 1 + offset).sigmoid())


def payments(generator: torch.Generator, actions: int = 6, features: int = 6, offset: float = 0.0) -> World:
    """A world with W ~ 0.6 N(0, 1) and V ~ 0.35 N(0, 1)."""
    linear, quadratic = torch.randn(2, actions, features, generator=generator, dtype=torch.float64)
    return World(0.6 * linear, 0.35 * quadratic, offset)


def transactions(world: World, count: int, generator: torch.Generator) -> Transactions:
    """Standard normal contexts; each action is available with probability 0.7, one at random where none is."""
    actions, features = world.linear.shape
    context = torch.randn(count, features, generator=generator, dtype=torch.float64)
    luck = torch.rand(count, actions, generator=generator, dtype=torch.float64)
    available = (luck < AVAILABLE) | (luck == luck.amin(-1, keepdim=True))
    return Transactions(context, available, true_reward(context, *world).probability)


def fit(
    context: Float[Tensor, "n d"], action: Int[Tensor, " n"], reward: Float[Tensor, " n"], actions: int, weight: Tensor | None = None,
    newton_steps: int = 10,
) -> Float[Tensor, "K d1"]:  # fmt: skip
    """Coefficients on (context, 1) that minimize log loss + RIDGE / 2 |coefficients|^2, an action at a time; `weight` [n] of the samples, 1 if None."""
    inputs = torch.cat([context, torch.ones_like(context[:, :1])], dim=1)
    squares = (inputs[:, :, None] * inputs[:, None, :]).flatten(1)
    taken = torch.nn.functional.one_hot(action, actions).T.to(inputs)  # [K,n]
    taken = taken if weight is None else taken * weight
    size = inputs.shape[1]
    coefficients = inputs.new_zeros(actions, size)
    for _ in range(newton_steps):
        p = (inputs * coefficients[action]).sum(-1).sigmoid()
        gradient = (taken * (p - reward)) @ inputs + RIDGE * coefficients
        curvature = ((taken * (p * (1 - p))) @ squares).view(actions, size, size) + RIDGE * torch.eye(size).to(inputs)
        coefficients = coefficients - torch.linalg.solve(curvature, gradient)
    return coefficients


def predict(coefficients: Float[Tensor, "K d1"], context: Float[Tensor, "n d"]) -> Float[Tensor, "n K"]:
    """Predicted approval probability of every action."""
    return (context @ coefficients[:, :-1].T + coefficients[:, -1]).sigmoid()


def uniform_log_loss(prediction: Float[Tensor, "n K"], approval: Float[Tensor, "n K"], available: Bool[Tensor, "n K"]) -> float:
    """Log loss expected over the true probabilities and an action drawn uniformly from those available."""
    p = prediction.clamp(1e-12, 1 - 1e-12)
    loss = -(approval * p.log() + (1 - approval) * (-p).log1p())
    return float(((loss * available).sum(-1) / available.sum(-1)).mean())
