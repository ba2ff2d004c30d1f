"""NEWTON: planner over physics tools trained with Flow-GRPO (arXiv:2605.18396).

A text leaves out what fixes a scene's dynamics, so a video generator has to invent it. NEWTON makes the frozen generator one tool of an agent: a
learned planner calls tools that say what the text does not, drafts, and goes on from the verifier's scores. Only the planner is trained, inside the live
loop of several turns, by Flow-GRPO: the group-relative outcome goes to every turn alike, and the loss is a mean over turns of means over a turn's
tokens, so that a turn of many tokens counts as much as one of few. Against GRPO it changes the aggregation (equation 4, after AgentFlow); the KL
term is part of the same mean. Left out: the real generators and verifier, for the scenes of `physics_scenes`, where a video is a path.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.policy import Loss, Signals
from anypo.run import Run
from anypo.seams.credit import GroupRelative, group_relative
from anypo.seams.groups import broadcast, masked_mean
from anypo.seams.objective import clipped, kl_estimate, ratio_metrics, token_ratio
from anypo.seams.select import UniformPrompts

PerToken = Float[Tensor, "N T"]


def advantages(reward: Float[Tensor, " N"], group: Int[Tensor, " N"], segment: Tensor, mask: Tensor, eps: float = 1e-6) -> PerToken:
    """Equations 1-2: the outcome relative to the group, the same in every turn (`segment` [N,T] plays no part); 0 outside the mask."""
    return broadcast(group_relative(reward, group, eps=eps), mask)


def turn_mean(values: PerToken, segment: Int[Tensor, "N T"], mask: Tensor) -> Tensor:
    """Equation 4: mean over rows of the mean over a row's turns of the mean over a turn's tokens. A row without tokens counts as 0."""
    inside = mask.bool()
    turn = torch.where(inside, segment, int(segment.max()) + 1).long()
    tokens = values.new_zeros(len(values), int(turn.max()) + 1).scatter_add(1, turn, inside.to(values))
    each = torch.where(inside, values, 0.0) / tokens.gather(1, turn).clamp(min=1)
    return (each.sum(1) / (tokens > 0).sum(1).clamp(min=1)).mean()


def loss(
    logp: PerToken, old_logp: PerToken, ref_logp: PerToken | None, advantages: PerToken, segment: Int[Tensor, "N T"], mask: Tensor,
    clip: float = 0.2, beta: float = 0.01,
) -> Tensor:  # fmt: skip
    """Equations 3-4: clipped surrogate and k3 estimate of the KL to the reference, differentiable in `logp`. `ref_logp` may be None if `beta` is 0."""
    value = -clipped(token_ratio(logp, old_logp, mask), advantages, 1 - clip, 1 + clip)
    if beta:
        assert ref_logp is not None
        value = value + beta * kl_estimate(logp, ref_logp, mask)
    return turn_mean(value, segment, mask)


@dataclass
class FlowSurrogate:
    """Clipped token ratios and the KL to the reference, averaged by turn; a batch without turns is one turn a row."""

    clip: float = 0.2  # the ratio stays in [1 - clip, 1 + clip], in [0,1]
    beta: float = 0.01  # >= 0, weight of the KL; 0 keeps no reference

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"logp", "ref_logp"}) if self.beta else frozenset({"logp"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        mask, reference = batch.counted, batch.signal("ref_logp") if self.beta else None
        segment = batch.segment if batch.segment is not None else torch.zeros_like(mask, dtype=torch.int64)
        value = loss(new.logp, batch.logp, reference, batch.advantage, segment, mask, self.clip, self.beta)
        metrics = ratio_metrics(token_ratio(new.logp, batch.logp, mask), 1 - self.clip, 1 + self.clip, mask)
        if reference is not None:
            metrics["kl"] = float(masked_mean(kl_estimate(new.logp.detach(), reference, mask), mask))
        return Loss(value, metrics)


METHOD = GRPO.but(
    name="newton",
    paper=Paper("NEWTON: planner over physics tools trained with Flow-GRPO", "2605.18396", 2026),
    kind="system",
    task="physics_scenes",
    summary="a planner of tools around a frozen generator; the outcome goes to every turn, the loss is a mean over turns",
    select=UniformPrompts(group_size=8),
    credit=GroupRelative(std=True, ddof=0, eps=1e-6),
    objective=FlowSurrogate(),
    regularize=(),
)
