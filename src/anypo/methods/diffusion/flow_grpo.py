"""Flow-GRPO: GRPO for flow models by an SDE with the ODE's marginals (arXiv:2505.05470), and DDPO, its elder with DDIM steps (arXiv:2305.13301).

A flow model samples by a deterministic ODE, which has neither action probabilities nor exploration. Flow-GRPO takes an SDE with the same marginal
at every level: each step is then a Gaussian whose mean depends on the model, the T steps are T actions with exact log-probabilities, and the
rest is GRPO with rewards of the final samples alone. Training takes few noisy steps, evaluation many steps of the ODE. Against GRPO it changes how
trajectories are made (`rollout`), clamps the advantages, averages over all steps, and has the KL to the reference in closed form.
`DDPO` in this file samples by ancestral steps and standardizes rewards by prompt. On the command line: `--set rollout.sampler=ddim`.
Equations: the papers and their code, as the domain's denoise.py says. Left out: the running average of weights for evaluation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.diffusion.denoise import (
    Schedule,
    ddim_mean,
    ddim_schedule,
    ddim_std,
    gaussian_logp,
    kl,
    logp,
    sde_schedule,
    sde_step,
)
from anypo.method import Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.policy import Loss, Signals
from anypo.seams.groups import broadcast, group_mean, has_spread, masked_mean, standardize
from anypo.seams.objective import clipped, ratio_metrics, token_ratio
from anypo.seams.regularize import gaussian_kl
from anypo.seams.reward import row_reward
from anypo.seams.select import UniformPrompts
from anypo.seams.update import GradientSteps

if TYPE_CHECKING:
    from anypo.run import Run
    from anypo.task import Prompt

__all__ = ["DDPO", "METHOD", "advantages", "ddim_logp", "gaussian_kl", "kl", "logp", "loss", "score_function_loss", "sde_step"]


class StepProbability(NamedTuple):
    mean: Tensor  # [N,D]
    std: Tensor  # scalar
    logp: Tensor  # [N], mean over D


def advantages(
    reward: Float[Tensor, " N"], group: Int[Tensor, " N"], std: str = "group", adv_clip: float = 5.0, eps: float = 1e-4
) -> Float[Tensor, " N"]:
    """Reward minus the group's mean, over the standard deviation (ddof 0) of the group or of the whole batch, clamped to +-adv_clip.

    Groups whose members are all equal get 0. Raises ValueError when `std` is neither "group" nor "batch".
    """
    if std not in ("group", "batch"):
        raise ValueError(f"std is 'group' or 'batch', not '{std}'")
    if std == "group":
        return standardize(reward, group, ddof=0, eps=eps).clamp(-adv_clip, adv_clip)
    centred = (reward - group_mean(reward, group)) / (reward.std(correction=0) + eps)
    return torch.where(has_spread(reward, group), centred, torch.zeros_like(centred)).clamp(-adv_clip, adv_clip)


def loss(logp: Float[Tensor, "N T"], old_logp: Float[Tensor, "N T"], mask: Tensor, adv: Tensor, clip: float) -> Tensor:
    """Minus the clipped surrogate of every step, averaged over all steps that count: a scalar. `adv` is [N] or [N,T]."""
    per_step = broadcast(adv, mask) if adv.dim() == 1 else adv
    return -masked_mean(clipped(token_ratio(logp, old_logp, mask), per_step, 1 - clip, 1 + clip), mask)


def score_function_loss(logp: Float[Tensor, "N T"], mask: Tensor, adv: Tensor) -> Tensor:
    """DDPO's single-step form: minus the mean of advantage times log-probability."""
    per_step = broadcast(adv, mask) if adv.dim() == 1 else adv
    return -masked_mean(per_step * torch.where(mask.bool(), logp, torch.zeros_like(logp)), mask)


