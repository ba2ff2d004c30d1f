"""StepPO: step-aligned policy optimization (arXiv:2604.18401).

Token-level PPO takes an agent's single tokens for its actions, so discounts and traces depend on how many tokens a reply happens to have. Here
the action is the step, the whole reply between two observations: one value a step, read before its first token; one reward a step; GAE with gamma
and lambda counted in steps; whitening over steps; and one ratio a step, the geometric mean of its token ratios. Against PPO it changes the credit,
the objective and where the critic is trained. Steps are the batch's `segment`; without segments a row is one step. Equations 2 and 3 from the
paper, the others from the authors' code. Left out: clipping the critic by default (`regularize.0.clip` does it).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.control.ppo import METHOD as PPO
from anypo.policy import Loss, Signals
from anypo.seams.objective import clipped, log_ratio, ratio_metrics
from anypo.seams.regularize import ValueLoss
from anypo.seams.select import UniformPrompts
from anypo.seams.steps import PerStep, StepGAE, steps_of, sum_by_step
from anypo.seams.steps import returns_and_advantages as returns_and_advantages
from anypo.seams.update import GradientSteps

if TYPE_CHECKING:
    from anypo.run import Run


class StepLoss(NamedTuple):
    log_ratio: Tensor  # [S] mean token log-ratio of each step
    loss: Tensor  # scalar, differentiable in logp


def loss(
    logp: Float[Tensor, "S T"],
    old_logp: Float[Tensor, "S T"],
    mask: Tensor,
    advantage: PerStep,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> StepLoss:
    """Equation 7, one row a step: a mean over all rows, those without tokens included, of each row's token mean."""
    index = torch.where(mask.bool(), torch.arange(len(mask))[:, None], -1)
    return step_surrogate(logp, old_logp, index, advantage[:, None].expand_as(logp), len(mask), clip_low, clip_high)


def step_surrogate(
    logp: Float[Tensor, "N T"], old_logp: Float[Tensor, "N T"], index: Int[Tensor, "N T"], advantage: Float[Tensor, "N T"], steps: int,
    clip_low: float, clip_high: float,
) -> StepLoss:  # fmt: skip
    """Equation 7 where every token names its step (-1 = not trained): the token form, so that any credit's [N,T] advantages fit."""
    inside = index >= 0
    size = sum_by_step(inside.to(logp.dtype), index, steps).clamp(min=1)
    mean = sum_by_step(log_ratio(logp, old_logp, inside), index, steps) / size
    where = index.clamp(min=0)
    ratio = mean.detach().exp()[where] * log_ratio(logp, logp.detach(), inside).exp()
    value = clipped(ratio, torch.where(inside, advantage, torch.zeros_like(advantage)), 1 - clip_low, 1 + clip_high)
    return StepLoss(mean, -(sum_by_step(value, index, steps) / size).sum() / max(steps, 1))


@dataclass
class StepClip:
    """Clipped surrogate of the step's geometric mean ratio; every step counts alike, whatever its number of tokens."""

    clip_low: float = 0.2  # the ratio may fall to 1 - clip_low, in [0,1]; 3e-4 is usual for large models
    clip_high: float = 0.2  # and rise to 1 + clip_high, >= 0; 4e-3 there

    needs = frozenset({"logp"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        steps = steps_of(batch, batch.counted)
        found = step_surrogate(new.logp, batch.logp, steps.number, batch.advantage, len(steps.traj), self.clip_low, self.clip_high)
        ratio = found.log_ratio.detach().exp()
        return Loss(found.loss, ratio_metrics(ratio, 1 - self.clip_low, 1 + self.clip_high, torch.ones_like(ratio, dtype=torch.bool)))


@dataclass
class StepValueLoss(ValueLoss):
    """Critic regression at the first token of each step alone (equation 6)."""

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        return super().__call__(batch.but(keep=steps_of(batch, batch.counted).start), new, run)


METHOD = PPO.but(
    name="steppo",
    paper=Paper("StepPO: Step-Aligned Policy Optimization for Agentic Reinforcement Learning", "2604.18401", 2026),
    domain="language",
    summary="the whole reply between two observations is the action: values, GAE, whitening and ratios by step",
    select=UniformPrompts(group_size=8),
    credit=StepGAE(),
    objective=StepClip(),
    regularize=(StepValueLoss(coefficient=0.5),),
    update=GradientSteps(epochs=2, minibatches=2),
)
