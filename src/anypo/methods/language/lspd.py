"""LSPD: least-square policy distillation (arXiv:2609.35505).

On-policy distillation follows the reverse KL to a teacher on the student's own samples by policy gradients and throws each batch away. That KL is
regularized reinforcement learning whose reward is the teacher's log-ratio, so value-based learning applies: LSPD regresses the student's log-prob of
every sampled token onto the teacher's with a robust squared error. This is right for data of any origin, so a batch serves several updates, and
`VARIANTS["replay"]` learns from all earlier ones and stops sampling after a quarter of the run. An entropy bonus keeps the student exploring.
Against GRPO it changes credit (the teacher's margin over the sampler; the reward is only watched), objective and regularizer. Equations 1-4 from the
paper's summary; the floor is the row's, delta and eta are a recipe's, the other defaults [reconstructed]. So is the teacher that a run without one
gets, the sharpened starting policy. Left out: the idealized optimistic objective, of which the claims use the tabular form.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper, Rollout
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.policy import Loss, Policy, Signals
from anypo.seams.groups import masked_mean
from anypo.seams.objective import ClippedSurrogate
from anypo.seams.regularize import EntropyBonus
from anypo.seams.rollout import OnPolicy
from anypo.seams.teachers import Teacher
from anypo.seams.update import GradientSteps
from anypo.task import Prompt

if TYPE_CHECKING:
    from anypo.run import Run

FLOOR = -20.0  # the least log-prob of a teacher that is taken seriously
TEACHER = "teacher"  # name of the frozen starting policy, in the run


class LossValue(NamedTuple):
    loss: Tensor  # scalar, differentiable in logp and entropy


class Gradients(NamedTuple):
    ls_grad: Tensor  # [A] of the expected squared error, samples held fixed
    kl_grad: Tensor  # [A] of KL(student || teacher)


def huber(error: Tensor, delta: float) -> Tensor:
    """Equation 3: e^2 / 2 up to |e| = delta, then delta (|e| - delta / 2). `delta` may be infinite."""
    bounded = error.abs().clamp(max=delta)
    return bounded * (error.abs() - bounded / 2)


def regression(logp: Float[Tensor, "N T"], target: Float[Tensor, "N T"], mask: Tensor, delta: float = 1.0) -> Float[Tensor, "N T"]:
    """Robust squared error of each action's log-prob against its target, which carries no gradient; 0 outside the mask."""
    inside, zero = mask.bool(), logp.new_zeros(())
    return huber(torch.where(inside, logp, zero) - torch.where(inside, target.detach().to(logp), zero), delta)


def loss(
    logp: Float[Tensor, "N T"], teacher_logp: Float[Tensor, "N T"], entropy: Float[Tensor, "N T"], mask: Tensor, delta: float = 1.0,
    eta: float = 0.01,
) -> LossValue:  # fmt: skip
    """Equations 2-4: mean over all tokens of the Huber error, minus eta times the mean entropy; 0 without tokens."""
    error = regression(logp, teacher_logp.clamp(min=FLOOR), mask, delta)
    return LossValue(masked_mean(error, mask) - eta * masked_mean(entropy, mask))


def tree_gradient(theta: Float[Tensor, " A"], teacher_prob: Float[Tensor, " A"]) -> Gradients:
    """In one state with logits `theta`: the gradient of equation 4 (eta 0, delta infinite) under the student's own samples, and that of the KL."""
    theta = theta.detach().requires_grad_()
    logp, target = theta.log_softmax(-1), teacher_prob.log()
    squared = (logp.exp().detach() * huber(logp - target, float("inf"))).sum()
    divergence = (logp.exp() * (logp - target)).sum()
    ls_grad, kl_grad = (torch.autograd.grad(value, theta, retain_graph=True)[0] for value in (squared, divergence))
    return Gradients(ls_grad, kl_grad)


@dataclass
class ModelTeacher:
    """A language model with the student's tokens; without one, the policy as it was at the start, at a lower temperature."""

    model: str = ""  # builtin, smollm2, a folder or a hub name; empty = the starting policy
    temperature: float = 0.5  # of the teacher's distribution beside the one the student samples at, > 0; 1 = as it is
    loaded: Policy | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"the teacher's temperature must be above 0, not {self.temperature}")

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        sampled_at = batch.signals.get("temperature")
        if sampled_at is None:
            sampled_at = batch.logp.new_full((len(batch),), getattr(run.policy, "temperature", 1.0))
        tempered = batch.but(signals=batch.signals | {"temperature": sampled_at * self.temperature})
        if not self.model:
            return run.score(tempered, {"logp"}, TEACHER).logp
        if self.loaded is None:
            self.loaded = self._load(run.policy)
        return self.loaded.observe(tempered, {"logp"}).logp

    def _load(self, student: Policy) -> Policy:
        """The model, frozen. Raises ValueError when it does not share the student's tokens."""
        from anypo.domains.language.models import load_companion

        return load_companion(self.model, student, "teacher")


