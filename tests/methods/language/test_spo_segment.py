"""SPO, chain and tree: what they reduce to, boundaries, trees of responses, and the components in the loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from anypo.batch import Batch
from anypo.domains.language.toys.key_chain import make_key_chain
from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.loops.on_policy import train
from anypo.method import Method
from anypo.methods.language import grpo
from anypo.methods.language.spo_segment import (
    METHOD,
    TREE,
    chain_advantages,
    loss,
    nodes_of,
    partition,
    segment_differences,
    tree,
    unlikely,
)
from anypo.run import Run
from anypo.seams.groups import masked_mean
from anypo.seams.objective import clipped, token_ratio
from tests.helpers import assert_resumes, assert_trains, random_rows


def rolled(method: Method, horizon: int = 4, **options: object) -> tuple[Run, Batch]:
    task = TokenBandit(3, 3, horizon, **options)  # type: ignore[arg-type]
    run = Run(method, task.policy(scale=0.5), task, steps=1)
    batch = method.rollout(method.select(task, run), run)
    batch.reward = method.reward(batch, run)
    batch.advantage = method.credit(batch, run)
    return run, batch


def test_one_segment_is_reinforce_with_a_baseline() -> None:
    rows = random_rows(0)
    value = torch.rand(8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mine = chain_advantages(rows.old_logp, rows.mask, rows.reward, value, threshold=1.01, interval=100)
    torch.testing.assert_close(mine, (rows.reward - value[:, 0])[:, None] * rows.mask, atol=0, rtol=0)


def test_a_boundary_before_every_token_is_a_value_for_every_token() -> None:
    rows = random_rows(1)
    value = torch.rand(8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    after = value[:, 1:].clone()
    last = rows.mask.sum(1) - 1
    after[torch.arange(8), last] = rows.reward
    mine = chain_advantages(rows.old_logp, rows.mask, rows.reward, value, threshold=1.01, interval=1)
    torch.testing.assert_close(mine, (after - value[:, :-1]) * rows.mask, atol=0, rtol=0)


def test_a_tree_of_depth_one_is_grpo() -> None:
    reward = torch.randn(6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = tree(torch.tensor([-1] + [0] * 6), torch.cat([reward.new_zeros(1), reward]), torch.tensor([0] + [1] * 6), "grpo")
    torch.testing.assert_close(
        found.advantage[1:], grpo.advantages(reward, torch.zeros(6, dtype=torch.int64), eps=1e-8), atol=1e-12, rtol=0
    )


def test_a_threshold_above_one_keeps_the_mask() -> None:
    rows = random_rows(2)
    assert torch.equal(unlikely(torch.zeros_like(rows.old_logp), rows.mask, 1.01), rows.mask)
    advantage = rows.advantages[:, None] * rows.mask
    plain = -masked_mean(clipped(token_ratio(rows.logp, rows.old_logp, rows.mask), advantage, 0.8, 1.2), rows.mask)
    assert torch.equal(loss(rows.logp, rows.old_logp, advantage, rows.mask, threshold=1.01), plain)


def test_segments_add_up() -> None:
    rows = random_rows(3, horizon=9)
    value = torch.rand(8, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    boundary, segment = partition(rows.old_logp, rows.mask, 0.7, 2)
    difference = segment_differences(boundary, rows.mask, rows.reward, value)
    some = boundary.any(1)
    total = (difference * boundary[:, :-1]).sum(1)[some]
    first = value.gather(1, boundary.argmax(1)[:, None])[:, 0]
    torch.testing.assert_close(total, (rows.reward - first)[some], atol=1e-12, rtol=0)
    assert difference[segment <= 0].eq(0).all() and boundary[:, -1].eq(0).all()


def test_the_cut_is_before_the_unlikely_token() -> None:
    probability = torch.tensor([[0.99, 0.5, 0.99, 0.4, 0.3, 0.99]])
    boundary, segment = partition(probability.log(), torch.ones(1, 6), 0.9, 2)
    assert boundary.tolist() == [[0, 1, 0, 0, 1, 0, 0]] and segment.tolist() == [[0, 1, 1, 1, 2, 2]]


def test_padding_may_hold_anything() -> None:
    old = torch.tensor([[-1.0, -0.5, float("nan")], [-2.0, float("-inf"), 0.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    mine = chain_advantages(old, mask, torch.tensor([1.0, 0.0]), torch.zeros(2, 4), 0.9, 1)
    assert mine.tolist() == [[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    assert torch.isfinite(loss(old, old, mine, mask)) and loss(old, old, mine, torch.zeros_like(mask)) == 0


def test_values_come_from_endings_of_each_beginning() -> None:
    """With many endings the estimates are the exact success probabilities; those of equal beginnings are one estimate."""
    method = METHOD.set("rollout.interval", 1).set("rollout.rollouts", 3000).but(regularize=())
    run, batch = rolled(method, horizon=3)
    target = run.task.targets[batch.context, 0]  # type: ignore[attr-defined]
    p = run.policy.logits.detach().softmax(-1)[batch.context].gather(2, target[..., None])[..., 0]
    ahead = p.flip(1).cumprod(1).flip(1)
    intact = torch.cat([torch.ones_like(p[:, :1]), (batch.action == target).double().cumprod(1)[:, :-1]], dim=1)
    kept = batch.signals["boundary"][:, :-1].bool()
    assert ((batch.signals["boundary_value"][:, :-1] - ahead * intact)[kept]).abs().max() < 0.05
    first = batch.signals["boundary_value"][:, 0]
    assert all(len(torch.unique(first[batch.group == g])) == 1 for g in range(3))
    assert len(batch) == 24  # the endings are not trained
    assert batch.keep is not None and torch.equal(batch.keep, unlikely(batch.logp, batch.mask, 0.9))


def test_whitening_is_over_the_kept_tokens() -> None:
    run, batch = rolled(METHOD.set("credit.whiten", True).set("rollout.interval", 1))
    assert batch.advantage is not None and batch.keep is not None
    kept = batch.advantage[batch.keep]
    assert abs(float(kept.mean())) < 1e-9 and abs(float(kept.std(correction=0)) - 1) < 1e-5
    batch.keep = torch.zeros_like(batch.mask)
    assert torch.isfinite(METHOD.set("credit.whiten", True).credit(batch, run)).all()


def test_nodes_of_a_small_tree() -> None:
    """Two prompts; the first with two responses of which the first branches once behind its first segment, the second with one ended early."""
    segment = torch.tensor([[0, 0, 1, 1], [0, 0, 1, -1], [0, -1, -1, -1], [0, 0, 1, 1], [0, 0, 1, 1]])
    parent, branch_at = torch.tensor([-1, -1, -1, -1, 0]), torch.tensor([0, 0, 0, 0, 2])
    group = torch.tensor([4, 4, 6, 6, 4])
    nodes = nodes_of(group, parent, branch_at, segment)
    reward = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0])
    found = tree(nodes.parent, reward[nodes.leaf_row], nodes.is_leaf, "rloo")
    assert int(nodes.is_leaf.sum()) == 5
    assert nodes.edge[4, :2].tolist() == [-1, -1]  # the shared segment belongs to row 0
    advantage = torch.where(nodes.edge >= 0, found.advantage[nodes.edge.clamp(min=0)], 0.0)
    assert found.value[:2].tolist() == [0.25, 0.5]  # prompt 4: mean of 0.5 (row 0's first segment) and 0; prompt 6: of 1 and 0
    assert advantage.tolist() == [
        [0.25, 0.25, 0.5, 0.5],
        [-0.25, -0.25, 0.0, 0.0],
        [0.5, 0.0, 0.0, 0.0],
        [-0.5, -0.5, 0.0, 0.0],
        [0.0, 0.0, -0.5, -0.5],
    ]


def test_the_tree_has_as_many_leaves_as_asked_and_owns_every_segment_once() -> None:
    run, batch = rolled(TREE.set("rollout.segment_length", 1).set("rollout.branches", (3, 2)).set("select.group_size", 2), horizon=4)
    assert len(batch) == 3 * 2 * 3 * 2
    assert batch.parent is not None and batch.branch_at is not None and batch.segment is not None
    own = int((torch.arange(4) >= torch.where(batch.parent >= 0, batch.branch_at, 0)[:, None]).sum())
    assert run.actions == own == 3 * (2 + 6 + 12 * 2)  # segments of one token; the last runs to the end
    nodes = nodes_of(batch.group, batch.parent, batch.branch_at, batch.segment)
    assert int((nodes.parent >= 0).sum()) == 3 * (2 + 6 + 12) and int(nodes.is_leaf.sum()) == 36
    children = torch.bincount(nodes.parent[nodes.parent >= 0])
    assert set(children.tolist()) <= {0, 2, 3} and children[:3].tolist() == [2, 2, 2]


def test_responses_that_end_early_are_not_branched() -> None:
    _, batch = rolled(TREE.set("rollout.segment_length", 1).set("rollout.branches", (3,)), horizon=4, eos=0)
    assert batch.parent is not None
    short = (batch.lengths == 1) & (batch.parent < 0)
    assert short.any() and not torch.isin(batch.parent[batch.parent >= 0], short.nonzero().flatten()).any()


def test_trained_tokens_are_own_unlikely_and_of_edges_with_an_advantage() -> None:
    _, batch = rolled(TREE.set("rollout.segment_length", 1).set("rollout.branches", (3, 2)), horizon=4)
    assert batch.keep is not None and batch.branch_at is not None and batch.advantage is not None and batch.keep.any()
    assert not batch.keep[torch.arange(4) < batch.branch_at[:, None]].any()
    assert batch.advantage[batch.keep].abs().min() > 0 and batch.advantage[~batch.keep].eq(0).all()


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="rloo or grpo"):
        tree(torch.tensor([-1]), torch.zeros(1), torch.ones(1), "best")


@pytest.mark.parametrize("method", [METHOD, TREE], ids=["chain", "tree"])
def test_they_train_and_resume(method: Method, tmp_path: Path) -> None:
    assert_trains(method, steps=6)
    assert_resumes(method, tmp_path)


@pytest.mark.parametrize("method", [METHOD, TREE], ids=["chain", "tree"])
def test_they_train_on_a_chain(method: Method) -> None:
    policy, task = make_key_chain(4, 4)
    train(Run(method, policy, task, steps=2))
    assert torch.isfinite(policy.logits).all()
