"""DEVIS-GRPO: accumulative extreme-view synthesis (arXiv:2605.16937).

Camera-controlled generators are good at small moves and break at large ones. Here a large move is a chain of small ones, each generated from the
view before, and the ways of splitting the same angle give the diverse samples of a group. A reward at several levels picks samples of the group;
Flow-GRPO on the chains of the picked ones trains the small moves, and flow matching of the direct jump towards the best sample of the group
teaches the large move without a single pair beyond the small ones. Against Flow-GRPO it changes `rollout`, `reward`, `credit` (which picks), and
adds a regularizer. Equations: accumulation of small increments from the paper; sampling of the splits, the levels and their sum, the choice of
both ends of the group and the distillation of the jump [reconstructed].
A task must offer what `anypo.domains.diffusion.views.Views` has: `asked(prompt)` = source views and angles; `condition` tells of one move.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.diffusion.denoise import sde_schedule
from anypo.domains.diffusion.sample import as_batch, final, joined, sample, staying
from anypo.domains.diffusion.views import masked_psnr, rotate, view_condition
from anypo.method import Paper
from anypo.methods.diffusion.flow_grpo import METHOD as FLOW_GRPO
from anypo.methods.diffusion.flow_grpo import StepClip, StepKL
from anypo.policy import Loss, Signals
from anypo.seams.groups import broadcast, group_size, standardize
from anypo.seams.reward import row_reward
from anypo.seams.select import UniformPrompts

if TYPE_CHECKING:
    from anypo.run import Run
    from anypo.task import Prompt

__all__ = ["METHOD", "level_reward", "masked_psnr", "rotate", "select", "selected_advantages", "split"]


def split(noise: Float[Tensor, "N M"], Theta: float | Tensor, tau: float, delta_max: float) -> Float[Tensor, "N M"]:
    """Equation 1: increments that add up to Theta (a number, or one a row), in proportion to softmax(tau noise) as far as `delta_max` allows; what is
    above it goes to the others in the same proportion. Raises ValueError when M increments of `delta_max` do not reach Theta."""
    total = torch.as_tensor(Theta, dtype=noise.dtype).reshape(-1, 1).expand(len(noise), 1)
    if float(total.max()) > noise.shape[1] * delta_max * (1 + 1e-6):
        raise ValueError(f"{noise.shape[1]} increments of at most {delta_max} do not reach {float(total.max())}; take more of them")
    weight, capped = (tau * noise).softmax(1), torch.zeros_like(noise, dtype=torch.bool)
    delta = total * weight
    for _ in range(noise.shape[1]):
        if not bool((delta > delta_max).any()):
            break
        capped = capped | (delta > delta_max)
        free = torch.where(capped, torch.zeros_like(weight), weight)
        left = (total - delta_max * capped.sum(1, keepdim=True)).clamp(min=0)
        share = free / free.sum(1, keepdim=True).clamp(min=torch.finfo(noise.dtype).tiny)
        delta = torch.where(capped, torch.full_like(delta, delta_max), left * share)
    return delta


def level_reward(
    levels: Float[Tensor, "N L"], group: Int[Tensor, " N"], lam: Sequence[float] | Tensor, floor: float, view_index: int, clip: float
) -> Float[Tensor, " N"]:
    """Equation 3: the levels standardized inside the group (ddof 0, eps 1e-6; 0 when constant), weighted by `lam` and added up. Where the raw view
    level is below `floor`, its standardized value is -clip."""
    z = standardize(levels, group, ddof=0, eps=1e-6)
    gated = torch.where(levels[:, view_index] < floor, torch.full_like(z[:, view_index], -clip), z[:, view_index])
    z = z.index_copy(1, torch.tensor([view_index]), gated[:, None])
    return z @ torch.as_tensor(lam, dtype=z.dtype)


def _rank(reward: Float[Tensor, " N"], group: Int[Tensor, " N"]) -> Int[Tensor, " N"]:
    """Place in the group, 0 the best; of equals the lower index comes first."""
    order = reward.argsort(descending=True, stable=True)
    order = order[group[order].argsort(stable=True)]
    place = torch.arange(len(order)) - torch.searchsorted(group[order], group[order])
    return torch.empty_like(order).index_copy(0, order, place)


def select(reward: Float[Tensor, " N"], group: Int[Tensor, " N"], n_keep: int) -> Float[Tensor, " N"]:
    """Equation 4: 1 for the best ceil(n_keep/2) and the worst floor(n_keep/2) of every group, else 0; all of a group that has no more."""
    place, size = _rank(reward, group), group_size(group)
    kept = (place < math.ceil(n_keep / 2)) | (place >= size - n_keep // 2) | (size <= n_keep)
    return kept.to(reward.dtype)


def selected_advantages(
    reward: Float[Tensor, " N"], group: Int[Tensor, " N"], keep: Float[Tensor, " N"], eps: float = 1e-4
) -> Float[Tensor, " N"]:
    """Equation 5: rewards standardized among the kept samples of the group (ddof 0); 0 for the others."""
    kept = keep.bool()
    return torch.zeros_like(reward).masked_scatter(kept, standardize(reward[kept], group[kept], ddof=0, eps=eps))


@dataclass
class AccumulativeRollout:
    """Large camera moves as chains of small ones, split at random: the flow steps of all stages are the actions, `segment` numbers the stages.

    Rows with fewer stages end in steps that stay where they are and count nowhere.
    """

    steps: int = 10  # denoising steps a stage, >= 1
    noise: float = 0.7  # a of the SDE, > 0
    delta_max: float = 20.0  # degrees that the model is trusted with, > 0
    tau: float = 0.7  # >= 0, unevenness of the splits; 0 = even splits into the fewest stages
    extra: int = 2  # at most so many stages above the fewest, >= 0; more stages carry more errors along

    def increments(self, angle: Float[Tensor, " N"], generator: torch.Generator) -> Float[Tensor, "N M"]:
        """Degrees of every stage, 0 behind a row's last."""
        fewest = (angle / self.delta_max - 1e-6).ceil().long().clamp(min=1)
        drawn = torch.randint(self.extra + 1, fewest.shape, generator=generator) if self.tau > 0 else 0
        stages = fewest + drawn
        noise = torch.randn(len(angle), int(stages.max()), generator=generator)
        found = torch.zeros_like(noise)
        for count in torch.unique(stages).tolist():
            rows = stages == count
            found[rows, :count] = split(noise[rows, :count], angle[rows], self.tau, self.delta_max)
        return found

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        task: Any = run.task
        if not hasattr(task, "asked"):
            raise ValueError(f"{run.method.name} accumulates camera moves, and the task '{task.name}' has none; take --task views")
        if not self.noise > 0:
            raise ValueError(f"rollout.noise must be above 0, not {self.noise}: a sampler without noise has no action probabilities")
        return run.collect(prompts, by=self.collect)

    def collect(self, prompts: list[Prompt], run: Run) -> Batch:
        """Equation 2."""
        policy: Any = run.policy
        task: Any = run.task
        group = torch.tensor([g for g, p in enumerate(prompts) for _ in range(p.samples)])
        prompt_id = torch.tensor([p.id for p in prompts for _ in range(p.samples)])
        view, angle = task.asked(prompt_id)
        increments, schedule = self.increments(angle, run.generator), sde_schedule(task.levels(self.steps), self.noise)
        stages = []
        for delta in increments.unbind(1):
            condition = view_condition(view, delta)
            x = sample(policy, torch.randn(view.shape, generator=run.generator), condition, schedule, run.generator)
            stages.append(staying(as_batch(policy, x, condition, schedule, group, prompt_id), delta == 0, view))
            view = final(stages[-1])
        batch = joined(stages)
        batch.signals["jump_condition"] = task.condition(prompt_id)
        run.log(stages=float((increments > 0).double().sum(1).mean()))
        return batch


