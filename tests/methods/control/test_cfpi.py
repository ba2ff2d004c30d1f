"""CFPI: the operators' limits, exactness for a linear Q, unusable components, and an offline run with its policy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from anypo.domains.control.replay import Recording, write
from anypo.domains.control.setup import build, load
from anypo.loops.off_policy import train
from anypo.method import Method
from anypo.methods.control.cfpi import (
    METHOD,
    VARIANTS,
    ClosedFormPolicy,
    choose,
    delta,
    improved,
    jensen,
    jensen_center,
    lower_bound,
    lse_components,
    mixture_logpdf,
    single,
)
from anypo.run import Run


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mixtures(rows: int = 6, k: int = 3, d: int = 2, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights [B,K], means [B,K,d], covariances [B,K,d,d]."""
    half = 0.3 * numbers(rows, k, d, d, seed=seed)
    return numbers(rows, k, seed=seed + 1).softmax(-1), 0.2 * numbers(rows, k, d, seed=seed + 2), half @ half.mT + 0.05 * torch.eye(d)


def linear(slope: torch.Tensor):  # type: ignore[no-untyped-def]
    """A linear Q with one slope [B,d] a row."""
    return lambda action: ((action * slope[:, None]).sum(-1), slope[:, None].expand_as(action))


def test_tau_one_is_cloning() -> None:
    weights, means, covs = mixtures()
    assert torch.equal(single(means, covs, numbers(6, 3, 2, seed=5), 0.0), means)
    apart = torch.tensor([[-0.9, 0.0], [0.0, 0.0], [0.9, 0.0]], dtype=torch.float64).expand(6, 3, 2)
    found = improved(weights, apart, covs / 100, linear(numbers(6, 2, seed=6)), 0.0)
    peak = (weights.log() - torch.logdet(covs) / 2).argmax(-1)
    assert torch.equal(found, apart[torch.arange(6), peak])


def test_one_component_makes_all_operators_the_same() -> None:
    weights, means, covs = mixtures(k=1)
    g = numbers(6, 2, seed=3)
    limit = 0.5 * torch.logdet(2 * torch.pi * covs[:, 0]) + 0.7
    torch.testing.assert_close(delta(weights, covs, 0.7), limit)
    wanted = single(means[:, 0], covs[:, 0], g, 0.7)
    torch.testing.assert_close(lse_components(weights, means, covs, g[:, None], limit).mu[:, 0], wanted)
    torch.testing.assert_close(jensen(weights, means, covs, g, limit).mu, wanted)
    torch.testing.assert_close(improved(weights, means, covs, linear(g), 0.7), wanted.clamp(-1, 1))


def test_an_isotropic_gaussian_is_shifted_along_the_unit_gradient() -> None:
    mean, g = numbers(5, 3), numbers(5, 3, seed=1)
    found = single(mean, 0.04 * torch.eye(3, dtype=torch.float64).expand(5, 3, 3), g, 0.5)
    torch.testing.assert_close(found, mean + 0.2 * g / g.norm(dim=1, keepdim=True))


def test_a_linear_q_is_maximized_exactly() -> None:
    """Against the Lagrangian's stationary point, found by the gradient of the constraint being parallel to that of Q."""
    weights, means, covs = mixtures(k=1, d=4)
    g = numbers(6, 4, seed=3)
    a = single(means[:, 0], covs[:, 0], g, 0.5).requires_grad_()
    logp = mixture_logpdf(weights, means, covs, a)
    torch.testing.assert_close(-logp, delta(weights, covs, 0.5))
    (normal,) = torch.autograd.grad(-logp.sum(), a)
    torch.testing.assert_close(normal / normal.norm(dim=1, keepdim=True), g / g.norm(dim=1, keepdim=True))


def test_equal_covariances_pool_to_the_weighted_mean() -> None:
    weights, means, covs = mixtures()
    same = covs[:, :1].expand_as(covs)
    center, cov = jensen_center(weights, means, same)
    torch.testing.assert_close(center, (weights[..., None] * means).sum(1))
    torch.testing.assert_close(cov, covs[:, 0])


