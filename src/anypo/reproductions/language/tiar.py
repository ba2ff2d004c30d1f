"""Claims of TIAR on a one-step table of 60 prompts: 8 answers and "I don't know"; 20 known, 20 hard, 20 without an answer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.language.toys.token_bandit import TabularTokens, TokenBandit
from anypo.method import Method
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.methods.language.tiar import METHOD as TIAR
from anypo.methods.language.tiar import TernaryReward, TrajectoryInformed, advantages
from anypo.reproductions.common import plain_sgd, train_on
from anypo.run import Run
from anypo.seams.groups import broadcast, standardize
from anypo.task import Prompt

SEEDS = (0, 1, 2, 3, 4)
PROMPTS, ANSWERS, KIND = 60, 8, 20
STEP = 0.05 * PROMPTS * 8  # SGD 0.05 on the gradient summed over the group
STATIC = TIAR.set("credit.lam", 0.0)


class ToyAbstain(TokenBandit):
    """Prompts 0-19 are known (right answer at 0.6 at first), 20-39 hard (0.25), 40-59 have no right answer. Token 8 abstains (logit -1 at first).

    Abstaining is the verdict 0 on every prompt: the labels of the last kind are not given away.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(PROMPTS, ANSWERS + 1, 1, seed=seed, reward=self.right)
        self.answer = torch.randint(ANSWERS, (PROMPTS,), generator=torch.Generator().manual_seed(seed))
        self.has_answer = torch.arange(PROMPTS) < 2 * KIND

    def right(self, prompt: Tensor, action: Tensor, mask: Tensor) -> Tensor:
        return ((action[:, 0] == self.answer[prompt]) & self.has_answer[prompt]).double()

    def collect(self, prompts: list[Prompt], run: Run) -> Batch:
        batch = super().collect(prompts, run)
        batch.signals["abstained"] = batch.action[:, 0] == ANSWERS
        return batch

    def start(self) -> TabularTokens:
        policy, others = self.policy(), ANSWERS - 1 + math.exp(-1)
        with torch.no_grad():
            policy.logits[:, 0, ANSWERS] = -1.0
            for rows, chance in ((torch.arange(KIND), 0.6), (torch.arange(KIND, 2 * KIND), 0.25)):
                policy.logits[rows, 0, self.answer[rows]] = math.log(chance / (1 - chance) * others)
        return policy

    def measure(self, policy: TabularTokens) -> Measured:
        """In exact expectation."""
        probability = policy.logits.detach()[:, 0].softmax(-1)
        abstains = probability[:, ANSWERS]
        hit = float(abstains[~self.has_answer].sum())
        precision, recall = hit / float(abstains.sum()), hit / KIND
        right = probability[torch.arange(PROMPTS), self.answer]
        return Measured(2 * precision * recall / (precision + recall), float(right[:KIND].mean()), float(abstains[self.has_answer].mean()))


class Measured(NamedTuple):
    f1: float  # of abstaining where there is no answer
    known: float  # probability of a right answer on known prompts
    false_abstention: float  # probability of abstaining where there is an answer


@dataclass
class AlwaysBonus(TrajectoryInformed):
    """An ablation: every abstaining row gets the full bonus, whatever the group knows."""

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        relative = standardize(batch.outcome, batch.group, self.ddof, self.eps)
        return broadcast(relative + self.lam * (batch.signal("verdict") == 0), batch.mask)


VARIANTS = {
    "lam 1": TIAR,
    "lam 0.5": TIAR.set("credit.lam", 0.5),
    "static": STATIC,
    "bonus whatever the group knows": TIAR.but(credit=AlwaysBonus()),
}


def _train(method: Method, seed: int, steps: int = 20) -> tuple[ToyAbstain, TabularTokens]:
    task = ToyAbstain(seed)
    policy = task.start()
    train_on(plain_sgd(method, STEP), policy, task, steps=steps, seed=seed, watch=lambda run, batch: None)
    return task, policy


