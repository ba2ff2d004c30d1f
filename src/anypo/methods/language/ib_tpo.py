"""IB-TPO: information-bottleneck tree policy optimization (arXiv:2605.28109).

GRPO's independent chains let exploration and exploitation drift apart. IB-TPO scores every reasoning step by an information bottleneck: how varied the
next steps are against what they say about the right answer, estimated from a tree of attempts. The tree grows where the score is highest, which buys
more attempts for the same tokens, and the score of a step enters its advantage as a local term next to a global one. Against GRPO it changes the
rollout and the credit. Equations 1-8 from a detailed note on the paper as the row's specification gives them; the smoothing of ratios and the population
std are [reconstructed], a step's probability as the geometric mean of its tokens' is [ours]. The sampling temperature is left to the task.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper, Rollout
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.seams.groups import group_mean, group_std
from anypo.seams.regularize import KLPenalty
from anypo.seams.reward import row_reward
from anypo.seams.rollout import OnPolicy, steps_of
from anypo.seams.select import UniformPrompts
from anypo.seams.trees import Forest, Nodes, PerNode, ancestry, as_chains, at_leaves, best_inner, branched, forest, fresh_nodes, step_logp
from anypo.task import Prompt

if TYPE_CHECKING:
    from anypo.run import Run

EPS = 1e-6


class Score(NamedTuple):
    eta1: Tensor  # [M] information gain of a step, 0 for roots
    score: Tensor  # [M] of inner nodes, 0 for leaves


def success(parent: Nodes, is_leaf: Tensor, leaf_reward: PerNode) -> PerNode:
    """Equation 2: mean reward of the leaves below each node, a leaf's own; 0 where there is none. Parents of roots are -1."""
    at = is_leaf.bool().nonzero().flatten()
    earned = leaf_reward[at]
    total, count = torch.zeros_like(leaf_reward), torch.zeros_like(leaf_reward)
    while len(at):
        total.index_add_(0, at, earned)
        count.index_add_(0, at, torch.ones_like(earned))
        inner = parent[at] >= 0
        at, earned = parent[at][inner], earned[inner]
    return total / count.clamp(min=1)


def information_gain(parent: Nodes, chance: PerNode, beta: float) -> PerNode:
    """Equation 3: how much likelier a step makes success than its parent does, minus 1 + 1/beta; 0 for roots."""
    gain = (chance + EPS) / (chance[parent.clamp(min=0)] + EPS) - (1 + 1 / beta)
    return torch.where(parent >= 0, gain, torch.zeros_like(gain))


def ib_score(parent: Nodes, is_leaf: Tensor, leaf_reward: PerNode, logp: PerNode, beta: float = 5.0) -> Score:
    """Equations 2-4: an inner node's (1 + beta) times the mean over its children of information gain times confidence exp(logp)."""
    eta1, child = information_gain(parent, success(parent, is_leaf, leaf_reward), beta), parent >= 0
    count = torch.zeros_like(eta1).index_add(0, parent[child], torch.ones_like(eta1[child]))
    total = torch.zeros_like(eta1).index_add(0, parent[child], (eta1 * logp.exp())[child])
    return Score(eta1, (1 + beta) * total / count.clamp(min=1))


def select(parent: Nodes, is_leaf: Tensor, leaf_reward: PerNode, logp: PerNode, beta: float = 5.0, K: int = 1) -> Tensor:
    """Equation 5: the K inner nodes of every tree with the highest score, ties to the smaller number; see `best_inner`."""
    return best_inner(ib_score(parent, is_leaf, leaf_reward, logp, beta).score, parent, is_leaf, K)


def budget(B0: int, L: int, K: int, B: int) -> int:
    """Attempts at a prompt."""
    return B0 + (L - 1) * K * B


def step_advantage(parent: Nodes, is_leaf: Tensor, leaf_reward: PerNode, ref_logp: PerNode, beta: float = 5.0, lam: float = 0.1) -> PerNode:
    """Equations 6-8: success above the root's over the std of the tree's leaves (0 without spread), plus lam times the information gain weighted by
    the reference's probability of the step; 0 for roots."""
    chance, (root, _), leaf = success(parent, is_leaf, leaf_reward), ancestry(parent), is_leaf.bool()
    spread = torch.zeros_like(chance).index_copy(0, root[leaf], group_std(leaf_reward[leaf], root[leaf]))[root]
    overall = torch.where(spread > 0, (chance - chance[root]) / (spread + EPS), torch.zeros_like(chance))
    return overall + lam * information_gain(parent, chance, beta) * ref_logp.exp()


def balance(parent: Nodes, eta1: PerNode, eta2: PerNode) -> Float[Tensor, " J"]:
    """Covariance of information gain and confidence over the children of every node that has at least two."""
    child = parent >= 0
    _, family, size = torch.unique(parent[child], return_inverse=True, return_counts=True)
    gain, confidence = (x[child] - group_mean(x[child], family) for x in (eta1, eta2))
    return (torch.zeros_like(size, dtype=eta1.dtype).index_add(0, family, gain * confidence) / size)[size > 1]


