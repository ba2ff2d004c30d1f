"""Discounted linear Markov decision processes: transitions and rewards linear in features, so that the Q of every policy is too.

A problem is five tables, in the order in which functions of policies take them. All may have the same leading dimensions (`...`: several
problems at once). S states, A actions, d features.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


class LinearMDP(NamedTuple):
    features: Tensor  # [...,S,A,d]
    mu: Tensor  # [...,S,A] reference distribution over actions, > 0
    transition: Tensor  # [...,S,A,S]
    reward_table: Tensor  # [...,S,A]
    rho: Tensor  # [...,S] distribution of the first state


def dirichlet(concentration: Tensor, shape: tuple[int, ...], generator: torch.Generator) -> Float[Tensor, "*shape d"]:
    """Samples of a Dirichlet distribution with parameters [d]."""
    gammas = torch._standard_gamma(concentration.expand(*shape, len(concentration)).contiguous(), generator=generator)
    return gammas / gammas.sum(-1, keepdim=True)


def from_features(features: Float[Tensor, "S A d"], mu: Float[Tensor, "S A"], generator: torch.Generator) -> LinearMDP:
    """Random linear dynamics and rewards on given simplex features; the start is uniform."""
    states, _, size = features.shape
    following = dirichlet(torch.ones(states).to(features), (size,), generator)
    weights = torch.rand(size, generator=generator, dtype=features.dtype)
    return LinearMDP(features, mu, features @ following, features @ weights, torch.full((states,), 1 / states).to(features))


def random_linear_mdp(seed: int = 0, states: int = 6, actions: int = 5, size: int = 4) -> LinearMDP:
    """Features from a Dirichlet(0.6) (in the simplex), uniform mu."""
    generator = torch.Generator().manual_seed(seed)
    features = dirichlet(torch.full((size,), 0.6, dtype=torch.float64), (states, actions), generator)
    return from_features(features, torch.full((states, actions), 1 / actions, dtype=torch.float64), generator)


def action_line(seed: int = 0, states: int = 3, actions: int = 101, size: int = 4, width: float = 0.15) -> LinearMDP:
    """Actions in [0,1], on a grid whose trapezoid weights are mu. The features are bumps, one in each `size`-th of the line, around
    random centres of each state, normalized to sum 1."""
    generator = torch.Generator().manual_seed(seed)
    line = torch.linspace(0, 1, actions, dtype=torch.float64)
    centres = (torch.arange(size) + torch.rand(states, 1, size, generator=generator, dtype=torch.float64)) / size
    features = (-(((line[:, None] - centres) / width) ** 2) / 2).softmax(-1)
    mu = torch.ones(states, actions, dtype=torch.float64)
    mu[:, [0, -1]] = 0.5
    return from_features(features, mu / mu.sum(-1, keepdim=True), generator)


def without_structure(problem: LinearMDP, seed: int = 0) -> LinearMDP:
    """The same features with random transitions and rewards that are not linear in them."""
    generator = torch.Generator().manual_seed(seed)
    transition = dirichlet(torch.ones_like(problem.rho), tuple(problem.reward_table.shape), generator)
    return problem._replace(
        transition=transition, reward_table=torch.rand(problem.reward_table.shape, generator=generator, dtype=torch.float64)
    )


def full_span(problem: LinearMDP) -> LinearMDP:
    """The same policies without the last coordinate: the features are no longer confined to a simplex, their affine span is the whole space."""
    return problem._replace(features=problem.features[..., :-1])


def stacked(problems: Iterable[LinearMDP]) -> LinearMDP:
    """Several problems as one with leading dimensions [M,1], to be broadcast against parameters [M,starts,d]."""
    return LinearMDP(*(torch.stack(tables)[:, None] for tables in zip(*problems, strict=True)))
