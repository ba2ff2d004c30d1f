"""Claims of PAPO (process-aware) on token_bandit: 32 prompts, 8 symbols, 6 tokens; the first token decides the outcome, filler tokens the score."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.language.toys.token_bandit import TabularTokens, TokenBandit
from anypo.methods.language.papo_process import METHOD as PAPO
from anypo.methods.language.papo_process import RIGHT, advantages
from anypo.reproductions.common import plain_sgd, share_without_signal, train_on
from anypo.run import Run
from anypo.seams.credit import GroupRelative
from anypo.seams.groups import broadcast, standardize

SEEDS = (0, 1)
PROMPTS, SYMBOLS, TOKENS = 32, 8, 6
FILLER = 7
STEP = 1.0 * PROMPTS  # SGD 1 for each prompt, on the mean over its group and tokens
EVEN, NEARLY_RIGHT = math.log(SYMBOLS - 1), 5.0  # initial logit of the right token: 50% and 95% accuracy


class FillerBandit(TokenBandit):
    """Outcome: token 0 is the right one. Process score: share of the 6 positions that hold the filler, which at position 0 breaks the answer."""

    def __init__(self, seed: int) -> None:
        super().__init__(PROMPTS, SYMBOLS, TOKENS, seed=seed, reward=self.both, objectives=("outcome", "process"))
        self.answer = torch.randint(FILLER, (PROMPTS,), generator=torch.Generator().manual_seed(seed))

    def both(self, prompt: Tensor, action: Tensor, mask: Tensor) -> Tensor:
        return torch.stack([(action[:, 0] == self.answer[prompt]).double(), (action == FILLER).double().mean(1)], dim=1)

    def start(self, logit: float) -> TabularTokens:
        policy = self.policy()
        with torch.no_grad():
            policy.logits[torch.arange(PROMPTS), 0, self.answer] = logit
        return policy

    def measure(self, policy: TabularTokens) -> tuple[float, float]:
        """Exact accuracy, and exact share of filler at positions 1-5 (which the outcome does not depend on)."""
        probability = policy.logits.detach().softmax(-1)
        return float(probability[torch.arange(PROMPTS), 0, self.answer].mean()), float(probability[:, 1:, FILLER].mean())


@dataclass
class ProductCredit:
    """A rival: outcome times process score, normalized together."""

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        assert batch.reward is not None
        return broadcast(standardize(batch.reward.prod(dim=1), batch.group), batch.mask)


METHODS = {
    "papo": PAPO,
    "outcome only": PAPO.set("credit.lam", 0.0),
    "process only": PAPO.but(credit=GroupRelative(weights=(0.0, 1.0))),
    "sum": PAPO.but(credit=GroupRelative(weights=(1.0, 1.0))),
    "product": PAPO.but(credit=ProductCredit()),
}


class Trained(NamedTuple):
    accuracy: float
    filler: float  # share at positions 1-5
    without_signal: float  # share of groups with no advantage over the first 20 steps

    @property
    def quality(self) -> float:
        """Mean process score of right answers, whose first token is no filler."""
        return self.filler * (TOKENS - 1) / TOKENS


@lru_cache
def _trained(name: str, logit: float, steps: int) -> Trained:
    """Mean of the seeds."""
    found = []
    for seed in SEEDS:
        task = FillerBandit(seed)
        policy = task.start(logit)
        shares = train_on(
            plain_sgd(METHODS[name], STEP), policy, task, steps=steps, seed=seed, watch=lambda run, batch: share_without_signal(batch)
        )
        found.append((*task.measure(policy), fmean(shares[:20])))
    return Trained(*(fmean(column) for column in zip(*found, strict=True)))


def _all_normalized(reward: Tensor, group: Tensor) -> Tensor:
    """The process part over all responses instead of the right ones."""
    return standardize(reward[:, 0], group) + standardize(reward[:, 1], group)


def _invariances(decoupled: bool) -> Evidence:
    """1,000 random groups of 8: do wrong answers' advantages move with their scores, and does the process part shift the mean of the right ones?"""
    generator, group = torch.Generator().manual_seed(0), torch.arange(1000).repeat_interleave(8)
    outcome = torch.bernoulli(torch.full((8000,), 0.5, dtype=torch.float64), generator=generator)
    score, other = torch.rand(2, 8000, generator=generator, dtype=torch.float64)
    right = outcome > RIGHT

    def combined(process: Tensor) -> Tensor:
        reward = torch.stack([outcome, process], dim=1)
        return advantages(reward, group).advantages if decoupled else _all_normalized(reward, group)

    first = combined(score)
    moved = float((combined(torch.where(right, score, other)) - first)[~right].abs().max())
    excess = torch.where(right, first - standardize(outcome, group), torch.zeros_like(first))
    shifted = float(torch.zeros(1000, dtype=torch.float64).index_add(0, group, excess).abs().max())
    found = {"wrong answers moved by their score": moved, "total push of the process part": shifted}
    return Evidence(found, "both below 1e-9", moved < 1e-9 and shifted < 1e-9)


