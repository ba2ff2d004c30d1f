"""LAC: latent action control with Latent-Flow GRPO (May 2026, no arXiv id known).

A model may know the relation that a prompt asks for and still not draw it. Here reasoning is an action: between the prompt and the flow sampler a
short sequence of continuous latents with fixed roles (plan, draft, diagnose, refine) is drawn and added to the hidden state that conditions the
flow. A variational stage first aligns the latents with targets of training alone (`anypo.domains.diffusion.alignment`; the model that
ships has been through it), then Latent-Flow GRPO, this method, trains latents and flow steps as one trajectory with the reward of the final image.
Against Flow-GRPO, whose actions are the flow steps, it changes the objective (two surrogates, each with its own trust region) and the KL penalty.
The text of the paper was not readable: all equations are [reconstructed], the simplest form in which every named mechanism exists.
Left out: the KL of the halting decisions.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.diffusion.latent_flow import gaussian_kl, inject, latent_logp
from anypo.method import Paper
from anypo.methods.diffusion.flow_grpo import METHOD as FLOW_GRPO
from anypo.policy import Loss, Signals
from anypo.seams import regularize
from anypo.seams.groups import broadcast, masked_mean, standardize
from anypo.seams.objective import clipped, ratio_metrics, token_ratio
from anypo.seams.select import UniformPrompts
from anypo.seams.update import GradientSteps

if TYPE_CHECKING:
    from anypo.run import Run

__all__ = ["METHOD", "gaussian_kl", "inject", "latent_logp", "loss", "surrogate"]


def surrogate(logp: Float[Tensor, "N T"], old: Float[Tensor, "N T"], mask: Tensor, adv: Float[Tensor, "N T"], eps: float) -> Tensor:
    """Minus the clipped surrogate, averaged over the actions of one kind: a scalar, 0 without any."""
    return -masked_mean(clipped(token_ratio(logp, old, mask), adv, 1 - eps, 1 + eps), mask)


def loss(
    lat_logp: Float[Tensor, "N J"], lat_old: Float[Tensor, "N J"], lat_mask: Tensor, flow_logp: Float[Tensor, "N T"],
    flow_old: Float[Tensor, "N T"], reward: Float[Tensor, " N"], group: Int[Tensor, " N"], eps_lat: float = 0.2, eps_flow: float = 1e-3,
    w_lat: float = 1.0, w_flow: float = 1.0, adv_eps: float = 1e-4,
) -> Tensor:  # fmt: skip
    """Equation 5 without its KL terms: the group advantage of the image's reward on all actions of its row, latents and flow steps apart."""
    advantage, inside, steps = (
        standardize(reward, group, ddof=0, eps=adv_eps),
        lat_mask.bool(),
        torch.ones_like(flow_logp, dtype=torch.bool),
    )
    thought = surrogate(lat_logp, lat_old, inside, broadcast(advantage, inside), eps_lat)
    return w_lat * thought + w_flow * surrogate(flow_logp, flow_old, steps, broadcast(advantage, steps), eps_flow)


def _latents(batch: Batch, run: Run) -> Tensor:
    """[N,T] bool: which actions are latents. Raises ValueError when the policy has none."""
    if "latent" not in batch.signals:
        raise ValueError(f"{run.method.name} trains latent actions, and the policy of '{run.task.name}' has none; take --task scenes")
    return batch.signal("latent")


@dataclass
class LatentFlowClip:
    """A clipped surrogate of the latents (log-probabilities summed over their numbers) and one of the flow steps (averaged over theirs)."""

    w_lat: float = 1.0  # >= 0; 0 = Flow-GRPO on top of a fixed latent sampler
    w_flow: float = 1.0  # >= 0; 0 = the flow is the latents' environment
    eps_lat: float = 0.2  # the latents' ratio may move by this, in (0,1)
    eps_flow: float = 1e-3  # the flow steps' ratio may move by this, in (0,1)

    needs = frozenset({"logp"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        latent, numbers = _latents(batch, run), batch.signal("numbers")
        thinking, drawing = batch.counted & latent, batch.counted & ~latent
        step, old_step = new.logp / numbers, batch.logp / numbers
        value = self.w_lat * surrogate(new.logp, batch.logp, thinking, batch.advantage, self.eps_lat)
        value = value + self.w_flow * surrogate(step, old_step, drawing, batch.advantage, self.eps_flow)
        metrics: dict[str, float] = {}
        for name, mask, now, old, eps in (
            ("latent", thinking, new.logp, batch.logp, self.eps_lat),
            ("flow", drawing, step, old_step, self.eps_flow),
        ):
            found = ratio_metrics(token_ratio(now.detach(), old, mask), 1 - eps, 1 + eps, mask)
            metrics |= {f"{name}/{key}": number for key, number in found.items()}
        return Loss(value, metrics)


@dataclass
class JointKL:
    """Exact KL to the frozen reference: of the latents (summed over their numbers) and of the flow steps (averaged over theirs)."""

    beta_kl: float = 0.05  # of the latents, >= 0
    beta: float = 0.04  # of the flow steps, >= 0

    @property
    def needs(self) -> Set[str]:
        return frozenset({"mean", "log_std", "ref_mean", "ref_log_std"}) if self.beta_kl or self.beta else frozenset()

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        if not (self.beta_kl or self.beta):
            return Loss(batch.logp.new_zeros(()))
        latent = _latents(batch, run)
        distance = regularize.gaussian_kl(new.mean, new.log_std, batch.signal("ref_mean"), batch.signal("ref_log_std"))
        thinking = masked_mean(distance, batch.counted & latent)
        drawing = masked_mean(distance / batch.signal("numbers"), batch.counted & ~latent)
        metrics = {"latent/kl": float(thinking.detach()), "flow/kl": float(drawing.detach())}
        return Loss(self.beta_kl * thinking + self.beta * drawing, metrics)


METHOD = FLOW_GRPO.but(
    name="lac",
    paper=Paper("Latent Action Control for Reasoning-Guided Unified Image Generation", "", 2026),
    summary="the policy draws latent actions (plan, draft, diagnose, refine) before it draws the image, and both are trained by the image's reward",
    task="scenes",
    select=UniformPrompts(group_size=8),
    objective=LatentFlowClip(),
    regularize=(JointKL(),),
    update=GradientSteps(epochs=2, unit="row", learning_rate=1e-3),
)
