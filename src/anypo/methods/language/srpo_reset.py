"""SRPO and RRPO: self-reset and random-reset policy optimization (arXiv:2605.25507).

GRPO copies one outcome to every token. Here a failed response of each group is cut at one of its reasoning steps and M new endings are drawn from
the state before that step. They share all that came before, so differences of their rewards are due to what they did after the reset, and the
group-relative advantage reaches their own tokens alone. RRPO (`rollout.mode=random`) resets at a uniformly drawn step; SRPO asks the policy itself
which step is the first wrong one. Equations 1-10 are those of the row's specification: which failed response is taken, the fallback to a random
step and whether the first responses are trained as well are [reconstructed]; so is the form of the analysis by conservative policy iteration.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.language.review import AskPolicy
from anypo.method import Paper, Rollout
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.seams.credit import group_relative
from anypo.seams.groups import broadcast
from anypo.seams.reward import row_reward
from anypo.seams.rollout import OnPolicy, as_roots, continue_rows, step_starts, steps_of
from anypo.seams.select import UniformPrompts
from anypo.task import Prompt

if TYPE_CHECKING:
    from anypo.run import Run

Localizer = Callable[[Batch, Tensor, Tensor, "Run"], Tensor]  # (batch, rows [M], steps [N,T], run) -> first wrong step [M], -1 = no answer


def choose_failed(reward: Float[Tensor, " N"], group: Int[Tensor, " N"], u: Float[Tensor, " G"]) -> Int[Tensor, " G"]:
    """Equation 1: a failed member (reward <= 0) of every group, by its `u` in [0,1); -1 where none failed. Groups in ascending order."""
    _, index = torch.unique(group, return_inverse=True)
    failed = (index[None] == torch.arange(len(u))[:, None]) & (reward <= 0)[None]  # [G,N]
    count = failed.sum(1)
    wanted = torch.minimum((u * count).floor().long(), count - 1)
    chosen = failed & (failed.cumsum(1) - 1 == wanted[:, None])
    return torch.where(count > 0, chosen.long().argmax(1), -1)


def reset_step(u: Float[Tensor, " G"], steps: Int[Tensor, " G"], localized: Int[Tensor, " G"], mode: str = "self") -> Int[Tensor, " G"]:
    """Equation 2: the step (from 0) to draw anew, of `steps` >= 1: uniform by `u` in [0,1), or with mode "self" the localized one where that is
    one of them. Raises ValueError for another mode."""
    if mode not in ("self", "random"):
        raise ValueError(f"the reset mode is self or random, not '{mode}'")
    uniform = torch.minimum((u * steps).floor().long(), steps - 1)
    return torch.where((localized >= 0) & (localized < steps), localized, uniform) if mode == "self" else uniform


def suffix_mask(segment: Int[Tensor, "N T"], mask: Tensor, reset_step: Int[Tensor, " N"]) -> Bool[Tensor, "N T"]:
    """Equation 5: the policy's actions at or after the reset step."""
    return mask.bool() & (segment >= reset_step[:, None])


def advantages(
    reward: Float[Tensor, " N"], group: Int[Tensor, " N"], segment: Int[Tensor, "N T"], mask: Tensor, reset_step: Int[Tensor, " N"], eps: float = 1e-6
) -> Float[Tensor, "N T"]:  # fmt: skip
    """Equations 4-5: relative to the endings of the same reset state (one group each), population std; 0 on the shared beginning."""
    return broadcast(group_relative(reward, group, eps=eps), suffix_mask(segment, mask, reset_step))


class Signal(NamedTuple):
    """What resets of a chain of K steps tell."""

    success: Tensor  # [K] of an ending drawn from step k
    mixed: Tensor  # [K] probability that a group of endings is neither all right nor all wrong
    random_reset: Tensor  # mean of `mixed` over the steps
    self_reset: Tensor  # `mixed` at the first error


def suffix_signal(p: Float[Tensor, " K"], first_error: int, m: int) -> Signal:
    """Equation 10 for step successes `p`, the first wrong step of the failed chain and groups of `m` endings."""
    reachable = torch.arange(len(p)) <= first_error
    success = torch.where(reachable, p.flip(0).cumprod(0).flip(0), torch.zeros_like(p))
    mixed = 1 - success**m - (1 - success) ** m
    return Signal(success, mixed, mixed.mean(), mixed[first_error])


class Improvement(NamedTuple):
    """Conservative policy iteration from random reset states and from those an oracle picks."""

    max_advantage: Tensor  # [S] best(s), scaled by 1 - gamma
    visitation: Tensor  # [S] d(s)
    coverage: Tensor  # probability under d that best(s) > tau
    adv_random: Tensor
    adv_oracle: Tensor
    alpha_random: Tensor
    alpha_oracle: Tensor


