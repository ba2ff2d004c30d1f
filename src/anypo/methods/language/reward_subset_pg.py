"""Partial policy gradients: an action's credit is a chosen subset of the rewards after it (arXiv:2603.06138).

A policy gradient weighs each action with all rewards that follow. Here only a subset of them counts: the immediate one (greedy), the next K (K-step
lookahead), those to the end of the segment, or all (full planning, the baseline). A smaller subset is a policy that plans less, and its gradient
is less noisy, so it is learned from fewer samples; which one is best depends on how late actions are paid. The loss is REINFORCE. The classes are the
paper's; the baseline, a mean per step over the members of the group that are still going, is [reconstructed].

A step is a turn: the batch's `segment`; without segments an action where rewards are dense, else the whole row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.seams.credit import dense_reward
from anypo.seams.groups import group_mean, group_std, has_spread, leave_one_out_mean
from anypo.seams.objective import SequenceReinforce, sequence_reinforce
from anypo.seams.steps import spread as spread_inside

if TYPE_CHECKING:
    from anypo.run import Run

KINDS = ("full", "greedy", "kstep", "segment")
BASELINES = ("none", "group", "leave_one_out")
EPS = 1e-8


class PartialPG(NamedTuple):
    returns: Tensor  # [N,T]
    advantages: Tensor  # [N,T]
    loss: Tensor  # scalar, differentiable in logp


class Spread(NamedTuple):
    values: Tensor  # [N,T]


def subset(kind: str, horizon: int, k: int = 0, segment: Int[Tensor, "N T"] | None = None) -> Bool[Tensor, "*N T T"]:
    """Equations 1-2: which rewards (last axis) count for which action; never one before it. [T,T], for kind "segment" [N,T,T].

    `k` >= 1 rewards, the immediate one included, for kind "kstep". Raises ValueError for another kind, or when what it needs is missing.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown subset of rewards '{kind}'; use one of {', '.join(KINDS)}")
    place = torch.arange(horizon)
    ahead = place[None, :] - place[:, None]
    if kind == "segment":
        if segment is None:
            raise ValueError("the subset 'segment' needs the segment of every step")
        return (ahead >= 0) & (segment[:, :, None] == segment[:, None, :])
    if kind == "kstep" and k < 1:
        raise ValueError(f"a K-step policy counts 1 reward or more, not {k}; set k")
    reach = {"full": horizon, "greedy": 1, "kstep": k}[kind]
    return (ahead >= 0) & (ahead < reach)


def returns(
    reward: Float[Tensor, "N T"], mask: Tensor, kind: str = "full", k: int = 0, segment: Int[Tensor, "N T"] | None = None
) -> Float[Tensor, "N T"]:
    """Equation 1: the sum of the rewards that count for each action; 0 outside the mask, whose rewards count for nobody."""
    inside = mask.bool()
    paid = torch.where(inside, reward, torch.zeros_like(reward))
    total = (subset(kind, reward.shape[1], k, segment).to(paid) @ paid[..., None])[..., 0]
    return torch.where(inside, total, torch.zeros_like(total))


def step_advantages(
    values: Float[Tensor, "N T"], mask: Tensor, group: Int[Tensor, " N"], baseline: str = "group", scale: str = "none"
) -> Float[Tensor, "N T"]:
    """Equation 4: minus a baseline of the same step over the members still going ("group": their mean, "leave_one_out": that of the others, "none"),
    with scale "std" over their population std + 1e-8. 0 outside the mask, without spread, and for a lone member unless the baseline is none."""
    if baseline not in BASELINES or scale not in ("none", "std"):
        raise ValueError(f"baseline is one of {', '.join(BASELINES)} and scale none or std, not '{baseline}' and '{scale}'")
    inside = mask.bool()
    _, index = torch.unique(group, return_inverse=True)
    step = (index[:, None] * mask.shape[1] + torch.arange(mask.shape[1]))[inside]  # a number for each (group, step)
    alive = values[inside]
    centred = alive
    if baseline != "none":
        centred = alive - (group_mean if baseline == "group" else leave_one_out_mean)(alive, step)
        centred = torch.where(has_spread(alive, step), centred, torch.zeros_like(alive))  # exactly, whatever the mean was rounded to
    if scale == "std":
        deviation = group_std(alive, step)
        centred = torch.where(deviation == 0, torch.zeros_like(alive), centred / (deviation + EPS))
    return torch.zeros_like(values).masked_scatter(inside, centred)


