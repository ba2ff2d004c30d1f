"""AT2PO: what it reduces to, how its tree grows, and the component in the loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.language.toys.key_chain import make_key_chain
from anypo.loops.on_policy import train
from anypo.method import Method
from anypo.methods.language import grpo, gspo
from anypo.methods.language.at2po import (
    METHOD,
    MODES,
    UncertainTurns,
    advantages,
    expansion,
    forest,
    fresh_nodes,
    loss,
    node_values,
    turn_advantages,
    turn_log_ratio,
    turns_of,
)  # fmt: skip
from anypo.run import Run
from anypo.seams.groups import broadcast
from anypo.seams.objective import aggregate, clipped, token_ratio
from tests.helpers import assert_resumes, assert_trains, random_rows

SMALL = METHOD.but(rollout=UncertainTurns(beam=3, rounds=2)).set("select.group_size", 4)
PARENT = torch.tensor([-1, 0, 0, 1, 1, 2, 2])


def grown(method: Method = SMALL, prompts: int = 3, steps: int = 5, seed: int = 0) -> tuple[Run, Batch]:
    policy, task = make_key_chain(prompts, steps, seed=seed)
    run = Run(method, policy, task, steps=1, seed=seed)
    return run, method.rollout(method.select(task, run), run)


def test_one_turn_a_row_is_gspo() -> None:
    rows = random_rows(1)
    token = torch.randn(rows.logp.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mine, theirs = (x.clone().requires_grad_() for x in (rows.logp, rows.logp))
    value = loss(mine, rows.old_logp, token, rows.mask, torch.zeros_like(rows.mask, dtype=torch.int64), 0.05, 0.08).loss
    expected = gspo.loss_token(theirs, rows.old_logp, rows.mask, token, 0.05, 0.08).loss
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(torch.autograd.grad(value, mine), torch.autograd.grad(expected, theirs))


def test_every_token_a_turn_is_the_token_ratio() -> None:
    rows = random_rows(2)
    mine, theirs = (x.clone().requires_grad_() for x in (rows.logp, rows.logp))
    found = loss(mine, rows.old_logp, broadcast(rows.advantages, rows.mask), rows.mask, torch.arange(5).expand(8, 5), 0.2, 0.2)
    ratio = token_ratio(theirs, rows.old_logp, rows.mask)
    expected = aggregate(-clipped(ratio, rows.advantages[:, None], 0.8, 1.2), rows.mask, "seq_mean")
    torch.testing.assert_close(found.ratio, ratio * rows.mask)
    torch.testing.assert_close(found.loss, expected)
    torch.testing.assert_close(torch.autograd.grad(found.loss, mine), torch.autograd.grad(expected, theirs))


def test_on_policy_the_ratio_is_one() -> None:
    rows = random_rows(3)
    advantage = broadcast(rows.advantages, rows.mask)
    found = loss(rows.logp, rows.logp, advantage, rows.mask)
    assert torch.equal(found.ratio, rows.mask.double())
    torch.testing.assert_close(found.loss, -(advantage.sum(1) / rows.mask.sum(1)).mean())


def test_padding_and_empty_rows_are_harmless() -> None:
    rows = random_rows(4)
    mask = rows.mask.clone()
    mask[2] = False
    dirty = torch.where(mask, rows.logp, -torch.inf).requires_grad_()
    value = loss(dirty, torch.where(mask, rows.old_logp, torch.nan), torch.full_like(rows.logp, 2.0) / mask, mask).loss
    (slope,) = torch.autograd.grad(value, dirty)
    assert torch.isfinite(value) and torch.isfinite(slope).all() and slope[~mask].eq(0).all()
    assert loss(dirty, rows.old_logp, rows.logp, torch.zeros_like(mask)).loss == 0


def test_turns_without_segments_are_runs_of_the_mask() -> None:
    mask = torch.tensor([[1, 1, 0, 1, 1], [0, 1, 0, 0, 1]]).bool()
    turn, count = turns_of(mask, None)
    assert turn.tolist() == [[0, 0, -1, 1, 1], [-1, 2, -1, -1, 3]] and count == 4
    logp = torch.arange(10.0).view(2, 5)
    assert turn_log_ratio(logp, torch.zeros(2, 5), turn, count).tolist() == [0.5, 3.5, 6.0, 9.0]


def test_a_huge_ratio_is_bounded() -> None:
    found = loss(torch.full((1, 3), 15.0), torch.zeros(1, 3), -torch.ones(1, 3), torch.ones(1, 3))
    torch.testing.assert_close(found.ratio, torch.full((1, 3), 10.0).exp())


@pytest.mark.parametrize("mode", MODES)
def test_a_flat_tree_is_grpo(mode: str) -> None:
    rows = random_rows(5, rows=9)
    trees = forest(fresh_nodes(torch.where(rows.mask, 0, -1)), rows.logp, rows.mask, rows.group)
    assert torch.equal(trees.parent[3:], torch.unique(rows.group, return_inverse=True)[1]) and trees.is_leaf[3:].all()
    reward = torch.cat([torch.zeros(3, dtype=torch.float64), rows.reward])
    mine = advantages(trees.parent, trees.entropy, reward, trees.is_leaf, trees.node, rows.mask, mode)
    torch.testing.assert_close(mine, broadcast(grpo.advantages(rows.reward, rows.group), rows.mask), atol=0, rtol=0)


def test_chains_are_grpo_as_well() -> None:
    method = SMALL.set("rollout.rounds", 0)
    run, batch = grown(method)
    batch.reward = torch.randn(len(batch), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(method.credit(batch, run), broadcast(grpo.advantages(batch.reward, batch.group), batch.mask))
    del batch.signals["node"]
    torch.testing.assert_close(method.credit(batch, run), broadcast(grpo.advantages(batch.reward, batch.group), batch.mask))


def test_equal_uncertainty_weighs_children_alike() -> None:
    g = torch.Generator().manual_seed(0)
    reward, leaf = torch.randn(7, generator=g, dtype=torch.float64), torch.tensor([0, 0, 0, 1, 1, 1, 1])
    same = torch.full((7,), 1.3, dtype=torch.float64)
    torch.testing.assert_close(node_values(PARENT, same, reward, leaf), node_values(PARENT, same, reward, leaf, "child_mean"))
    torch.testing.assert_close(
        node_values(PARENT, same, reward, leaf, "leaf_mean"), node_values(PARENT, same, reward, leaf, "child_mean")
    )  # as many leaves below each
    huge = node_values(PARENT, 1e4 * torch.arange(7).double(), reward, leaf)
    assert torch.isfinite(huge).all() and huge[1] == huge[4]  # all weight on the most uncertain child


def test_leaf_mean_counts_leaves() -> None:
    parent, leaf = torch.tensor([-1, 0, 0, 1, 1]), torch.tensor([0, 0, 1, 1, 1])
    value = node_values(parent, torch.zeros(5).double(), torch.tensor([0.0, 0.0, 1.0, 0.0, 0.5]).double(), leaf, "leaf_mean")
    torch.testing.assert_close(value[0], value[2:].mean())


def test_a_turn_without_leaves_weighs_nothing() -> None:
    parent, leaf = torch.tensor([-1, 0, 0, 1, 0]), torch.tensor([0, 0, 0, 1, 1])
    value = node_values(parent, torch.tensor([0.0, 0.0, 5.0, 0.0, 0.0]).double(), torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0]).double(), leaf)
    torch.testing.assert_close(value[0], (value[3] + value[4]) / 2)
    assert value[2] == 0


def test_forms_of_a_turns_advantage() -> None:
    value = torch.tensor([0.5, 1.0, 0.0, 3.0, -1.0, 0.25, -0.25])
    over_parent, over_root = turn_advantages(value, PARENT, "over_parent"), turn_advantages(value, PARENT, "over_root")
    assert torch.equal(turn_advantages(value, PARENT), value)
    assert over_parent.tolist() == [0.5, 0.5, -0.5, 2.0, -2.0, 0.25, -0.25] and over_root[3] == 2.5 and over_root[0] == 0.5
    assert turn_advantages(value, PARENT, "over_both")[3] == 4.5


def test_equal_rewards_give_nothing() -> None:
    run, batch = grown()
    batch.reward = torch.ones(len(batch), dtype=torch.float64)
    assert METHOD.credit(batch, run).eq(0).all()


def test_two_trees_are_two_problems() -> None:
    entropy, leaf = torch.rand(7, generator=torch.Generator().manual_seed(1)).double(), torch.tensor([0, 0, 0, 1, 1, 1, 1])
    reward = torch.randn(14, generator=torch.Generator().manual_seed(2)).double()
    both = torch.cat([PARENT, torch.where(PARENT >= 0, PARENT + 7, -1)])
    value = node_values(both, entropy.repeat(2), reward, leaf.repeat(2))
    torch.testing.assert_close(value[7:], node_values(PARENT, entropy, reward[7:], leaf))
    chosen = expansion(both, entropy.repeat(2), leaf.repeat(2), 4).chosen
    assert torch.equal(chosen[4:], chosen[:4] + 7)


def test_the_tree_is_that_of_the_rows() -> None:
    run, batch = grown()
    assert len(batch) == 3 * (4 + 2 * 3) and batch.parent is not None and batch.branch_at is not None
    node = batch.signals["node"]
    for i in (batch.parent >= 0).nonzero().flatten().tolist():
        shared, row = int(batch.branch_at[i]), int(batch.parent[i])
        assert torch.equal(node[i, :shared], node[row, :shared]) and batch.group[i] == batch.group[row]
        assert not torch.isin(node[i, shared:], node[:i]).any()
        assert shared < 5  # the turn is drawn again, so no leaf is one's parent
    trees = forest(node, batch.logp, batch.mask, batch.group)
    assert trees.is_leaf.sum() == len(batch) and (trees.parent < 0).sum() == 3
    assert torch.equal(trees.node[trees.row[3:], trees.depth[3:]], torch.arange(3, len(trees.parent)))
    torch.testing.assert_close(trees.entropy[trees.node], -batch.logp)  # turns of one action each
    assert run.actions == run.task.environment_steps == 3 * 4 * 5 + int((5 - batch.branch_at[batch.parent >= 0]).sum())  # type: ignore[attr-defined]


def test_the_most_uncertain_turn_is_drawn_again() -> None:
    run, batch = grown(SMALL.but(rollout=UncertainTurns(beam=1, rounds=1)))
    trees = forest(batch.signals["node"][:12], batch.logp[:12], batch.mask[:12], batch.group[:12])
    best = expansion(trees.parent, trees.entropy, trees.is_leaf, 1).chosen
    assert batch.parent is not None and batch.branch_at is not None
    assert torch.equal(batch.parent[12:], trees.row[best]) and torch.equal(batch.branch_at[12:], trees.depth[best])


def test_pruning_keeps_so_many_leaves_and_no_dead_turns() -> None:
    run, batch = grown(SMALL.but(rollout=UncertainTurns(beam=3, rounds=2, leaves=4)))
    assert torch.bincount(batch.group).tolist() == [4, 4, 4]
    batch.reward = torch.arange(12.0).double()
    trees = forest(batch.signals["node"], batch.logp, batch.mask, batch.group)
    inner = ~trees.is_leaf
    assert torch.isin(inner.nonzero().flatten(), trees.parent).all()
    assert torch.isfinite(METHOD.credit(batch, run)).all()


def test_rows_without_actions_are_no_leaves() -> None:
    mask = torch.tensor([[True, True], [False, False], [True, False]])
    trees = forest(fresh_nodes(torch.where(mask, 0, -1)), torch.zeros(3, 2), mask, torch.zeros(3, dtype=torch.int64))
    assert trees.leaf.tolist() == [1, -1, 2]
    batch = Batch(
        action=mask.long(), mask=mask, logp=torch.zeros(3, 2), group=torch.zeros(3, dtype=torch.int64), reward=torch.tensor([1.0, 5.0, 0.0]),
        segment=torch.zeros(3, 2, dtype=torch.int64),
    )  # fmt: skip
    advantage: Tensor = METHOD.credit(batch, None)  # type: ignore[arg-type]
    torch.testing.assert_close(advantage, torch.tensor([[1.0, 1.0], [0.0, 0.0], [-1.0, 0.0]]), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [("rollout.leaves", 0, "at least 1"), ("credit.mode", "mean", "child_softmax"), ("credit.form", "value", "node_value")],
)
def test_settings_out_of_range_are_refused(path: str, value: object, words: str) -> None:
    method = SMALL.set(path, value)
    with pytest.raises(ValueError, match=words):
        run, batch = grown(method)
        batch.reward = torch.zeros(len(batch))
        method.credit(batch, run)


def test_it_trains_and_resumes(tmp_path: Path) -> None:
    assert_trains(SMALL, steps=6)
    assert_resumes(SMALL, tmp_path)


def test_it_trains_on_a_chain() -> None:
    policy, task = make_key_chain(4, 4)
    train(Run(METHOD, policy, task, steps=3))
    assert torch.isfinite(policy.logits).all()
