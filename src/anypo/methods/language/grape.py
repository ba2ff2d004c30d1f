"""GRAPE: generalized relative advantage policy evolution, and the ladder below it from SFT to DPO (arXiv:2509.04501).

A from-scratch account of instruction tuning, ending in a proposal. Answers are judged by several rubric items (the task's named rewards, each in
[0,1]); one that fails an item is critiqued and written again with the critique in the prompt; the advantage compares confidence-weighted scores with
the mean of the first answers, and revisions are trained as answers to the plain prompt. Against GRPO it changes the rollout, the credit and the
objective. The rungs are `VARIANTS`: sft (on all own samples), rejection, reinforce, dpo; trpo, ppo and grpo are rows of their own. Equations 1-5
are standard, 6-10 (all of GRAPE) [reconstructed]. Left out: judges that are models (a signal `confidence` [N,K] may come from one).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid

from anypo.batch import Batch
from anypo.domains.language.critique import CritiqueAndRevise
from anypo.method import Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.methods.language.grpo import LossValue
from anypo.policy import Loss, Signals
from anypo.seams.credit import GroupRelative
from anypo.seams.groups import broadcast, group_mean, group_std, group_sum, leave_one_out_mean
from anypo.seams.objective import SequenceReinforce, aggregate, clipped, log_ratio, ratio_metrics, token_ratio
from anypo.seams.regression import preference_margin, row_advantage
from anypo.seams.reward import objectives, row_reward
from anypo.seams.update import GradientSteps

if TYPE_CHECKING:
    from anypo.run import Run

EPS = 1e-8
REDUCTIONS = {"token": "token_mean", "sequence": "seq_mean"}
BASELINES = ("none", "group_mean", "leave_one_out")
PerToken = Float[Tensor, "N T"]
PerRow = Float[Tensor, " N"]


@dataclass(frozen=True)
class Selected:
    index: Tensor  # rows in ascending order


class Reinforce(NamedTuple):
    loss: Tensor  # scalar, differentiable in logp
    advantages: Tensor  # [N]


class Preference(NamedTuple):
    loss: Tensor  # scalar, differentiable in logp
    margin: Tensor  # [P]
    grad_weight: Tensor  # [P] slope of a pair's loss in the log-prob of its better row


class Grape(NamedTuple):
    score: Tensor  # [N]
    advantages: Tensor  # [N]
    correction: Tensor  # [N,T], 0 outside the mask
    loss: Tensor  # scalar, differentiable in logp


def sft_loss(logp: PerToken, mask: Tensor, reduce: str = "token") -> LossValue:
    """Equation 1: minus the mean log-prob over tokens, or over rows of their means. Raises ValueError for another `reduce`."""
    if reduce not in REDUCTIONS:
        raise ValueError(f"reduce is token or sequence, not '{reduce}'")
    return LossValue(aggregate(-logp, mask, REDUCTIONS[reduce]))


def selected(reward: PerRow, group: Int[Tensor, " N"], keep: int = 2, threshold: float = -torch.inf) -> Selected:
    """Equation 2: the `keep` best rows of every group among those of at least `threshold`; the earlier of equals first."""
    order = reward.argsort(descending=True, stable=True)
    order = order[group[order].argsort(stable=True)]  # by group, best first
    place = torch.arange(len(order)) - torch.searchsorted(group[order], group[order])
    return Selected(order[(place < keep) & (reward[order] >= threshold)].sort().values)


def baselined(reward: PerRow, group: Int[Tensor, " N"], baseline: str = "leave_one_out") -> PerRow:
    """Reward less its baseline; with "leave_one_out" a lone row has 0. Raises ValueError for another name."""
    if baseline == "none":
        return reward
    if baseline == "group_mean":
        return reward - group_mean(reward, group)
    if baseline == "leave_one_out":
        return reward - leave_one_out_mean(reward, group)
    raise ValueError(f"unknown baseline '{baseline}'; use one of {', '.join(BASELINES)}")


def reinforce_loss(logp: PerToken, mask: Tensor, reward: PerRow, group: Int[Tensor, " N"], baseline: str = "leave_one_out") -> Reinforce:
    """Equation 3: minus the mean over all rows of the advantage times the row's log-prob, a sum over its tokens."""
    value = baselined(reward, group, baseline).detach()
    total = torch.where(mask.bool(), logp, torch.zeros_like(logp)).sum(1)
    return Reinforce(-(value * total).sum() / max(len(value), 1), value)


