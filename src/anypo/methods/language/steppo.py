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
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.control.ppo import METHOD as PPO
from anypo.policy import Loss, Signals
from anypo.seams.credit import dense_reward, gae, last_action
from anypo.seams.objective import clipped, log_ratio, ratio_metrics
from anypo.seams.regularize import ValueLoss
from anypo.seams.select import UniformPrompts
from anypo.seams.update import GradientSteps

if TYPE_CHECKING:
    from anypo.run import Run

EPS = 1e-8
PerStep = Float[Tensor, " S"]


class StepEstimate(NamedTuple):
    advantage: Tensor  # [S], whitened when asked for
    returns: Tensor  # [S] value targets, never whitened


class StepLoss(NamedTuple):
    log_ratio: Tensor  # [S] mean token log-ratio of each step
    loss: Tensor  # scalar, differentiable in logp


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


def sum_by_step(values: Float[Tensor, "N T"], index: Int[Tensor, "N T"], steps: int) -> PerStep:
    """Sums over the tokens of each step."""
    inside = index >= 0
    return values.new_zeros(steps).index_add(0, index[inside], values[inside])


class Steps(NamedTuple):
    """The steps of a batch that the policy wrote at least one token of."""

    number: Tensor  # [N,T] number of the token's step, -1 outside the mask
    traj: Tensor  # [S] its row
    segment: Tensor  # [S] its segment
    order: Tensor  # [S] its number among the steps of the row, from 0
    start: Tensor  # [N,T] bool, the step's first token


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
