"""Model-derivative policy gradient: the adjoint against the forward form and autograd, the car, the tracking policy, and the method on the car."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from anypo.domains.control.saved import load, save
from anypo.domains.control.setup import build
from anypo.domains.control.track_car import STEERING, Car, RealCar
from anypo.domains.control.tracking import TrackingPolicy, lqr_gains, riccati
from anypo.loops import on_policy
from anypo.methods.control.model_tracking_pg import METHOD, input_gradients, model_gradient, pathwise_loss
from anypo.run import Run
from anypo.seams.objective import SequenceReinforce
from tests.helpers import assert_continues

N, M, P, T = 3, 2, 5, 6


def parts(seed: int, steps: int = T) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = ((steps, N, N), (steps, N, M), (steps, M, N), (steps, M, P), (steps + 1, N), (steps, M))
    return [0.5 * torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("seed", range(3))
def test_adjoint_is_the_forward_form(seed: int) -> None:
    a, b, dpi_dx, dpi_dtheta, dl_dx, dl_du = parts(seed)
    s, total = torch.zeros(N, P, dtype=torch.float64), torch.zeros(P, dtype=torch.float64)
    for t in range(T):
        du = dpi_dx[t] @ s + dpi_dtheta[t]
        total += dl_dx[t] @ s + dl_du[t] @ du
        s = a[t] @ s + b[t] @ du
    torch.testing.assert_close(model_gradient(a, b, dpi_dx, dpi_dtheta, dl_dx, dl_du), total + dl_dx[T] @ s)


def test_one_step() -> None:
    a, b, dpi_dx, dpi_dtheta, dl_dx, dl_du = parts(3, steps=1)
    expected = dpi_dtheta[0].T @ (dl_du[0] + b[0].T @ dl_dx[1])
    torch.testing.assert_close(model_gradient(a, b, dpi_dx, dpi_dtheta, dl_dx, dl_du), expected)


@pytest.mark.parametrize("feedback", [1.0, 0.0])
def test_true_linear_model_gives_the_gradient_by_autograd(feedback: float) -> None:
    """With feedback 0 this is the open-loop model gradient."""
    a, b, dpi_dx, _, target, _ = parts(4)
    theta = torch.linspace(-1, 1, T * M, dtype=torch.float64).view(T, M).requires_grad_()
    x, states, inputs = torch.ones(N, dtype=torch.float64), [], []
    for t in range(T):
        states.append(x)
        inputs.append(feedback * dpi_dx[t] @ x + theta[t])
        x = a[t] @ x + b[t] @ inputs[t]
    seen, taken = torch.stack([*states, x]), torch.stack(inputs)
    (expected,) = torch.autograd.grad((seen - target).square().sum() + taken.square().sum(), theta)
    found = input_gradients(a, b, feedback * dpi_dx, 2 * (seen - target).detach(), 2 * taken.detach())
    torch.testing.assert_close(found, expected)


def test_leading_dimensions_and_the_loss() -> None:
    batch = [torch.stack(x) for x in zip(parts(5), parts(6), strict=True)]
    a, b, dpi_dx, dpi_dtheta, dl_dx, dl_du = batch
    pull = input_gradients(a, b, dpi_dx, dl_dx, dl_du)
    theta = torch.zeros(P, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(2, T)
    (found,) = torch.autograd.grad(pathwise_loss(dpi_dtheta @ theta, pull, mask), theta)
    torch.testing.assert_close(found, (model_gradient(*parts(5)) + model_gradient(*parts(6))) / 2)
    mask[:, -1] = 0
    broken = pull.clone()
    broken[:, -1] = torch.nan
    assert torch.isfinite(pathwise_loss((dpi_dtheta @ theta).detach(), broken, mask))


def test_jacobians_of_the_car_and_the_clamped_steering() -> None:
    car, rng = Car(0.7, 0.85, 0.15, 0.35), np.random.default_rng(0)
    x, u = rng.standard_normal((5, 4)), 0.3 * rng.standard_normal((5, 2)).clip(-1.5, 1.5)
    moves = car.step(x, u)
    for i in range(4):
        shift = 1e-6 * np.eye(4)[i]
        np.testing.assert_allclose((car.step(x + shift, u).next - car.step(x - shift, u).next) / 2e-6, moves.a[..., i], atol=1e-8)
    for i in range(2):
        shift = 1e-6 * np.eye(2)[i]
        np.testing.assert_allclose((car.step(x, u + shift).next - car.step(x, u - shift).next) / 2e-6, moves.b[..., i], atol=1e-8)
    u[:, 1] = STEERING + 1
    assert (car.step(x, u).b[..., 1] == 0).all() and (car.step(x, u).next == car.step(x, u + np.array([0, 1])).next).all()


def test_nominal_inputs_lead_from_state_to_state_in_the_model() -> None:
    car = Car()
    reference, feedforward = car.nominal()
    reachable = np.abs(feedforward[:, 1]) < STEERING
    assert 50 < reachable.sum() < 100  # the sharp turns want more than the steering can do
    np.testing.assert_allclose(car.step(reference[:-1], feedforward).next[reachable], reference[1:][reachable], atol=1e-9)


def test_gains_converge_and_stabilize() -> None:
    one = torch.eye(1, dtype=torch.float64)
    first = lqr_gains(1.1 * one, 0.1 * one, one, 0.1 * one, 200).gain_first
    torch.testing.assert_close(first, lqr_gains(1.1 * one, 0.1 * one, one, 0.1 * one, 300).gain_first)
    assert float((1.1 - 0.1 * first).abs()) < 1
    gains, _ = riccati((1.1 * one).expand(7, 1, 1), (0.1 * one).expand(7, 1, 1), one, 0.1 * one)
    torch.testing.assert_close(gains[3], lqr_gains(1.1 * one, 0.1 * one, one, 0.1 * one, 4).gain_first)


def policy_on_car(**options: object) -> TrackingPolicy:
    policy, _ = build("TrackCar-v0", None, needs={"feedback"}, seed=1, **options)
    assert isinstance(policy, TrackingPolicy)
    return policy.double()


def test_the_policy_begins_as_the_controller_and_wraps_angles() -> None:
    policy, g = policy_on_car(), torch.Generator().manual_seed(0)
    x, now = torch.randn(6, 4, generator=g, dtype=torch.float64), torch.arange(0, 96, 16)
    seen = torch.cat([x, now[:, None]], dim=1)
    error = policy.reference[now] - x
    error[:, 3] = torch.atan2(error[:, 3].sin(), error[:, 3].cos())
    expected = policy.feedforward[now] + torch.einsum("bmn,bn->bm", policy.gain[now], error)
    torch.testing.assert_close(policy.mean(seen), expected)
    turned = seen + torch.tensor([0, 0, 0, 2 * torch.pi, 0], dtype=torch.float64)
    torch.testing.assert_close(policy.mean(turned), expected)


@pytest.mark.parametrize("feedback", [True, False])
def test_feedback_is_the_jacobian_of_the_action(feedback: bool) -> None:
    policy = policy_on_car(feedback=feedback)
    run = Run(METHOD, policy.float(), build("TrackCar-v0", None, needs={"feedback"})[1], steps=1)
    batch = on_policy.step(run)
    where = batch.context[0, 40]
    found = torch.autograd.functional.jacobian(policy.mean, where)[:, :4]
    torch.testing.assert_close(batch.signals["old_feedback"][0, 40], found)
    assert feedback or (found == 0).all()


def run_on_car(steps: int, out: Path | None = None, method: object = METHOD, **options: object) -> Run:
    policy, task = build("TrackCar-v0", None, needs={"feedback"}, seed=0, hidden=(8, 8), **options)
    run = Run(method, policy, task, steps=steps, seed=0, out=out, checkpoint_every=2)  # type: ignore[arg-type]
    if out is not None:
        run.resume()
    return run


def test_training_lowers_the_cost_and_steps_along_the_model_gradient() -> None:
    run = on_policy.train(run_on_car(4))
    costs = [r["cost"] for r in run.history]
    assert np.isfinite(costs).all() and costs[-1] < costs[0]
    again = run_on_car(1)
    before = torch.nn.utils.parameters_to_vector(again.policy.parameters()).detach().clone()
    batch = on_policy.step(again)
    moved = torch.nn.utils.parameters_to_vector(again.policy.parameters()).detach() - before
    other = run_on_car(1).policy
    mean = other.evaluate(batch, {"mean"}).mean
    gradient = torch.autograd.grad(pathwise_loss(mean, batch.signals["input_gradient"], batch.mask), list(other.parameters()))
    torch.testing.assert_close(moved, -3e-4 * torch.cat([x.flatten() for x in gradient]), atol=1e-6, rtol=1e-3)
    assert batch.mask.shape == (3, 100) and (batch.context[:, 0, 4] == 0).all()


def test_a_run_resumes_exactly(tmp_path: Path) -> None:
    def run_to(out: Path, upto: int) -> Run:
        run = run_on_car(4, out)
        while run.step < upto:
            on_policy.step(run)
        return run

    assert_continues(run_to, tmp_path, "cost")


def test_the_likelihood_ratio_baseline_takes_the_same_credit() -> None:
    run = on_policy.train(run_on_car(2, method=METHOD.but(objective=SequenceReinforce()), exploration=0.1))
    assert all(np.isfinite(r["grad_norm"]) and r["grad_norm"] > 0 for r in run.history)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="no model to take derivatives of"):
        build("CartPole-v1", None, needs={"feedback"})
    run = run_on_car(1)
    batch = run.collect(run.task.prompts(2, run.rng))  # the task's own horizon, not an episode
    with pytest.raises(ValueError, match="whole episodes"):
        run.method.credit(batch, run)


def test_noise_is_drawn_with_the_start_and_a_policy_comes_back_from_disk(tmp_path: Path) -> None:
    starts = [RealCar().reset(np.random.default_rng(seed)) for seed in (0, 0, 1)]
    assert (starts[0] == starts[1]).all() and (starts[0][5:] != starts[2][5:]).any()
    policy, _ = build("TrackCar-v0", None, needs={"feedback"}, seed=2, exploration=0.2)
    save(policy, tmp_path)  # type: ignore[arg-type]
    loaded = load(tmp_path)
    seen = torch.randn(3, 5).abs()
    torch.testing.assert_close(loaded.mean(seen), policy.mean(seen))
    assert loaded.configuration == policy.configuration  # type: ignore[attr-defined]
