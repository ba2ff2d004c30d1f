"""RAT: Woodbury's identity, what the transform reduces to, scores by sample, and the method in the loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anypo.domains.control.setup import build
from anypo.loops.on_policy import step, train
from anypo.method import Method
from anypo.methods.control.rat import METHOD, dual_sweep, kaczmarz, per_sample_scores, transformed_advantages, transformed_loss
from anypo.run import Run
from anypo.seams.natural import policy_parameters
from anypo.seams.update import flatten_actions
from tests.helpers import trained

SMALL = METHOD.set("update.epochs", 2).set("update.minibatches", 4)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def problem(samples: int, parameters: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return numbers(samples, parameters, seed=seed), numbers(samples, seed=seed + 1), 0.5 + numbers(samples, seed=seed + 2).abs()


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.floats(0.01, 10.0), st.integers(0, 10**6))
def test_it_is_the_regularized_natural_gradient(samples: int, parameters: int, lam: float, seed: int) -> None:
    scores, y, ratio = problem(samples, parameters, seed)
    found = transformed_advantages(scores, y, ratio, lam)
    weighted = (ratio / samples)[:, None] * scores
    exact = torch.linalg.solve(lam * torch.eye(parameters, dtype=torch.float64) + scores.T @ weighted, weighted.T @ y)
    torch.testing.assert_close(found.natural_gradient, exact, rtol=1e-7, atol=1e-9)
    one_block = kaczmarz(scores, y, ratio, [list(range(samples))], torch.zeros(parameters, dtype=torch.float64), lam)
    torch.testing.assert_close(one_block.g, found.natural_gradient)


def test_limits_of_the_damping() -> None:
    scores, y, ratio = problem(5, 9, 0)
    vanilla = scores.T @ (ratio * y) / 5
    torch.testing.assert_close(1e9 * transformed_advantages(scores, y, ratio, 1e9).natural_gradient, vanilla, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(scores @ transformed_advantages(scores, y, ratio, 1e-12).natural_gradient, y, rtol=1e-6, atol=1e-8)


def test_orthogonal_scores_divide_each_advantage() -> None:
    scores, (_, y, ratio) = torch.diag(torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)), problem(3, 3, 1)
    size = scores.diagonal() ** 2
    torch.testing.assert_close(transformed_advantages(scores, y, ratio, 0.1).y, y / (size * ratio / 3 + 0.1))


def test_the_gradient_of_the_loss_is_the_natural_gradient() -> None:
    scores, y, ratio = problem(6, 4, 2)
    transformed, natural = transformed_advantages(scores, y, ratio, 0.1)
    theta = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    loss = transformed_loss((scores @ theta)[:, None], ratio[:, None], transformed[:, None], torch.ones(6, 1, dtype=torch.bool))
    torch.testing.assert_close(torch.autograd.grad(loss, theta)[0], -natural)
    like_ppo = -(ratio * (scores @ theta).exp() * transformed).mean()
    torch.testing.assert_close(torch.autograd.grad(like_ppo, theta)[0], -natural)


def test_dual_sweeps_converge_to_the_transform_and_stay_there() -> None:
    scores, y, ratio = problem(8, 5, 3)
    exact = transformed_advantages(scores, y, ratio, 1.0)
    found = torch.zeros_like(y)
    for _ in range(60):
        found = dual_sweep(scores, y, ratio, [[0, 1, 2], [3, 4], [5, 6, 7]], found, 1.0).y
    torch.testing.assert_close(found, exact.y, rtol=1e-5, atol=1e-6)
    still = dual_sweep(scores, y, ratio, [[0, 4], [1, 2]], exact.y, 1.0)
    torch.testing.assert_close(still.y, exact.y)
    torch.testing.assert_close(still.g, exact.natural_gradient)


def small_run(method: Method = SMALL, steps: int = 3, out: Path | None = None, env: str = "CartPole-v1") -> Run:
    policy, task = build(env, None, seed=0, envs=4, horizon=16, hidden=(16, 16))
    run = Run(method, policy, task, steps=steps, seed=0, out=out, checkpoint_every=2)
    if out is not None:
        run.resume()
    return run


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_scores_are_the_gradients_of_single_actions(env: str) -> None:
    run = small_run(env=env)
    batch = flatten_actions(step(run))[:5]
    scores = per_sample_scores(run.policy, batch)
    for i in range(5):
        logp = run.policy.evaluate(batch[i], {"logp"}).logp.sum()
        one = torch.autograd.grad(logp, policy_parameters(run.policy))
        torch.testing.assert_close(scores[i], torch.cat([g.flatten() for g in one]), rtol=1e-4, atol=1e-5)


def test_with_one_minibatch_the_step_is_along_the_natural_gradient() -> None:
    run = small_run(METHOD.set("update.epochs", 1).set("update.minibatches", 1).but(regularize=()), steps=1)
    before = torch.cat([p.detach().flatten() for p in policy_parameters(run.policy)]).clone()
    policy = run.policy.snapshot()
    batch = flatten_actions(step(run))
    moved = torch.cat([p.detach().flatten() for p in policy_parameters(run.policy)]) - before
    from anypo.methods.control.rat import normalized

    exact = transformed_advantages(
        per_sample_scores(policy.requires_grad_(True), batch), normalized(batch.advantage.flatten()), torch.ones(len(batch)), 0.1
    )
    assert torch.cosine_similarity(moved, exact.natural_gradient, dim=0) > 0.9999


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_it_trains_with_finite_numbers(env: str) -> None:
    run = train(small_run(env=env))
    assert all(torch.isfinite(p).all() for p in run.policy.parameters())
    assert run.history[-1]["kl"] > 0 and "value_loss" in run.history[-1]


def test_a_stopped_run_continues_identically(tmp_path: Path) -> None:
    whole = train(small_run(steps=4, out=tmp_path / "whole"))
    train(small_run(steps=2, out=tmp_path / "halves"))
    halves = train(small_run(steps=4, out=tmp_path / "halves"))
    for a, b in zip(whole.policy.parameters(), halves.policy.parameters(), strict=True):
        assert torch.equal(a, b)
    assert whole.state == halves.state


def test_a_policy_with_a_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="kl_old|every single action"):
        trained(SMALL, 1)