def partial_pg(
    reward: Float[Tensor, "N T"], mask: Tensor, group: Int[Tensor, " N"], segment: Int[Tensor, "N T"] | None, logp: Float[Tensor, "N T"],
    kind: str = "full", k: int = 0, baseline: str = "group", scale: str = "none",
) -> PartialPG:  # fmt: skip
    """Equations 1-4, one column a step: loss = minus the mean over rows with a step of sum_t A_t logp_t. Advantages are constants."""
    total = returns(reward, mask, kind, k, segment).detach()
    advantage = step_advantages(total, mask, group, baseline, scale)
    return PartialPG(total, advantage, sequence_reinforce(logp, mask, advantage))


def spread(turn_values: Float[Tensor, "N M"], segment: Int[Tensor, "N T"]) -> Spread:
    """Equation 5: a turn's value at each of its tokens; 0 at tokens of no turn (-1)."""
    return Spread(spread_inside(turn_values, segment, segment >= 0))


class Turns(NamedTuple):
    of_token: Tensor  # [N,T] int64, turn of each token, -1 for none
    reward: Tensor  # [N,M]
    alive: Tensor  # [N,M] bool, turns that took place


def turns_of(batch: Batch, weights: tuple[float, ...] | None = None) -> Turns:
    """The turns of a batch and their rewards: the signal `turn_reward` [N,M] where the task gives it, else the rewards paid at their tokens."""
    everywhere = torch.zeros_like(batch.mask, dtype=torch.int64)
    if batch.segment is not None:
        index = batch.segment
    else:
        index = everywhere + torch.arange(batch.horizon) if batch.reward_is_dense else everywhere
    index = torch.where(batch.attended, index, -1)
    last = index.amax(1) if batch.horizon else torch.full((len(batch),), -1)
    if "turn_reward" in batch.signals:
        reward = batch.signals["turn_reward"]
        count = torch.maximum(last + 1, batch.signals["turns"]) if "turns" in batch.signals else last + 1
    else:
        paid = torch.where(index >= 0, dense_reward(batch, weights), 0.0)
        reward = paid.new_zeros(len(batch), max(1, int(last.max()) + 1)).scatter_add(1, index.clamp(min=0), paid)
        count = last + 1
    return Turns(index, reward, torch.arange(reward.shape[1]) < count[:, None])


@dataclass
class PartialReturn:
    """Every turn's subset of later rewards, relative to the same turn of the group's other rows, at all tokens of the turn."""

    kind: str = "kstep"  # full, greedy, kstep or segment
    k: int = 3  # >= 1, rewards that count under kstep, the immediate one included
    segment_turns: int = 4  # >= 1, turns of a segment under kind segment
    baseline: str = "group"  # group, leave_one_out or none
    scale: str = "none"  # or std, of the group at the turn
    weights: tuple[float, ...] | None = None  # of the K rewards; None = all 1

    compares_group = True

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        if self.segment_turns < 1:
            raise ValueError(f"credit.segment_turns must be 1 or more, not {self.segment_turns}")
        turns = turns_of(batch, self.weights)
        segment = (torch.arange(turns.reward.shape[1]) // self.segment_turns).expand(turns.reward.shape)
        total = returns(turns.reward, turns.alive, self.kind, self.k, segment)
        advantage = step_advantages(total, turns.alive, batch.group, self.baseline, self.scale)
        run.log(partial_return=float(total[turns.alive].double().mean()) if bool(turns.alive.any()) else 0.0)
        return spread_inside(advantage, turns.of_token, batch.mask)


METHOD = GRPO.but(
    name="reward_subset_pg",
    paper=Paper("Partial Policy Gradients for RL in LLMs", "2603.06138", 2026),
    summary="the next three rewards, not all that follow, are an action's credit; also greedy, by segment, and in full",
    credit=PartialReturn(),
    objective=SequenceReinforce(),
    regularize=(),
)

VARIANTS = {
    "full": METHOD.but(name="reward_subset_pg.full", summary="all later rewards count", credit=PartialReturn(kind="full")),
    "greedy": METHOD.but(name="reward_subset_pg.greedy", summary="the immediate reward alone counts", credit=PartialReturn(kind="greedy")),
    "segment": METHOD.but(
        name="reward_subset_pg.segment", summary="rewards to the segment's end count", credit=PartialReturn(kind="segment")
    ),
}
