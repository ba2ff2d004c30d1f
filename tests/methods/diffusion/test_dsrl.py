"""DSRL: what steering reduces to, that the frozen map is only called, recorded steps without noise, and both forms in the loop."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from anypo import catalogue
from anypo.domains.control import forked_goal
from anypo.domains.control.replay import write
from anypo.domains.control.saved import load
from anypo.domains.control.setup import build
from anypo.domains.control.soft import squash
from anypo.domains.diffusion.steering import SteeredPolicy
from anypo.loops.off_policy import step, train
from anypo.method import Method
from anypo.methods.control.sac import METHOD as SAC
from anypo.methods.control.sac import q_target, temperature_loss
from anypo.methods.diffusion.dsrl import METHOD, VARIANTS, alpha_step, distill_loss, noise_policy, steer, td_na, td_sac
from anypo.policy import MissingSignal
from anypo.run import Run

NA = VARIANTS["na"]


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def quick(method: Method) -> Method:
    method = method.set("prepare.0.steps", 20).set("rollout.batch_size", 16).set("rollout.steps", 8)
    return method.set("rollout.warmup", 12).set("rollout.updates_per_action", 0.5)


def started(method: Method, steps: int, out: Path | None = None, env: str = forked_goal.NAME, **options: Any) -> Run:
    policy, task = build(env, None, needs=method.needs(), seed=0, **({"hidden": (8, 8), "sampling_steps": 3} | options))
    return Run(quick(method), policy, task, steps=steps, seed=0, out=out, checkpoint_every=2)


def trained(method: Method, steps: int, out: Path | None = None) -> Run:
    run = started(method, steps, out)
    if out is not None:
        run.resume()
    return train(run)


def identity(observation: NDArray, noise: NDArray) -> NDArray:
    return noise


def test_the_noise_is_sacs_action_stretched_to_the_bound() -> None:
    mu, log_std, z = numbers(6, 2), 0.3 * numbers(6, 2, seed=1), numbers(6, 2, seed=2)
    found, (action, logp) = noise_policy(mu, log_std, z, 1.5), squash(mu, log_std, z)
    torch.testing.assert_close(found.w, 1.5 * action)
    torch.testing.assert_close(found.logp, logp - 2 * math.log(1.5), rtol=0, atol=1e-4)  # the 1e-6 inside the logarithm


def test_a_wide_bound_around_the_standard_normal_is_the_imitating_policy() -> None:
    z, b = numbers(6, 2), 1e6
    # u is b times smaller than w where tanh is straight, so mu = 0 and sigma = 1 / b give w = z with the normal density
    found = noise_policy(torch.zeros(6, 2, dtype=torch.float64), torch.full((6, 2), -math.log(b), dtype=torch.float64), z, b)
    torch.testing.assert_close(found.w, z, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.logp, torch.distributions.Normal(0.0, 1.0).log_prob(z).sum(-1), rtol=0, atol=1e-9)


def test_the_targets_are_sacs_and_ddpgs() -> None:
    reward, done, q, logp = numbers(5), torch.tensor([0, 1, 0, 0, 1]), numbers(2, 5, seed=1), numbers(5, seed=2)
    assert torch.equal(td_sac(reward, done, q[0], q[1], logp, 0.9, 0.2), q_target(reward, done, q, logp, 0.9, 0.2))
    torch.testing.assert_close(td_na(reward, done, q[:1], 0.9), reward + 0.9 * (1 - done) * q[0])
    torch.testing.assert_close(td_sac(reward, done, q[0], q[1], logp, 0.9, 0.0), td_na(reward, done, q, 0.9))


def test_distillation_teaches_the_noise_critic_alone() -> None:
    qw, qa = numbers(5).requires_grad_(), numbers(2, 5, seed=1).requires_grad_()
    distill_loss(qw, qa).backward()
    torch.testing.assert_close(qw.grad, 2 * (qw - qa.mean(0)).detach() / 5)
    assert qa.grad is None and distill_loss(qa.mean(0), qa) == 0 and distill_loss(qa.min(0).values, qa, "min") == 0
    with pytest.raises(ValueError, match="use mean or min"):
        distill_loss(qw, qa, "max")


def test_the_temperature_step_is_a_gradient_step_on_sacs_loss() -> None:
    logp, log_alpha = numbers(7), torch.tensor(-0.7, dtype=torch.float64, requires_grad=True)
    temperature_loss(logp, log_alpha.exp(), -1.0).backward()
    assert alpha_step(logp, -0.7, 0.1, -1.0) == pytest.approx(-0.7 - 0.1 * float(log_alpha.grad))


def test_one_euler_step_of_a_linear_field_and_none_of_an_empty_grid() -> None:
    w, A, c = numbers(4, 2), numbers(2, 2, seed=1), numbers(2, seed=2)
    torch.testing.assert_close(steer(w, A, c, [1.0, 0.0]), w - w @ A.T - c)
    assert torch.equal(steer(w, A, c, [1.0]), w)


def test_with_the_identity_for_a_map_it_is_sac_on_bounded_actions() -> None:
    run = started(METHOD, 3, noise_bound=0.8)
    run.policy.black_box = identity
    step(run), step(run)
    policy, part = run.policy, run.method.rollout.draw(run)
    part.advantage = run.method.credit(part, run)
    torch.testing.assert_close(part.action[..., 2:], 0.8 * part.action[..., :2])
    plain, _ = build(forked_goal.NAME, None, needs=SAC.needs(), hidden=(8, 8), normalize_observations=True)
    assert not isinstance(plain, SteeredPolicy)
    plain.load_state_dict({name: value for name, value in policy.state_dict().items() if name in plain.state_dict()})
    theirs = plain.evaluate(part.but(action=part.action[..., :2]), {"q", "q_new", "logp_new", "next_q", "next_logp"})
    mine = policy.evaluate(part, {"q", "q_new", "logp_new", "next_q", "next_logp"})
    for name in ("q", "q_new", "next_q"):
        torch.testing.assert_close(mine[name], theirs[name], rtol=1e-5, atol=1e-6)
    for name in ("logp_new", "next_logp"):
        torch.testing.assert_close(mine[name], theirs[name] - 2 * math.log(0.8), rtol=1e-4, atol=1e-4)


def test_the_fresh_action_critics_see_what_the_frozen_map_makes_of_the_noise() -> None:
    run = started(NA, 3)
    step(run), step(run)
    policy, part = run.policy, run.method.rollout.draw(run)
    run.method.credit(part, run)
    scaled = (part.signals["distill_noise"] / policy.noise_bound).clamp(-1, 1)[:, 0]
    action = torch.from_numpy(policy.frozen_map()(part.context[:, 0].numpy(), policy.noise_bound * scaled.numpy()))
    row = torch.cat([policy.normalize(part.context[:, 0]), action], dim=1)
    found = policy.evaluate(part, {"q_distilled", "q_noise"})
    torch.testing.assert_close(found.q_distilled[:, 0], policy.action_critic(row).T, rtol=1e-4, atol=1e-5)
    assert found.q_noise.requires_grad and not found.q_distilled.requires_grad


@pytest.mark.parametrize("method", [METHOD, NA])
def test_each_part_gets_only_its_own_gradient_and_the_base_none(method: Method) -> None:
    run = started(method, 4)
    step(run), step(run)
    policy, part = run.policy, run.method.rollout.draw(run)
    part.advantage = run.method.credit(part, run)
    kinds = {
        "actor": policy.actor_network,
        "noise": policy.critic,
        "action": policy.action_critic,
        "base": policy.base_network,
    }
    trained_by = {"SoftActor": "actor", "TwinCritics": "noise", "Distillation": "noise", "ActionCritics": "action"}
    for component in run.loss_fn.parts:
        policy.zero_grad()
        component(part, policy.evaluate(part, component.needs), run).value.backward()
        moved = {name for name, part_ in kinds.items() if any(p.grad is not None and bool((p.grad != 0).any()) for p in part_.parameters())}
        assert moved == {trained_by.get(type(component).__name__)} - {None}
    assert not any(p.requires_grad for p in policy.base_network.parameters())


@pytest.mark.parametrize("method", [METHOD, NA])
def test_a_run_resumes_exactly_and_leaves_the_base_alone(method: Method, tmp_path: Path) -> None:
    whole, _ = trained(method, 4, tmp_path / "whole"), trained(method, 2, tmp_path / "halves")
    halves, cloned = trained(method, 4, tmp_path / "halves"), started(method, 1)
    cloned.begin_step()
    for (name, mine), theirs in zip(whole.policy.state_dict().items(), halves.policy.state_dict().values(), strict=True):
        assert torch.isfinite(mine).all() and torch.equal(mine, theirs), name
    for mine, theirs in zip(whole.policy.base_network.parameters(), cloned.policy.base_network.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert [r.get("loss") for r in whole.history] == [r.get("loss") for r in halves.history]
    assert all(math.isfinite(v) for r in whole.history for v in r.values() if isinstance(v, float))
    whole.policy.save_pretrained(tmp_path / "model")
    again: Any = load(tmp_path / "model")
    observation = np.array([[0.1, 0.0], [0.5, 0.3]], np.float32)
    assert np.array_equal(again.actor()(observation, None), whole.policy.actor()(observation, None))


def test_the_first_rollouts_are_the_imitating_policys() -> None:
    run = started(METHOD, 4)
    first = step(run)
    w = run.policy.evaluate(first, {"steered_noise"}).steered_noise
    assert not run.policy.steering and w.shape == (1, 8, 2)
    step(run)
    assert not run.policy.steering  # 8 steps were there when it began, of 12
    step(run)
    assert run.policy.steering


def test_recorded_steps_serve_the_noise_aliased_form_and_are_refused_by_the_other(tmp_path: Path) -> None:
    file = str(tmp_path / "steps.npz")
    write(file, forked_goal.ForkedGoal().demonstrate(np.random.default_rng(0)))
    run = started(NA, 2, data=file)
    train(run)
    assert run.version == 8 and run.policy.steering and math.isfinite(run.history[-1]["distillation_loss"])
    with pytest.raises(ValueError, match="recorded actions carry no noise"):
        train(started(METHOD, 2, data=file))


def test_demonstrations_go_to_both_goals_alike() -> None:
    shown = forked_goal.ForkedGoal().demonstrate(np.random.default_rng(0))
    ends = shown.next_observation[shown.terminated]
    assert len(ends) == forked_goal.DEMONSTRATIONS and (ends[:, 1] > 0).sum() == len(ends) // 2 == shown.reward.sum()
    inside = ~(shown.terminated | shown.truncated)[:-1]
    assert np.array_equal(shown.next_observation[:-1][inside], shown.observation[1:][inside])


def test_what_cannot_be_steered_is_refused() -> None:
    with pytest.raises(ValueError, match="Pendulum-v1 brings none"):
        step(started(METHOD, 1, env="Pendulum-v1"))
    with pytest.raises(ValueError, match="noise_bound above 0"):
        started(METHOD, 1, noise_bound=0.0)
    plain, task = build("Pendulum-v1", None, needs={"q_new"})
    with pytest.raises(MissingSignal, match="dsrl needs the signal"):
        Run(METHOD, plain, task, steps=1)
    assert catalogue.get("dsrl").loop == "off_policy"
