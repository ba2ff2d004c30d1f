"""BPO and GBPO: the bang-bang solution and its limits, gradients against PPO's, medians, and both forms in the loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anypo.methods.control import ppo
from anypo.methods.control.bpo_bounded import FOR_DOMAIN, METHOD, MedianCentred, gbpo, group_median, loss, target_ratio
from anypo.seams.credit import GAE
from tests.helpers import assert_resumes, assert_resumes_on_cartpole, assert_trains, gradient, random_rows, trained_on_cartpole

LANGUAGE = FOR_DOMAIN["language"]


def per_token(mask: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return torch.randn(mask.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_at_ratio_one_it_is_reinforce() -> None:
    rows = random_rows(0)
    a, logp = per_token(rows.mask), rows.old_logp.clone().requires_grad_()
    result = loss(logp, rows.old_logp, a, a, rows.mask, 0.2)
    torch.testing.assert_close(result.loss, 0.2 * a.abs()[rows.mask].mean())
    torch.testing.assert_close(gradient(result, logp)[0], -a * rows.mask / rows.mask.sum())


def test_inside_the_band_it_has_ppos_gradient_and_beyond_it_pulls_back() -> None:
    rows = random_rows(1, spread=0.6)
    a = per_token(rows.mask)
    ratio = (rows.logp - rows.old_logp).exp()
    one, other = (rows.logp.clone().requires_grad_() for _ in range(2))
    (mine,) = gradient(loss(one, rows.old_logp, a, a, rows.mask, 0.2), one)
    (theirs,) = gradient(ppo.policy_loss(other, rows.old_logp, a, rows.mask, 0.2), other)
    inside = ((ratio - 1).abs() < 0.2) & rows.mask
    torch.testing.assert_close(mine[inside], theirs[inside])
    beyond = rows.mask & (((a > 0) & (ratio > 1.2)) | ((a < 0) & (ratio < 0.8)))
    assert beyond.any() and theirs[beyond].eq(0).all()
    torch.testing.assert_close(mine[beyond], (ratio * a)[beyond] / rows.mask.sum())


@given(st.integers(0, 10**6), st.floats(0.05, 0.9))
def test_an_elite_band_keeps_the_best_share(seed: int, share: float) -> None:
    g = torch.Generator().manual_seed(seed)
    prob, q = torch.rand(7, generator=g, dtype=torch.float64).softmax(0), torch.randn(7, generator=g, dtype=torch.float64)
    found = target_ratio(prob, q, 0.0, 1 / share)
    torch.testing.assert_close((prob * found.ratio).sum(), torch.ones((), dtype=torch.float64))
    kept = found.ratio == 1 / share
    assert (prob * kept).sum() <= share + 1e-9 and (q[kept] > found.threshold).all() and found.ratio[q < found.threshold].eq(0).all()


@given(st.integers(0, 10**6), st.booleans(), st.floats(0.0, 0.9), st.floats(1.1, 4.0))
def test_ratios_stay_in_the_band_keep_the_mass_and_gain(seed: int, ties: bool, low: float, high: float) -> None:
    g = torch.Generator().manual_seed(seed)
    prob, q = torch.rand(3, 5, generator=g, dtype=torch.float64).softmax(-1), torch.randn(3, 5, generator=g, dtype=torch.float64)
    found = target_ratio(prob, q.round() if ties else q, low, high)
    torch.testing.assert_close((prob * found.ratio).sum(-1), torch.ones(3, dtype=torch.float64))
    assert (found.ratio >= low - 1e-9).all() and (found.ratio <= high + 1e-9).all() and (found.gain >= -1e-12).all()


def test_group_medians_of_odd_and_even_groups_in_any_order() -> None:
    values, group = torch.tensor([3.0, 10.0, 1.0, 2.0, 20.0, 7.0]), torch.tensor([5, 2, 5, 5, 2, 9])
    assert group_median(values, group).tolist() == [2.0, 15.0, 2.0, 2.0, 15.0, 7.0]


def test_no_spread_no_loss_and_the_median_is_held_in_place() -> None:
    rows = random_rows(2)
    flat = gbpo(torch.ones(8, dtype=torch.float64), rows.group)
    assert flat.advantages.eq(0).all() and flat.median_advantages.eq(0).all()
    assert loss(rows.logp, rows.old_logp, *flat, rows.mask).loss == 0
    held = loss(rows.logp, rows.old_logp, torch.ones(8, dtype=torch.float64), torch.zeros(8, dtype=torch.float64), rows.mask).loss
    torch.testing.assert_close(held, ((rows.logp - rows.old_logp).exp() - 1).abs()[rows.mask].mean())


def test_advantages_carry_no_gradient_and_padding_changes_nothing() -> None:
    rows = random_rows(3)
    a = per_token(rows.mask).requires_grad_()
    wild = [torch.where(rows.mask, x, float("nan")) for x in (rows.logp, rows.old_logp, a)]
    logp = wild[0].clone().requires_grad_()
    result = loss(logp, wild[1], wild[2], wild[2], rows.mask)
    torch.testing.assert_close(result.loss, loss(rows.logp, rows.old_logp, a, a, rows.mask).loss)
    found = torch.autograd.grad(result.loss, (logp, a), allow_unused=True)
    assert torch.isfinite(found[0]).all() and found[0][~rows.mask].eq(0).all() and found[1] is None
    assert loss(*wild[:2], wild[2], wild[2], torch.zeros_like(rows.mask)).loss == 0


def test_the_language_form_uses_the_groups_median_and_continues_identically(tmp_path: Path) -> None:
    run = assert_trains(LANGUAGE, reward=lambda prompt, action, mask: (action[:, 0] == 1).double())
    assert "clip_fraction" in run.history[-1]
    assert_resumes(LANGUAGE, tmp_path)


def test_the_control_form_with_either_median_continues_identically(tmp_path: Path) -> None:
    assert_resumes_on_cartpole(METHOD, tmp_path / "mean")
    assert_resumes_on_cartpole(METHOD.but(credit=MedianCentred(GAE(), by="batch")), tmp_path / "median")


def test_an_unknown_median_is_refused() -> None:
    with pytest.raises(ValueError, match="group or batch"):
        trained_on_cartpole(METHOD.but(credit=MedianCentred(GAE(), by="turn")), 1)
