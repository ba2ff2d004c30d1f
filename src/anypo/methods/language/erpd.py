"""ERPD: extreme region policy distillation (arXiv:2605.25582).

Many updates on fixed data teach fast, then the policy drifts and its entropy collapses; a tighter trust region only lowers the ceiling. ERPD parts
the two needs. A first stage optimizes on fixed data with almost no constraint, and its policy is not deployed: it is a teacher, whose log-ratio on
every token says what the data wanted changed. The last stage distills that signal into the starting policy inside a trust region, without the
tokens that moved against the verified outcome. `VARIANTS["weak"]` measures a degenerate teacher against a policy that imitated the failures,
instead of against the start: a drift that both share cancels. Against GRPO it changes rollout, objective, credit and regularizer, in two or three
stages. Stages from the abstract and digests; the forms of all equations and the defaults are [reconstructed]. Left out: a KL budget that ends the
last stage early; its length is the run's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper, Stage
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.policy import Loss, Policy, Signals
from anypo.seams.credit import GroupRelative, group_relative
from anypo.seams.groups import broadcast, masked_mean
from anypo.seams.objective import ClippedSurrogate, clipped, kl_estimate, token_ratio
from anypo.seams.regression import row_advantage
from anypo.seams.regularize import KLPenalty
from anypo.seams.reward import row_reward
from anypo.seams.select import NoPrompts
from anypo.seams.teachers import Teacher
from anypo.seams.update import GradientSteps, build_optimizer
from anypo.task import Prompt

if TYPE_CHECKING:
    from anypo.run import Run

BASE, TEACHER, UNLEARNED = "reference", "teacher", "unlearned"  # names of policies in the run
DATA = "erpd.data"  # the fixed set, in the run's shared state
NEVER = -1e4  # stands for the log-prob of a token that a collapsed policy excludes
MODES = ("ce", "mse", "rl", "unlearn")
FILTERS = ("sign", "none")


class StudentLoss(NamedTuple):
    policy: Tensor
    kl: Tensor
    loss: Tensor  # policy + beta kl, differentiable in logp


def stage1_loss(
    logp: Float[Tensor, "N T"], base_logp: Float[Tensor, "N T"], mask: Tensor, advantages: Float[Tensor, " N"] | Float[Tensor, "N T"],
    mode: str = "ce", tau: float = 1.0, clip_eps: float = 0.8,
) -> Tensor:  # fmt: skip
    """Equations 1-4, scalar: likelihood of the successes ("ce") or failures ("unlearn") weighted by |A|, squared error of tau times the row's mean
    log-ratio against A ("mse"), or a widely clipped surrogate ("rl"). Token means, but "mse" is a mean over rows. Raises ValueError for another mode.
    """
    inside, zero = mask.bool(), logp.new_zeros(())
    advantage = broadcast(advantages, mask) if advantages.dim() == 1 else advantages
    if mode in ("ce", "unlearn"):
        weight = (advantage if mode == "ce" else -advantage).clamp(min=0)
        return -masked_mean(weight * torch.where(inside, logp, zero), inside)
    if mode == "mse":
        score = row_advantage(torch.where(inside, logp, zero) - torch.where(inside, base_logp, zero), inside)
        return masked_mean((tau * score - row_advantage(advantage, inside)) ** 2, inside.any(1))
    if mode == "rl":
        return -masked_mean(clipped(token_ratio(logp, base_logp, inside), advantage, 1 - clip_eps, 1 + clip_eps), inside)
    raise ValueError(f"unknown mode '{mode}' of the first stage; use one of {', '.join(MODES)}")


def signal(
    teacher_logp: Float[Tensor, "*K N T"], reference_logp: Float[Tensor, "N T"], mask: Tensor, advantages: Float[Tensor, " N"],
    clip: float = 2.0, filter: str = "sign", drop_zero: bool = True,
) -> Float[Tensor, "N T"]:  # fmt: skip
    """Equations 5-7: the teacher's log-prob minus the reference's, within +-clip, the mean over K teachers where there are several.

    Filter "sign" drops what moved against the row's advantage, "none" nothing; `drop_zero` drops rows of advantage 0. Log-probs may be -inf. 0 outside
    the mask. Raises ValueError for another filter or a negative clip.
    """
    if filter not in FILTERS or clip < 0:
        raise ValueError(f"the signal takes a filter of {' or '.join(FILTERS)} and a clip of at least 0, not '{filter}' and {clip}")
    moved = (teacher_logp.clamp(min=NEVER) - reference_logp.clamp(min=NEVER)).clamp(-clip, clip)
    moved = moved.mean(0) if moved.dim() == 3 else moved
    keep = mask.bool()
    if filter == "sign":
        keep = keep & (moved * advantages[:, None] >= 0)
    if drop_zero:
        keep = keep & (advantages != 0)[:, None]
    return torch.where(keep, moved, moved.new_zeros(()))


def stage2_loss(
    logp: Float[Tensor, "N T"], old_logp: Float[Tensor, "N T"], base_logp: Float[Tensor, "N T"], signal: Float[Tensor, "N T"], mask: Tensor,
    clip_eps: float = 0.2, beta: float = 0.05,
) -> StudentLoss:  # fmt: skip
    """Equation 8: the clipped surrogate with the signal as each token's advantage, plus beta times the k3 estimate of the KL to the base."""
    policy = -masked_mean(clipped(token_ratio(logp, old_logp, mask), signal.detach(), 1 - clip_eps, 1 + clip_eps), mask)
    kl = masked_mean(kl_estimate(logp, base_logp, mask), mask)
    return StudentLoss(policy, kl, policy + beta * kl)


