"""Flash-GRPO: iso-temporal single-step flow training (arXiv:2605.15980).

Training every denoising step costs T network evaluations a sample; training one random step a sample mixes how good a sample is with how hard its
step was. Here one step a sample is noisy and trained, the others follow the ODE, and all samples of a group share the step, so that their rewards
differ by the noise at that step (`rollout`). A step's gradient carries a factor that depends on its level alone, pull / std of the step; it is
divided out (`objective`). What has no advantage is dropped and one network evaluation a sample is trained on (`update`). Against Flow-GRPO it
changes these three, and divides by the whole batch's deviation. Equations: step choice, rollout, linear noise, advantages and loss from the
authors' code; the factor derived, it gives the code's table. [reconstructed]: the mean that normalizes the factor is over the samples kept, the
members of a group start from one noise unless `shared_start` is off. Left out: the video model's shifted grid of levels (the task has its own).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.diffusion.denoise import Schedule, noisy_schedule, ode_schedule
from anypo.domains.diffusion.denoise import noise_scale as flow_noise_scale
from anypo.domains.diffusion.sample import chains
from anypo.method import Paper
from anypo.methods.diffusion.flow_grpo import METHOD as FLOW_GRPO
from anypo.methods.diffusion.flow_grpo import ClampedGroupRelative, StepClip, StepKL
from anypo.methods.diffusion.flow_grpo import advantages as clamped_advantages
from anypo.methods.diffusion.flow_grpo import loss as clipped_loss
from anypo.policy import Loss, Signals
from anypo.seams.groups import masked_mean
from anypo.seams.select import UniformPrompts
from anypo.seams.update import GradientSteps, flatten_actions

if TYPE_CHECKING:
    from anypo.run import MethodLoss, Run
    from anypo.task import Prompt

__all__ = ["METHOD", "advantages", "grad_factor", "loss", "noise_scale", "one_noisy_step", "rectification", "rectify", "scales"]


class Rectification(NamedTuple):
    lam: Tensor  # [N], one over the factor of the step's gradient
    lamhat: Tensor  # [N], lam over its mean


class Advantages(NamedTuple):
    adv: Tensor  # [N]
    keep: Tensor  # [N] bool, False where there is nothing to learn


class GradientNorms(NamedTuple):
    norm: Tensor  # [N]
    rectified: Tensor  # [N]


def noise_scale(sigma: Float[Tensor, " T+1"]) -> Float[Tensor, " T"]:
    """Equation 3: diffusion coefficient of each step, linear in its level between the last and the second level."""
    low, high = sigma[-1], sigma[1]
    return low + (high - low) * sigma[:-1]


def scales(sigma: Float[Tensor, " T+1"], noise: str = "linear", a: float = 0.7) -> Float[Tensor, " T"]:
    """Diffusion coefficients by name: `linear` (equation 3), or `flow_grpo` with its strength a. Raises ValueError for another name."""
    if noise not in ("linear", "flow_grpo"):
        raise ValueError(f"unknown noise '{noise}'; use linear or flow_grpo")
    return noise_scale(sigma) if noise == "linear" else flow_noise_scale(sigma[:-1], sigma[1], a)


def _lam(schedule: Schedule) -> Float[Tensor, " T"]:
    """Standard deviation over |pull|: the mean of a step is keep x + pull v, so |d log-probability / d v| is |noise| |pull| / std."""
    return schedule.std / schedule.pull.abs()


def rectify(k: Int[Tensor, " N"], sigma: Float[Tensor, " T+1"], noise: str = "linear", a: float = 0.7) -> Rectification:
    """Equation 5, for samples trained at steps k: lam = 1 / f, f = sqrt|Delta| / g + g sqrt|Delta| (1-s) / (2s)."""
    lam = _lam(noisy_schedule(sigma, scales(sigma, noise, a)))[k]
    return Rectification(lam, lam / lam.mean())


def rectification(step: Float[Tensor, "N T 3"], mask: Bool[Tensor, "N T"]) -> Float[Tensor, "N T"]:
    """Equation 5 from the constants (keep, pull, std) of any sampler's steps: lam over its mean where `mask` is True, 0 elsewhere."""
    lam = torch.where(mask, step[..., 2] / torch.where(mask, step[..., 1].abs(), 1.0), 0.0)
    return lam / masked_mean(lam, mask).clamp(min=torch.finfo(lam.dtype).tiny)


def grad_factor(z: Float[Tensor, "N D"], k: Int[Tensor, " N"], sigma: Float[Tensor, " T+1"]) -> GradientNorms:
    """Norm of d log-probability (mean over D) / d velocity for noise draws z at steps k, and the same times lam: |z| / D at every level."""
    size = z.norm(dim=-1) / z.shape[-1]
    return GradientNorms(size / rectify(k, sigma).lam, size)


