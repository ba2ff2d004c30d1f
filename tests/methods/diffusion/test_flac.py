"""FLAC: what energy reduces to, the bridge against simulation, the dual's sign, and the method in the loop."""

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
from anypo.loops.off_policy import step, train
from anypo.method import Method
from anypo.methods.control.sac import q_target
from anypo.methods.diffusion.flac import LOG_WEIGHT, METHOD, actor_loss, bridge, dual, energy, path_kl, rollout, td_target
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


def test_without_a_drift_there_is_no_energy_and_the_action_is_the_reference() -> None:
    x0, z, none = numbers(50, 2), numbers(50, 4, 2, seed=1), torch.zeros(50, 4, 2, dtype=torch.float64)
    assert torch.equal(energy(none), torch.zeros(50, dtype=torch.float64)) and path_kl(energy(none), 0.5) == 0
    assert torch.equal(rollout(x0, none, z, 0.0), x0)
    torch.testing.assert_close(rollout(x0, none, z, 0.5), x0 + 0.5 * z.sum(1) / 2)  # variance sig^2 in all


def test_a_single_deterministic_step_is_a_residual_with_an_l2_penalty() -> None:
    x0, u, q = numbers(6, 2), numbers(6, 1, 2, seed=1), numbers(2, 6, seed=2)
    torch.testing.assert_close(rollout(x0, u, numbers(6, 1, 2, seed=3), 0.0), x0 + u[:, 0])
    torch.testing.assert_close(actor_loss(energy(u), q, 0.7), (0.35 * u[:, 0].square().sum(-1) - q.min(0).values).mean())


def test_without_a_weight_it_is_td3() -> None:
    reward, done, e, q = numbers(5), torch.tensor([0, 1, 0, 0, 1]), numbers(5, seed=1).abs(), numbers(2, 5, seed=2)
    torch.testing.assert_close(td_target(reward, done, e, q, 0.9, 0.0), reward + 0.9 * (1 - done) * q.min(0).values)
    torch.testing.assert_close(actor_loss(e, q, 0.0), -q.min(0).values.mean())


def test_with_log_densities_for_energies_it_is_sac() -> None:
    reward, done, logp, q = numbers(5), torch.tensor([0, 1, 0, 0, 1]), numbers(5, seed=1), numbers(2, 5, seed=2)
    assert torch.equal(td_target(reward, done, logp, q, 0.9, 0.3), q_target(reward, done, q, logp, 0.9, 0.3))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 10**6))
def test_energy_bounds_the_transport_cost(steps: int, size: int, seed: int) -> None:
    x0, u = numbers(9, size, seed=seed), numbers(9, steps, size, seed=seed + 1)
    moved = rollout(x0, u, torch.zeros_like(u), 0.0) - x0
    assert bool((moved.square().sum(-1) <= 2 * energy(u) + 1e-12).all())
    straight = u[:, :1].expand(-1, steps, -1)
    torch.testing.assert_close(2 * energy(straight), (rollout(x0, straight, torch.zeros_like(u), 0.0) - x0).square().sum(-1))


def test_the_weight_rises_above_the_budget_falls_below_and_stays_within_its_limits() -> None:
    assert dual([0.5, 0.1, 9.0], 0.0, 1.0, 0.2, -1.0, 0.4) == pytest.approx([0.3, 0.2, 0.4])
    assert dual([0.2], 0.1, 1.0, 0.2, -1.0, 1.0) == [0.1]
    assert dual([0.0], -0.9, 1.0, 0.2, -1.0, 1.0) == [-1.0]


def test_following_the_bridges_drift_leads_to_its_distribution() -> None:
    sig, alpha_s, w, m, x0, steps = 0.7, 0.5, 0.5, 1.2, -0.3, 400
    x, z = torch.full((20000,), x0, dtype=torch.float64), numbers(steps, 20000)
    for k in range(steps):
        found = bridge(x, k / steps, m, sig, alpha_s, w, x0)
        x = x + found.drift / steps + sig * steps**-0.5 * z[k]
    assert float(x.mean()) == pytest.approx(found.mean, abs=0.01) and float(x.var()) == pytest.approx(found.var, rel=0.04)
    heavy = bridge(x, 0.5, m, sig, 1e9, w, x0)
    assert heavy.mean == pytest.approx(x0) and heavy.var == pytest.approx(sig**2) and float(heavy.drift.abs().max()) < 1e-6


