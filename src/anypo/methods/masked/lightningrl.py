"""LightningRL: speed-quality Pareto training for parallel decoding (arXiv:2603.13319).

The more tokens a pass of the network reveals (TPF, tokens per forward), the more of them disagree. LightningRL does not force parallelism: answers
are written by confidence-threshold decoding, so that their TPF varies, and the correct and fast ones are reinforced. Against GRPO: accuracy and
speed are normalized one by one inside the prompt's group before they are added; a negative log-likelihood of the tokens of correct answers anchors
quality; prompts without a correct answer or without a spread of TPF are replaced by others. Log-probs are those of each token in the state in
which it was revealed. Equations 1-9 follow the paper's code.

Left out: different blocks in training and decoding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.masked.states import VIEW_ORDER
from anypo.method import Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.policy import Loss, Signals
from anypo.seams.groups import broadcast, group_max, group_mean, group_min, masked_mean, standardize
from anypo.seams.objective import ClippedSurrogate, aggregate, clipped, kl_estimate, token_ratio
from anypo.seams.regularize import KLPenalty
from anypo.seams.reward import objectives, weighted_sum
from anypo.seams.rollout import DynamicSampling
from anypo.seams.select import UniformPrompts
from anypo.seams.update import GradientSteps
from anypo.task import Prompt

if TYPE_CHECKING:
    from anypo.run import Run

OBJECTIVES = ("correct", "tpf")
RIGHT = 0.5  # the task's reward from which an answer counts as correct
MODES = ("batch", "prompt_group", "prompt_group_center")
TPF_MODES = ("z_score", "minmax", "none")
Rows = Float[Tensor, " N"]
Group = Int[Tensor, " N"]


class Rewards(NamedTuple):
    tpf: Tensor  # [N]
    reward: Tensor  # [N]


class Losses(NamedTuple):
    policy: Tensor
    nll: Tensor  # without its weight
    kl: Tensor  # without its weight
    total: Tensor


# ---- equations


def tokens_per_forward(length: Tensor, forwards: Tensor) -> Rows:
    """Equation 1: tokens over calls of the network, 0 for an answer without calls."""
    return torch.where(forwards > 0, length / forwards.clamp(min=1), 0.0).double()


def combined(
    correct: Rows, tpf: Rows, group: Group, tpf_mode: str = "z_score", acc_norm: bool = True, w_speed: float = 1.0, decoupled: bool = True
) -> Rows:
    """Equation 2: normalized accuracy plus `w_speed` times normalized speed. `acc_norm=False`: accuracy counts +1 or -1. `decoupled=False`: the raw
    sum, normalized once. Raises ValueError for an unknown mode."""
    if tpf_mode not in TPF_MODES:
        raise ValueError(f"unknown tpf_mode '{tpf_mode}'; use one of {', '.join(TPF_MODES)}")
    correct, tpf = correct.double(), tpf.double()
    if not decoupled:
        return standardize(correct + w_speed * tpf, group, 0, 0.0)
    speed = tpf
    if tpf_mode == "z_score":
        speed = standardize(tpf, group, 0, 0.0)
    if tpf_mode == "minmax":
        low, high = group_min(tpf, group), group_max(tpf, group)
        speed = torch.where(high > low, (tpf - low) / (high - low).clamp(min=torch.finfo(tpf.dtype).tiny), 0.5)
    return (standardize(correct, group, 0, 0.0) if acc_norm else 2 * correct - 1) + w_speed * speed


def reward(
    correct: Tensor, length: Tensor, forwards: Tensor, group: Group, tpf_mode: str = "z_score", acc_norm: bool = True, w_speed: float = 1.0
) -> Rewards:
    """Equations 1 and 2."""
    tpf = tokens_per_forward(length, forwards)
    return Rewards(tpf, combined(correct, tpf, group, tpf_mode, acc_norm, w_speed))


def keep_prompts(correct: Tensor, tpf: Rows, group: Group, tau: float = 0.01, filter_all_wrong: bool = True) -> Bool[Tensor, " N"]:
    """Equation 3: rows whose prompt has a correct answer (unless `filter_all_wrong` is off) and answers whose TPF differ by `tau` or more."""
    spread = group_max(tpf, group) - group_min(tpf, group) >= tau
    return spread & (group_max(correct, group) > 0) if filter_all_wrong else spread


def advantages(reward: Rows, group: Group, mode: str = "batch") -> Rows:
    """Equation 4: over (sample deviation + 1e-8) of the batch or of the prompt, or the prompt's mean taken off alone. Raises ValueError for another mode."""
    if mode not in MODES:
        raise ValueError(f"unknown mode '{mode}' of advantages; use one of {', '.join(MODES)}")
    if mode == "prompt_group_center":
        return reward - group_mean(reward, group)
    return standardize(reward, torch.zeros_like(group) if mode == "batch" else group, 1, 1e-8)


def nll(logp: Float[Tensor, "N L"], mask: Tensor, correct: Tensor) -> Tensor:
    """Equation 6, without its weight: minus the mean log-prob of the tokens of correct rows, 0 when no row is correct."""
    return -masked_mean(logp, mask.bool() & (correct > 0)[:, None])


