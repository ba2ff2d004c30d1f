"""Mu-GRPO: stale staged GRPO with a relaxed clip and a negative-advantage veto (arXiv:2605.17570).

GRPO switches between writing and learning at every step. Mu-GRPO does it a few times in a run: in each stage one frozen policy writes all the
responses, however far the trained policy has moved since. A tight clip then zeroes most gradients and a wide one lets harm through: once a token's
ratio has left a band, the rest of the response is no longer what the current policy would go on with, and pushing a bad one down further
destabilizes. So the clip is relaxed, and of responses with a negative advantage the part after the first such token is vetoed. Against GRPO it
changes rollout and objective (token mean, no KL). Mechanisms from the abstract and digests; the thresholds, the two-sided trigger and the
denominator of equation 4 are [reconstructed]. Left out: writing a stage's pool at once and several passes over it. Piece by piece its responses come
from the same frozen policy, and nothing needs to be stored; the time saved by switching seldom is a matter of separate engines (`speedup`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.policy import Loss, Signals
from anypo.seams.groups import broadcast, masked_mean
from anypo.seams.objective import aggregate, clipped, ratio_metrics, token_ratio
from anypo.seams.rollout import BEHAVIOUR
from anypo.task import Prompt

if TYPE_CHECKING:
    from anypo.run import Run


class Veto(NamedTuple):
    trigger: Tensor  # [N] int64, position of the first token of a negative row whose ratio left the band, -1 for none
    veto: Tensor  # [N,T] of 0/1, 0 for the vetoed tokens; of logp's type


class LossValue(NamedTuple):
    loss: Tensor  # scalar, differentiable in logp


@torch.no_grad()
def veto(
    logp: Float[Tensor, "N T"], old_logp: Float[Tensor, "N T"], mask: Tensor, advantages: Tensor, v_low: float = 0.5, v_high: float = 2.0
) -> Veto:
    """Equations 2-3, detached: tokens of negative advantage strictly after the trigger get 0. `advantages` [N] or [N,T].

    The trigger is the row's first token within the mask that has a negative advantage and a ratio outside [v_low, v_high].
    """
    negative = (advantages[:, None] if advantages.dim() == 1 else advantages).expand_as(logp) < 0
    ratio = token_ratio(logp, old_logp, mask)
    left = mask.bool() & negative & ((ratio > v_high) | (ratio < v_low))
    after = left.cumsum(1) - left.long() > 0  # some earlier token has left
    trigger = torch.where(left.any(1), left.long().argmax(1), -1)
    return Veto(trigger, (~(after & negative)).to(logp.dtype))


def loss(
    logp: Float[Tensor, "N T"], old_logp: Float[Tensor, "N T"], mask: Tensor, advantages: Tensor, clip_low: float = 0.5, clip_high: float = 2.0,
    v_low: float = 0.5, v_high: float = 2.0,
) -> LossValue:  # fmt: skip
    """Equations 1-5: the token mean of the surrogate clipped at [1 - clip_low, 1 + clip_high], vetoed tokens contributing 0. `old_logp` is that of
    the policy that wrote the response; `advantages` [N] or [N,T]."""
    advantage = broadcast(advantages, mask) if advantages.dim() == 1 else advantages
    value = clipped(token_ratio(logp, old_logp, mask), advantage, 1 - clip_low, 1 + clip_high)
    return LossValue(aggregate(-value * veto(logp, old_logp, mask, advantage, v_low, v_high).veto, mask, "token_mean"))


def speedup(steps: int, phases: int, switching: float = 0.5) -> float:
    """Equation 6: how many times faster a run of `steps` is with `phases` generation phases instead of one a step, where switching takes the share
    `switching` in [0,1] of the standard run's time and generating and learning take the same in both."""
    return 1 / (1 - switching + switching * phases / steps)


@dataclass
class StagedRollout:
    """Trajectories of a copy of the policy that is renewed at the beginning of each of a run's equal stages (shares of its steps, or of its action
    budget); each batch keeps the log-probs of the copy that wrote it."""

    stages: int = 4  # generation phases in the run, >= 1; as many as steps = on-policy
    stage: int = field(default=-1, init=False, repr=False)  # whose policy the copy holds, -1 before the first
    synced: int = field(default=0, init=False, repr=False)  # version of the policy that the copy holds

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        if self.stages < 1:
            raise ValueError(f"rollout.stages must be at least 1, not {self.stages}")
        stage = min(int(run.progress * self.stages + 1e-9), self.stages - 1)
        if stage != self.stage:
            run.move_policy(BEHAVIOUR)
            self.stage, self.synced = stage, run.version
        batch = run.collect(prompts, BEHAVIOUR)
        batch.version = torch.full((len(batch),), self.synced)
        run.log(stage=stage, lag=run.version - self.synced)
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"stage": self.stage, "synced": self.synced}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stage, self.synced = state["stage"], state["synced"]


@dataclass
class VetoedSurrogate:
    """The relaxed clipped surrogate without the suffixes of bad responses that the current policy would no longer write."""

    clip_low: float = 0.5  # the ratio may fall to 1 - clip_low, in [0,1]
    clip_high: float = 2.0  # and rise to 1 + clip_high, >= 0
    veto_low: float = 0.5  # a ratio below triggers the veto, in [0,1]; 0 = never
    veto_high: float = 2.0  # a ratio above triggers it, >= 1; inf = never

    needs = frozenset({"logp"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        mask, advantage = batch.counted, batch.advantage
        value = loss(new.logp, batch.logp, mask, advantage, self.clip_low, self.clip_high, self.veto_low, self.veto_high).loss
        kept = veto(new.logp, batch.logp, mask, advantage, self.veto_low, self.veto_high).veto
        ratio = token_ratio(new.logp.detach(), batch.logp, mask)
        metrics = ratio_metrics(ratio, 1 - self.clip_low, 1 + self.clip_high, mask)
        return Loss(value, metrics | {"vetoed": float(masked_mean(1 - kept, mask))})


METHOD = GRPO.but(
    name="mu_grpo",
    paper=Paper("How Off-Policy Can GRPO Be? Mu-GRPO for Efficient LLM Reinforcement Learning", "2605.17570", 2026),
    summary="a few stages, each written by one frozen policy; a relaxed clip, and no push on what follows a drifted token of a bad response",
    rollout=StagedRollout(),
    objective=VetoedSurrogate(),
    regularize=(),
)
