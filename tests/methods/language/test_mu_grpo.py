"""Mu-GRPO: reductions to stale GRPO, the veto, the stages, checkpoints and training."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.domains.language.toys.toy_arith import make_toy_arith
from anypo.loops.on_policy import step, train
from anypo.methods.language import grpo
from anypo.methods.language.mu_grpo import METHOD, StagedRollout, loss, speedup, veto
from anypo.run import Run
from anypo.seams.objective import ClippedSurrogate
from anypo.seams.rollout import BEHAVIOUR
from tests.helpers import assert_resumes, assert_trains, gradient, random_rows

NEVER = {"v_low": 0.0, "v_high": math.inf}


def one_row(ratios: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """(logp, old_logp) [1,T] with these ratios."""
    row = torch.tensor([ratios], dtype=torch.float64)
    return row.log() - 3, torch.full_like(row, -3.0)


def assert_is_grpo(rows: object, low: float, high: float, **bounds: float) -> None:
    """Loss and gradient are those of GRPO with the same clip, token mean, no KL."""
    logp = rows.logp.detach().requires_grad_()
    ours = loss(logp, rows.old_logp, rows.mask, rows.advantages, low, high, **bounds)
    plain = grpo.loss(logp, rows.old_logp, rows.ref_logp, rows.mask, rows.advantages, low, high, beta=0.0, agg="token_mean")
    torch.testing.assert_close(ours.loss, plain.loss)
    torch.testing.assert_close(gradient(ours, logp), gradient(plain, logp))


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.5, 2.0)])
def test_without_a_veto_it_is_stale_grpo(low: float, high: float) -> None:
    assert_is_grpo(random_rows(spread=0.8), low, high, **NEVER)


def test_positive_advantages_are_never_vetoed() -> None:
    rows = random_rows(spread=2.0)
    rows.advantages = rows.advantages.abs()
    found = veto(rows.logp, rows.old_logp, rows.mask, rows.advantages)
    assert (found.trigger == -1).all() and (found.veto == 1).all()
    assert_is_grpo(rows, 0.5, 2.0)


def test_on_policy_nothing_triggers() -> None:
    rows = random_rows()
    rows.old_logp = rows.logp.clone()
    assert (veto(rows.logp, rows.old_logp, rows.mask, rows.advantages).trigger == -1).all()
    assert_is_grpo(rows, 0.5, 2.0)


def test_the_first_trigger_counts_even_if_later_ratios_return() -> None:
    logp, old = one_row([1.0, 2.5, 1.0, 0.1, 1.0])
    found = veto(logp, old, torch.ones(1, 5), torch.tensor([-1.0]))
    assert found.trigger.tolist() == [1] and found.veto.tolist() == [[1, 1, 0, 0, 0]]
    one_sided = veto(logp, old, torch.ones(1, 5), torch.tensor([-1.0]), v_low=0.0, v_high=3.0)
    assert one_sided.trigger.tolist() == [-1]
    assert veto(logp, old, torch.ones(1, 5), torch.tensor([0.0])).trigger.tolist() == [-1]


def test_only_valid_tokens_trigger() -> None:
    logp, old = one_row([9.0, 1.0, 9.0, 1.0])
    mask = torch.tensor([[0, 1, 0, 1]])
    assert veto(logp, old, mask, torch.tensor([-1.0])).trigger.tolist() == [-1]


def test_vetoed_tokens_stay_in_the_denominator_and_get_no_gradient() -> None:
    logp, old = one_row([1.0, 2.5, 1.0, 1.0])
    logp.requires_grad_()
    found = gradient(loss(logp, old, torch.ones(1, 4), torch.tensor([-1.0], dtype=torch.float64)), logp)[0]
    torch.testing.assert_close(found, torch.tensor([[0.25, 2.5 / 4, 0.0, 0.0]], dtype=torch.float64))


def test_per_token_advantages() -> None:
    """A token whose own advantage is not negative neither triggers nor is vetoed; equal ones in a row are the row's."""
    logp, old = one_row([9.0, 9.0, 1.0, 1.0])
    found = veto(logp, old, torch.ones(1, 4), torch.tensor([[1.0, -1.0, -1.0, 1.0]]))
    assert found.trigger.tolist() == [1] and found.veto.tolist() == [[1, 1, 0, 1]]
    rows = random_rows(spread=1.0)
    by_token = rows.advantages[:, None].expand_as(rows.logp)
    for a, b in zip(
        veto(rows.logp, rows.old_logp, rows.mask, by_token), veto(rows.logp, rows.old_logp, rows.mask, rows.advantages), strict=True
    ):
        assert torch.equal(a, b)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), spread=st.floats(0.0, 3.0))
