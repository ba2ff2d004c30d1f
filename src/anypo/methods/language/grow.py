"""GROW: group advantages between state-action samples, for open-world agents (arXiv:2605.20246).

GRPO trains an agent on whole trajectories: the context grows with every turn. GROW cuts the trajectories of a task into samples, one environment
step each, whose context is the present observation, and compares the samples of a task with one another. Against GRPO it changes the credit and the
objective; every sample has the same weight. The decomposition is the paper's, all formulas are [reconstructed]. A group is the prompt (the task's
text), its instances differing. A sample is a turn (`segment`); without turns a row is one. What a sample's log-prob depends on is the policy's
business: one that is `memoryless` reads the present observation alone. Left out: cutting the history of text conversations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.policy import Loss, Signals
from anypo.seams.groups import standardize
from anypo.seams.objective import aggregate, clipped, log_ratio, ratio_metrics, token_ratio
from anypo.seams.regularize import KLPenalty
from anypo.seams.reward import row_reward
from anypo.seams.steps import Steps, steps_of, sum_by_step
from anypo.seams.update import GradientSteps

if TYPE_CHECKING:
    from anypo.run import Run

PerSample = Float[Tensor, "N T"]  # T samples a trajectory, padded
RATIOS = ("action", "token")


def decompose(mask: Tensor, group: Int[Tensor, " N"]) -> list[list[int]]:
    """Equation 1: [trajectory, step, group] of every sample, in order."""
    row, step = mask.bool().nonzero(as_tuple=True)
    return torch.stack([row, step, group[row].long()], dim=1).tolist()


def sample_rewards(reward: Float[Tensor, " N"], mask: Tensor, format_ok: Tensor, gamma: float = 1.0, w_format: float = 0.1) -> PerSample:
    """Equation 2: the trajectory's outcome, discounted by the samples still to come, plus `w_format` where the action parses. 0 outside the mask."""
    inside = mask.bool()
    to_come = inside.sum(1, keepdim=True) - inside.cumsum(1)
    return torch.where(inside, reward[:, None] * gamma ** to_come.to(reward) + w_format * format_ok.to(reward), reward.new_zeros(()))


def advantages(sample_reward: PerSample, mask: Tensor, group: Int[Tensor, " N"], eps: float = 1e-6) -> PerSample:
    """Equation 3: relative to all samples of the group, population std; a longer trajectory has more of them. Lone samples have 0."""
    inside = mask.bool()
    found = standardize(sample_reward[inside], group[:, None].expand_as(inside)[inside], ddof=0, eps=eps)
    return torch.zeros_like(sample_reward).masked_scatter(inside, found)


def subsample(mask: Tensor, group: Int[Tensor, " N"], u: PerSample, budget: int) -> Float[Tensor, "N T"]:
    """Equation 5: 1 for the `budget` samples of every group with the smallest draws `u`, else 0."""
    inside = mask.bool()
    own, draw = group[:, None].expand_as(inside)[inside], u[inside]
    order = draw.argsort(stable=True)
    order = order[own[order].argsort(stable=True)]  # by group, by draw inside it
    place = torch.arange(len(order)) - torch.searchsorted(own[order], own[order])
    kept = torch.zeros_like(draw).index_copy(0, order, (place < budget).to(draw))
    return torch.zeros_like(u).masked_scatter(inside, kept)


def loss(logp: PerSample, old_logp: PerSample, advantages: PerSample, mask: Tensor, clip: float = 0.2) -> Tensor:
    """Equation 6 without the KL, where an action is one number: the mean over samples of the clipped surrogate, to minimize."""
    ratio = token_ratio(logp, old_logp, mask)
    return aggregate(-clipped(ratio, advantages, 1 - clip, 1 + clip), mask, "token_mean")


def by_turn(values: Tensor, steps: Steps, rows: int) -> PerSample:
    """Numbers of samples [S] as a table [N,K], K the most samples of a row; 0 where there is none."""
    width = int(steps.order.max()) + 1 if len(steps.order) else 0
    return values.new_zeros(rows, width).index_put((steps.traj, steps.order), values)


