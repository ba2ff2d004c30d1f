"""Claims of the model-derivative policy gradient with an embedded tracking controller (arXiv:2307.08168) on an unstable scalar system and on a small car
whose model is wrong by a sixth to a third in every number."""

from __future__ import annotations

from functools import cache
from statistics import fmean

import numpy as np
import torch
from torch import Tensor, nn

from anypo.claims import Evidence, ablation, claim
from anypo.domains.control.envs import describe, maker
from anypo.domains.control.tasks import GymTask
from anypo.domains.control.track_car import EFFORT, NAME, REAL, Car, figure_eight
from anypo.domains.control.tracking import TrackingPolicy, lqr_gains
from anypo.loops import on_policy
from anypo.method import Method
from anypo.methods.control.model_tracking_pg import METHOD, input_gradients, model_gradient, pathwise_loss
from anypo.run import Run
from anypo.seams.objective import SequenceReinforce
from anypo.seams.update import GradientSteps

SHORT, LONG = 20, 60  # horizons of the unstable system
ITERATIONS, SEEDS = 15, range(3)


def _drive(policy: TrackingPolicy, car: Car) -> tuple[Tensor, Tensor, float]:
    """A noiseless episode: states with step numbers [T+1,5], inputs [T,2], and the cost."""
    state, seen, taken = policy.model.nominal().reference[0], [], []
    for t in range(car.steps):
        seen.append(torch.tensor([*state, t], dtype=torch.float64))
        with torch.no_grad():
            taken.append(policy.mean(seen[-1]))
        state = car.step(state, taken[-1].numpy()).next
    seen.append(torch.tensor([*state, car.steps], dtype=torch.float64))
    states, inputs = torch.stack(seen), torch.stack(taken)
    error = states[:, :2].numpy() - figure_eight(car.steps + 1)
    return states, inputs, float((error**2).sum() + EFFORT * inputs.square().sum())


def _exactness(real: Car) -> Evidence:
    """Largest relative error of the believed car's gradient along random directions, against central differences on the real car."""
    errors = []
    for seed in SEEDS:
        g = torch.Generator().manual_seed(seed)
        model = Car(steps=real.steps)
        policy = TrackingPolicy(describe(maker(NAME)), hidden=(16, 16), seed=seed, model=model).double()
        last: nn.Linear = policy.network.layers[-1]  # type: ignore[assignment]
        last.weight.data.copy_(0.1 * torch.randn(last.weight.shape, generator=g))
        states, inputs, _ = _drive(policy, real)
        x, u = states[:, :4].numpy(), inputs.numpy()
        parts = [torch.from_numpy(p) for p in (*model.jacobians(x[:-1], u), *model.cost_gradients(x, u))]
        pull = input_gradients(parts[0], parts[1], -policy.gain, parts[2], parts[3])
        loss = pathwise_loss(policy.mean(states[:-1])[None], pull[None], torch.ones(1, len(inputs)))
        parameters = list(policy.parameters())
        gradient = nn.utils.parameters_to_vector(torch.autograd.grad(loss, parameters))
        at = nn.utils.parameters_to_vector(parameters).detach()
        for _ in range(4):
            direction = torch.randn(at.shape, generator=g, dtype=torch.float64)
            direction /= direction.norm()
            costs = []
            for sign in (1, -1):
                nn.utils.vector_to_parameters(at + sign * 1e-6 * direction, parameters)
                costs.append(_drive(policy, real)[2])
            measured = (costs[0] - costs[1]) / 2e-6
            errors.append(abs(float(gradient @ direction) - measured) / abs(measured))
        nn.utils.vector_to_parameters(at, parameters)
    return Evidence(f"{max(errors):.1e}", "relative error < 1e-5", max(errors) < 1e-5)


@claim("With the true model and no noise the model gradient is the exact gradient of the cost (finite differences, 60 steps of the car)")
def exact_with_the_true_model() -> Evidence:
    return _exactness(Car(steps=LONG))


@ablation(exact_with_the_true_model, "the Jacobians of the crude model")
def crude_jacobians_are_not_exact() -> Evidence:
    return _exactness(Car(REAL.gain_a, REAL.gain_s, REAL.drag, REAL.length, LONG))


