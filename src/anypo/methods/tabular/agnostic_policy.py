"""Agnostic policy learning: access, coverage and structure of the policy class (arXiv:2506.01884).

Find a policy nearly as good as the best one of a given class, without assuming that the class holds an optimal policy. What this costs depends on how the
environment may be accessed (episodes, a generative model, resets), on its coverage and on the class; the baseline everywhere is importance sampling
with uniform actions, at A^H. The abstract states the three axes; the measures, trees and negative results are recalled. Here are the measures, the
evaluations by trees and by importance weights, PSDP and, in place of the thesis' algorithm for hybrid resets, a model on clusters of observations
[reconstructed]: it reads every observation that it meets by fresh resets and keeps few of them as its states. Left out: POPLER and lower bounds.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.domains.tabular.layered import LayeredMDP, PolicyClass, random_layered, sample_episodes, sample_trees, singletons, values, visits
from anypo.domains.tabular.mdp import expected_next
from anypo.method import Paper, Study

MAPS = 1_000_000  # most deterministic processes that are searched


class Reach(NamedTuple):
    count: Tensor  # type: ignore[assignment]  # [H] or [M,H] pairs of state and action


class Capacity(NamedTuple):
    capacity: int


class TreeValues(NamedTuple):
    value: Tensor  # [P]
    queried: Tensor  # [n] distinct (node, action) that some policy uses


class ImportanceValues(NamedTuple):
    value: Tensor  # [P]
    second_moment: Tensor  # [P]


class Coverage(NamedTuple):
    concentrability: float
    coverability: float
    pushforward: float


class Psdp(NamedTuple):
    policy: Tensor  # [H,S]
    index: Tensor  # type: ignore[assignment]  # [H] the member of the class that each layer is taken from
    value: float
    best_in_class: float


class Emulation(NamedTuple):
    value: Tensor  # [P]
    states: Tensor  # [H] clusters


def reach_counts(transition: Int[Tensor, "*M H S A"], policies: PolicyClass) -> Reach:
    """How many pairs of each layer some policy reaches from state 0 when moves are deterministic; leading processes M side by side."""
    moves = transition if transition.dim() == 4 else transition[None]
    count, (states, actions) = len(moves), moves.shape[-2:]
    state = torch.zeros(count, len(policies), dtype=torch.int64)
    found = []
    for h in range(policies.shape[1]):
        pair = state * actions + policies[:, h].expand(count, -1, -1).gather(2, state[..., None])[..., 0]
        found.append(torch.zeros(count, states * actions, dtype=torch.int64).scatter(1, pair, 1).sum(1))
        if h + 1 < policies.shape[1]:
            state = moves[:, h].flatten(1).gather(1, pair)
    counts = torch.stack(found, 1)
    return Reach(counts if transition.dim() == 4 else counts[0])


def spanning_capacity(policies: PolicyClass, horizon: int, n_states: int, n_actions: int) -> Capacity:
    """Item 2: the most pairs of a layer that the class reaches in any deterministic process, by trying all of them. Raises ValueError when they are
    more than a million."""
    pairs = n_states * n_actions * (horizon - 1)
    if n_states**pairs > MAPS:
        raise ValueError(
            f"the capacity is found by trying all deterministic processes, {n_states}^{pairs} of them; use fewer layers or states"
        )
    digits = torch.arange(n_states**pairs)[:, None] // n_states ** torch.arange(pairs)[None] % n_states
    return Capacity(int(reach_counts(digits.view(len(digits), horizon - 1, n_states, n_actions), policies).count.max()))


def tree_values(
    states: Int[Tensor, "n nodes"], rewards: Float[Tensor, "n nodes A"], policies: PolicyClass, n_actions: int
) -> TreeValues:  # fmt: skip
    """Item 4: mean over trees of the rewards along the path that each policy selects; the same trees serve the whole class."""
    rows, members = torch.arange(len(states)), torch.arange(len(policies))[:, None]
    node = torch.zeros(len(policies), len(states), dtype=torch.int64)
    total, used = torch.zeros(node.shape, dtype=rewards.dtype), torch.zeros(len(states), states.shape[1] * n_actions, dtype=torch.bool)
    for h in range(policies.shape[1]):
        action = policies[members, h, states[rows, node]]
        total = total + rewards[rows, node, action]
        used[rows.expand_as(node), node * n_actions + action] = True
        node = n_actions * node + 1 + action
    return TreeValues(total.mean(1), used.sum(1))


def importance_values(
    states: Int[Tensor, "N H"], actions: Int[Tensor, "N H"], rewards: Float[Tensor, "N H"], policies: PolicyClass, n_actions: int
) -> ImportanceValues:
    """Item 5: returns of the episodes whose uniform actions agree with the policy everywhere, times A^H."""
    horizon = policies.shape[1]
    agrees = (policies[:, torch.arange(horizon)[None], states] == actions).all(-1)
    weighted = agrees * float(n_actions) ** horizon * rewards.sum(1)
    return ImportanceValues(weighted.mean(1), (weighted**2).mean(1))


def coverage(
    transition: Float[Tensor, "H S A S"], policies: PolicyClass, rho: Float[Tensor, " S"], mu: Float[Tensor, "H S A"]
) -> Coverage:  # fmt: skip
    """Item 6. Infinite where mu is 0 and something is reached."""
    most = visits(transition, policies, rho).amax(0)
    following = mu.sum(-1)[1:, None, None, :]
    return Coverage(float(_ratio(most, mu).max()), float(most.sum((1, 2)).max()), float(_ratio(transition[:-1], following).amax()))


def _ratio(wanted: Tensor, given: Tensor) -> Tensor:
    return torch.where(wanted > 0, wanted / given, torch.zeros_like(wanted))


def psdp(
    transition: Float[Tensor, "H S A S"], rewards: Float[Tensor, "H S A"], policies: PolicyClass, mu: Float[Tensor, "H S"], rho: Float[Tensor, " S"]
) -> Psdp:  # fmt: skip
    """Item 7 with exact Q: from the last layer backward, the member that is best on mu when the layers after it are settled; the first of equals."""
    following = torch.zeros_like(rho)
    layers: list[Tensor] = []
    chosen: list[int] = []
    for h in range(len(rewards) - 1, -1, -1):
        q = rewards[h] + expected_next(transition[h], following)
        worth = (mu[h] * q.gather(1, policies[:, h].T).T).sum(1)
        chosen.append(int((worth >= worth.max() - 1e-12).nonzero()[0]))
        layers.append(policies[chosen[-1], h])
        following = q.gather(1, layers[-1][:, None])[:, 0]
    best = float(values(LayeredMDP(transition, rewards, rho), policies).max())
    return Psdp(torch.stack(layers[::-1]), torch.tensor(chosen[::-1]), float(rho @ following), best)


def emulator(
    problem: LayeredMDP, policies: PolicyClass, kept: Int[Tensor, "H m"], samples: int, eps: float, generator: torch.Generator, *, cluster: bool = True
) -> Emulation:  # fmt: skip
    """Item 8's stand-in. From the last layer backward, each observation is read by `samples` resets an action: its one-step values, the mean of
    reward plus value of what follows, for all policies at once. Kept observations whose values agree within `eps` everywhere are one state, whose
    one-step values are their mean; any other observation is taken for the nearest state, where each policy does what it does at the
    observation. `cluster` False: only kept observations are states, and others are worth nothing."""
    horizon, size, actions = problem.reward.shape
    worth = torch.zeros(len(policies), size, dtype=torch.float64)  # of each observation of the layer after
    counts = []
    for h in range(horizon - 1, -1, -1):
        paid = torch.bernoulli(problem.reward[h, :, :, None].expand(-1, -1, samples), generator=generator).mean(-1)
        met = torch.multinomial(problem.transition[h].flatten(0, 1), samples, replacement=True, generator=generator)
        one_step = paid + worth[:, met].mean(-1).view(len(policies), size, actions)
        if cluster:
            first, member = _states_of(one_step, kept[h], eps)
            inside = torch.nn.functional.one_hot(member, len(first)).double()
            mean = torch.einsum("pma,mc->pca", one_step[:, kept[h]], inside / inside.sum(0))
            nearest = (one_step[:, :, None] - one_step[:, None, first]).abs().amax((0, 3)).argmin(1)
            one_step = mean[:, nearest]
            counts.append(len(first))
        else:
            one_step = torch.zeros_like(one_step).index_copy(1, kept[h], one_step[:, kept[h]])
            counts.append(len(kept[h]))
        worth = one_step.gather(2, policies[:, h, :, None])[..., 0]
    begun = torch.multinomial(problem.start, samples, replacement=True, generator=generator)
    return Emulation(worth[:, begun].mean(1), torch.tensor(counts[::-1]))


def _states_of(one_step: Float[Tensor, "P X A"], kept: Int[Tensor, " m"], eps: float) -> tuple[Tensor, Tensor]:
    """Greedy clusters: the observation that begins each, and the cluster of every kept observation [m]."""
    first: list[int] = []
    member = []
    for x in kept.tolist():
        gaps = [float((one_step[:, x] - one_step[:, f]).abs().max()) for f in first]
        near = min(range(len(gaps)), key=gaps.__getitem__, default=-1)
        if near < 0 or gaps[near] > eps:
            first.append(x)
            near = len(first) - 1
        member.append(near)
    return torch.tensor(first), torch.tensor(member)


def run(seed: int = 0, horizon: int = 6, states: int = 4, episodes: int = 300) -> dict[str, Any]:
    """A random process and the class of singletons: the largest error of either evaluation, queries a tree, coverage and PSDP with uniform data."""
    problem, policies = random_layered(seed, horizon, states), singletons(horizon, states)
    generator, exact = torch.Generator().manual_seed(seed), values(problem, policies)
    trees = tree_values(*sample_trees(problem, episodes, generator), policies, 2)
    weighted = importance_values(*sample_episodes(problem, episodes, generator), policies, 2)
    uniform = torch.full((horizon, states, 2), 1 / (2 * states), dtype=torch.float64)
    found = psdp(problem.transition, problem.reward, policies, uniform.sum(-1), problem.start)
    return {
        "importance_error": float((weighted.value - exact).abs().max()),
        "tree_error": float((trees.value - exact).abs().max()),
        "queries_per_tree": float(trees.queried.double().mean()),
        **coverage(problem.transition, policies, problem.start, uniform)._asdict(),
        "psdp": found.value,
        "best_in_class": found.best_in_class,
    }


STUDY = Study(
    name="agnostic_policy",
    paper=Paper("Agnostic Reinforcement Learning: Foundations and Algorithms", "2506.01884", 2025),
    domain="tabular",
    run=run,
    kind="theory",
    summary="the best policy of a class that need not hold an optimal one: what trees, resets, coverage and the class's structure are worth",
)
