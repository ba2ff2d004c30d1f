"""CBPO: contrastive branch policy optimization (arXiv:2608.24300).

Methods that branch mix up two questions: where to spend a fixed number of further rollouts, and what the outcomes of branches say about tokens. CBPO
separates them. Entropy in windows over the whole response nominates positions, and priorities that decay with what a path and a node already got
spread the budget over them; slots that no position deserves become independent rollouts. A parent and the branches from one of its positions share an
exact prefix; the spread of their rewards (the contrastive branch value, CBV) rescales the advantages of their continuations, never the sign. A parent
with several such nodes is cut into segments, and copied prefixes carry no loss. Against GRPO it changes the rollout and the credit. Equations 1-12
are the paper's as the row's specification gives them; that the base advantage has a population std is [reconstructed], and so is moving a branch to
the beginning of its turn where an environment cannot be restored elsewhere. Left out: the top-10 estimate of entropy, for the exact one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper, Rollout
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.seams.credit import group_relative
from anypo.seams.groups import broadcast, group_mean, group_std
from anypo.seams.reward import row_reward
from anypo.seams.rollout import OnPolicy, as_roots, continue_rows, step_starts
from anypo.seams.select import UniformPrompts
from anypo.task import Prompt

if TYPE_CHECKING:
    from anypo.run import Run

EPS = 1e-6
PerRow = Float[Tensor, " N"]
Rows = Int[Tensor, " N"]


class Allocation(NamedTuple):
    branches: list[list[int]]  # [parent, boundary] in the order of allocation
    independent: int  # slots that become full rollouts


class BranchValue(NamedTuple):
    keys: Tensor  # [J,2] parent and boundary of every node, ascending
    cbv: Tensor  # [J]
    z: Tensor  # [J] standardized over the batch's nodes


class Credited(NamedTuple):
    advantage: Tensor  # [N,T], 0 outside the mask
    mask: Tensor  # [N,T] bool, without the prefixes that branches copied


def window_entropy(H: Float[Tensor, "N T"], mask: Tensor, W: int) -> tuple[Float[Tensor, "N T"], Rows]:
    """Equation 1: mean over the W written tokens from each one on (fewer at the end; 0 beyond it), counted in written tokens, and their number."""
    inside = mask.bool()
    order, length = (~inside).long().argsort(dim=1, stable=True), inside.sum(1)
    written = torch.where(inside, H, 0.0).gather(1, order)
    total = torch.cat([written, written.new_zeros(len(H), W - 1)], dim=1).unfold(1, W, 1).sum(-1)
    size = (length[:, None] - torch.arange(H.shape[1])).clamp(1, W)
    return total / size, length


def priority(
    H: Float[Tensor, "N T"], mask: Tensor, W: int = 20, d_min: int = 64, alpha: float = 0.2, gamma: float = 2.0
) -> list[list[list[float]]]:
    """Equations 1-2: for every row its candidate boundaries (multiples of `d_min`, in written tokens) with their raw priority in [0,1].

    `H`: entropy over the log of the vocabulary's size. Raises ValueError unless W and d_min are at least 1.
    """
    if W < 1 or d_min < 1:
        raise ValueError(f"the window and the distance of boundaries must be at least 1 token; got {W} and {d_min}")
    window, length = window_entropy(H, mask, W)
    raw = (alpha + gamma * (window - window[:, :1])).clamp(0, 1)
    return [[[b, float(raw[i, b])] for b in range(d_min, n, d_min)] for i, n in enumerate(length.tolist())]


def allocate(
    H: Float[Tensor, "N T"], mask: Tensor, budget: int, W: int = 20, d_min: int = 64, alpha: float = 0.2, gamma: float = 2.0, J_max: int = 3,
    rho_path: float = 0.2, rho_node: float = 0.2, B_node: int = 3, B_path: int = 4, kappa: float = 0.25,
) -> Allocation:  # fmt: skip
    """Equations 3-4 for the parents of one problem: each slot of `budget` goes to the node with the largest balanced priority, until none exceeds
    `kappa`. A loop over slots, since every one changes the priorities of the next."""
    candidates = {
        (i, int(b)): raw
        for i, row in enumerate(priority(H, mask, W, d_min, alpha, gamma))
        for b, raw in sorted(row, key=lambda c: -c[1])[:J_max]
    }
    branches: list[list[int]] = []
    path: dict[int, int] = dict.fromkeys((i for i, _ in candidates), 0)
    node = dict.fromkeys(candidates, 0)
    while len(branches) < budget:
        balanced = {
            key: raw / ((1 + path[key[0]]) ** rho_path * (1 + node[key]) ** rho_node)
            for key, raw in candidates.items()
            if path[key[0]] < B_path and node[key] < B_node
        }
        best = min(balanced, key=lambda key: (-balanced[key], key), default=None)
        if best is None or balanced[best] <= kappa:
            break
        branches.append(list(best))
        path[best[0]] += 1
        node[best] += 1
    return Allocation(branches, budget - len(branches))


def nodes_of(parent: Rows, node: Rows) -> tuple[Int[Tensor, "J 2"], Rows]:
    """The nodes (parent, boundary) that have branches, ascending, and which one each row branched from (-1: none)."""
    branch = (parent >= 0).nonzero().flatten()
    keys, index = torch.unique(torch.stack([parent[branch], node[branch]], dim=1), dim=0, return_inverse=True)
    return keys, torch.full_like(parent, -1).index_copy(0, branch, index)


def group_statistic(values: PerRow, keys: Int[Tensor, "J 2"], index: Rows, statistic: Any) -> Float[Tensor, " J"]:
    """A statistic over every exact-prefix group: a parent and the branches of one of its nodes (equation 6)."""
    branch = index >= 0
    members = torch.cat([torch.arange(len(keys)), index[branch]])
    return statistic(torch.cat([values[keys[:, 0]], values[branch]]), members)[: len(keys)]


def cbv(reward: PerRow, parent: Rows, node: Rows) -> BranchValue:
    """Equations 6-7: population std of the rewards in every exact-prefix group, and the same standardized over all nodes (0 without spread)."""
    keys, index = nodes_of(parent, node)
    value = group_statistic(reward, keys, index, group_std)
    spread = value.std(correction=0) if len(value) else value.new_zeros(())
    return BranchValue(keys, value, (value - value.mean()) / (spread + EPS) if spread >= EPS else torch.zeros_like(value))


def rescaled(advantage: Tensor, z: Tensor, eta: float = 0.2, phi: float = 2.0) -> Tensor:
    """Equation 8: the advantage times a factor in [1 - eta/phi, 1 + eta/phi], which keeps the sign while 0 <= eta < phi."""
    bound = advantage.abs() / phi
    return advantage + eta * advantage.sign() * z.clamp(-bound, bound)


def advantages(reward: PerRow, group: Rows, mask: Tensor, parent: Rows, node: Rows, eta: float = 0.2, phi: float = 2.0) -> Credited:
    """Equations 5-11. `parent` -1: the row is no branch; `node`: its number of leading actions copied from the parent.

    Raises ValueError unless 0 <= eta < phi.
    """
    if not 0 <= eta < phi:
        raise ValueError(f"CBPO keeps signs only with 0 <= eta < phi; got {eta} and {phi}")
    base, (keys, index), place = group_relative(reward, group, eps=EPS), nodes_of(parent, node), torch.arange(mask.shape[1])
    branch = index >= 0
    fresh = mask.bool() & (place >= torch.where(branch, node, 0)[:, None])
    if len(keys) == 0:
        return Credited(broadcast(base, fresh), fresh)
    z = cbv(reward, parent, node).z
    own = torch.where(branch, rescaled(base, z[index.clamp(min=0)], eta, phi), base)
    owner = keys[:, 0].contiguous()
    rank = torch.arange(len(keys)) - torch.searchsorted(owner, owner)  # of the node on its parent
    shape = len(reward), int(rank.max()) + 2
    before, after = (base.new_full(shape, torch.nan) for _ in range(2))  # per segment: of the node that ends it, of the node that begins it
    before[owner, rank] = group_statistic(base, keys, index, group_mean)
    after[owner, rank + 1] = rescaled(base[owner], z, eta, phi)
    start = torch.full(shape, mask.shape[1]).index_put((owner, rank), keys[:, 1])
    value = torch.stack([before, after]).nanmean(0).gather(1, (place[:, None] >= start[:, None]).sum(-1))
    is_parent = torch.zeros_like(branch).index_fill(0, owner, True)
    return Credited(torch.where(fresh, torch.where(is_parent[:, None], value, own[:, None]), 0.0), fresh)


def vocabulary_of(policy: Any) -> int:
    """The number of symbols the policy chooses from. Raises ValueError where it does not say."""
    size = getattr(policy, "vocabulary", None) or getattr(getattr(policy, "network", None), "vocabulary", None)
    if size is None:
        raise ValueError(
            f"cbpo divides entropies by the log of the vocabulary's size, which {type(policy).__name__} does not tell; give it `vocabulary`"
        )
    return size


@dataclass
class BranchAllocation:
    """`select.group_size` parents, then branches from their uncertain positions and independent rollouts, `total` attempts at a prompt in all.

    A short-response task wants `window=2, distance=1`. Where a task has turns, a branch starts at the beginning of its turn.
    """

    total: int = 16  # M, attempts at a prompt, parents included
    window: int = 20  # W, tokens, >= 1
    distance: int = 64  # d_min, tokens between candidate positions, >= 1
    most_nodes: int = 3  # J_max, nodes of a parent
    offset: float = 0.2  # alpha, priority of a position as uncertain as the beginning
    slope: float = 2.0  # gamma, of the priority in the normalized entropy
    path_decay: float = 0.2  # rho_path, >= 0
    node_decay: float = 0.2  # rho_node, >= 0
    node_limit: int = 3  # B_node, branches of a node
    path_limit: int = 4  # B_path, branches of a parent
    threshold: float = 0.25  # kappa, in [0,1]; 1: independent rollouts alone
    inner: Rollout = field(default_factory=OnPolicy)

    needs = frozenset({"old_entropy"})

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        batch = as_roots(self.inner(prompts, run))
        run.prepare_signals(batch, self.needs)
        entropy = batch.signal("old_entropy") / math.log(max(vocabulary_of(run.policy), 2))
        rows, depth, branches = [], [], 0
        for group in torch.unique(batch.group).tolist():
            members = (batch.group == group).nonzero().flatten()
            found = self.allocate(entropy[members], batch.mask[members], self.total - len(members))
            rows += [int(members[i]) for i, _ in found.branches] + [int(members[0])] * found.independent
            depth += [self.place(batch, int(members[i]), b) for i, b in found.branches] + [-1] * found.independent
            branches += len(found.branches)
        run.log(branches=branches)
        if not rows:
            return batch
        wanted = torch.tensor(depth)
        grown = continue_rows(batch, torch.tensor(rows), wanted.clamp(min=0), run)
        assert grown.parent is not None
        return Batch.concat([batch, grown.but(parent=torch.where(wanted < 0, -1, grown.parent))])

    def allocate(self, entropy: Float[Tensor, "n T"], mask: Bool[Tensor, "n T"], budget: int) -> Allocation:
        """Equations 1-4 for the parents of one prompt."""
        return allocate(
            entropy, mask, budget, self.window, self.distance, self.offset, self.slope, self.most_nodes, self.path_decay, self.node_decay,
            self.node_limit, self.path_limit, self.threshold,
        )  # fmt: skip

    def place(self, batch: Batch, row: int, boundary: int) -> int:
        """The position of a row's written token number `boundary`, or the beginning of its turn where the task has turns."""
        at = int(batch.mask[row].nonzero()[boundary])
        if batch.segment is None:
            return at
        return int(step_starts(batch.segment[row : row + 1])[0, : at + 1].nonzero()[-1])


@dataclass
class ContrastiveCredit:
    """Group-relative advantages, rescaled by what branching revealed; leaves the tokens that were not copied in `batch.keep`."""

    eta: float = 0.2  # strength of the rescaling, in [0, phi); 0: segments without it
    phi: float = 2.0  # > 0, the rescaling is at most |A| / phi
    weights: tuple[float, ...] | None = None  # of the K rewards before they are compared; None = all 1

    compares_group = True

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        reward = row_reward(batch, self.weights)
        nobody = torch.full_like(batch.group, -1)
        parent, node = (nobody if links is None else links for links in (batch.parent, batch.branch_at))
        found = advantages(reward, batch.group, batch.mask, parent, node, self.eta, self.phi)
        batch.keep = batch.counted & found.mask
        return found.advantage


METHOD = GRPO.but(
    name="cbpo",
    paper=Paper("Contrastive Branch Policy Optimization", "2608.24300", 2026),
    summary="branches from uncertain positions under decaying priorities; the spread of their rewards rescales the advantages after them",
    select=UniformPrompts(group_size=6),
    rollout=BranchAllocation(),
    credit=ContrastiveCredit(),
)
