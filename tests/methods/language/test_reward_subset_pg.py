"""Partial policy gradients: the subsets, per-step baselines, odd rows, turns of a batch, and the component in the loop."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.loops.on_policy import train
from anypo.method import Method
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.methods.language.reward_subset_pg import METHOD, VARIANTS, PartialReturn, partial_pg, returns, step_advantages, subset, turns_of
from anypo.methods.language.rloo import METHOD as RLOO
from anypo.run import Run
from anypo.seams.credit import GroupRelative
from tests.helpers import assert_trains, trained

T = 6


def rows(seed: int, count: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    """Dense rewards, a ragged mask of which row 0 is empty, and groups, the last of one member."""
    g = torch.Generator().manual_seed(seed)
    length = torch.randint(0, T + 1, (count,), generator=g)
    length[0], length[1] = 0, T
    group = torch.arange(count) % 2
    group[-1] = 7
    return torch.randn(count, T, generator=g, dtype=torch.float64), torch.arange(T) < length[:, None], group


class Dense(TokenBandit):
    """A reward for every right token, of single-token turns or of turns of two."""

    turn = 0

    def score(self, batch: Batch, run: Run) -> Tensor:
        if self.turn:
            batch.segment = (torch.arange(batch.horizon) // self.turn).expand(batch.mask.shape)
        return (batch.action == self.targets[batch.context, 0]).double()


def trained_dense(method: Method, steps: int = 3, turn: int = 0, horizon: int = T) -> Tensor:
    task = Dense(4, 3, horizon, eos=0)
    task.turn = turn
    policy = task.policy(scale=0.1)
    train(Run(method, policy, task, steps=steps))
    return policy.logits.detach()


def test_subsets_meet_at_their_ends() -> None:
    full, greedy = subset("full", T), subset("greedy", T)
    assert torch.equal(subset("kstep", T, 1), greedy) and torch.equal(greedy, torch.eye(T).bool())
    assert all(torch.equal(subset("kstep", T, k), full) for k in (T, T + 3))
    assert torch.equal(subset("segment", T, segment=torch.zeros(2, T, dtype=torch.int64)), full.expand(2, T, T))
    assert torch.equal(subset("segment", T, segment=torch.arange(T)[None]), greedy[None])
    assert subset("kstep", T, 3).sum(1).tolist() == [3, 3, 3, 3, 2, 1]


def test_no_subset_looks_back() -> None:
    g = torch.Generator().manual_seed(0)
    segment = torch.randint(0, 3, (5, T), generator=g)
    for kind in ("full", "greedy", "kstep", "segment"):
        assert not (subset(kind, T, 2, segment) & torch.ones(T, T, dtype=torch.bool).tril(-1)).any()


def test_what_cannot_be_is_refused() -> None:
    reward, mask, group = rows(0)
    with pytest.raises(ValueError, match="unknown subset"):
        subset("all", T)
    with pytest.raises(ValueError, match="set k"):
        subset("kstep", T)
    with pytest.raises(ValueError, match="needs the segment"):
        subset("segment", T)
    with pytest.raises(ValueError, match="baseline is one of"):
        step_advantages(reward, mask, group, "mean")
    with pytest.raises(ValueError, match="segment_turns"):
        trained(VARIANTS["segment"].set("credit.segment_turns", 0), 1)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), kind=st.sampled_from(["full", "greedy", "kstep", "segment"]), k=st.integers(1, T + 1))
def test_returns_and_baselines_by_hand(seed: int, kind: str, k: int) -> None:
    reward, mask, group = rows(seed)
    segment = torch.randint(0, 2, reward.shape, generator=torch.Generator().manual_seed(seed))
    found = returns(reward, mask, kind, k, segment)
    advantage = step_advantages(found, mask, group, "leave_one_out")
    for i in range(len(reward)):
        for t in range(T):
            counted = {"full": range(t, T), "greedy": [t], "kstep": range(t, min(t + k, T))}.get(kind)
            if counted is None:
                counted = [j for j in range(t, T) if segment[i, j] == segment[i, t]]
            wanted = sum(float(reward[i, j]) for j in counted if mask[i, j]) if mask[i, t] else 0.0
            assert float(found[i, t]) == pytest.approx(wanted, abs=1e-12)
            others = [float(found[j, t]) for j in range(len(reward)) if j != i and group[j] == group[i] and mask[j, t]]
            expected = wanted - sum(others) / len(others) if mask[i, t] and others else 0.0
            assert float(advantage[i, t]) == pytest.approx(expected, abs=1e-12)


def test_one_step_is_the_bandit_for_every_subset() -> None:
    reward, _, group = rows(1)
    one, mask = reward[:, :1], torch.ones(len(reward), 1, dtype=torch.bool)
    for kind in ("full", "greedy", "kstep", "segment"):
        found = partial_pg(one, mask, group, torch.zeros_like(mask, dtype=torch.int64), one, kind, 3)
        assert torch.equal(found.returns, one)
        centred = one[:, 0] - torch.stack([one[group == g, 0].mean() for g in group.tolist()])
        torch.testing.assert_close(found.advantages[:, 0], centred)


def test_padding_may_hold_anything_and_has_no_gradient() -> None:
    reward, mask, group = rows(2)
    logp = torch.randn(reward.shape, dtype=torch.float64)
    dirty = [torch.where(mask, values, torch.nan).requires_grad_(True) for values in (reward, logp)]
    found = partial_pg(dirty[0], mask, group, None, dirty[1])
    clean = partial_pg(reward, mask, group, None, logp)
    assert torch.equal(found.advantages, clean.advantages) and torch.equal(found.loss, clean.loss)
    found.loss.backward()
    assert dirty[0].grad is None and dirty[1].grad is not None
    torch.testing.assert_close(dirty[1].grad, -clean.advantages / int(mask.any(1).sum()))


def test_rewards_after_the_end_count_for_nobody() -> None:
    reward, mask, group = rows(3)
    later = torch.where(mask, reward, reward + 5)
    assert torch.equal(returns(reward, mask), returns(later, mask))


@pytest.mark.parametrize("baseline", ["group", "leave_one_out"])
@pytest.mark.parametrize("scale", ["none", "std"])
def test_lone_members_and_equal_rows_have_no_advantage(baseline: str, scale: str) -> None:
    reward, mask, group = rows(4)
    found = step_advantages(returns(reward, mask), mask, group, baseline, scale)
    assert torch.equal(found[-1], torch.zeros(T, dtype=torch.float64)) and torch.isfinite(found).all()
    assert not step_advantages(torch.full_like(reward, 0.1), mask, group, baseline, scale).any()


@pytest.mark.parametrize("options", [{}, {"eos": 0, "horizon": T, "partial": True}])
@pytest.mark.parametrize("method", [METHOD, *VARIANTS.values()], ids=lambda m: m.name)
def test_one_reward_a_row_is_grpo_without_std(method: Method, options: dict) -> None:
    plain = GRPO.but(credit=GroupRelative(std=False), objective=METHOD.objective, regularize=())
    torch.testing.assert_close(trained(method, 4, **options).policy.logits, trained(plain, 4, **options).policy.logits)


def test_the_others_mean_as_baseline_of_a_row_is_rloo() -> None:
    method = METHOD.set("credit.baseline", "leave_one_out")
    rloo = RLOO.set("credit.beta", 0.0)
    torch.testing.assert_close(trained(method, 4).policy.logits, trained(rloo, 4).policy.logits)


def test_dense_rewards_train_by_action_or_by_turn() -> None:
    by_class = {kind: trained_dense(METHOD.but(credit=PartialReturn(kind=kind))) for kind in ("full", "greedy", "kstep", "segment")}
    assert torch.equal(trained_dense(METHOD.set("credit.k", T)), by_class["full"])
    assert torch.equal(trained_dense(METHOD.set("credit.k", 1)), by_class["greedy"])
    assert torch.equal(trained_dense(METHOD.but(credit=PartialReturn(kind="segment", segment_turns=T))), by_class["full"])
    assert torch.equal(trained_dense(METHOD.but(credit=PartialReturn(kind="segment", segment_turns=1))), by_class["greedy"])
    distinct = [*by_class.values(), trained_dense(METHOD, turn=2)]
    assert not any(torch.equal(a, b) for i, a in enumerate(distinct) for b in distinct[:i])


def chat() -> Batch:
    """Two conversations: two turns of two tokens with an observation between, and one turn; the second turn of row 1 was empty and paid."""
    mask = torch.tensor([[1, 1, 0, 1, 1], [1, 1, 0, 0, 0]]).bool()
    valid = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]).bool()
    return Batch(
        action=torch.zeros(2, 5, dtype=torch.int64), mask=mask, logp=torch.zeros(2, 5), group=torch.zeros(2, dtype=torch.int64), valid=valid,
        segment=torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]]), reward=torch.tensor([3.0, 1.0]),
        signals={"turn_reward": torch.tensor([[1.0, 2, 9], [0, 1, 9]]), "turns": torch.tensor([2, 2])},
    )  # fmt: skip


def test_turns_take_the_tasks_rewards_by_turn_or_those_of_their_tokens() -> None:
    batch = chat()
    turns = turns_of(batch)
    assert turns.alive.tolist() == [[True, True, False], [True, True, False]]
    assert turns.of_token.tolist() == [[0, 0, 0, 1, 1], [0, 0, -1, -1, -1]]
    assert returns(turns.reward, turns.alive).tolist() == [[3, 2, 0], [1, 1, 0]]
    batch.signals.clear()
    plain = turns_of(batch)
    assert plain.reward.tolist() == [[0, 3], [1, 0]] and plain.alive.tolist() == [[True, True], [True, False]]


def test_every_token_of_a_turn_gets_its_advantage_and_observations_none() -> None:
    run = trained(METHOD, 0)
    found = PartialReturn(kind="greedy")(chat(), run)
    assert found.tolist() == [[0.5, 0.5, 0, 0.5, 0.5], [-0.5, -0.5, 0, 0, 0]]


def test_an_empty_batch_of_tokens_is_no_error() -> None:
    empty = torch.zeros(3, 0)
    batch = Batch(empty.long(), empty.bool(), empty, torch.zeros(3, dtype=torch.int64), reward=torch.ones(3))
    assert PartialReturn()(batch, trained(METHOD, 0)).shape == (3, 0)


@pytest.mark.parametrize(
    "method", [METHOD, *VARIANTS.values(), METHOD.but(objective=GRPO.objective)], ids=["kstep", "full", "greedy", "segment", "clip"]
)
def test_the_loop_trains(method: Method) -> None:
    run = assert_trains(method, steps=4, eos=0, horizon=4, partial=True)
    assert all("partial_return" in record for record in run.history)
