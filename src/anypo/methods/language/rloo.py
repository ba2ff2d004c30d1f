"""RLOO: REINFORCE leave-one-out (arXiv:2402.14740).

The whole response is one action; the baseline is the mean reward of the prompt's other responses, which keeps the gradient unbiased. No standard
deviation, no clip. The KL to the reference is part of the reward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.seams.groups import broadcast, leave_one_out_mean, masked_mean
from anypo.seams.objective import SequenceReinforce, log_ratio, sequence_reinforce
from anypo.seams.reward import row_reward

if TYPE_CHECKING:
    from anypo.run import Run


def rloo(reward: Float[Tensor, " N"], group: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
    """Equation 1: reward minus the mean of the other members; 0 for a lone member."""
    return reward - leave_one_out_mean(reward, group)


rloo_loss = sequence_reinforce  # equation 2


@dataclass
class LeaveOneOut:
    """Reward, less beta times the sequence KL to the reference, relative to the mean of the prompt's other responses."""

    beta: float = 0.05  # KL in the reward, >= 0; 0 keeps no reference
    weights: tuple[float, ...] | None = None  # of the K rewards; None = all 1

    compares_group = True

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"ref_logp"}) if self.beta else frozenset()

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        reward = row_reward(batch, self.weights)
        if self.beta:
            kl = log_ratio(batch.logp, batch.signal("ref_logp"), batch.mask).sum(1)
            reward = reward - self.beta * kl.to(reward)
            run.log(kl=float(masked_mean(kl, batch.mask.any(1))))
        return broadcast(rloo(reward, batch.group), batch.mask)


METHOD = GRPO.but(
    name="rloo",
    paper=Paper("Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in LLMs", "2402.14740", 2024),
    summary="the mean of the prompt's other responses as an unbiased baseline; no clip, KL in the reward",
    credit=LeaveOneOut(),
    objective=SequenceReinforce(),
    regularize=(),
)
