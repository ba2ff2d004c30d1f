"""GSPO: group sequence policy optimization (arXiv:2507.18071).

GRPO's token ratios are single-sample importance weights whose noise accumulates with length. GSPO makes the unit of the ratio the unit of the
reward: one length-normalized ratio a response, clipped and weighted as a whole. GSPO-token keeps that value but lets every token carry an
advantage of its own; with equal advantages in a row the two are the same loss and gradient, so the component uses the token form for any credit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from jaxtyping import Float
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.policy import Loss, Signals
from anypo.seams.objective import aggregate, clipped, log_ratio, ratio_metrics

if TYPE_CHECKING:
    from anypo.run import Run


class LossValue(NamedTuple):
    loss: Tensor  # scalar, differentiable in logp


def ratio(logp: Float[Tensor, "N T"], old_logp: Float[Tensor, "N T"], mask: Tensor) -> Float[Tensor, " N"]:
    """Equation 2: exp of the mean log-ratio over a row's tokens; 1 for a row without tokens."""
    return (log_ratio(logp, old_logp, mask).sum(1) / mask.sum(1).clamp(min=1)).exp()


def loss(
    logp: Float[Tensor, "N T"],
    old_logp: Float[Tensor, "N T"],
    mask: Tensor,
    advantages: Float[Tensor, " N"],
    clip_low: float,
    clip_high: float,
) -> LossValue:
    """Equation 3: minus the mean over non-empty rows of the clipped surrogate of the sequence ratio."""
    value = clipped(ratio(logp, old_logp, mask), advantages, 1 - clip_low, 1 + clip_high)
    rows = mask.sum(1) > 0
    return LossValue(-(value * rows).sum() / rows.sum().clamp(min=1))


def loss_token(
    logp: Float[Tensor, "N T"], old_logp: Float[Tensor, "N T"], mask: Tensor, token_advantages: Float[Tensor, "N T"], clip_low: float,
    clip_high: float,
) -> LossValue:  # fmt: skip
    """Equation 5 (GSPO-token): every token has the sequence ratio's value, its own gradient and its own advantage."""
    return LossValue(aggregate(-clipped(token_form(logp, old_logp, mask), token_advantages, 1 - clip_low, 1 + clip_high), mask, "seq_mean"))


def token_form(logp: Tensor, old_logp: Tensor, mask: Tensor) -> Float[Tensor, "N T"]:
    """s_it = sg[s_i] exp(logp_it - sg[logp_it])."""
    return ratio(logp, old_logp, mask).detach()[:, None] * log_ratio(logp, logp.detach(), mask).exp()


@dataclass
class SequenceClip:
    """Clipped surrogate of the length-normalized sequence ratio, with per-token advantages."""

    clip_low: float = 3e-4  # the ratio may fall to 1 - clip_low; small, since length-normalized ratios move little
    clip_high: float = 4e-4  # and rise to 1 + clip_high; use 0.05 and 0.08 on short sequences

    needs = frozenset({"logp"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        mask = batch.counted
        value = loss_token(new.logp, batch.logp, mask, batch.advantage, self.clip_low, self.clip_high).loss
        whole = ratio(new.logp, batch.logp, mask)
        return Loss(value, ratio_metrics(whole, 1 - self.clip_low, 1 + self.clip_high, mask.any(1)))


METHOD = GRPO.but(
    name="gspo",
    paper=Paper("Group Sequence Policy Optimization", "2507.18071", 2025),
    summary="one length-normalized ratio a response, clipped as a whole",
    objective=SequenceClip(),
    regularize=(),
)