@dataclass
class TeacherMargin:
    """Each token's log-prob under the teacher minus that under the policy that sampled it: the reward of on-policy distillation.

    Leaves `teacher_logp` [N,T] in the batch's signals; rows that carry it are not scored again.
    """

    teacher: Teacher = field(default_factory=ModelTeacher)

    gives = frozenset({"teacher_logp"})

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        self.note(batch, run)
        zero = batch.logp.new_zeros(())
        margin = torch.where(batch.mask, batch.signal("teacher_logp").clamp(min=FLOOR) - batch.logp, zero)
        run.log(teacher_margin=float(masked_mean(margin, batch.mask)))  # minus the estimated reverse KL a token, on fresh rows
        return margin

    def note(self, batch: Batch, run: Run) -> None:
        """Score the batch under the teacher unless that is done."""
        if "teacher_logp" not in batch.signals:
            batch.signals["teacher_logp"] = self.teacher(batch, run).to(batch.logp)


@dataclass
class LogProbRegression:
    """Huber error of each token's log-prob against where the credit wants it: the sampler's log-prob plus the advantage."""

    delta: float = 1.0  # > 0, error in nats above which the pull no longer grows; inf = plain square

    needs = frozenset({"logp"})

    def __post_init__(self) -> None:
        if not self.delta > 0:
            raise ValueError(f"objective.delta must be above 0, not {self.delta}")

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        mask = batch.counted
        error = regression(new.logp, batch.logp + batch.advantage, mask, self.delta)
        return Loss(masked_mean(error, mask))


@dataclass
class ReplayedRows:
    """Rows drawn uniformly from all trajectories so far, without importance weights; nothing new is sampled after the first part of the run.

    A step deals `draws` times as many rows as a batch has. Each keeps its log-probs, its reward and the teacher's log-probs.
    """

    sampling: float = 0.25  # part of the run in which fresh batches are added, in (0,1]
    draws: int = 4  # rows dealt for each row of a batch, >= 1; with as many minibatches each is the size of a batch
    inner: Rollout = field(default_factory=OnPolicy)
    batches: list[Batch] = field(default_factory=list, init=False, repr=False)

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        if run.progress < self.sampling or not self.batches:
            self.batches.append(self.fresh(prompts, run))
        size = torch.tensor([len(b) for b in self.batches])
        wanted = torch.randint(int(size.sum()), (self.draws * int(size[-1]),), generator=run.generator)
        start = size.cumsum(0) - size
        dealt = [b[wanted[(wanted >= s) & (wanted < s + len(b))] - s] for b, s in zip(self.batches, start.tolist(), strict=True)]
        run.log(replay_rows=float(size.sum()))
        return Batch.concat([b for b in dealt if len(b)])

    def fresh(self, prompts: list[Prompt], run: Run) -> Batch:
        """New trajectories with reward and teacher's log-probs, in groups that no earlier batch has."""
        batch = self.inner(prompts, run)
        run.score_rewards(batch)
        if isinstance(run.method.credit, TeacherMargin):
            run.method.credit.note(batch, run)
        taken = max((int(b.group.max()) + 1 for b in self.batches[-1:]), default=0)
        return batch.but(group=batch.group + taken)

    def state_dict(self) -> dict[str, Any]:
        return {"batches": [b.state_dict() for b in self.batches]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = [Batch(**b) for b in state["batches"]]


METHOD = GRPO.but(
    name="lspd",
    paper=Paper("LSPD: least-square policy distillation", "2609.35505", 2026),
    summary="log-probs of sampled tokens are regressed onto a teacher's, several updates a batch, with an entropy bonus",
    credit=TeacherMargin(),
    objective=LogProbRegression(),
    regularize=(EntropyBonus(coefficient=0.01),),
    update=GradientSteps(epochs=4, max_grad_norm=None),
)
VARIANTS = {
    "replay": METHOD.but(
        name="lspd.replay",
        summary="learns from all trajectories so far and samples none after a quarter of the run",
        rollout=ReplayedRows(),
        update=GradientSteps(minibatches=4, max_grad_norm=None, unit="row"),
    ),
    "opd": METHOD.but(
        name="lspd.opd",
        summary="on-policy distillation: one policy-gradient step on the reverse KL for each batch, no entropy bonus",
        objective=ClippedSurrogate(aggregation="token_mean"),
        regularize=(),
        update=GradientSteps(epochs=1, max_grad_norm=None),
    ),
}
