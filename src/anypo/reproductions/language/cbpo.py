"""Claims of CBPO on scripted entropies, on sampled rewards, and on key_chain (four actions, exact success).

Learning is compared where a few steps are uncertain and the others are not, which is what branching by entropy is for. On the chain of
`make_key_chain`, whose steps are all alike, CBPO and GRPO learn equally fast.
"""

from __future__ import annotations

from functools import cache
from statistics import fmean

import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.language.toys.key_chain import KeyChain, make_key_chain
from anypo.loops.on_policy import step
from anypo.methods.language.cbpo import METHOD as CBPO
from anypo.methods.language.cbpo import BranchAllocation, ContrastiveCredit, allocate, cbv, rescaled
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.reproductions.common import hard_chain, plain_sgd
from anypo.run import Run
from anypo.seams.rollout import as_roots, continue_rows

PROMPTS, STEPS, DECIDING = 16, 6, 3
SEEDS = range(5)
TINY = CBPO.but(rollout=BranchAllocation(window=2, distance=1))
FREE = {"rho_path": 0.0, "rho_node": 0.0, "B_node": 99, "B_path": 99}  # the plain ranking by entropy


def _spreads(**limits: float) -> Evidence:
    """Mean number of parents that get a branch, of 6 parents with 12 random entropies, 10 slots, over 200 draws."""
    g = torch.Generator().manual_seed(0)
    paths = []
    for _ in range(200):
        entropy = torch.rand(6, 12, generator=g, dtype=torch.float64)
        found = allocate(entropy, torch.ones(6, 12), 10, W=2, d_min=1, **limits)  # type: ignore[arg-type]
        paths.append(len({parent for parent, _ in found.branches}))
    return Evidence({"parents with a branch": round(fmean(paths), 2)}, "above 3", fmean(paths) > 3)


@claim("with decays and limits the branches of ten slots reach more than three of six parents")
def spreads() -> Evidence:
    return _spreads()


@ablation(spreads, "the plain ranking by entropy: no decay, no limits")
def spreads_without_decay() -> Evidence:
    return _spreads(**FREE)


def _variance(exact: bool) -> Evidence:
    """120,000 nodes of a parent and 3 branches whose prefix succeeds with probability p in {0.2, 0.5, 0.9}; E[CBV^2] against 3/4 p (1 - p)."""
    g, nodes, branches = torch.Generator().manual_seed(0), 120_000, 3
    success = torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64)
    prefix = torch.arange(nodes) % 3
    of_branch = prefix.repeat_interleave(branches)
    of_branch = of_branch if exact else of_branch[torch.randperm(len(of_branch), generator=g)]
    reward = torch.bernoulli(success[torch.cat([prefix, of_branch])], generator=g)
    parent = torch.cat([torch.full((nodes,), -1), torch.arange(nodes).repeat_interleave(branches)])
    found = cbv(reward, parent, torch.where(parent < 0, -1, 1))
    measured = torch.stack([(found.cbv[prefix == k] ** 2).mean() for k in range(3)])
    error = (measured / (0.75 * success * (1 - success)) - 1).abs()
    return Evidence({"largest relative error": round(float(error.max()), 4)}, "below 0.02", float(error.max()) < 0.02)


@claim("the mean square of CBV is (n-1)/n times the variance of the reward given the prefix")
def variance() -> Evidence:
    return _variance(True)


@ablation(variance, "branches from other prefixes in the group")
def variance_of_mixed_prefixes() -> Evidence:
    return _variance(False)