@lru_cache
def _after(name: str) -> Measured:
    """After 20 steps, mean of the seeds."""
    found = []
    for seed in SEEDS:
        task, policy = _train(VARIANTS[name], seed)
        found.append(task.measure(policy))
    return Measured(*(fmean(column) for column in zip(*found, strict=True)))


def _f1(half: str, full: str) -> Evidence:
    curve = [_after(name).f1 for name in ("static", half, full)]
    rising = all(later > earlier + 0.05 for earlier, later in pairwise(curve))
    return Evidence(
        [round(x, 3) for x in curve],
        "static < lam 0.5 < lam 1, by more than 0.05 each and 0.1 in all",
        rising and curve[2] >= curve[0] + 0.1,
    )


@claim("after 20 steps the F1 of abstention is higher than with the static ternary reward, the more so the larger lam")
def abstains_sooner() -> Evidence:
    return _f1("lam 0.5", "lam 1")


@ablation(abstains_sooner, "lam = 0 in all three")
def abstains_static() -> Evidence:
    return _f1("static", "static")


def _accuracy(name: str) -> Evidence:
    mine, static = _after(name), _after("static")
    found = {
        key: {"known": round(run.known, 4), "false abstention": round(run.false_abstention, 5)}
        for key, run in {"this": mine, "static": static}.items()
    }
    holds = abs(mine.known - static.known) <= 0.01 and mine.false_abstention <= min(0.01, 1.1 * static.false_abstention)
    return Evidence(
        found, "known within 0.01 of the static run; false abstention at most 0.01 and at most 1.1 times the static run's", holds
    )


@claim("accuracy on known prompts is kept, and answerable prompts are not abstained from more often than under the static reward")
def keeps_accuracy() -> Evidence:
    return _accuracy("lam 1")


@ablation(keeps_accuracy, "the bonus given whatever the group knows")
def keeps_accuracy_without_confidence() -> Evidence:
    return _accuracy("bonus whatever the group knows")


def _bonus_by_confidence(confident: bool) -> Evidence:
    """Mean advantage of abstaining rows at lam 0, 0.5, 1 in groups of 2 abstaining rows and attempts right at 1/4, 2/4, 3/4."""
    found, signs = {}, []
    for right in (1, 2, 3):
        outcome = torch.tensor([0, 0] + [1] * right + [-1] * (4 - right))
        group = torch.zeros(6, dtype=torch.int64)
        lams = (0.0, 0.5, 1.0)
        if confident:
            means = [float(advantages(outcome, group, lam)[:2].mean()) for lam in lams]
        else:
            means = [float(standardize(outcome.double(), group)[:2].mean()) + lam for lam in lams]
        found[f"confidence {right}/4"] = [round(m, 3) for m in means]
        signs.append([round(b - a, 9) for a, b in pairwise(means)])
    holds = all(d > 0 for d in signs[0]) and all(d == 0 for d in signs[1]) and all(d < 0 for d in signs[2])
    return Evidence(found, "rising with lam below confidence 1/2, unchanged at 1/2, falling above", holds)


@claim("the advantage of abstaining rows rises with lam where the group fails and falls where it succeeds")
def follows_confidence() -> Evidence:
    return _bonus_by_confidence(confident=True)


@ablation(follows_confidence, "the bonus given whatever the group knows")
def ignores_confidence() -> Evidence:
    return _bonus_by_confidence(confident=False)


def _identical(method: Method) -> Evidence:
    """Largest difference of the trained tables from ternary GRPO's."""
    ternary = GRPO.but(reward=TernaryReward(), regularize=TIAR.regularize)
    difference = max(
        float((_train(method, seed, 5)[1].logits - _train(ternary, seed, 5)[1].logits).detach().abs().max()) for seed in SEEDS[:2]
    )
    return Evidence(difference, "exactly 0", difference == 0.0)


@claim("with lam = 0 training is GRPO on the ternary reward bit for bit")
def lam_zero_is_grpo() -> Evidence:
    return _identical(STATIC)


@ablation(lam_zero_is_grpo, "lam = 1")
def lam_one_is_not() -> Evidence:
    return _identical(TIAR)
