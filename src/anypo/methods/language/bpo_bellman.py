"""BPO: Bellman policy optimization (arXiv:2609.15987).

Policy mirror descent improves the policy at every prefix against the advantage of the policy that acted, which takes a critic. Tokens lead to their
next prefix with certainty and the reward comes at the end, so along a response those conditions add up to one equation that holds nothing but the
reward and the prompt's value; BPO minimizes its squared residual. In practice that is a log-likelihood weighted by the group-centred reward and by a
smoothed ratio of complementary probabilities, (1 - mu) / (1 - pi), in place of the importance ratio. Against GRPO it changes credit and objective.
Equations 1 and 3-6 from the row's specification, a note on the paper; 2 derived there; 7-9 from public code. The number of passes over a batch is
[reconstructed]. `bpo_bounded` is another method of that short name. Left out: a term for the KL or the entropy, which the loss does not have.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.policy import Loss, Signals
from anypo.seams.credit import GroupRelative, group_relative
from anypo.seams.groups import broadcast, masked_mean
from anypo.seams.objective import outside
from anypo.seams.update import GradientSteps

if TYPE_CHECKING:
    from anypo.run import Run

NORMS = ("none", "std")


class Improved(NamedTuple):
    policy: Tensor  # [nodes,A] the mirror-descent optimum at every inner node
    value: Tensor  # [nodes] plain value of the policy that acted


class Surrogate(NamedTuple):
    loss: Tensor  # scalar, differentiable in logp
    keep: Tensor  # [N,T] 0 outside the mask
    weight: Tensor  # [N,T] before the cap, 1 outside the mask


class LossValue(NamedTuple):
    loss: Tensor
    advantage: Tensor  # [N]
    keep: Tensor  # [N,T]


def pmd_policy(prob: Float[Tensor, "nodes A"], leaf_reward: Float[Tensor, " L"], eta: float, depth: int) -> Improved:
    """Equation 1 on a full A-ary tree whose inner nodes are numbered breadth-first (child a of node n is n A + 1 + a): mu exp(A / eta) / Z."""
    value = leaf_reward
    for level in reversed(_levels(prob.shape[1], depth)):  # `value` holds the nodes below this level, the next one first
        mine = prob[level]
        value = torch.cat([(mine * value[: mine.numel()].view_as(mine)).sum(1), value])
    action_value = value[1 : 1 + prob.numel()].view_as(prob)
    return Improved((prob.log() + action_value / eta).softmax(-1), value[: len(prob)])


def residual(
    prob: Float[Tensor, "nodes A"], policy: Float[Tensor, "nodes A"], leaf_reward: Float[Tensor, " L"], eta: float, depth: int
) -> Float[Tensor, " L"]:
    """Equation 4 at every leaf: R - V(x) - eta times the sum along the path of log pi/mu and KL(mu || pi). Differentiable in `policy`; needs no value
    but the root's."""
    gain = policy.log() - prob.log()
    step = gain - (prob * gain).sum(1, keepdim=True)  # minus E_mu[log pi/mu] is the KL
    reach, total = prob.new_ones(1), prob.new_zeros(1)
    for level in _levels(prob.shape[1], depth):
        reach, total = (reach[:, None] * prob[level]).flatten(), (total[:, None] + step[level]).flatten()
    return leaf_reward - reach @ leaf_reward - eta * total


def _levels(actions: int, depth: int) -> list[slice]:
    """Where the inner nodes of every level are, from the root down."""
    starts = [sum(actions**k for k in range(level)) for level in range(depth + 1)]
    return [slice(start, end) for start, end in pairwise(starts)]


def weights(logp: Float[Tensor, "N T"], old_logp: Float[Tensor, "N T"], eps: float = 0.1) -> Float[Tensor, "N T"]:
    """Equation 7: (1 + eps - mu) / (1 + eps - pi), in (0, (1 + eps) / eps], without gradient. Exact near probability 1. Raises ValueError unless
    `eps` > 0."""
    if not eps > 0:
        raise ValueError(f"eps smooths the ratio of complementary probabilities and must be above 0, not {eps}")
    return ((eps - torch.expm1(old_logp)) / (eps - torch.expm1(logp))).detach()


def surrogate(
    logp: Float[Tensor, "N T"], weight: Float[Tensor, "N T"], mask: Tensor, advantage: Float[Tensor, "N T"], cap: float = 3.0,
    clip_low: float = 0.2, clip_high: float = 0.28,
) -> Surrogate:  # fmt: skip
    """Equations 8-9: minus the mean over all rows of each row's mean of advantage times capped weight times log-prob. Tokens whose uncapped weight
    has left [1 - clip_low, 1 + clip_high] on the side the advantage pushes to are dropped but counted, as are rows without actions."""
    inside = mask.bool()
    weight = torch.where(inside, weight, torch.ones_like(weight)).detach()
    keep = inside & ~outside(weight, advantage, 1 - clip_low, 1 + clip_high)
    value = advantage.detach() * weight.clamp(max=cap) * torch.where(inside, logp, torch.zeros_like(logp))
    row = torch.where(keep, value, torch.zeros_like(value)).sum(1) / inside.sum(1).clamp(min=1)
    return Surrogate(-row.sum() / max(len(row), 1), keep, weight)


def loss(
    logp: Float[Tensor, "N T"], old_logp: Float[Tensor, "N T"], mask: Tensor, reward: Float[Tensor, " N"], group: Int[Tensor, " N"],
    eps: float = 0.1, cap: float = 3.0, clip_low: float = 0.2, clip_high: float = 0.28, norm: str = "none",
) -> LossValue:  # fmt: skip
    """Equations 5-9. `norm` "std" divides the centred reward by the group's sample standard deviation + 1e-6. Raises ValueError for another."""
    if norm not in NORMS:
        raise ValueError(f"the norm is none or std, not '{norm}'")
    advantage = group_relative(reward, group, std=norm == "std", ddof=1, eps=1e-6)
    found = surrogate(logp, weights(logp, old_logp, eps), mask, broadcast(advantage, mask), cap, clip_low, clip_high)
    return LossValue(found.loss, advantage, found.keep)


@dataclass
class BellmanLikelihood:
    """Log-likelihood weighted by advantage and smoothed ratio of complementary probabilities; tokens pushed too far are dropped."""

    eps: float = 0.1  # > 0, smooths the ratio; the larger, the less correction
    cap: float = 3.0  # > 0, largest weight that counts
    clip_low: float = 0.2  # a negative advantage stops where the weight is below 1 - clip_low, >= 0
    clip_high: float = 0.28  # a positive one where it is above 1 + clip_high, >= 0

    needs = frozenset({"logp"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        mask = batch.counted
        weight = weights(new.logp, batch.logp, self.eps)
        found = surrogate(new.logp, weight, mask, batch.advantage, self.cap, self.clip_low, self.clip_high)
        dropped = masked_mean((~found.keep).to(weight.dtype), mask)
        return Loss(found.loss, {"clip_fraction": float(dropped), "weight": float(masked_mean(found.weight, mask))})


METHOD = GRPO.but(
    name="bpo_bellman",
    paper=Paper("BPO: Bellman policy optimization", "2609.15987", 2026),
    summary="log-likelihood weighted by the centred reward and a smoothed ratio of complementary probabilities, from one equation a response",
    credit=GroupRelative(std=False, ddof=1),
    objective=BellmanLikelihood(),
    regularize=(),
    update=GradientSteps(epochs=4),
)
