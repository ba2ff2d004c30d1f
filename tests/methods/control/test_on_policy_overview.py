"""The on-policy family: what its members reduce to, V-MPO's weights and duals, whole episodes, and all five in the loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from anypo.methods.control import ppo
from anypo.methods.control.on_policy_overview import (
    ALGORITHMS,
    METHOD,
    better_half,
    discounted_returns,
    gaussian_kl_parts,
    nstep_advantages,
    policy_gradient_loss,
    reinforce_loss,
    vmpo,
)
from anypo.seams.credit import gae
from tests.helpers import assert_resumes_on_cartpole, gradient, random_rows, trained_on_cartpole


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_a2c_over_whole_episodes_without_a_critic_is_reinforce() -> None:
    logp, reward, nothing, whole = numbers(3, 6, seed=1), numbers(3, 6), torch.zeros(3, 6, dtype=torch.float64), torch.ones(3, 6)
    found = nstep_advantages(reward, nothing, torch.zeros(3, dtype=torch.float64), nothing, 0.9, 6)
    wanted = reinforce_loss(logp, reward, whole, 0.9)
    torch.testing.assert_close(found, wanted.returns)
    torch.testing.assert_close(policy_gradient_loss(logp, found, whole), wanted.loss)


def test_one_epoch_of_ppo_has_the_gradient_of_a2c() -> None:
    rows = random_rows(0)
    a = numbers(*rows.mask.shape)
    one, other = (rows.old_logp.clone().requires_grad_() for _ in range(2))
    torch.testing.assert_close(
        gradient(ppo.policy_loss(one, rows.old_logp, a, rows.mask), one), gradient(policy_gradient_loss(other, a, rows.mask), other)
    )


@pytest.mark.parametrize(("n", "lam"), [(1, 0.0), (100, 1.0)])
def test_short_and_long_windows_are_the_ends_of_gae(n: int, lam: float) -> None:
    reward, value, following = (numbers(4, 7, seed=s) for s in range(3))
    terminated, truncated = numbers(4, 7, seed=3) > 1.2, numbers(4, 7, seed=4) > 1.2
    mask = torch.arange(7) < torch.tensor([7, 5, 2, 0])[:, None]
    inside = mask[:, 1:] & ~(terminated | truncated)[:, :-1]
    following[:, :-1] = torch.where(inside, value[:, 1:], following[:, :-1])  # inside an episode what follows is the next state
    found = nstep_advantages(reward, value, None, terminated, 0.9, n, truncated, following, mask)
    wanted = gae(reward, value, terminated, truncated & ~terminated, mask, 0.9, lam, next_value=following)
    torch.testing.assert_close(found, wanted.advantages)


def test_returns_do_not_cross_the_end_of_an_episode() -> None:
    reward = numbers(1, 4)
    ended = torch.tensor([[0, 1, 0, 0]])
    found = discounted_returns(reward, torch.ones(1, 4), 0.5, ended)
    torch.testing.assert_close(found[0, 0], reward[0, 0] + 0.5 * reward[0, 1])


def test_a_constant_baseline_is_subtracted_inside_the_mask_only() -> None:
    rows = random_rows(1)
    reward = torch.where(rows.mask, numbers(*rows.mask.shape), float("nan"))
    found = reinforce_loss(torch.where(rows.mask, rows.logp, float("-inf")), reward, rows.mask, 0.9, "batch_mean")
    centred = found.returns[rows.mask] - found.returns[rows.mask].mean()
    torch.testing.assert_close(found.loss, -(rows.logp[rows.mask] * centred).mean())
    with pytest.raises(ValueError, match="none or batch_mean"):
        reinforce_loss(rows.logp, rows.logp, rows.mask, 0.9, "median")


def test_a_hot_temperature_weighs_the_better_half_evenly() -> None:
    rows = random_rows(2)
    a = numbers(*rows.mask.shape)
    half = better_half(a, rows.mask)
    assert half.sum() == (rows.mask.sum() + 1) // 2 and not (half & ~rows.mask).any()
    assert a[half].min() >= a[rows.mask & ~half].max()
    found = vmpo(rows.logp, a, rows.mask, torch.zeros_like(a), eta=1e12)
    torch.testing.assert_close(found.policy, -rows.logp[half].mean())


def test_with_all_samples_in_the_half_it_is_the_mean_log_probability() -> None:
    """A second copy of the samples with far worse advantages puts the whole first copy into the better half."""
    rows = random_rows(3)
    a = numbers(*rows.mask.shape)
    both = [torch.cat([x, y]) for x, y in ((rows.logp, rows.logp), (a, a - 100), (rows.mask, rows.mask))]
    found = vmpo(*both, torch.zeros(len(both[0]), rows.mask.shape[1], dtype=torch.float64), eta=1e12)
    torch.testing.assert_close(found.policy, -rows.logp[rows.mask].mean())


def test_gradients_of_the_duals_and_of_the_trust_region() -> None:
    rows = random_rows(4)
    a, kl = numbers(*rows.mask.shape), numbers(*rows.mask.shape, seed=1).abs().requires_grad_()
    eta, alpha = torch.tensor([0.7, 3.0], dtype=torch.float64).requires_grad_().unbind()
    found = vmpo(rows.logp, a, rows.mask, kl, eta, 0.05, alpha, 0.01)
    torch.testing.assert_close(torch.autograd.grad(found.temperature, eta, retain_graph=True)[0], found.temperature_grad)
    by_alpha, by_kl = torch.autograd.grad(found.trust, (alpha, kl))
    torch.testing.assert_close(by_alpha, 0.01 - kl[rows.mask].mean())
    torch.testing.assert_close(by_alpha, found.alpha_grad)
    torch.testing.assert_close(by_kl, 3.0 * rows.mask.double() / rows.mask.sum())


def test_one_sample_or_none() -> None:
    mask = torch.zeros(2, 3, dtype=torch.bool)
    wild = torch.full((2, 3), float("nan"), dtype=torch.float64)
    nothing = vmpo(wild, wild, mask, wild)
    assert all(torch.isfinite(x).all() and x.eq(0).all() for x in nothing)
    mask[0, 1] = True
    logp, a, kl = (torch.where(mask, 0.3, wild) for _ in range(3))
    one = vmpo(logp, a, mask, kl)
    assert one.weights[0, 1] == 1 and one.weights.sum() == 1
    torch.testing.assert_close(one.policy, torch.tensor(-0.3, dtype=torch.float64))


def test_the_two_parts_of_a_gaussian_kl_are_the_whole_where_only_one_moves() -> None:
    from anypo.seams.regularize import gaussian_kl

    old, new, first, second = numbers(3, 2), numbers(3, 2, seed=1), numbers(3, 2, seed=2).exp(), numbers(3, 2, seed=3).exp()
    torch.testing.assert_close(gaussian_kl_parts(old, first, new, first).mean, gaussian_kl(old, first.log(), new, first.log()))
    torch.testing.assert_close(gaussian_kl_parts(old, first, old, second).cov, gaussian_kl(old, first.log(), old, second.log()))


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_all_five_run_in_the_same_loop_and_continue_identically(name: str, tmp_path: Path) -> None:
    assert_resumes_on_cartpole(ALGORITHMS[name], tmp_path)


def test_reinforce_sees_whole_episodes_and_the_duals_move_and_stay_positive() -> None:
    run = trained_on_cartpole(ALGORITHMS["reinforce"], 2)
    assert run.history[-1]["episodes"] == 8
    run = trained_on_cartpole(METHOD.set("update.dual_learning_rate", 5.0), 2)
    eta, alpha = run.state["vmpo.duals"]
    assert eta >= 1e-8 and alpha >= 1e-8 and (eta, alpha) != (1.0, 5.0)