def test_the_jensen_constraint_binds_and_density_matches_torch() -> None:
    weights, means, covs = mixtures()
    limit = delta(weights, covs, 3.0)
    center, _ = jensen_center(weights, means, covs)
    found = jensen(weights, means, covs, numbers(6, 2, seed=9), limit)
    normal = torch.distributions.MultivariateNormal(means, covs)
    bound = -(weights * normal.log_prob(found.mu[:, None])).sum(1)
    torch.testing.assert_close(bound[found.usable], limit[found.usable])
    assert found.usable.any() and (bound[~found.usable] > limit[~found.usable]).all()
    mixture = torch.distributions.MixtureSameFamily(torch.distributions.Categorical(weights), normal)
    torch.testing.assert_close(mixture_logpdf(weights, means, covs, center), mixture.log_prob(center))


def test_no_gradient_no_shift_and_unusable_or_light_components_stay_out() -> None:
    weights, means, covs = mixtures()
    still = lse_components(weights, means, covs, torch.zeros_like(means), delta(weights, covs, 1.0))
    assert torch.equal(still.mu, means) and torch.isfinite(still.mu).all()
    none = lse_components(weights, means, covs, numbers(6, 3, 2, seed=4), -100.0)
    assert not none.usable.any() and torch.equal(none.mu, means) and none.kappa.eq(0).all()
    assert int(choose(means[0], torch.tensor([1.0, 5.0, 2.0]), torch.tensor([True, False, True]))) == 2
    # two equal Gaussians far apart, the better one with 2% of the weight
    means, covs = torch.tensor([[[-0.5], [0.5]]], dtype=torch.float64), torch.full((1, 2, 1, 1), 0.01, dtype=torch.float64)
    judge, light = linear(torch.ones(1, 1, dtype=torch.float64)), torch.tensor([[0.98, 0.02]], dtype=torch.float64)
    torch.testing.assert_close(improved(light, means, covs, judge, 8.0), torch.tensor([[-0.1]], dtype=torch.float64))
    torch.testing.assert_close(
        improved(light, means, covs, judge, 8.0, 0.01), torch.tensor([[0.5 + 0.1 * (2 * (8 - np.log(49))) ** 0.5]]).double()
    )


def test_the_pessimistic_q_is_the_smaller_twin_and_equal_twins_keep_a_gradient() -> None:
    q = numbers(2, 5)
    torch.testing.assert_close(lower_bound(q, 1.0), q.min(0).values, atol=1e-5, rtol=0)
    equal = torch.zeros(2, 3, requires_grad=True)
    (found,) = torch.autograd.grad(lower_bound(equal, 1.0).sum(), equal)
    torch.testing.assert_close(found, torch.full((2, 3), 0.5))


@pytest.fixture
def data(tmp_path: Path) -> str:
    """Two recordings of 100 steps one after another; the first was cut off, the second ended."""
    rng, count = np.random.default_rng(0), 200
    observation = rng.standard_normal((count + 2, 3)).astype(np.float32)
    following = np.concatenate([observation[1:101], observation[102:]])
    seen = np.concatenate([observation[:100], observation[101:201]])
    action = rng.uniform(-2, 2, (count, 1)).astype(np.float32)
    terminated, truncated = np.zeros(count, dtype=bool), np.zeros(count, dtype=bool)
    terminated[-1] = truncated[99] = True
    write(tmp_path / "steps.npz", Recording(seen, action, -(action[:, 0] ** 2), following, terminated, truncated))
    return str(tmp_path / "steps.npz")


def small_run(data: str | None, method: Method = METHOD, steps: int = 3, out: Path | None = None) -> Run:
    method = method.set("prepare.0.steps", 20).set("rollout.batch_size", 32).set("rollout.steps", 8).set("rollout.warmup", 16)
    policy, task = build("Pendulum-v1", None, needs=method.needs(), seed=0, envs=2, hidden=(16, 16), data=data)
    run = Run(method, policy, task, steps=steps, seed=0, out=out, checkpoint_every=2)
    if out is not None:
        run.resume()
    return run


