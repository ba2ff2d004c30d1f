"""D3S: dynamic dual-level down-sampling (arXiv:2509.22115).

Most rollouts and most tokens carry little signal. D3S trains on the subset of rollouts whose advantages have the largest variance, and inside it
on the tokens with the largest |advantage| times entropy; both shares relax to the full batch along a schedule. Rollouts are generated as usual,
the update is smaller. Against GRPO it changes the credit, which also decides what counts, and the clip (0.2/0.28, token mean). The variance
criterion is the paper's; its exact solution, the tie rules and the linear schedule are [reconstructed].
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Credit, Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.seams.credit import GroupRelative
from anypo.seams.groups import broadcast
from anypo.seams.objective import ClippedSurrogate, aggregate, clipped, token_ratio

if TYPE_CHECKING:
    from anypo.run import Run

TIE = 1e-12  # a smaller number of largest advantages must beat the variance by more than this


class Selection(NamedTuple):
    keep: Tensor  # [N] 0/1
    variance: Tensor  # scalar, population variance of the kept advantages


def count_of(share: float, total: int) -> int:
    """ceil(share * total), safe against rounding."""
    return math.ceil(share * total - 1e-9)


def select_samples(
    advantages: Float[Tensor, " N"], group: Int[Tensor, " N"], scope: str = "cross", m: int | None = None, ratio: float | None = None
) -> Selection:
    """Equation 1: the m rows (or `ratio` of them) whose advantages have the largest variance, over the batch ("cross") or in each group ("intra").

    The best subset joins the k largest and the m - k smallest advantages for some k. Raises ValueError for another scope or no size.
    """
    if scope not in ("cross", "intra") or (m is None and ratio is None):
        raise ValueError(f"scope is cross or intra, not '{scope}', and one of m and ratio says how many rows are kept")
    keep = torch.zeros(len(advantages), dtype=torch.int64)
    pools = [torch.arange(len(advantages))] if scope == "cross" else [(group == g).nonzero().flatten() for g in group.unique()]
    for pool in pools:
        size = m if m is not None else count_of(ratio or 0.0, len(pool))
        keep[pool[_largest_variance(advantages[pool], min(size, len(pool)))]] = 1
    kept = advantages[keep.bool()]
    return Selection(keep, kept.var(correction=0) if len(kept) else advantages.new_zeros(()))


def _largest_variance(values: Float[Tensor, " n"], size: int) -> Int[Tensor, " m"]:
    """Positions of the `size` values with the largest variance; equal variances take more of the largest values."""
    order = values.argsort(descending=True, stable=True)
    ranked = values[order]
    zero = ranked.new_zeros(1)
    sums, squares = (torch.cat([zero, x.cumsum(0)]) for x in (ranked, ranked**2))
    k = torch.arange(size + 1)
    tail = len(values) - (size - k)
    total, square = (s[k] + s[-1] - s[tail] for s in (sums, squares))
    variance = (square / max(size, 1) - (total / max(size, 1)) ** 2).tolist()
    best = size
    for candidate in range(size - 1, -1, -1):
        if variance[candidate] > variance[best] + TIE:
            best = candidate
    return torch.cat([order[:best], order[len(values) - (size - best) :]])


def select_tokens(
    advantages: Float[Tensor, " N"] | Float[Tensor, "N T"], entropy: Float[Tensor, "N T"], mask: Tensor, keep_rows: Tensor, ratio: float
) -> Int[Tensor, "N T"]:
    """Equation 2: of the tokens of the kept rows, the `ratio` with the largest |A| times entropy; equal ones in the order of their position."""
    candidate = mask.bool() & keep_rows.bool()[:, None]
    size = (broadcast(advantages, mask) if advantages.dim() == 1 else advantages).abs()
    score = torch.where(candidate, size * entropy, torch.full_like(entropy, -1.0)).flatten()
    chosen = score.argsort(descending=True, stable=True)[: count_of(ratio, int(candidate.sum()))]
    keep = torch.zeros_like(score, dtype=torch.int64)
    keep[chosen] = 1
    return keep.view_as(entropy)


def schedule(step: Tensor, total: float, start: float, phase: float = 0.5) -> Tensor:
    """Equation 3: the share kept at each step, linear from `start` at step 0 to 1 at step phase * total."""
    return start + (1 - start) * (torch.as_tensor(step, dtype=torch.float64) / (phase * total)).clamp(max=1.0)


def loss(
    logp: Float[Tensor, "N T"],
    old_logp: Float[Tensor, "N T"],
    advantages: Float[Tensor, " N"],
    keep: Tensor,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """Equation 4: the clipped surrogate averaged over the kept tokens -> scalar."""
    value = clipped(token_ratio(logp, old_logp, keep), broadcast(advantages, keep), 1 - clip_low, 1 + clip_high)
    return aggregate(-value, keep, "token_mean")


@dataclass
class DownSampled:
    """The inner credit; of its rows and tokens only the most informative count in the loss (`batch.keep`)."""

    inner: Credit = field(default_factory=GroupRelative)
    rows: float = 0.25  # share of the rollouts kept at the first step, in (0,1]
    tokens: float = 0.2  # share of their tokens, in (0,1]
    phase: float = 0.5  # share of the run after which everything is kept, > 0; inf keeps the first shares for ever
    scope: str = "cross"  # cross: the whole batch is one pool; intra: each group

    needs = frozenset({"old_entropy"})

    @property
    def compares_group(self) -> bool:
        return getattr(self.inner, "compares_group", False)

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        advantage = self.inner(batch, run)
        written = batch.mask.any(1)
        level = (advantage * batch.mask).sum(1) / batch.lengths.clamp(min=1)
        rows, tokens = (float(schedule(torch.tensor(run.progress), 1.0, share, self.phase)) for share in (self.rows, self.tokens))
        keep_rows = torch.zeros(len(batch), dtype=torch.int64)
        pool = written.nonzero().flatten()
        size = {"m": count_of(rows, len(pool))} if self.scope == "cross" else {"ratio": rows}
        keep_rows[pool] = select_samples(level[pool], batch.group[pool], self.scope, **size).keep  # type: ignore[arg-type]
        batch.keep = select_tokens(advantage, batch.signal("old_entropy"), batch.mask, keep_rows, tokens).bool()
        run.log(kept_rows=float(keep_rows.sum()), kept_tokens=float(batch.keep.sum()))
        return advantage


METHOD = GRPO.but(
    name="d3s",
    paper=Paper(
        "Learning More with Less: A Dynamic Dual-Level Down-Sampling Framework for Efficient Policy Optimization", "2509.22115", 2025
    ),
    summary="trains on the rollouts of largest advantage variance and their tokens of largest |advantage| times entropy, relaxing to all",
    credit=DownSampled(),
    objective=ClippedSurrogate(clip_low=0.2, clip_high=0.28, aggregation="token_mean"),
    regularize=(),
)
