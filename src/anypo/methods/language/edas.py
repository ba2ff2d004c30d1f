"""EDAS: error-diversity advantage shaping (arXiv:2605.17333).

A step after any group advantage (GRPO's, DAPO's). Which wrong answers a group gave is usually thrown away; EDAS looks at it and touches the wrong
rows alone. When all of them give the same answer the penalty grows (perseveration); otherwise it is shifted by relative surprisal: heavier on the
dominant error, lighter on rare ones, never so far that a sign flips. Formulas from the README of the authors' code. A group without a right
answer has no advantage under GRPO, so nothing is shaped there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Credit, Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.seams.answers import answer_keys
from anypo.seams.credit import GroupRelative
from anypo.seams.groups import group_sum
from anypo.seams.reward import weighted_sum

if TYPE_CHECKING:
    from anypo.run import Run


def delta(
    advantages: Float[Tensor, " N"], correct: Tensor, error_key: Int[Tensor, " N"], group: Int[Tensor, " N"], alpha: float, beta: float
) -> Float[Tensor, " N"]:
    """Equations 1-2: the shift of each wrong row's advantage before the clip; 0 for right rows and for the only wrong row of a group.

    `correct` [N] 0/1; `error_key` names the wrong answer (anything in right rows).
    """
    wrong = ~correct.bool()
    one = wrong.to(advantages.dtype)
    count = group_sum(one, group)
    _, error_class = torch.unique(torch.stack([group, error_key, wrong.long()]), dim=1, return_inverse=True)
    members = group_sum(one, error_class)
    surprisal = torch.where(wrong, -(members.clamp(min=1) / count.clamp(min=1)).log(), torch.zeros_like(one))
    entropy = group_sum(surprisal, group) / count.clamp(min=1)  # the mean surprisal of the wrong rows is the entropy of their classes
    size = group_sum(advantages.abs() * one, group) / count.clamp(min=1)
    spread = alpha * size * (surprisal - entropy) / count.clamp(min=2).log()
    shift = torch.where(members == count, -beta * size, spread)
    return torch.where(wrong & (count > 1), shift, torch.zeros_like(shift))


def clipped_shift(advantages: Tensor, shift: Tensor, kappa: float) -> Tensor:
    """Equation 3: advantages plus a shift of at most |advantage|/kappa, so that with kappa > 1 no sign flips. Any shapes that broadcast."""
    return advantages + shift.sign() * torch.minimum(shift.abs(), advantages.abs() / kappa)


def shaped_advantages(
    advantages: Float[Tensor, " N"],
    correct: Tensor,
    error_key: Int[Tensor, " N"],
    group: Int[Tensor, " N"],
    alpha: float,
    beta: float,
    kappa: float,
) -> Float[Tensor, " N"]:
    """Equations 1-3."""
    return clipped_shift(advantages, delta(advantages, correct, error_key, group, alpha, beta), kappa)


def ramp(step: int, start: int, steps: int) -> float:
    """Equation 4: the factor of alpha and beta, rising linearly from 0 at `start` to 1 after `steps`; 1 throughout when `steps` is 0."""
    return min(max((step - start) / steps, 0.0), 1.0) if steps else 1.0


@dataclass
class ErrorDiversity:
    """Any credit, with the penalties of wrong rows shaped by how the wrong answers of the group are distributed."""

    inner: Credit = field(default_factory=GroupRelative)
    alpha: float = 0.4  # >= 0, how much penalty moves from rare errors to the dominant one
    beta: float = 0.2  # >= 0, extra penalty when all errors are the same; 0.3 on top of DAPO
    kappa: float = 2.0  # > 1, an advantage changes by at most 1/kappa of itself
    warmup_start: int = 0  # step at which the ramp begins, >= 0
    warmup_steps: int = 0  # length of the ramp, >= 0; 0 = full strength from the first step
    right_from: float = 0.5  # a task reward of at least this much is a right answer

    compares_group = True

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        advantage = self.inner(batch, run)
        strength = ramp(run.step, self.warmup_start, self.warmup_steps)
        inside = torch.where(batch.mask, advantage, torch.zeros_like(advantage))
        per_row = inside.abs().sum(1) / batch.lengths.clamp(min=1)
        shift = delta(per_row, self.correct(batch), answer_keys(batch), batch.group, strength * self.alpha, strength * self.beta)
        return clipped_shift(inside, shift[:, None], self.kappa)

    def correct(self, batch: Batch) -> Tensor:
        """[N] bool, judged by the task's own reward: penalties that a method adds to it do not turn a right answer into an error."""
        reward: Any = batch.signals.get("task_reward", batch.reward)
        return weighted_sum(reward) >= self.right_from


METHOD = GRPO.but(
    name="edas",
    paper=Paper("Leveraging Error Diversity in Group Rollouts for Reinforcement Learning", "2605.17333", 2026),
    summary="penalties of wrong answers grow where the group repeats one error and shrink where an error is rare",
    credit=ErrorDiversity(),
).set("select.group_size", 10)
