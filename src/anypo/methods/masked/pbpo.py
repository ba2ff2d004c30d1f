"""PBPO: prefix-block policy optimization for diffusion language models.

Masked-diffusion models write a text block after block and denoise the tokens of a block together, so the likelihood of a finished block is a sum
over reveal orders. PBPO conditions on blocks as the decoder does: in the state of a block the prompt and the finished blocks are visible and the
block is masked, and one call of the network gives a log-prob for each of its tokens. A ratio of whole blocks would be the product of its tokens'
ratios, and one token's swing would clip and weight all of them; PBPO weights and clips every token by its own ratio. Repeated updates on a batch
look at it through fresh views, in which tokens of the prompt and of the finished blocks are masked at random, with old log-probs under the same view.

Against GRPO: log-probs of prefix-block states (they are the masked policy's own, so the clipped surrogate is GRPO's), the update, a smaller KL
weight. Equations 1, 2, 4 and 6 from the abstract's ideas; how a view is drawn (equation 3), the defaults and the sizes are [reconstructed].
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.masked.states import ABSENT, VIEW_ANSWER, VIEW_PROMPT, block_states, canvas
from anypo.method import Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.policy import Loss, Signals
from anypo.seams.credit import GroupRelative
from anypo.seams.groups import broadcast, masked_mean
from anypo.seams.objective import LOG_RATIO_LIMIT, aggregate, clipped, log_ratio, outside, ratio_metrics, token_ratio
from anypo.seams.regularize import KLPenalty
from anypo.seams.update import GradientSteps

if TYPE_CHECKING:
    from anypo.run import MethodLoss, Run


class ClipFraction(NamedTuple):
    token: Tensor  # share of the tokens without gradient when each is clipped by its own ratio
    block: Tensor  # and when they are clipped by the product over their block


class Variance(NamedTuple):
    token: float  # of a token's weight
    block: float  # of the product over a block
    score_sum_token: float  # of the sum over a block of weight times score
    score_sum_block: float


def state(
    prompt: Int[Tensor, " P"], y: Int[Tensor, " L"], W: int, block: int, mask_id: int, tail: str, drop_prompt: Tensor, drop_prefix: Tensor
) -> list[int]:
    """Equations 1 and 3: what the network sees of a row when it predicts block `block`; `drop_*` mark the tokens that the view masks."""
    segment = (torch.arange(len(y)) // W)[None]
    table = canvas(
        [prompt], y[None], segment, torch.ones_like(segment, dtype=torch.bool), mask_id, drop_prompt[None].bool(), drop_prefix[None].bool()
    )
    row = block_states(table, torch.zeros(1, dtype=torch.int64), torch.tensor([block]), mask_id, tail, torch.tensor([len(y)]))[0]
    return row[row != ABSENT].tolist()


def token_objective(
    logp: Float[Tensor, "N L"], old_logp: Float[Tensor, "N L"], mask: Tensor, segment: Int[Tensor, "N L"], adv: Tensor, eps: float
) -> Tensor:
    """Equation 4, to maximize: the clipped surrogate token by token, mean over rows of each row's mean. `adv` [N] or [N,L]; blocks do not matter."""
    value = clipped(token_ratio(logp, old_logp, mask), _per_token(adv, mask), 1 - eps, 1 + eps)
    return aggregate(value, mask, "seq_mean")


def block_ratio(
    logp: Float[Tensor, "N L"], old_logp: Float[Tensor, "N L"], mask: Tensor, segment: Int[Tensor, "N L"], geometric: bool = False
) -> Float[Tensor, "N L"]:
    """Equation 5: the product of the token ratios of a block (their geometric mean with `geometric`), at each of its tokens; summed in log space."""
    blocks = int(segment.max()) + 1 if segment.numel() else 1
    total = logp.new_zeros(len(logp), blocks).scatter_add(1, segment, log_ratio(logp, old_logp, mask))
    if geometric:
        total = total / logp.new_zeros(len(logp), blocks).scatter_add(1, segment, mask.to(logp.dtype)).clamp(min=1)
    return total.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).gather(1, segment).exp()


def block_objective(
    logp: Float[Tensor, "N L"], old_logp: Float[Tensor, "N L"], mask: Tensor, segment: Int[Tensor, "N L"], adv: Tensor, eps: float,
    geometric: bool = False,
) -> Tensor:  # fmt: skip
    """Equation 5, to maximize: every token of a block has the block's ratio and its clip. `adv` [N] or [N,L]."""
    value = clipped(block_ratio(logp, old_logp, mask, segment, geometric), _per_token(adv, mask), 1 - eps, 1 + eps)
    return aggregate(value, mask, "seq_mean")


