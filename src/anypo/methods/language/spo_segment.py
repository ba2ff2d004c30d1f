"""SPO: segment policy optimization, as a chain and as a tree (arXiv:2505.23564).

Between PPO (a value for every token, from a critic) and GRPO (one value for the whole response) SPO estimates values at a few boundaries, by
rollouts from there, and gives every segment the difference of the values around it. `METHOD` is SPO-chain: boundaries before tokens that the
policy found unlikely. `TREE` is SPO-tree: segments of fixed length in a tree, where siblings are one another's rollouts and every edge is
trained. A probability mask concentrates the credit on the unlikely tokens of a segment. Equations 1-8 are those of the paper's code as the row's
specification gives them. Two methods of other papers are called SPO too: `spo_single` and `spo_simple`. Left out: replaying edges.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper, Rollout
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.seams.credit import whiten
from anypo.seams.groups import masked_mean
from anypo.seams.objective import ClippedSurrogate, clipped, token_ratio
from anypo.seams.regularize import KLPenalty
from anypo.seams.rollout import OnPolicy, as_roots, continue_rows
from anypo.seams.select import UniformPrompts
from anypo.task import Prompt

if TYPE_CHECKING:
    from anypo.run import Run

SMALLEST = 1e-12  # equation 7: an edge with a smaller advantage is no sample


class Partition(NamedTuple):
    boundary: Tensor  # [N,T+1] 0/1, column c: the state before token c
    segment: Tensor  # [N,T] number of boundaries up to each token, -1 outside the mask


def unlikely(old_logp: Float[Tensor, "N T"], mask: Tensor, threshold: float) -> Bool[Tensor, "N T"]:
    """Equation 4: the probability mask, tokens whose probability was below `threshold` (above 1: all)."""
    return mask.bool() & (old_logp < math.log(threshold))


def partition(old_logp: Float[Tensor, "N T"], mask: Tensor, threshold: float = 0.9, interval: int = 5) -> Partition:
    """Equation 1: a boundary before the first unlikely token and before every `interval`-th after it."""
    candidate = unlikely(old_logp, mask, threshold)
    kept = candidate & ((candidate.cumsum(1) - 1) % interval == 0)
    boundary = torch.cat([kept, torch.zeros_like(kept[:, :1])], dim=1).long()
    return Partition(boundary, torch.where(mask.bool(), kept.cumsum(1), -1))


def segment_differences(
    boundary: Tensor, mask: Tensor, reward: Float[Tensor, " N"], boundary_value: Float[Tensor, "N T+1"]
) -> Float[Tensor, "N T"]:
    """Equations 2-3: value at the next boundary (the reward after the last) minus the value at the one before; 0 before the first."""
    kept = boundary.bool()
    number = kept.long().cumsum(1)  # [N,T+1] boundaries up to here
    count = number[:, -1:]
    value = boundary_value.new_zeros((len(mask), kept.shape[1] + 1))  # value of the k-th boundary in column k
    value.scatter_add_(1, number, torch.where(kept, boundary_value, torch.zeros_like(boundary_value)))
    value.scatter_(1, count + 1, reward[:, None].to(value))
    difference = value[:, 1:] - value[:, :-1]
    here = number[:, :-1]
    return torch.where(mask.bool() & (here > 0), difference.gather(1, here), torch.zeros_like(boundary_value[:, :-1]))


def chain_advantages(
    old_logp: Float[Tensor, "N T"], mask: Tensor, reward: Float[Tensor, " N"], boundary_value: Float[Tensor, "N T+1"], threshold: float = 0.9,
    interval: int = 5,
) -> Float[Tensor, "N T"]:  # fmt: skip
    """Equations 1-4: the segment's difference of values on its unlikely tokens, 0 on the others. `boundary_value` counts at boundaries alone."""
    boundary = partition(old_logp, mask, threshold, interval).boundary
    return segment_differences(boundary, mask, reward, boundary_value) * unlikely(old_logp, mask, threshold)


def loss(
    logp: Float[Tensor, "N T"], old_logp: Float[Tensor, "N T"], advantages: Float[Tensor, "N T"], mask: Tensor, clip: float = 0.2,
    threshold: float = 0.9,
) -> Tensor:  # fmt: skip
    """Equation 5: mean of the clipped surrogate over the unlikely tokens (the denominator is at least 1)."""
    chosen = unlikely(old_logp, mask, threshold)
    return -masked_mean(clipped(token_ratio(logp, old_logp, chosen), advantages, 1 - clip, 1 + clip), chosen)


class Tree(NamedTuple):
    value: Tensor  # [M]
    advantage: Tensor  # [M] of the segment that leads to the node; 0 for a root
    keep: Tensor  # [M] 0/1: whether that segment is a sample


