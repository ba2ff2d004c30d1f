"""Claims of NLL to PO: the closed-form reward reaches maximum likelihood, the inner covariance, a learned reward, wines, a model of the Pendulum.

The Gaussian claims use rewards as they are (transform none), with 20 to 50 generations of each datum: rewards above the least of the datum's
generations (the default) are biased by the sampled least itself, and with 5 generations the inner covariance is then twice off. Entropy weight 0.4
there and 0.1 on the wines, so that the inner problem is solved in a few hundred steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anypo.claims import Evidence, ablation, claim
from anypo.domains.tabular.data import PairData, gaussian_data, pendulum_model, wine
from anypo.loops.on_policy import step
from anypo.method import Method
from anypo.methods.tabular.nll_to_po import MATRIX, METHOD, VARIANTS, gaussian_nll, inner_covariance, optimal_matrix
from anypo.policy import Policy
from anypo.run import Run

SEEDS = (0, 1, 2)
WEIGHT = 0.4


def _plain(method: Method, generations: int, weight: float = WEIGHT, learning_rate: float = 0.02) -> Method:
    """The method with rewards as they are."""
    settings = {"select.group_size": generations, "regularize.0.coefficient": weight, "update.learning_rate": learning_rate}
    for path, value in settings.items():
        method = method.set(path, value)
    return method.set("credit.transform", "none")


def _covariance(y: Tensor) -> Tensor:
    return torch.cov(y.T, correction=0)


@lru_cache
def _excess(kind: str, seed: int) -> float:
    """Relative excess of the training NLL over that of the maximum-likelihood Gaussian after 600 steps."""
    data = gaussian_data(seed=seed)
    run = Run(_plain(METHOD, 20).set("reward.kind", kind), data.policy(), data, steps=600, seed=seed)
    while not run.finished:
        step(run)
    covariance = _covariance(data.train.y)
    best = float(gaussian_nll(torch.zeros(2).double(), covariance, covariance))
    return -float(run.policy.log_prob(*data.train).mean().detach()) / best - 1


def _reaches_likelihood(kind: str) -> Evidence:
    found = {name: [round(_excess(name, seed), 4) for seed in SEEDS[:2]] for name in (kind, "isotropic", "given")}
    mine, isotropic, identity = found[kind], found["isotropic"], found["given"]
    holds = max(mine) < 0.01 and all(a < b < c for a, b, c in zip(mine, isotropic, identity, strict=True))
    return Evidence(found, "excess of NLL below 1%; less than with the best isotropic U, and that less than with U = I (given)", holds)


@claim(
    "a policy gradient on the closed-form reward reaches the NLL of maximum likelihood within 1%, less informed rewards do not", slow=True
)
def reaches_likelihood() -> Evidence:
    return _reaches_likelihood("full")


@ablation(reaches_likelihood, "the best isotropic matrix")
def isotropic_does_not() -> Evidence:
    return _reaches_likelihood("isotropic")


CASES = ((0.4, ((0.5, 0.2), (0.2, 0.3))), (0.2, ((0.1, 0.0), (0.0, 0.4))), (1.0, ((1.0, -0.6), (-0.6, 0.8))))


@lru_cache
def _inner_error(case: int, entropy: bool) -> float:
    """Relative error of the covariance, its mean over the last 400 of 600 steps, against equation 5."""
    weight, rows = CASES[case]
    data = gaussian_data(seed=SEEDS[case])
    method = _plain(METHOD, 50, weight if entropy else 0.0).set("reward.kind", "given")
    run = Run(method, data.policy(), data, steps=600, seed=SEEDS[case])
    matrix, total = torch.tensor(rows, dtype=torch.float64), torch.zeros(2, 2).double()
    run.state[MATRIX] = matrix
    while not run.finished:
        step(run)
        if run.step > 200:
            scale = run.policy.parts(data.train.x[:1])[1][0].detach()
            total += scale @ scale.T / 400
    wanted = inner_covariance(matrix, weight)
    return float((total - wanted).norm() / wanted.norm())


def _inner(entropy: bool, cases: Sequence[int]) -> Evidence:
    found = [round(_inner_error(case, entropy), 4) for case in cases]
    return Evidence(found, "relative error of the covariance below 5% for three pairs of lam and U", max(found) < 0.05)


@claim("the inner policy gradient ends at the covariance (lam / 2) U^-1", slow=True)
def inner_solution() -> Evidence:
    return _inner(True, range(len(CASES)))


@ablation(inner_solution, "no entropy bonus")
def no_entropy() -> Evidence:
    return _inner(False, [0])  # what fails in one case cannot hold in all


@lru_cache
def _bilevel(iterations: int, seed: int) -> tuple[float, tuple[float, ...]]:
    """Cosine of the learned U with the best one for the validation pairs, and means of the outer NLL over 20 outer steps each.

    200 inner steps under U = I come first: the outer level begins at an inner solution.
    """
    data = gaussian_data(seed=seed)
    first = Run(_plain(METHOD, 20).set("reward.kind", "given"), data.policy(), data, steps=200, seed=seed)
    while not first.finished:
        step(first)
    method = _plain(VARIANTS["bilevel"], 20).set("control.0.every", 10).set("control.0.iterations", iterations)
    run = Run(method, first.policy, data, steps=1000, seed=seed)
    while not run.finished:
        step(run)
    curve = [r["outer_nll"] for r in run.history if "outer_nll" in r]
    wanted, found = optimal_matrix(_covariance(data.validation.y), WEIGHT), run.state[MATRIX]
    cosine = float((found * wanted).sum() / found.norm() / wanted.norm())
    return round(cosine, 4), tuple(round(fmean(curve[i : i + 20]), 3) for i in range(0, len(curve), 20))


def _learns(iterations: int, seeds: Sequence[int]) -> Evidence:
    results = [_bilevel(iterations, seed) for seed in seeds]
    found: dict[str, list[Any]] = {"cosine": [cosine for cosine, _ in results], "outer NLL": [curve for _, curve in results]}
    # A hundredth of a nat is what the inner sampling noise moves such a mean.
    falls = all(curve[-1] < curve[0] and all(b < a + 0.01 for a, b in pairwise(curve)) for _, curve in results)
    expected = "cosine above 0.98, and the outer NLL (means of 20 outer steps) never rises by more than 0.01"
    return Evidence(found, expected, falls and min(found["cosine"]) > 0.98)


@claim("implicit differentiation from U = I lowers the outer NLL all along and finds the direction of (lam / 2) Sigma^-1", slow=True)
def learns_the_reward() -> Evidence:
    return _learns(20, SEEDS[:2])


@ablation(learns_the_reward, "the response of the inner solution to U left out: no gradient, U stays I")
def no_response() -> Evidence:
    return _learns(0, SEEDS[:1])  # what fails on one seed cannot hold on each


def _supervised(data: PairData, steps: int, learning_rate: float, seed: int, every: int = 0) -> tuple[dict[str, float], dict[str, float]]:
    """Direct maximum likelihood with Adam on batches of 64: measured at the end and, with `every`, where the validation NLL was least."""
    policy, rng, best = data.policy(), np.random.default_rng(seed), (float("inf"), dict[str, float]())
    optimizer = torch.optim.Adam(policy.parameters(), lr=learning_rate)
    for i in range(steps):
        x, y = data.train.take(torch.as_tensor(rng.choice(data.train.size, data.prompts_per_step, replace=False)))
        optimizer.zero_grad()
        (-policy.log_prob(x, y).mean()).backward()
        optimizer.step()
        if every and (i + 1) % every == 0:
            best = _better(data, policy, best)
    return _measured(data, policy), best[1]


def _measured(data: PairData, policy: Policy) -> dict[str, float]:
    return {name: float(values.mean()) for name, values in data.measure(policy).items()}


def _better(data: PairData, policy: Policy, best: tuple[float, dict[str, float]]) -> tuple[float, dict[str, float]]:
    nll = -float(policy.log_prob(*data.validation).mean().detach())
    return (nll, _measured(data, policy)) if nll < best[0] else best


@lru_cache
def _on_wines(how: str, seed: int) -> tuple[float, float]:
    """Test accuracy and NLL of a linear model after 1500 steps: reward `learned`, `identity` (U = I), or directly by `cross entropy`."""
    data, steps, learning_rate = wine(hidden=0, seed=seed), 1500, 0.02
    if how == "cross entropy":
        found = _supervised(data, steps, learning_rate, seed)[0]
        return found["accuracy"], -found["log_likelihood"]
    method = VARIANTS["bilevel"].set("control.0.every", 10) if how == "learned" else METHOD.set("reward.kind", "given")
    method = method.set("regularize.0.coefficient", 0.1).set("update.learning_rate", learning_rate)
    run = Run(method, data.policy(), data, steps=steps, seed=seed)
    while not run.finished:
        step(run)
    found = _measured(data, run.policy)
    return found["accuracy"], -found["log_likelihood"]


def _classifies(how: str) -> Evidence:
    mine, identity, direct = ([_on_wines(which, seed) for seed in SEEDS] for which in (how, "identity", "cross entropy"))
    entropy = fmean(a for a, _ in direct)
    found = {
        "accuracy": round(fmean(a for a, _ in mine), 3), "accuracy of cross entropy": round(entropy, 3),
        "NLL": round(fmean(n for _, n in mine), 3), "NLL with U = I": round(fmean(n for _, n in identity), 3),
    }  # fmt: skip
    holds = found["accuracy"] > found["accuracy of cross entropy"] - 0.05 and found["NLL"] < 0.9 * found["NLL with U = I"]
    return Evidence(found, "accuracy within 5 points of cross entropy, NLL at least 10% below that with U = I (means over seeds)", holds)


@claim("on wines a learned reward matrix classifies as well as cross entropy and has less NLL than U = I", slow=True)
def classifies() -> Evidence:
    return _classifies("learned")


@ablation(classifies, "no outer steps")
def identity_classifies_worse() -> Evidence:
    return _classifies("identity")


@lru_cache
def _pendulum(kind: str, seed: int) -> tuple[float, float]:
    """Test NLL at the end and where the validation NLL was least. By the reparametrized policy gradient, the one with the least noise, or directly
    by maximum likelihood (`kind` empty)."""
    data, steps, learning_rate, every = pendulum_model(seed=seed), 600, 3e-3, 25
    if not kind:
        last, least = _supervised(data, steps, learning_rate, seed, every)
        return -last["log_likelihood"], -least["log_likelihood"]
    method = VARIANTS["rsample"].set("reward.kind", kind).set("regularize.0.coefficient", WEIGHT).set("update.learning_rate", learning_rate)
    run = Run(method, data.policy(), data, steps=steps, seed=seed)
    best = (float("inf"), dict[str, float]())
    while not run.finished:
        step(run)
        if run.step % every == 0:
            best = _better(data, run.policy, best)
    return -_measured(data, run.policy)["log_likelihood"], -best[1]["log_likelihood"]


def _models(kind: str) -> Evidence:
    mine, direct = ([_pendulum(which, seed) for seed in SEEDS] for which in (kind, ""))
    found = {
        name: {"stopped": round(fmean(s for _, s in results), 3), "at the end": round(fmean(e for e, _ in results), 3)}
        for name, results in (("policy gradient", mine), ("maximum likelihood", direct))
    }
    ours, theirs = found["policy gradient"]["stopped"], found["maximum likelihood"]["stopped"]
    expected = "test NLL (mean over seeds), stopped by validation, at most 5% of its size above that of maximum likelihood"
    return Evidence(found, expected, ours < theirs + 0.05 * abs(theirs))


# Not supported with a margin: on twelve further seeds it is behind maximum likelihood by 4% with a standard error of 2%; without a stop level with it.
@claim(
    "stopped by validation, a model of the Pendulum from 200 transitions is as good by the closed-form reward as by maximum likelihood",
    slow=True,
    reproduced=False,
)
def models_the_pendulum() -> Evidence:
    return _models("diagonal")


@ablation(models_the_pendulum, "U = I with the same entropy weight")
def identity_models_worse() -> Evidence:
    return _models("given")
