"""The on-policy loop: one training step is the same chain in every domain. It knows no method and no domain."""

from __future__ import annotations

import torch

from anypo.batch import Batch
from anypo.method import Method
from anypo.run import Run


def train(run: Run) -> Run:
    """Run all remaining steps. Raises ValueError for what the user can mend (a reward that is not finite, groups of one)."""
    while not run.finished:
        step(run)
    return run


def step(run: Run) -> Batch:
    """One iteration: select, rollout, reward, credit, update, control. Returns the batch, for those who want to look at it."""
    method = run.begin_step()
    prompts = method.select(run.task, run)
    batch = method.rollout(prompts, run)
    run.prepare_signals(batch, method.needs("reward"))
    batch.reward = method.reward(batch, run)
    if batch.reward.dim() == 1:
        batch.objectives = ()  # the reward seam made one number of several
    run.prepare_signals(batch, method.needs("credit", "objective", "regularize", "update"))
    refuse_lone_members(method, batch)
    batch.advantage = method.credit(batch, run)
    metrics = method.update(batch, run.loss_fn, run)
    for component in method.control:
        component(batch, run)
    run.finish_step(batch, metrics)
    return batch


def refuse_lone_members(method: Method, batch: Batch) -> None:
    """A credit or objective that compares the attempts at a prompt learns nothing from single attempts. Raises ValueError."""
    compares = any(getattr(component, "compares_group", False) for component in (method.credit, method.objective))
    if compares and len(torch.unique(batch.group)) == len(batch):
        raise ValueError(
            f"{method.name} compares several attempts at the same prompt, but every group has one member; set select.group_size to 2 or more"
        )
