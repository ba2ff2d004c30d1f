"""Claims of AVSPO and the advantage collapse rate on token_bandit (45 prompts that start at 0.95, 0.3 and 0.01, 10 symbols, groups of 8)."""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import fmean
from typing import NamedTuple

import torch
from scipy.stats import spearmanr

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.language.toys.token_bandit import TabularTokens, TokenBandit
from anypo.method import Method
from anypo.methods.language.avspo import METHOD as AVSPO
from anypo.methods.language.avspo import acr, advantages
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.reproductions.common import plain_sgd, share_without_signal, train_on
from anypo.run import Run
from anypo.seams.groups import standardize

SEEDS = tuple(range(6))
PROMPTS, SYMBOLS = 45, 10
STEP = 0.3 * PROMPTS  # SGD 0.3 for each prompt's mean over its group
STARTS = (0.95, 0.3, 0.01)
METHODS = {
    "grpo": GRPO.but(regularize=()),
    "avspo": AVSPO.but(regularize=()),
    "never injecting": AVSPO.but(regularize=()).set("credit.tau", 1.0).set("credit.eta", 0.0),
}


def _bandit(seed: int, starts: tuple[float, ...] = STARTS) -> tuple[TokenBandit, TabularTokens]:
    """Prompt p starts at success probability starts[p mod len(starts)]."""
    task = TokenBandit(PROMPTS, SYMBOLS, 1, seed=seed)
    policy = task.policy()
    chance = torch.tensor(starts, dtype=torch.float64).repeat(PROMPTS // len(starts))
    with torch.no_grad():
        policy.logits[torch.arange(PROMPTS), 0, task.targets[:, 0, 0]] = torch.log((SYMBOLS - 1) * chance / (1 - chance))
    return task, policy


def _success(task: TokenBandit, policy: TabularTokens) -> torch.Tensor:
    """Exact success of every prompt [P]."""
    return policy.logits.detach()[:, 0].softmax(-1)[torch.arange(PROMPTS), task.targets[:, 0, 0]]


class Trained(NamedTuple):
    without_signal: float  # share of groups with no advantage, over all steps
    hard: float  # success on the prompts that start at 0.01
    overall: float


@lru_cache
def _trained(name: str) -> Trained:
    """100 steps, mean of 6 seeds."""
    found = []
    for seed in SEEDS:
        task, policy = _bandit(seed)
        shares = train_on(
            plain_sgd(METHODS[name], STEP), policy, task, steps=100, seed=seed, watch=lambda run, batch: share_without_signal(batch)
        )
        success = _success(task, policy)
        found.append((fmean(shares), float(success[2::3].mean()), float(success.mean())))
    return Trained(*(fmean(column) for column in zip(*found, strict=True)))


def _collapse(name: str) -> Evidence:
    mine, grpo = _trained(name).without_signal, _trained("grpo").without_signal
    return Evidence({"this": round(mine, 3), "grpo": round(grpo, 3)}, "at most half of GRPO's share", mine <= 0.5 * grpo)


@claim("virtual samples at least halve the share of groups without any advantage", slow=True)
def less_collapse() -> Evidence:
    return _collapse("avspo")


@ablation(less_collapse, "no virtual samples (threshold 1, never moving)")
def collapse_without_injection() -> Evidence:
    return _collapse("never injecting")


def _hard(name: str) -> Evidence:
    mine, grpo = _trained(name), _trained("grpo")
    found = {
        "hard": round(mine.hard, 3),
        "hard, grpo": round(grpo.hard, 3),
        "overall": round(mine.overall, 3),
        "overall, grpo": round(grpo.overall, 3),
    }
    return Evidence(
        found, "more than 0.1 better on the hard third and 0.03 overall", mine.hard > grpo.hard + 0.1 and mine.overall > grpo.overall + 0.03
    )


@claim("prompts that hardly ever succeed are learned further in 100 steps, and success is higher overall", slow=True)
def learns_hard_prompts() -> Evidence:
    return _hard("avspo")


@ablation(learns_hard_prompts, "no virtual samples (threshold 1, never moving)")
def hard_prompts_without_injection() -> Evidence:
    return _hard("never injecting")


def _plain(reward_source: str, method: Method, size: int, chance: float, seed: int) -> tuple[float, float]:
    """Collapse rate over the first 6 of 60 GRPO steps, and the final success. The rate is read from the rewards, or from coins."""
    task, policy = _bandit(seed, (chance,))
    coins = torch.Generator().manual_seed(seed)

    def collapse(run: Run, batch: Batch) -> float:
        reward = batch.outcome
        if reward_source == "coins":
            reward = torch.bernoulli(torch.full_like(reward, 0.2), generator=coins)
        return acr(reward, batch.group)

    rates = train_on(plain_sgd(method, STEP, group_size=size), policy, task, steps=60, seed=seed, watch=collapse)
    return fmean(rates[:6]), float(_success(task, policy).mean())


def _prediction(reward_source: str) -> Evidence:
    pairs = [_plain(reward_source, METHODS["grpo"], size, chance, 0) for size in (2, 4, 8, 16) for chance in (0.02, 0.05, 0.1, 0.2, 0.4)]
    rank = float(spearmanr(*zip(*pairs, strict=True)).statistic)
    return Evidence(round(rank, 3), "rank correlation below -0.7 over 20 settings", math.isfinite(rank) and rank < -0.7)


@claim("the collapse rate of the first tenth of training foretells where GRPO ends", slow=True)
def foretells() -> Evidence:
    return _prediction("rewards")


@ablation(foretells, "the rate read from coins instead of the rewards")
def coins_foretell_nothing() -> Evidence:
    return _prediction("coins")


def _below_threshold(tau: float) -> Evidence:
    """1,000 batches of 16 groups in which at most half collapse; how far the advantages are from GRPO's."""
    generator, group, worst, used = torch.Generator().manual_seed(0), torch.arange(16).repeat_interleave(8), 0.0, 0
    for _ in range(1000):
        reward = torch.bernoulli(torch.full((128,), 0.3, dtype=torch.float64), generator=generator)
        if 0 < acr(reward, group) <= 0.5:
            used += 1
            found = advantages(reward, group, tau, prev_J=None)
            worst = max(worst, float((found.advantages - standardize(reward, group, ddof=0, eps=1e-8)).abs().max()))
    return Evidence({"largest difference": worst, "batches": used}, "exactly 0 in more than 100 batches", worst == 0.0 and used > 100)


@claim("while the collapse rate is not above the threshold the advantages are GRPO's exactly")
def off_below_threshold() -> Evidence:
    return _below_threshold(0.5)


@ablation(off_below_threshold, "threshold 0: always injecting")
def on_without_threshold() -> Evidence:
    return _below_threshold(0.0)