def tree(parent: Int[Tensor, " M"], leaf_reward: Float[Tensor, " M"], is_leaf: Tensor, mode: str = "rloo") -> Tree:
    """Equations 6-7 for nodes in any order (`parent` -1: a root): values from the leaves up; a child's value against its parent's, in mode "grpo"
    over the population std of the siblings. Raises ValueError for another mode."""
    if mode not in ("rloo", "grpo"):
        raise ValueError(f"the tree's mode is rloo or grpo, not '{mode}'")
    nodes, leaf, rooted = len(parent), is_leaf.bool(), parent < 0
    above = parent.clamp(min=0)
    depth, ancestor = torch.zeros_like(parent), parent
    while bool((ancestor >= 0).any()):
        depth = depth + (ancestor >= 0).long()
        ancestor = torch.where(ancestor >= 0, parent[ancestor.clamp(min=0)], -1)
    children = torch.zeros(nodes, dtype=leaf_reward.dtype).index_add(0, above, (~rooted).to(leaf_reward)).clamp(min=1)

    def mean_of_children(values: Tensor, chosen: Tensor) -> Tensor:
        return torch.zeros_like(values).index_add(0, above[chosen], values[chosen]) / children

    value = torch.where(leaf, leaf_reward, torch.zeros_like(leaf_reward))
    for level in range(int(depth.max()) if nodes else 0, 0, -1):
        value = value + torch.where(leaf, torch.zeros_like(value), mean_of_children(value, depth == level))
    difference = torch.where(rooted, torch.zeros_like(value), value - value[above])
    advantage = difference
    if mode == "grpo":
        spread = mean_of_children(difference**2, ~rooted).sqrt()
        advantage = difference / (spread[above] + 1e-8)
    return Tree(value, advantage, (advantage.abs() > SMALLEST).long())


# ---- SPO-chain


@dataclass
class BoundaryRollouts:
    """Attempts, and `rollouts` further endings from every boundary of each, drawn only to estimate the boundary's value.

    Boundaries of one prompt with the same beginning share their endings. Signals: `boundary` [N,T+1], `boundary_value` [N,T+1] (the mean task
    reward of the endings). `keep` is the probability mask, `segment` the number of boundaries passed.
    """

    threshold: float = 0.9  # probability below which a token is unlikely, > 0; above 1: every token
    interval: int = 5  # unlikely tokens from one boundary to the next, >= 1
    rollouts: int = 9  # K, endings a boundary, >= 1
    inner: Rollout = field(default_factory=OnPolicy)

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        batch = self.inner(prompts, run)
        boundary, batch.segment = partition(batch.logp, batch.mask, self.threshold, self.interval)
        batch.keep = unlikely(batch.logp, batch.mask, self.threshold)
        batch.signals["boundary"] = boundary
        batch.signals["boundary_value"] = self.values(batch, boundary, run)
        return batch

    def values(self, batch: Batch, boundary: Tensor, run: Run) -> Float[Tensor, "N T+1"]:
        """Estimated values where there is a boundary, 0 elsewhere."""
        value = torch.zeros(boundary.shape, dtype=batch.logp.dtype)
        row, depth = boundary.nonzero().unbind(1)
        if len(row) == 0:
            return value
        number: dict[tuple[int, ...], int] = {}
        beginning = zip(batch.group[row].tolist(), row.tolist(), depth.tolist(), strict=True)
        index = torch.tensor([number.setdefault((g, *batch.action[i, :d].tolist()), len(number)) for g, i, d in beginning])
        first = torch.full((len(number),), len(row)).scatter_reduce(0, index, torch.arange(len(row)), "amin")
        copies = first.repeat_interleave(self.rollouts)
        endings = continue_rows(batch, row[copies], depth[copies], run)
        endings.reward = run.score_rewards(endings)
        outcome = endings.outcome.view(-1, self.rollouts)
        run.log(boundaries=len(row) / len(batch), values_estimated=len(number))
        value[row, depth] = outcome.mean(1).to(value)[index]
        return value


@dataclass
class SegmentValues:
    """The difference of the values around a segment on its kept tokens. Needs the signals of `BoundaryRollouts`."""

    whiten: bool = False  # over the kept tokens of the batch, over all of them when none is kept

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        boundary, value = batch.signal("boundary"), batch.signal("boundary_value")
        assert batch.reward is not None
        advantage = segment_differences(boundary, batch.mask, batch.outcome.to(value), value) * batch.counted
        if not self.whiten:
            return advantage
        return whiten(advantage, batch.counted if bool(batch.counted.any()) else batch.mask)


# ---- SPO-tree


