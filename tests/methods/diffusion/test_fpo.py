"""FPO: what its ratio and losses reduce to, where gradients flow, and the method in the loop."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from anypo import catalogue
from anypo.domains.control.setup import build
from anypo.loops.on_policy import train
from anypo.method import Method
from anypo.methods.control.ppo import policy_loss
from anypo.methods.diffusion.fpo import METHOD, FlowPlusPlus, cfm_loss, fpopp_loss, loss, ratio
from anypo.policy import MissingSignal
from anypo.run import Run


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def trained(method: Method, steps: int, out: Path | None = None) -> Run:
    needs = {n.removeprefix("old_") for n in method.needs()}
    policy, task = build("Pendulum-v1", None, needs=needs, seed=0, envs=4, horizon=16, hidden=(8, 8))
    run = Run(method, policy, task, steps=steps, seed=0, out=out, checkpoint_every=2)
    if out is not None:
        run.resume()
    return train(run)


def test_on_policy_the_ratio_is_1_and_the_loss_minus_the_mean_advantage() -> None:
    old, adv = numbers(5, 3).abs(), numbers(5, seed=1)
    assert torch.equal(ratio(old, old), torch.ones(5, dtype=torch.float64))
    torch.testing.assert_close(loss(old, old, adv), -adv.mean())


def test_at_pure_noise_the_ratio_is_that_of_gaussians_of_variance_one_half() -> None:
    action, eps, mu, mu_old = numbers(6, 2), numbers(6, 4, 2, seed=1), 0.3 * numbers(6, 2, seed=2), 0.3 * numbers(6, 2, seed=3)
    s = torch.ones(6, 4, dtype=torch.float64)
    new, old = (cfm_loss(action, eps, s, eps - centre[:, None], reduce="sum") for centre in (mu, mu_old))
    densities = [torch.distributions.Normal(centre, math.sqrt(0.5)).log_prob(action).sum(-1) for centre in (mu, mu_old)]
    torch.testing.assert_close(ratio(old, new), (densities[0] - densities[1]).exp())
    adv, mask = numbers(6, seed=4), torch.ones(6, 1, dtype=torch.bool)
    wanted = policy_loss(densities[0][:, None], densities[1][:, None], adv[:, None], mask, 0.05).loss
    torch.testing.assert_close(loss(old, new, adv, 0.05), wanted)


def test_supervision_as_noise_is_the_velocity_loss_times_the_squared_share_of_data() -> None:
    action, eps, s, vel = numbers(4, 3), numbers(4, 5, 3, seed=1), torch.rand(4, 5, dtype=torch.float64), numbers(4, 5, 3, seed=2)
    for reduce in ("mean", "sum", "sqrt"):
        wanted = (1 - s) ** 2 * cfm_loss(action, eps, s, vel, "v", reduce)
        torch.testing.assert_close(cfm_loss(action, eps, s, vel, "eps", reduce), wanted)
    with pytest.raises(ValueError, match="use v or eps"):
        cfm_loss(action, eps, s, vel, "x0")
    with pytest.raises(ValueError, match="mean, sum or sqrt"):
        cfm_loss(action, eps, s, vel, reduce="max")


def test_the_perfect_field_has_no_loss() -> None:
    action, eps, s = numbers(4, 3), numbers(4, 5, 3, seed=1), torch.rand(4, 5, dtype=torch.float64)
    assert cfm_loss(action, eps, s, eps - action[:, None]).abs().max() == 0


def test_plus_plus_with_one_pair_and_no_clamps_is_fpo_where_advantages_are_positive() -> None:
    old, new, adv = numbers(20, 1).abs(), numbers(20, 1, seed=1).abs(), numbers(20, seed=2).abs()
    torch.testing.assert_close(fpopp_loss(old, new, adv, 0.05, 1e9, 1e9, 1e9), loss(old, new, adv, 0.05))


def test_the_gradient_at_the_old_policy_is_advantage_weighted_flow_matching() -> None:
    old, adv = numbers(5, 3).abs(), numbers(5, seed=1)
    new = old.clone().requires_grad_()
    (found,) = torch.autograd.grad(loss(old, new, adv), new)
    torch.testing.assert_close(found, (adv / (5 * 3))[:, None].expand(5, 3))
    (found,) = torch.autograd.grad(fpopp_loss(old, new, adv, 0.05, 1e9, 1e9, 1e9), new)
    torch.testing.assert_close(found, (adv / (5 * 3))[:, None].expand(5, 3))


def test_the_held_exponent_keeps_its_gradient_and_cut_losses_have_none() -> None:
    old, adv = torch.full((1, 1), 3.0, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    new = torch.full((1, 1), 0.5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.grad(fpopp_loss(old, new, adv, 10.0, 9.0, 9.0, 1.0), new)[0].item() == pytest.approx(math.e)
    far = torch.full((1, 1), 5.0, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.grad(fpopp_loss(old, far, -adv, 0.05, 9.0, 4.0, 1.0), far)[0].item() == 0


def test_actions_that_do_not_count_change_nothing() -> None:
    old, new, adv = numbers(2, 3, 4).abs(), numbers(2, 3, 4, seed=1).abs(), numbers(2, 3, seed=2)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    wild = torch.where(mask[..., None], new, torch.full_like(new, 1e6))
    for function in (loss, fpopp_loss):
        torch.testing.assert_close(function(old, wild, adv, mask=mask), function(old[mask], new[mask], adv[mask]))
        assert function(old, wild, adv, mask=torch.zeros_like(mask)) == 0


def test_a_run_learns_resumes_and_draws_its_pairs_anew_each_step(tmp_path: Path) -> None:
    whole = trained(METHOD, 4, tmp_path / "whole")
    trained(METHOD, 2, tmp_path / "halves")
    halves = trained(METHOD, 4, tmp_path / "halves")
    start = trained(METHOD, 0)
    for mine, theirs in zip(whole.policy.parameters(), halves.policy.parameters(), strict=True):
        assert torch.isfinite(mine).all() and torch.equal(mine, theirs)
    assert not torch.equal(next(whole.policy.parameters()), next(start.policy.parameters()))
    assert [r["loss"] for r in whole.history] == [r["loss"] for r in halves.history]
    assert {"flow_loss", "clip_fraction", "approx_kl", "value_loss"} <= whole.history[-1].keys()
    first, second = (METHOD.rollout(METHOD.select(whole.task, whole), whole).signals["flow_noise"] for _ in range(2))
    assert first.shape == (4, 16, 8, 1) and not torch.equal(first, second)


def test_the_first_minibatch_finds_every_ratio_at_1() -> None:
    run = trained(METHOD.set("update.epochs", 1).set("update.minibatches", 1), 1)
    assert run.history[0]["clip_fraction"] == 0 and abs(run.history[0]["approx_kl"]) < 1e-7


def test_plus_plus_trains_and_groups_may_take_the_critics_place() -> None:
    from anypo.seams.credit import GroupRelative
    from anypo.seams.select import UniformPrompts

    assert math.isfinite(trained(METHOD.but(objective=FlowPlusPlus()), 2).history[-1]["loss"])
    grouped = METHOD.but(credit=GroupRelative(), regularize=(), select=UniformPrompts(prompts=2, group_size=2))
    assert math.isfinite(trained(grouped, 1).history[-1]["loss"])


def test_policies_without_a_flow_and_objectives_on_likelihoods_are_refused_by_name() -> None:
    policy, task = build("Pendulum-v1", None, envs=2, horizon=4)
    with pytest.raises(MissingSignal, match="flow_velocity"):
        Run(METHOD, policy, task, steps=1)
    policy, task = build("Pendulum-v1", None, needs={"flow_velocity"}, envs=2, horizon=4)
    ppo = catalogue.get("ppo")
    assert isinstance(ppo, Method)
    with pytest.raises(MissingSignal, match="logp"):
        Run(METHOD.but(objective=ppo.objective), policy, task, steps=1)
    with pytest.raises(ValueError, match=r"rollout\.draws"):
        trained(METHOD.set("rollout.draws", 0), 1)
