"""AT2PO: agentic turn-based policy optimization via tree search.

GRPO for agents rolls out independent chains, copies one outcome to every token and clips token ratios. AT2PO makes the turn the unit of all three.
The attempts at a prompt form one tree whose nodes are turns; new branches draw again the turns at which the policy was least certain. Leaf rewards,
normalized inside the tree, are backed up to every turn by an average over its children that weighs uncertain ones more, so each turn has an
advantage of its own. The objective (ATPO) has one ratio a turn and needs no tree. Equations 1-8 are those of the authors' code as the row's
specification gives them. Left out: copies of the last leaf where a tree has fewer leaves than wanted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper, Rollout
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.policy import Loss, Signals
from anypo.seams.groups import group_max, group_sum, standardize
from anypo.seams.objective import clipped, log_ratio, ratio_metrics
from anypo.seams.reward import row_reward
from anypo.seams.rollout import OnPolicy, pruned, step_starts, steps_of
from anypo.seams.select import UniformPrompts
from anypo.seams.steps import sum_by_step
from anypo.seams.trees import Forest, Nodes, PerNode, ancestry, as_chains, at_leaves, best_inner, branched, forest, fresh_nodes
from anypo.task import Prompt

if TYPE_CHECKING:
    from anypo.run import Run

MODES = ("child_softmax", "child_mean", "leaf_mean")
FORMS = ("node_value", "over_parent", "over_root", "over_both")
PENALTY = 0.05  # of a node's score for every sibling
LIMIT = 10.0  # largest log-ratio of a turn


class Expansion(NamedTuple):
    score: Tensor  # [M]
    chosen: Tensor  # [trees * beam] nodes, tree by tree, the best first


class TurnLoss(NamedTuple):
    ratio: Tensor  # [N,T], 0 outside the mask
    loss: Tensor  # scalar, differentiable in logp


def expansion(parent: Nodes, node_entropy: PerNode, is_leaf: Tensor, beam: int) -> Expansion:
    """Equation 2: uncertainty minus a penalty for siblings (for a root: for its children beyond the first), and the `beam` best nodes of every
    tree that are no leaves, the earlier of equals first; from the top again where there are fewer."""
    children = torch.zeros_like(parent).index_add(0, parent[parent >= 0], torch.ones_like(parent[parent >= 0]))
    score = node_entropy - PENALTY * (children[torch.where(parent >= 0, parent, torch.arange(len(parent)))] - 1).clamp(min=0)
    return Expansion(score, best_inner(score, parent, is_leaf, beam))


def node_values(
    parent: Nodes, node_entropy: PerNode, leaf_reward: PerNode, is_leaf: Tensor, mode: str = "child_softmax", eps: float = 1e-6
) -> PerNode:
    """Equations 3-4: leaf rewards normalized in their tree (population std), averaged from children to parents. Children are weighted by the softmax
    of their uncertainty, alike, or by their number of leaves; those without a leaf below them not at all. Raises ValueError for another mode."""
    if mode not in MODES:
        raise ValueError(f"unknown backup '{mode}'; use one of {', '.join(MODES)}")
    (root, depth), leaf = ancestry(parent), is_leaf.bool()
    value = torch.zeros_like(leaf_reward)
    value[leaf] = standardize(leaf_reward[leaf], root[leaf], 0, eps)
    leaves = leaf.to(value)
    levels = [(depth == d).nonzero().flatten() for d in range(int(depth.max()), 0, -1)]
    for level in levels:
        leaves = leaves.index_add(0, parent[level], leaves[level])
    uncertainty = node_entropy if mode == "child_softmax" else torch.zeros_like(node_entropy)
    alive = torch.where(leaves > 0, uncertainty, -torch.inf)
    weight = (alive - group_max(alive, parent).nan_to_num(neginf=0.0)).exp() * (leaves if mode == "leaf_mean" else 1)
    weight = weight / group_sum(weight, parent).clamp(min=torch.finfo(value.dtype).tiny)
    for level in levels:
        share = torch.where(leaf[parent[level]], 0.0, weight[level] * value[level])
        value = value.index_add(0, parent[level], share)
    return value


def turn_advantages(value: PerNode, parent: Nodes, form: str = "node_value") -> PerNode:
    """Equation 5: the value itself, or how far it is above the parent's, the root's, or both added (roots keep their value).

    Raises ValueError for another form.
    """
    if form not in FORMS:
        raise ValueError(f"unknown form '{form}' of a turn's advantage; use one of {', '.join(FORMS)}")
    if form == "node_value":
        return value
    over_parent, over_root = value - value[parent], value - value[ancestry(parent)[0]]
    found = {"over_parent": over_parent, "over_root": over_root, "over_both": over_parent + over_root}[form]
    return torch.where(parent >= 0, found, value)


def advantages(
    parent: Nodes, node_entropy: PerNode, leaf_reward: PerNode, is_leaf: Tensor, node: Int[Tensor, "N T"], mask: Tensor,
    mode: str = "child_softmax", form: str = "node_value", eps: float = 1e-6,
) -> Float[Tensor, "N T"]:  # fmt: skip
    """Equation 6: every action the policy wrote has the advantage of its turn (`node`, -1 outside)."""
    value = turn_advantages(node_values(parent, node_entropy, leaf_reward, is_leaf, mode, eps), parent, form)
    return torch.where(mask.bool() & (node >= 0), value[node.clamp(min=0)], value.new_zeros(()))


def turns_of(mask: Tensor, segment: Int[Tensor, "N T"] | None) -> tuple[Int[Tensor, "N T"], int]:
    """Which turn every action belongs to, numbered over the whole batch, -1 outside the mask, and how many there are: the row's segments, or
    without them maximal runs of the mask."""
    inside = mask.bool()
    if segment is None:
        segment = step_starts(torch.where(inside, 0, -1)).cumsum(1)
    row, place = inside.nonzero(as_tuple=True)
    pairs, number = torch.unique(torch.stack([row, segment[row, place]], dim=1), dim=0, return_inverse=True)
    turn = torch.full(inside.shape, -1)
    turn[row, place] = number
    return turn, len(pairs)


def turn_log_ratio(logp: Float[Tensor, "N T"], old_logp: Float[Tensor, "N T"], turn: Int[Tensor, "N T"], count: int) -> Float[Tensor, " K"]:
    """Equation 7, first half: mean log-ratio over the tokens of each turn."""
    inside = turn >= 0
    return sum_by_step(log_ratio(logp, old_logp, inside), turn, count) / sum_by_step(inside.to(logp), turn, count).clamp(min=1)


def loss(
    logp: Float[Tensor, "N T"], old_logp: Float[Tensor, "N T"], advantage: Float[Tensor, "N T"], mask: Tensor,
    segment: Int[Tensor, "N T"] | None = None, clip_low: float = 3e-3, clip_high: float = 4e-3,
) -> TurnLoss:  # fmt: skip
    """Equations 7-8: every token has its turn's ratio and its own gradient; mean over all rows of the token mean (a row without tokens adds 0)."""
    inside = mask.bool()
    turn, count = turns_of(mask, segment)
    mean = turn_log_ratio(logp, old_logp, turn, count).detach()
    of_token = torch.where(inside, mean[turn.clamp(min=0)], 0.0) if count else torch.zeros_like(logp)
    ratio = (of_token + log_ratio(logp, logp.detach(), mask)).clamp(max=LIMIT).exp()
    value = clipped(ratio, torch.where(inside, advantage, 0.0), 1 - clip_low, 1 + clip_high)
    by_row = torch.where(inside, value, 0.0).sum(1) / inside.sum(1).clamp(min=1)
    return TurnLoss(torch.where(inside, ratio, 0.0), -by_row.mean())


