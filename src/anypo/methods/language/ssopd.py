"""SSOPD: self-supervised on-policy distillation, shortest correct to longest wrong (arXiv:2605.17497).

GRPO takes from the attempts at a prompt nothing but their rewards. Where right and wrong ones stand side by side, a right one is a witness of how the
current policy can solve the problem: the policy that reads it beside the prompt is a teacher, and the prefixes of a wrong one are states where it is
needed. SSOPD adds to GRPO's loss the divergence of the policy from this teacher along the longest wrong completion, with the shortest correct one as
the witness; a frontier weight favours prompts that are half solved. No outside solutions. Pair and conditioning from the paper; the frontier weight's
form, the divergence and all defaults are [reconstructed], and so is what the teacher reads: prompt, witness, prompt. `VARIANTS["reference"]` shows it
the problem's reference solution in place of the witness, as in OPSD. Against `srpo_routed`, which sends every failure either to GRPO or to a teacher,
here failures keep their advantages. Left out: distilling only the likeliest tokens of a large vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Credit, Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.policy import Loss, Signals
from anypo.seams.credit import GroupRelative
from anypo.seams.objective import aggregate, clipped, token_ratio
from anypo.seams.teachers import AnswerShown, Demonstrated, SiblingInContext
from anypo.seams.teachers import divergence as kl

if TYPE_CHECKING:
    from anypo.run import Run

DIVERGENCES = ("forward", "reverse", "jsd")
LogProbs = Float[Tensor, "Q T V"]


class LossValue(NamedTuple):
    pg: Tensor
    distill: Tensor  # before lam
    loss: Tensor  # scalar, differentiable in logp and student_logp


def choose(correct: Int[Tensor, " N"], length: Int[Tensor, " N"], group: Int[Tensor, " N"]) -> Int[Tensor, "Q 2"]:
    """Equation 1: by group, in ascending order, the rows of its shortest correct and of its longest wrong completion (ties: the smaller row), -1 and
    -1 for a group without both."""
    right, none = correct.bool(), len(group)
    pair = torch.stack([first_of_groups(length, group, right), first_of_groups(-length, group, ~right)], dim=1)
    return torch.where((pair < none).all(1, keepdim=True), pair, -1)


def first_of_groups(key: Int[Tensor, " N"], group: Int[Tensor, " N"], among: Tensor) -> Int[Tensor, " Q"]:
    """By group, in ascending order: the row of least `key` among the rows `among` [N], the first of equals; N where there is none."""
    rows = torch.arange(len(group))
    numbers, index = torch.unique(group, return_inverse=True)
    largest = torch.iinfo(torch.int64).max
    least = key.new_full((len(numbers),), largest).scatter_reduce(0, index, torch.where(among, key, largest), "amin")
    best = torch.where(among & (key == least[index]), rows, len(group))
    return torch.full_like(numbers, len(group)).scatter_reduce(0, index, best, "amin")


def frontier(correct: Int[Tensor, " N"], group: Int[Tensor, " N"]) -> Float[Tensor, " Q"]:
    """Equation 2: 4 p (1 - p) of every group's success rate, groups in ascending order; exactly 0 where p is 0 or 1."""
    numbers, index, size = torch.unique(group, return_inverse=True, return_counts=True)
    rate = torch.zeros(len(numbers), dtype=torch.float64).index_add(0, index, correct.double()) / size
    return 4 * rate * (1 - rate)


def divergences(student_logp: LogProbs, teacher_logp: LogProbs, mask: Tensor, divergence: str = "forward") -> Float[Tensor, "Q T"]:
    """Equation 4 at every position: "forward" KL(teacher || student), "reverse" KL(student || teacher), or "jsd", the Jensen-Shannon divergence. Nothing
    flows into the teacher; outside the mask the inputs may be anything and the result is 0. Raises ValueError for another name."""
    if divergence not in DIVERGENCES:
        raise ValueError(f"unknown divergence '{divergence}'; use one of {', '.join(DIVERGENCES)}")
    inside, zero = mask.bool(), student_logp.new_zeros(())
    student = torch.where(inside[..., None], student_logp, zero)
    teacher = torch.where(inside[..., None], teacher_logp.detach().to(student_logp), zero)
    if divergence == "jsd":
        middle = torch.logaddexp(student, teacher) - torch.log(student.new_tensor(2.0))
        found = (kl(teacher, middle) + kl(student, middle)) / 2
    else:
        found = kl(teacher, student) if divergence == "forward" else kl(student, teacher)
    return torch.where(inside, found, zero)


def distill(
    student_logp: LogProbs, teacher_logp: LogProbs, mask: Tensor, weight: Float[Tensor, " Q"], divergence: str = "forward"
) -> Float[Tensor, ""]:
    """Equation 5: the mean over groups of positive weight of weight times the mean divergence over the wrong completion's positions; 0 without one."""
    by_group = divergences(student_logp, teacher_logp, mask, divergence).sum(1) / mask.sum(1).clamp(min=1)
    return (weight.to(by_group) * by_group).sum() / (weight > 0).sum().clamp(min=1)