def test_the_veto_is_a_suffix_of_negative_rows(seed: int, spread: float) -> None:
    rows = random_rows(seed, spread=spread)
    found = veto(rows.logp, rows.old_logp, rows.mask, rows.advantages)
    assert (found.veto.diff(dim=1) <= 0).all() and (found.veto[:, 0] == 1).all()
    ratio = (rows.logp - rows.old_logp).exp()
    for i, t in enumerate(found.trigger.tolist()):
        outside = ((ratio[i] > 2) | (ratio[i] < 0.5)) & rows.mask[i]
        assert t == (int(outside.nonzero()[0]) if rows.advantages[i] < 0 and outside.any() else -1)
        assert found.veto[i].sum() == (t + 1 if t >= 0 else rows.logp.shape[1])


def test_padding_may_hold_anything_and_empty_rows_count_for_nothing() -> None:
    rows = random_rows(spread=0.8)
    rows.mask[2] = False
    clean = rows.logp.detach().requires_grad_()
    logp = rows.logp.masked_fill(~rows.mask, -math.inf).requires_grad_()
    advantages = rows.advantages.requires_grad_()
    value = loss(logp, rows.old_logp.masked_fill(~rows.mask, math.nan), rows.mask, advantages)
    expected = gradient(loss(clean, rows.old_logp, rows.mask, rows.advantages), clean)[0]
    torch.testing.assert_close(gradient(value, logp)[0], expected)
    assert loss(logp, rows.old_logp, torch.zeros_like(rows.mask), rows.advantages).loss == 0


def test_speedup() -> None:
    assert speedup(256, 256) == 1 and speedup(256, 0) == 2 and speedup(100, 4, 0.0) == 1


def test_stages_are_written_by_frozen_policies() -> None:
    task = TokenBandit()
    policy = task.policy()
    run = Run(METHOD.set("rollout.stages", 2).set("update.learning_rate", 50.0), policy, task, steps=6)
    held = []
    for i in range(6):
        before = policy.logits.detach().clone()
        batch = step(run)
        held.append(int(batch.version[0]))
        assert torch.equal(run.named_policy(BEHAVIOUR).logits, before) == (i in (0, 3))
    assert held == [0, 0, 0, 3, 3, 3]
    assert [r["stage"] for r in run.history] == [0, 0, 0, 1, 1, 1] and [r["lag"] for r in run.history] == [0, 1, 2, 0, 1, 2]
    assert run.history[0]["vetoed"] == run.history[3]["vetoed"] == 0


def test_stages_follow_a_budget_of_actions() -> None:
    task = TokenBandit()
    run = train(Run(METHOD.set("rollout.stages", 2), task.policy(), task, steps=1000, max_actions=8 * 256))
    assert [r["stage"] for r in run.history] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_a_stage_a_step_is_on_policy_grpo() -> None:
    def logits(method: object) -> torch.Tensor:
        task = TokenBandit()
        return train(Run(method.set("update.learning_rate", 50.0), task.policy(), task, steps=4)).policy.logits

    plain = grpo.METHOD.but(regularize=(), objective=ClippedSurrogate(aggregation="token_mean"))
    torch.testing.assert_close(logits(METHOD.set("rollout.stages", 4)), logits(plain))


def test_stages_must_be_positive() -> None:
    task = TokenBandit()
    with pytest.raises(ValueError, match="at least 1"):
        step(Run(METHOD.but(rollout=StagedRollout(stages=0)), task.policy(), task, steps=1))


def test_it_trains_and_resumes(tmp_path: Path) -> None:
    assert_trains(METHOD.set("rollout.stages", 2))
    assert_resumes(METHOD, tmp_path)


def test_a_stage_goes_on_after_a_resume(tmp_path: Path) -> None:
    def run_of(out: Path | None, upto: int) -> Run:
        policy, task = make_toy_arith(target=0.05)
        run = Run(METHOD.set("rollout.stages", 2), policy, task, steps=6, out=out, checkpoint_every=2)
        if out is not None:
            run.resume()
        while run.step < upto:
            step(run)
        return run

    whole = run_of(None, 6)
    run_of(tmp_path, 2)
    halves = run_of(tmp_path, 6)
    assert all(torch.equal(a, b) for a, b in zip(whole.policy.parameters(), halves.policy.parameters(), strict=True))
    assert [r["lag"] for r in halves.history] == [0, 1, 2, 0, 1, 2]
