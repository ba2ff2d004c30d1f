"""SPO: its gradient and its limits, the symmetry of its objective, and the method with a critic and without."""

from __future__ import annotations

from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from anypo.methods.control import ppo
from anypo.methods.control.spo_simple import FOR_DOMAIN, METHOD, deviation, objective, optimal_ratio, policy_loss
from tests.helpers import assert_resumes, assert_resumes_on_cartpole, assert_trains, gradient, random_rows

LANGUAGE = FOR_DOMAIN["language"]


def per_token(mask: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return torch.randn(mask.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_gradient_in_closed_form_also_outside_the_band() -> None:
    rows = random_rows(0, spread=0.8)
    a, logp = per_token(rows.mask), rows.logp.clone().requires_grad_()
    ratio = (rows.logp - rows.old_logp).exp()
    (found,) = gradient(policy_loss(logp, rows.old_logp, a, rows.mask), logp)
    torch.testing.assert_close(found, -ratio * (a - a.abs() * (ratio - 1) / 0.2) * rows.mask / rows.mask.sum())


def test_a_wide_band_is_the_plain_surrogate_to_first_order() -> None:
    rows = random_rows(1)
    a = per_token(rows.mask)
    ratio = (rows.logp - rows.old_logp).exp()
    plain = -(ratio * a)[rows.mask].mean()
    rest = (a.abs() * (ratio - 1) ** 2)[rows.mask].mean() / 2
    for eps in (10.0, 1e3, 1e6):
        torch.testing.assert_close(policy_loss(rows.logp, rows.old_logp, a, rows.mask, eps).loss - plain, rest / eps, rtol=1e-6, atol=1e-12)


def test_at_ratio_one_it_is_the_policy_gradient_and_ppo() -> None:
    rows = random_rows(2)
    a = per_token(rows.mask)
    one, other = (rows.old_logp.clone().requires_grad_() for _ in range(2))
    mine, theirs = policy_loss(one, rows.old_logp, a, rows.mask), ppo.policy_loss(other, rows.old_logp, a, rows.mask)
    torch.testing.assert_close(mine.loss, theirs.loss)
    torch.testing.assert_close(gradient(mine, one)[0], gradient(theirs, other)[0])
    torch.testing.assert_close(mine.loss, -a[rows.mask].mean())


def test_no_advantage_no_loss() -> None:
    rows = random_rows(3, spread=1.0)
    logp = rows.logp.clone().requires_grad_()
    result = policy_loss(logp, rows.old_logp, torch.zeros_like(logp), rows.mask)
    assert result.loss == 0 and gradient(result, logp)[0].eq(0).all()


@given(st.floats(-0.9, 0.9), st.floats(-5, 5), st.floats(0.05, 1.0))
def test_odd_symmetry_and_the_optimum(x: float, a: float, eps: float) -> None:
    ratio = torch.tensor([1 + x, 1 - x], dtype=torch.float64, requires_grad=True)
    advantage = torch.tensor([a, -a], dtype=torch.float64)
    (slope,) = torch.autograd.grad(objective(ratio, advantage, eps).sum(), ratio)
    torch.testing.assert_close(slope[0], -slope[1])
    best = optimal_ratio(advantage, eps)
    assert (objective(best, advantage, eps) >= objective(ratio.detach(), advantage, eps) - 1e-12).all()
    torch.testing.assert_close(objective(best, advantage, eps), advantage + advantage.abs() * eps / 2)


def test_far_ratios_stay_finite_and_the_mask_holds() -> None:
    rows = random_rows(4)
    a = per_token(rows.mask)
    far = torch.where(rows.mask, rows.old_logp + 500, float("-inf")).requires_grad_()
    result = policy_loss(far, torch.where(rows.mask, rows.old_logp, float("nan")), torch.where(rows.mask, a, float("nan")), rows.mask)
    assert torch.isfinite(result.loss) and torch.isfinite(gradient(result, far)[0]).all()
    wild, nothing = torch.full_like(rows.logp, float("nan")), torch.zeros_like(rows.mask)
    assert policy_loss(wild, wild, wild, nothing).loss == 0 and deviation(wild, wild, nothing).mean_abs == 0


def test_the_language_form_trains_and_continues_identically(tmp_path: Path) -> None:
    run = assert_trains(LANGUAGE, reward=lambda prompt, action, mask: (action[:, 0] == 1).double())
    assert {"ratio_deviation", "fraction_outside"} <= run.history[-1].keys()
    assert_resumes(LANGUAGE, tmp_path)


def test_the_control_form_continues_identically(tmp_path: Path) -> None:
    assert_resumes_on_cartpole(METHOD, tmp_path)
