"""Small layered decision processes, classes of deterministic policies for them, and samples: episodes and trajectory trees.

H layers, S states a layer, A actions. A policy is a table of actions [H,S], a class of them [P,H,S]. A node's child by action a has number
A * node + 1 + a in a tree; node 0 is the root.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.domains.tabular.linear_mdp import dirichlet
from anypo.domains.tabular.mdp import evaluate, from_start, occupancy

PolicyClass = Int[Tensor, "P H S"]


class LayeredMDP(NamedTuple):
    transition: Tensor  # [H,S,A,S]; the last layer's is not used
    reward: Tensor  # [H,S,A] means in [0,1]
    start: Tensor  # [S]


class Episodes(NamedTuple):
    states: Tensor  # [N,H]
    actions: Tensor  # [N,H]
    rewards: Tensor  # [N,H]


class Trees(NamedTuple):
    states: Tensor  # [N,nodes]
    rewards: Tensor  # [N,nodes,A]


def random_layered(seed: int = 0, horizon: int = 6, states: int = 4, actions: int = 2) -> LayeredMDP:
    """Transitions from a Dirichlet(1), rewards uniform in [0,1] in the last layer alone, first state 0."""
    generator = torch.Generator().manual_seed(seed)
    transition = dirichlet(torch.ones(states, dtype=torch.float64), (horizon, states, actions), generator)
    reward = torch.zeros(horizon, states, actions, dtype=torch.float64)
    reward[-1] = torch.rand(states, actions, generator=generator, dtype=torch.float64)
    return LayeredMDP(transition, reward, torch.eye(states, dtype=torch.float64)[0])


def hidden_lock(seed: int = 0, horizon: int = 6, actions: int = 2) -> LayeredMDP:
    """Two states a layer, which of them is good being random. The right action of a good state leads to the next good one, everything else to a bad one;
    the last good state pays 1 for the right action."""
    generator = torch.Generator().manual_seed(seed)
    good, code = (torch.randint(n, (horizon,), generator=generator) for n in (2, actions))
    layer = torch.arange(horizon)
    following = (1 - good).roll(-1)[:, None, None].repeat(1, 2, actions)
    following[layer, good, code] = good.roll(-1)
    reward = torch.zeros(horizon, 2, actions, dtype=torch.float64)
    reward[-1, good[-1], code[-1]] = 1.0
    return LayeredMDP(torch.nn.functional.one_hot(following, 2).double(), reward, torch.eye(2, dtype=torch.float64)[good[0]])


class BlockMDP(NamedTuple):
    latent: LayeredMDP  # over Z latent states
    block: Tensor  # [H,X] the latent state that emits each observation
    observed: LayeredMDP  # the same over X observations


def block_mdp(seed: int = 0, horizon: int = 4, latents: int = 3, emitted: int = 20, actions: int = 2) -> BlockMDP:
    """A random layered process seen through observations: each latent state shows one of its own `emitted` observations, uniformly, in an order
    that says nothing."""
    latent = random_layered(seed, horizon, latents, actions)
    generator, size = torch.Generator().manual_seed(seed), latents * emitted
    block = torch.stack([torch.randperm(size, generator=generator) // emitted for _ in range(horizon)])
    layer = torch.arange(horizon)[:, None]
    following = latent.transition[layer, block]  # [H,X,A,Z]
    shown = torch.nn.functional.one_hot(block, latents).double().mT / emitted  # [H,Z,X]
    observed = LayeredMDP(following @ shown.roll(-1, 0)[:, None], latent.reward[layer, block], latent.start @ shown[0])
    return BlockMDP(latent, block, observed)


def singletons(horizon: int, states: int) -> PolicyClass:
    """Action 0 everywhere, and the policies that differ from it in one state of one layer; P = H S + 1."""
    return torch.cat([torch.zeros(1, horizon * states), torch.eye(horizon * states)]).long().view(-1, horizon, states)


def open_loop(horizon: int, states: int, actions: int = 2) -> PolicyClass:
    """All sequences of actions, whatever the state; P = A^H."""
    sequences = torch.tensor(list(itertools.product(range(actions), repeat=horizon)))
    return sequences[:, :, None].repeat(1, 1, states)


def every_policy(horizon: int, states: int, actions: int = 2) -> PolicyClass:
    """All deterministic policies; P = A^(H S)."""
    return torch.tensor(list(itertools.product(range(actions), repeat=horizon * states))).view(-1, horizon, states)


def values(problem: LayeredMDP, policies: PolicyClass) -> Float[Tensor, " P"]:
    """Exact expected reward of each policy."""
    tables = torch.nn.functional.one_hot(policies, problem.reward.shape[-1]).to(problem.reward)
    return from_start(evaluate(problem.transition, tables, problem.reward.expand(len(policies), -1, -1, -1)).v, problem.start)


def visits(transition: Tensor, policies: PolicyClass, start: Float[Tensor, " S"]) -> Float[Tensor, "P H S A"]:
    """Probability that each policy is in a state of a layer and takes an action there."""
    tables = torch.nn.functional.one_hot(policies, transition.shape[-2]).to(transition)
    return occupancy(transition, tables, start.expand(len(policies), -1))[..., None] * tables


def sample_episodes(problem: LayeredMDP, count: int, generator: torch.Generator) -> Episodes:
    """Uniform actions, rewards 0 or 1."""
    state = torch.multinomial(problem.start, count, replacement=True, generator=generator)
    rows = []
    for h in range(len(problem.reward)):
        action = torch.randint(problem.reward.shape[-1], (count,), generator=generator)
        rows.append((state, action, torch.bernoulli(problem.reward[h, state, action], generator=generator)))
        state = torch.multinomial(problem.transition[h, state, action], 1, generator=generator)[:, 0]
    return Episodes(*(torch.stack(column, 1) for column in zip(*rows, strict=True)))


def sample_trees(problem: LayeredMDP, count: int, generator: torch.Generator) -> Trees:
    """One next state and one reward, 0 or 1, for every node and action."""
    layer = torch.multinomial(problem.start, count, replacement=True, generator=generator)[:, None]
    states, rewards = [], []
    for h in range(len(problem.reward)):
        states.append(layer)
        rewards.append(torch.bernoulli(problem.reward[h, layer], generator=generator))
        chances = problem.transition[h, layer].flatten(0, 2)
        layer = torch.multinomial(chances, 1, generator=generator).view(count, -1)  # children in the order of node and action
    return Trees(torch.cat(states, 1), torch.cat(rewards, 1))
