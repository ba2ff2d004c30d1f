"""CBPO: what it reduces to, how the budget is spent, how advantages are cut and rescaled, and the component in the loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anypo.batch import Batch
from anypo.domains.language.toys.gru_policy import GruPolicy
from anypo.domains.language.toys.key_chain import make_key_chain
from anypo.domains.language.toys.toy_arith import ToyArith
from anypo.loops.on_policy import train
from anypo.method import Method
from anypo.methods.language import grpo
from anypo.methods.language.cbpo import METHOD, BranchAllocation, advantages, allocate, cbv, priority, rescaled, vocabulary_of
from anypo.run import Run
from anypo.seams.groups import broadcast
from tests.helpers import assert_resumes, assert_trains, random_rows

SMALL = METHOD.but(rollout=BranchAllocation(total=12, window=2, distance=1)).set("select.group_size", 5)


def grown(method: Method = SMALL, prompts: int = 3, steps: int = 6, seed: int = 0) -> tuple[Run, Batch]:
    policy, task = make_key_chain(prompts, steps, seed=seed)
    with torch.no_grad():
        policy.logits[:, 3] = 0  # an uncertain step, so that there is something to branch from
    run = Run(method, policy, task, steps=1, seed=seed)
    batch = method.rollout(method.select(task, run), run)
    batch.reward = torch.randint(2, (len(batch),), generator=torch.Generator().manual_seed(seed)).double()
    return run, batch


def scripted(seed: int, rows: int = 5, horizon: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    entropy = torch.rand(rows, horizon, generator=g, dtype=torch.float64)
    return entropy, torch.arange(horizon) < torch.randint(1, horizon + 1, (rows, 1), generator=g)


def test_without_candidates_it_is_grpo() -> None:
    method = SMALL.set("rollout.threshold", 1.0)
    run, batch = grown(method)
    assert batch.parent is not None and batch.parent.eq(-1).all() and torch.bincount(batch.group).tolist() == [12, 12, 12]
    assert run.actions == 3 * 12 * 6
    assert torch.equal(method.credit(batch, run), broadcast(grpo.advantages(batch.reward, batch.group), batch.mask))
    assert torch.equal(batch.counted, batch.mask)


def test_two_runs_with_all_slots_independent_train_alike() -> None:
    """The same rows as GRPO's give the same gradient: only the order in which they are drawn differs."""
    method = SMALL.set("rollout.threshold", 1.0)
    run, batch = grown(method)
    batch.advantage = method.credit(batch, run)
    theirs = grpo.METHOD.credit(batch, run)
    assert torch.equal(batch.advantage, theirs)


def test_no_strength_leaves_the_segments() -> None:
    run, batch = grown()
    assert batch.parent is not None and batch.branch_at is not None and batch.parent.ge(0).any()
    plain = advantages(batch.reward, batch.group, batch.mask, batch.parent, batch.branch_at, eta=0.0)
    base = grpo.advantages(batch.reward, batch.group)
    branch = batch.parent >= 0
    torch.testing.assert_close(plain.advantage[branch], base[branch, None] * plain.mask[branch])


def test_equal_values_change_nothing() -> None:
    reward, group = torch.tensor([1.0, 0.0, 0.0, 1.0]).double(), torch.zeros(4, dtype=torch.int64)
    parent, node = torch.tensor([-1, -1, 0, 1]), torch.tensor([-1, -1, 2, 1])
    assert cbv(reward, parent, node).cbv.tolist() == [0.5, 0.5] and cbv(reward, parent, node).z.tolist() == [0, 0]
    mask = torch.ones(4, 4, dtype=torch.bool)
    strong, none = (advantages(reward, group, mask, parent, node, eta).advantage for eta in (1.9, 0.0))
    assert torch.equal(strong, none)


def test_one_node_cuts_a_parent_in_two() -> None:
    reward, group = torch.tensor([1.0, 0.0, 0.0, 1.0]).double(), torch.zeros(4, dtype=torch.int64)
    found = advantages(reward, group, torch.ones(4, 5), torch.tensor([-1, -1, 0, 0]), torch.tensor([-1, -1, 2, 2]))
    base = grpo.advantages(reward, group)
    shared = (base[0] + base[2] + base[3]) / 3
    torch.testing.assert_close(found.advantage[0], torch.cat([shared.expand(2), base[:1].expand(3)]))  # one node has no spread: Z = 0
    torch.testing.assert_close(found.advantage[1], base[1].expand(5))
    torch.testing.assert_close(found.advantage[2], torch.cat([torch.zeros(2), base[2:3].expand(3)]).double())
    assert found.mask.int().tolist() == [[1] * 5, [1] * 5, [0, 0, 1, 1, 1], [0, 0, 1, 1, 1]]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(-3, 3), st.floats(-5, 5)), min_size=1, max_size=20), st.floats(0, 1.99))
def test_the_sign_stays_and_the_factor_is_bounded(pairs: list[tuple[float, float]], eta: float) -> None:
    base, z = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    found = rescaled(base, z, eta, 2.0)
    assert torch.equal(found.sign(), base.sign())
    assert ((found - base).abs() <= eta / 2 * base.abs() + 1e-12).all()


