"""DPPO: what its loss and credit reduce to, its clip and its early end, cloning, and the method in the loop."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anypo.domains.control import point_avoid
from anypo.domains.control.replay import Recording, write
from anypo.domains.control.setup import build
from anypo.domains.diffusion.denoise import ddim_mean, ddim_std
from anypo.loops.on_policy import step, train
from anypo.method import Method
from anypo.methods.control.ppo import METHOD as PPO
from anypo.methods.control.ppo import policy_loss
from anypo.methods.diffusion.dppo import METHOD, DenoisingSteps, clip_schedule, denoise_advantage, logp, loss, mean, schedule
from anypo.policy import MissingSignal
from anypo.run import Run
from anypo.seams.credit import GAE, GroupRelative
from anypo.seams.objective import ClippedSurrogate
from anypo.seams.select import UniformPrompts

QUICK = METHOD.set("prepare.0.steps", 20).set("update.minibatches", 4)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def started(method: Method, steps: int, out: Path | None = None, env: str = point_avoid.NAME, **options: Any) -> Run:
    small = {"envs": 4, "horizon": 6, "hidden": (8, 8), "denoising_steps": 4, "fine_tuned_steps": 3, "action_chunk": 2} | options
    policy, task = build(env, None, needs={"denoising_chain"}, seed=0, **small)
    return Run(method, policy, task, steps=steps, seed=0, out=out, checkpoint_every=2)


def trained(method: Method, steps: int, out: Path | None = None, **options: Any) -> Run:
    run = started(method, steps, out, **options)
    if out is not None:
        run.resume()
    return train(run)


def test_one_trained_step_is_ppo_with_a_gaussian_around_the_denoisers_output() -> None:
    action, mu, mu_old, adv = numbers(7, 2), 0.02 * numbers(7, 2, seed=1), 0.02 * numbers(7, 2, seed=2), numbers(7, seed=3)
    new, old = (logp(action, centre, 0.0, 0.5, -1e9, 1e9)[:, None] for centre in (mu, mu_old))
    gaussian = [torch.distributions.Normal(centre, 0.5).log_prob(action).mean(-1, keepdim=True) for centre in (mu, mu_old)]
    torch.testing.assert_close(new, gaussian[0])
    wanted = policy_loss(*gaussian, adv[:, None], torch.ones(7, 1, dtype=torch.bool), 0.01).loss
    torch.testing.assert_close(loss(new, old, adv, 0.9, 0.01, 0.001, 3.0), wanted)


def test_without_discount_and_with_one_band_it_is_ppo_over_all_steps() -> None:
    new, old, adv = 0.1 * numbers(5, 4), 0.1 * numbers(5, 4, seed=1), numbers(5, seed=2)
    wanted = policy_loss(new, old, adv[:, None].expand(5, 4), torch.ones(5, 4, dtype=torch.bool), 0.05).loss
    torch.testing.assert_close(loss(new, old, adv, 1.0, 0.05, 0.05, 3.0), wanted)
    torch.testing.assert_close(loss(old, old, adv, 1.0, 0.05, 0.01, 3.0), -adv.mean())


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 20), st.floats(0.01, 0.3), st.floats(0.0001, 0.01), st.floats(0.5, 5.0))
def test_the_clip_widens_towards_the_last_step(steps: int, eps: float, eps_base: float, rate: float) -> None:
    bound = clip_schedule(steps, eps, eps_base, rate)
    assert float(bound[-1]) == pytest.approx(eps) and bool((bound.diff() >= -1e-15).all())
    assert steps == 1 or float(bound[0]) == pytest.approx(eps_base)


def test_advantages_shrink_towards_the_noisy_steps() -> None:
    torch.testing.assert_close(denoise_advantage(torch.tensor([2.0]), 3, 0.5), torch.tensor([[0.5, 1.0, 2.0]]))
    torch.testing.assert_close(denoise_advantage(numbers(4), 3, 1.0), numbers(4)[:, None].expand(4, 3))


def test_a_step_is_the_ancestral_ddim_step_where_nothing_is_clipped() -> None:
    beta, abar, std = schedule(8)
    x0, eps = 0.1 * numbers(5, 3), numbers(5, 3, seed=1)
    for k in range(1, 8):
        noisy = abar[k].sqrt() * x0 + (1 - abar[k]).sqrt() * eps
        wanted = ddim_std(abar[k], abar[k - 1], 1.0)
        torch.testing.assert_close(std[k], wanted)
        torch.testing.assert_close(mean(noisy, eps, abar[k], abar[k - 1], beta[k]).mu, ddim_mean(noisy, eps, abar[k], abar[k - 1], wanted))
    assert std[0] == 0 and abar[0] < 1


def test_a_bounded_likelihood_has_no_gradient_outside_its_bounds() -> None:
    mu = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(logp(torch.tensor([[0.05, 9.0]], dtype=torch.float64), mu, 0.1, 0.1).sum(), mu)
    assert gradient[0, 0] != 0 and gradient[0, 1] == 0


def test_the_credit_is_gae_over_decisions_discounted_for_each_step() -> None:
    run = started(QUICK.set("credit.gamma_den", 0.8), 1)
    batch = step(run)
    assert batch.advantage is not None and batch.reward is not None and batch.next_value is not None
    last, outer = slice(2, None, 3), batch[:]
    for name in ("mask", "advantage", "reward", "next_value", "terminated", "truncated", "logp", "action", "context"):
        setattr(outer, name, getattr(outer, name)[:, last])
    outer.signals = {name: value[:, last] if value.dim() > 1 else value for name, value in batch.signals.items()}
    wanted = GAE(0.99, 0.95)(outer, run)
    torch.testing.assert_close(outer.advantage, wanted)
    torch.testing.assert_close(batch.advantage[:, ::3], 0.8**2 * wanted)
    torch.testing.assert_close(batch.signals["returns"][:, ::3], outer.signals["returns"])


def test_replayed_chains_have_ratio_1_and_groups_may_take_the_critics_place() -> None:
    run = trained(QUICK.set("update.epochs", 1).set("update.minibatches", 1), 1)
    assert run.history[0]["clip_fraction"] == 0 and run.history[0]["approx_kl"] == 0
    grouped = QUICK.but(credit=GroupRelative(), regularize=(), select=UniformPrompts(prompts=2, group_size=2))
    batch = step(started(grouped, 1))
    assert len(batch) == 4 and batch.mask.shape[1] % 3 == 0 and "old_value" not in batch.signals


def test_a_run_clones_once_trains_and_resumes(tmp_path: Path) -> None:
    whole = trained(QUICK, 4, tmp_path / "whole")
    trained(QUICK, 2, tmp_path / "halves")
    halves = trained(QUICK, 4, tmp_path / "halves")
    for mine, theirs in zip(whole.policy.state_dict().values(), halves.policy.state_dict().values(), strict=True):
        assert torch.isfinite(mine).all() and torch.equal(mine, theirs)
    assert [r["loss"] for r in whole.history] == [r["loss"] for r in halves.history]
    assert "cloning_loss" in whole.history[0] and "cloning_loss" not in whole.history[1] and bool(whole.policy.pretrained)
    assert {"clip_fraction", "approx_kl", "value_loss", "explained_variance"} <= whole.history[-1].keys()
    frozen, tuned = (next(n.parameters()) for n in (whole.policy.pretrained_network, whole.policy.actor_network))
    assert not torch.equal(frozen, tuned)


def test_a_pretrained_policy_is_not_cloned_again(tmp_path: Path) -> None:
    run = trained(QUICK, 1)
    run.policy.save_pretrained(tmp_path)
    policy, task = build(point_avoid.NAME, str(tmp_path), envs=4, horizon=6, action_chunk=2)
    again = Run(QUICK, policy, task, steps=1)
    again.begin_step()
    for mine, theirs in zip(policy.parameters(), run.policy.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_without_demonstrations_it_says_what_to_do_and_recorded_steps_will_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Pendulum-v1 brings none.*--option data=FILE.*prepare\.0\.steps=0"):
        started(QUICK, 1, env="Pendulum-v1").begin_step()
    assert math.isfinite(trained(QUICK.set("prepare.0.steps", 0), 1, env="Pendulum-v1").history[0]["loss"])
    rng = np.random.default_rng(0)
    seen = rng.standard_normal((20, 3)).astype(np.float32)
    ends = np.arange(20) % 10 == 9
    recording = Recording(seen, rng.uniform(-2, 2, (20, 1)).astype(np.float32), np.zeros(20, np.float32), seen, np.zeros(20, bool), ends)
    write(tmp_path / "shown.npz", recording)
    run = started(QUICK, 1, env="Pendulum-v1", data=str(tmp_path / "shown.npz"))
    run.begin_step()
    assert bool(run.policy.pretrained)


def test_the_batch_is_left_once_the_policy_moved_too_far() -> None:
    assert DenoisingSteps(target_kl=0.5).enough({"approx_kl": 0.6}) and not DenoisingSteps(target_kl=0.5).enough({"approx_kl": 0.4})
    assert not DenoisingSteps(target_kl=None).enough({"approx_kl": 9.0})
    run = trained(QUICK.set("update.target_kl", -1.0), 1)  # every step is too far
    assert run.version == 1


def test_steps_of_ppo_serve_on_denoising_steps_and_other_policies_are_refused() -> None:
    plain = QUICK.but(credit=GAE(), objective=ClippedSurrogate(aggregation="token_mean"))
    assert math.isfinite(trained(plain, 2).history[-1]["loss"])
    policy, task = build("Pendulum-v1", None, envs=2, horizon=4)
    with pytest.raises(MissingSignal, match="denoising_chain"):
        Run(METHOD, policy, task, steps=1)
    chains = started(PPO.set("update.minibatches", 2), 1)  # a chain as one action, its likelihood that of all its steps
    assert math.isfinite(train(chains).history[-1]["loss"])
