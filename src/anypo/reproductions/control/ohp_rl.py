"""Claims of OHP-RL on Peg-v0: 6000 steps (8 pegs at once), an update on 128 steps for every third of them after the first 500, networks (64,64), Adam 2e-3,
initial temperature 0.01, target entropy 0. Success: share of 100 held-out starts, mean of the last three of eight evaluations.
The person demonstrates ten attempts first. An imperfect person has a constant error of 0.3 along both axes beside the noise of 0.3."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.control.peg import NAME, Person
from anypo.domains.control.setup import build
from anypo.domains.control.soft import stored_logp
from anypo.loops import off_policy
from anypo.method import Method
from anypo.methods.control.ohp_rl import ACTION_LIMIT, LOGP_LIMIT, METHOD, GuidedActor, Preferred, gate
from anypo.methods.control.sac import METHOD as SAC
from anypo.policy import Signals
from anypo.run import Run

SEEDS = (0, 1)
ENVS, STEPS, TOTAL = 8, 4, 6000
EVALUATIONS = 8
LEARNING_RATE = 2e-3
BIAS = 0.3


@dataclass
class ClonedActor(GuidedActor):
    """Takeovers as actions to imitate: minus their log-probability, without a gate."""

    def preferred(self, batch: Batch, new: Signals) -> Preferred:
        pairs = super().preferred(batch, new).pairs
        action = batch.action.flatten(0, 1).clamp(-ACTION_LIMIT, ACTION_LIMIT)
        per_sample = -stored_logp(action, new.mean.flatten(0, 1), new.log_std.flatten(0, 1)).clamp(-LOGP_LIMIT, LOGP_LIMIT) * pairs
        return Preferred(per_sample.sum() / pairs.sum().clamp(min=1), per_sample, pairs)

    def weight(self, q_h: Tensor, q_new: Tensor) -> Tensor:
        return torch.ones_like(q_h[0])


@dataclass
class ConstantGate(GuidedActor):
    """The same gate in every state."""

    constant: float = 0.5  # in [0,1]

    def weight(self, q_h: Tensor, q_new: Tensor) -> Tensor:
        return torch.full_like(q_h[0], self.constant)


@dataclass
class Learned:
    run: Run
    steps: list[int] = field(default_factory=list)  # taken at each evaluation
    success: list[float] = field(default_factory=list)
    third: Any = None  # the policy after a third of the run

    @property
    def final(self) -> float:
        return fmean(self.success[-3:])

    @property
    def to_80(self) -> float:
        """Steps to 80% success; infinity when it was never seen."""
        return next((steps for steps, success in zip(self.steps, self.success, strict=True) if success >= 0.8), math.inf)

    def takeovers(self, part: int) -> float:
        """Takeover steps an episode in a third of the run: 0, 1 or 2."""
        length = len(self.run.history) // 3
        found = [r["takeovers"] for r in self.run.history[part * length : (part + 1) * length] if "takeovers" in r]
        return fmean(found) if found else 0.0

    def gates(self) -> tuple[float, float]:
        """Mean gate on all pairs of the run under the policy and critics after a third of it, and at its end."""
        kept = self.run.method.rollout.takeovers
        rows = {name: value.unsqueeze(1) for name, value in kept.take(torch.arange(len(kept))).items()}
        noise = torch.randn(rows["action"].shape, generator=torch.Generator().manual_seed(0))
        nothing = torch.zeros(len(kept), 1)
        batch = Batch(rows["action"], nothing == 0, nothing, torch.arange(len(kept)), context=rows["context"], signals={"noise": noise})
        pairs = rows["intervened"].flatten() & ((rows["action"] - rows["proposed"]).norm(dim=2).flatten() >= METHOD.objective.min_distance)
        found = []
        for policy in (self.third, self.run.policy):
            seen = policy.observe(batch, {"q", "q_new"})
            gates = gate(seen.q.flatten(0, 1).T, seen.q_new.flatten(0, 1).T, METHOD.objective.gate_temperature).gate
            found.append(float(gates[pairs].mean()))
        return found[0], found[1]


def sized(method: Method) -> Method:
    changes = {
        "select.prompts": ENVS, "rollout.steps": STEPS, "rollout.batch_size": 128, "rollout.updates_per_action": 1 / 3, "rollout.warmup": 500,
        "update.learning_rate": LEARNING_RATE, "credit.gamma": 0.97, "regularize.1.target_entropy": 0.0,
    }  # fmt: skip
    for name, value in changes.items():
        method = method.set(name, value)
    return method


def train(method: Method, seed: int, total: int = TOTAL) -> Learned:
    torch.set_num_threads(1)
    policy, task = build(NAME, None, needs=method.needs(), seed=seed, hidden=(64, 64), initial_temperature=0.01)
    learned = Learned(Run(method, policy, task, steps=total // (ENVS * STEPS), seed=seed))
    run = learned.run
    while not run.finished:
        off_policy.step(run)
        if run.step == run.total_steps // 3:
            learned.third = run.policy.snapshot()
        if run.step % (run.total_steps // EVALUATIONS) == 0:
            learned.steps.append(run.actions)
            learned.success.append(float(task.held_out(policy, 100)[0].mean()))  # type: ignore[attr-defined]
    return learned


def guided(objective: Any, seed: int, bias: float, chance: float = 0.7, demonstrations: bool = True, learning_rate: float = LEARNING_RATE,
           total: int = TOTAL) -> Learned:  # fmt: skip
    method = sized(METHOD.but(objective=objective)).set("update.learning_rate", learning_rate)
    rollout: Any = replace(method.rollout, person=Person(chance=chance, bias=bias), demonstrations=demonstrations)  # type: ignore[type-var]
    return train(method.but(rollout=rollout), seed, total)


@functools.cache
def ohp(seed: int, bias: float = 0.0) -> Learned:
    return guided(GuidedActor(), seed, bias)


@functools.cache
def cloned(seed: int) -> Learned:
    return guided(ClonedActor(), seed, BIAS)


@functools.cache
def alone(seed: int) -> Learned:
    """SAC, which nobody helps or shows anything."""
    return train(sized(SAC), seed)


def _helped(runs: list[Learned]) -> Evidence:
    each, others = [r.final for r in runs], [alone(seed).final for seed in SEEDS[: len(runs)]]
    success, sac = fmean(each), fmean(others)
    first, last = (fmean(r.takeovers(part) for r in runs) for part in (0, 2))
    measured = {"success": round(success, 3), "by_seed": [round(x, 3) for x in each], "sac": round(sac, 3)}
    measured |= {"takeovers_first": round(first, 2), "takeovers_last": round(last, 2)}
    holds = success > sac + 0.3 and last <= 0.4 * first
    return Evidence(measured, "success above SAC's by 0.3; takeovers of the last third at most 0.4 of the first", holds)


# One seed of two learns it (0.90) and the other does not (0.0), so that a mean of 0.45 says little. Takeovers fall from 3.1 to 0.2 an episode.
@claim(
    "On the peg task success is above that of SAC without a person by 30 points, and takeovers an episode in the last third are at most 40% of those "
    "in the first third",
    slow=True, reproduced=False,
)  # fmt: skip
def learns_from_takeovers() -> Evidence:
    return _helped([ohp(seed) for seed in SEEDS])


@ablation(learns_from_takeovers, "nobody takes over or demonstrates")
def nobody_helps() -> Evidence:
    return _helped([guided(GuidedActor(), SEEDS[0], 0.0, chance=0.0, demonstrations=False)])


def _against_cloning(runs: list[Learned]) -> Evidence:
    each, others = [r.final for r in runs], [cloned(seed).final for seed in SEEDS]
    success, other = fmean(each), fmean(others)
    by_seed = {"by_seed": [round(x, 3) for x in each], "cloning_by_seed": [round(x, 3) for x in others]}
    return Evidence({"success": round(success, 3), "cloning": round(other, 3)} | by_seed, "above cloning by 0.05", success > other + 0.05)


# By seed 0.0 and 0.77 against 0.25 and 0.16: the means, 0.38 and 0.20, are in the paper's order, but within the noise.
@claim("With an imperfect person the final success is above that of cloning the takeovers by 5 points", slow=True, reproduced=False)
def better_than_cloning() -> Evidence:
    return _against_cloning([ohp(seed, BIAS) for seed in SEEDS])


@ablation(better_than_cloning, "takeovers are actions to imitate")
def imitation_is_no_better() -> Evidence:
    return _against_cloning([cloned(seed) for seed in SEEDS])


@functools.cache
def constant(seed: int) -> Learned:
    """The mean gate of the run with the gate that depends on the state, in every state."""
    gates = [r["gate"] for r in ohp(seed).run.history if "gate" in r]
    return guided(ConstantGate(constant=fmean(gates)), seed, 0.0)


def _faster(runs: list[Learned]) -> Evidence:
    mine, other = ([r.to_80 for r in found] for found in (runs, [constant(seed) for seed in SEEDS]))
    expected = "fewer steps to 80% success, summed over seeds; infinity = never"
    return Evidence({"steps": [str(x) for x in mine], "constant": [str(x) for x in other]}, expected, sum(mine) < sum(other))


# The constant gate got there in 4416 and 2944 steps, the other never in one seed and in 3680 in the other.
@claim(
    "A gate that depends on the state reaches 80% success in fewer steps than a constant gate of the same mean", slow=True, reproduced=False
)
def state_dependent_gate_is_faster() -> Evidence:
    return _faster([ohp(seed) for seed in SEEDS])


@ablation(state_dependent_gate_is_faster, "the gate is constant")
def constant_gate_is_not() -> Evidence:
    return _faster([constant(seed) for seed in SEEDS])


def _falling(runs: list[Learned]) -> Evidence:
    before, after = (fmean(x) for x in zip(*(r.gates() for r in runs), strict=True))
    return Evidence({"third": round(before, 3), "end": round(after, 3)}, "lower at the end by more than 0.02", after < before - 0.02)


# It went from 0.39 to 0.44: the critics find the policy's own action better than the person's from early on.
@claim(
    "With an imperfect person the mean gate on the same pairs is lower at the end of training than after a third of it",
    slow=True,
    reproduced=False,
)
def gate_closes() -> Evidence:
    return _falling([ohp(seed, BIAS) for seed in SEEDS])


@ablation(gate_closes, "nothing is learned (learning rate 1e-9)")
def it_stays_open_without_learning() -> Evidence:
    return _falling([guided(GuidedActor(), SEEDS[0], BIAS, learning_rate=1e-9, total=2400)])
