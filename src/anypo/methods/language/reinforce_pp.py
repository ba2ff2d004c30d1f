"""REINFORCE++ (arXiv:2501.03262).

A per-token KL penalty inside the reward, return-to-go, and advantages normalized over the whole batch instead of the group; then PPO's clip with
a token mean. Its "baseline" variant subtracts the group's mean first, puts the KL (k2) into the loss and normalizes over the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.seams.credit import whiten
from anypo.seams.groups import broadcast, group_mean
from anypo.seams.objective import ClippedSurrogate, log_ratio
from anypo.seams.regularize import KLPenalty
from anypo.seams.reward import row_reward
from anypo.seams.select import UniformPrompts

if TYPE_CHECKING:
    from anypo.run import Run


def rpp(
    reward: Float[Tensor, " N"],
    old_logp: Float[Tensor, "N T"],
    ref_logp: Float[Tensor, "N T"],
    mask: Tensor,
    beta: float,
    eps: float = 1e-8,
) -> Float[Tensor, "N T"]:
    """Equations 3-4: reward minus beta times the KL still to come, normalized over all valid tokens of the batch."""
    kl = log_ratio(old_logp, ref_logp, mask)
    to_go = kl.flip(1).cumsum(1).flip(1)
    return whiten(broadcast(reward, mask) - beta * to_go * mask, mask, eps)


def rpp_baseline(reward: Float[Tensor, " N"], group: Int[Tensor, " N"], mask: Tensor, eps: float = 1e-8) -> Float[Tensor, "N T"]:
    """Equation 5: reward minus the group's mean, then normalized over all valid tokens of the batch."""
    return whiten(broadcast(reward - group_mean(reward, group), mask), mask, eps)


@dataclass
class BatchNormalizedReturn:
    """Return-to-go with a per-token KL penalty, normalized over the batch; with `baseline` the group's mean is subtracted instead."""

    beta: float = 0.01  # KL in the return, >= 0; not used by the baseline variant
    eps: float = 1e-8  # > 0, added to the standard deviation
    baseline: bool = False  # subtract the group's mean first and leave the KL to a regularizer
    weights: tuple[float, ...] | None = None  # of the K rewards; None = all 1

    @property
    def compares_group(self) -> bool:
        return self.baseline

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"ref_logp"}) if self.beta and not self.baseline else frozenset()

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        reward = row_reward(batch, self.weights)
        if self.baseline:
            return rpp_baseline(reward, batch.group, batch.mask, self.eps)
        ref_logp = batch.signal("ref_logp") if self.beta else batch.logp
        return rpp(reward, batch.logp, ref_logp, batch.mask, self.beta, self.eps)


METHOD = GRPO.but(
    name="reinforce_pp",
    paper=Paper("REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage Normalization", "2501.03262", 2025),
    summary="return-to-go with a token KL penalty, normalized over the batch; one sample a prompt is enough",
    select=UniformPrompts(group_size=1),
    credit=BatchNormalizedReturn(),
    objective=ClippedSurrogate(clip_low=0.2, clip_high=0.2, aggregation="token_mean"),
    regularize=(),
)

BASELINE = METHOD.but(
    name="reinforce_pp.baseline",
    summary="group mean as baseline, normalized over the batch, KL (k2) in the loss",
    select=UniformPrompts(group_size=8),
    credit=BatchNormalizedReturn(baseline=True),
    regularize=(KLPenalty(beta=0.01, estimator="k2", aggregation="token_mean"),),
)
VARIANTS = {"baseline": BASELINE}
