"""SRPO (sample-routed): GRPO for successes, self-distillation for failures (arXiv:2604.02288).

GRPO punishes every token of a failed response alike. SDPO (arXiv:2601.20802) lets the policy, shown a correct response to the same prompt, teach
itself along the sampled one; fast at first, it then collapses, since distilling what is already right is ambiguous and the teacher gets unsure.
Here each response takes one route: successes GRPO's, failures with a correct sibling the teacher's, whose tokens weigh the more the surer it is.
Against GRPO it changes the credit and adds a term to the loss. Routes from the paper, divergence and moving teacher from SDPO's code; the
fallback, the whole-group statistics, the form of the weights and the sum of both terms are [reconstructed]. `SDPO` is the other baseline. Another
method is called SRPO too: `srpo_reset`. Left out: feedback beside the sibling, the importance factor for stale batches, and distilling only the
likeliest tokens of a large vocabulary.
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
from anypo.seams.credit import GroupRelative, group_relative
from anypo.seams.groups import broadcast, group_min, masked_mean
from anypo.seams.objective import ClippedSurrogate, clipped, token_ratio
from anypo.seams.teachers import Demonstrated, SiblingInContext, divergence

if TYPE_CHECKING:
    from anypo.run import Run

FALLBACKS = ("grpo", "drop")
Logits = Float[Tensor, "N T V"]


class Routes(NamedTuple):
    grpo: Tensor  # [N] 1 for successes
    distill: Tensor  # [N] 1 for failures with a success in the group
    orphan: Tensor  # [N] 1 for failures without
    demo: Tensor  # [N] row of the response to learn from, -1 where nothing is distilled


class Distillation(NamedTuple):
    kl: Tensor  # [N,T] divergence of teacher and student, differentiable in the student's logits, 0 outside
    weight: Tensor  # [N,T] mean 1 over the distilled tokens, 0 outside


class RoutedLoss(NamedTuple):
    policy: Tensor
    distill: Tensor  # before lambda
    loss: Tensor  # scalar, differentiable in logp and student_logits


def routes(reward: Float[Tensor, " N"], group: Int[Tensor, " N"], threshold: float = 1.0) -> Routes:
    """Equation 1. The response to learn from is the first success of the group."""
    success = reward >= threshold
    demo = sibling(reward, group, threshold)
    distill = ~success & (demo >= 0)
    return Routes(success.long(), distill.long(), (~success & (demo < 0)).long(), torch.where(distill, demo, -1))


def sibling(reward: Float[Tensor, " N"], group: Int[Tensor, " N"], threshold: float = 1.0) -> Int[Tensor, " N"]:
    """The first success of the group that is not the row itself, -1 where there is none."""
    rows, none = torch.arange(len(reward)), len(reward)
    place = torch.where(reward >= threshold, rows, none)
    first = group_min(place, group)
    second = group_min(torch.where(place == first, none, place), group)
    found = torch.where(first == rows, second, first)
    return torch.where(found < none, found, -1)


def distill(
    student_logits: Logits, teacher_logits: Logits, mask: Tensor, distill: Int[Tensor, " N"], kappa: float = 0.5, beta_w: float = 1.0
) -> Distillation:
    """Equations 3-5. `kappa` 0: KL(teacher || student); 1: KL(student || teacher); between: the Jensen-Shannon divergence of that skew.

    Nothing flows into the teacher or the weights. Outside the distilled tokens the logits may be anything.
    """
    chosen = mask.bool() & distill.bool()[:, None]
    zero = student_logits.new_zeros(())
    student = torch.where(chosen[..., None], student_logits, zero).log_softmax(-1)
    teacher = torch.where(chosen[..., None], teacher_logits.to(student_logits), zero).log_softmax(-1).detach()
    if kappa in (0, 1):
        kl = divergence(teacher, student) if kappa == 0 else divergence(student, teacher)
    else:
        shares = student.new_tensor([1 - kappa, kappa]).log()
        middle = torch.logsumexp(torch.stack([student + shares[0], teacher + shares[1]]), dim=0)
        kl = (1 - kappa) * divergence(student, middle) + kappa * divergence(teacher, middle)
    sureness = torch.exp(beta_w * (teacher.exp() * teacher).sum(-1))  # exp(-beta_w entropy)
    weight = sureness / masked_mean(sureness, chosen) if bool(chosen.any()) else sureness
    return Distillation(torch.where(chosen, kl, zero), torch.where(chosen, weight, zero))


def loss(
    student_logits: Logits, teacher_logits: Logits, logp: Float[Tensor, "N T"], old_logp: Float[Tensor, "N T"], mask: Tensor,
    reward: Float[Tensor, " N"], group: Int[Tensor, " N"], kappa: float = 0.5, beta_w: float = 1.0, clip_low: float = 0.2,
    clip_high: float = 0.28, lam: float = 1.0, ddof: int = 0, eps: float = 1e-6, threshold: float = 1.0,
) -> RoutedLoss:  # fmt: skip
    """Equation 6 with the fallback "grpo": both terms are sums over their tokens, divided by the number of all tokens."""
    route = routes(reward, group, threshold)
    relative = torch.where(route.distill.bool(), reward.new_zeros(()), group_relative(reward, group, ddof=ddof, eps=eps))
    value = clipped(token_ratio(logp, old_logp, mask), broadcast(relative, mask), 1 - clip_low, 1 + clip_high)
    taught = distill(student_logits, teacher_logits, mask, route.distill, kappa, beta_w)
    policy, term = -masked_mean(value, mask), masked_mean(taught.weight * taught.kl, mask)
    return RoutedLoss(policy, term, policy + lam * term)


@dataclass
class SampleRouted:
    """Advantages over the whole group for successes (and failures that nobody can teach), 0 for what is distilled.

    Leaves `distill` [N] and the teacher's `teacher_logits` [N,T,V] in the batch's signals.
    """

    threshold: float = 1.0  # reward from which a response is a success
    fallback: str = "grpo"  # failures without a correct sibling: grpo, or drop
    route_all: bool = False  # distill every response that has a correct sibling, drop the others (SDPO)
    inner: Credit = field(default_factory=GroupRelative)
    teacher: Demonstrated = field(default_factory=SiblingInContext)

    needs = frozenset({"logits"})
    gives = frozenset({"distill", "teacher_logits"})
    compares_group = True

    def __post_init__(self) -> None:
        if self.fallback not in FALLBACKS:
            raise ValueError(f"credit.fallback is grpo or drop, not '{self.fallback}'")

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        run.named_policy("teacher")  # from the first step on, whether or not something is distilled in it
        advantage = self.inner(batch, run)
        demo = sibling(batch.outcome, batch.group, self.threshold)
        if not self.route_all:
            demo = torch.where(batch.outcome >= self.threshold, -1, demo)
        rows = (demo >= 0).nonzero().flatten()
        rows = rows[self.teacher.can_show(batch, rows, demo[rows], run)] if len(rows) else rows
        taught = torch.zeros(len(batch), dtype=torch.bool)
        taught[rows] = True
        logits = self.teacher(batch, rows, demo[rows], run) if len(rows) else batch.logp.new_zeros(0, batch.horizon, 1)
        batch.signals["teacher_logits"] = logits.new_zeros(len(batch), *logits.shape[1:]).index_copy(0, rows, logits)
        batch.signals["distill"] = taught
        dropped = ~taught if self.route_all else ~taught & (batch.outcome < self.threshold) & (self.fallback == "drop")
        if bool(dropped.any()):
            batch.keep = batch.counted & ~dropped[:, None]
        run.log(distilled=float(taught.double().mean()))
        return torch.where(taught[:, None], advantage.new_zeros(()), advantage)


@dataclass
class RoutedDistillation:
    """lambda times the weighted divergence from the teacher on the distilled rows, over all tokens of both routes."""

    lam: float = 1.0  # >= 0
    kappa: float = 0.5  # 0 teacher to student, 1 student to teacher, between a mixture; in [0,1]
    beta_w: float = 1.0  # how much the teacher's entropy (nats) takes from a token's weight, >= 0

    needs = frozenset({"logits"})
    wants = frozenset({"distill", "teacher_logits"})  # left in the batch by the credit

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        taught, mask = batch.signal("distill"), batch.counted
        if not bool(taught.any()):
            return Loss(batch.logp.new_zeros(()), {"distillation": 0.0})
        found = distill(new.logits[taught], batch.signal("teacher_logits")[taught], mask[taught], taught[taught], self.kappa, self.beta_w)
        term = (found.weight * found.kl).sum() / mask.sum().clamp(min=1)
        return Loss(self.lam * term, {"distillation": float(term.detach())})


@dataclass
class MovingTeacher:
    """The teacher's weights follow the policy's."""

    rate: float = 0.05  # u, how far they move each step, in [0,1]; 1 = the current policy

    def __call__(self, batch: Batch, run: Run) -> None:
        run.move_policy("teacher", 1 - self.rate)


METHOD = GRPO.but(
    name="srpo_routed",
    paper=Paper("Unifying Group-Relative and Self-Distillation Policy Optimization via Sample Routing", "2604.02288", 2026),
    summary="successes go to GRPO, failures with a correct sibling to the policy's own teacher, weighted by the teacher's sureness",
    credit=SampleRouted(),
    objective=ClippedSurrogate(clip_low=0.2, clip_high=0.28, aggregation="token_mean"),
    regularize=(RoutedDistillation(),),
    control=(MovingTeacher(),),
)
SDPO = METHOD.but(
    name="srpo_routed.sdpo", summary="every response with a correct sibling is distilled, unweighted", credit=SampleRouted(route_all=True)
).set("regularize.0.beta_w", 0.0)
VARIANTS = {"sdpo": SDPO}