def dpo_loss(logp: PerToken, ref_logp: PerToken, mask: Tensor, pairs: Int[Tensor, "P 2"], beta: float = 0.1) -> Preference:
    """Equation 5 for pairs (better, worse) of rows; log-probs are summed over tokens. No pairs: 0."""
    margin = preference_margin(logp, ref_logp, mask, pairs, beta)
    return Preference(-logsigmoid(margin).sum() / max(len(pairs), 1), margin, -beta * torch.sigmoid(-margin.detach()))


def rubric_score(rubric_scores: Float[Tensor, "N K"], rubric_weight: Float[Tensor, " K"], confidence: Tensor) -> PerRow:
    """Equation 6: the mean of a row's items, weighted by weight times confidence ([N,K] or [N,1]); 0 where nothing weighs."""
    weight = rubric_weight * confidence.expand_as(rubric_scores)
    total = weight.sum(1)
    return torch.where(total > 0, (weight * rubric_scores).sum(1) / torch.where(total > 0, total, 1), 0)


def evolution_advantages(score: PerRow, trust: PerRow, group: Int[Tensor, " N"], origin: Int[Tensor, " N"]) -> PerRow:
    """Equation 8: relative to the mean of the group's first answers (origin 0; of the whole group where it has none), over its population std, times
    the mean confidence `trust`. Exactly 0 in groups of equal scores."""
    first = (origin == 0).to(score)
    count = group_sum(first, group)
    centre = torch.where(count > 0, group_sum(first * score, group) / count.clamp(min=1), group_mean(score, group))
    spread = group_std(score, group)
    return torch.where(spread > 0, trust * (score - centre) / (spread + EPS), 0)


def corrections(old_logp: PerToken, gen_logp: PerToken, origin: Int[Tensor, " N"], mask: Tensor, cap: float = 2.0) -> PerToken:
    """Equation 9: min(plain prompt's probability over the critique's, cap) at the tokens of revisions, 1 at those of first answers."""
    ratio = log_ratio(old_logp, gen_logp, mask).exp().clamp(max=cap)
    return torch.where(mask.bool(), torch.where(origin[:, None] == 1, ratio, 1), 0).detach()


def evolution_loss(
    logp: PerToken, old_logp: PerToken, advantages: PerToken, correction: PerToken, mask: Tensor, clip: float = 0.2
) -> Tensor:
    """Equation 10: the corrected clipped surrogate, a mean over rows of their means over tokens."""
    return aggregate(-correction * clipped(token_ratio(logp, old_logp, mask), advantages, 1 - clip, 1 + clip), mask, "seq_mean")


def grape(
    rubric_scores: Float[Tensor, "N K"], rubric_weight: Float[Tensor, " K"], confidence: Tensor, group: Int[Tensor, " N"],
    origin: Int[Tensor, " N"], logp: PerToken, old_logp: PerToken, gen_logp: PerToken, mask: Tensor, clip: float = 0.2, cap: float = 2.0,
) -> Grape:  # fmt: skip
    """Equations 6-10."""
    score = rubric_score(rubric_scores, rubric_weight, confidence)
    value = evolution_advantages(score, confidence.mean(1), group, origin)
    correction = corrections(old_logp, gen_logp, origin, mask, cap)
    return Grape(score, value, correction, evolution_loss(logp, old_logp, broadcast(value, mask), correction, mask, clip))


@dataclass
class RubricRelative:
    """Equations 6 and 8. The rubric items are the task's rewards; `confidence` [N,K] or [N,1] and `origin` [N] are signals, 1 and 0 where missing."""

    weights: tuple[float, ...] | None = None  # of the K items, >= 0; None = all 1
    confidence: float = 1.0  # of a judge that does not say, in [0,1]; 1 for rules, 0.5-0.9 for learned ones

    compares_group = True

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        items = objectives(batch)
        weights = self.weights or (1.0,) * items.shape[1]
        if len(weights) != items.shape[1]:
            raise ValueError(f"credit.weights has {len(weights)} numbers, but the task has {items.shape[1]} rubric items")
        trust = batch.signals.get("confidence", torch.full_like(items, self.confidence)).to(items)
        score = rubric_score(items, items.new_tensor(weights), trust)
        origin = batch.signals.get("origin", torch.zeros_like(batch.group))
        run.log(score=float(score[origin == 0].mean()), revised=float((origin == 1).double().mean()))
        return broadcast(evolution_advantages(score, trust.mean(1), batch.group, origin), batch.mask)


