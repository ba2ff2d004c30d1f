"""Claims of SFPO: a linear gradient, a noisy quadratic, token_bandit (P=16, V=4, T=2, G=8, a prompt's step 0.1) and the entropy trigger."""

from __future__ import annotations

from statistics import fmean

import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.method import Method
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.methods.language.sfpo import METHOD as SFPO
from anypo.methods.language.sfpo import alpha_schedule, reposition, step
from anypo.reproductions.common import plain_sgd, steps_to, train_on
from anypo.run import Run
from anypo.seams.groups import masked_mean

SEEDS = (0, 1, 2)
STEP = 1.6  # on the mean over 16 prompts: 0.1 a prompt


def _closed_form(alpha: float) -> Evidence:
    """K = 3 steps with weight alpha against theta* + (I - lr M)(I + 0.8 ((I - lr M)^3 - I))(theta_0 - theta*), the form for alpha 0.8."""
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(5, 5, generator=generator, dtype=torch.float64)
    matrix, bias = root @ root.T / 5 + torch.eye(5, dtype=torch.float64), torch.randn(5, generator=generator, dtype=torch.float64)
    theta, optimum, eye = (
        torch.randn(5, generator=generator, dtype=torch.float64),
        torch.linalg.solve(matrix, bias),
        torch.eye(5, dtype=torch.float64),
    )
    once = eye - 0.1 * matrix
    expected = optimum + once @ (eye + 0.8 * (torch.linalg.matrix_power(once, 3) - eye)) @ (theta - optimum)
    error = float((step(theta, matrix, bias, 0.1, 3, alpha).next - expected).abs().max())
    return Evidence(error, "at most 1e-10", error <= 1e-10)


@claim("with a linear gradient one SFPO step is the closed form of K fast steps, interpolation and a slow step")
def closed_form() -> Evidence:
    return _closed_form(0.8)


@ablation(closed_form, "no repositioning (alpha 1)")
def closed_form_without_reposition() -> Evidence:
    return _closed_form(1.0)


def _noisy_quadratic(inner: int, alpha: float, seed: int, noise: float = 1.0, batches: int = 50) -> Tensor:
    """theta after 50 batches on an ill-conditioned quadratic; each batch has gradient noise of its own, fixed within the batch."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.logspace(-2, 0, 8, dtype=torch.float64)
    theta = torch.ones(8, dtype=torch.float64)
    for _ in range(batches):
        bias = noise * torch.randn(8, generator=generator, dtype=torch.float64) * 0.1
        start = theta
        for _ in range(inner):
            theta = theta - 0.3 * (scale * theta - bias)
        theta = reposition(start, theta, alpha)
        theta = theta - 0.3 * (scale * theta - bias)
    return theta


def _quadratic_loss(inner: int, alpha: float) -> float:
    scale = torch.logspace(-2, 0, 8, dtype=torch.float64)
    return fmean(float(0.5 * (scale * _noisy_quadratic(inner, alpha, seed) ** 2).sum()) for seed in range(200))


def _faster_on_quadratic(inner: int) -> Evidence:
    mine, plain = _quadratic_loss(inner, 0.8), _quadratic_loss(0, 0.0)
    return Evidence({"slow-fast": round(mine, 4), "one step": round(plain, 4)}, "at least 10% below one step a batch", mine < 0.9 * plain)


@claim("on a noisy ill-conditioned quadratic SFPO is lower than one step a batch after the same 50 batches")
def faster_on_quadratic() -> Evidence:
    return _faster_on_quadratic(3)


@ablation(faster_on_quadratic, "no fast steps")
def without_fast_steps() -> Evidence:
    return _faster_on_quadratic(0)


def _variance(alpha: float) -> float:
    return float(torch.stack([_noisy_quadratic(3, alpha, seed, noise=5.0) for seed in range(200)]).var(0).sum())


def _calmer(alpha: float) -> Evidence:
    pulled, naive = _variance(alpha), _variance(1.0)
    return Evidence(
        {f"alpha {alpha}": round(pulled, 3), "alpha 1": round(naive, 3)}, "variance at least 20% below alpha 1", pulled < 0.8 * naive
    )


@claim("where noise dominates, pulling back halfway leaves a smaller variance of the parameters than keeping all fast steps")
def calmer() -> Evidence:
    return _calmer(0.5)


@ablation(calmer, "alpha 1: nothing is pulled back")
def not_calmer() -> Evidence:
    return _calmer(1.0)


def _batches(method: Method) -> float:
    """Mean number of batches until the exact success reaches 0.9."""
    found = []
    for seed in SEEDS:
        task = TokenBandit(seed=seed)
        curve = train_on(plain_sgd(method.but(regularize=()), STEP), task.policy(), task, steps=400, seed=seed, stop=lambda s: s >= 0.9)
        found.append(steps_to(curve, 0.9))
    return fmean(found)


def _fewer_rollouts(method: Method) -> Evidence:
    mine, plain = _batches(method), _batches(GRPO)
    return Evidence({"this": round(mine, 1), "grpo": round(plain, 1)}, "at most half of GRPO's batches to 0.9", mine <= plain / 2)


@claim("token_bandit reaches success 0.9 with at most half of GRPO's rollouts at the same step size", slow=True)
def fewer_rollouts() -> Evidence:
    return _fewer_rollouts(SFPO)


@ablation(fewer_rollouts, "alpha 0: the base update")
def fewer_rollouts_off() -> Evidence:
    return _fewer_rollouts(SFPO.set("update.alpha", 0.0))


def _drift(alpha: float) -> float:
    """Mean |log ratio| to the policy that sampled, after the update, over 60 batches."""

    def watch(run: Run, batch: Batch) -> float:
        return float(masked_mean((run.score(batch, {"logp"}).logp - batch.logp).abs(), batch.mask))

    drifts = []
    for seed in SEEDS:
        task = TokenBandit(seed=seed)
        method = plain_sgd(SFPO.but(regularize=()), STEP).set("update.alpha", alpha)
        drifts += train_on(method, task.policy(), task, steps=60, seed=seed, watch=watch)
    return fmean(drifts)


def _drifts_less(alpha: float) -> Evidence:
    mine, naive = _drift(alpha), _drift(1.0)
    return Evidence(
        {"slow-fast": round(mine, 4), "K+1 naive steps": round(naive, 4)}, "at least 5% below the naive steps", mine < 0.95 * naive
    )


@claim("the policy drifts less from the one that sampled than with K+1 naive steps on the batch", slow=True)
def drifts_less() -> Evidence:
    return _drifts_less(0.8)


@ablation(drifts_less, "alpha 1: nothing is pulled back")
def drifts_as_much() -> Evidence:
    return _drifts_less(1.0)


def _trigger(jump: float) -> Evidence:
    exact = 0
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        entropy = 0.5 + 0.02 * torch.randn(80, generator=generator, dtype=torch.float64)
        entropy[60:] += jump
        off = (alpha_schedule(entropy).alpha == 0).nonzero().flatten().tolist()
        exact += off == list(range(60, 80))
    return Evidence(exact / 200, "> 0.95 of 200 seeds switch off exactly at the jump and stay off", exact / 200 > 0.95)


@claim("the fast part switches off exactly when the entropy jumps, and stays off")
def trigger() -> Evidence:
    return _trigger(0.2)


@ablation(trigger, "no jump")
def no_trigger() -> Evidence:
    return _trigger(0.0)