def test_steps_are_paired_with_the_action_that_followed(data: str) -> None:
    run = train(small_run(data))
    buffer = run.method.rollout.buffer
    rows = buffer.take(torch.arange(len(buffer)))
    assert len(buffer) == 199 and run.actions == 0  # the cut at 99 leaves no following action
    torch.testing.assert_close(rows["next_action"][:98], rows["action"][1:99])
    torch.testing.assert_close(rows["next_action"][99:198], rows["action"][100:])
    assert {"critic_loss", "q"} <= run.history[-1].keys() and all(torch.isfinite(p).all() for p in run.policy.parameters())


def test_the_policy_acts_by_the_operator_in_the_box_and_by_the_recording_with_noise(data: str) -> None:
    run = train(small_run(data, METHOD.set("prepare.1.log_tau", 200.0)))
    policy, x = run.policy, np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    assert isinstance(policy, ClosedFormPolicy) and float(policy.log_tau) == 200.0
    far = policy.actor()(x, None)
    assert np.abs(far).max() <= 1 and (np.abs(far) == 1).any() and policy.for_environment(far).min() >= -2
    noise = policy.noise(np.random.default_rng(0), (4000,))
    drawn = torch.from_numpy(policy.actor()(x[:1].repeat(4000, 0), noise))
    chance = torch.linspace(-1.5, 1.5, 3001)[:, None]
    first = policy.mixture(torch.from_numpy(x[:1]))
    density = first.logp(chance).exp() * 1e-3
    torch.testing.assert_close(drawn.mean(), (density * chance[:, 0].clamp(-1, 1)).sum() / density.sum(), atol=0.06, rtol=0)


def test_only_the_critics_move_in_the_loop(data: str) -> None:
    run = small_run(data)
    train(run)
    before = [p.clone() for p in run.policy.behaviour.parameters()]
    again = Run(METHOD.set("prepare.0.steps", 0).set("rollout.warmup", 16).set("rollout.steps", 4), run.policy, run.task, steps=1)
    critic = next(run.policy.critic.parameters()).clone()
    train(again)
    assert all(torch.equal(a, b) for a, b in zip(before, run.policy.behaviour.parameters(), strict=True))
    assert not torch.equal(critic, next(run.policy.critic.parameters()))


@pytest.mark.parametrize("method", [METHOD, VARIANTS["iterative"]])
def test_a_stopped_run_continues_identically(method: Method, data: str, tmp_path: Path) -> None:
    whole = train(small_run(data, method, 4, tmp_path / "whole"))
    train(small_run(data, method, 2, tmp_path / "halves"))
    halves = train(small_run(data, method, 4, tmp_path / "halves"))
    assert all(torch.equal(a, b) for a, b in zip(whole.policy.parameters(), halves.policy.parameters(), strict=True))


def test_a_saved_policy_acts_the_same(data: str, tmp_path: Path) -> None:
    run = train(small_run(data, METHOD.set("prepare.1.log_tau", 1.5)))
    run.policy.save_pretrained(tmp_path / "model")
    twin, x = load(tmp_path / "model"), np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    assert float(twin.log_tau) == 1.5 and np.array_equal(run.policy.actor()(x, None), twin.actor()(x, None))  # type: ignore[operator]


def test_what_cannot_work_is_said(data: str) -> None:
    with pytest.raises(ValueError, match="option data"):
        train(small_run(None))
    with pytest.raises(ValueError, match="no continuous actions"):
        build("CartPole-v1", None, needs=METHOD.needs())
    with pytest.raises(ValueError, match="log_tau"):
        train(small_run(data, METHOD.set("prepare.1.log_tau", -1.0)))
    with pytest.raises(ValueError, match="at least 1 component"):
        build("Pendulum-v1", None, needs=METHOD.needs(), components=0)