@pytest.mark.parametrize("start", ["uniform", "normal"])
def test_acting_and_learning_follow_the_same_path(start: str) -> None:
    run = started(METHOD, 2, start=start)
    policy, generator = run.policy, torch.Generator().manual_seed(0)
    with torch.no_grad():
        policy.actor_network.layers[-1].weight.mul_(100)
    observation, noise = torch.randn(40, 3, generator=generator), policy.draw(torch.Size([40]), generator)
    assert noise.shape == (40, 4) and (start == "normal" or float(noise[:, 0].abs().max()) <= 1)
    x, drifts = policy.carry(observation, noise)
    ends, spent = policy._path(observation.numpy(), noise.numpy())
    np.testing.assert_allclose(x.detach().numpy(), ends, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(energy(drifts).detach().numpy(), spent, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(rollout(noise[:, :1], drifts, noise[:, 1:, None], 0.5), x)
    np.testing.assert_allclose(policy.actor()(observation.numpy(), noise.numpy()), np.tanh(ends), rtol=1e-6)


def test_the_actors_loss_leaves_the_critics_alone_and_goes_through_every_step() -> None:
    run = started(METHOD, 3)
    step(run), step(run)
    policy, part = run.policy, run.method.rollout.draw(run)
    part.advantage = run.method.credit(part, run)
    assert not part.advantage.requires_grad
    for component, mine, other in zip(
        run.loss_fn.parts, (policy.actor_network, policy.critic), (policy.critic, policy.actor_network), strict=True
    ):
        policy.zero_grad()
        component(part, policy.evaluate(part, component.needs), run).value.backward()
        assert any(bool((p.grad != 0).any()) for p in mine.parameters()) and all(p.grad is None for p in other.parameters())
    part.terminated = torch.ones_like(part.terminated)
    torch.testing.assert_close(run.method.credit(part, run), part.reward)


def test_the_target_pays_for_the_energy_of_the_next_action() -> None:
    run = started(METHOD, 3)
    step(run), step(run)
    part = run.method.rollout.draw(run)
    worth = run.method.credit(part, run)
    found = run.policy.evaluate(part, {"next_q", "next_energy"})
    alpha = math.exp(run.state[LOG_WEIGHT])
    torch.testing.assert_close(worth, part.reward + 0.99 * (found.next_q.min(-1).values - alpha * found.next_energy))
    assert bool((found.next_energy > 0).all())


def test_a_run_resumes_exactly(tmp_path: Path) -> None:
    method = METHOD.set("update.dual_rate", 0.1)
    whole, _ = trained(method, 4, tmp_path / "whole"), trained(method, 2, tmp_path / "halves")
    halves = trained(method, 4, tmp_path / "halves")
    for mine, theirs in zip(whole.policy.state_dict().values(), halves.policy.state_dict().values(), strict=True):
        assert torch.isfinite(mine).all() and torch.equal(mine, theirs)
    assert whole.state[LOG_WEIGHT] == halves.state[LOG_WEIGHT] != 0.0
    assert all(math.isfinite(v) for r in whole.history for v in r.values() if isinstance(v, float))
    whole.policy.save_pretrained(tmp_path / "model")
    again: Any = load(tmp_path / "model")
    observation = np.ones((2, 3), np.float32)
    assert np.array_equal(again.actor()(observation, None), whole.policy.actor()(observation, None))


def test_a_fixed_weight_stays_and_bad_numbers_are_refused() -> None:
    run = train(started(METHOD.set("update.dual_rate", 0.0).set("prepare.0.initial", 0.0), 3))
    assert run.version > 0 and run.history[-1]["alpha"] == 0.0
    with pytest.raises(ValueError, match="initial must be at least 0"):
        step(started(METHOD.set("prepare.0.initial", -1.0), 1))
    for options in ({"sampling_steps": 0}, {"diffusion": -0.1}, {"start": "cauchy"}):
        with pytest.raises(ValueError, match="start uniform or normal"):
            started(METHOD, 1, **options)
    plain, task = build("Pendulum-v1", None, needs={"q_new"})
    with pytest.raises(MissingSignal, match="flac needs the signal"):
        Run(METHOD, plain, task, steps=1)


def test_no_log_density_is_asked_for_or_there() -> None:
    run = started(METHOD, 1)
    assert not any("logp" in name for name in METHOD.needs() | run.policy.provides)
