"""Claims of BNPO: the normalizer of least variance, its adaptation, and a bandit of 64 prompts with different success rates."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from statistics import fmean, pstdev

import torch
from torch import Tensor

from anypo.claims import Evidence, ablation, claim
from anypo.domains.language.toys.token_bandit import TabularTokens, TokenBandit
from anypo.method import Method
from anypo.methods.language.bnpo import METHOD as BNPO
from anypo.methods.language.bnpo import BetaParameters, beta_params, variance_factor
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.reproductions.common import plain_sgd, train_on
from anypo.run import Run

SEEDS = (0, 1, 2)
PROMPTS, ARMS, SIZE = 64, 8, 16
STEP = 0.3 * PROMPTS  # on the gradient of the batch mean
METHODS = {
    "bnpo": BNPO,
    "plain": BNPO.set("credit.alpha", 1.0).set("credit.beta", 1.0),  # REINFORCE with the group's mean as baseline
    "like grpo": BNPO.set("credit.alpha", 1.5).set("credit.beta", 1.5),  # GRPO times pi/8
    "grpo": GRPO.but(regularize=()),
}


def _optimum(a: float, b: float) -> tuple[float, float]:
    return 1 + a / 3, 1 + b / 3


def _least_variance(choose: Callable[[float, float], tuple[float, float]]) -> Evidence:
    """The chosen normalizer against a grid of others, and the closed form against a Monte Carlo estimate."""
    generator, found, holds = torch.Generator().manual_seed(0), {}, True
    for a, b in ((2.0, 5.0), (5.0, 2.0), (6.0, 6.0)):
        alpha, beta = choose(a, b)
        chosen = variance_factor(a, b, alpha, beta)
        grid = [1 + i / 20 for i in range(80)]
        best = min(variance_factor(a, b, x, y) for x in grid for y in grid)
        gammas = [torch._standard_gamma(torch.full((400_000,), k, dtype=torch.float64), generator=generator) for k in (a, b)]
        p = gammas[0] / (gammas[0] + gammas[1])
        normalizer = torch.distributions.Beta(*torch.tensor([alpha, beta], dtype=torch.float64))
        density = normalizer.log_prob(p).exp()
        sampled = float((p * (1 - p) / density**2).mean())
        found[f"Beta({a:g},{b:g})"] = {
            "chosen": round(chosen, 5),
            "best of the grid": round(best, 5),
            "plain": round(variance_factor(a, b, 1.0, 1.0), 5),
        }
        holds &= chosen <= best + 1e-9 and chosen < variance_factor(a, b, 1.0, 1.0) and abs(sampled / chosen - 1) < 0.02
    return Evidence(found, "at most the best of a grid, below the plain baseline, Monte Carlo within 2%", holds)


@claim("the normalizer alpha = 1 + a/3, beta = 1 + b/3 has the least gradient variance when success rates are Beta(a, b)")
def least_variance() -> Evidence:
    return _least_variance(_optimum)


@ablation(least_variance, "GRPO's normalizer (3/2, 3/2)")
def grpo_variance() -> Evidence:
    return _least_variance(lambda a, b: (1.5, 1.5))


def _drift(fit: Callable[[Tensor, Tensor], BetaParameters]) -> Evidence:
    """Batches of 64 prompts whose mean success rate drifts from 0.1 to 0.9."""
    generator, group = torch.Generator().manual_seed(0), torch.arange(PROMPTS).repeat_interleave(SIZE)
    gaps = []
    for mean in (0.1, 0.3, 0.5, 0.7, 0.9):
        rates = (mean + 0.1 * torch.randn(PROMPTS, generator=generator, dtype=torch.float64)).clamp(0.01, 0.99)
        reward = torch.bernoulli(rates.repeat_interleave(SIZE), generator=generator)
        fitted = fit(reward, group)
        gaps.append(round(fitted.alpha - fitted.beta, 3))
    rising = all(later > earlier for earlier, later in pairwise(gaps))
    return Evidence(gaps, "alpha - beta rises from below 0 to above 0", rising and gaps[0] < 0 < gaps[-1])


@claim("the normalizer follows the policy: from alpha < beta while success is rare to alpha > beta when it is common")
def adapts() -> Evidence:
    return _drift(beta_params)


@ablation(adapts, "a constant normalizer")
def constant() -> Evidence:
    return _drift(lambda reward, group: BetaParameters(1.5, 1.5, 1.5, 1.5))


def _bandit(seed: int) -> tuple[TokenBandit, TabularTokens]:
    """64 prompts, 8 arms, standard normal logits, and between -2 and 2 more on the right arm."""
    task = TokenBandit(PROMPTS, ARMS, 1, seed=seed)
    policy = task.policy(scale=1.0, seed=seed)
    offset = 4 * torch.rand(PROMPTS, generator=torch.Generator().manual_seed(seed + 7), dtype=torch.float64) - 2
    with torch.no_grad():
        policy.logits[torch.arange(PROMPTS), 0, task.targets[:, 0, 0]] += offset
    return task, policy


def _gradient_variance(method: Method, policy: TabularTokens, task: TokenBandit, batches: int = 60) -> float:
    """Total variance of the gradient estimate at a fixed policy, over batches."""
    run = Run(plain_sgd(method, 1.0, group_size=SIZE), policy, task, steps=1, seed=5)
    gradients = []
    for _ in range(batches):
        batch = run.collect(run.method.select(task, run))
        batch.reward = run.method.reward(batch, run)
        batch.advantage = run.method.credit(batch, run)
        policy.zero_grad()
        run.backward(batch, run.loss_fn)
        assert policy.logits.grad is not None
        gradients.append(policy.logits.grad.flatten().clone())
    return float(torch.stack(gradients).var(0).sum())


@lru_cache
def _policies() -> list[tuple[TokenBandit, TabularTokens]]:
    """Policies met in training: at the start, after 40 and after 80 steps, for each seed."""
    met = []
    for seed in SEEDS:
        task, policy = _bandit(seed)
        met.append((task, policy))
        for _ in range(2):
            later = task.policy()
            later.load_state_dict(met[-1][1].state_dict())
            train_on(plain_sgd(METHODS["plain"], STEP, group_size=SIZE), later, task, steps=40, seed=seed, watch=lambda run, batch: None)
            met.append((task, later))
    return met


@lru_cache
def _mean_variance(name: str) -> float:
    """Over 3 stages of training and 3 seeds."""
    return fmean(_gradient_variance(METHODS[name], policy, task) for task, policy in _policies())


def _variance_in_training(name: str) -> Evidence:
    mine, plain, shaped = _mean_variance(name), _mean_variance("plain"), _mean_variance("like grpo")
    found = {key: float(f"{value:.3g}") for key, value in {"this": mine, "plain baseline": plain, "GRPO times pi/8": shaped}.items()}
    return Evidence(found, "more than 5% below both fixed normalizers", mine < 0.95 * min(plain, shaped))


@claim("over the course of training the adaptive normalizer gives a gradient of lower variance than either fixed one", slow=True)
def lower_variance_in_training() -> Evidence:
    return _variance_in_training("bnpo")


@ablation(lower_variance_in_training, "no normalization (alpha = beta = 1)")
def variance_of_plain() -> Evidence:
    return _variance_in_training("plain")


@ablation(lower_variance_in_training, "GRPO's shape throughout (alpha = beta = 3/2)")
def variance_of_grpo_shape() -> Evidence:
    return _variance_in_training("like grpo")


@lru_cache
def _steadiness(name: str) -> tuple[float, float]:
    """Final expected success after 200 steps and coefficient of variation of the gradient norm over the first 100; mean of the seeds."""
    found = []
    for seed in SEEDS:
        task, policy = _bandit(seed)
        method = plain_sgd(METHODS[name], STEP, group_size=SIZE)
        norms = train_on(method, policy, task, steps=200, seed=seed, watch=lambda run, batch: run.history[-1]["grad_norm"])
        found.append((task.expected_success(policy), pstdev(norms[:100]) / fmean(norms[:100])))
    return fmean(f[0] for f in found), fmean(f[1] for f in found)


def _steady(name: str) -> Evidence:
    mine, plain, grpo = _steadiness(name), _steadiness("plain"), _steadiness("grpo")
    found = {
        k: {"success": round(v[0], 3), "variation": round(v[1], 3)}
        for k, v in {"this": mine, "plain baseline": plain, "GRPO": grpo}.items()
    }
    holds = mine[1] < 0.6 * grpo[1] and mine[0] >= plain[0] - 0.01
    return Evidence(found, "variation below 0.6 of GRPO's, success at least the plain baseline's - 0.01", holds)


# The numbers are as the spec has them, but GRPO's own shape at BNPO's scale (pi/8 of GRPO) is as steady and learns faster, as the ablation shows:
# on this bandit the steadier gradient norm comes from the smaller step, not from adapting.
@claim("at one step size the gradient norm varies less with BNPO than with GRPO because the normalizer adapts", slow=True, reproduced=False)
def steadier_than_grpo() -> Evidence:
    return _steady("bnpo")


@ablation(steadier_than_grpo, "GRPO's shape at the same scale (alpha = beta = 3/2)")
def steady_without_adapting() -> Evidence:
    return _steady("like grpo")
