"""PPO scaling: the quadratic model, ways to scale, noise estimates, the outer step, the proximal policy, plateaus, and the method in the loop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anypo.domains.control.noisy_point import STEPS
from anypo.domains.control.setup import build
from anypo.loops.on_policy import step, train
from anypo.method import Method
from anypo.methods.control.ppo import METHOD as PPO
from anypo.methods.control.ppo import policy_loss
from anypo.methods.control.ppo_scaling import (
    METHOD,
    VARIANTS,
    co_scale,
    decoupled_loss,
    ewma,
    ewma_step,
    flat,
    gradient_noise,
    moment_recursion,
    on_plateau,
    outer_step,
    scaled,
)
from anypo.run import Run
from tests.helpers import assert_continues, random_rows

EWMA = VARIANTS["ewma"]


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(max_examples=30, deadline=None)
@given(st.floats(0.05, 1.0), st.floats(0.1, 1.5), st.floats(0.0, 2.0), st.integers(1, 64))
def test_the_recursion_ends_at_its_limit(eta: float, h: float, sigma: float, n: int) -> None:
    found = moment_recursion(eta, h, sigma, n, 1.0, 2000)
    assert float(found.moments[-1]) == pytest.approx(found.limit, rel=1e-6, abs=1e-8)
    stays = moment_recursion(eta, h, sigma, n, found.limit, 3).moments
    torch.testing.assert_close(stays, torch.full_like(stays, found.limit))


def test_without_noise_there_is_no_plateau() -> None:
    found = moment_recursion(0.3, 1.0, 0.0, 4, 1.0, 10)
    assert found.limit == 0 == found.plateau_loss and float(found.moments[-1]) == pytest.approx(0.7**20)


def test_a_factor_of_one_changes_nothing_and_counts_are_rounded() -> None:
    config = {"envs": 8, "steps": 32, "minibatch_size": 64, "minibatches": 3, "epochs": 4, "lr": 3e-4, "clip": 0.2}
    assert all(co_scale(config, 1, variant) == config for variant in ("recipe", "w1", "w2", "w3"))
    wider = co_scale(config, 1.5)
    assert (wider["envs"], wider["minibatches"], wider["minibatch_size"]) == (12, 4, 64)
    with pytest.raises(ValueError, match="unknown scaling 'w4'"):
        co_scale(config, 2, "w4")


def test_noise_shrinks_with_the_number_of_chunks_and_one_chunk_has_none() -> None:
    chunks = numbers(4, 5)
    found = gradient_noise(chunks)
    variance = chunks.var(0, correction=1).sum() / 4
    assert found.noise == pytest.approx(float(variance)) and found.snr == pytest.approx(found.signal / found.noise)
    assert gradient_noise(chunks[:1]).snr == 0 == gradient_noise(chunks[:1]).noise


def test_ends_of_the_outer_step_and_of_the_average() -> None:
    theta, inner = numbers(6), numbers(6, seed=1)
    torch.testing.assert_close(outer_step(theta, inner, 1.0), inner)
    assert torch.equal(outer_step(theta, inner, 0.0), theta)
    thetas = numbers(4, 3, seed=2)
    torch.testing.assert_close(ewma(thetas, 0.0), thetas[-1])
    weights = 0.7 ** torch.arange(3, -1, -1, dtype=torch.float64)
    torch.testing.assert_close(ewma(thetas, 0.7), (weights[:, None] * thetas).sum(0) / weights.sum())
    assert ewma_step(thetas[0], thetas[1], 1.0, 0.5)[1] == 1.5


def test_around_the_old_policy_the_decoupled_loss_is_ppo() -> None:
    rows = random_rows(0)
    advantages = numbers(*rows.logp.shape).to(rows.logp.dtype)
    logp = rows.logp.clone().requires_grad_()
    mine = decoupled_loss(logp, rows.old_logp, rows.old_logp, advantages, rows.mask)
    theirs = policy_loss(logp, rows.old_logp, advantages, rows.mask).loss
    torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(torch.autograd.grad(mine, logp)[0], torch.autograd.grad(theirs, logp)[0])
    empty = torch.zeros_like(rows.mask)
    assert float(decoupled_loss(rows.logp, rows.old_logp, rows.old_logp, advantages, empty)) == 0


def test_a_plateau_is_flat_and_without_signal() -> None:
    rising, level = torch.arange(10).double(), numbers(10) * 0.1
    level = level - level.flip(0)  # no slope to speak of once it is made even
    level = (level + level.flip(0)) + torch.tensor([1.0, -1.0] * 5).double() * torch.tensor([1.0] * 5 + [-1.0] * 5).double()
    assert not on_plateau(rising, 0.0)
    assert on_plateau(level, 0.0) and not on_plateau(level, 1.0)
    assert not on_plateau(rising[:1], 0.0)


def small(method: Method = METHOD, steps: int = 3, out: Path | None = None, seed: int = 0) -> Run:
    policy, task = build("NoisyPoint-v0", None, seed=seed, envs=4, horizon=32, hidden=(8,))
    run = Run(method.set("update.epochs", 2), policy, task, steps=steps, seed=seed, out=out, checkpoint_every=2)
    if out is not None:
        run.resume()
    return train(run)


def weights(run: Run) -> torch.Tensor:
    return flat(list(run.policy.parameters()))


def test_with_nothing_scaled_it_is_ppo() -> None:
    plain = PPO.set("update.minibatches", 2)  # of 64 actions
    assert torch.equal(weights(small()), weights(small(plain)))
    newest = small(EWMA.set("update.proximal_decay", 0.0))  # its loss goes through autograd, PPO's does not
    torch.testing.assert_close(weights(newest), weights(small()), rtol=1e-4, atol=1e-5)


def test_an_outer_rate_of_zero_stands_still_and_a_half_goes_half_way() -> None:
    start = weights(small(steps=0))
    assert torch.equal(weights(small(METHOD.set("update.outer_rate", 0.0), 2)), start)
    full, half = weights(small(steps=1)), weights(small(METHOD.set("update.outer_rate", 0.5), 1))
    torch.testing.assert_close(half, (start + full) / 2)


def test_scaling_a_method_scales_what_it_should() -> None:
    for variant, size, rate in (("recipe", 64, 3e-4), ("w1", 256, 3e-4), ("w2", 256, 6e-4), ("w3", 256, 1.2e-3)):
        method = scaled(METHOD, 4, variant)
        assert (method.update.minibatch_size, method.update.learning_rate) == (size, pytest.approx(rate))  # type: ignore[attr-defined]
        run = small(method, 1)
        assert run.actions == 4 * 4 * 32 and run.version == 2 * 4 * 4 * 32 // size


def test_measurements_are_logged_and_leave_the_run_alone() -> None:
    record = small().history[-1]
    assert {"snr", "gradient_noise", "outer_kl", "outer_ratio", "ddr", "plateau"} <= set(record)
    assert record["outer_kl"] > 0 and record["ddr"] == pytest.approx(128 / record["outer_kl"])
    assert torch.equal(weights(small(METHOD.set("update.noise_chunks", 1))), weights(small()))


@pytest.mark.parametrize(("act", "envs", "rate"), [("advise", 4, 1.0), ("environments", 8, 1.0), ("step", 4, 0.5)])
def test_the_detector_acts_when_told(act: str, envs: int, rate: float) -> None:
    detector = replace(METHOD.control[1], window=2, tol=np.inf, snr_min=np.inf, act=act)
    run = small(METHOD.but(control=(METHOD.control[0], detector)), 6)
    batch = step(Run(run.recipe, run.policy, run.task, steps=1))
    assert len(batch) == 4 and max(r["plateau"] for r in run.history) == 1.0
    assert max(r["actions"] - b["actions"] for b, r in zip(run.history, run.history[1:], strict=False)) == 32 * envs
    assert run.state.get("ppo_scaling.rate", 1.0) == rate
    with pytest.raises(ValueError, match="advise, environments or step"):
        small(METHOD.but(control=(replace(detector, act="wait"),)), 1)


@pytest.mark.parametrize("method", [METHOD, EWMA])
def test_it_resumes(method: Method, tmp_path: Path) -> None:
    assert_continues(lambda out, upto: small(method, upto, out), tmp_path, "loss")
    assert torch.isfinite(weights(small(method))).all()


def test_the_proximal_policy_is_the_average_of_those_that_acted() -> None:
    seen = []
    policy, task = build("NoisyPoint-v0", None, envs=4, horizon=32, hidden=(8,))
    run = Run(EWMA, policy, task, steps=3)
    while not run.finished:
        seen.append(weights(run))
        step(run)
    expected = ewma(torch.stack([*seen, weights(run)]).double(), 0.9).float()
    torch.testing.assert_close(flat(list(run.named_policy("proximal").parameters())), expected, rtol=1e-4, atol=1e-6)


def test_the_noise_of_rewards_says_nothing_and_repeats() -> None:
    _, task = build("NoisyPoint-v0", None, envs=64)
    environments = task.environments(64)
    for row in range(64):
        environments.reset(row, row)
    rewards = np.stack([environments.step(np.zeros((64, 2))).reward for _ in range(STEPS)])
    still = -(environments.state[:2] ** 2).sum(0)
    assert abs((rewards - still).mean()) < 0.15 and abs((rewards - still).std() - 2) < 0.1
    environments.reset(0, 0)
    assert environments.step(np.zeros((64, 2))).reward[0] == rewards[0, 0]
