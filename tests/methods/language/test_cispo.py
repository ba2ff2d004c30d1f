"""CISPO: when its gradient is REINFORCE's, the unclipped surrogate's or GRPO's; every token keeps one."""

from __future__ import annotations

from pathlib import Path

import torch

from anypo.methods.language import grpo
from anypo.methods.language.cispo import METHOD, loss, masked_loss
from tests.helpers import assert_resumes, assert_trains, gradient, random_rows


def test_on_policy_it_is_reinforce_and_grpo() -> None:
    rows = random_rows(0)
    logp, base = (rows.old_logp.clone().requires_grad_() for _ in range(2))
    (found,) = gradient(loss(logp, rows.old_logp, rows.mask, rows.advantages, 1.0, 0.28), logp)
    torch.testing.assert_close(found, -rows.advantages[:, None] * rows.mask / rows.mask.sum())
    (theirs,) = gradient(grpo.loss(base, rows.old_logp, rows.ref_logp, rows.mask, rows.advantages, beta=0.0, agg="token_mean"), base)
    torch.testing.assert_close(found, theirs)


def test_without_bounds_it_is_the_unclipped_surrogate() -> None:
    rows = random_rows(1, spread=0.8)
    logp, base = (rows.logp.clone().requires_grad_() for _ in range(2))
    (found,) = gradient(loss(logp, rows.old_logp, rows.mask, rows.advantages, 1.0, float("inf")), logp)
    surrogate = -((base - rows.old_logp).exp() * rows.advantages[:, None] * rows.mask).sum() / rows.mask.sum()
    torch.testing.assert_close(found, gradient(surrogate, base)[0])


def test_masked_form_has_grpos_gradient() -> None:
    rows = random_rows(2, spread=0.5)
    logp, base = (rows.logp.clone().requires_grad_() for _ in range(2))
    (found,) = gradient(masked_loss(logp, rows.old_logp, rows.mask, rows.advantages, 0.2, 0.28), logp)
    clipped = grpo.loss(base, rows.old_logp, rows.ref_logp, rows.mask, rows.advantages, 0.2, 0.28, beta=0.0, agg="token_mean")
    torch.testing.assert_close(found, gradient(clipped, base)[0])


def test_weights_are_bounded_and_every_token_keeps_a_gradient() -> None:
    rows = random_rows(3, spread=1.5)
    logp = rows.logp.clone().requires_grad_()
    (found,) = gradient(loss(logp, rows.old_logp, rows.mask, rows.advantages, 0.2, 0.28), logp)
    weight = -found * rows.mask.sum() / rows.advantages[:, None]
    assert (weight[rows.mask] >= 0.8 - 1e-12).all() and (weight[rows.mask] <= 1.28 + 1e-12).all()
    assert found[~rows.mask].eq(0).all()


def test_advantages_may_be_given_per_token() -> None:
    rows = random_rows(4)
    per_token = torch.where(rows.mask, rows.advantages[:, None], float("nan"))
    for form in (loss, masked_loss):
        whole = form(rows.logp, rows.old_logp, rows.mask, rows.advantages, 0.2, 0.28).loss
        torch.testing.assert_close(form(rows.logp, rows.old_logp, rows.mask, per_token, 0.2, 0.28).loss, whole)


def test_wild_padding_and_empty_rows_change_nothing() -> None:
    rows = random_rows(5)
    mask = rows.mask.clone()
    mask[2] = False
    logp = torch.where(mask, rows.logp, float("-inf")).requires_grad_()
    old = torch.where(mask, rows.old_logp, float("nan"))
    for form in (loss, masked_loss):
        result = form(logp, old, mask, rows.advantages, 0.2, 0.28)
        (found,) = gradient(result, logp)
        assert torch.isfinite(result.loss) and torch.isfinite(found).all() and found[~mask].eq(0).all()
        assert form(logp, old, torch.zeros_like(mask), rows.advantages, 0.2, 0.28).loss == 0


def test_the_loop_trains_and_logs_truncated_weights() -> None:
    run = assert_trains(METHOD.set("update.epochs", 4).set("update.learning_rate", 8.0))
    assert any(r["truncated_weights"] > 0 for r in run.history)
    assert "clip_fraction" not in run.history[-1]


def test_a_stopped_run_continues_identically(tmp_path: Path) -> None:
    assert_resumes(METHOD, tmp_path)
