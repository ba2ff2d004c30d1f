"""GSPO: when it is GRPO, when its two forms are one, and rows without tokens."""

from __future__ import annotations

from pathlib import Path

import torch

from anypo.methods.language import grpo
from anypo.methods.language.gspo import METHOD, SequenceClip, loss, loss_token, ratio
from tests.helpers import assert_resumes, assert_trains, gradient, random_rows

CLIP = {"clip_low": 0.05, "clip_high": 0.08}


def test_rows_of_one_token_are_grpo() -> None:
    rows = random_rows(0, horizon=1)
    mine, theirs = (rows.logp.clone().requires_grad_() for _ in range(2))
    own = loss(mine, rows.old_logp, rows.mask, rows.advantages, **CLIP)
    base = grpo.loss(theirs, rows.old_logp, rows.ref_logp, rows.mask, rows.advantages, **CLIP, beta=0.0)
    torch.testing.assert_close(own.loss, base.loss)
    torch.testing.assert_close(gradient(own, mine), gradient(base, theirs))


def test_token_form_with_equal_advantages_is_the_sequence_form() -> None:
    rows = random_rows(1, spread=0.1)
    mine, theirs = (rows.logp.clone().requires_grad_() for _ in range(2))
    whole = loss(mine, rows.old_logp, rows.mask, rows.advantages, **CLIP)
    tokens = loss_token(theirs, rows.old_logp, rows.mask, rows.advantages[:, None].expand(rows.mask.shape), **CLIP)
    torch.testing.assert_close(whole.loss, tokens.loss)
    torch.testing.assert_close(gradient(whole, mine), gradient(tokens, theirs))


def test_tokens_that_share_a_log_ratio_have_it_as_the_sequence_ratio() -> None:
    rows = random_rows(2)
    shared = torch.linspace(-1, 1, len(rows.reward), dtype=torch.float64)
    torch.testing.assert_close(ratio(rows.old_logp + shared[:, None], rows.old_logp, rows.mask), shared.exp())


def test_gradient_in_closed_form() -> None:
    rows = random_rows(3, spread=0.1)
    logp = rows.logp.clone().requires_grad_()
    (found,) = gradient(loss(logp, rows.old_logp, rows.mask, rows.advantages, **CLIP), logp)
    s, a = ratio(rows.logp, rows.old_logp, rows.mask), rows.advantages
    active = ~(((a > 0) & (s > 1.08)) | ((a < 0) & (s < 0.95)))
    assert active.any() and not active.all()
    wanted = -(active * s * a / len(a) / rows.mask.sum(1))[:, None] * rows.mask
    torch.testing.assert_close(found, wanted)


def test_rows_without_tokens_have_ratio_one_and_count_for_nothing() -> None:
    rows = random_rows(4)
    mask = rows.mask.clone()
    mask[3] = False
    logp = torch.where(mask, rows.logp, float("-inf")).requires_grad_()
    assert ratio(logp, rows.old_logp, mask)[3] == 1
    kept = torch.arange(len(mask)) != 3
    for form, scores in ((loss, rows.advantages), (loss_token, rows.advantages[:, None] * mask)):
        with_row = form(logp, rows.old_logp, mask, scores, **CLIP)
        torch.testing.assert_close(with_row.loss, form(rows.logp[kept], rows.old_logp[kept], mask[kept], scores[kept], **CLIP).loss)
        (found,) = gradient(with_row, logp)
        assert torch.isfinite(found).all() and found[3].eq(0).all()
    nothing = torch.zeros_like(mask)
    assert loss(rows.logp, rows.old_logp, nothing, rows.advantages, **CLIP).loss == 0


def test_padding_is_in_neither_sum() -> None:
    rows = random_rows(5)
    longer = [torch.cat([x, torch.full((len(x), 3), 7.0 + i)], dim=1) for i, x in enumerate((rows.logp, rows.old_logp))]
    mask = torch.cat([rows.mask, torch.zeros(len(rows.mask), 3, dtype=torch.bool)], dim=1)
    torch.testing.assert_close(ratio(*longer, mask), ratio(rows.logp, rows.old_logp, rows.mask))


def test_the_clip_fraction_counts_responses() -> None:
    run = assert_trains(METHOD.but(objective=SequenceClip(0.05, 0.08)).set("update.epochs", 4).set("update.learning_rate", 8.0))
    assert any(r["clip_fraction"] > 0 for r in run.history)


def test_a_stopped_run_continues_identically(tmp_path: Path) -> None:
    assert_resumes(METHOD, tmp_path)
