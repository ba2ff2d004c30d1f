"""FPO: flow policy optimization (arXiv:2507.21053).

PPO needs the probability of an action, which a policy that follows a flow does not have. FPO takes in place of the likelihood ratio
exp(old minus new flow-matching loss of the action), both at the same few (level, noise) pairs: a lower matching loss is a higher evidence bound. The
clip, the critic and GAE stay PPO's, and how actions are sampled (steps, integrator) is nowhere in the objective. Against PPO it changes what the
rollout keeps and the objective. Equations from the paper; `FlowPlusPlus` is a later variant known from code alone, with a ratio per pair, clamps,
and a quadratic pull where the advantage is negative. Left out: an entropy bonus (the density is unknown).

Level s is 1 at pure noise; the paper's t is 1 - s and its velocity has the other sign.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.diffusion.denoise import predicted_noise
from anypo.method import Paper
from anypo.methods.control.ppo import METHOD as PPO
from anypo.methods.control.spo_simple import objective as quadratic_surrogate
from anypo.policy import Loss, Signals
from anypo.seams.credit import GAE
from anypo.seams.groups import masked_mean
from anypo.seams.objective import LOG_RATIO_LIMIT, clipped, ratio_metrics
from anypo.seams.update import GradientSteps
from anypo.task import Prompt

if TYPE_CHECKING:
    from anypo.run import Run

PerDraw = Float[Tensor, "... M"]  # M (level, noise) pairs of each action
PerAction = Float[Tensor, "..."]


def cfm_loss(
    action: Float[Tensor, "... D"], eps: Float[Tensor, "... M D"], s: PerDraw, vel: Float[Tensor, "... M D"], target: str = "v", reduce: str = "mean"
) -> PerDraw:  # fmt: skip
    """Equation 1: squared error of the velocity at x = (1-s) action + s eps, reduced over D by mean, sum or sqrt (sum / sqrt(D)).

    `target`: "v" against the velocity eps - action, "eps" the noise it implies against eps, which is (1-s)^2 times the other. Raises ValueError for
    other names.
    """
    action = action.unsqueeze(-2)
    if target == "v":
        error = vel - (eps - action)
    elif target == "eps":
        level = s[..., None]
        error = predicted_noise((1 - level) * action + level * eps, vel, level) - eps
    else:
        raise ValueError(f"unknown flow-matching target '{target}'; use v or eps")
    divisor = {"mean": error.shape[-1], "sum": 1.0, "sqrt": error.shape[-1] ** 0.5}.get(reduce)
    if divisor is None:
        raise ValueError(f"unknown reduction '{reduce}' of the flow-matching loss; use mean, sum or sqrt")
    return (error**2).sum(-1) / divisor


def ratio(old_loss: PerDraw, new_loss: PerDraw) -> PerAction:
    """Equation 2: exp of the mean over the pairs of old minus new loss (the exponent is kept within +-20)."""
    return (old_loss - new_loss).mean(-1).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def loss(old_loss: PerDraw, new_loss: PerDraw, adv: PerAction, eps: float = 0.05, mask: Tensor | None = None) -> Tensor:
    """Equation 3: minus the mean clipped surrogate over the actions (those in `mask`)."""
    inside = torch.ones_like(adv, dtype=torch.bool) if mask is None else mask
    return -masked_mean(clipped(ratio(old_loss, new_loss), adv, 1 - eps, 1 + eps), inside)


def fpopp_loss(
    old_loss: PerDraw, new_loss: PerDraw, adv: PerAction, eps: float = 0.05, c_loss: float = 4.0, c_neg: float = 4.0, c_diff: float = 1.0,
    mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Equation 4 [code]: a ratio of each pair, of losses cut at `c_loss` (the new one at `c_neg` too where the advantage is negative), whose exponent is
    held at `c_diff` with the gradient of one that is not; clipped where the advantage is positive, pulled back quadratically where it is negative.
    """
    adv = adv.unsqueeze(-1).expand_as(new_loss)
    inside = torch.ones_like(adv, dtype=torch.bool) if mask is None else mask.unsqueeze(-1).expand_as(adv)
    new = new_loss.clamp(max=c_loss)
    new = torch.where(adv < 0, new.clamp(max=c_neg), new)
    difference = old_loss.clamp(max=c_loss) - new
    held = difference - (difference - difference.clamp(max=c_diff)).detach()
    per_pair = held.exp()
    value = torch.where(adv < 0, quadratic_surrogate(per_pair, adv, eps), clipped(per_pair, adv, 1 - eps, 1 + eps))
    return -masked_mean(value, inside)