def _signs(eta: float) -> Evidence:
    """10,000 random advantages and standardized values."""
    base, z = torch.randn(2, 10_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    factor = rescaled(base, 3 * z, eta, 2.0) / base
    found = {"smallest factor": round(float(factor.min()), 3), "largest": round(float(factor.max()), 3)}
    return Evidence(found, "within 0.9 and 1.1", bool(((factor > 0.9 - 1e-9) & (factor < 1.1 + 1e-9)).all()))


@claim("the rescaling keeps every sign and stays within 10% (eta 0.2, phi 2)")
def signs() -> Evidence:
    return _signs(0.2)


@ablation(signs, "eta above phi")
def signs_with_a_large_eta() -> Evidence:
    return _signs(3.0)


def _locates(exact: bool) -> Evidence:
    """64 chains of which step 3 alone decides, by a fair coin; 3 branches from every position 1 to 5."""
    right = torch.ones(64, STEPS, 4, dtype=torch.bool)
    right[:, DECIDING, 2:] = False
    task = KeyChain(right=right)
    run = Run(TINY.set("select.group_size", 1), task.policy(bias=0.0, scale=0.0), task, steps=1)
    parents = as_roots(run.collect(run.method.select(task, run)))
    rows = torch.arange(64).repeat_interleave(3 * 5)
    node = torch.arange(1, 6).repeat_interleave(3).repeat(64)
    branches = continue_rows(parents, rows, node if exact else torch.zeros_like(node), run)
    reward = torch.cat([run.score_rewards(parents), run.score_rewards(branches)])
    none = torch.full((64,), -1)
    found = cbv(reward, torch.cat([none, rows]), torch.cat([none, node]))
    late = found.keys[:, 1] > DECIDING
    measured = {"largest after the decision": float(found.cbv[late].max()), "mean up to it": round(float(found.cbv[~late].mean()), 3)}
    return Evidence(measured, "0 after it, above 0.3 up to it", float(found.cbv[late].max()) == 0 and float(found.cbv[~late].mean()) > 0.3)


@claim("CBV is exactly 0 at every position after the deciding step and above 0.3 on average up to it")
def locates() -> Evidence:
    return _locates(True)


@ablation(locates, "the members of a group do not share the prefix")
def locates_without_prefix() -> Evidence:
    return _locates(False)


class CopiesCount(ContrastiveCredit):
    """Copied prefixes are trained with their branch."""

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        advantage = super().__call__(batch, run)
        batch.keep = None
        return advantage


def _once(credit: ContrastiveCredit) -> Evidence:
    """How often each token before a node is trained, over the parent and its branches."""
    policy, task = make_key_chain(PROMPTS, STEPS)
    batch = step(Run(TINY.but(credit=credit), policy, task, steps=1))
    assert batch.parent is not None and batch.branch_at is not None
    trained, place = batch.counted, torch.arange(batch.horizon)
    rows = (batch.parent >= 0).nonzero().flatten()
    copied = place < batch.branch_at[rows, None]
    times = (trained[rows].long() + trained[batch.parent[rows]].long())[copied]
    found = {"branches": len(rows), "fewest": int(times.min()), "most": int(times.max())}
    return Evidence(found, "exactly once", len(rows) > 0 and bool((times == 1).all()))


@claim("every token that a branch shares with its parent is trained in exactly one of the two rows")
def once() -> Evidence:
    return _once(ContrastiveCredit())


@ablation(once, "copied prefixes are trained too")
def more_than_once() -> Evidence:
    return _once(CopiesCount())


BUDGET = 50 * 8 * 13 * 16  # environment steps: 50 iterations of 13 chains at each of 8 prompts


@cache
def trained(kind: str) -> float:
    """Mean success on chains of 16 steps, 4 of them hard, once BUDGET environment steps are spent; step 1 a prompt."""
    methods = {"grpo": (GRPO, 13), "cbpo": (TINY, 6), "no branches": (TINY.set("rollout.threshold", 1.0), 6)}
    method = plain_sgd(methods[kind][0], 8 * 16, group_size=methods[kind][1]).but(regularize=())
    ends = []
    for seed in SEEDS:
        policy, task, _ = hard_chain(seed)
        run = Run(method, policy, task, steps=BUDGET, seed=seed, max_actions=BUDGET)
        while not run.finished:
            step(run)
        ends.append(task.expected_success(policy))
    return fmean(ends)


def _learns(kind: str) -> Evidence:
    found = {kind: round(trained(kind), 3), "grpo": round(trained("grpo"), 3)}
    return Evidence(found, "above GRPO by 0.05", trained(kind) > trained("grpo") + 0.05)


@claim("where few steps are uncertain CBPO succeeds more often than GRPO at an equal budget of environment steps (5 seeds)", slow=True)
def learns() -> Evidence:
    return _learns("cbpo")


@ablation(learns, "every slot is an independent rollout")
def learns_without_branches() -> Evidence:
    return _learns("no branches")
