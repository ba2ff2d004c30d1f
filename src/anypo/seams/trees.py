"""Trees of attempts whose nodes are steps: their structure, what their leaves earned, and how new branches join them.

The attempts at a prompt are one tree. Rows that share steps share the numbers in the signal `node` [N,T], which is unique in the batch and -1 where
nothing exists. Left out: how nodes are chosen and what they are worth, which is each method's business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.seams.rollout import as_roots, continue_rows, step_starts, steps_of
from anypo.seams.steps import sum_by_step

if TYPE_CHECKING:
    from anypo.run import Run

PerNode = Float[Tensor, " M"]
Nodes = Int[Tensor, " M"]


def ancestry(parent: Nodes) -> tuple[Nodes, Nodes]:
    """The root of every node and its depth (0 for roots, whose parent is -1)."""
    root, depth = torch.arange(len(parent)), torch.zeros_like(parent)
    while True:
        above = parent[root]
        inner = above >= 0
        if not inner.any():
            return root, depth
        root, depth = torch.where(inner, above, root), depth + inner


def best_inner(score: PerNode, parent: Nodes, is_leaf: Tensor, count: int) -> Tensor:
    """[trees * count]: the `count` nodes of every tree that score highest and are no leaves, tree by tree, the earlier of equals first; from the top
    again where there are fewer."""
    root, _ = ancestry(parent)
    candidates = (~is_leaf.bool()).nonzero().flatten()
    order = candidates[score[candidates].argsort(descending=True, stable=True)]
    order = order[root[order].argsort(stable=True)]
    _, counts = torch.unique(root[order], return_counts=True)
    place = torch.arange(count) % counts[:, None]
    return order[(counts.cumsum(0) - counts)[:, None] + place].flatten()


class Forest(NamedTuple):
    """The trees of a batch, one a group. Nodes are numbered roots first, then in the order of their signal `node`."""

    parent: Tensor  # [M] -1 for roots
    entropy: Tensor  # [M] minus the mean log-prob of the node's written actions, 0 for roots
    is_leaf: Tensor  # [M] bool
    leaf: Tensor  # [N] the node in which each row ends, -1 for a row without actions
    node: Tensor  # [N,T] owner of each action, -1 where there is none
    row: Tensor  # [M] a row that runs through the node
    depth: Tensor  # [M] its number of actions before the node's step


def forest(node: Int[Tensor, "N T"], logp: Float[Tensor, "N T"], mask: Tensor, group: Int[Tensor, " N"]) -> Forest:
    """Trees from the rows' paths: rows that share steps share the numbers in `node` (-1 outside). Pruned steps leave no trace."""
    groups, root_of = torch.unique(group, return_inverse=True)
    present, found = torch.unique(node[node >= 0], return_inverse=True)
    count, roots, width = len(groups) + len(present), len(groups), max(node.shape[1], 1)
    own = torch.full_like(node, -1)
    own[node >= 0] = found + roots
    row, place = step_starts(own).nonzero(as_tuple=True)
    here = own[row, place]
    first = torch.ones_like(row, dtype=torch.bool)
    first[1:] = row[1:] != row[:-1]
    parent = torch.full((count,), -1).index_copy(0, here, torch.where(first, root_of[row], here.roll(1)))
    last = torch.ones_like(first)
    last[:-1] = first[1:]
    leaf = torch.full_like(group, -1).index_copy(0, row[last], here[last])
    where = torch.full((count,), node.numel()).scatter_reduce(0, here, row * width + place, "amin")
    where[:roots] = torch.full((roots,), node.numel()).scatter_reduce(0, root_of, torch.arange(len(node)) * width, "amin")
    entropy = -step_logp(own, logp, mask, count)
    is_leaf = torch.zeros(count, dtype=torch.bool).index_fill(0, leaf[leaf >= 0], True)
    return Forest(parent, entropy, is_leaf, leaf, own, where // width, where % width)


def step_logp(node: Int[Tensor, "N T"], logp: Float[Tensor, "N T"], mask: Tensor, count: int, how: str = "mean") -> PerNode:
    """Mean (or "sum") over the written actions of each of `count` nodes; 0 for one without any, such as a root. The sum is that of one row: what rows
    share counts once. Raises ValueError for another `how`."""
    if how not in ("mean", "sum"):
        raise ValueError(f"a step's log-prob is the mean or the sum of its actions', not '{how}'")
    written = mask.bool() & (node >= 0)
    index = torch.where(written, node, -1)
    total, size = sum_by_step(logp, index, count), sum_by_step(written.to(logp), index, count)
    if how == "mean":
        return total / size.clamp(min=1)
    rows = sum_by_step(step_starts(node).to(logp), node, count)
    return total / rows.clamp(min=1)


def at_leaves(trees: Forest, values: Float[Tensor, " N"]) -> PerNode:
    """Each row's number at the node in which it ends, the mean where several end; 0 elsewhere."""
    ends = trees.leaf >= 0
    empty = values.new_zeros(len(trees.parent))
    total, rows = (empty.index_add(0, trees.leaf[ends], x[ends]) for x in (values, torch.ones_like(values)))
    return total / rows.clamp(min=1)


def fresh_nodes(steps: Int[Tensor, "N T"], first: int = 0) -> Int[Tensor, "N T"]:
    """A number from `first` on for every step of every row, -1 where there is none."""
    width = int(steps.max()) + 1 if steps.numel() else 1
    return torch.where(steps >= 0, first + torch.arange(len(steps))[:, None] * width + steps, -1)


def as_chains(batch: Batch, run: Run, step_size: int = 1) -> Batch:
    """Independent attempts as trees without a branch: marked as roots, with the signal `node` (steps as in `steps_of`)."""
    batch = as_roots(batch)
    batch.signals["node"] = fresh_nodes(steps_of(batch, run, step_size))
    return batch


def branched(batch: Batch, rows: Tensor, depth: Tensor, run: Run, step_size: int = 1) -> Batch:
    """The batch and after it new endings of rows `rows` [M] after their first `depth` [M] actions, whose nodes they share; the rest of each is a
    branch of new nodes. Branches are scored where the batch is."""
    node = torch.where(batch.attended, batch.signals["node"], -1)
    branches = continue_rows(batch, rows, depth, run)
    if "task_reward" in batch.signals:
        run.score_rewards(branches)
    branches.signals["node"] = torch.full(branches.mask.shape, -1)
    joined = Batch.concat([batch, branches])
    steps, new = steps_of(joined, run, step_size)[len(batch) :], slice(len(batch), None)
    shared = torch.arange(joined.horizon) < depth[:, None]
    joined.signals["node"][new] = torch.where(shared, joined.signals["node"][rows], fresh_nodes(steps, int(node.max()) + 1))
    return joined