@dataclass
class FlowRollout:
    """Attempts collected by the task, and for every action the (level, noise) pairs at which its flow-matching loss is compared."""

    draws: int = 8  # M, pairs an action, >= 1

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        if self.draws < 1:
            raise ValueError(f"rollout.draws must be at least 1, not {self.draws}")
        batch = run.collect(prompts)
        shape = (*batch.mask.shape, self.draws)
        batch.signals["flow_level"] = torch.rand(shape, generator=run.generator)
        batch.signals["flow_noise"] = torch.randn(*shape, batch.action.shape[-1], generator=run.generator)
        return batch


@dataclass
class FlowSurrogate:
    """The clipped surrogate on the ratio of flow-matching losses (equation 3)."""

    eps: float = 0.05  # the ratio's band is 1 - eps to 1 + eps, > 0
    target: str = "v"  # v or eps: what the field's error is measured in
    reduce: str = "mean"  # mean, sum or sqrt over an action's D numbers

    needs = frozenset({"flow_velocity", "old_flow_velocity"})

    def losses(self, batch: Batch, new: Signals) -> tuple[Tensor, Tensor]:
        """Flow-matching losses [N,T,M] of the policy that acted and of the current one, at the same pairs."""
        pairs = (batch.action, batch.signal("flow_noise"), batch.signal("flow_level"))
        fields = (batch.signal("old_flow_velocity"), new.flow_velocity)
        old, now = (cfm_loss(*pairs, field, self.target, self.reduce) for field in fields)
        return old.detach(), now

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        old, now = self.losses(batch, new)
        mask = batch.counted
        metrics = ratio_metrics(ratio(old, now), 1 - self.eps, 1 + self.eps, mask)
        metrics["flow_loss"] = float(masked_mean(now.detach().mean(-1), mask))
        return Loss(loss(old, now, batch.advantage, self.eps, mask), metrics)


@dataclass
class FlowPlusPlus(FlowSurrogate):
    """FPO++: the surrogate of each pair, with its clamps (equation 4)."""

    c_loss: float = 4.0  # losses are cut here, > 0
    c_neg: float = 4.0  # and the new loss of actions with a negative advantage here, > 0
    c_diff: float = 1.0  # largest exponent of a ratio, > 0

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        old, now = self.losses(batch, new)
        mask = batch.counted
        value = fpopp_loss(old, now, batch.advantage, self.eps, self.c_loss, self.c_neg, self.c_diff, mask)
        return Loss(value, ratio_metrics(ratio(old, now), 1 - self.eps, 1 + self.eps, mask))


METHOD = PPO.but(
    name="fpo",
    paper=Paper("Flow Matching Policy Gradients", "2507.21053", 2025),
    domain="diffusion",
    summary="PPO for policies without a likelihood: the ratio is exp(old minus new flow-matching loss) at the same few (level, noise) pairs",
    rollout=FlowRollout(),
    credit=GAE(gamma=0.995, lam=0.95),
    objective=FlowSurrogate(),
    update=GradientSteps(epochs=10, minibatches=16, learning_rate=3e-4, optimizer="adam", max_grad_norm=0.5),
    task="Pendulum-v1",
)
