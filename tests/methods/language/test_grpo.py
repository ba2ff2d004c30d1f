"""GRPO: what it reduces to, its pitfalls, and the component in the loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from anypo.loops.on_policy import step
from anypo.methods.language.grpo import METHOD, advantages, keep, loss, overlong
from anypo.seams.groups import group_mean
from tests.helpers import assert_resumes, assert_trains, gradient, random_rows, trained


def test_on_policy_it_is_reinforce_with_a_mean_baseline() -> None:
    rows = random_rows(0, ragged=False)
    logp = rows.old_logp.clone().requires_grad_()
    one_group = torch.zeros(len(rows.reward), dtype=torch.int64)
    scores = advantages(rows.reward, one_group, std=False)
    (found,) = gradient(loss(logp, rows.old_logp, rows.ref_logp, rows.mask, scores, beta=0.0, agg="token_mean"), logp)
    (wanted,) = gradient(-((rows.reward - rows.reward.mean())[:, None] * logp).mean(), logp)
    torch.testing.assert_close(found, wanted)


def test_the_three_aggregations_coincide_for_full_rows() -> None:
    rows = random_rows(1, ragged=False)
    values = [
        loss(rows.logp, rows.old_logp, rows.ref_logp, rows.mask, rows.advantages, max_len=rows.mask.shape[1], agg=agg).loss
        for agg in ("token_mean", "seq_mean", "constant")
    ]
    torch.testing.assert_close(values[0], values[1])
    torch.testing.assert_close(values[0], values[2])


def test_groups_of_two_have_advantages_plus_and_minus_one() -> None:
    reward, group = torch.tensor([3.0, 0.2, -1.0, 5.0]).double(), torch.tensor([4, 1, 4, 1])
    assert advantages(reward, group, eps=0.0).tolist() == [1.0, -1.0, -1.0, 1.0]


@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_gradient_in_closed_form(beta: float) -> None:
    rows = random_rows(2, spread=0.5)
    logp = rows.logp.clone().requires_grad_()
    result = loss(logp, rows.old_logp, rows.ref_logp, rows.mask, rows.advantages, 0.2, 0.28, beta, agg="token_mean")
    (found,) = gradient(result, logp)
    ratio = (rows.logp - rows.old_logp).exp()
    a = rows.advantages[:, None]
    active = ~(((a > 0) & (ratio > 1.28)) | ((a < 0) & (ratio < 0.8)))
    per_token = -ratio * a * active + beta * (1 - (rows.ref_logp - rows.logp).exp())
    torch.testing.assert_close(found, per_token * rows.mask / rows.mask.sum())


def test_zero_variance_and_lone_groups_have_no_advantage() -> None:
    reward, group = torch.tensor([0.1, 0.1, 0.1, 5.0]).double(), torch.tensor([0, 0, 0, 1])
    for ddof in (0, 1):
        assert advantages(reward, group, ddof=ddof, eps=0.0).eq(0).all()


def test_fully_masked_rows_and_wild_padding_change_nothing() -> None:
    rows = random_rows(3)
    mask = rows.mask.clone()
    mask[2] = False
    kept = torch.tensor([i for i in range(len(mask)) if i != 2])
    wild = [torch.where(mask, x, torch.tensor(bad, dtype=torch.float64)) for x, bad in
            ((rows.logp, float("-inf")), (rows.old_logp, float("nan")), (rows.ref_logp, float("inf")))]  # fmt: skip
    for agg in ("token_mean", "seq_mean", "constant"):
        logp, less = wild[0].clone().requires_grad_(), rows.logp[kept].clone().requires_grad_()
        with_row = loss(logp, wild[1], wild[2], mask, rows.advantages, max_len=5, agg=agg)
        without = loss(less, rows.old_logp[kept], rows.ref_logp[kept], mask[kept], rows.advantages[kept], max_len=5, agg=agg)
        torch.testing.assert_close(with_row.loss, without.loss)
        (found,), (wanted,) = gradient(with_row, logp), gradient(without, less)
        torch.testing.assert_close(found[kept], wanted)
        assert found[2].eq(0).all()


def test_dual_clip_above_every_ratio_changes_nothing() -> None:
    rows = random_rows(4)
    args = (rows.logp, rows.old_logp, rows.ref_logp, rows.mask, rows.advantages)
    assert loss(*args, dual_clip=1e6).loss == loss(*args).loss


def test_overlong_penalty_grows_over_the_buffer() -> None:
    found = overlong(torch.tensor([0, 80, 90, 100, 101, 500]), max_len=100, buffer=20)
    assert found.tolist() == [0.0, 0.0, -0.5, -1.0, -1.0, -1.0]


def test_keep_needs_contrast_in_the_group() -> None:
    assert keep(torch.tensor([1.0, 0, 1, 1, 0, 0]), torch.tensor([2, 7, 2, 7, 5, 5])).tolist() == [0, 1, 0, 1, 0, 0]


def test_the_loop_trains_and_advantages_carry_no_gradient() -> None:
    run = assert_trains(METHOD)
    batch = step(run)
    assert batch.advantage is not None and not batch.advantage.requires_grad
    assert group_mean(batch.advantage[:, 0], batch.group).abs().max() < 1e-12
    assert "kl" in run.history[-1]


def test_groups_of_one_are_refused() -> None:
    with pytest.raises(ValueError, match="group_size to 2 or more"):
        trained(METHOD.set("select.group_size", 1), 1)


def test_a_stopped_run_continues_identically(tmp_path: Path) -> None:
    assert_resumes(METHOD, tmp_path)
