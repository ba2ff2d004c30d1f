"""Chains from noise to data, and the batch they make."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.diffusion.denoise import Schedule
from anypo.domains.diffusion.policy import Condition, DenoisingPolicy

if TYPE_CHECKING:
    from anypo.run import Run
    from anypo.task import Prompt

RECORDED = frozenset({"logp", "entropy", "mean", "log_std"})  # what a batch keeps of the policy that acted


@torch.no_grad()
def sample(
    policy: DenoisingPolicy, start: Float[Tensor, "N D"], condition: Condition, schedule: Schedule, generator: torch.Generator | None = None
) -> Float[Tensor, "N T+1 D"]:
    """Chains from `start` under a schedule, whose fields are [T] or, one schedule a row, [N,T]. `condition`: [N,T or 1,C], N prompts or None.

    Draws from `generator` at the steps that have noise alone, so a deterministic schedule needs none.
    """
    x, steps = [start], schedule.keep.shape[-1]
    level, keep, pull, std = (part.to(start.dtype) for part in schedule)
    for k in range(steps):
        here = x[-1]
        at = None if condition is None else condition if isinstance(condition, list) else condition[:, min(k, condition.shape[1] - 1), None]
        velocity = policy.velocity(here[:, None], level[..., k].expand(len(here))[:, None], at)[:, 0]
        following = keep[..., k, None] * here + pull[..., k, None] * velocity
        if bool((std[..., k] > 0).any()):
            following = following + std[..., k, None] * torch.randn(here.shape, generator=generator, dtype=here.dtype).to(here.device)
        x.append(following)
    return torch.stack(x, dim=1)


def as_batch(
    policy: DenoisingPolicy, x: Float[Tensor, "N T+1 D"], condition: Condition, schedule: Schedule, group: Tensor, prompt_id: Tensor
) -> Batch:
    """Chains as a batch, scored by the policy that made them. A step without noise is nobody's choice: its mask is False."""
    rows, steps = x.shape[0], x.shape[1] - 1
    step = torch.stack([part.expand(rows, steps) for part in schedule[1:]], dim=-1).to(x.dtype)
    signals = {"prompt_id": prompt_id, "step": step, "level": schedule.level[..., :-1].expand(rows, steps).to(x.dtype)}
    if condition is not None:
        signals["condition"] = condition if isinstance(condition, list) else condition.expand(rows, steps, -1)  # type: ignore[assignment]
    mask = step[..., 2] > 0
    batch = Batch(action=x[:, 1:], mask=mask, logp=torch.zeros(mask.shape), group=group, context=x[:, :-1], signals=signals)
    batch.terminated, batch.truncated = torch.ones(rows, dtype=torch.bool), torch.zeros(rows, dtype=torch.bool)
    batch.valid = torch.ones_like(mask)
    found = policy.observe(batch, RECORDED)
    batch.logp = found.pop("logp")
    batch.signals |= {f"old_{name}": value for name, value in found.items()}
    return batch


def chains(prompts: list[Prompt], run: Run, schedule: Schedule, shared_start: bool = False) -> Batch:
    """Chains for prompts of a denoising task under a schedule, whose fields may be [N,T]; `shared_start`: the attempts at a prompt start from one noise.

    For `run.collect`, which times and counts them.
    """
    task: Any = run.task
    policy: Any = run.policy
    group = torch.tensor([g for g, p in enumerate(prompts) for _ in range(p.samples)])
    prompt_id = torch.tensor([p.id for p in prompts for _ in range(p.samples)])
    start = torch.randn(len(prompts) if shared_start else len(group), task.size, generator=run.generator)
    start, condition = start[group] if shared_start else start, task.condition(prompt_id)
    return as_batch(policy, sample(policy, start, condition, schedule, run.generator), condition, schedule, group, prompt_id)


def final(batch: Batch) -> Float[Tensor, "N D"]:
    """What the chains ended in."""
    return batch.action[:, -1]


def staying(stage: Batch, stays: Bool[Tensor, " N"], view: Float[Tensor, "N D"]) -> Batch:
    """A stage whose rows `stays` are over: steps that lead from the view to itself and are nobody's choice."""
    here = view[:, None].expand_as(stage.action)
    for name, value in (
        ("action", here),
        ("context", here),
        ("mask", torch.zeros_like(stage.mask)),
        ("logp", torch.zeros_like(stage.logp)),
    ):
        old = getattr(stage, name)
        setattr(stage, name, torch.where(stays.view(-1, *[1] * (old.dim() - 1)), value, old))
    stage.signals["step"] = torch.where(stays[:, None, None], torch.tensor([1.0, 0.0, 0.0]), stage.signal("step"))
    return stage


def joined(stages: list[Batch]) -> Batch:
    """Stages one after another as the actions of one trajectory."""
    first, steps = stages[0], stages[0].horizon

    def along(values: list[Tensor]) -> Tensor:
        return torch.cat(values, dim=1)

    signals = {k: along([s.signals[k] for s in stages]) if v.dim() > 1 else v for k, v in first.signals.items()}
    changed = {k: along([getattr(s, k) for s in stages]) for k in ("action", "context", "mask", "logp", "valid")}
    segment = torch.arange(len(stages)).repeat_interleave(steps).expand(len(first), -1)
    return first.but(**changed, signals=signals, segment=segment)
