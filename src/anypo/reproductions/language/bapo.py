"""Claims of BAPO on a question bandit: 40 prompts, ten answers and "I don't know" (IDK), a table of logits, all measured in exact expectation.

Prompts 0-19 are solvable from a weak start: one fixed answer is right, its logit is 2 lower. Prompts 20-39 lie beyond the boundary: with probability
0.3 a visit, one answer drawn anew is right, else none. Groups of 8, 1,000 steps of SGD, 0.5 a prompt, validation every 20 steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.language.toys.token_bandit import TabularTokens, TokenBandit
from anypo.loops.on_policy import train
from anypo.method import Method
from anypo.methods.language.bapo import METHOD as BAPO
from anypo.methods.language.bapo import BoundaryReward, StageSwitch, correctness
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.reproductions.common import plain_sgd
from anypo.run import Run
from anypo.seams.reward import abstained
from anypo.task import Prompt

SEEDS = (0, 1, 2)
PROMPTS, SOLVABLE, ANSWERS = 40, 20, 10  # token 10 is IDK
STEPS, STEP = 1000, 0.5 * PROMPTS  # SGD 0.5 for each prompt's mean over its group


class Questions(TokenBandit):
    """The right answer of a visit travels with its prompt, so that a group that is sampled again is judged by the same one (-1: none is right)."""

    def __init__(self, seed: int) -> None:
        super().__init__(PROMPTS, ANSWERS + 1, 1, seed=seed)
        self.answer = torch.randint(ANSWERS, (PROMPTS,), generator=torch.Generator().manual_seed(seed))
        self.noise = np.random.default_rng(seed)  # of the validation

    def prompts(self, count: int, rng: np.random.Generator) -> list[Prompt]:
        drawn = np.where(rng.random(PROMPTS) < 0.3, rng.integers(ANSWERS, size=PROMPTS), -1)
        right = np.where(np.arange(PROMPTS) < SOLVABLE, self.answer.numpy(), drawn)
        return [prompt.but(columns={"answer": int(right[prompt.content])}) for prompt in super().prompts(count, rng)]

    def collect(self, prompts: list[Prompt], run: Run) -> Batch:
        batch = super().collect(prompts, run)
        batch.signals["right"] = torch.tensor([p.columns["answer"] for p in prompts])[batch.group]
        batch.signals["abstained"] = batch.action[:, 0] == ANSWERS
        return batch

    def score(self, batch: Batch, run: Run) -> Tensor:
        return (batch.action[:, 0] == batch.signal("right")).double()

    def start(self, seed: int) -> TabularTokens:
        policy = self.policy(scale=0.3, seed=seed)
        policy.logits.data[:, 0, ANSWERS] += 1
        policy.logits.data[torch.arange(SOLVABLE), 0, self.answer[:SOLVABLE]] -= 2
        return policy

    def measure(self, policy: TabularTokens) -> Measured:
        chance = policy.logits.detach()[:, 0].softmax(-1)
        idk = chance[:, ANSWERS]
        right = chance[torch.arange(SOLVABLE), self.answer[:SOLVABLE]]
        return Measured(float(idk[SOLVABLE:].mean()), float(idk[:SOLVABLE].mean()), float(right.mean()))

    def evaluate(self, run: Run) -> dict[str, float]:
        """Accuracy on the solvable prompts as a finite validation set gives it: in steps of 0.01, and with noise where it has saturated."""
        accuracy = round(self.measure(run.policy).accuracy, 2)
        return {"accuracy": accuracy + self.noise.normal(0, 0.01) * (accuracy > 0.9)}


class Measured(NamedTuple):
    hard: float  # probability of IDK on prompts beyond the boundary
    solvable: float  # and on the others
    accuracy: float  # on the others


@dataclass
class BonusForEveryFailure(BoundaryReward):
    """An ablation: the bonus of groups without success, whatever the stage and however diverse their answers."""

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        unlimited = BoundaryReward(self.bonus, alpha=2.0, n_div=ANSWERS, weights=self.weights)
        return unlimited(batch, run)


@dataclass
class FlatBonus(BoundaryReward):
    """An ablation: every IDK earns the bonus, whatever the others of its group do."""

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        return correctness(batch, run) + self.bonus * abstained(batch, "bapo")


METHODS: dict[str, Method] = {
    "bapo": BAPO,
    "grpo": GRPO.but(regularize=()),
    "no modulator": BAPO.but(reward=BonusForEveryFailure()),
    "flat bonus": BAPO.but(reward=FlatBonus()),
}


@cache
def _trained(name: str, steps: int = STEPS) -> list[Measured]:
    """By seed."""
    found = []
    for seed in SEEDS:
        task = Questions(seed)
        run = train(Run(plain_sgd(METHODS[name], STEP, group_size=8), task.start(seed), task, steps=steps, seed=seed))
        found.append(task.measure(run.policy))
    return found


def _rounded(runs: list[Measured]) -> list[dict[str, float]]:
    return [{name: round(value, 3) for name, value in run._asdict().items()} for run in runs]


def _knows_its_boundary(name: str) -> Evidence:
    runs = _trained(name)
    holds = all(run.hard > 0.8 and run.solvable < 0.1 and run.accuracy > 0.9 for run in runs)
    return Evidence(_rounded(runs), "IDK above 0.8 on hard and below 0.1 on solvable prompts, accuracy above 0.9, on every seed", holds)


@claim("the policy learns to say IDK beyond its boundary, and neither says it nor loses accuracy on what it can solve", slow=True)
def knows_its_boundary() -> Evidence:
    return _knows_its_boundary("bapo")


@ablation(knows_its_boundary, "no bonus: GRPO")
def knows_its_boundary_without_bonus() -> Evidence:
    return _knows_its_boundary("grpo")


def _dies_out(name: str) -> Evidence:
    runs = _trained(name)
    return Evidence(_rounded(runs), "IDK on hard prompts below 0.1 on every seed", all(run.hard < 0.1 for run in runs))


@claim("under GRPO on right and wrong answers IDK dies out on the hard prompts too", slow=True)
def dies_out() -> Evidence:
    return _dies_out("grpo")


@ablation(dies_out, "BAPO")
def dies_out_with_bonus() -> Evidence:
    return _dies_out("bapo")


def _no_shortcut(name: str) -> Evidence:
    """After 300 steps, before the exploration stage ends."""
    runs = _trained(name, 300)
    holds = all(run.accuracy > 0.9 and run.solvable < 0.1 for run in runs)
    return Evidence(_rounded(runs), "accuracy above 0.9, IDK on solvable prompts below 0.1, on every seed", holds)


@claim("IDK is no shortcut past what could be learned: the bonus waits until the exploration is over", slow=True)
def no_shortcut() -> Evidence:
    return _no_shortcut("bapo")


@ablation(no_shortcut, "no modulator: the bonus in every group without success, from the first step on")
def no_shortcut_without_modulator() -> Evidence:
    return _no_shortcut("no modulator")


@ablation(no_shortcut, "a flat bonus for every IDK")
def no_shortcut_with_flat_bonus() -> Evidence:
    return _no_shortcut("flat bonus")


def _displaces(*names: str) -> Evidence:
    """After 300 steps; both lose the solvable prompts within 50 and do not come back."""
    runs = {name: _trained(name, 300) for name in names}
    holds = all(run.accuracy < 0.2 and run.solvable > 0.8 for found in runs.values() for run in found)
    expected = "accuracy below 0.2 and IDK above 0.8 on solvable prompts, on every seed"
    return Evidence({name: _rounded(found) for name, found in runs.items()}, expected, holds)


@claim("without the stage modulator, or with a flat bonus, IDK displaces what could have been learned", slow=True)
def displaces() -> Evidence:
    return _displaces("no modulator", "flat bonus")


@ablation(displaces, "BAPO")
def displaces_with_modulator() -> Evidence:
    return _displaces("bapo")


SCRIPT = (0.1, 0.5, 0.4, 0.6, 0.5, 0.6, 0.7, 0.6, 0.65, 0.7, 0.6, 0.5, 0.9, 0.95)  # below the best: the 3rd, 5th, 8th, 9th, 11th and 12th


class Scripted(Questions):
    """Validation as written."""

    def evaluate(self, run: Run) -> dict[str, float]:
        return {"accuracy": SCRIPT[run.step // 20]}


@dataclass
class ConsecutiveSwitch(StageSwitch):
    """An ablation: a validation that is not below the best forgives the earlier ones."""

    def __call__(self, batch: Batch, run: Run) -> None:
        before = self.below
        super().__call__(batch, run)
        if (run.step + 1) % self.period == 0 and self.below == before:
            self.below = 0


def _switches(control: StageSwitch) -> Evidence:
    task = Scripted(0)
    run = train(Run(plain_sgd(BAPO.but(control=control), STEP, group_size=8), task.start(0), task, steps=20 * len(SCRIPT)))
    ended = [record["step"] + 1 for record in run.history if not record["exploring"]]
    found = {"first step after the stage": ended[0] if ended else None, "steps after it": len(ended)}
    return Evidence(found, "ends with step 240, the sixth validation below the best, and stays ended", ended == list(range(240, 281)))


@claim("the exploration stage ends at the sixth validation below the best, consecutive or not, and for good")
def switches() -> Evidence:
    return _switches(StageSwitch())


@ablation(switches, "consecutive validations alone are counted")
def switches_consecutively() -> Evidence:
    return _switches(ConsecutiveSwitch())
