"""Claims of DCPO on token_bandit (P=16, V=4, T=2) with two right symbols at each position, so that a prompt has four right strings of sixteen.

The targets, 0.83 and 0.35 nats, are 0.6 and 0.25 times the initial entropy. Success, entropy and the number of right strings that 64 samples would
find are exact.
"""

from __future__ import annotations

import itertools
from functools import cache
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anypo.claims import Evidence, ablation, claim
from anypo.domains.language.toys.token_bandit import TabularTokens, TokenBandit
from anypo.methods.language.dcpo import METHOD as DCPO
from anypo.methods.language.dcpo import TargetDistribution, tempered_logp
from anypo.reproductions.common import BANDIT_STEP, plain_sgd, train_on

SEEDS = (0, 1, 2, 3)
STEPS, SAMPLES = 300, 64
HIGH, LOW = 0.83, 0.35  # target entropies, nats a token
STEP_SIZE = 2 * BANDIT_STEP  # SGD; the loss is a mean over the tokens of a prompt too, so this is 1 for each token


def _identity(how: str) -> Evidence:
    """Largest difference between the two expectations of random functions, for 200 random policies of 5 tokens at both temperatures."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(200, 1, 5, generator=generator, dtype=torch.float64)
    values = torch.randn(200, 5, generator=generator, dtype=torch.float64)
    found = {}
    for temperature in (1.2, 0.8):
        tokens = [torch.full((200, 1), a) for a in range(5)]
        old = torch.cat([tempered_logp(logits, a, 1.0) for a in tokens], dim=1)
        tempered = torch.cat([tempered_logp(logits, a, temperature) for a in tokens], dim=1)
        ratio = (tempered - old).exp() if how == "target ratio" else (old / temperature - old).exp()
        wanted = ((logits[:, 0] / temperature).softmax(-1) * values).sum(1)
        found[f"temperature {temperature}"] = float(((old.exp() * ratio * values).sum(1) - wanted).abs().max())
    return Evidence(found, "below 1e-9", max(found.values()) < 1e-9)


@claim(
    "an average over on-policy tokens weighted by the target ratio is the average under the tempered policy, from which nothing is sampled"
)
def identity() -> Evidence:
    return _identity("target ratio")


@ablation(identity, "a ratio that is not normalized, pi ** (1/T - 1)")
def unnormalized() -> Evidence:
    return _identity("not normalized")


class End(NamedTuple):
    """After training, mean over the prompts."""

    entropy: float  # nats a token
    success: float
    coverage: float  # expected number of different right strings in 64 samples


def _entropy(policy: TabularTokens) -> float:
    log_probs = policy.logits.detach().log_softmax(-1)
    return float(-(log_probs.exp() * log_probs).sum(-1).mean())


def _bandit(seed: int) -> TokenBandit:
    """The targets of a prompt are all strings of its two right symbols at either position."""
    task, generator = TokenBandit(seed=seed), torch.Generator().manual_seed(seed)
    right = torch.rand(task.count, task.horizon, task.vocabulary, generator=generator).argsort(-1)[..., :2]
    task.targets = torch.stack([torch.tensor(list(itertools.product(*prompt))) for prompt in right.tolist()])
    return task


@cache
def _trained(credit: str, target: float) -> End:
    """Mean over the seeds of what 300 steps end with."""
    changes: dict[str, dict[str, Any]] = {
        "dcpo": {},
        "grpo": {"cap": 0.0},
        "temperature 1": {"warm": 1.0, "cool": 1.0},
        "swapped": {"warm": 0.8, "cool": 1.2},
    }
    method = plain_sgd(DCPO.but(credit=TargetDistribution(target_entropy=target, **changes[credit])), STEP_SIZE)
    ends = []
    for seed in SEEDS:
        task = _bandit(seed)
        policy = task.policy()
        train_on(method, policy, task, steps=STEPS, seed=seed, watch=lambda run, batch: None)
        with torch.no_grad():
            chance = torch.stack([policy.string_logp(p, task.targets[p]).exp() for p in range(task.count)])
        coverage = float((1 - (1 - chance) ** SAMPLES).sum(1).mean())
        ends.append(End(_entropy(policy), float(chance.sum(1).mean()), coverage))
    return End(*(fmean(values) for values in zip(*ends, strict=True)))


def _control(credit: str) -> Evidence:
    grpo, high, low = _trained("grpo", HIGH), _trained(credit, HIGH), _trained(credit, LOW)
    found = {"grpo": grpo.entropy, f"target {HIGH}": high.entropy, f"target {LOW}": low.entropy}
    nearer = all(abs(end.entropy - goal) < abs(grpo.entropy - goal) - 0.03 for end, goal in ((high, HIGH), (low, LOW)))
    holds = nearer and grpo.entropy < 0.3 * HIGH and high.entropy > low.entropy + 0.03
    expected = (
        "GRPO below 0.3 of the high target; both over 0.03 nearer to their targets than GRPO, and the high one over 0.03 above the low one"
    )
    return Evidence({k: round(v, 3) for k, v in found.items()}, expected, holds)


@claim("where GRPO's entropy collapses, DCPO's ends nearer to its target, and higher with a higher target", slow=True)
def control() -> Evidence:
    return _control("dcpo")


@ablation(control, "the target distribution is the old policy itself (temperature 1)")
def control_without_temperature() -> Evidence:
    return _control("temperature 1")


@ablation(control, "cooler below the target, warmer above it")
def control_with_swapped_temperatures() -> Evidence:
    return _control("swapped")


def _explores(credit: str) -> Evidence:
    mine, grpo = _trained(credit, HIGH), _trained("grpo", HIGH)
    found = {"success": mine.success, "success, grpo": grpo.success, "coverage": mine.coverage, "coverage, grpo": grpo.coverage}
    holds = mine.success > grpo.success - 0.02 and mine.coverage > grpo.coverage + 0.3
    return Evidence(
        {k: round(v, 3) for k, v in found.items()}, "success within 2 points of GRPO's, over 0.3 more right strings of four", holds
    )


@claim("DCPO finds more of the right strings in 64 samples than GRPO and succeeds as often", slow=True)
def explores() -> Evidence:
    return _explores("dcpo")


@ablation(explores, "the target distribution is the old policy itself (temperature 1)")
def explores_without_temperature() -> Evidence:
    return _explores("temperature 1")


def _alone(target: float, warm: float, cool: float) -> tuple[float, float]:
    """Entropy before and after 100 steps when every response is right, so that GRPO's advantages are 0; mean of the seeds."""

    def always(prompt: Tensor, action: Tensor, mask: Tensor) -> Tensor:
        return torch.ones(len(prompt), dtype=torch.float64)

    method = plain_sgd(DCPO.but(credit=TargetDistribution(target_entropy=target, warm=warm, cool=cool)), STEP_SIZE)
    ends = []
    for seed in SEEDS:
        task = TokenBandit(seed=seed, reward=always)
        policy = task.policy(scale=1.5, seed=seed)
        before = _entropy(policy)
        train_on(method, policy, task, steps=100, seed=seed, watch=lambda run, batch: None)
        ends.append((before, _entropy(policy)))
    return fmean(before for before, _ in ends), fmean(after for _, after in ends)


def _both_ways(warm: float, cool: float) -> Evidence:
    found, holds = {}, True
    for target in (0.3, 1.2):
        before, after = _alone(target, warm, cool)
        found[f"target {target}"] = f"{before:.3f} to {after:.3f}"
        holds &= abs(after - target) < abs(before - target) - 0.05
    return Evidence(found, "more than 0.05 nearer to the target, from above and from below", holds)


@claim("the term alone lowers an entropy above its target and raises one below it")
def both_ways() -> Evidence:
    return _both_ways(1.2, 0.8)


@ablation(both_ways, "the target distribution is the old policy itself (temperature 1)")
def both_ways_without_temperature() -> Evidence:
    return _both_ways(1.0, 1.0)
