"""Claims of DEVIS-GRPO on views of rotating point clouds: a model that knows camera moves of up to 20 degrees is asked for 60 to 90.

Held-out numbers are those of the ODE with 40 steps on 64 videos that training never sees; the reward of chains is that of the noisy sampler.
Training: 60 updates of 4 prompts times 8 chains with 5 denoising steps a stage, Adam 1e-3.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from anypo.claims import Evidence, ablation, claim
from anypo.domains.diffusion.setup import build
from anypo.domains.diffusion.views import Views
from anypo.loops.on_policy import train
from anypo.method import Method
from anypo.methods.diffusion.devis_grpo import METHOD, AccumulativeRollout, split
from anypo.policy import Policy
from anypo.reproductions.common import ShuffledCredit
from anypo.run import Run
from anypo.seams.groups import group_std
from anypo.task import Prompt

SEEDS = (0, 1)
HERE = METHOD.set("rollout.steps", 5).set("update.learning_rate", 1e-3)
WEIGHTS = torch.tensor(METHOD.reward.lam)  # type: ignore[attr-defined]
VARIANTS: dict[str, Method] = {
    "whole": HERE,
    "no distillation": HERE.set("regularize.1.weight", 0.0),
    "shuffled": HERE.but(credit=ShuffledCredit(HERE.credit)),
}


class Found(NamedTuple):
    jump: float  # PSNR of the direct move
    accumulated: float  # PSNR of small moves
    reward: float  # weighted sum of the levels of noisy chains of small moves, not standardized


def _chains(policy: Policy, task: Views, rollout: AccumulativeRollout, samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Rewards (weighted raw levels) of noisy chains for the held-out videos, `samples` each, and their groups."""
    run = Run(HERE, policy, task, steps=1, seed=seed)
    prompts = [Prompt(id=task.count + i, content=i, samples=samples) for i in range(task.held)]
    batch = rollout(prompts, run)
    return task.score(batch, run) @ WEIGHTS, batch.group


def _look(policy: Policy, task: Views) -> Found:
    held = {name: float(value.mean()) for name, value in task.held_out(policy, task.held).items()}
    assert isinstance(HERE.rollout, AccumulativeRollout)
    return Found(held["jump"], held["accumulated"], float(_chains(policy, task, HERE.rollout, 4, 1_000)[0].mean()))


def _fresh() -> tuple[Policy, Views]:
    policy, task = build("views", None)
    assert isinstance(task, Views)
    return policy, task


@cache
def _start() -> Found:
    return _look(*_fresh())


@cache
def _trained(variant: str, seed: int) -> Found:
    policy, task = _fresh()
    train(Run(VARIANTS[variant], policy, task, steps=60, seed=seed))
    return _look(policy, task)


def _before_training(stages: bool) -> Evidence:
    """`stages`: moves of at most 20 degrees instead of one."""
    found = {}
    for angle in (15.0, 80.0):
        policy, _ = build("views", None)
        values = Views(test_angle=angle).held_out(policy, Views.held)
        gap = values["accumulated" if stages else "jump"].mean() - values["jump"].mean()
        found[f"{angle:.0f} degrees"] = round(float(gap), 2)
    holds = found["80 degrees"] >= 3 and abs(found["15 degrees"]) <= 1
    return Evidence(found, "gain in PSNR over one move: at least 3 dB at 80 degrees, within 1 dB at 15", holds)


@claim("before any training, accumulated small moves reach a large camera move better than one jump does, and a small move as well")
def accumulation_helps() -> Evidence:
    return _before_training(stages=True)


@ablation(accumulation_helps, "one stage for every move")
def one_stage() -> Evidence:
    return _before_training(stages=False)


def _jump(variant: str, seeds: tuple[int, ...] = SEEDS) -> Evidence:
    after = [round(_trained(variant, seed).jump, 2) for seed in seeds]
    holds = min(after) >= _start().jump + 2
    return Evidence({"before": round(_start().jump, 2), "after": after}, "at least 2 dB more PSNR of the jump, on each seed", holds)


@claim("training on chains of small moves teaches the direct jump to 80 degrees, with no pair beyond 20 degrees", slow=True)
def jump_improves() -> Evidence:
    return _jump("whole")


@ablation(jump_improves, "no distillation of the jump")
def no_distillation() -> Evidence:
    return _jump("no distillation", SEEDS[:1])


def _chain(variant: str, seeds: tuple[int, ...] = SEEDS) -> Evidence:
    after = [round(_trained(variant, seed).reward, 3) for seed in seeds]
    holds = min(after) >= _start().reward + 0.1
    return Evidence({"before": round(_start().reward, 3), "after": after}, "at least 0.1 more, on each seed", holds)


@claim("the accumulated views get better too: the reward of held-out chains rises", slow=True)
def chains_improve() -> Evidence:
    return _chain("whole")


@ablation(chains_improve, "the advantages dealt to the wrong chains")
def shuffled_credit() -> Evidence:
    return _chain("shuffled", SEEDS[:1])


def _diversity(tau: float) -> Evidence:
    """Mean over 64 videos of the variance of the reward among 8 chains of the shipped model, against even splits from the same seeds."""
    policy, task = _fresh()
    found: dict[str, list[float]] = {"splits": [], "even": []}
    for seed in (0, 1, 2):
        for name, unevenness in (("splits", tau), ("even", 0.0)):
            reward, group = _chains(policy, task, AccumulativeRollout(steps=5, tau=unevenness), 8, seed)
            found[name].append(round(float((group_std(reward, group) ** 2).mean()), 5))
    holds = all(s >= 1.2 * e for s, e in zip(*found.values(), strict=True))
    return Evidence(found, "at least 1.2 times the variance of even splits, on each seed", holds)


@claim("random splits of the same angle make the samples of a group more diverse in reward than the sampler's noise alone")
def splits_are_diverse() -> Evidence:
    return _diversity(METHOD.rollout.tau)  # type: ignore[attr-defined]


@ablation(splits_are_diverse, "even splits")
def even_splits() -> Evidence:
    return _diversity(0.0)


def _splits(capped: bool) -> Evidence:
    """20,000 random splits of 60 to 90 degrees into 5 to 7 increments; without the caps the increments are Theta times softmax(tau n)."""
    generator, worst, largest = torch.Generator().manual_seed(0), 0.0, 0.0
    for stages in (5, 6, 7):
        angle = 60 + 30 * torch.rand(20_000, generator=generator, dtype=torch.float64)
        delta = split(torch.randn(20_000, stages, generator=generator, dtype=torch.float64), angle, 0.7, 20.0 if capped else 180.0)
        worst = max(worst, float((delta.sum(1) - angle).abs().max()))
        largest = max(largest, float(delta.max()))
    return Evidence(
        {"error of the sum": worst, "largest": largest}, "sums exact to 1e-9, no increment above 20", worst <= 1e-9 and largest <= 20 + 1e-9
    )


@claim("every split adds up to the angle and asks for no move beyond the trusted one")
def splits_respect_the_cap() -> Evidence:
    return _splits(capped=True)


@ablation(splits_respect_the_cap, "no caps")
def uncapped_splits() -> Evidence:
    return _splits(capped=False)
