"""SPOT: limits of its density and losses, what reaches which network, refusals, and offline and online runs."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from anypo.domains.control.deterministic import DeterministicActorCritic
from anypo.domains.control.replay import Recording, write
from anypo.domains.control.setup import build, load
from anypo.loops.off_policy import step, train
from anypo.method import Method
from anypo.methods.control.spot import FINE_TUNING, METHOD, ActionDensity, actor_loss, elbo, importance_loglik, lambda_schedule, vae_loss
from anypo.run import Run


def quick(method: Method) -> Method:
    method = method.set("prepare.0.steps", 20).set("prepare.0.hidden", 16).set("rollout.batch_size", 32)
    return method.set("rollout.steps", 8).set("rollout.warmup", 16)


SMALL = quick(METHOD)


@pytest.fixture
def data(tmp_path: Path) -> str:
    rng, count = np.random.default_rng(0), 200
    observation = rng.standard_normal((count, 3)).astype(np.float32)
    action = rng.uniform(-2, 2, (count, 1)).astype(np.float32)
    none = np.zeros(count, dtype=bool)
    write(tmp_path / "steps.npz", Recording(observation, action, -(action[:, 0] ** 2), observation[::-1].copy(), none, none))
    return str(tmp_path / "steps.npz")


def small_run(data: str | None, method: Method = SMALL, steps: int = 3, out: Path | None = None) -> Run:
    policy, task = build("Pendulum-v1", None, needs=method.needs(), seed=0, envs=2, hidden=(16, 16), data=data)
    run = Run(method, policy, task, steps=steps, seed=0, out=out, checkpoint_every=2)
    if out is not None:
        run.resume()
    return run


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_without_lambda_it_is_td3_and_with_much_of_it_the_density_alone() -> None:
    q, penalty = numbers(6).requires_grad_(), numbers(6, seed=1).requires_grad_()
    loss = actor_loss(q, penalty, 0.0)
    torch.testing.assert_close(loss, -q.mean() / q.abs().mean())
    torch.testing.assert_close(torch.autograd.grad(loss, q)[0], torch.full_like(q, -1 / 6) / q.detach().abs().mean())
    torch.testing.assert_close(actor_loss(q, penalty, 1e9) / 1e9, penalty.mean(), rtol=1e-6, atol=1e-8)
    assert torch.isfinite(actor_loss(torch.zeros(3), torch.ones(3), 0.1))


def test_one_importance_sample_is_a_one_sample_bound() -> None:
    mean, log_std, eps = numbers(3, 4), 0.3 * numbers(3, 4, seed=1), numbers(3, 1, 4, seed=2)
    decoded, action = numbers(3, 1, 2, seed=3), numbers(3, 2, seed=4)
    normal = torch.distributions.Normal
    z = mean + log_std.exp() * eps[:, 0]
    wanted = normal(decoded[:, 0], math.sqrt(0.125)).log_prob(action).sum(1) + normal(0.0, 1.0).log_prob(z).sum(1)
    torch.testing.assert_close(
        importance_loglik(mean, log_std, eps, decoded, action), wanted - normal(mean, log_std.exp()).log_prob(z).sum(1)
    )


def test_the_training_loss_is_the_bound_in_other_units() -> None:
    """With twice as many latent dimensions as actions: loss = -(2 v / d) bound + a constant."""
    mean, log_std, decoded, action = numbers(5, 4), 0.3 * numbers(5, 4, seed=1), numbers(5, 1, 2, seed=2), numbers(5, 2, seed=3)
    bound = elbo(mean, log_std, decoded, action, 0.5)
    rest = vae_loss(mean, log_std, decoded[:, 0], action, 0.5) + 2 * 0.125 / 2 * bound
    torch.testing.assert_close(rest, rest[:1].expand(5))


def test_a_linear_gaussian_decoder_has_the_exact_density_as_its_limit() -> None:
    weight, action, v = numbers(2, 4), numbers(6, 2, seed=1), 0.125
    mean, log_std = torch.zeros(6, 4, dtype=torch.float64), torch.zeros(6, 4, dtype=torch.float64)
    eps = numbers(6, 200_000, 4, seed=2)
    exact = torch.distributions.MultivariateNormal(
        torch.zeros(2, dtype=torch.float64), weight @ weight.T + v * torch.eye(2, dtype=torch.float64)
    )
    found = importance_loglik(mean, log_std, eps, eps @ weight.T, action, 4 * v)
    torch.testing.assert_close(found, exact.log_prob(action), atol=0.05, rtol=0)


def test_lambda_cools_to_its_share() -> None:
    assert lambda_schedule(0.5, 0.2, 100, [0, 50, 1000]) == [0.5, 0.25, 0.1]


def test_the_density_is_frozen_and_still_passes_gradients_to_the_action() -> None:
    density = ActionDensity(3, 1, 8, 0.5).requires_grad_(False)
    action = torch.zeros(4, 1, requires_grad=True)
    density.loss(torch.randn(4, 3), action, torch.randn(4, 2)).sum().backward()
    assert action.grad is not None and action.grad.abs().max() > 0 and all(p.grad is None for p in density.parameters())


def test_the_actor_moves_at_every_second_step_and_the_targets_with_it(data: str) -> None:
    run = small_run(data)
    run.begin_step()
    run.method.rollout.is_fixed(run)
    for expected in (True, False, True, False):
        policy = run.policy
        before = {n: p.detach().clone() for n, p in policy.named_parameters()}
        part = run.method.rollout.draw(run)
        part.advantage = run.method.credit(part, run)
        run.method.update(part, run.loss_fn, run)
        moved = {n.split(".")[0] for n, p in policy.named_parameters() if not torch.equal(p, before[n])}
        assert moved == {"critic", "actor_network", "target_actor", "target_critic"} if expected else {"critic"} == moved


def test_offline_learning_collects_nothing(data: str) -> None:
    run = train(small_run(data))
    assert run.actions == 0 and all(torch.isfinite(p).all() for p in run.policy.parameters())
    assert {"support_penalty", "critic_loss", "lambda"} <= run.history[-1].keys()
    exact = train(small_run(data, SMALL.set("objective.samples", 3)))
    assert math.isfinite(exact.history[-1]["support_penalty"])


def test_fine_tuning_begins_with_the_recorded_steps_and_cools(data: str) -> None:
    run = small_run(data, quick(FINE_TUNING).set("objective.cool_steps", 100))
    batch = step(run)
    assert len(run.method.rollout.buffer) == 216 and batch.action.abs().max() <= 1
    train(run)
    assert run.actions == 48 and run.history[-1]["lambda"] < run.history[0]["lambda"] < 0.2


@pytest.mark.parametrize("method", [METHOD, FINE_TUNING])
def test_a_stopped_run_continues_identically(method: Method, data: str, tmp_path: Path) -> None:
    small = quick(method)
    whole = train(small_run(data, small, 4, tmp_path / "whole"))
    train(small_run(data, small, 2, tmp_path / "halves"))
    halves = train(small_run(data, small, 4, tmp_path / "halves"))
    for a, b in zip(whole.policy.parameters(), halves.policy.parameters(), strict=True):
        assert torch.equal(a, b)


def test_what_cannot_work_is_said() -> None:
    with pytest.raises(ValueError, match="option data"):
        train(small_run(None))
    with pytest.raises(ValueError, match="no continuous actions"):
        build("CartPole-v1", None, needs=METHOD.needs())


def test_a_saved_policy_acts_the_same(data: str, tmp_path: Path) -> None:
    run = train(small_run(data))
    run.policy.save_pretrained(tmp_path / "model")
    twin = load(tmp_path / "model")
    assert isinstance(twin, DeterministicActorCritic)
    observation = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    assert np.array_equal(run.policy.actor()(observation, None), twin.actor()(observation, None))