@dataclass
class CorrectedSurrogate:
    """Equations 9 and 10."""

    clip: float = 0.2  # the ratio stays within 1 - clip .. 1 + clip, in [0,1]
    cap: float = 2.0  # of the correction of a revision's token, > 0

    needs = frozenset({"logp"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        mask, origin = batch.counted, batch.signals.get("origin", torch.zeros_like(batch.group))
        correction = corrections(batch.logp, batch.signals.get("gen_logp", batch.logp), origin, mask, self.cap)
        ratio = token_ratio(new.logp.detach(), batch.logp, mask)
        metrics = ratio_metrics(ratio, 1 - self.clip, 1 + self.clip, mask)
        return Loss(evolution_loss(new.logp, batch.logp, batch.advantage, correction, mask, self.clip), metrics)


@dataclass
class BestOfGroup:
    """Equation 2: advantage 1 for the rows that are kept, which alone count in the loss."""

    keep: int | None = 2  # rows a group, >= 1; None = all
    threshold: float = 1.0  # least reward of a kept row

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        chosen = torch.zeros(len(batch), dtype=torch.bool)
        chosen[selected(row_reward(batch), batch.group, len(batch) if self.keep is None else self.keep, self.threshold).index] = True
        batch.keep = batch.counted & chosen[:, None]
        return batch.keep.to(batch.logp.dtype)


@dataclass
class Imitation:
    """Equation 1 on the batch's own rows, each token weighted by its advantage (1 for rows chosen to be imitated)."""

    reduce: str = "token"  # or sequence

    needs = frozenset({"logp"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        return Loss(sft_loss(batch.advantage * new.logp, batch.counted, self.reduce).loss)


@dataclass
class Baselined:
    """Equation 3's advantage."""

    baseline: str = "leave_one_out"  # none, group_mean or leave_one_out

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        return broadcast(baselined(row_reward(batch), batch.group, self.baseline), batch.mask)


@dataclass
class BestAgainstWorst:
    """Equation 5 on one pair a group: the row of the largest advantage and that of the smallest; groups without a difference have none."""

    beta: float = 0.1  # weight of the log-ratio to the reference, > 0

    needs = frozenset({"logp", "ref_logp"})
    compares_group = True

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        mask = batch.counted
        value = row_advantage(batch.advantage, mask)
        best, worst = (selected(sign * value, batch.group, keep=1).index for sign in (1, -1))
        order = batch.group[best].argsort(), batch.group[worst].argsort()
        pairs = torch.stack([best[order[0]], worst[order[1]]], dim=1)
        found = dpo_loss(new.logp, batch.signal("ref_logp"), mask, pairs[value[pairs[:, 0]] > value[pairs[:, 1]]], self.beta)
        return Loss(found.loss, {"margin": float(found.margin.detach().mean()) if len(found.margin) else 0.0})


METHOD = GRPO.but(
    name="grape",
    paper=Paper("From-scratch family: SFT, rejection sampling, REINFORCE, DPO; GRAPE", "2509.04501", 2025),
    summary="rubric scores weighted by confidence, critiques and revisions; relative to the first answers",
    rollout=CritiqueAndRevise(),
    credit=RubricRelative(),
    objective=CorrectedSurrogate(),
    regularize=(),
    update=GradientSteps(epochs=2),
)
VARIANTS = {
    "sft": GRPO.but(
        name="grape.sft", summary="imitation of all own samples", credit=BestOfGroup(None, -torch.inf), objective=Imitation(), regularize=()
    ),
    "rejection": GRPO.but(
        name="grape.rejection", summary="imitation of the best own samples", credit=BestOfGroup(), objective=Imitation(), regularize=()
    ),
    "reinforce": GRPO.but(
        name="grape.reinforce", summary="samples weighted by reward over a baseline", credit=Baselined(), objective=SequenceReinforce(), regularize=()
    ),
    "dpo": GRPO.but(
        name="grape.dpo", summary="the best sample preferred to the worst of each prompt", credit=GroupRelative(std=False),
        objective=BestAgainstWorst(), regularize=(),
    ),
}  # fmt: skip