def probabilities_only(reward: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """The rewards; raises ValueError for negative ones, whose ratios mean nothing."""
    if bool((reward < 0).any()):
        raise ValueError("ib_tpo compares chances of success and needs rewards of at least 0; take a 0/1 reward, or shift it")
    return reward


@dataclass
class IBTree:
    """The attempts at a prompt are one tree: `select.group_size` chains, then rounds of new branches from the inner nodes of highest score.

    Nodes are steps (see `steps_of`). Signal: `node` [N,T], equal for shared steps and unique in the batch.
    """

    rounds: int = 9  # L, that of the first chains included, >= 1
    nodes: int = 1  # K, branched in a round, >= 1
    branches: int = 1  # B, of each of them, >= 1
    beta: float = 5.0  # > 0, weight of information about the answer
    probability: str = "mean"  # of a step: of its tokens' log-probs the mean or the sum
    step_size: int = 1  # actions a step, >= 1, where neither the task nor line breaks divide an attempt
    inner: Rollout = field(default_factory=OnPolicy)

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        if min(self.rounds, self.nodes, self.branches) < 1 or self.beta <= 0:
            raise ValueError("the rounds, nodes and branches of an ib_tpo tree must be at least 1, and beta above 0")
        batch = as_chains(self.inner(prompts, run), run, self.step_size)
        for _ in range(self.rounds - 1):
            batch = self.grown(batch, run)
        batch.signals["node"] = torch.where(batch.attended, batch.signals["node"], -1)
        return batch

    def grown(self, batch: Batch, run: Run) -> Batch:
        """The batch with `nodes` times `branches` new branches of every tree."""
        reward = probabilities_only(batch.but(reward=run.score_rewards(batch)).outcome)
        trees = forest(torch.where(batch.attended, batch.signals["node"], -1), batch.logp, batch.mask, batch.group)
        chosen = self.choose(trees, reward, batch, run).repeat_interleave(self.branches)
        child = (trees.parent >= 0).nonzero().flatten()
        row = trees.row.index_copy(
            0, trees.parent[child], trees.row[child]
        )  # through any child: they begin where the node's step has ended
        depth = torch.zeros_like(row).index_copy(0, trees.parent[child], trees.depth[child])
        return branched(batch, row[chosen], depth[chosen], run, self.step_size)

    def choose(self, trees: Forest, reward: Float[Tensor, " N"], batch: Batch, run: Run) -> Tensor:
        """Equation 5: [trees * nodes] inner nodes."""
        logp = step_logp(trees.node, batch.logp, batch.mask, len(trees.parent), self.probability)
        return select(trees.parent, trees.is_leaf, at_leaves(trees, reward), logp.to(reward), self.beta, self.nodes)


@dataclass
class IBCredit:
    """Every step's success above the tree's, plus its information gain. Rows without the signal `node` are chains."""

    beta: float = 5.0  # > 0, as in the rollout
    lam: float = 0.1  # >= 0, weight of the local term; 0.5 collapses
    probability: str = "mean"  # of a step: of its tokens' log-probs the mean or the sum
    dedupe: bool = False  # count a shared token once, in the row it was written for
    weights: tuple[float, ...] | None = None  # of the K rewards before they are compared; None = all 1

    compares_group = True

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"ref_logp"}) if self.lam else frozenset()

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        reward = row_reward(batch, self.weights)
        node = batch.signals.get("node")
        trees = forest(fresh_nodes(steps_of(batch, run)) if node is None else node, batch.logp, batch.mask, batch.group)
        earned, count = at_leaves(trees, probabilities_only(reward)), len(trees.parent)
        logp, ref_logp = (
            step_logp(trees.node, x, batch.mask, count, self.probability).to(reward)
            for x in (batch.logp, batch.signal("ref_logp") if self.lam else torch.zeros_like(batch.logp))
        )
        value = step_advantage(trees.parent, trees.is_leaf, earned, ref_logp, self.beta, self.lam)
        found = balance(trees.parent, ib_score(trees.parent, trees.is_leaf, earned, logp, self.beta).eta1, logp.exp())
        run.log(ib_balance=float(found.mean()) if len(found) else 0.0)
        if self.dedupe and batch.parent is not None and batch.branch_at is not None:
            copied = torch.where(batch.parent >= 0, batch.branch_at, 0)
            batch.keep = batch.counted & (torch.arange(batch.horizon) >= copied[:, None])
        return torch.where(batch.mask & (trees.node >= 0), value[trees.node.clamp(min=0)], value.new_zeros(()))


METHOD = GRPO.but(
    name="ib_tpo",
    paper=Paper("Long Live The Balance: Information Bottleneck Driven Tree-based Policy Optimization", "2605.28109", 2026),
    summary="trees grow at the steps with the best information-bottleneck score; the step's score joins its advantage",
    select=UniformPrompts(group_size=4),
    rollout=IBTree(),
    credit=IBCredit(),
    regularize=(KLPenalty(beta=0.001),),
)