def loss(
    logp: Float[Tensor, "N T"], old_logp: Float[Tensor, "N T"], advantages: Float[Tensor, "N T"], loss_mask: Tensor, student_logp: LogProbs,
    teacher_logp: LogProbs, mask: Tensor, weight: Float[Tensor, " Q"], clip: float = 0.2, divergence: str = "forward", lam: float = 0.1,
) -> LossValue:  # fmt: skip
    """Equation 6: GRPO's clipped surrogate, mean over rows of row means, plus lam times the distillation."""
    ratio = token_ratio(logp, old_logp, loss_mask)
    pg = aggregate(-clipped(ratio, advantages, 1 - clip, 1 + clip), loss_mask, "seq_mean")
    term = distill(student_logp, teacher_logp, mask, weight, divergence)
    return LossValue(pg, term, pg + lam * term)


@dataclass
class ReferenceInContext(SiblingInContext):
    """The current policy reads the prompt with its reference solution, whatever the witness is; where that leaves no room, the prompt alone."""

    policy: str | None = None
    answer: AnswerShown = field(default_factory=AnswerShown)

    def can_show(self, batch: Batch, rows: Tensor, demo: Tensor, run: Run) -> Tensor:
        return torch.ones(len(rows), dtype=torch.bool)

    def __call__(self, batch: Batch, rows: Tensor, demo: Tensor, run: Run) -> Tensor:
        taught = batch[rows]
        return run.score(taught.but(context=self.answer.contexts(taught, run)), {"logits"}).logits


@dataclass
class WitnessCredit:
    """The inner credit's advantages; on the way the teacher reads the witness of every mixed group, once a batch.

    Leaves `frontier` [N], the weight of the row's group for the completion that is taught and 0 elsewhere, and `witness_logits`, a list of the taught
    rows' [T,V] and of None.
    """

    threshold: float = 0.5  # a completion is correct when its reward is above this
    inner: Credit = field(default_factory=GroupRelative)
    teacher: Demonstrated = field(default_factory=lambda: SiblingInContext(policy=None))

    needs = frozenset({"logits"})
    gives = frozenset({"frontier", "witness_logits"})
    compares_group = True

    def pairs(self, correct: Tensor, batch: Batch, run: Run) -> Int[Tensor, "Q 2"]:
        """Witness and taught row of every group, -1 where there is no pair."""
        return choose(correct, batch.lengths, batch.group)

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        advantage = self.inner(batch, run)
        correct = batch.outcome > self.threshold
        pair, weight = self.pairs(correct, batch, run), frontier(correct, batch.group)
        mixed = pair[:, 0] >= 0
        witness, taught, weight = pair[mixed, 0], pair[mixed, 1], weight[mixed]
        shown = self.teacher.can_show(batch, taught, witness, run)
        witness, taught, weight = witness[shown], taught[shown], weight[shown]
        logits: list[Tensor | None] = [None] * len(batch)
        if len(taught):
            for row, found in zip(taught.tolist(), self.teacher(batch, taught, witness, run), strict=True):
                logits[row] = found
        batch.signals["witness_logits"] = logits
        batch.signals["frontier"] = batch.logp.new_zeros(len(batch)).index_copy(0, taught, weight.to(batch.logp))
        run.log(mixed_groups=float(mixed.double().mean()))
        return advantage


@dataclass
class WitnessDistillation:
    """lam times the frontier-weighted divergence from the witness's teacher along the taught completions."""

    lam: float = 0.1  # >= 0; 0 leaves GRPO
    divergence: str = "forward"  # forward, reverse or jsd

    needs = frozenset({"logits"})
    wants = frozenset({"frontier", "witness_logits"})  # left in the batch by the credit

    def __post_init__(self) -> None:
        if self.divergence not in DIVERGENCES:
            raise ValueError(f"regularize.divergence is {', '.join(DIVERGENCES[:-1])} or {DIVERGENCES[-1]}, not '{self.divergence}'")

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        weight = batch.signal("frontier")
        taught = (weight > 0).nonzero().flatten()
        if not len(taught):
            return Loss(batch.logp.new_zeros(()), {"distillation": 0.0})
        teacher = torch.stack([batch.signal("witness_logits")[row] for row in taught.tolist()])
        student = new.logits[taught].log_softmax(-1)
        mask = batch.counted[taught]
        term = distill(student, teacher.to(student).log_softmax(-1), mask, weight[taught].to(student), self.divergence)
        return Loss(self.lam * term, {"distillation": float(term.detach())})


METHOD = GRPO.but(
    name="ssopd",
    paper=Paper("Self-Supervised On-Policy Distillation for Reasoning Language Models", "2605.17497", 2026),
    summary="the policy that reads a group's shortest correct completion teaches itself along the group's longest wrong one",
    credit=WitnessCredit(),
    regularize=(WitnessDistillation(),),
)
VARIANTS = {
    "reference": METHOD.but(
        name="ssopd.reference",
        summary="the teacher reads the problem's reference solution in place of the group's own (as in OPSD)",
        credit=WitnessCredit(teacher=ReferenceInContext()),
    )
}
