"""Claims of HoloFair and Fair-GRPO on a plane of six modes with two attributes, a neutral prompt and four triggers that skew the shares.

Everything is measured on samples of the ODE with 40 steps from held-out noise, 400 a prompt; 150 updates of 5 prompts times 24 chains.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anypo.claims import Evidence, ablation, claim
from anypo.domains.diffusion.attributes import AttributeModes, class_counts, diversity
from anypo.domains.diffusion.policy import DenoisingPolicy
from anypo.domains.diffusion.setup import build
from anypo.loops.on_policy import train
from anypo.method import Method
from anypo.methods.diffusion.fair_grpo import METHOD, FairReward
from anypo.run import Run

SEEDS = (0, 1, 2)
UPDATES = 150
METHOD_HERE = METHOD.set("update.learning_rate", 5e-4)
SKEWED = ((0.7, 0.3), (0.2, 0.6, 0.2))  # shares of the columns and of the rows


class Found(NamedTuple):
    """Of a model's held-out samples."""

    mgbi: float
    all_read: float  # MGBI when every sample is read, however far from the modes
    distance: float  # mean to the nearest mode
    off_target: float  # mean over prompts and attributes of the total-variation distance to SKEWED


def _look(policy: DenoisingPolicy, task: AttributeModes) -> Found:
    prompt = torch.arange(task.evaluation_samples) % task.count
    x = task.samples(policy, prompt)
    attr = task.attributes(x, prompt).confident(task.CONFIDENT)
    off = [(_shares(attr[:, a], prompt, task, a) - torch.tensor(SKEWED[a])).abs().sum(1).mean() / 2 for a in range(2)]
    mgbi, all_read = (float(task.index(policy, least).mgbi) for least in (task.CONFIDENT, 0.0))
    return Found(mgbi, all_read, float(task.distances(x).amin(1).mean()), float(torch.stack(off).mean()))


def _shares(attr: Tensor, prompt: Tensor, task: AttributeModes, a: int) -> Tensor:
    counts = class_counts(attr, prompt, task.count, task.classes[a])
    return counts / counts.sum(1, keepdim=True).clamp(min=1)


@cache
def _start() -> Found:
    policy, task = build("attributes", None)
    return _look(policy, task)  # type: ignore[arg-type]


VARIANTS: dict[str, Method] = {
    "fair": METHOD_HERE,
    "quality only": METHOD_HERE.set("reward.fairness", 0.0),
    "unguarded": METHOD_HERE.set("reward.quality", 0.0).set("reward.least_confidence", 0.0).set("regularize.0.beta", 0.0),
    "skewed": METHOD_HERE.but(reward=FairReward(target=SKEWED)),
}


@cache
def _trained(variant: str, seed: int) -> Found:
    policy, task = build("attributes", None)
    train(Run(VARIANTS[variant], policy, task, steps=UPDATES, seed=seed))
    return _look(policy, task)  # type: ignore[arg-type]


def _shown(before: Found, after: list[Found], *names: str) -> dict[str, Any]:
    return {name: {"before": round(getattr(before, name), 3), "after": [round(getattr(a, name), 3) for a in after]} for name in names}


def _hidden_skew(pooled: bool) -> Evidence:
    """`pooled`: the triggers' samples are measured together instead of trigger by trigger."""
    policy, task = build("attributes", None)
    index = task.index(policy)  # type: ignore[attr-defined]
    intrinsic, worst = float(index.intrinsic), float(index.ca_q)
    if pooled:
        prompt = torch.arange(2000) % 5
        attr = task.attributes(task.samples(policy, prompt), prompt).attr  # type: ignore[attr-defined]
        worst = float(diversity(attr[prompt > 0], (2, 3)).div)
    both = (intrinsic * worst) ** 0.5
    found = {"intrinsic": round(intrinsic, 3), "near-worst trigger": round(worst, 3), "MGBI": round(both, 3)}
    return Evidence(
        found,
        "the triggers' at most 0.6 of the neutral prompt's, MGBI between the two",
        worst <= 0.6 * intrinsic and worst < both < intrinsic,
    )


@claim("a model that looks diverse on a neutral prompt hides skews that triggers bring out, and MGBI lies between the two")
def hidden_skew() -> Evidence:
    return _hidden_skew(pooled=False)


@ablation(hidden_skew, "diversity of all triggers' samples pooled: opposite skews cancel")
def pooled_triggers() -> Evidence:
    return _hidden_skew(pooled=True)


def _evens_out(variant: str, seeds: tuple[int, ...] = SEEDS) -> Evidence:
    before, after = _start(), [_trained(variant, seed) for seed in seeds]
    holds = all(a.mgbi >= 1.25 * before.mgbi and a.distance <= 1.15 * before.distance for a in after)
    return Evidence(
        _shown(before, after, "mgbi", "distance"), "MGBI up by at least 25%, distance to the modes by at most 15%, on each seed", holds
    )


@claim("Fair-GRPO raises MGBI and keeps the samples at the modes", slow=True)
def evens_out() -> Evidence:
    return _evens_out("fair")


@ablation(evens_out, "no fairness reward")
def quality_only() -> Evidence:
    return _evens_out("quality only", SEEDS[:1])


def _hacked(variant: str) -> Evidence:
    before, after = _start(), [_trained(variant, seed) for seed in SEEDS]
    holds = all(a.all_read > 1.25 * before.all_read and a.distance > 2 * before.distance for a in after)
    expected = "MGBI with all samples read up by more than 25%, while the distance to the modes more than doubles"
    return Evidence(_shown(before, after, "all_read", "distance"), expected, holds)


@claim("without the guards (quality, KL, invalid readings) the measure is hacked: it rises while the samples leave the modes", slow=True)
def hacked_without_guards() -> Evidence:
    return _hacked("unguarded")


@ablation(hacked_without_guards, "the guards on: there is nothing to hack")
def not_hacked_with_guards() -> Evidence:
    return _hacked("fair")


def _reaches_target(variant: str) -> Evidence:
    before, after = _start(), [_trained(variant, seed) for seed in SEEDS]
    holds = all(a.off_target <= before.off_target / 2 for a in after)
    return Evidence(
        _shown(before, after, "off_target"), "total-variation distance to the target shares at least halves, on each seed", holds
    )


@claim("any target works: with shares of 70/30 and 20/60/20 asked for, the distance to them halves", slow=True)
def reaches_a_target() -> Evidence:
    return _reaches_target("skewed")


@ablation(reaches_a_target, "even shares asked for instead")
def misses_the_target() -> Evidence:
    return _reaches_target("fair")
