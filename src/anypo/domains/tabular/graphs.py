"""Planning on directed graphs: paths from a start to a target, exact success and diversity of a policy, Blocksworld as a graph.

n nodes. A policy is a table [...,T,n,n]: by target, current node and next node, T = n targets. A path ends at its target, at a move that is no edge,
or after LONGEST moves. Leading dimensions are independent graphs. Left out: costs of edges.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

LONGEST = 12  # moves
Adjacency = Bool[Tensor, "... n n"]  # [cur,nxt]


class Problems(NamedTuple):
    adjacency: Tensor  # [B,n,n] bool
    train: Tensor  # [B,n,n] bool: [start,target] pairs with demonstrations
    test: Tensor  # [B,n,n] bool: the other reachable pairs
    demos: Tensor  # [B,n,n,n] how often the demonstrations move, by target, current and next node


def reachable(adjacency: Adjacency) -> Bool[Tensor, "... n n"]:
    """[s,t]: whether a path of at least one edge leads from s to t."""
    found = adjacency.double()
    for _ in range(max(adjacency.shape[-1] - 1, 1).bit_length()):
        found = (found + found @ found).clamp(max=1)
    return found > 0


def correct_moves(adjacency: Adjacency) -> Bool[Tensor, "... T n n"]:
    """[t,cur,nxt]: edges to the target or to a node from which it can be reached."""
    size = adjacency.shape[-1]
    on_the_way = reachable(adjacency) | torch.eye(size, dtype=torch.bool)
    return adjacency[..., None, :, :] & on_the_way.mT[..., :, None, :]


def success(policy: Float[Tensor, "... T n n"], adjacency: Adjacency) -> Float[Tensor, "... n T"]:
    """[start,target]: exact probability that a sampled path is valid and reaches the target."""
    moves = policy * adjacency[..., None, :, :]
    at_target = torch.eye(policy.shape[-1]).to(policy)
    reached = torch.zeros_like(moves[..., 0])  # [...,T,n]
    for _ in range(LONGEST):
        onward = torch.where(at_target.bool(), at_target, reached)
        reached = (moves @ onward[..., None])[..., 0]
    return reached.mT


def diversity(policy: Float[Tensor, "... T n n"], adjacency: Adjacency, pairs: Bool[Tensor, "... n T"]) -> Float[Tensor, ...]:
    """Entropy of the policy restricted to correct moves, in units of its maximum; mean over the pairs (node, target) with a choice."""
    correct = correct_moves(adjacency)
    choices = correct.sum(-1)
    inside = torch.where(correct, policy, torch.zeros_like(policy))
    inside = inside / inside.sum(-1, keepdim=True).clamp(min=1e-300)
    share = -torch.xlogy(inside, inside).sum(-1) / choices.clamp(min=2).log()
    counted = (choices > 1) & pairs.mT
    return (share * counted).sum((-2, -1)) / counted.sum((-2, -1))


def random_dag(nodes: int, chance: float, rng: np.random.Generator, chain: bool = False) -> Bool[Tensor, "n n"]:
    """Every edge i -> j with i < j is there with this chance; with `chain`, i -> i + 1 always."""
    return torch.tensor(np.triu(rng.random((nodes, nodes)) < chance, 1) | (chain & np.eye(nodes, k=1, dtype=bool)))


def random_path(correct: Bool[Tensor, "n n"], start: int, target: int, rng: np.random.Generator) -> list[int]:
    """Nodes of a path to the target, each move uniform over the `correct` ones. The graph has no cycles."""
    path = [start]
    while path[-1] != target:
        path.append(int(rng.choice(np.flatnonzero(correct[path[-1]].numpy()))))
    return path


def planning_problems(
    seeds: Iterable[int], nodes: int = 12, chance: float = 0.35, share: float = 1 / 3, demos: int = 2, chain: bool = False,
    demos_of_test: bool = False,
) -> Problems:  # fmt: skip
    """Random graphs, one a seed; `share` of the reachable pairs are for training, with `demos` random valid paths each (the other pairs have
    some only with `demos_of_test`)."""
    built = []
    for seed in seeds:
        rng = np.random.default_rng(seed)
        adjacency = random_dag(nodes, chance, rng, chain)
        correct, pairs = correct_moves(adjacency), reachable(adjacency).nonzero()
        chosen = torch.tensor(rng.permutation(len(pairs)) < round(share * len(pairs)))
        train, test = torch.zeros(2, nodes, nodes, dtype=torch.bool)
        train[tuple(pairs[chosen].T)] = True
        test[tuple(pairs[~chosen].T)] = True
        counts = torch.zeros(nodes, nodes, nodes, dtype=torch.float64)
        for start, target in (pairs if demos_of_test else pairs[chosen]).tolist():
            for _ in range(demos):
                path = random_path(correct[target], start, target, rng)
                for here, there in zip(path, path[1:], strict=False):
                    counts[target, here, there] += 1
        built.append((adjacency, train, test, counts))
    return Problems(*(torch.stack(tables) for tables in zip(*built, strict=True)))


State = tuple[tuple[int, ...], ...]  # towers, each from bottom to top, sorted


def _moves(state: State) -> set[State]:
    """States that one block's move leads to."""
    found = set()
    for i, tower in enumerate(state):
        rest = [*state[:i], *state[i + 1 :], *([tower[:-1]] if len(tower) > 1 else [])]
        if len(tower) > 1:
            found.add(tuple(sorted([*rest, tower[-1:]])))
        for j, other in enumerate(rest):
            if other != tower[:-1]:
                found.add(tuple(sorted([*rest[:j], *rest[j + 1 :], (*other, tower[-1])])))
    return found


def blocks_graph(blocks: int) -> tuple[list[State], Adjacency]:
    """All arrangements of `blocks` >= 1 numbered blocks in towers, and which ones are a move apart. Moves are reversible."""
    if blocks < 1:
        raise ValueError(f"Blocksworld needs at least one block, not {blocks}")
    start: State = tuple((b,) for b in range(blocks))
    states, waiting = {start: 0}, [start]
    edges = []
    while waiting:
        here = waiting.pop()
        for there in _moves(here):
            if there not in states:
                states[there] = len(states)
                waiting.append(there)
            edges.append((states[here], states[there]))
    adjacency = torch.zeros(len(states), len(states), dtype=torch.bool)
    if edges:
        adjacency[tuple(torch.tensor(edges).T)] = True
    return list(states), adjacency


def distances(adjacency: Adjacency) -> Float[Tensor, "... n n"]:
    """[s,t]: fewest edges from s to t; 0 from a node to itself, infinite where there is no path."""
    size = adjacency.shape[-1]
    here = torch.eye(size, dtype=torch.bool).expand(adjacency.shape)
    found = torch.where(here, 0.0, torch.inf)
    for k in range(1, size):
        here = here | ((here.double() @ adjacency.double()) > 0)
        found = torch.where(here & found.isinf(), float(k), found)
    return found