def loss(
    logp: Float[Tensor, "N L"], old_logp: Float[Tensor, "N L"], ref_logp: Float[Tensor, "N L"], mask: Tensor, adv: Rows, correct: Tensor,
    eps: float = 0.2, eps_high: float = 0.2, w_nll: float = 0.1, kl_beta: float = 0.01,
) -> Losses:  # fmt: skip
    """Equations 5-8, to minimize."""
    surrogate = clipped(token_ratio(logp, old_logp, mask), broadcast(adv, mask), 1 - eps, 1 + eps_high)
    policy, anchor = -aggregate(surrogate, mask, "seq_mean"), nll(logp, mask, correct)
    kl = masked_mean(kl_estimate(logp, ref_logp, mask, "k3"), mask)
    return Losses(policy, anchor, kl, policy + w_nll * anchor + kl_beta * kl)


def aup(tpf: Float[Tensor, " P"], accuracy: Float[Tensor, " P"], best: float, alpha: float = 3.0, drop: float = 0.05) -> Tensor:
    """Equation 9, accuracy under parallelism: the area under accuracy over TPF, from 0 to the fastest point no more than `drop` below the slowest
    one, where accuracies below `best` (of all methods compared) count less."""
    order = tpf.argsort()
    x, y = tpf[order].double(), accuracy[order].double()
    kept = y >= y[0] - drop
    x, y = x[kept], y[kept]
    weighted = y * torch.exp(-alpha * (1 - y / best)).clamp(max=1)
    return x[0] * y[0] + ((x[1:] - x[:-1]) * (weighted[1:] + weighted[:-1]) / 2).sum()


# ---- components


def speed(batch: Batch, run: Run) -> Rows:
    """Equation 1 for a batch. Raises ValueError for answers of which nobody counted the calls."""
    if "passes" not in batch.signals:
        raise ValueError(f"{run.method.name} counts the network's calls, which the task '{run.task.name}' does not; take split_sum")
    return tokens_per_forward(batch.lengths, batch.signals["passes"])


def is_correct(batch: Batch, run: Run) -> Rows:
    """1 for rows whose task reward (several or dense ones added up) reaches `RIGHT`, else 0."""
    return (weighted_sum(run.score_rewards(batch)) >= RIGHT).double()


@dataclass
class FastAndRight(DynamicSampling):
    """Answers with the log-probs of their reveal states. Prompts without a correct answer or a spread of TPF are replaced by fresh ones; if none is
    left after the last round, nothing is trained."""

    tau: float = 0.01  # least spread of TPF, >= 0 tokens a call
    filter_all_wrong: bool = True

    needs = frozenset({"views"})  # the policy reads every token in the state in which it was revealed

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        batch = super().__call__(prompts, run)
        keep = batch.mask & self.contrast(batch, run)[:, None]
        signals = {name: value for name, value in batch.signals.items() if name != "old_entropy"}  # that of the prefix-block states
        signals[VIEW_ORDER] = batch.signals["reveal_pass"].clamp(min=0)
        return batch.but(keep=keep, signals=signals, logp=torch.where(batch.mask, batch.signals["reveal_logp"], 0.0))

    def contrast(self, batch: Batch, run: Run) -> Tensor:
        return keep_prompts(is_correct(batch, run), speed(batch, run), batch.group, self.tau, self.filter_all_wrong)


@dataclass
class AccuracyAndSpeed:
    """Two rewards a row, [N,2]: correct (0 or 1) and TPF."""

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        found = torch.stack([is_correct(batch, run), speed(batch, run)], 1)
        batch.objectives = OBJECTIVES
        return found


@dataclass
class SpeedAndQuality:
    """Equations 2 and 4 over the rows that count."""

    w_speed: float = 1.0  # of the speed, >= 0; the paper has 0.1 with tpf_mode "none"
    tpf_mode: str = "z_score"  # or minmax, none
    acc_norm: bool = True  # False: +1 for correct, -1 for wrong
    mode: str = "batch"  # or prompt_group, prompt_group_center: what an advantage is relative to
    decoupled: bool = True  # False: add first, normalize once

    compares_group = True

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        both = objectives(batch)
        if both.shape[1] != 2:
            raise ValueError(f"{run.method.name} adds an accuracy and a speed, not {both.shape[1]} reward(s); use --reward lightningrl")
        some = batch.counted.any(1)
        total = combined(both[some, 0], both[some, 1], batch.group[some], self.tpf_mode, self.acc_norm, self.w_speed, self.decoupled)
        found = both.new_zeros(len(batch)).masked_scatter(some, advantages(total, batch.group[some], self.mode).to(both.dtype))
        return broadcast(found.to(batch.logp.dtype), batch.mask)


@dataclass
class CorrectLikelihood:
    """Equation 6: keeps the tokens of correct answers likely."""

    weight: float = 0.1  # >= 0

    needs = frozenset({"logp"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        value = nll(new.logp, batch.counted, is_correct(batch, run))
        return Loss(self.weight * value, {"nll": float(value.detach())})


METHOD = GRPO.but(
    name="lightningrl",
    paper=Paper("LightningRL: speed-quality Pareto for parallel decoding", "2603.13319", 2026),
    domain="masked",
    task="split_sum_fast",
    summary="correct answers that took few passes: accuracy and speed normalized one by one, likelihood of correct answers, prompts filtered by speed",
    select=UniformPrompts(group_size=32),
    rollout=FastAndRight(),
    reward=AccuracyAndSpeed(),
    credit=SpeedAndQuality(),
    objective=ClippedSurrogate(clip_low=0.2, clip_high=0.2, aggregation="seq_mean"),
    regularize=(CorrectLikelihood(), KLPenalty(beta=0.01, aggregation="token_mean")),
    update=GradientSteps(epochs=2),
)