@dataclass
class UncertainTurns:
    """The attempts at a prompt are one tree; in each round its most uncertain turns are drawn again and played on to the end.

    A turn is an interaction step (see `steps_of`). The number of first chains is `select.group_size`. Signal: `node` [N,T], equal for shared
    turns and unique in the batch. Rows without a `segment` get their turns as one.
    """

    beam: int = 6  # turns of a tree drawn again in a round, >= 1
    rounds: int = 2  # >= 0
    leaves: int | None = 22  # kept at random of each tree's group_size + rounds * beam leaves, >= 1; None = all
    step_size: int = 1  # actions a turn, >= 1, where neither the task nor line breaks divide an attempt
    inner: Rollout = field(default_factory=OnPolicy)

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        batch = as_chains(self.inner(prompts, run), run, self.step_size)
        for _ in range(self.rounds):
            batch = self.grown(batch, run)
        batch.signals["node"] = torch.where(batch.attended, batch.signals["node"], -1)
        batch = pruned(batch, batch.group, self.leaves, run)
        if batch.segment is None:
            node = batch.signals["node"]
            batch.segment = torch.where(node >= 0, step_starts(node).cumsum(1) - 1, -1)
        return batch

    def grown(self, batch: Batch, run: Run) -> Batch:
        """The batch with `beam` new branches of every tree."""
        node = torch.where(batch.attended, batch.signals["node"], -1)
        trees = forest(node, batch.logp, batch.mask, batch.group)
        chosen = self.choose(trees, run)
        return branched(batch, trees.row[chosen], trees.depth[chosen], run, self.step_size)

    def choose(self, trees: Forest, run: Run) -> Tensor:
        """Equation 2: [trees * beam] nodes."""
        return expansion(trees.parent, trees.entropy, trees.is_leaf, self.beam).chosen