def test_every_shared_token_is_trained_once() -> None:
    run, batch = grown()
    SMALL.credit(batch, run)
    assert batch.parent is not None and batch.branch_at is not None and batch.keep is not None
    for i in (batch.parent >= 0).nonzero().flatten().tolist():
        shared = int(batch.branch_at[i])
        assert torch.equal(batch.action[i, :shared], batch.action[batch.parent[i], :shared])
        assert not batch.keep[i, :shared].any() and batch.keep[i, shared:].all()
        assert batch.keep[batch.parent[i]].all()


def test_the_budget_is_spent_whole_and_counted() -> None:
    run, batch = grown()
    assert torch.bincount(batch.group).tolist() == [12, 12, 12]
    assert batch.parent is not None and batch.branch_at is not None
    new = 6 - torch.where(batch.parent >= 0, batch.branch_at, 0)
    assert run.actions == run.task.environment_steps == int(new.sum())  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", range(6))
def test_no_node_and_no_path_gets_more_than_its_share(seed: int) -> None:
    entropy, mask = scripted(seed)
    found = allocate(entropy, mask, 40, W=2, d_min=1, B_node=2, B_path=3, J_max=2, kappa=0.0)
    nodes = {tuple(b) for b in found.branches}
    assert len(found.branches) + found.independent == 40
    assert all(found.branches.count(list(n)) <= 2 for n in nodes)
    for i in range(5):
        assert sum(b[0] == i for b in found.branches) <= 3 and len({n for n in nodes if n[0] == i}) <= 2
    assert all(0 < b < int(mask[i].sum()) for i, b in nodes)


def test_equals_go_to_the_first_path_and_position() -> None:
    found = allocate(torch.full((3, 4), 0.5).double(), torch.ones(3, 4), 4, W=2, d_min=1, alpha=0.5)
    assert found.branches == [[0, 1], [1, 1], [2, 1], [0, 2]]


def test_only_written_tokens_are_scanned() -> None:
    entropy = torch.tensor([[0.1, 9.0, 0.3, 9.0, 0.5, 9.0]]).double()
    mask = torch.tensor([[1, 0, 1, 0, 1, 0]])
    dirty = torch.where(mask.bool(), entropy, torch.nan)
    assert priority(dirty, mask, 2, 1) == priority(torch.tensor([[0.1, 0.3, 0.5]]).double(), torch.ones(1, 3), 2, 1)
    assert priority(entropy, torch.zeros(1, 6), 2, 1) == [[]]


def test_a_short_window_at_the_end_is_a_mean() -> None:
    ((_, last),) = priority(torch.tensor([[0.0, 0.0, 0.4]]).double(), torch.ones(1, 3), W=2, d_min=2)[0]
    assert last == pytest.approx(0.2 + 2 * 0.4)


def test_positions_count_in_written_tokens() -> None:
    batch = Batch(action=torch.zeros(1, 6), mask=torch.tensor([[1, 0, 1, 0, 1, 0]]).bool(), logp=torch.zeros(1, 6), group=torch.zeros(1))
    assert [BranchAllocation().place(batch, 0, b) for b in range(3)] == [0, 2, 4]
    batch.segment = torch.tensor([[0, 0, 0, 1, 1, 1]])
    assert [BranchAllocation().place(batch, 0, b) for b in range(3)] == [0, 0, 3]


def test_advantages_carry_no_gradient_and_padding_is_harmless() -> None:
    rows = random_rows(1)
    nobody = torch.full((8,), -1)
    found = advantages(rows.reward, rows.group, rows.mask, nobody, nobody)
    assert torch.equal(found.advantage, broadcast(grpo.advantages(rows.reward, rows.group), rows.mask))
    assert not found.advantage.requires_grad and found.advantage[~rows.mask].eq(0).all()
    nothing = advantages(rows.reward, rows.group, torch.zeros(8, 5), nobody, nobody)
    assert not nothing.mask.any() and nothing.advantage.eq(0).all()


def test_a_row_of_advantage_zero_stays_zero() -> None:
    assert rescaled(torch.zeros(3), torch.tensor([-5.0, 0.0, 5.0])).tolist() == [0, 0, 0]


@pytest.mark.parametrize(("path", "value", "words"), [("credit.eta", 2.0, "eta < phi"), ("rollout.distance", 0, "at least 1")])
def test_settings_out_of_range_are_refused(path: str, value: object, words: str) -> None:
    method = SMALL.set(path, value)
    with pytest.raises(ValueError, match=words):
        run, batch = grown(method)
        method.credit(batch, run)


def test_a_policy_without_a_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="vocabulary"):
        vocabulary_of(object())


def test_it_trains_and_resumes(tmp_path: Path) -> None:
    assert_trains(SMALL, steps=6)
    assert_resumes(SMALL, tmp_path)


def test_it_trains_on_text() -> None:
    policy, task = GruPolicy(hidden=8), ToyArith(small=True)
    run = train(Run(SMALL.set("select.prompts", 4).set("rollout.offset", 0.5), policy, task, steps=2))
    assert all(torch.isfinite(p).all() for p in policy.parameters())
    assert sum(record["branches"] for record in run.history) > 0