@dataclass
class MultiLevelReward:
    """The task's rewards as levels, standardized inside the group and added up."""

    lam: tuple[float, ...] = (1.0, 0.5, 1.0, 1.0)  # weights of the levels, >= 0
    view_index: int = 2  # which level is gated
    floor: float = 0.5  # raw values of that level below it count as -clip
    clip: float = 3.0  # > 0

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        levels = run.score_rewards(batch)
        if levels.dim() != 2 or levels.shape[1] != len(self.lam):
            raise ValueError(
                f"{run.method.name} weighs {len(self.lam)} levels, and '{run.task.name}' gives other rewards; set reward.lam to fit"
            )
        run.log(**{f"level/{name}": float(levels[:, k].mean()) for k, name in enumerate(run.task.objectives)})
        return level_reward(levels, batch.group, self.lam, self.floor, self.view_index, self.clip)


@dataclass
class SelectedGroupRelative:
    """Both ends of the group count, relative to one another; the best row of each group is marked by the signal `best`."""

    n_keep: int = 4  # samples kept of a group, >= 2
    eps: float = 1e-4  # > 0, added to the standard deviation
    weights: tuple[float, ...] | None = None  # of the K rewards; None = all 1

    compares_group = True
    gives = frozenset({"best"})

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        reward = row_reward(batch, self.weights)
        keep = select(reward, batch.group, self.n_keep)
        batch.keep = batch.counted & keep.bool()[:, None]
        batch.signals["best"] = _rank(reward, batch.group) == 0
        return broadcast(selected_advantages(reward, batch.group, keep, self.eps), batch.keep)


@dataclass
class JumpDistillation:
    """Flow matching of the direct jump from the source towards the final view of the best sample of each group."""

    weight: float = 0.5  # lambda_jump, >= 0; 0 switches it off
    draws: int = 8  # levels and noises a target, >= 1

    wants = frozenset({"best"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        rows = batch.signal("best").nonzero().flatten() if self.weight else torch.zeros(0, dtype=torch.int64)
        if not len(rows):
            return Loss(batch.logp.new_zeros(()))
        rows, policy = rows.repeat(self.draws), run.policy
        target, condition = final(batch)[rows], batch.signal("jump_condition")[rows]
        noise = torch.randn(target.shape, generator=run.generator).to(target)
        level = torch.rand(len(rows), 1, generator=run.generator).to(target)
        velocity = policy.velocity(((1 - level) * target + level * noise)[:, None], level, condition)[:, 0]
        value = ((velocity - (noise - target)) ** 2).mean()
        return Loss(self.weight * value, {"jump_loss": float(value.detach())})


METHOD = FLOW_GRPO.but(
    name="devis_grpo",
    paper=Paper("DEVIS-GRPO: accumulative extreme-view synthesis", "2605.16937", 2026),
    summary="a large camera move is rolled out as small ones split at random; the best chains train the flow and teach it the direct jump",
    task="views",
    select=UniformPrompts(group_size=8),
    rollout=AccumulativeRollout(),
    reward=MultiLevelReward(),
    credit=SelectedGroupRelative(),
    objective=StepClip(clip=1e-3, reduce="mean"),
    regularize=(StepKL(beta=0.01, reduce="mean"), JumpDistillation()),
)
