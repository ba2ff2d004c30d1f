"""PPO: limits of its losses, the adaptive coefficient, and the method for language models in the loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from anypo.methods.control.ppo import (
    FOR_DOMAIN,
    METHOD,
    AdaptBeta,
    AdaptiveKL,
    beta_update,
    kl_penalty_loss,
    policy_loss,
    total_loss,
    value_loss,
)
from tests.helpers import Rows, assert_resumes, assert_trains, gradient, random_rows

LANGUAGE = FOR_DOMAIN["language"]


def per_token(rows: Rows, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows.mask.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_without_bound_it_is_the_plain_surrogate() -> None:
    rows = random_rows(0, spread=0.6)
    a = per_token(rows)
    wanted = -((rows.logp - rows.old_logp).exp() * a)[rows.mask].mean()
    torch.testing.assert_close(policy_loss(rows.logp, rows.old_logp, a, rows.mask, float("inf")).loss, wanted)
    torch.testing.assert_close(kl_penalty_loss(rows.logp, rows.old_logp, a, torch.rand_like(a), rows.mask, 0.0), wanted)


def test_at_the_first_step_it_is_the_policy_gradient() -> None:
    rows = random_rows(1)
    a = per_token(rows)
    logp = rows.old_logp.clone().requires_grad_()
    result = policy_loss(logp, rows.old_logp, a, rows.mask)
    torch.testing.assert_close(result.loss, -a[rows.mask].mean())
    torch.testing.assert_close(gradient(result, logp)[0], -a * rows.mask / rows.mask.sum())
    assert result.clip_fraction == 0 and result.approx_kl == 0


def test_gradient_by_the_branch_rule() -> None:
    rows = random_rows(2, spread=0.6)
    a = per_token(rows)
    logp = rows.logp.clone().requires_grad_()
    result = policy_loss(logp, rows.old_logp, a, rows.mask, 0.2)
    ratio = (rows.logp - rows.old_logp).exp()
    idle = ((a > 0) & (ratio > 1.2)) | ((a < 0) & (ratio < 0.8))
    torch.testing.assert_close(gradient(result, logp)[0], -ratio * a * ~idle * rows.mask / rows.mask.sum())
    torch.testing.assert_close(result.clip_fraction, ((ratio - 1).abs() > 0.2)[rows.mask].double().mean())


def test_wide_value_clip_is_none_and_a_narrow_one_never_lowers_the_loss() -> None:
    rows = random_rows(3)
    value, old, returns = (per_token(rows, s) for s in range(3))
    plain = value_loss(value, old, returns, rows.mask)
    torch.testing.assert_close(plain, ((value - returns)[rows.mask] ** 2).mean())
    torch.testing.assert_close(value_loss(value, old, returns, rows.mask, float("inf")), plain)
    assert value_loss(value, old, returns, rows.mask, 0.1) >= plain


def test_total_loss_adds_its_parts() -> None:
    rows = random_rows(4)
    a, value, returns, entropy = (per_token(rows, s) for s in range(4))
    found = total_loss(rows.logp, rows.old_logp, a, value, returns, entropy, rows.mask, 0.2, 0.5, 0.01)
    parts = policy_loss(rows.logp, rows.old_logp, a, rows.mask).loss + 0.5 * value_loss(value, value, returns, rows.mask)
    torch.testing.assert_close(found, parts - 0.01 * entropy[rows.mask].mean())


def test_nothing_counted_is_zero() -> None:
    rows = random_rows(5)
    nothing, wild = torch.zeros_like(rows.mask), torch.full_like(rows.logp, float("nan"))
    result = policy_loss(wild, wild, wild, nothing)
    assert result.loss == 0 and result.clip_fraction == 0 and result.approx_kl == 0
    assert value_loss(wild, wild, wild, nothing, 0.2) == 0


@pytest.mark.parametrize(("kl", "wanted"), [(0.0, 0.5), (0.006, 0.5), (0.007, 1.0), (0.01, 1.0), (0.0149, 1.0), (0.016, 2.0)])
def test_beta_follows_the_measured_kl(kl: float, wanted: float) -> None:
    assert beta_update(kl, 1.0, 0.01) == wanted


def test_language_form_trains_policy_and_critic() -> None:
    run = assert_trains(LANGUAGE, reward=lambda prompt, action, mask: (action[:, 0] == 1).double())
    assert run.policy.values.detach().abs().max() > 0  # type: ignore[union-attr,operator]
    assert {"value_loss", "explained_variance", "clip_fraction"} <= run.history[-1].keys()


def test_a_policy_without_a_critic_is_refused_by_name() -> None:
    from anypo.domains.language.toys.token_bandit import TabularTokens, TokenBandit
    from anypo.policy import MissingSignal
    from anypo.run import Run

    class NoCritic(TabularTokens):
        provides = frozenset({"logp", "entropy"})

    with pytest.raises(MissingSignal, match="ppo needs the signal 'value'"):
        Run(LANGUAGE, NoCritic(4, 4, 2), TokenBandit(prompts=4), steps=1)


def test_the_penalty_variant_adapts_its_coefficient() -> None:
    run = assert_trains(LANGUAGE.but(objective=AdaptiveKL(), control=AdaptBeta()))
    assert run.state["ppo.beta"] != 1.0 and "measured_kl" in run.history[-1]


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_stopped_run_continues_identically(adaptive: bool, tmp_path: Path) -> None:
    assert_resumes(LANGUAGE.but(objective=AdaptiveKL(), control=AdaptBeta()) if adaptive else LANGUAGE, tmp_path)


def test_the_control_form_keeps_the_papers_settings() -> None:
    update = METHOD.update
    assert (update.epochs, update.learning_rate, METHOD.objective.clip_low, METHOD.credit.lam) == (10, 3e-4, 0.2, 0.95)  # type: ignore[attr-defined]