@dataclass
class SampleGroups:
    """Advantages between the samples of a group, given to all tokens of a sample.

    `format_ok` [N,T], a signal that some tasks give (1 where the action parses), is averaged over a sample's tokens; without it no sample is told
    from another by its format.
    """

    gamma: float = 1.0  # discount a sample, in [0,1]
    format_weight: float = 0.1  # of a parsed action, >= 0
    eps: float = 1e-6  # > 0, added to the standard deviation
    budget: int | None = None  # samples a group that are trained, >= 1, drawn after the comparison; None = all
    by_task: bool = True  # False: all samples of the batch are one group
    weights: tuple[float, ...] | None = None  # of the K rewards; None = all 1

    compares_group = True

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        if self.budget is not None and self.budget < 1:
            raise ValueError(f"credit.budget must be at least 1 sample a group, not {self.budget}")
        steps = steps_of(batch, batch.mask)
        reward = row_reward(batch, self.weights)
        group = batch.group if self.by_task else torch.zeros_like(batch.group)
        exists = by_turn(torch.ones(len(steps.traj), dtype=reward.dtype), steps, len(batch))
        fine = exists
        if "format_ok" in batch.signals:
            count = sum_by_step(batch.mask.to(reward), steps.number, len(steps.traj))
            fine = by_turn(sum_by_step(batch.signals["format_ok"].to(reward), steps.number, len(steps.traj)) / count, steps, len(batch))
        value = advantages(sample_rewards(reward, exists, fine, self.gamma, self.format_weight), exists, group, self.eps)
        if self.budget is not None:
            draw = torch.rand(exists.shape, generator=run.generator, dtype=reward.dtype)
            batch.keep = self.at_tokens(subsample(exists, group, draw, self.budget), steps) > 0
        return self.at_tokens(value, steps).to(batch.logp.dtype)

    def at_tokens(self, table: PerSample, steps: Steps) -> Float[Tensor, "N T"]:
        """A sample's number at each of its tokens; 0 elsewhere."""
        if not len(steps.traj):
            return table.new_zeros(steps.number.shape)
        found = table[steps.traj, steps.order][steps.number.clamp(min=0)]
        return torch.where(steps.number >= 0, found, table.new_zeros(()))


@dataclass
class SampleSurrogate:
    """The clipped surrogate of every sample, all samples counting alike. A sample's advantage is the mean over its tokens."""

    clip: float = 0.2  # the ratio stays within 1 - clip .. 1 + clip, in [0,1]
    ratio: str = "action"  # of all tokens of a sample together, or "token": one ratio a token, averaged over the sample

    needs = frozenset({"logp"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        if self.ratio not in RATIOS:
            raise ValueError(f"objective.ratio is action or token, not '{self.ratio}'")
        mask = batch.counted
        steps = steps_of(batch, mask)
        count, low, high = len(steps.traj), 1 - self.clip, 1 + self.clip
        size = sum_by_step(mask.to(new.logp), steps.number, count)
        if self.ratio == "token":
            ratio = token_ratio(new.logp, batch.logp, mask)
            value = sum_by_step(clipped(ratio, batch.advantage.to(ratio), low, high), steps.number, count) / size
        else:
            ratio = sum_by_step(log_ratio(new.logp, batch.logp, mask), steps.number, count).clamp(-20, 20).exp()
            value = clipped(ratio, sum_by_step(batch.advantage.to(ratio), steps.number, count) / size, low, high)
        inside = mask if self.ratio == "token" else torch.ones_like(ratio, dtype=torch.bool)
        return Loss(-value.sum() / max(count, 1), ratio_metrics(ratio, low, high, inside))


METHOD = GRPO.but(
    name="grow",
    paper=Paper("GROW: state-action-sample group advantages for open-world agents", "2605.20246", 2026),
    summary="trajectories are cut into state-action samples of short context, compared with all samples of their task",
    credit=SampleGroups(),
    objective=SampleSurrogate(),
    regularize=(KLPenalty(beta=0.01, aggregation="token_mean"),),
    update=GradientSteps(minibatches=4),
    task="errands",
)
