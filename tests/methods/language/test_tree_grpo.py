"""Tree-GRPO: what it reduces to, how trees grow, and the component in the loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from anypo.batch import Batch
from anypo.domains.language.toys.key_chain import make_key_chain
from anypo.loops.on_policy import train
from anypo.method import Method
from anypo.methods.language import grpo
from anypo.methods.language.tree_grpo import METHOD, TreeRollout, advantages, inter, intra, own_nodes
from anypo.run import Run
from anypo.seams.groups import broadcast
from anypo.seams.rollout import steps_of
from tests.helpers import assert_resumes, assert_trains, random_rows


def grown(method: Method, prompts: int = 3, steps: int = 5, seed: int = 0) -> tuple[Run, Batch]:
    policy, task = make_key_chain(prompts, steps, seed=seed)
    run = Run(method, policy, task, steps=1, seed=seed)
    return run, method.rollout(method.select(task, run), run)


def test_one_tree_a_prompt_is_twice_grpo() -> None:
    rows = random_rows(1, rows=9)
    mine = advantages(rows.reward, rows.group, rows.group, rows.mask)
    torch.testing.assert_close(mine, broadcast(2 * grpo.advantages(rows.reward, rows.group, ddof=1), rows.mask), atol=0, rtol=0)


def test_chains_keep_their_reward_inside_and_grpo_across() -> None:
    rows = random_rows(2, rows=9)
    tree = torch.arange(9)
    torch.testing.assert_close(intra(rows.reward, rows.group, tree, rows.mask, eps=0.0), rows.reward, atol=0, rtol=0)
    assert torch.equal(inter(rows.reward, rows.group, tree, rows.mask), grpo.advantages(rows.reward, rows.group, ddof=1))
    assert intra(rows.reward, rows.group, tree, rows.mask, singleton="zero").eq(0).all()


def test_without_the_inner_comparison_it_is_grpo() -> None:
    run, batch = grown(METHOD)
    batch.reward = torch.randn(len(batch), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mine = METHOD.set("credit.intra", False).credit(batch, run)
    assert torch.equal(mine, broadcast(grpo.advantages(batch.reward, batch.group, ddof=1), batch.mask))


def test_equal_rewards_in_a_tree_leave_the_outer_part() -> None:
    reward, group, tree = torch.tensor([1.0, 1.0, 0.0, 1.0]).double(), torch.zeros(4, dtype=torch.int64), torch.tensor([0, 0, 1, 1])
    mask = torch.ones(4, 2, dtype=torch.bool)
    assert intra(reward, group, tree, mask)[:2].eq(0).all()
    assert torch.equal(advantages(reward, group, tree, mask)[:2, 0], inter(reward, group, tree, mask)[:2])


def test_trees_grow_as_asked() -> None:
    run, batch = grown(METHOD.but(rollout=TreeRollout(expansions=3, rounds=2, leaves=None)))
    tree, (present, counts) = batch.signals["tree"], torch.unique(batch.signals["tree"], return_counts=True)
    assert len(present) == 6 and counts.eq(7).all()  # unique across prompts, 1 + L N leaves each
    assert batch.parent is not None and batch.branch_at is not None
    branches = batch.parent >= 0
    assert torch.equal(tree[branches], tree[batch.parent[branches]]) and torch.equal(
        batch.group[branches], batch.group[batch.parent[branches]]
    )
    assert batch.branch_at[branches].max() < 5  # never from a leaf
    assert len(torch.unique(batch.branch_at[branches])) == 5  # the root included
    for i in branches.nonzero().flatten().tolist():
        shared = int(batch.branch_at[i])
        assert torch.equal(batch.action[i, :shared], batch.action[batch.parent[i], :shared])
    assert run.actions == run.task.environment_steps == 6 * 5 + int((5 - batch.branch_at[branches]).sum())  # type: ignore[attr-defined]


def test_a_node_belongs_to_one_row() -> None:
    run, batch = grown(METHOD.but(rollout=TreeRollout(expansions=3, rounds=2, leaves=None)), prompts=1)
    nodes = own_nodes(batch, steps_of(batch, run))
    assert batch.parent is not None and batch.branch_at is not None
    roots = batch.parent < 0
    assert nodes[roots].all()
    assert torch.equal(nodes[~roots].sum(1), 4 - batch.branch_at[~roots])


def test_nodes_are_drawn_uniformly() -> None:
    _, batch = grown(METHOD.but(rollout=TreeRollout(5, 1, None)).set("select.group_size", 400))
    assert batch.branch_at is not None and batch.parent is not None
    counts = torch.bincount(batch.branch_at[batch.parent >= 0], minlength=5).double()
    assert (counts / counts.sum() - 0.2).abs().max() < 0.02


def test_pruning_keeps_so_many_leaves_of_every_tree() -> None:
    _, batch = grown(METHOD.but(rollout=TreeRollout(expansions=3, rounds=2, leaves=2)))
    _, counts = torch.unique(batch.signals["tree"], return_counts=True)
    assert counts.eq(2).all() and batch.parent is not None and int(batch.parent.max()) < len(batch)
    for i in (batch.parent >= 0).nonzero().flatten().tolist():
        assert batch.signals["tree"][i] == batch.signals["tree"][batch.parent[i]]


def test_no_expansion_is_a_batch_of_chains() -> None:
    _, batch = grown(METHOD.but(rollout=TreeRollout(expansions=0)))
    assert len(batch) == 6 and batch.parent is not None and batch.parent.eq(-1).all()


@pytest.mark.parametrize(("path", "value", "words"), [("rollout.leaves", 0, "at least 1"), ("credit.singleton", "one", "raw or zero")])
def test_settings_out_of_range_are_refused(path: str, value: object, words: str) -> None:
    method = METHOD.set(path, value)
    with pytest.raises(ValueError, match=words):
        run, batch = grown(method)
        batch.reward = torch.zeros(len(batch))
        method.credit(batch, run)


def test_it_trains_and_resumes(tmp_path: Path) -> None:
    assert_trains(METHOD, steps=6)
    assert_resumes(METHOD, tmp_path)


def test_it_trains_on_a_chain() -> None:
    policy, task = make_key_chain(4, 4)
    train(Run(METHOD, policy, task, steps=3))
    assert torch.isfinite(policy.logits).all()