def advantages(
    reward: Float[Tensor, " N"], group: Int[Tensor, " N"], global_std: bool = True, eps: float = 1e-4, adv_clip: float = 5.0
) -> Advantages:
    """Equation 6: Flow-GRPO's, over the deviation of the whole batch or of the group, and which samples are kept."""
    adv = clamped_advantages(reward, group, "batch" if global_std else "group", adv_clip, eps)
    return Advantages(adv, adv != 0)


def loss(
    logp: Float[Tensor, " N"], old_logp: Float[Tensor, " N"], adv: Float[Tensor, " N"], lamhat: Float[Tensor, " N"], eps: float
) -> Tensor:
    """Equation 7: minus the mean clipped surrogate of the rectified advantages; lamhat > 0, so it may stand inside the minimum."""
    mask = torch.ones_like(logp, dtype=torch.bool)[:, None]
    return clipped_loss(logp[:, None], old_logp[:, None], mask, (lamhat * adv)[:, None], eps)


def one_noisy_step(level: Float[Tensor, " T+1"], scale: Float[Tensor, " T"], k: Int[Tensor, " N"]) -> Schedule:
    """Rules 1 and 2: a sampler for every row, [N,T], which follows the ODE but for its step k."""
    chosen = torch.nn.functional.one_hot(k, len(scale)).bool()
    pairs = zip(noisy_schedule(level, scale)[1:], ode_schedule(level)[1:], strict=True)
    return Schedule(level, *(torch.where(chosen, noisy, plain) for noisy, plain in pairs))


@dataclass
class SingleStepRollout:
    """Chains with one noisy step, the same for the attempts at a prompt."""

    steps: int = 20  # denoising steps of a training sample, >= 1
    trainable: float = 0.51  # share of the steps, from the noisiest, among which the noisy one is drawn, in (0,1]
    noise: str = "linear"  # diffusion coefficient: linear in the level, or flow_grpo
    a: float = 0.7  # strength of flow_grpo noise, > 0
    shared: bool = True  # the attempts at a prompt share the noisy step; False = a step for each attempt
    shared_start: bool = True  # they start from one noise, and differ by the noise of that step alone

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        task: Any = run.task
        if not hasattr(task, "levels"):
            raise ValueError(f"{run.method.name} trains denoising steps, and the task '{task.name}' has none; take one such as digits:ink")
        if not 0 < self.trainable <= 1:
            raise ValueError(f"rollout.trainable is a share of the steps in (0,1], not {self.trainable}")
        level, sizes = task.levels(self.steps), torch.tensor([p.samples for p in prompts])
        count, scale = max(1, int(self.trainable * self.steps)), scales(level, self.noise, self.a)
        if not bool((scale[:count] > 0).all()):
            raise ValueError(
                "a step without noise cannot be trained; take rollout.steps above 1 or rollout.noise flow_grpo with rollout.a above 0"
            )
        drawn = torch.randint(count, (len(prompts) if self.shared else int(sizes.sum()),), generator=run.generator)
        k = drawn.repeat_interleave(sizes) if self.shared else drawn
        schedule = one_noisy_step(level, scale, k)
        return run.collect(prompts, by=lambda prompts, run: chains(prompts, run, schedule, self.shared_start))


@dataclass
class RectifiedStepClip(StepClip):
    """Clipped surrogate of each trained step, whose gradient no longer depends on the level."""

    clip: float = 1e-3  # the ratio may move by this, in (0,1)
    reduce: str = "mean"  # log-probability of a step: mean over its D numbers, or sum
    rectify: bool = True  # divide out the factor of the level

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        if self.rectify:
            batch = batch.but(advantage=batch.advantage * rectification(batch.signal("step"), batch.counted))
        return super().__call__(batch, new, run)


@dataclass
class TrainedSteps(GradientSteps):
    """Gradient steps on nothing but the steps that have an advantage: one network evaluation each."""

    def __call__(self, batch: Batch, loss_fn: MethodLoss, run: Run) -> dict[str, float]:
        assert batch.advantage is not None
        kept = batch.counted & (batch.advantage != 0)
        share = {"kept": float(kept.sum() / batch.counted.sum().clamp(min=1))}
        if not kept.any():
            return share
        return super().__call__(flatten_actions(batch.but(keep=kept)), loss_fn, run) | share


METHOD = FLOW_GRPO.but(
    name="flash_grpo",
    paper=Paper("Flash-GRPO: iso-temporal single-step flow training", "2605.15980", 2026),
    summary="one noisy, trained step a sample, the same for a prompt's samples, with the level's factor divided out of its gradient",
    select=UniformPrompts(group_size=16),
    rollout=SingleStepRollout(),
    credit=ClampedGroupRelative(std="batch"),
    objective=RectifiedStepClip(),
    regularize=(StepKL(beta=0.0),),
    update=TrainedSteps(unit="row"),
)
