"""Tree-GRPO: tree-based group relative policy optimization for agents (arXiv:2509.21240).

GRPO for agents of several turns rolls out every attempt by itself. Here each prompt grows M trees: new attempts start from a node of an earlier
one, and a node is a whole interaction step, so one budget of steps buys more attempts. Only the ends are rewarded, but those of one tree share
beginnings, and comparing them inside the tree judges steps; comparing across the prompt's trees keeps a stable baseline. The advantage is the sum
of both comparisons. Equations 1-4 and the growth are those of the paper and its code as the row's specification gives them; the KL coefficient
and the clip are [reconstructed].
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper, Rollout
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.seams.groups import broadcast, group_size, standardize
from anypo.seams.objective import ClippedSurrogate
from anypo.seams.regularize import KLPenalty
from anypo.seams.reward import row_reward
from anypo.seams.rollout import OnPolicy, as_roots, continue_rows, pruned, step_starts, steps_of
from anypo.seams.select import UniformPrompts
from anypo.task import Prompt

if TYPE_CHECKING:
    from anypo.run import Run

PerLeaf = Float[Tensor, " N"]
Number = Int[Tensor, " N"]


def standardized(reward: PerLeaf, members: Number, eps: float = 1e-6, singleton: str = "raw") -> PerLeaf:
    """Equation 1, sample std. A lone member keeps its reward over 1 + eps (mean 0 and std 1, as in the code), or with "zero" gets 0."""
    if singleton not in ("raw", "zero"):
        raise ValueError(f"singleton is raw or zero, not '{singleton}'")
    value = standardize(reward, members, 1, eps)
    return torch.where(group_size(members) == 1, reward / (1 + eps), value) if singleton == "raw" else value


def intra(reward: PerLeaf, group: Number, tree: Number, mask: Tensor, eps: float = 1e-6, singleton: str = "raw") -> PerLeaf:
    """Equation 2: relative to the leaves of the same tree (`tree` is unique across prompts)."""
    return standardized(reward, tree, eps, singleton)


def inter(reward: PerLeaf, group: Number, tree: Number, mask: Tensor, eps: float = 1e-6, singleton: str = "raw") -> PerLeaf:
    """Equation 3: relative to the leaves of all the prompt's trees."""
    return standardized(reward, group, eps, singleton)


def advantages(
    reward: PerLeaf, group: Number, tree: Number, mask: Tensor, eps: float = 1e-6, singleton: str = "raw"
) -> Float[Tensor, "N T"]:
    """Equation 4: the sum of both, on every action the policy wrote, those of the shared beginning included."""
    return broadcast(intra(reward, group, tree, mask, eps, singleton) + inter(reward, group, tree, mask, eps, singleton), mask)


class Cost(NamedTuple):
    leaves: int  # of a prompt
    cost_in_chains: float  # expected, in whole attempts


def leaf_count(M: int, N_exp: int, L: int) -> Cost:
    """What M trees cost that are expanded L times at N_exp nodes each; an expansion from a uniformly drawn depth costs about half an attempt."""
    return Cost(M * (1 + L * N_exp), M * (1 + L * N_exp / 2))


@dataclass
class TreeRollout:
    """Every attempt is the root of a tree; in each round each tree is continued from `expansions` nodes, drawn uniformly with replacement.

    The nodes of a tree are its interaction steps (see `steps_of`), the root included and the leaves not. The number of trees a prompt is
    `select.group_size`. Signal: `tree` [N], unique across prompts.
    """

    expansions: int = 2  # N_exp, nodes of a tree continued in a round, >= 0
    rounds: int = 1  # L, >= 0
    leaves: int | None = 3  # K, kept at random of each tree's 1 + rounds * expansions leaves, >= 1; None = all
    step_size: int = 1  # actions a node, >= 1, where neither the task nor line breaks divide an attempt
    inner: Rollout = field(default_factory=OnPolicy)

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        batch = as_roots(self.inner(prompts, run))
        batch.signals["tree"] = torch.arange(len(batch))
        for _ in range(self.rounds if self.expansions else 0):
            rows, depth = self.draw(batch, run)
            branches = continue_rows(batch, rows, depth, run)
            branches.signals["tree"] = batch.signals["tree"][rows]
            batch = Batch.concat([batch, branches])
        return pruned(batch, batch.signals["tree"], self.leaves, run)

    def draw(self, batch: Batch, run: Run) -> tuple[Tensor, Tensor]:
        """`expansions` nodes of every tree: (row, number of actions before the node), [M] each."""
        nodes = own_nodes(batch, steps_of(batch, run, self.step_size))
        row, depth = nodes.nonzero().unbind(1)
        tree = batch.signals["tree"][row]
        order = tree.argsort(stable=True)
        present, counts = torch.unique(tree, return_counts=True)
        first = counts.cumsum(0) - counts
        u = torch.rand(len(present), self.expansions, generator=run.generator, dtype=torch.float64)
        chosen = order[(first[:, None] + torch.minimum((u * counts[:, None]).long(), counts[:, None] - 1)).flatten()]
        return row[chosen], depth[chosen]


def own_nodes(batch: Batch, steps: Int[Tensor, "N T"]) -> Bool[Tensor, "N T"]:
    """Where a step begins that the row added to its tree: for a branch those after the node it grew from, which belongs to its parent."""
    assert batch.branch_at is not None and batch.parent is not None
    grown = torch.arange(batch.horizon) > torch.where(batch.parent >= 0, batch.branch_at, -1)[:, None]
    return step_starts(steps) & grown


@dataclass
class TreeRelative:
    """Relative to the leaves of the same tree plus relative to all of the prompt's."""

    intra: bool = True  # False: across the trees alone, which is GRPO on the leaves
    eps: float = 1e-6  # > 0, added to the standard deviations
    singleton: str = "raw"  # a tree with one leaf: raw = its reward (as in the code), zero
    weights: tuple[float, ...] | None = None  # of the K rewards before they are compared; None = all 1

    compares_group = True

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        reward = row_reward(batch, self.weights)
        if not self.intra:
            return broadcast(standardized(reward, batch.group, self.eps, self.singleton), batch.mask)
        return advantages(reward, batch.group, batch.signal("tree"), batch.mask, self.eps, self.singleton)


METHOD = GRPO.but(
    name="tree_grpo",
    paper=Paper("Tree Search for LLM Agent Reinforcement Learning", "2509.21240", 2025),
    summary="attempts branch off from steps of earlier ones; advantages inside the tree and across the prompt's trees are added",
    select=UniformPrompts(group_size=2),
    rollout=TreeRollout(),
    credit=TreeRelative(),
    objective=ClippedSurrogate(clip_low=0.2, clip_high=0.2, aggregation="seq_mean"),
    regularize=(KLPenalty(beta=0.001),),
)