@dataclass
class FixedData:
    """One set of trajectories of the starting policy, sampled at the first step; every step of every stage that has it gets all of them."""

    prompts: int | None = None  # in the set, >= 1; None = eight of the task's batches
    samples: int = 8  # trajectories a prompt, >= 2

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        if DATA not in run.state:
            pool = run.task.prompts(self.prompts or 8 * run.task.prompts_per_step, run.rng)
            batch = run.collect([p.but(samples=self.samples) for p in pool], BASE)
            run.score_rewards(batch)
            batch.signals["ref_logp"] = batch.logp  # the starting policy is the reference
            run.state[DATA] = batch.state_dict()
        state = run.state[DATA]
        return Batch(**(state | {"signals": dict(state["signals"]), "objectives": tuple(state["objectives"])}))


@dataclass
class ExtremeRegion:
    """The weakly constrained loss of a first stage; the log-probs of the policy that acted are the base's."""

    mode: str = "ce"  # ce, mse, rl or unlearn
    tau: float = 1.0  # > 0, advantage that a mean log-ratio of 1 stands for (mse)
    clip_eps: float = 0.8  # >= 0, how far a ratio may move (rl)

    needs = frozenset({"logp"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        return Loss(stage1_loss(new.logp, batch.logp, batch.counted, batch.advantage, self.mode, self.tau, self.clip_eps))


@dataclass
class FastSteps(GradientSteps):
    """Gradient steps at a multiple of the usual learning rate."""

    speed: float = 5.0  # > 0

    def build(self, policy: Policy) -> torch.optim.Optimizer:
        rate = self.speed * (self.learning_rate or policy.learning_rate)
        return build_optimizer(policy, self.optimizer, rate, self.weight_decay, {"value": self.value_learning_rate})


@dataclass
class KeepAndRestart:
    """At the start of a stage: what the stage before has trained is kept under a name, and the policy is again the one that the run began with."""

    name: str = TEACHER

    def __call__(self, run: Run) -> None:
        run.move_policy(self.name)
        run.policy.load_state_dict(run.named_policy(BASE).state_dict())
        run.advance_version()


@dataclass
class KeptPolicy:
    """The log-probs of a policy that an earlier stage left under a name."""

    name: str = TEACHER

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        if self.name not in run.policies:
            raise ValueError(
                f"{run.method.name} distills the policy '{self.name}', which no earlier stage has trained; run all stages of erpd"
            )
        return run.score(batch, {"logp"}, self.name).logp


@dataclass
class DistilledSignal:
    """What frozen teachers say about every token, where it agrees with the row's reward relative to its group."""

    teachers: tuple[Teacher, ...] = (KeptPolicy(),)
    contrast: Teacher | None = None  # what the teachers are measured against; None = the starting policy
    clip: float = 2.0  # nats, >= 0
    filter: str = "sign"  # sign or none
    drop_zero: bool = True  # no signal in groups that earn all the same
    weights: tuple[float, ...] | None = None  # of the K rewards; None = all 1

    needs = frozenset({"ref_logp"})
    compares_group = True

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        reward = row_reward(batch, self.weights)
        base = batch.signal("ref_logp") if self.contrast is None else self.contrast(batch, run)
        taught = torch.stack([teacher(batch, run) for teacher in self.teachers])
        found = signal(taught, base, batch.mask, group_relative(reward, batch.group), self.clip, self.filter, self.drop_zero)
        run.log(signal=float(masked_mean(found.abs(), batch.mask)))
        return found.to(batch.logp)


TRAINED_TEACHER = GRPO.but(
    name="erpd_teacher",
    summary="many updates on fixed data, almost without constraint",
    select=NoPrompts(),
    rollout=FixedData(),
    credit=GroupRelative(),
    objective=ExtremeRegion(),
    regularize=(),
    update=FastSteps(minibatches=8, unit="group"),
)
UNLEARNER = TRAINED_TEACHER.but(
    name="erpd_unlearner", summary="imitation of the failures", prepare=(KeepAndRestart(TEACHER),), objective=ExtremeRegion("unlearn")
)
STUDENT = GRPO.but(
    name="erpd_student",
    summary="the teacher's log-ratios as token advantages, from the starting policy and near it",
    prepare=(KeepAndRestart(TEACHER),),
    credit=DistilledSignal(),
    objective=ClippedSurrogate(aggregation="token_mean"),
    regularize=(KLPenalty(beta=0.05, aggregation="token_mean"),),
)
METHOD = TRAINED_TEACHER.but(
    name="erpd",
    paper=Paper("Extreme Region Policy Distillation", "2605.25582", 2026),
    summary="a policy pushed far on fixed data teaches the starting one, which stays in a trust region",
    stages=(Stage(TRAINED_TEACHER, 0.5), Stage(STUDENT, 0.5)),
    base=GRPO,
)
VARIANTS = {
    "weak": METHOD.but(
        name="erpd.weak",
        summary="a degenerate teacher, measured against a policy that imitated the failures",
        stages=(
            Stage(TRAINED_TEACHER.set("objective.mode", "mse"), 0.25),
            Stage(UNLEARNER, 0.25),
            Stage(STUDENT.but(prepare=(KeepAndRestart(UNLEARNED),), credit=DistilledSignal(contrast=KeptPolicy(UNLEARNED))), 0.5),
        ),
    ),
    "fixed": METHOD.but(
        name="erpd.fixed",
        summary="the student learns from the fixed data too",
        stages=(
            Stage(TRAINED_TEACHER, 0.9),
            Stage(STUDENT.but(select=NoPrompts(), rollout=FixedData(), update=GradientSteps(minibatches=8, unit="group")), 0.1),
        ),
    ),
}
