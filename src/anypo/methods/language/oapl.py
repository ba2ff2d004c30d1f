"""OAPL: optimal-advantage regression with a lagged inference policy (arXiv:2602.19362).

Asynchronous training samples from a policy mu that lags behind. Instead of importance weights that make such data look on-policy, OAPL takes mu as
the reference of a KL-regularized problem: its optimum satisfies an identity between log-ratio and optimal advantage for any sampling distribution,
so the log-ratio to mu is regressed onto the advantage estimated in the group. No importance weights, no clip; mu is replaced by the trained policy
every few hundred optimizer steps. Against GRPO it changes rollout, credit and objective. Equations 1-2 from the paper; the estimate of V* with a
temperature of its own follows A*-PO and public code, and the default temperatures are [reconstructed].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.seams.groups import broadcast
from anypo.seams.regression import AdvantageRegression, mean_of_groups, regression_error, sequence_log_ratio, soft_value
from anypo.seams.reward import row_reward
from anypo.seams.rollout import LaggedRollout

if TYPE_CHECKING:
    from anypo.run import Run


class LossValue(NamedTuple):
    loss: Tensor  # scalar, differentiable in logp


def v_star(reward: Float[Tensor, " N"], group: Int[Tensor, " N"], beta1: float = 0.1) -> Float[Tensor, " N"]:
    """Equation 3: the estimated optimal value of each row's group, beta1 log mean exp(R / beta1)."""
    return soft_value(reward, group, beta1)


def loss(
    logp: Float[Tensor, "N T"], old_logp: Float[Tensor, "N T"], mask: Tensor, reward: Float[Tensor, " N"], group: Int[Tensor, " N"],
    beta1: float = 0.1, beta2: float = 0.1,
) -> LossValue:  # fmt: skip
    """Equation 4: mean over groups of each group's mean of (beta2 S - (R - V*))^2; S is the sum over tokens, `old_logp` that of the generator."""
    advantage = reward - v_star(reward, group, beta1)
    return LossValue(mean_of_groups(regression_error(sequence_log_ratio(logp, old_logp, mask), advantage, beta2), group))


def optimal_policy(mu: Float[Tensor, "P K"], reward: Float[Tensor, "P K"], beta: float = 0.1) -> Float[Tensor, "P K"]:
    """Equation 1: mu exp(R / beta) / Z, row by row."""
    return (mu.log() + reward / beta).softmax(-1)


@dataclass
class GroupOptimalAdvantage:
    """Reward minus the optimal value estimated from the prompt's own responses."""

    beta1: float = 0.1  # temperature of the estimate, in units of reward, >= 0; 0 = maximum, inf = mean
    weights: tuple[float, ...] | None = None  # of the K rewards; None = all 1

    compares_group = True

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        reward = row_reward(batch, self.weights)
        return broadcast(reward - v_star(reward, batch.group, self.beta1), batch.mask)


METHOD = GRPO.but(
    name="oapl",
    paper=Paper("LLMs Can Learn to Reason Via Off-Policy RL", "2602.19362", 2026),
    summary="the lagged generator is the reference: its log-ratio is regressed onto the optimal advantage, without importance weights",
    rollout=LaggedRollout(),
    credit=GroupOptimalAdvantage(),
    objective=AdvantageRegression(beta=0.1, anchor="old"),
    regularize=(),
)
