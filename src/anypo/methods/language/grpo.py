"""GRPO: group relative policy optimization (arXiv:2402.03300).

The baseline of the language domain. For each prompt the policy writes several responses; a response's advantage is its reward relative to the
other members of its group, so no critic is needed. The update is PPO's clipped surrogate on token ratios plus an optional KL to a reference.
Equations: standard published formulas. Dr. GRPO and DAPO, methods of their own, change two or three of its steps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.method import Method, Paper
from anypo.seams.credit import GroupRelative, group_relative
from anypo.seams.groups import broadcast, has_spread
from anypo.seams.objective import ClippedSurrogate, aggregate, clipped, kl_estimate, token_ratio
from anypo.seams.regularize import KLPenalty
from anypo.seams.reward import TaskReward
from anypo.seams.rollout import OnPolicy
from anypo.seams.select import UniformPrompts
from anypo.seams.update import GradientSteps


class LossValue(NamedTuple):
    loss: Tensor  # scalar, differentiable in logp


def advantages(
    reward: Float[Tensor, " N"], group: Int[Tensor, " N"], std: bool = True, ddof: int = 0, eps: float = 1e-6
) -> Float[Tensor, " N"]:
    """Equation 2: reward minus the group's mean, over its standard deviation when `std`."""
    return group_relative(reward, group, std, ddof, eps)


def loss(
    logp: Float[Tensor, "N T"], old_logp: Float[Tensor, "N T"], ref_logp: Float[Tensor, "N T"], mask: Tensor, advantages: Float[Tensor, " N"],
    clip_low: float = 0.2, clip_high: float = 0.2, beta: float = 0.04, dual_clip: float | None = None, max_len: int | None = None,
    agg: str = "seq_mean",
) -> LossValue:  # fmt: skip
    """Equations 3-6: the clipped surrogate with the k3 estimate of the KL to the reference, aggregated by `agg`."""
    ratio = token_ratio(logp, old_logp, mask)
    value = clipped(ratio, broadcast(advantages, mask), 1 - clip_low, 1 + clip_high, dual_clip)
    return LossValue(aggregate(beta * kl_estimate(logp, ref_logp, mask) - value, mask, agg, max_len))


def overlong(length: Tensor, max_len: int, buffer: int) -> Tensor:
    """Equation 8: penalty in [-1,0] that grows over the last `buffer` tokens before the hard limit `max_len`. [N] lengths -> [N]."""
    length = length.double()
    soft = ((max_len - buffer) - length) / buffer
    return torch.where(length > max_len, torch.full_like(length, -1.0), soft.clamp(max=0.0))


def keep(reward: Float[Tensor, " N"], group: Int[Tensor, " N"]) -> Tensor:
    """Equation 9 (dynamic sampling): 1 for rows whose group is neither all right nor all wrong. [N] of 0/1."""
    return has_spread(reward, group).long()


METHOD = Method(
    name="grpo",
    paper=Paper("DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models", "2402.03300", 2024),
    domain="language",
    summary="rewards relative to the prompt's other responses replace the critic; clipped token ratios, KL to a reference",
    select=UniformPrompts(group_size=8),
    rollout=OnPolicy(),
    reward=TaskReward(),
    credit=GroupRelative(std=True, ddof=0, eps=1e-6),
    objective=ClippedSurrogate(clip_low=0.2, clip_high=0.2, aggregation="seq_mean"),
    regularize=(KLPenalty(beta=0.04),),
    update=GradientSteps(),
)