def ddim_logp(
    x: Float[Tensor, "N D"], x_next: Float[Tensor, "N D"], eps_pred: Float[Tensor, "N D"], abar_t: float, abar_p: float, eta: float,
    min_std: float,
) -> StepProbability:  # fmt: skip
    """A DDIM step from abar_t to abar_p: its mean and deviation, and the log-probability (mean over D) of having led to x_next."""
    std = ddim_std(abar_t, abar_p, eta, min_std)
    mean = ddim_mean(x, eps_pred, abar_t, abar_p, std)
    return StepProbability(mean, std, gaussian_logp(x_next, mean, std, "mean"))


@dataclass
class DenoisingRollout:
    """Chains of few noisy steps, all attempts at a prompt from noise of their own."""

    sampler: str = "sde"  # sde (Flow-GRPO), or ddim (DDPO), whose last step has no noise and is not trained
    steps: int = 10  # denoising steps of a training sample, >= 1
    noise: float = 0.7  # a of the SDE, > 0; eta of DDIM, in (0,1], 1 = ancestral
    trained: float = 1.0  # share of the steps that is trained, drawn anew for every chain, in (0,1]

    def schedule(self, levels: Float[Tensor, " T+1"]) -> Schedule:
        """The sampler's constants at these levels. Raises ValueError for another sampler, or for one without noise."""
        makers = {"sde": sde_schedule, "ddim": ddim_schedule}
        if self.sampler not in makers:
            raise ValueError(f"unknown sampler '{self.sampler}'; rollout.sampler is sde or ddim")
        if not self.noise > 0:
            raise ValueError(f"rollout.noise must be above 0, not {self.noise}: a sampler without noise has no action probabilities")
        return makers[self.sampler](levels, self.noise)

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        task: Any = run.task
        if not hasattr(task, "schedule"):
            raise ValueError(f"{run.method.name} trains denoising steps, and the task '{task.name}' has none; take one such as digits:ink")
        task.schedule = self.schedule(task.levels(self.steps))
        batch = run.collect(prompts)
        if self.trained < 1:
            order = torch.rand(batch.mask.shape, generator=run.generator).argsort(1).argsort(1)
            batch.keep = batch.mask & (order < max(1, round(self.trained * batch.horizon)))
        return batch


@dataclass
class ClampedGroupRelative:
    """Reward relative to the group, clamped, the same for all steps of a chain."""

    std: str = "group"  # the standard deviation that divides: of the group, or of the whole batch
    adv_clip: float = 5.0  # > 0
    eps: float = 1e-4  # > 0, added to the standard deviation
    weights: tuple[float, ...] | None = None  # of the K rewards; None = all 1

    compares_group = True

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        reward = row_reward(batch, self.weights)
        return broadcast(advantages(reward, batch.group, self.std, self.adv_clip, self.eps), batch.mask)


