"""RLOO: leave-one-out against Dr. GRPO and a plain loop, the KL in the reward, and the component in the loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anypo.batch import Batch
from anypo.methods.language import grpo
from anypo.methods.language.rloo import METHOD, LeaveOneOut, rloo, rloo_loss
from tests.helpers import assert_resumes, assert_trains, gradient, random_rows, trained


@settings(max_examples=40, deadline=None)
@given(batch=st.lists(st.tuples(st.floats(-5, 5), st.integers(0, 3)), min_size=1, max_size=12))
def test_the_baseline_leaves_the_row_itself_out(batch: list[tuple[float, int]]) -> None:
    reward, group = torch.tensor([r for r, _ in batch], dtype=torch.float64), torch.tensor([g for _, g in batch])
    found = rloo(reward, group)
    for i, (own, number) in enumerate(batch):
        others = [r for j, (r, g) in enumerate(batch) if g == number and j != i]
        assert float(found[i]) == pytest.approx(own - sum(others) / len(others) if others else 0.0, abs=1e-9)


def test_it_is_dr_grpo_times_g_over_g_minus_one() -> None:
    reward = torch.randn(20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    group = torch.arange(20) % 4
    torch.testing.assert_close(rloo(reward, group), grpo.advantages(reward, group, std=False) * 5 / 4)


def test_the_loss_is_the_sum_over_a_rows_tokens() -> None:
    rows = random_rows(0)
    logp = rows.logp.clone().requires_grad_()
    (found,) = gradient(rloo_loss(logp, rows.mask, rows.advantages), logp)
    torch.testing.assert_close(found, -rows.advantages[:, None] * rows.mask / len(rows.advantages))


def test_wild_padding_and_empty_rows_change_nothing() -> None:
    rows = random_rows(1)
    mask = rows.mask.clone()
    mask[2] = False
    logp = torch.where(mask, rows.logp, float("-inf")).requires_grad_()
    per_token = torch.where(mask, rows.advantages[:, None], float("nan"))
    kept = torch.arange(len(mask)) != 2
    wanted = rloo_loss(rows.logp[kept], mask[kept], rows.advantages[kept])
    for scores in (rows.advantages, per_token):
        result = rloo_loss(logp, mask, scores)
        torch.testing.assert_close(result, wanted)
        (found,) = gradient(result, logp)
        assert torch.isfinite(found).all() and found[~mask].eq(0).all()
    assert rloo_loss(logp, torch.zeros_like(mask), rows.advantages) == 0


def test_the_kl_to_the_reference_is_part_of_the_reward() -> None:
    rows = random_rows(2)
    batch = Batch(
        action=torch.zeros(rows.mask.shape, dtype=torch.int64), mask=rows.mask, logp=rows.old_logp, group=rows.group, reward=rows.reward
    )
    batch.signals["ref_logp"] = rows.ref_logp
    kl = ((rows.old_logp - rows.ref_logp) * rows.mask).sum(1)
    run = trained(METHOD, 0)
    torch.testing.assert_close(LeaveOneOut(beta=0.3)(batch, run), rloo(rows.reward - 0.3 * kl, rows.group)[:, None] * rows.mask)
    assert LeaveOneOut(beta=0.0).needs == frozenset()


def test_the_loop_trains() -> None:
    run = assert_trains(METHOD)
    assert run.history[0]["kl"] == 0 and run.history[-1]["kl"] > 0
    assert not assert_trains(METHOD.set("credit.beta", 0.0)).policies


def test_a_stopped_run_continues_identically(tmp_path: Path) -> None:
    assert_resumes(METHOD, tmp_path)
