"""ERPO: entropy-regulated policy optimization at critical decision pivots (arXiv:2603.28204).

GRPO gives every token of a response the same advantage. ERPO looks for critical decision pivots, tokens at which the policy's entropy is high and has
just risen, and shapes the advantages there: a gate amplifies pivots, its values are normalized over the tokens at the same relative progress of one
prompt's responses, and the result weights the sequence's own advantage, which keeps sign and scale. Equations 1-6 are the simplest forms that agree
with the abstract [reconstructed].
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Credit, Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.seams.credit import GroupRelative, group_relative
from anypo.seams.groups import broadcast, group_mean
from anypo.seams.objective import ClippedSurrogate

if TYPE_CHECKING:
    from anypo.run import Run


class Shaped(NamedTuple):
    """The steps from entropies to advantages, [N,T] each and 0 outside the mask."""

    pivot: Tensor  # bool
    gate: Tensor  # 1 off the pivots, in (1, 1 + alpha) at them
    weight: Tensor  # > 0, mean 1 in every (group, bucket) cell
    advantages: Tensor


def pivots(entropy: Float[Tensor, "N T"], mask: Tensor, q: float = 0.8) -> Bool[Tensor, "N T"]:
    """Equation 1: entropy no lower than the batch's `q`-quantile over the mask, and than that of the row's token before (none before the first)."""
    inside = mask.bool()
    clean = torch.where(inside, entropy, entropy.new_zeros(()))
    place = torch.where(inside, torch.arange(mask.shape[1], device=mask.device), -1).cummax(1).values
    before = torch.cat([torch.full_like(place[:, :1], -1), place[:, :-1]], dim=1)  # where the token before is, -1 = nowhere
    risen = (before < 0) | (clean >= clean.gather(1, before.clamp(min=0)))
    return inside & risen & (clean >= _quantile(clean[inside], q))


def gates(entropy: Float[Tensor, "N T"], mask: Tensor, pivot: Tensor, alpha: float = 1.0, eps: float = 1e-6) -> Float[Tensor, "N T"]:
    """Equation 2: 1 + alpha * sigmoid(z) at the pivots, 1 at other tokens; z is the entropy standardized over its row (population deviation)."""
    inside = mask.bool()
    clean = torch.where(inside, entropy, entropy.new_zeros(()))
    length = inside.sum(1, keepdim=True).clamp(min=1)
    centred = torch.where(inside, clean - clean.sum(1, keepdim=True) / length, entropy.new_zeros(()))
    z = centred / ((centred**2).sum(1, keepdim=True) / length).sqrt().add(eps)
    return inside * (1 + alpha * pivot * torch.sigmoid(z))


def progress_bucket(mask: Tensor, buckets: int = 8) -> Int[Tensor, "N T"]:
    """Equation 3: floor(buckets * position / length) in 0..buckets-1, positions counted from 0 over the mask."""
    position = (mask.long().cumsum(1) - 1).clamp(min=0)
    return buckets * position // mask.long().sum(1, keepdim=True).clamp(min=1)


def normalized(gate: Float[Tensor, "N T"], group: Int[Tensor, " N"], mask: Tensor, buckets: int = 8) -> Float[Tensor, "N T"]:
    """Equation 4: gates over their mean in the (group, bucket) cell, so that every prompt spends the same total weight in a window of progress."""
    inside = mask.bool()
    _, index = torch.unique(group, return_inverse=True)
    cell = (index[:, None] * buckets + progress_bucket(mask, buckets))[inside]
    return torch.zeros_like(gate).masked_scatter(inside, gate[inside] / group_mean(gate[inside], cell))


def shape(
    plain: Float[Tensor, "N T"], group: Int[Tensor, " N"], entropy: Float[Tensor, "N T"], mask: Tensor,
    q: float = 0.8, alpha: float = 1.0, buckets: int = 8, lam: float = 0.5, eps: float = 1e-6,
) -> Shaped:  # fmt: skip
    """Equations 1-5 for advantages [N,T] of any kind: plain * ((1 - lam) + lam * weight). Constants of the step."""
    entropy = entropy.detach()
    pivot = pivots(entropy, mask, q)
    gate = gates(entropy, mask, pivot, alpha, eps)
    weight = normalized(gate, group, mask, buckets)
    return Shaped(pivot, gate, weight, torch.where(mask.bool(), plain * (1 + lam * (weight - 1)), plain.new_zeros(())))


def advantages(
    reward: Float[Tensor, " N"], group: Int[Tensor, " N"], entropy: Float[Tensor, "N T"], mask: Tensor,
    q: float = 0.8, alpha: float = 1.0, buckets: int = 8, lam: float = 0.5, eps: float = 1e-6,
) -> Shaped:  # fmt: skip
    """Equations 1-5 around GRPO's advantages. `entropy`: of the policy that acted, at every token."""
    return shape(broadcast(group_relative(reward, group, eps=eps), mask), group, entropy, mask, q, alpha, buckets, lam, eps)


def _quantile(values: Float[Tensor, " M"], q: float) -> Tensor:
    """With linear interpolation; of any number of values (`torch.quantile` refuses more than 16 million). Infinite when there are none."""
    if not len(values):
        return values.new_tensor(torch.inf)
    ranked, rank = values.sort().values, q * (len(values) - 1)
    low = int(rank)
    return torch.lerp(ranked[low], ranked[min(low + 1, len(values) - 1)], rank - low)


@dataclass
class PivotShaping:
    """The inner credit's advantages, weighted token by token: more at critical decision pivots, the same in total."""

    q: float = 0.8  # in [0,1]; a pivot's entropy is no lower than this quantile of the batch's
    alpha: float = 1.0  # >= 0; the gate of a pivot lies between 1 and 1 + alpha; 0 = off
    buckets: int = 8  # >= 1 windows of progress; at most a third of the shortest response, as one token a window cancels the gate
    lam: float = 0.5  # in [0,1], share of the weights; 0 = off
    eps: float = 1e-6  # > 0, added to a row's deviation of entropies
    inner: Credit = field(default_factory=GroupRelative)

    needs = frozenset({"old_entropy"})

    @property
    def compares_group(self) -> bool:
        return getattr(self.inner, "compares_group", False)

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        plain = self.inner(batch, run)
        found = shape(plain, batch.group, batch.signal("old_entropy"), batch.mask, self.q, self.alpha, self.buckets, self.lam, self.eps)
        run.log(pivot_share=float(found.pivot.sum() / batch.mask.sum().clamp(min=1)))
        return found.advantages


METHOD = GRPO.but(
    name="erpo_entropy",
    paper=Paper("ERPO: Token-Level Entropy-Regulated Policy Optimization for Large Reasoning Models", "2603.28204", 2026),
    summary="advantages weighted up at tokens where the entropy has just risen, normalized by prompt and progress",
    credit=PivotShaping(),
    objective=ClippedSurrogate(clip_low=0.2, clip_high=0.28, aggregation="token_mean"),
    regularize=(),
)