@dataclass
class PromptStandardized:
    """Reward standardized by the last rewards of its prompt (DDPO); by the batch's until a prompt has enough."""

    size: int = 32  # rewards remembered for each prompt, >= 1
    min_count: int = 16  # fewer, and the batch's mean and deviation are used
    adv_clip: float = 5.0  # > 0
    eps: float = 1e-6  # > 0, added to the standard deviation
    seen: dict[str, list[float]] = field(default_factory=dict, repr=False)  # by prompt: its rewards, the newest last

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        reward, prompt_id = batch.outcome.double(), batch.signal("prompt_id").tolist()
        for prompt, value in zip(prompt_id, reward.tolist(), strict=True):
            self.seen[str(prompt)] = [*self.seen.get(str(prompt), []), value][-self.size :]
        whole = (float(reward.mean()), float(reward.std(correction=0)))
        moments = {prompt: self._moments(str(prompt), whole) for prompt in set(prompt_id)}
        mean, deviation = torch.tensor([moments[prompt] for prompt in prompt_id], dtype=torch.float64).unbind(1)
        found = ((reward - mean) / (deviation + self.eps)).clamp(-self.adv_clip, self.adv_clip)
        return broadcast(found.to(batch.logp.dtype), batch.mask)

    def _moments(self, prompt: str, whole: tuple[float, float]) -> tuple[float, float]:
        seen = torch.tensor(self.seen[prompt], dtype=torch.float64)
        return whole if len(seen) < self.min_count else (float(seen.mean()), float(seen.std(correction=0)))

    def state_dict(self) -> dict[str, Any]:
        return {"seen": {prompt: list(values) for prompt, values in self.seen.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = {prompt: list(values) for prompt, values in state["seen"].items()}


def _per_dimension(batch: Batch, reduce: str) -> float:
    """What a log-probability summed over D is divided by. Raises ValueError for another name."""
    if reduce not in ("sum", "mean"):
        raise ValueError(f"unknown reduction '{reduce}'; use sum or mean")
    return 1.0 if reduce == "sum" or batch.action.dim() == 2 else float(batch.action.shape[-1])


@dataclass
class StepClip:
    """Clipped surrogate of each denoising step's ratio."""

    clip: float = 0.2  # the ratio may move by this, in (0,1); 1e-5 to 1e-3 with reduce "mean", whose ratios hardly move
    reduce: str = "sum"  # log-probability of a step: sum over its D numbers (the paper), or mean (the code)

    needs = frozenset({"logp"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        mask, divisor = batch.counted, _per_dimension(batch, self.reduce)
        current, old = new.logp / divisor, batch.logp / divisor
        metrics = ratio_metrics(token_ratio(current.detach(), old, mask), 1 - self.clip, 1 + self.clip, mask)
        return Loss(loss(current, old, mask, batch.advantage, self.clip), metrics)


@dataclass
class ScoreFunction:
    """DDPO's score-function form: one gradient step a batch, no ratio."""

    reduce: str = "mean"  # log-probability of a step: sum or mean over its D numbers

    needs = frozenset({"logp"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        return Loss(score_function_loss(new.logp / _per_dimension(batch, self.reduce), batch.counted, batch.advantage))


@dataclass
class StepKL:
    """beta times the exact KL to the frozen reference of each step, for policies with Gaussian actions."""

    beta: float = 0.04  # >= 0; 0 switches it off and no reference is kept
    reduce: str = "sum"  # over the D numbers of a step: sum or mean

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"mean", "log_std", "ref_mean", "ref_log_std"}) if self.beta else frozenset()

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        if not self.beta:
            return Loss(batch.logp.new_zeros(()))
        distance = gaussian_kl(new.mean, new.log_std, batch.signal("ref_mean"), batch.signal("ref_log_std"))
        value = masked_mean(distance / _per_dimension(batch, self.reduce), batch.counted)
        return Loss(self.beta * value, {"kl": float(value.detach())})


METHOD = GRPO.but(
    name="flow_grpo",
    paper=Paper("Flow-GRPO: Training Flow Matching Models via Online RL", "2505.05470", 2025),
    domain="diffusion",
    summary="the flow's ODE becomes an SDE with the same marginals, so that each denoising step is an action with an exact log-probability",
    select=UniformPrompts(group_size=16),
    rollout=DenoisingRollout(),
    credit=ClampedGroupRelative(),
    objective=StepClip(),
    regularize=(StepKL(),),
    update=GradientSteps(epochs=2, unit="row"),
)

DDPO = METHOD.but(
    name="flow_grpo.ddpo",
    paper=Paper("Training Diffusion Models with Reinforcement Learning", "2305.13301", 2023),
    summary="ancestral sampling steps as actions, rewards standardized by prompt",
    rollout=DenoisingRollout(sampler="ddim", noise=1.0),
    credit=PromptStandardized(),
    objective=StepClip(clip=1e-4, reduce="mean"),
    regularize=(),
)
VARIANTS = {"ddpo": DDPO}