@dataclass
class TurnValue:
    """Every turn's own advantage from the leaves below it. Rows without the signal `node` are chains, whose turns all share the row's outcome."""

    mode: str = "child_softmax"  # child_softmax, child_mean or leaf_mean: weights of a turn's children
    form: str = "node_value"  # node_value, over_parent, over_root or over_both
    eps: float = 1e-6  # > 0, added to the standard deviation
    weights: tuple[float, ...] | None = None  # of the K rewards before they are compared; None = all 1

    compares_group = True

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        reward = row_reward(batch, self.weights)
        node = batch.signals.get("node")
        trees = forest(fresh_nodes(steps_of(batch, run)) if node is None else node, batch.logp, batch.mask, batch.group)
        leaf_reward = at_leaves(trees, reward)
        return advantages(
            trees.parent, trees.entropy.to(reward), leaf_reward, trees.is_leaf, trees.node, batch.mask, self.mode, self.form, self.eps
        )


@dataclass
class TurnClip:
    """ATPO: clipped surrogate with one ratio a turn and per-token advantages. Turns are the batch's `segment`, else maximal runs of `mask`."""

    clip_low: float = 3e-3  # the ratio may fall to 1 - clip_low; small, since a turn's ratio is an average
    clip_high: float = 4e-3  # and rise to 1 + clip_high

    needs = frozenset({"logp"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        mask = batch.counted
        found = loss(new.logp, batch.logp, batch.advantage, mask, batch.segment, self.clip_low, self.clip_high)
        return Loss(found.loss, ratio_metrics(found.ratio, 1 - self.clip_low, 1 + self.clip_high, mask))


METHOD = GRPO.but(
    name="at2po",
    paper=Paper("AT2PO: Agentic Turn-based Policy Optimization via Tree Search", "2601.04767", 2026),
    summary="uncertain turns are drawn again as branches of one tree; every turn has an advantage and a ratio of its own",
    select=UniformPrompts(group_size=10),
    rollout=UncertainTurns(),
    credit=TurnValue(),
    objective=TurnClip(),
    regularize=(),
)
