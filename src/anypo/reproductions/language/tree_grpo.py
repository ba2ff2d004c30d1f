"""Claims of Tree-GRPO on key_chain (16 prompts, 4 or 6 steps, exact success), with trees of (M, N_exp, L) = (2, 2, 1) and all leaves kept.

The sum of two normalized advantages is about twice as large as one, so at one step size Tree-GRPO also takes larger steps than the chain. The
last claim looks at what is left of its lead when the step is halved.
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
from anypo.method import Method
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.methods.language.tree_grpo import METHOD as TREE
from anypo.methods.language.tree_grpo import TreeRollout, inter, intra
from anypo.reproductions.common import plain_sgd
from anypo.run import Run
from anypo.seams.groups import broadcast

PROMPTS, TREES = 16, 2
SEEDS = range(6)


class FromTheRoot(TreeRollout):
    """Branches grow from the root alone, as independent attempts do."""

    def draw(self, batch: Batch, run: Run) -> tuple[Tensor, Tensor]:
        rows, depth = super().draw(batch, run)
        return rows, torch.zeros_like(depth)


def _budget(shared: bool) -> Evidence:
    policy, task = make_key_chain(PROMPTS, 4)
    method = TREE if shared else TREE.but(rollout=FromTheRoot())
    run = Run(method, policy, task, steps=1)
    leaves = sum(len(method.rollout(method.select(task, run), run)) for _ in range(40))
    ratio = leaves / task.environment_steps * 4
    return Evidence({"leaves a step, chain = 1": round(ratio, 3)}, "above 1.25", ratio > 1.25)


@claim("a budget of environment steps buys more than 1.25 times as many attempts in trees as in chains (4 steps)")
def budget() -> Evidence:
    return _budget(True)


@ablation(budget, "branches grow from the root alone")
def budget_without_sharing() -> Evidence:
    return _budget(False)


def _step_signal(inside: bool) -> Evidence:
    """Gradient of two leaves that split at step 2, one right and one wrong, beside another tree of the prompt that failed."""
    task = KeyChain(1, 4, seed=0)
    policy, right = task.policy(bias=0.5, seed=1), task.right[0].long().argmax(1)
    win, lose = right.clone(), right.clone()
    lose[2] = (right[2] + 1) % 4
    action = torch.stack([win, lose, (right + 1) % 4, (right + 1) % 4])
    mask, group, tree = torch.ones(4, 4, dtype=torch.bool), torch.zeros(4, dtype=torch.int64), torch.tensor([0, 0, 1, 1])
    reward = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    advantage = broadcast((intra if inside else inter)(reward, group, tree, mask), mask)
    batch = Batch(action=action, mask=mask, logp=torch.zeros(4, 4, dtype=torch.float64), group=group, context=group)
    logp = policy.evaluate(batch, {"logp"}).logp
    (logp * advantage)[:2].sum().backward()
    assert policy.logits.grad is not None
    gradient = policy.logits.grad[0]
    found = {
        "shared beginning": float(gradient[:2].abs().max()),
        "right action": round(float(gradient[2, win[2]]), 3),
        "wrong action": round(float(gradient[2, lose[2]]), 3),
    }
    holds = found["shared beginning"] < 1e-6 and found["right action"] > 0 > found["wrong action"]
    return Evidence(found, "0 (1e-6) on the beginning, opposite signs at the split", holds)


@claim("inside a tree the shared beginning gets no gradient and the two actions at the split get opposite ones")
def step_signal() -> Evidence:
    return _step_signal(True)


@ablation(step_signal, "the comparison across the prompt's trees")
def step_signal_across() -> Evidence:
    return _step_signal(False)


@cache
def trained(kind: str, factor: float = 1.0, steps: int = 6, iterations: int = 60) -> float:
    """Mean success of 6 seeds once as many environment steps are spent as the trees need in `iterations`, at `factor` times a step of 1 a prompt."""
    methods: dict[str, Method] = {"chain": GRPO, "tree": TREE, "across": TREE.set("credit.intra", False)}
    expected = TREES * (steps + 2 * (steps + 1) / 2)  # of a prompt's trees
    group = round(expected / steps) if kind == "chain" else TREES
    method = plain_sgd(methods[kind], PROMPTS * steps * factor, group_size=group).but(regularize=())
    ends = []
    for seed in SEEDS:
        policy, task = make_key_chain(PROMPTS, steps, seed=seed)
        run = Run(method, policy, task, steps=100 * iterations, seed=seed, max_actions=int(iterations * PROMPTS * expected))
        while not run.finished:
            step(run)
        ends.append(task.expected_success(policy))
    return fmean(ends)


def _learns(kind: str) -> Evidence:
    found = {kind: round(trained(kind), 3), "chain": round(trained("chain"), 3)}
    # The specification expects 0.08, against a chain that spends fewer steps; at exactly equal budgets the lead is about 0.05.
    return Evidence(found, "above the chain by 0.02", trained(kind) > trained("chain") + 0.02)


@claim(
    "at an equal budget of environment steps and the same step size Tree-GRPO succeeds more often than chains (6 steps, 6 seeds)", slow=True
)
def learns() -> Evidence:
    return _learns("tree")


@ablation(learns, "no comparison inside the tree")
def learns_across_trees_alone() -> Evidence:
    return _learns("across")


@claim(
    "the lead is more than a larger step: with the step halved, for two advantages added, Tree-GRPO still leads the chain",
    slow=True,
    reproduced=False,
)
def leads_at_half_the_step() -> Evidence:
    found = {"tree, half the step": round(trained("tree", 0.5), 3), "chain": round(trained("chain"), 3)}
    return Evidence(found, "above the chain", trained("tree", 0.5) > trained("chain"))
