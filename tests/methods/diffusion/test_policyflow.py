"""PolicyFlow: what its ratio and losses reduce to, where gradients flow, its rate, and the method in the loop."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anypo.domains.control.multi_goal import NAME, PLACES, Ring, goal_distances
from anypo.domains.control.saved import load
from anypo.domains.control.setup import build
from anypo.loops.on_policy import step, train
from anypo.method import Method
from anypo.methods.control.ppo import policy_loss as ppo_loss
from anypo.methods.diffusion.policyflow import (
    METHOD,
    BrownianRegularizer,
    adapted_rate,
    brownian,
    goal_entropy,
    kl,
    policy_loss,
    ratio,
    sample,
    value_loss,
)  # fmt: skip
from anypo.policy import MissingSignal, Signals
from anypo.run import Run


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def started(method: Method, steps: int, out: Path | None = None, **options: Any) -> Run:
    needs = {n.removeprefix("old_") for n in method.needs()}
    settings: dict[str, Any] = {"envs": 4, "horizon": 16, "hidden": (8, 8), "sampling_steps": 3}
    policy, task = build(NAME, None, needs=needs, seed=0, **(settings | options))
    return Run(method, policy, task, steps=steps, seed=0, out=out, checkpoint_every=2)


def trained(method: Method, steps: int, out: Path | None = None) -> Run:
    run = started(method, steps, out)
    if out is not None:
        run.resume()
    return train(run)


STD = torch.tensor([0.7, 0.4], dtype=torch.float64)


def test_at_the_old_policy_the_ratio_is_1_and_the_loss_minus_the_mean_advantage() -> None:
    delta, adv, none = STD * numbers(7, 2), numbers(7, seed=1), torch.zeros(7, 2, dtype=torch.float64)
    assert torch.equal(ratio(delta, none, STD, STD).ratio, torch.ones(7, dtype=torch.float64))
    torch.testing.assert_close(policy_loss(delta, none, adv, STD, STD), -adv.mean())
    assert kl(none, STD, STD).abs().max() == 0


def test_a_constant_field_from_a_fixed_start_is_gaussian_ppo() -> None:
    old, new, delta, adv = 0.3 * numbers(9, 2), 0.3 * numbers(9, 2, seed=1), STD * numbers(9, 2, seed=2), numbers(9, seed=3)
    start, no_slope, std_new = torch.zeros(9, 2, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64), 1.2 * STD
    action = (
        sample(start, no_slope, torch.zeros(2, dtype=torch.float64), 4) + old + delta
    )  # a field without x and t moves a start by itself
    logp = torch.distributions.Normal(new, std_new).log_prob(action).sum(-1)
    old_logp = torch.distributions.Normal(old, STD).log_prob(action).sum(-1)
    found = ratio(delta, new - old, STD, std_new)
    torch.testing.assert_close(found.logp_old, old_logp)
    torch.testing.assert_close(found.ratio, (logp - old_logp).exp())
    wanted = ppo_loss(logp[:, None], old_logp[:, None], adv[:, None], torch.ones(9, 1, dtype=torch.bool), 0.2).loss
    torch.testing.assert_close(policy_loss(delta, new - old, adv, STD, std_new, 0.2), wanted)


def test_the_kl_is_that_of_the_gaussians() -> None:
    dv, normal = 0.3 * numbers(5, 2), torch.distributions.Normal
    wanted = torch.distributions.kl_divergence(normal(dv, 1.3 * STD), normal(torch.zeros_like(dv), STD)).sum(-1)
    torch.testing.assert_close(kl(dv, STD, 1.3 * STD), wanted)


def test_the_brownian_pull_goes_to_the_noise_and_leaves_the_old_field_alone() -> None:
    x0, x1, t = numbers(6, 2), numbers(6, 2, seed=1), torch.rand(6, dtype=torch.float64) * 0.9
    straight = (x1 - x0).requires_grad_()
    outward = (2.0 * x0 / (1 - t[:, None])).requires_grad_()
    loss = brownian(x0, x1, outward, straight, t, b=2.0)
    assert float(loss.detach()) == pytest.approx(0, abs=1e-20)
    loss = brownian(x0, x1, numbers(6, 2, seed=2).requires_grad_(), straight, t)
    loss.backward()
    assert straight.grad is None and float(loss.detach()) > 0
    with pytest.raises(ValueError, match="use rectified or trig"):
        brownian(x0, x1, x0, x1, t, kind="vp")


def test_values_that_left_their_band_have_no_gradient() -> None:
    v = torch.tensor([0.0, 0.5, 0.04], requires_grad=True)
    value_loss(v, torch.zeros(3), torch.tensor([1.0, 1.0, 1.0]), 0.1).backward()
    assert v.grad is not None and v.grad[1] == 0 and v.grad[0] < 0 and v.grad[2] < 0


def test_entropy_of_goals_and_the_rates_schedule() -> None:
    assert float(goal_entropy(torch.ones(8))) == pytest.approx(1) and float(goal_entropy(torch.zeros(8))) == 0
    assert float(goal_entropy(torch.tensor([0, 9, 0, 0]))) == 0 and float(goal_entropy(torch.tensor([3, 3, 0, 0]))) == pytest.approx(0.5)
    assert adapted_rate(3e-4, 0.021, 0.01, 1e-6, 1e-2) == pytest.approx(2e-4) and adapted_rate(3e-4, 0.02, 0.01, 1e-6, 1e-2) == 3e-4
    assert adapted_rate(2e-4, 0.004, 0.01, 1e-6, 1e-2) == pytest.approx(3e-4)
    assert adapted_rate(9e-3, 0.0, 0.01, 1e-6, 1e-2) == 1e-2 and adapted_rate(1.2e-6, 1.0, 0.01, 1e-6, 1e-2) == 1e-6


def test_acting_follows_the_midpoint_rule_and_stores_start_end_and_noise() -> None:
    run = started(METHOD, 1)
    policy = run.policy
    with torch.no_grad():
        policy.actor_network.layers[-1].weight.mul_(100)
    seen, drawn = np.random.default_rng(0).standard_normal((5, 2), dtype=np.float32), policy.noise(np.random.default_rng(1), (5,))
    stored = policy.actor()(seen, drawn)
    x, h, observation = torch.from_numpy(drawn[:, :2]), 1 / 3, policy.normalize(torch.from_numpy(seen))
    with torch.no_grad():
        for k in range(3):
            field = policy.actor_network.predict(x, torch.full((5,), 1 - k * h), observation)
            x = x - h * policy.actor_network.predict(x - h / 2 * field, torch.full((5,), 1 - (k + 0.5) * h), observation)
    np.testing.assert_allclose(stored[:, 2:4], x.numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(stored[:, 4:], math.exp(-0.7) * drawn[:, 2:], rtol=1e-5)
    assert np.array_equal(stored[:, :2], drawn[:, :2]) and np.array_equal(policy.actor()(seen, None)[:, 4:], np.zeros((5, 2)))
    np.testing.assert_allclose(policy.for_environment(stored), (stored[:, 2:4] + stored[:, 4:]).clip(-1, 1), rtol=1e-6)
    assert np.isnan(policy.from_environment(np.ones((1, 2)))).tolist() == [[True, True, False, False, False, False]]


def test_the_first_minibatch_finds_every_ratio_at_1_at_fresh_points() -> None:
    run = trained(METHOD.set("update.epochs", 1).set("update.minibatches", 1), 1)
    assert run.history[0]["clip_fraction"] == 0 and run.history[0]["kl"] == pytest.approx(0, abs=1e-9)
    assert run.history[0]["learning_rate"] == pytest.approx(1.5e-4)  # no KL yet, so the rate rose
    kept = trained(METHOD.set("update.target_kl", None), 1)
    assert kept.history[0]["learning_rate"] == pytest.approx(1e-4) and kept.history[0]["kl"] > 0


def test_without_a_weight_the_regularizer_is_not_there() -> None:
    without = METHOD.but(regularize=(METHOD.regularize[0],))
    silent, absent = trained(METHOD.set("regularize.1.weight", 0.0), 2), trained(without, 2)
    assert BrownianRegularizer(weight=0.0).needs == frozenset()
    for mine, theirs in zip(silent.policy.parameters(), absent.policy.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    other = trained(METHOD, 2)
    assert not torch.equal(next(other.policy.parameters()), next(absent.policy.parameters()))


def test_actions_that_do_not_count_change_nothing() -> None:
    run = started(METHOD, 1)
    batch = run.method.rollout(run.method.select(run.task, run), run)
    batch.reward = run.method.reward(batch, run)
    run.prepare_signals(batch, run.method.needs())
    batch.advantage = run.method.credit(batch, run)
    batch.mask[:, 8:] = False
    new = run.policy.evaluate(batch, run.loss_fn.needs)
    moved = Signals(new | {"path_velocity": new.path_velocity + 0.1})
    clean = float(run.loss_fn(batch, moved).value.detach())
    batch.action[:, 8:], batch.advantage[:, 8:] = math.nan, math.nan
    moved["path_velocity"] = torch.where(batch.mask[..., None], moved["path_velocity"], math.nan)
    assert math.isfinite(clean) and float(run.loss_fn(batch, moved).value.detach()) == pytest.approx(clean)


def test_a_run_resumes_exactly_and_a_policy_comes_back(tmp_path: Path) -> None:
    whole, _ = trained(METHOD, 4, tmp_path / "whole"), trained(METHOD, 2, tmp_path / "halves")
    halves = trained(METHOD, 4, tmp_path / "halves")
    for mine, theirs in zip(whole.policy.parameters(), halves.policy.parameters(), strict=True):
        assert torch.isfinite(mine).all() and torch.equal(mine, theirs)
    assert [(r["loss"], r["learning_rate"]) for r in whole.history] == [(r["loss"], r["learning_rate"]) for r in halves.history]
    assert {"brownian_loss", "value_loss", "approx_kl", "noise_std"} <= whole.history[-1].keys()
    whole.policy.save_pretrained(tmp_path / "model")
    seen = np.ones((2, 2), np.float32)
    assert np.array_equal(load(tmp_path / "model").actor()(seen, None), whole.policy.actor()(seen, None))


def test_the_noise_has_a_floor_and_bad_numbers_are_refused() -> None:
    run = started(METHOD, 1, initial_log_std=-9.0, noise_floor=0.2)
    assert float(run.policy.log_std.detach().exp().max()) == pytest.approx(0.2)
    step(run)
    with pytest.raises(ValueError, match="noise_floor must be above 0"):
        started(METHOD, 1, noise_floor=0.0)
    policy, task = build("Pendulum-v1", None, envs=2, horizon=4)
    with pytest.raises(MissingSignal, match="policyflow needs the signal"):
        Run(METHOD, policy, task, steps=1)


def test_the_ring_pays_at_each_of_its_goals_alike() -> None:
    ring = Ring()
    moved = ring.step(0.95 * PLACES.T, np.zeros((8, 2)))
    assert moved.terminated.all() and np.ptp(moved.reward) < 1e-9 and goal_distances(PLACES.T).argmin(0).tolist() == list(range(8))
    far = ring.step(np.zeros((2, 1)), np.array([[3.0, -3.0]]))
    np.testing.assert_allclose(far.state[:, 0], [1.0, -1.0])
    assert not far.terminated[0] and float(far.reward[0]) == pytest.approx(-0.6)
