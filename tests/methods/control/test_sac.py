"""SAC and GAE: what the spec says they reduce to, which loss reaches which parameters, the twin critics as one, and the loop."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anypo import catalogue
from anypo.batch import Batch
from anypo.domains.control.policy import ControlPolicy
from anypo.domains.control.setup import build
from anypo.domains.control.soft import SquashedGaussianActorCritic, TwinCritic, stored_logp
from anypo.loops.off_policy import step
from anypo.methods.control.sac import METHOD, q_target, sac_losses, squashed_logp
from anypo.policy import MissingSignal
from anypo.run import Run
from anypo.seams.credit import gae


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_lambda_0_is_the_temporal_difference_and_gamma_0_the_reward() -> None:
    reward, value, following = numbers(3, 6), numbers(3, 6, seed=1), numbers(3, 6, seed=2)
    ends, whole = torch.zeros(3, 6), torch.ones(3, 6, dtype=torch.bool)
    found = gae(reward, value, ends, ends, whole, 0.9, 0.0, next_value=following)
    torch.testing.assert_close(found.advantages, reward + 0.9 * following - value, rtol=0, atol=1e-14)
    found = gae(reward, value, ends, ends, whole, 0.0, 0.7, next_value=following)
    torch.testing.assert_close(found.advantages, reward - value, rtol=0, atol=1e-14)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 12), st.floats(0.0, 1.0), st.integers(0, 10**6))
def test_lambda_1_is_the_monte_carlo_return(horizon: int, gamma: float, seed: int) -> None:
    reward, value, last = numbers(2, horizon, seed=seed), numbers(2, horizon, seed=seed + 1), numbers(2, seed=seed + 2)
    ends, whole = torch.zeros(2, horizon), torch.ones(2, horizon, dtype=torch.bool)
    found = gae(reward, value, ends, ends, whole, gamma, 1.0, bootstrap_value=last)
    for t in range(horizon):
        powers = gamma ** torch.arange(horizon - t, dtype=torch.float64)
        total = (reward[:, t:] * powers).sum(1) + gamma ** (horizon - t) * last
        torch.testing.assert_close(found.advantages[:, t], total - value[:, t])
        torch.testing.assert_close(found.returns[:, t], total)


def test_a_boundary_without_a_value_after_it_may_be_either_kind() -> None:
    reward, value, following = numbers(2, 5), numbers(2, 5, seed=1), numbers(2, 5, seed=2)
    following[:, 2] = 0
    boundary, none, whole = torch.zeros(2, 5), torch.zeros(2, 5), torch.ones(2, 5, dtype=torch.bool)
    boundary[:, 2] = 1
    ended = gae(reward, value, boundary, none, whole, 0.9, 0.8, next_value=following)
    cut = gae(reward, value, none, boundary, whole, 0.9, 0.8, next_value=following)
    assert torch.equal(ended.advantages, cut.advantages)


def test_the_target_reduces_as_the_spec_says() -> None:
    reward, q, logp = numbers(4), numbers(2, 4, seed=1), numbers(4, seed=2)
    plain = q_target(reward, torch.zeros(4), q, logp, 0.9, 0.0)
    torch.testing.assert_close(plain, reward + 0.9 * torch.minimum(q[0], q[1]))
    assert torch.equal(q_target(reward, torch.ones(4), q, logp, 0.9, 0.3), reward)


def test_the_squashed_density_is_torchs_and_stays_finite_far_out() -> None:
    mean, log_std, noise = numbers(5, 2), 0.3 * numbers(5, 2, seed=1), numbers(5, 2, seed=2)
    action, logp = squashed_logp(mean, log_std, noise)
    transforms = torch.distributions
    theirs = transforms.TransformedDistribution(transforms.Normal(mean, log_std.exp()), transforms.TanhTransform(cache_size=1))
    x = mean + log_std.exp() * noise
    torch.testing.assert_close(logp, theirs.log_prob(theirs.transforms[0](x)).sum(-1))
    torch.testing.assert_close(stored_logp(action, mean, log_std), logp, rtol=1e-5, atol=1e-6)
    _, far = squashed_logp(torch.full((1, 1), 40.0), torch.zeros(1, 1), torch.zeros(1, 1))
    assert math.isfinite(float(far))
    assert torch.isfinite(stored_logp(torch.tensor([[1.0]]), torch.zeros(1, 1), torch.zeros(1, 1))).all()


def test_the_actor_loss_leaves_the_temperature_alone_and_the_temperature_loss_the_actor() -> None:
    alpha = torch.tensor(0.2, dtype=torch.float64, requires_grad=True)
    logp, q_new = numbers(4).requires_grad_(), numbers(2, 4, seed=1).requires_grad_()
    losses = sac_losses(numbers(2, 4, seed=2), numbers(4, seed=3), q_new, logp, alpha, -1.0)
    assert torch.autograd.grad(losses.actor, alpha, allow_unused=True, retain_graph=True) == (None,)
    assert torch.autograd.grad(losses.temperature, logp, allow_unused=True, retain_graph=True) == (None,)
    torch.testing.assert_close(torch.autograd.grad(losses.temperature, alpha)[0], -(logp.detach().mean() - 1.0))


def test_twin_critics_are_two_separate_perceptrons() -> None:
    twin = TwinCritic((3, 8, 8, 1))
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    for i, q in enumerate(twin(x)):
        hidden = x
        for layer, (weight, bias) in enumerate(zip(twin.weights, twin.biases, strict=True)):
            hidden = hidden @ weight[i] + bias[i]
            hidden = hidden.relu() if layer < 2 else hidden
        torch.testing.assert_close(q, hidden[:, 0])
    x.requires_grad_()
    twin(x, frozen=True).sum().backward()
    assert x.grad is not None and all(p.grad is None for p in twin.parameters())


def small_run(method: object = METHOD, **options: object) -> Run:
    method = method.set("rollout.batch_size", 32).set("rollout.warmup", 16).set("rollout.steps", 16)  # type: ignore[attr-defined]
    policy, task = build("Pendulum-v1", None, needs={"q_new"}, hidden=(16, 16), **options)
    return Run(method, policy, task, steps=4, seed=0)


def test_each_part_gets_only_its_own_gradient() -> None:
    run = small_run()
    step(run)
    policy, part = run.policy, run.method.rollout.draw(run)
    part.advantage = run.method.credit(part, run)
    assert not part.advantage.requires_grad
    roles = {g["role"]: g["params"] for g in policy.parameter_groups()}
    for component, trained in zip(run.loss_fn.parts, ("policy", "value", "temperature"), strict=True):
        policy.zero_grad()
        component(part, policy.evaluate(part, component.needs), run).value.backward()
        for role, parameters in roles.items():
            moved = any(p.grad is not None and bool((p.grad != 0).any()) for p in parameters)
            assert moved == (role == trained), (type(component).__name__, role)


@pytest.mark.parametrize("wide", [False, True])
def test_the_gradient_by_hand_is_that_of_autograd(wide: bool) -> None:
    run = small_run()
    step(run)
    policy, part, loss_fn = run.policy, run.method.rollout.draw(run), run.loss_fn
    with torch.no_grad():  # with `wide`, some standard deviations reach their bound
        policy.actor_network.layers[-1].weight.mul_(600 if wide else 30)
    part.advantage = run.method.credit(part, run)
    assert loss_fn.has_gradient
    results = []
    for by_hand in (True, False):
        loss_fn.has_gradient = by_hand
        policy.zero_grad()
        loss = policy.backward(part, loss_fn.needs, loss_fn)
        results.append((float(loss.value), loss.metrics, [p.grad.clone() for p in policy.parameters() if p.requires_grad]))
    (value, metrics, ours), (theirs_value, theirs_metrics, theirs) = results
    assert value == pytest.approx(theirs_value, rel=1e-4) and metrics == pytest.approx(theirs_metrics, rel=1e-4)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-3)


def test_training_moves_everything_and_targets_follow_slowly() -> None:
    run = small_run()
    policy: SquashedGaussianActorCritic = run.policy  # type: ignore[assignment]
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    for _ in range(3):
        step(run)
    after = policy.state_dict()
    assert all(not torch.equal(before[name], after[name]) for name in before)
    online = max(float((after[n] - before[n]).abs().max()) for n in before if n.startswith("critic."))
    target = max(float((after[n] - before[n]).abs().max()) for n in before if n.startswith("target_critic."))
    assert 0 < target < 0.5 * online
    assert float(run.method.rollout.buffer.take(torch.arange(30))["action"].min()) >= -1


def test_without_its_loss_the_temperature_stands_still() -> None:
    run = small_run(METHOD.but(regularize=METHOD.regularize[:1]))
    for _ in range(2):
        step(run)
    assert run.version > 0 and float(run.policy.log_temperature) == 0.0


def test_truncation_is_not_stored_as_an_end() -> None:
    run = small_run(METHOD.set("rollout.steps", 200))
    run.method.rollout.steps = 200
    batch = run.method.rollout(run.method.select(run.task, run), run)
    batch.reward = run.method.reward(batch, run)
    run.method.rollout.remember(batch)
    assert batch.truncated[0, -1] and not run.method.rollout.buffer.take(torch.arange(200))["terminated"].any()


def test_a_policy_without_critics_is_refused() -> None:
    _, task = build("Pendulum-v1", None)
    with pytest.raises(MissingSignal, match="sac needs the signal"):
        Run(METHOD, ControlPolicy(task.spaces), task, steps=1)


def test_the_target_at_an_end_is_the_reward() -> None:
    run = small_run()
    step(run)
    part: Batch = run.method.rollout.draw(run)
    part.terminated = torch.ones_like(part.terminated)
    torch.testing.assert_close(run.method.credit(part, run), part.reward)
    assert catalogue.get("sac").loop == "off_policy"