@claim("a wrong answer gains nothing from its process score, and the right ones' mean advantage is the outcome's")
def invariances() -> Evidence:
    return _invariances(decoupled=True)


@ablation(invariances, "the process score normalized over all responses")
def invariances_of_joint() -> Evidence:
    return _invariances(decoupled=False)


def _hacking(name: str) -> Evidence:
    runs = {key: _trained(key, EVEN, 300) for key in (name, "outcome only", "process only", "sum", "product")}
    found = {key: {"accuracy": round(run.accuracy, 3), "filler": round(run.filler, 3)} for key, run in runs.items()}
    mine = runs[name]
    hacked = runs["process only"].accuracy < 0.3  # sum and product also do well on this toy; reported, nothing is claimed against them
    safe = mine.accuracy >= runs["outcome only"].accuracy - 0.01 and mine.filler > 0.5
    return Evidence(
        found, "process alone below 0.3 accuracy; this as accurate as outcome only (-0.01), with more than half filler", hacked and safe
    )


@claim("the process score alone is hacked, while PAPO keeps the outcome's accuracy and still raises the score", slow=True)
def not_hacked() -> Evidence:
    return _hacking("papo")


@ablation(not_hacked, "lam = 0: outcome only")
def outcome_only_raises_nothing() -> Evidence:
    return _hacking("outcome only")


@ablation(not_hacked, "no outcome part: process only")
def process_only_is_hacked() -> Evidence:
    return _hacking("process only")


def _plateau(name: str) -> Evidence:
    mine, outcome = _trained(name, NEARLY_RIGHT, 20), _trained("outcome only", NEARLY_RIGHT, 20)
    found = {"this": round(mine.without_signal, 3), "outcome only": round(outcome.without_signal, 3)}
    return Evidence(found, "below 0.15 where outcome only is above 0.6", mine.without_signal < 0.15 and outcome.without_signal > 0.6)


@claim("from 95% accuracy, where most groups give outcome rewards no signal, nearly every group still gives one")
def beyond_the_plateau() -> Evidence:
    return _plateau("papo")


@ablation(beyond_the_plateau, "lam = 0: outcome only")
def plateau_of_outcome() -> Evidence:
    return _plateau("outcome only")


def _quality(name: str) -> Evidence:
    mine, outcome = _trained(name, EVEN, 300), _trained("outcome only", EVEN, 300)
    found = {
        "this": round(mine.quality, 3),
        "outcome only": round(outcome.quality, 3),
        "accuracy": [round(mine.accuracy, 3), round(outcome.accuracy, 3)],
    }
    return Evidence(
        found,
        "score of right answers higher by more than 0.1 at equal accuracy (0.02)",
        mine.quality > outcome.quality + 0.1 and abs(mine.accuracy - outcome.accuracy) <= 0.02,
    )


@claim("right answers end with a higher process score than under the outcome alone, at equal accuracy", slow=True)
def better_right_answers() -> Evidence:
    return _quality("papo")


@ablation(better_right_answers, "lam = 0: outcome only")
def quality_of_outcome() -> Evidence:
    return _quality("outcome only")
