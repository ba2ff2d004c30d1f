"""Steps: stretches of a row that count as one action (an agent's reply, a turn, a block), and advantages and values by step.

A step is a maximal run of equal `segment` in a batch; without segments a row is one step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.seams.credit import dense_reward, gae, last_action

if TYPE_CHECKING:
    from anypo.run import Run

EPS = 1e-8
PerStep = Float[Tensor, " S"]


class StepEstimate(NamedTuple):
    advantage: Tensor  # [S], whitened when asked for
    returns: Tensor  # [S] value targets, never whitened


class Steps(NamedTuple):
    """The steps of a batch that the policy wrote at least one token of."""

    number: Tensor  # [N,T] number of the token's step, -1 outside the mask
    traj: Tensor  # [S] its row
    segment: Tensor  # [S] its segment
    order: Tensor  # [S] its number among the steps of the row, from 0
    start: Tensor  # [N,T] bool, the step's first token


def returns_and_advantages(
    step_reward: PerStep, value0: PerStep, traj: Int[Tensor, " S"], step: Int[Tensor, " S"], gamma: float = 0.99, lam: float = 1.0,
    whiten: bool = True, bootstrap: PerStep | None = None,
) -> StepEstimate:  # fmt: skip
    """Equations 2-5, rows in any order. `bootstrap` [S]: the value of the state after a trajectory's last step (0 where it ended).

    Raises ValueError when the steps of a trajectory are not 0, 1, 2, ... without a gap.
    """
    if len(traj) == 0:
        return StepEstimate(value0, value0)
    names, row, count = torch.unique(traj, return_inverse=True, return_counts=True)
    inside = torch.arange(int(count.max())) < count[:, None]
    seen = torch.zeros_like(inside)
    if int(step.min()) < 0 or int(step.max()) >= inside.shape[1]:
        raise ValueError("the steps of every trajectory must be numbered 0, 1, 2, ... without a gap")
    seen[row, step] = True
    if not torch.equal(seen, inside):
        raise ValueError("the steps of every trajectory must be numbered 0, 1, 2, ... without a gap")
    reward, value, after = (value0.new_zeros(inside.shape) for _ in range(3))
    reward[row, step], value[row, step] = step_reward.to(value0), value0
    after[:, :-1] = value[:, 1:]
    if bootstrap is not None:
        last = step == count[row] - 1
        after[row[last], step[last]] = bootstrap[last]
    open_end = torch.zeros_like(inside)
    found = gae(reward, value, open_end, open_end, inside, gamma, lam, next_value=after)
    advantage = found.advantages[row, step]
    return StepEstimate(standardized(advantage) if whiten else advantage, found.returns[row, step])


def standardized(advantage: PerStep) -> PerStep:
    """Equation 5: over all steps, unbiased standard deviation; a single step has 0."""
    centred = advantage - advantage.mean()
    return centred / (advantage.std() + EPS) if len(advantage) > 1 else torch.zeros_like(advantage)


def sum_by_step(values: Float[Tensor, "N T"], index: Int[Tensor, "N T"], steps: int) -> PerStep:
    """Sums over the tokens of each step."""
    inside = index >= 0
    return values.new_zeros(steps).index_add(0, index[inside], values[inside])


def spread(block: Float[Tensor, "N K"], segment: Int[Tensor, "N T"], mask: Tensor) -> Float[Tensor, "N T"]:
    """A step's (block's, turn's) number at each of its tokens; 0 outside the mask and at tokens of none."""
    count = block.shape[1]
    inside = mask.bool() & (segment >= 0) & (segment < count)
    return torch.where(inside, block.gather(1, segment.clamp(0, count - 1)), block.new_zeros(()))


def steps_of(batch: Batch, mask: Bool[Tensor, "N T"]) -> Steps:
    """Steps by `segment`; without segments a row is one step."""
    segment = batch.segment if batch.segment is not None else torch.zeros_like(mask, dtype=torch.int64)
    row, place = mask.nonzero(as_tuple=True)
    pairs, number = torch.unique(torch.stack([row, segment[row, place]], dim=1), dim=0, return_inverse=True)
    index = torch.full(mask.shape, -1)
    index[row, place] = number
    traj = pairs[:, 0].contiguous()
    before = torch.searchsorted(traj, traj)  # rows come in order, so this is where each row's first step is
    fresh = torch.ones_like(number, dtype=torch.bool)
    fresh[1:] = number[1:] != number[:-1]
    start = torch.zeros_like(mask)
    start[row[fresh], place[fresh]] = True
    return Steps(index, traj, pairs[:, 1], torch.arange(len(traj)) - before, start)


def step_rewards(batch: Batch, steps: Steps) -> PerStep:
    """Equation 1: the task's reward of each turn where it gives one, else the dense reward summed over the step's tokens."""
    if "turn_reward" in batch.signals:
        return batch.signals["turn_reward"][steps.traj, steps.segment]
    return sum_by_step(dense_reward(batch), steps.number, len(steps.traj))


@dataclass
class StepGAE:
    """Generalized advantages over steps, given to all tokens of a step; leaves value targets in `batch.signals["returns"]`.

    A truncated row takes the value after it from `batch.next_value` where there is one.
    """

    gamma: float = 0.99  # discount a step, in [0,1]
    lam: float = 1.0  # trace decay a step, in [0,1]
    normalize: bool = True  # whiten over the steps of the batch

    needs = frozenset({"old_value"})
    gives = frozenset({"returns"})

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        value = batch.signal("old_value")
        steps = steps_of(batch, batch.mask)
        found = returns_and_advantages(
            step_rewards(batch, steps), value[steps.start], steps.traj, steps.order, self.gamma, self.lam, self.normalize, self.after(batch, steps)
        )  # fmt: skip
        table = (
            torch.stack([found.advantage, found.returns])[:, steps.number.clamp(min=0)]
            if len(steps.traj)
            else value.new_zeros(2, *value.shape)
        )
        advantage, returns = torch.where(batch.mask, table, table.new_zeros(()))
        batch.signals["returns"] = returns
        return advantage

    def after(self, batch: Batch, steps: Steps) -> PerStep | None:
        """The value after each row's last action, for its steps; None when nothing was cut short or nobody knows the value."""
        if batch.truncated is None or batch.next_value is None:
            return None
        cut = batch.truncated if batch.truncated.dim() == 1 else (batch.truncated & batch.mask).any(1)
        value = torch.where(last_action(batch.mask), batch.next_value, batch.next_value.new_zeros(())).sum(1)
        return torch.where(cut, value, torch.zeros_like(value))[steps.traj]