@dataclass
class SegmentTree:
    """Responses as the leaves of a tree whose nodes are segments of `segment_length` tokens; the segments behind the last branching run to the end.

    The first branching is `select.group_size`; the one below level d is `branches[d]`. A node's first child is what its own response went on
    with, so growing the tree costs no more than its segments. `segment` is the level, and `parent`, `branch_at` say who owns which segment.
    """

    branches: tuple[int, ...] = (4, 4)  # children of a node at each level below the first, each >= 1
    segment_length: int = 2  # M, tokens, >= 1
    inner: Rollout = field(default_factory=OnPolicy)

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        batch = as_roots(self.inner(prompts, run))
        for level, children in enumerate(self.branches, start=1):
            open_nodes = (batch.attended.sum(1) > level * self.segment_length).nonzero().flatten()
            if children > 1 and len(open_nodes):
                rows = open_nodes.repeat_interleave(children - 1)
                batch = Batch.concat([batch, continue_rows(batch, rows, torch.full_like(rows, level * self.segment_length), run)])
        place = torch.arange(batch.horizon).expand(batch.mask.shape)
        batch.segment = torch.where(batch.attended, (place // self.segment_length).clamp(max=len(self.branches)), -1)
        return batch


class Nodes(NamedTuple):
    """A tree of responses as nodes: the prompts first, then `levels` for every row, of which those that a row shares or lacks stay unused."""

    parent: Tensor  # [M]
    is_leaf: Tensor  # [M] bool
    leaf_row: Tensor  # [M] the row a leaf ends
    edge: Tensor  # [N,T] the node that the segment of a token leads to, -1 where another row owns it or there is no token


def nodes_of(group: Tensor, parent: Tensor, branch_at: Tensor, segment: Int[Tensor, "N T"]) -> Nodes:
    """The nodes of a batch of `SegmentTree`; branches come after the rows they grew from."""
    rows, levels = len(group), int(segment.max()) + 1
    _, root = torch.unique(group, return_inverse=True)
    roots = int(root.max()) + 1
    shared = torch.where(parent >= 0, segment.gather(1, branch_at.clamp(max=segment.shape[1] - 1)[:, None])[:, 0], 0)
    owned = torch.arange(levels)[None] >= shared[:, None]
    node = roots + torch.arange(rows * levels).view(rows, levels)
    for _ in range(levels):  # a shared segment is the parent's, or its parent's
        node = torch.where(owned, node, node[parent.clamp(min=0)])
    depth = segment.amax(1) + 1
    used = owned & (torch.arange(levels)[None] < depth[:, None])
    before = torch.cat([root[:, None], node[:, :-1]], dim=1)
    above = torch.full((roots + rows * levels,), -1)
    above[node[used]] = before[used]
    leaf = used & (torch.arange(levels)[None] == depth[:, None] - 1)
    is_leaf = torch.zeros_like(above, dtype=torch.bool)
    is_leaf[node[leaf]] = True
    leaf_row = torch.zeros_like(above)
    leaf_row[node[leaf]] = torch.arange(rows)[:, None].expand(-1, levels)[leaf]
    own = (segment >= 0) & (segment >= shared[:, None])
    return Nodes(above, is_leaf, leaf_row, torch.where(own, node.gather(1, segment.clamp(min=0)), -1))


@dataclass
class EdgeAdvantages:
    """Every segment of the tree against its siblings, once, on the tokens that are kept: the unlikely ones of segments with an advantage."""

    mode: str = "rloo"  # rloo: difference of values; grpo: over the siblings' standard deviation
    threshold: float = 0.9  # of the probability mask, > 0; above 1: every token

    compares_group = True

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        assert batch.reward is not None and batch.segment is not None and batch.parent is not None and batch.branch_at is not None
        nodes = nodes_of(batch.group, batch.parent, batch.branch_at, batch.segment)
        found = tree(nodes.parent, batch.outcome[nodes.leaf_row], nodes.is_leaf, self.mode)
        own = (nodes.edge >= 0) & batch.mask
        edge = nodes.edge.clamp(min=0)
        batch.keep = own & found.keep.bool()[edge] & unlikely(batch.logp, batch.mask, self.threshold)
        run.log(edges_kept=float(found.keep.sum()) / max(int((nodes.parent >= 0).sum()), 1))
        return torch.where(batch.keep, found.advantage[edge], torch.zeros_like(found.advantage[edge]))


METHOD = GRPO.but(
    name="spo_segment",
    paper=Paper(
        "Segment Policy Optimization: Effective Segment-Level Credit Assignment in RL for Large Language Models", "2505.23564", 2025
    ),
    summary="values at the boundaries of segments, estimated by rollouts; each segment gets the difference around it, on its unlikely tokens",
    select=UniformPrompts(group_size=8),
    rollout=BoundaryRollouts(),
    credit=SegmentValues(),
    objective=ClippedSurrogate(clip_low=0.2, clip_high=0.2, aggregation="token_mean"),
    regularize=(KLPenalty(beta=1e-4, aggregation="token_mean"),),
)
TREE = METHOD.but(
    name="spo_segment.tree", summary="segments of fixed length in a tree, whose siblings are one another's rollouts",
    select=UniformPrompts(group_size=4), rollout=SegmentTree(), credit=EdgeAdvantages(),
)  # fmt: skip
VARIANTS = {"tree": TREE}
