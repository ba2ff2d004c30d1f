"""Claims of D3S: exactness of the selection, and token_bandit (16 prompts, V=4, T=3, G=8), most of whose groups are all wrong at the start."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from statistics import fmean

import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.method import Method
from anypo.methods.language.d3s import METHOD as D3S
from anypo.methods.language.d3s import count_of, select_samples, select_tokens
from anypo.reproductions.common import plain_sgd, train_on
from anypo.run import Run
from anypo.seams.objective import aggregate

SEEDS = (0, 1, 2)
STEP = 16.0  # 1 a prompt


def _selected_variance(values: Tensor, m: int) -> float:
    return float(select_samples(values, torch.zeros(len(values), dtype=torch.int64), "cross", m).variance)


def _largest_magnitude(values: Tensor, m: int) -> float:
    return float(values[values.abs().argsort(descending=True)[:m]].var(correction=0))


def _optimal(chosen: Callable[[Tensor, int], float]) -> Evidence:
    generator, worst = torch.Generator().manual_seed(0), 0.0
    for size in (4, 7, 10):
        for m in range(1, size + 1):
            values = torch.randn(size, generator=generator, dtype=torch.float64) + 1
            best = max(float(values[list(s)].var(correction=0)) for s in itertools.combinations(range(size), m))
            worst = max(worst, best - chosen(values, m))
    return Evidence(worst, "within 1e-9 of the best subset", worst <= 1e-9)


@claim("the selected rollouts have the variance of the best of all subsets of that size (brute force)")
def optimal() -> Evidence:
    return _optimal(_selected_variance)


@ablation(optimal, "the rollouts of largest |advantage| instead")
def not_optimal() -> Evidence:
    return _optimal(_largest_magnitude)


def _updates_to(method: Method, seed: int, level: float = 0.8, most: int = 600) -> float:
    """Sample-updates (rollouts that count in a loss, summed over batches) until the exact success reaches `level`."""
    task = TokenBandit(16, 4, 3, seed=seed)
    policy = task.policy()
    used = 0.0

    def watch(run: Run, batch: Batch) -> float:
        nonlocal used
        used += float(batch.counted.any(1).sum())
        return task.expected_success(policy)

    curve = train_on(plain_sgd(method, STEP), policy, task, steps=most, seed=seed, watch=watch, stop=lambda s: s >= level)
    return used if curve[-1] >= level else math.inf


def _cheaper(method: Method) -> Evidence:
    mine, base = (fmean(_updates_to(m, s) for s in SEEDS) for m in (method, D3S.but(credit=D3S.credit.inner)))
    found = {"this": mine, "all rollouts": base, "ratio": round(mine / base, 3)}
    return Evidence(found, "at most half of the sample-updates to success 0.8", mine <= base / 2)


@claim("down-sampling reaches success 0.8 with at most half of the sample-updates of the same method on all rollouts", slow=True)
def cheaper() -> Evidence:
    return _cheaper(D3S)


@ablation(cheaper, "shares 1: nothing is left out")
def not_cheaper() -> Evidence:
    return _cheaper(D3S.set("credit.rows", 1.0).set("credit.tokens", 1.0))


def _gradient(keep_rows: Tensor, batch: Batch, run: Run) -> float:
    policy = run.policy
    policy.zero_grad()
    assert batch.advantage is not None
    logp = policy.evaluate(batch, {"logp"}).logp
    aggregate(-logp * batch.advantage, batch.mask & keep_rows.bool()[:, None], "token_mean").backward()
    return float(policy.logits.grad.norm())  # type: ignore[union-attr, operator]


def _larger_gradient(select: Callable[[Tensor, int, torch.Generator], Tensor]) -> Evidence:
    """Mean gradient norm of a quarter of the rollouts over 20 batches, against a random quarter."""
    method, generator = D3S.but(credit=D3S.credit.inner), torch.Generator().manual_seed(0)
    chosen, rest = [], []
    for seed in range(20):
        task = TokenBandit(16, 4, 3, seed=seed)
        run = Run(method, task.policy(scale=0.5, seed=seed), task, steps=1, seed=seed)
        batch = run.collect(method.select(task, run))
        batch.reward = run.score_rewards(batch)
        batch.advantage = method.credit(batch, run)
        m = count_of(0.25, len(batch))
        chosen.append(_gradient(select(batch.advantage[:, 0], m, generator), batch, run))
        rest.append(_gradient(_random_rows(batch.advantage[:, 0], m, generator), batch, run))
    found = {"selected": round(fmean(chosen), 4), "random": round(fmean(rest), 4)}
    return Evidence(found, "at least 1.5 times the random subset's", fmean(chosen) >= 1.5 * fmean(rest))


def _random_rows(values: Tensor, m: int, generator: torch.Generator) -> Tensor:
    keep = torch.zeros(len(values), dtype=torch.int64)
    keep[torch.randperm(len(values), generator=generator)[:m]] = 1
    return keep


@claim("the selected rollouts give a larger gradient than a random subset of the same size")
def larger_gradient() -> Evidence:
    return _larger_gradient(lambda values, m, generator: select_samples(values, torch.zeros_like(values).long(), "cross", m).keep)


@ablation(larger_gradient, "a random subset")
def random_gradient() -> Evidence:
    return _larger_gradient(_random_rows)


def _final(phase: float, seed: int, steps: int = 60) -> tuple[float, float]:
    """(success, entropy) after a run with two right strings a prompt and the given phase of the schedule."""
    task = TokenBandit(16, 4, 3, targets=2, seed=seed)
    policy = task.policy()
    train_on(plain_sgd(D3S.set("credit.phase", phase), STEP), policy, task, steps=steps, seed=seed, watch=lambda run, batch: None)
    log_probs = policy.logits.detach().log_softmax(-1)
    return task.expected_success(policy), float(-(log_probs.exp() * log_probs).sum(-1).mean())


def _relaxing(phase: float) -> Evidence:
    relaxed, fixed = ([_final(p, seed) for seed in SEEDS] for p in (phase, math.inf))
    found = {name: [round(fmean(x[i] for x in runs), 3) for i in (0, 1)] for name, runs in (("relaxing", relaxed), ("fixed", fixed))}
    better = found["relaxing"][0] > found["fixed"][0] + 0.02 or found["relaxing"][1] > found["fixed"][1] + 0.02
    return Evidence(found, "success or entropy at least 0.02 above fixed shares' (means of 3 seeds)", better)


@claim("the relaxing schedule ends with higher entropy or success than fixed aggressive shares", slow=True)
def relaxing() -> Evidence:
    return _relaxing(0.5)


@ablation(relaxing, "fixed shares")
def never_relaxing() -> Evidence:
    return _relaxing(math.inf)


def _wasted(use_advantage: bool) -> Evidence:
    """Tokens of zero-advantage rows among the kept ones, while others remain."""
    generator = torch.Generator().manual_seed(1)
    wasted = 0
    for _ in range(50):
        advantages = torch.randn(8, generator=generator, dtype=torch.float64) * (torch.rand(8, generator=generator) < 0.5)
        entropy = torch.rand(8, 5, generator=generator, dtype=torch.float64) + 0.1
        mask, rows = torch.ones(8, 5, dtype=torch.bool), torch.ones(8, dtype=torch.int64)
        keep = select_tokens(advantages if use_advantage else torch.ones_like(advantages), entropy, mask, rows, 0.3)
        live = int((advantages != 0).sum()) * 5
        spare = max(0, int(keep.sum()) - live)  # more kept than live tokens exist
        wasted += int(keep[advantages == 0].sum()) - spare
    return Evidence(wasted, "exactly 0 over 50 batches", wasted == 0)


@claim("tokens of rollouts without an advantage are never kept while others remain")
def no_waste() -> Evidence:
    return _wasted(True)


@ablation(no_waste, "entropy alone decides")
def wasteful() -> Evidence:
    return _wasted(False)
