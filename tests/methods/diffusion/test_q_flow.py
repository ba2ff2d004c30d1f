"""Q-Flow: what its targets reduce to, that values stay the same along a path, where gradients flow, and the method in the loop."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anypo.domains.control.saved import load
from anypo.domains.control.setup import build
from anypo.domains.diffusion.valued_flow import follow
from anypo.loops.off_policy import step, train
from anypo.method import Method
from anypo.methods.diffusion.fpo import cfm_loss
from anypo.methods.diffusion.q_flow import METHOD, SteeredMatching, bounded, inner_loss, interp, policy_loss, psi, td_target, v_target
from anypo.policy import MissingSignal
from anypo.run import Run


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def started(method: Method, steps: int, out: Path | None = None, **options: Any) -> Run:
    method = method.set("rollout.batch_size", 16).set("rollout.steps", 8).set("rollout.warmup", 12)
    policy, task = build("Pendulum-v1", None, needs=method.needs(), seed=0, **({"hidden": (8, 8), "sampling_steps": 3} | options))
    return Run(method, policy, task, steps=steps, seed=0, out=out, checkpoint_every=2)


def trained(method: Method, steps: int, out: Path | None = None) -> Run:
    run = started(method, steps, out)
    if out is not None:
        run.resume()
    return train(run)


def minibatch(draws: int = 1) -> tuple[Run, Any]:
    """A run after two steps, with an actor that is not close to 0, and one of its minibatches."""
    run = started(METHOD.set("rollout.draws", draws), 3)
    step(run), step(run)
    with torch.no_grad():
        run.policy.actor_network.layers[-1].weight.mul_(30)
    part = run.method.rollout.draw(run)
    part.advantage = run.method.credit(part, run)
    return run, part


def test_without_a_value_it_is_flow_matching() -> None:
    x0, x1, v, grad, tau = numbers(8, 2), numbers(8, 2, seed=1), numbers(8, 2, seed=2), numbers(8, 2, seed=3), torch.rand(8, 1)
    cloning = cfm_loss(x1, x0[:, None], tau.double(), -v[:, None]).mean()
    torch.testing.assert_close(policy_loss(v, x0, x1, grad, math.inf), cloning)
    torch.testing.assert_close(policy_loss(v, x0, x1, torch.zeros_like(grad), 0.3), cloning)
    assert "inner_slope" in SteeredMatching().needs and "inner_slope" not in SteeredMatching(alpha=math.inf).needs


def test_one_step_from_the_start_is_a_residual() -> None:
    x0, A, c = numbers(5, 2), numbers(2, 2, seed=1), numbers(2, seed=2)
    torch.testing.assert_close(psi(x0, torch.zeros(5, dtype=torch.float64), A, c, 1, False), x0 + x0 @ A.T)


def test_a_linear_value_behind_a_field_without_x_shifts_every_target_by_its_slope() -> None:
    g, c = numbers(3), numbers(3, seed=1)
    x, tau = numbers(6, 3, seed=2).requires_grad_(), torch.rand(6, dtype=torch.float64)
    value = follow(lambda y, t: t[:, None] * c, x, tau, 7, clip=False) @ g
    (slope,) = torch.autograd.grad(value.sum(), x)
    torch.testing.assert_close(slope, g.expand(6, 3))
    x0, x1 = numbers(6, 3, seed=3), numbers(6, 3, seed=4)
    torch.testing.assert_close(v_target(x0, x1, slope, 2.0), x1 - x0 + g / (2.0 + 1e-8))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 8), st.integers(0, 7), st.integers(0, 10**6))
def test_all_points_of_a_path_lead_to_the_same_action(steps: int, at: int, seed: int) -> None:
    A, c, x = 0.5 * numbers(2, 2, seed=seed), numbers(2, seed=seed + 1), numbers(4, 2, seed=seed + 2)
    start, half, end = x, None, psi(x, torch.zeros(4, dtype=torch.float64), A, c, steps, False)
    for k in range(min(at, steps)):
        start = start + (start @ A.T + k / steps * c) / steps
    half = psi(start, torch.full((4,), min(at, steps) / steps, dtype=torch.float64), A, c, steps, False)
    torch.testing.assert_close(half, end, rtol=1e-6, atol=1e-8)


def test_the_target_takes_the_mean_and_stops_at_ends() -> None:
    reward, done, q = numbers(4), torch.tensor([0, 1, 0, 1]), numbers(2, 4, seed=1).requires_grad_()
    found = td_target(reward, done, q, 0.9)
    torch.testing.assert_close(found, reward + 0.9 * (1 - done) * q.detach().mean(0))
    torch.testing.assert_close(td_target(reward, done, q, 0.9, 2.0, "min"), 2 * reward + 0.9 * (1 - done) * q.detach().min(0).values)
    assert not found.requires_grad
    v = numbers(2, 4, seed=2).requires_grad_()
    inner_loss(v, q).backward()
    assert q.grad is None and v.grad is not None
    with pytest.raises(ValueError, match="use mean or min"):
        inner_loss(v, q, "max")


def test_slopes_are_bounded_in_length_alone() -> None:
    grad = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    torch.testing.assert_close(bounded(grad, 1.0), torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0]]))
    assert bounded(grad, None) is grad


@pytest.mark.parametrize("draws", [1, 3])
def test_signals_on_the_way_are_those_of_the_points(draws: int) -> None:
    run, part = minibatch(draws)
    policy = run.policy
    found = policy.observe(part, {"flow_velocity", "inner_value", "inner_slope", "end_q"})
    level, noise = part.signals["flow_level"], part.signals["flow_noise"]
    assert level.shape == (16, 1, draws) and found.inner_value.shape == (16, 1, draws, 2)
    last, tau = draws - 1, 1 - level[:, 0, -1]
    point = interp(noise[:, 0, last], part.action[:, 0], tau).requires_grad_()
    observation = policy.normalize(part.context)[:, 0]
    torch.testing.assert_close(found.flow_velocity[:, 0, last], -policy.velocity_at(observation)(point, tau).detach())
    value = policy.inner_critic(policy.inner_row(observation, point, tau))
    torch.testing.assert_close(found.inner_value[:, 0, last], value.T.detach())
    (slope,) = torch.autograd.grad(value.mean(0).sum(), point)
    torch.testing.assert_close(found.inner_slope[:, 0, last], slope, rtol=1e-4, atol=1e-6)
    end = policy.lead(observation, point.detach(), tau)
    torch.testing.assert_close(found.end_q[:, 0, last], policy.target_critic(torch.cat([observation, end], 1)).T.detach())


def test_acting_is_the_path_from_time_0() -> None:
    run, part = minibatch()
    policy, seen = run.policy, part.context[:, 0]
    start = torch.randn(16, 1, generator=torch.Generator().manual_seed(0))
    led = policy.lead(policy.normalize(seen), start, torch.zeros(16))
    np.testing.assert_allclose(policy.actor()(seen.numpy(), start.numpy()), led.numpy(), rtol=1e-4, atol=1e-5)
    assert np.array_equal(policy.actor()(seen.numpy(), None), policy.actor()(seen.numpy(), None))


def test_each_loss_teaches_its_own_network_alone() -> None:
    run, part = minibatch()
    policy = run.policy
    networks = [policy.actor_network, policy.critic, policy.inner_critic]
    for i, component in enumerate(run.loss_fn.parts):
        policy.zero_grad()
        component(part, policy.evaluate(part, component.needs), run).value.backward()
        for j, network in enumerate(networks):
            moved = any(p.grad is not None and bool((p.grad != 0).any()) for p in network.parameters())
            assert moved == (i == j)
    assert all(p.grad is None for p in policy.target_critic.parameters())


def test_a_run_resumes_exactly_and_a_policy_comes_back(tmp_path: Path) -> None:
    whole, _ = trained(METHOD, 4, tmp_path / "whole"), trained(METHOD, 2, tmp_path / "halves")
    halves = trained(METHOD, 4, tmp_path / "halves")
    for mine, theirs in zip(whole.policy.state_dict().values(), halves.policy.state_dict().values(), strict=True):
        assert torch.isfinite(mine).all() and torch.equal(mine, theirs)
    assert [r["loss"] for r in whole.history[2:]] == [r["loss"] for r in halves.history[2:]]
    assert {"actor_loss", "inner_loss", "critic_loss", "slope"} <= whole.history[-1].keys()
    whole.policy.save_pretrained(tmp_path / "model")
    seen = np.ones((2, 3), np.float32)
    assert np.array_equal(load(tmp_path / "model").actor()(seen, None), whole.policy.actor()(seen, None))


def test_bad_numbers_and_other_policies_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"objective\.alpha must be above 0"):
        trained(METHOD.set("objective.alpha", 0.0), 3)
    with pytest.raises(ValueError, match=r"rollout\.draws"):
        trained(METHOD.set("rollout.draws", 0), 3)
    with pytest.raises(ValueError, match="sampling_steps must be at least 1"):
        started(METHOD, 1, sampling_steps=0)
    plain, task = build("Pendulum-v1", None, needs={"q_new"})
    with pytest.raises(MissingSignal, match="q_flow needs the signal"):
        Run(METHOD, plain, task, steps=1)
