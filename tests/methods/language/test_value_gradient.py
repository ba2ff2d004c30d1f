import math

import pytest
import torch

from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.loops.on_policy import step
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.methods.language.value_gradient import (
    STUDY,
    AttentionPolicy,
    ImpactMeter,
    costates,
    gradients,
    impact,
    objective,
    riccati,
    value_gradient,
)
from anypo.run import Run

PROBLEM = {"a": 0.9, "b": 0.5, "k": 0.4, "sigma": 0.3, "q": 1.2, "c": 0.1}


def noise(paths=6, horizon=5, seed=0):
    return torch.randn(paths, horizon, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def total_return(xi, s0, k, start=0):
    """Return from time `start` on, written out once more."""
    s, value = s0, 0.0
    for t in range(start, xi.shape[-1]):
        u = -k * s + PROBLEM["sigma"] * xi[..., t]
        value = value - PROBLEM["q"] * s**2 - PROBLEM["c"] * u**2
        s = PROBLEM["a"] * s + PROBLEM["b"] * u
    return value - PROBLEM["q"] * s**2


def test_costates_are_the_derivatives_of_the_return():
    xi = noise()
    found = costates(xi, 0.8, **PROBLEM)
    for t in range(6):
        state = found.s[:, t].clone().requires_grad_()
        wanted = torch.autograd.grad(total_return(xi, state, PROBLEM["k"], t).sum(), state)[0]
        torch.testing.assert_close(found.lam[:, t], wanted)


def test_the_pathwise_gradient_is_the_derivative_of_the_return():
    xi = noise()
    k = torch.full((6,), PROBLEM["k"]).double().requires_grad_()
    wanted = torch.autograd.grad(total_return(xi, torch.full((6,), 0.8).double(), k).sum(), k)[0]
    torch.testing.assert_close(gradients(xi, 0.8, **(PROBLEM | {"k": k[0].item()})).pathwise, wanted)


def test_without_noise_the_costates_are_the_value_gradient():
    still = PROBLEM | {"sigma": 0.0}
    found = costates(noise(), torch.linspace(-1, 1, 6).double(), **still)
    torch.testing.assert_close(found.lam, value_gradient(found.s, **still, T=5))
    with pytest.raises(ValueError, match="a sigma above 0"):
        gradients(noise(), 0.8, **still)


def test_value_gradient_and_objective_belong_together():
    s = torch.tensor([0.3, -0.7, 1.1]).double()
    p, z = riccati(**PROBLEM, T=2)
    state = s.clone().requires_grad_()
    torch.testing.assert_close(value_gradient(s, **PROBLEM, T=2), torch.autograd.grad((-p * state**2 - z).sum(), state)[0])
    assert objective(0.3, **PROBLEM, T=2) == pytest.approx(float(-p[0] * 0.09 - z[0]))


def quadrature(order=20):
    import numpy as np

    points, weights = np.polynomial.hermite_e.hermegauss(order)
    return torch.tensor(points), torch.tensor(weights) / math.sqrt(2 * math.pi)


def test_one_step_is_the_reparametrization_identity():
    points, weights = quadrature()
    found = gradients(points[:, None], 0.8, **PROBLEM)
    up, down = (objective(0.8, **(PROBLEM | {"k": PROBLEM["k"] + h}), T=1) for h in (1e-5, -1e-5))
    exact = torch.tensor((up - down) / 2e-5).double()
    torch.testing.assert_close(weights @ found.pathwise, exact, rtol=1e-6, atol=0)
    torch.testing.assert_close(weights @ found.score, exact, rtol=1e-6, atol=0)


def test_two_steps_agree_exactly_and_the_mean_costate_is_the_value_gradient():
    points, weights = quadrature()
    grid = torch.cartesian_prod(points, points)
    weight = torch.outer(weights, weights).flatten()
    found = gradients(grid, 0.8, **PROBLEM)
    torch.testing.assert_close(weight @ found.pathwise, weight @ found.score, rtol=1e-8, atol=0)
    start = costates(grid, 0.8, **PROBLEM)
    torch.testing.assert_close(weight @ start.lam[:, 0], value_gradient(start.s[0], **PROBLEM, T=2)[0])


def test_leading_dimensions():
    xi = noise(6, 4).view(2, 3, 4)
    for many, one in zip(costates(xi, 0.5, **PROBLEM), costates(xi[1, 2], 0.5, **PROBLEM), strict=True):
        torch.testing.assert_close(many[1, 2], one)
    assert gradients(xi, 0.5, **PROBLEM).score.shape == (2, 3)


def test_decided_prompts_have_no_impact():
    found = impact(torch.tensor([[0.0, 1.0, 1.0], [0.5, 0.0, 1.0], [0.5, 0.5, 0.5]]).double(), 16)
    assert found.impact[0] == found.signal[0] == found.headroom[0] == 0 and found.best == 2
    assert (impact(torch.rand(3, 5).double(), 1).headroom.abs() < 1e-12).all()
    torch.testing.assert_close(found.headroom[1] * 3, torch.tensor(0.5 - 0.5**16).double())


def test_a_measured_signal_takes_the_place_of_the_estimate():
    p = torch.tensor([[0.2, 0.4], [0.5, 0.5]]).double()
    found = impact(p, 8, signal=torch.tensor([3.0, 0.0]).double())
    assert found.best == 0 and found.impact[1] == 0
    torch.testing.assert_close(found.impact[0], 3 * impact(p, 8).headroom[0])


@pytest.mark.parametrize(("p", "k"), [([[1.2]], 4), ([[-0.1]], 4), ([[0.5]], 0)])
def test_what_is_no_success_rate_is_refused(p, k):
    with pytest.raises(ValueError, match="success rates lie in"):
        impact(torch.tensor(p).double(), k)


def test_a_certain_policy_has_equal_costates():
    policy = AttentionPolicy.random(0)
    relaxed, sampled = policy.costates(1, None, beta=60.0), policy.costates(3, torch.Generator().manual_seed(0), beta=60.0)
    torch.testing.assert_close(sampled.costate, relaxed.costate.expand(3, -1, -1))
    assert sampled.gap.max() < 1e-10 and sampled.entropy.max() < 1e-10 and relaxed.gap.max() == 0


def test_relaxed_costates_are_the_derivatives_of_the_relaxed_reward():
    policy, nudge = AttentionPolicy.random(1), torch.randn(16, generator=torch.Generator().manual_seed(3)).double()

    def reward(start):
        inputs, features = [start[None]], []
        for favourite in policy.favourite.tolist():
            features.append(policy.feature(torch.stack(inputs, 1)))
            logits = features[-1] @ policy.head
            logits[:, favourite] += 2.0
            inputs.append(logits.softmax(-1) @ policy.embedding)
        return float(-((torch.cat(features).mean(0) - policy.target) ** 2).sum())

    found = policy.costates(1, None, beta=2.0).costate
    assert found.shape == (1, 8, 16)
    slope = (reward(policy.start + 1e-5 * nudge) - reward(policy.start - 1e-5 * nudge)) / 2e-5
    assert float(found[0, 0] @ nudge) == pytest.approx(slope, rel=1e-6)


def test_only_attention_carries_an_input_to_later_features():
    policy = AttentionPolicy.random(2)
    sampled = [policy.costates(4, torch.Generator().manual_seed(1), through_attention=through) for through in (True, False)]
    torch.testing.assert_close(sampled[0].gap, sampled[1].gap)
    assert not torch.allclose(sampled[0].costate, sampled[1].costate)
    assert (sampled[1].costate - sampled[1].costate[:, :1]).abs().max() < 1e-12  # the residual path is the same at every position
    assert not policy.embedding.requires_grad


def test_the_meter_logs_the_criterion_of_any_run():
    task = TokenBandit(seed=0)
    run = Run(GRPO.but(control=ImpactMeter()), task.policy(), task, steps=3, seed=0)
    for _ in range(3):
        batch = step(run)
        rates = torch.stack([batch.reward[batch.group == g].mean() for g in range(16)])[None]
        assert run.history[-1]["impact"] == pytest.approx(float(impact(rates).impact))
        assert run.history[-1]["impact"] == pytest.approx(run.history[-1]["signal"] * run.history[-1]["headroom"])


def test_the_meter_refuses_several_rewards():
    task = TokenBandit(seed=0)
    run = Run(GRPO, task.policy(), task, steps=1, seed=0)
    batch = step(run)
    with pytest.raises(ValueError, match="one success rate a response"):
        ImpactMeter()(batch.but(reward=torch.zeros(len(batch), 2), objectives=("a", "b")), run)


def test_the_study_runs():
    found = STUDY.run(seed=1, paths=2000, T=4)
    assert found["pathwise_std"] < found["score_std"] and abs(found["pathwise"] - found["exact"]) < 0.3
    assert found["costate_error_beta_8"] < found["costate_error_beta_2"]