def cpi(
    P: Float[Tensor, "S A S"], R: Float[Tensor, "S A"], pi: Float[Tensor, "S A"], mu: Float[Tensor, " S"], gamma: float = 0.9, tau: float = 0.01
) -> Improvement:  # fmt: skip
    """Equations 7-9, exact. The step size alpha rests on B, the mean of best(s) over all of d: the oracle's mean counts with its coverage."""
    transition = torch.einsum("sa,sat->st", pi, P)
    resolvent = torch.eye(len(mu), dtype=P.dtype) - gamma * transition
    value = torch.linalg.solve(resolvent, (pi * R).sum(1))
    best = (1 - gamma) * ((R + gamma * P @ value).amax(1) - value)
    visitation = (1 - gamma) * torch.linalg.solve(resolvent.T, mu)
    improvable = best > tau
    coverage = visitation[improvable].sum()
    gained = (visitation * best)[improvable].sum()
    adv_random = visitation @ best
    adv_oracle = torch.where(coverage > 0, gained / coverage, torch.zeros_like(gained))
    scale = (1 - gamma) / (4 * R.max())
    return Improvement(best, visitation, coverage, adv_random, adv_oracle, scale * adv_random, scale * coverage * adv_oracle)


@dataclass
class ResetRollout:
    """A failed response of every group is cut at a step, and `endings` new ones are drawn from there; they form a group of their own.

    Signals: `reset_step` [N], 0 for the first responses. `keep` is the suffix, so that the shared beginning is context only.
    """

    mode: str = "self"  # self: the step the localizer names; random: uniform
    endings: int = 8  # M, new endings of a reset state, >= 1
    include_base: bool = True  # train the first responses too, as GRPO does; False: only the resets' groups
    step_size: int = 1  # actions a step, >= 1, where neither the task nor line breaks divide a response
    localizer: Localizer = field(default_factory=AskPolicy)
    inner: Rollout = field(default_factory=OnPolicy)

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        batch = as_roots(self.inner(prompts, run))
        batch.segment = steps_of(batch, run, self.step_size)
        batch.signals["reset_step"] = torch.zeros_like(batch.group)
        batch.keep = batch.mask if self.include_base else torch.zeros_like(batch.mask)
        batch.reward = run.score_rewards(batch)
        draws = torch.rand(2, len(torch.unique(batch.group)), generator=run.generator, dtype=torch.float64)
        rows = choose_failed(batch.outcome, batch.group, draws[0])
        rows, u = rows[rows >= 0], draws[1][rows >= 0]
        written = batch.lengths[rows] > 0
        rows, u = rows[written], u[written]
        run.log(resets=len(rows))
        if len(rows) == 0:
            return batch
        endings = self.reset(batch, rows, u, run)
        endings.reward = run.score_rewards(endings)
        return Batch.concat([batch, endings])

    def reset(self, batch: Batch, rows: Tensor, u: Tensor, run: Run) -> Batch:
        """The new endings of the failed rows [M]."""
        assert batch.segment is not None
        count = batch.segment[rows].amax(1) + 1
        nowhere = torch.full_like(rows, -1)
        step = reset_step(u, count, self.localizer(batch, rows, batch.segment, run) if self.mode == "self" else nowhere, self.mode)
        depth = (step_starts(batch.segment[rows]) & (batch.segment[rows] == step[:, None])).long().argmax(1)
        copies = torch.arange(len(rows)).repeat_interleave(self.endings)
        endings = continue_rows(batch, rows[copies], depth[copies], run)
        own, place = steps_of(endings, run, self.step_size), torch.arange(endings.horizon)
        first = own.gather(1, depth[copies][:, None])  # the reset step's number, counted in lines or blocks as the new endings suggest
        endings.segment = torch.where(
            place < depth[copies][:, None], own.clamp(max=step[copies][:, None] - 1), own - first + step[copies][:, None]
        )
        endings.segment = torch.where(own >= 0, endings.segment, -1)
        endings.signals["reset_step"] = step[copies]
        endings.keep = suffix_mask(endings.segment, endings.mask, step[copies])
        endings.group = int(batch.group.max()) + 1 + copies
        return endings


@dataclass
class SuffixRelative:
    """Reward relative to the endings of the same reset state, on the actions after the reset alone."""

    eps: float = 1e-6  # > 0, added to the standard deviation
    weights: tuple[float, ...] | None = None  # of the K rewards before they are compared; None = all 1

    compares_group = True

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        reward = row_reward(batch, self.weights)
        step = batch.signals.get("reset_step", torch.zeros_like(batch.group))
        segment = batch.segment if batch.segment is not None else torch.zeros_like(batch.mask, dtype=torch.int64)
        return advantages(reward, batch.group, segment, batch.mask, step, self.eps)


METHOD = GRPO.but(
    name="srpo_reset",
    paper=Paper("Credit Assignment with Resets in Language Model Reasoning", "2605.25507", 2026),
    summary="failed responses are cut at the step the policy itself calls wrong; new endings from there are compared with one another",
    select=UniformPrompts(group_size=8),
    rollout=ResetRollout(),
    credit=SuffixRelative(),
    regularize=(),
)
RRPO = METHOD.but(name="srpo_reset.random", summary="the cut at a random step instead").set("rollout.mode", "random")

VARIANTS = {"random": RRPO}
