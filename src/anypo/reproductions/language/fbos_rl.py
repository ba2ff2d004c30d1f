"""Claims of FBOS-RL on the lock (32 classes, codes of 6 symbols out of 5, the spec's sizes): the flywheel, more prompts with a signal, the use of feedback.

How far a step moves the weights of the marks is ours (the spec's "0.1" leaves open of which mean), set once; settings were looked at on seeds 100-102.
Runs differ by some 0.05 from seed to seed: without any feedback two seeds put EPA, then GRPO itself, 0.07 above GRPO.
With a GRU the order does not come out: it hardly learns to read the marks in 150 updates, so that guided attempts are no better than plain ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean
from typing import Any, NamedTuple

import torch

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.language.toys.lock import make_lock
from anypo.method import Method
from anypo.methods.language.fbos_rl import METHOD as FBOS
from anypo.methods.language.fbos_rl import FeedbackGuided
from anypo.reproductions.common import plain_sgd, train_on
from anypo.run import Run
from anypo.task import Prompt

SEEDS = (0, 1, 2, 3)
EARLY_SEEDS = range(12)
METHODS: dict[str, Method] = {
    "grpo": FBOS.set("rollout.plain", 8),
    "epa": FBOS.set("objective.lam", 0.0),
    "ecc": FBOS.set("objective.alignment", 0.0),
    "fbos": FBOS,
}


@dataclass
class Untold(FeedbackGuided):
    """An ablation: the prompt comes back as it was, without attempt and feedback."""

    def told(self, prompt: Prompt, batch: Batch, row: int, run: Run) -> Prompt:
        return prompt


def _method(name: str, told: bool) -> Method:
    method = METHODS[name]
    return method if told or name == "grpo" else method.but(rollout=Untold())


class Result(NamedTuple):
    success: float  # of the plain prompt, exact
    trust: float  # weight of the marks of right symbols
    guided: tuple[float, float]  # success after feedback in the first and the last 50 steps, NaN where there was none


@lru_cache
def _result(name: str, seed: int, steps: int = 300) -> Result:
    policy, task = make_lock(seed=seed)

    def guided(run: Run, batch: Batch) -> float:
        side = batch.signals["refining"]
        assert batch.reward is not None
        return float(batch.reward[side].mean()) if bool(side.any()) else float("nan")

    seen = train_on(plain_sgd(METHODS[name], policy.learning_rate), policy, task, steps=steps, seed=seed, watch=guided)
    parts = [[x for x in part if x == x] for part in (seen[:50], seen[-50:])]
    early, late = (fmean(p) if p else float("nan") for p in parts)
    return Result(task.expected_success(policy), float(policy.trust[0].detach()), (early, late))


def _success(name: str) -> float:
    return round(fmean(_result(name, seed).success for seed in SEEDS), 3)


def _flywheel(joint: str) -> Evidence:
    found = {name: _success(name) for name in ("grpo", "epa", "ecc")}
    single, both = found["epa"] + found["ecc"] - 2 * found["grpo"], _success(joint)
    holds = both > max(found["epa"] + 0.1, found["ecc"] + 0.3) and single < both - found["grpo"]
    expected = "joint 0.1 above epa, 0.3 above ecc, its gain over grpo more than the sum of both single gains"
    return Evidence(found | {"joint": both}, expected, holds)


# The order comes out (0.36, 0.52, 0.25, jointly 0.77), but not because of what the feedback says: with random marks, and with none at all, the joint
# form was still 0.54 to 0.56 and EPA 0.43 to 0.46 on two seeds, each above GRPO.
@claim(
    "both objectives together reach a higher success than either alone, and gain more over GRPO than the sum of what each gains",
    slow=True,
    reproduced=False,
)
def flywheel() -> Evidence:
    return _flywheel("fbos")


def _guided_exploration(name: str) -> Evidence:
    mine, plain = _success(name), _success("grpo")
    return Evidence({"with": mine, "grpo": plain}, "0.03 above grpo", mine > plain + 0.03)


@claim(
    "guided attempts distilled into the plain policy, without training the use of feedback, beat GRPO at equal attempts",
    slow=True,
    reproduced=False,
)
def guided_exploration() -> Evidence:
    """0.52 against 0.36; see above: attempts without feedback in their place bring part of it, and two seeds of GRPO differ by as much."""
    return _guided_exploration("epa")


def _signal(name: str, told: bool = True) -> float:
    """Share of prompts with an advantage other than 0 among their plain and guided attempts, over the first 20 steps."""

    def share(run: Run, batch: Batch) -> float:
        assert batch.advantage is not None
        own = ~batch.signals["refining"]
        moved = batch.advantage[own].abs().sum(1) > 0
        return len(torch.unique(batch.group[own][moved])) / len(torch.unique(batch.group[own]))

    shares = []
    for seed in EARLY_SEEDS:
        policy, task = make_lock(seed=seed)
        shares += train_on(plain_sgd(_method(name, told), policy.learning_rate), policy, task, steps=20, seed=seed, watch=share)
    return round(fmean(shares), 4)


def _more_signal(told: bool) -> Evidence:
    mine, plain = _signal("fbos", told), _signal("grpo")
    return Evidence({"fbos": mine, "grpo": plain}, "fbos above 1.4 times grpo", mine > 1.4 * plain)


@claim("in the first 20 steps far more prompts have attempts of different worth than under GRPO")
def more_prompts_with_a_signal() -> Evidence:
    return _more_signal(True)


@ablation(more_prompts_with_a_signal, "no feedback")
def no_more_signal_without_feedback() -> Evidence:
    return _more_signal(False)


def _cultivated(name: str) -> Evidence:
    found = [_result(name, seed) for seed in SEEDS]
    measured: dict[str, Any] = {
        "trust": round(fmean(r.trust for r in found), 2),
        "guided": [round(fmean(r.guided[i] for r in found), 3) for i in (0, 1)],
    }
    return Evidence(
        measured,
        "the weight of the marks goes from 0.5 above 1, the success after feedback goes up",
        measured["trust"] > 1 and measured["guided"][1] > measured["guided"][0],
    )


@claim("ECC trains the use of feedback", slow=True)
def feedback_is_used_better() -> Evidence:
    return _cultivated("fbos")


@ablation(feedback_is_used_better, "no ECC")
def not_without_ecc() -> Evidence:
    return _cultivated("epa")


@claim("a GRU that reads feedback as text learns faster with FBOS-RL than with GRPO", slow=True, reproduced=False)
def with_a_network() -> Evidence:
    measured: dict[str, float] = {}
    for name in ("grpo", "fbos"):
        method, success = METHODS[name].set("update.learning_rate", 2e-3), []
        numbers: dict[str, list[float]] = {"entropy": [], "gradient norm": []}
        for seed in SEEDS[:2]:
            policy, task = make_lock(seed=seed, neural=64, classes=8, length=5)

            def watch(run: Run, batch: Batch, numbers: dict[str, list[float]] = numbers) -> None:
                numbers["entropy"].append(float(batch.signals["old_entropy"].mean()))
                numbers["gradient norm"].append(run.history[-1]["grad_norm"])

            train_on(method, policy, task, steps=150, seed=seed, watch=watch)
            success.append(task.expected_success(policy))
        measured |= {name: round(fmean(success), 3), **{f"{name} {what}": round(fmean(values), 3) for what, values in numbers.items()}}
    return Evidence(measured, "fbos above grpo", measured["fbos"] > measured["grpo"])