def _unstable(theta: np.ndarray, gain: float, horizon: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """x+ = 1.15 x + 0.1 u + 0.05 sin x from 0, u = knots [B,8] between which it is linear + gain (sin 0.1 t - x): states, inputs, costs, and how the
    inputs depend on the knots [T,8]."""
    at = np.linspace(0, 7, horizon)
    spread = np.clip(1 - np.abs(at[:, None] - np.arange(8)), 0, None)
    wanted = np.sin(0.1 * np.arange(horizon + 1))
    x, u = np.zeros((len(theta), horizon + 1)), np.zeros((len(theta), horizon))
    for t in range(horizon):
        u[:, t] = theta @ spread[t] + gain * (wanted[t] - x[:, t])
        x[:, t + 1] = 1.15 * x[:, t] + 0.1 * u[:, t] + 0.05 * np.sin(x[:, t])
    return x, u, ((x - wanted) ** 2).sum(1) + EFFORT * (u**2).sum(1), spread


def _error_and_size(seed: int, gain: float, horizon: int) -> tuple[float, float]:
    """Relative error of the model gradient (x+ = 1.1 x + 0.1 u) against central differences, and the size of the true gradient."""
    theta = np.random.default_rng(seed).standard_normal(8)
    x, u, _, spread = _unstable(theta[None], gain, horizon)
    shifted = theta + 1e-4 * np.concatenate([np.eye(8), -np.eye(8)])
    costs = _unstable(shifted, gain, horizon)[2]
    true = (costs[:8] - costs[8:]) / 2e-4
    of_states, of_inputs = 2 * (x[0] - np.sin(0.1 * np.arange(horizon + 1))), 2 * EFFORT * u[0]
    full = lambda value: torch.full((horizon, 1, 1), value, dtype=torch.float64)  # noqa: E731
    parts = [torch.from_numpy(p) for p in (spread[:, None], of_states[:, None], of_inputs[:, None])]
    found = model_gradient(full(1.1), full(0.1), full(-gain), *parts).numpy()
    return float(np.linalg.norm(found - true) / np.linalg.norm(true)), float(np.linalg.norm(true))


def _growth(feedback: bool) -> Evidence:
    """`feedback` False: the controller's gain is 0 in what should be the tracked system too."""
    one = torch.eye(1, dtype=torch.float64)
    gain = float(lqr_gains(1.1 * one, 0.1 * one, one, 0.1 * one, 200).gain_first)

    def measure(k: float) -> tuple[float, float]:
        long = [_error_and_size(seed, k, LONG) for seed in range(10)]
        short = [_error_and_size(seed, k, SHORT)[1] for seed in range(10)]
        return fmean(e for e, _ in long), fmean(np.log10(size / before) for (_, size), before in zip(long, short, strict=True))

    (error, growth), (without_error, without_growth) = measure(gain * feedback), measure(0.0)
    found = {
        "error": round(error, 3), "log10 growth": round(growth, 2), "error without": round(without_error, 3),
        "log10 growth without": round(without_growth, 2),
    }  # fmt: skip
    holds = error < 0.5 and growth < 1 and without_error > 0.8 and without_growth > 4
    return Evidence(found, "error < 0.5 and growth < 10x with feedback; > 0.8 and > 1e4x without", holds)


@claim(
    "On an unstable system the tracking controller keeps the model gradient near the true one at 60 steps and its size bounded from 20 to 60; without "
    "feedback the model gradient is off and explodes"
)
def feedback_keeps_gradients_small_and_right() -> Evidence:
    return _growth(True)


@ablation(feedback_keeps_gradients_small_and_right, "no feedback")
def open_loop_gradients_explode() -> Evidence:
    return _growth(False)


LIKELIHOOD_RATIO = METHOD.but(
    objective=SequenceReinforce(), update=GradientSteps(learning_rate=1e-3, optimizer="adam", max_grad_norm=None)
)  # of the rates 1e-3 and 3e-3 and explorations 0.1 and 0.3 the pair that ended lowest


@cache
def _costs(which: str, seed: int) -> tuple[float, ...]:
    """Mean cost of 20 held-out episodes before the first of 15 iterations of 3 real episodes, and after each. `which`: model, likelihood or open."""
    task = GymTask(NAME)
    policy = TrackingPolicy(task.spaces, exploration=0.1 if which == "likelihood" else 0.0, feedback=which != "open", seed=seed)
    method: Method = LIKELIHOOD_RATIO if which == "likelihood" else METHOD
    run = Run(method, policy, task, steps=ITERATIONS, seed=seed)
    costs = [-float(task.held_out(policy, 20)[0].mean())]
    while not run.finished:
        on_policy.step(run)
        costs.append(-float(task.held_out(policy, 20)[0].mean()))
    return tuple(costs)


def _car(which: str) -> Evidence:
    start = fmean(_costs("model", seed)[0] for seed in SEEDS)
    left, baseline = (max(_costs(w, seed)[-1] for seed in SEEDS) / start for w in (which, "likelihood"))
    best = min(_costs("likelihood", seed)[-1] for seed in SEEDS) / start
    found = {"uncorrected cost": round(start, 2), "share left": round(left, 3), "likelihood ratio, lowest": round(best, 3)}
    holds = (
        left <= 0.5 and best > 0.6
    )  # the spec's estimate for the likelihood ratio was 0.8; it left 0.69 to 0.88 on the seeds used for choosing
    return Evidence(found | {"highest": round(baseline, 3)}, "at most 0.5 left; likelihood ratio more than 0.6", holds)


@claim(
    "45 real episodes in 15 iterations at least halve the tracking cost of the uncorrected controller; the likelihood-ratio gradient does not"
)
def cost_is_halved() -> Evidence:
    return _car("model")


@ablation(cost_is_halved, "no derivatives of the model: likelihood-ratio gradients")
def likelihood_ratio_does_not_halve_it() -> Evidence:
    return _car("likelihood")


@ablation(cost_is_halved, "no feedback: the network corrects the inputs themselves")
def open_loop_does_not_halve_it() -> Evidence:
    return _car("open")


def _falls(which: str) -> Evidence:
    falls = [sum(b < a for a, b in zip(c, c[1:], strict=False)) for c in (_costs(which, seed) for seed in SEEDS)]
    return Evidence(falls, "at least 12 of 15 iterations lower the cost, every seed", min(falls) >= 12)


@claim("Learning is reliable: at least 12 of 15 iterations lower the car's tracking cost")
def cost_falls_steadily() -> Evidence:
    return _falls("model")


@ablation(cost_falls_steadily, "no feedback: the network corrects the inputs themselves")
def open_loop_is_not_steady() -> Evidence:
    return _falls("open")
