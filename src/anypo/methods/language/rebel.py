"""REBEL: regression to relative rewards (arXiv:2404.16767).

Policy improvement as least squares: for two responses to one prompt, the difference of their log-ratios (new over old) divided by eta must predict
the difference of their rewards. No critic, no clip; an exact fit is the mirror-descent step pi_old exp(eta r) / Z, and one Gauss-Newton step on the
loss is the natural policy gradient. An intransitive pairwise preference may take the place of the reward difference. Against GRPO it changes the
objective and the credit (rewards centred in the group, not divided by their spread). Groups of more than two [reconstructed: the paper uses pairs]
take all their pairs. Left out: the image experiments, which need another domain's policy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.policy import Loss, Signals
from anypo.seams.credit import GroupRelative
from anypo.seams.groups import broadcast, group_mean, group_size
from anypo.seams.regression import row_advantage, sequence_log_ratio
from anypo.seams.select import UniformPrompts
from anypo.seams.update import GradientSteps

if TYPE_CHECKING:
    from anypo.run import Run


class LossValue(NamedTuple):
    loss: Tensor  # scalar, differentiable in logp


def residual(log_ratio: Tensor, other_log_ratio: Tensor, target: Tensor, eta: float) -> Tensor:
    """Equation 1 for pairs of any shape: (S(y) - S(y')) / eta minus the target, a difference of rewards or a preference."""
    return (log_ratio - other_log_ratio) / eta - target


def group_pairs(group: Int[Tensor, " N"]) -> tuple[Int[Tensor, " M"], Int[Tensor, " M"]]:
    """All pairs i < j of rows of one group, as two index tensors; groups in the order of their first row, pairs by i, then j."""
    same = (group[:, None] == group[None]).triu(1)
    first, second = same.nonzero(as_tuple=True)
    leader = (group[:, None] == group[None]).int().argmax(1)  # first row of each row's group
    order = leader[first].argsort(stable=True)
    return first[order], second[order]


def pair_loss(
    logp: Float[Tensor, "N T"],
    old_logp: Float[Tensor, "N T"],
    mask: Tensor,
    reward: Float[Tensor, " N"],
    group: Int[Tensor, " N"],
    eta: float = 1.0,
) -> LossValue:
    """Equations 2 and 4: mean over groups of the mean over their pairs of the squared residual; lone members count in no mean.

    Computed as twice the sample variance of S / eta - r in each group, which is the same number without enumerating pairs.
    """
    value = sequence_log_ratio(logp, old_logp, mask) / eta - reward.detach()
    size = group_size(group)
    several = (size > 1).to(value.dtype)
    variance = several / (size - 1).clamp(min=1) * (value - group_mean(value, group)) ** 2
    return LossValue(2 * variance.sum() / (several / size).sum().clamp(min=1))


def preference_loss(
    logp: Float[Tensor, "N T"], old_logp: Float[Tensor, "N T"], mask: Tensor, reward: Float[Tensor, " N"], group: Int[Tensor, " N"],
    target: Float[Tensor, " M"], eta: float = 1.0,
) -> LossValue:  # fmt: skip
    """Equation 5: as `pair_loss`, with a target in [-1,1] for each of the pairs of `group_pairs` in place of the difference of the rewards."""
    total = sequence_log_ratio(logp, old_logp, mask)
    first, second = group_pairs(group)
    weight = 1 / group_size(group[first]).to(total.dtype)  # one over the number of pairs of the group
    error = residual(total[first], total[second], target.detach(), eta) ** 2
    return LossValue((weight * error).sum() / weight.sum().clamp(min=1))


def preference_margin(target: Float[Tensor, " M"], group: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
    """The mean over a row's group, itself included at 0, of the preference for the row, from one target a pair [M] -> [N].

    As a reward it gives `preference_loss` its gradient exactly: the cycles of an intransitive preference have no gradient in any log-ratio.
    """
    first, second = group_pairs(group)
    won = target.new_zeros(len(group)).index_add(0, first, target).index_add(0, second, -target)
    return won / group_size(group)


def mirror_step(old_prob: Float[Tensor, "P K"], reward: Float[Tensor, "P K"], eta: float = 1.0) -> Float[Tensor, "P K"]:
    """Equation 3: old_prob exp(eta reward) / Z, the exact minimizer of the population loss."""
    return (old_prob.log() + eta * reward).softmax(-1)


@dataclass
class RelativeRewardRegression:
    """Squared error between differences of log-ratios and differences of advantages in every group."""

    eta: float = 1.0  # step size of the mirror step that the regression fits, > 0, in units of 1 / reward

    needs = frozenset({"logp"})
    compares_group = True

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        mask = batch.counted
        value = pair_loss(new.logp, batch.logp, mask, row_advantage(batch.advantage, mask), batch.group, self.eta).loss
        drift = sequence_log_ratio(new.logp.detach(), batch.logp, mask).abs().mean()
        return Loss(value, {"sequence_log_ratio": float(drift)})


@dataclass
class PairwisePreference:
    """Credit from a comparator of two responses: how far a response is preferred to the other members of its group."""

    comparator: Callable[[Batch, Tensor, Tensor], Tensor]  # (batch, rows i [M], rows j [M]) -> P(i beats j) - P(j beats i) in [-1,1]

    compares_group = True

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        target = self.comparator(batch, *group_pairs(batch.group))
        return broadcast(preference_margin(target, batch.group), batch.mask)


METHOD = GRPO.but(
    name="rebel",
    paper=Paper("REBEL: Reinforcement Learning via Regressing Relative Rewards", "2404.16767", 2024),
    summary="least squares: differences of log-ratios between a prompt's responses predict differences of their rewards; no clip, no critic",
    select=UniformPrompts(group_size=2),
    credit=GroupRelative(std=False),
    objective=RelativeRewardRegression(),
    regularize=(),
    update=GradientSteps(epochs=4),
)
