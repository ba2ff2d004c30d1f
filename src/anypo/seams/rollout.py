"""How trajectories are produced."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Rollout
from anypo.seams.groups import has_spread
from anypo.task import Prompt, Resumable

if TYPE_CHECKING:
    from anypo.run import Run

BEHAVIOUR = "behaviour"  # name of a policy that writes and lags behind, in the run


@dataclass
class OnPolicy:
    """Independent attempts at every prompt under the current policy, collected by the task."""

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        return run.collect(prompts)


@dataclass
class DynamicSampling:
    """Replace prompts without contrast in their group by fresh ones, up to `max_rounds` times; then train on what there is (DAPO, arXiv:2503.14476)."""

    inner: Rollout = field(default_factory=OnPolicy)
    max_rounds: int = 3  # rollouts a step at the most, >= 1

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        wanted, found, kept, samples = len(prompts), 0, [], prompts[0].samples
        for round_number in range(self.max_rounds):
            batch = self.inner(prompts, run)
            useful = self.contrast(batch, run)
            batch.group = batch.group + wanted * round_number  # rounds must not share group numbers
            kept.append(batch[useful])
            found += len(torch.unique(kept[-1].group))
            if found >= wanted:
                break
            prompts = [p.but(samples=samples) for p in run.task.prompts(wanted - found, run.rng)]
        run.log(sampling_rounds=round_number + 1, prompts_with_contrast=found / wanted)
        full = [part for part in kept if len(part)]
        return Batch.concat(full) if full else batch

    def contrast(self, batch: Batch, run: Run) -> Tensor:
        """[N] bool: whether the attempts at a row's prompt differ in the task's reward, in at least one of its objectives."""
        reward = run.score_rewards(batch)
        if reward.dim() == 1:
            return has_spread(reward, batch.group)
        if not batch.objectives:
            return has_spread(reward.sum(1), batch.group)  # dense: what counts is the total
        return torch.stack([has_spread(column, batch.group) for column in reward.T]).any(0)


@dataclass
class LaggedRollout:
    """Trajectories of a copy of the policy that is renewed every `lag` optimizer steps; each batch keeps the log-probs of the copy that wrote it."""

    lag: int = 50  # optimizer steps between two renewals of the generator, >= 1; the paper goes beyond 400
    synced: int = field(default=-1, init=False, repr=False)  # version of the policy that the generator holds, -1 before the first rollout

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        if self.lag < 1:
            raise ValueError(f"rollout.lag must be at least 1 optimizer step, not {self.lag}")
        if self.synced < 0 or run.version - self.synced >= self.lag:
            run.move_policy(BEHAVIOUR)
            self.synced = run.version
        batch = run.collect(prompts, BEHAVIOUR)
        batch.version = torch.full((len(batch),), self.synced)
        run.log(lag=run.version - self.synced)
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"synced": self.synced}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.synced = state["synced"]


def continue_rows(batch: Batch, rows: Tensor, depth: Tensor, run: Run) -> Batch:
    """New endings under the current policy of rows `rows` [M] of a batch after their first `depth` [M] actions, as whole trajectories (see
    `anypo.task.Resumable`). Only the new actions count as generated. Raises ValueError for a task that cannot do it."""
    if not isinstance(run.task, Resumable):
        raise ValueError(
            f"{run.method.name} continues trajectories from their middle, which the task '{run.task.name}' does not offer; give the task a "
            "continue_rows (see anypo.task.Resumable), or take a task of text such as arithmetic"
        )
    with run.timed("generate"), torch.no_grad():
        endings = run.task.continue_rows(batch, rows, depth, run)
    run.actions += int((endings.mask & (torch.arange(endings.horizon) >= depth[:, None])).sum())
    return endings


def as_roots(batch: Batch) -> Batch:
    """The batch with every row marked as one that branched from none, so that it can be joined with its `continue_rows`."""
    return batch.but(parent=torch.full_like(batch.group, -1), branch_at=torch.zeros_like(batch.group))


def steps_of(batch: Batch, run: Run, size: int = 1) -> Tensor:
    """Which step of its trajectory every action belongs to, [N,T] int64 from 0, and -1 where there is none.

    A step is what the task calls a segment (a turn, an environment step); else a line, where the policy writes text and wrote a line break;
    else `size` actions.
    """
    place = torch.arange(batch.horizon).expand(batch.mask.shape)
    if batch.segment is not None:
        step = batch.segment
    else:
        ends = _line_ends(batch, run)
        step = ends.cumsum(1) - ends.long() if bool(ends.any()) else place // size
    return torch.where(batch.attended, step, -1)


def step_starts(steps: Tensor) -> Tensor:
    """[N,T] bool: where a step of `steps_of` begins."""
    before = torch.cat([torch.full_like(steps[:, :1], -1), steps[:, :-1]], dim=1)
    return (steps != before) & (steps >= 0)


def _line_ends(batch: Batch, run: Run) -> Tensor:
    """[N,T] bool: the tokens after which a new line begins (several line breaks in a row are one); nowhere for a policy that does not decode."""
    decode = getattr(run.policy, "decode", None)
    if decode is None or batch.action.dim() != 2:
        return torch.zeros_like(batch.mask)
    breaks = [token for token in torch.unique(batch.action[batch.mask]).tolist() if "\n" in decode(torch.tensor([token]))]
    broken = torch.isin(batch.action, torch.tensor(breaks, dtype=torch.int64)) & batch.mask
    return broken & ~torch.cat([broken[:, 1:], torch.zeros_like(broken[:, :1])], dim=1)


def pruned(batch: Batch, tree: Int[Tensor, " N"], leaves: int | None, run: Run) -> Batch:
    """At most `leaves` rows of each tree, drawn at random; None keeps all. Raises ValueError for fewer than 1."""
    if leaves is None or leaves >= int(torch.unique(tree, return_counts=True)[1].max()):
        return batch
    if leaves < 1:
        raise ValueError(f"rollout.leaves must be at least 1, not {leaves}")
    rank = torch.rand(len(batch), generator=run.generator, dtype=torch.float64) + tree
    order = rank.argsort()  # by tree, at random inside it
    place = torch.arange(len(batch)) - torch.searchsorted(tree[order], tree[order])
    kept = order[place < leaves].sort().values
    renumbered = torch.full((len(batch),), -1).index_copy(0, kept, torch.arange(len(kept)))
    assert batch.parent is not None
    parent = torch.where(batch.parent >= 0, renumbered[batch.parent.clamp(min=0)], -1)  # -1 where the parent was pruned
    return batch[kept].but(parent=parent[kept])