def clip_fraction(
    logp: Float[Tensor, "N L"], old_logp: Float[Tensor, "N L"], mask: Tensor, segment: Int[Tensor, "N L"], adv: Tensor, eps: float
) -> ClipFraction:
    """Shares of the tokens whose gradient clipping stops, by token and by block ratios."""
    advantage = _per_token(adv, mask)
    ratios = (token_ratio(logp, old_logp, mask), block_ratio(logp, old_logp, mask, segment))
    return ClipFraction(*(masked_mean(outside(r, advantage, 1 - eps, 1 + eps).to(logp.dtype), mask) for r in ratios))


def variance(t2: float, W: int) -> Variance:
    """Equation 6, for independent token ratios of mean 1 and variance `t2` in a block of `W` tokens, and independent scores of mean 0 and variance 1."""
    return Variance(t2, (1 + t2) ** W - 1, W * (1 + t2), W * (1 + t2) ** W)


def _per_token(adv: Tensor, mask: Tensor) -> Tensor:
    return broadcast(adv, mask) if adv.dim() == 1 else adv


@dataclass
class BlockClipped:
    """The baseline that PBPO argues against: the clipped surrogate of block ratios, with per-token advantages."""

    clip_low: float = 0.2  # the ratio may fall to 1 - clip_low, in [0,1]
    clip_high: float = 0.2  # and rise to 1 + clip_high, >= 0
    geometric: bool = False  # the geometric mean of a block's token ratios instead of their product

    needs = frozenset({"logp"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        if batch.segment is None:
            raise ValueError(
                f"{run.method.name} multiplies the ratios of a block, but this batch names no blocks; use a task with `segment`"
            )
        mask, low, high = batch.counted, 1 - self.clip_low, 1 + self.clip_high
        ratio = block_ratio(new.logp, batch.logp, mask, batch.segment, self.geometric)
        value = clipped(ratio, batch.advantage, low, high)
        return Loss(-aggregate(value, mask, "seq_mean"), ratio_metrics(ratio, low, high, mask))


@dataclass
class FreshViews(GradientSteps):
    """Epochs over the batch, each through a view of its own: tokens of the prompt and of finished blocks are masked at random, and old and reference
    log-probs are those under the same view. All views are drawn and scored before the first step, so that the old ones are the rollout's."""

    epochs: int = 4  # passes over the batch, >= 1
    mask_prompt: float = 0.15  # chance of each prompt token to be masked, in [0,1]
    mask_prefix: float = 0.15  # and of each token of a finished block
    first_clean: bool = True  # the first epoch sees prompt and blocks whole, with the log-probs that the rollout brought

    needs = frozenset({"views"})

    def __call__(self, batch: Batch, loss_fn: MethodLoss, run: Run) -> dict[str, float]:
        for name in ("mask_prompt", "mask_prefix"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"update.{name} is a chance, in [0,1], not {getattr(self, name)}")
        if "sampled_elsewhere" in batch.signals:
            raise ValueError(
                f"{run.method.name} scores its views under the policy that acted, which is the current one; use --rollout grpo"
            )
        clean = not (self.mask_prompt or self.mask_prefix)
        views = [batch if clean or (epoch == 0 and self.first_clean) else self.view(batch, run) for epoch in range(self.epochs)]
        steps = GradientSteps(**{f.name: getattr(self, f.name) for f in fields(GradientSteps)} | {"epochs": 1})
        found = [steps(view, loss_fn, run) for view in views]
        return {name: sum(metrics[name] for metrics in found) / len(found) for name in found[0]}

    def view(self, batch: Batch, run: Run) -> Batch:
        """The batch through a fresh view, with the log-probs, entropies and reference log-probs that are wanted computed under it."""
        shape = (len(batch), max(len(p) for p in batch.context))
        signals = {name: value for name, value in batch.signals.items() if not name.startswith(("old_", "ref_"))}
        signals[VIEW_PROMPT] = torch.rand(shape, generator=run.generator) < self.mask_prompt
        signals[VIEW_ANSWER] = torch.rand(batch.mask.shape, generator=run.generator) < self.mask_prefix
        viewed = batch.but(signals=signals)
        run.prepare_signals(viewed, {"old_logp", *run.method.needs("objective", "regularize")})
        return viewed.but(logp=signals["old_logp"])


METHOD = GRPO.but(
    name="pbpo",
    paper=Paper("PBPO: Prefix-Block Policy Optimization for Diffusion Language Models"),
    domain="masked",
    summary="token ratios in prefix-block states, clipped one by one; repeated updates see freshly masked views of prompt and finished blocks",
    credit=GroupRelative(std=True, ddof=0, eps=1e-4),
    regularize=(KLPenalty(beta=0.01),),
    update=FreshViews(),
)
