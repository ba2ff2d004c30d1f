"""BAE: blockwise advantage estimation with an outcome-conditioned baseline (arXiv:2602.10231).

GRPO adds up all rewards and gives the whole response one advantage. Where a response has blocks with objectives of their own (a solution, then a stated
confidence), BAE keeps one reward a block, compares block by block, and applies each advantage to the tokens of its block alone, so that no weights
between objectives are needed. A later block is conditioned on what was sampled before it; instead of nested rollouts its baseline is the mean over
those members of the group whose prefix had the same discrete outcome (was the solution right). Segments, strata and the Brier reward are the paper's;
including the row itself, scales, small strata and the block mean of the loss are [reconstructed].

The batch says where the blocks are: the signal `block` [N,T] (-1 outside all of them), else `segment`; and what came out before each block: the signal
`prefix_outcome` [N,K], else whether the reward of the block before is above `right_above` [ours]. One reward alone is one block, the whole response.
Left out: finding blocks in text, which is the task's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.policy import Loss, Signals
from anypo.seams.groups import group_mean, group_size, leave_one_out_mean
from anypo.seams.objective import ClippedSurrogate, aggregate, clipped, ratio_metrics, token_ratio
from anypo.seams.select import UniformPrompts
from anypo.seams.steps import spread

if TYPE_CHECKING:
    from anypo.run import Run

SCALES = ("none", "group", "stratum")
FALLBACKS = ("zero", "group")


class Blocks(NamedTuple):
    baseline: Tensor  # [N,K]
    block_advantages: Tensor  # [N,K]
    advantages: Tensor  # [N,T]


class LossValue(NamedTuple):
    token_mean: Tensor  # scalars, differentiable in logp
    block_mean: Tensor


def strata(outcome: Int[Tensor, "N K"], group: Int[Tensor, " N"]) -> Int[Tensor, "N K"]:
    """Equation 1: a number for each (group, block, outcome of the prefix); strata are never shared by prompts or blocks."""
    block = torch.arange(outcome.shape[1], device=outcome.device).expand_as(outcome)
    keys = torch.stack([group[:, None].expand_as(outcome), block, outcome.long()])
    return torch.unique(keys.flatten(1), dim=1, return_inverse=True)[1].view_as(outcome)


def advantages(
    reward: Float[Tensor, "N K"], outcome: Int[Tensor, "N K"], group: Int[Tensor, " N"], segment: Int[Tensor, "N T"], mask: Tensor,
    scale: str = "group", eps: float = 1e-6, min_stratum: int = 2, fallback: str = "zero", loo: bool = False,
) -> Blocks:  # fmt: skip
    """Equations 1-6. Column k of `outcome` is a function of what precedes block k (column 0 is constant). Raises ValueError for other names.

    Strata smaller than `min_stratum` have advantage 0, or with fallback "group" the reward minus the mean of the whole group. `loo` leaves the row
    itself out of the stratum's mean.
    """
    if scale not in SCALES or fallback not in FALLBACKS:
        raise ValueError(f"scale is one of {', '.join(SCALES)} and fallback one of {', '.join(FALLBACKS)}, not '{scale}' and '{fallback}'")
    stratum, values = strata(outcome, group).flatten(), reward.flatten()
    mean = leave_one_out_mean(values, stratum) if loo else group_mean(values, stratum)
    baseline = mean.view_as(reward)
    small = (group_size(stratum) < min_stratum).view_as(reward)
    if fallback == "group":
        baseline = torch.where(small, group_mean(reward, group), baseline)
    raw = reward - baseline
    if fallback == "zero":
        raw = torch.where(small, torch.zeros_like(raw), raw)
    block = _scaled(raw, stratum, group, scale, eps)
    return Blocks(baseline, block, spread(block, segment, mask))


def _scaled(raw: Tensor, stratum: Tensor, group: Tensor, scale: str, eps: float) -> Tensor:
    """Equation 4: over the root mean square of the raw advantages of the group (one divisor for all its strata) or of the stratum."""
    if scale == "none":
        return raw
    square = group_mean(raw**2, group) if scale == "group" else group_mean((raw**2).flatten(), stratum).view_as(raw)
    return torch.where(square > 0, raw / (square.sqrt() + eps).clamp(min=torch.finfo(raw.dtype).tiny), torch.zeros_like(raw))


def loss(
    logp: Float[Tensor, "N T"], old_logp: Float[Tensor, "N T"], advantages: Float[Tensor, "N T"], segment: Int[Tensor, "N T"], mask: Tensor,
    clip_low: float = 0.2, clip_high: float = 0.28, block_weights: Tensor | tuple[float, ...] | None = None,
) -> LossValue:  # fmt: skip
    """Equation 7: the clipped surrogate as a mean over all tokens, and as the weighted sum of one mean for each block (None: weights 1)."""
    value = -clipped(token_ratio(logp, old_logp, mask), advantages, 1 - clip_low, 1 + clip_high)
    return LossValue(aggregate(value, mask, "token_mean"), block_mean(value, segment, mask, block_weights))


def block_mean(values: Tensor, segment: Tensor, mask: Tensor, weights: Tensor | tuple[float, ...] | None = None) -> Tensor:
    """Sum over blocks of weight times the mean over the batch's tokens of that block; tokens of no block do not count.
    Raises ValueError when there are more blocks than weights."""
    inside = mask.bool() & (segment >= 0)
    blocks = int(segment[inside].max()) + 1 if inside.any() else 0
    scale = values.new_ones(blocks) if weights is None else torch.as_tensor(weights, dtype=values.dtype, device=values.device)
    if len(scale) < blocks:
        raise ValueError(f"block_weights has {len(scale)} numbers for {blocks} blocks; give one for each")
    index = segment[inside].long()
    count = torch.bincount(index, minlength=len(scale)).clamp(min=1)
    return (scale * values.new_zeros(len(scale)).index_add(0, index, values[inside]) / count).sum()


def blocks_of(batch: Batch, count: int) -> Int[Tensor, "N T"]:
    """The block of every token, -1 for none. Raises ValueError when there are several rewards and nothing says where their blocks are."""
    if count == 1:
        return torch.zeros_like(batch.mask, dtype=torch.int64)
    if "block" in batch.signals:
        return batch.signals["block"]
    if batch.segment is None:
        raise ValueError(
            f"{count} rewards need {count} blocks, but the task does not say where they are; let it give the signal 'block' [N,T] "
            "(0 for tokens of the first block, 1 of the second, -1 outside), or train on one reward"
        )
    return torch.where(batch.segment < count, batch.segment, -1)


@dataclass
class BlockwiseAdvantage:
    """An advantage for each block from its own reward, relative to attempts at the prompt with the same outcome before the block."""

    scale: str = "group"  # none, group or stratum: what the advantage is divided by; none keeps confidences calibrated
    eps: float = 1e-6  # > 0, added to the divisor
    min_stratum: int = 2  # >= 1, rows; smaller strata fall back
    fallback: str = "zero"  # zero or group
    loo: bool = False  # leave the row itself out of its baseline
    right_above: float = 0.5  # without the signal prefix_outcome: the reward above which the block before came out right

    compares_group = True

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        assert batch.reward is not None
        reward = batch.reward if batch.reward.dim() == 2 and not batch.reward_is_dense else batch.outcome[:, None]
        count = reward.shape[1]
        outcome = torch.zeros_like(reward, dtype=torch.int64)
        outcome[:, 1:] = (
            batch.signals["prefix_outcome"][:, 1:count] if "prefix_outcome" in batch.signals else reward[:, :-1] > self.right_above
        )
        segment = blocks_of(batch, count)
        batch.signals.setdefault("block", segment)  # for objectives that tell blocks apart
        found = advantages(
            reward, outcome, batch.group, segment, batch.mask, self.scale, self.eps, self.min_stratum, self.fallback, self.loo
        )
        sizes = group_size(strata(outcome, batch.group).flatten())
        run.log(small_strata=float((sizes < self.min_stratum).double().mean()))
        return found.advantages


@dataclass
class BlockSurrogate:
    """The clipped surrogate averaged block by block, so that a short block weighs as much as a long one."""

    clip_low: float = 0.2  # the ratio may fall to 1 - clip_low, in [0,1]
    clip_high: float = 0.28  # and rise to 1 + clip_high, >= 0
    block_weights: tuple[float, ...] | None = None  # one for each block; None = all 1

    needs = frozenset({"logp"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        mask = batch.counted
        segment = batch.signals["block"] if "block" in batch.signals else blocks_of(batch, 1)
        value = loss(new.logp, batch.logp, batch.advantage, segment, mask, self.clip_low, self.clip_high, self.block_weights).block_mean
        ratio = token_ratio(new.logp, batch.logp, mask)
        return Loss(value, ratio_metrics(ratio, 1 - self.clip_low, 1 + self.clip_high, mask))


METHOD = GRPO.but(
    name="bae",
    paper=Paper("Blockwise Advantage Estimation for Multi-Objective RL with Verifiable Rewards", "2602.10231", 2026),
    summary="one advantage for each block of a response, relative to attempts with the same outcome before the block",
    select=UniformPrompts(group_size=16),
    credit=BlockwiseAdvantage(),
    objective=ClippedSurrogate(clip_low=0.2, clip_high=0.28, aggregation="token_mean"),
    regularize=(),
)

VARIANTS = {
    "block_mean": METHOD.but(name="bae.block_mean", summary="BAE whose loss averages block by block", objective=BlockSurrogate()),
    "calibrated": METHOD.but(
        name="bae.calibrated",
        summary="BAE with an unbiased baseline and no scale, for confidences that end at the true probability",
        credit=BlockwiseAdvantage(scale="none", fallback="group", loo=True),
    ),
}
