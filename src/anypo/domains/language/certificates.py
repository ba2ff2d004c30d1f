"""Rankings with certificates: the verifier that aligns trajectories with a plan, Plackett-Luce rankings, and NDCG of certified positions.

Equations of ECPO (arXiv:2605.21993) [reconstructed]. All functions are batched over leading dimensions. Left out: an event graph given from outside.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def align(skeleton: Int[Tensor, "... S"], types: Int[Tensor, "... M"]) -> Float[Tensor, "*batch"]:
    """Equation 1: longest common subsequence of the skeleton and the types of a trajectory in time order (-1: no mention), over S. In [0,1]."""
    return matching(skeleton[..., :, None] == types[..., None, :]).length / skeleton.shape[-1]


class Matching(NamedTuple):
    length: Tensor  # [...] matched slots
    right: Tensor  # [...] of these with the right filler, as many as possible
    used: Tensor  # [...,M] bool: the mentions that are matched


def matching(hit: Bool[Tensor, "... S M"], right: Bool[Tensor, "... S M"] | None = None) -> Matching:
    """The longest matching of slots and mentions that keeps both in order, of these the one with the most `right` pairs, of these the latest."""
    slots, mentions = hit.shape[-2:]
    worth = hit * (slots + 1) + (hit & right if right is not None else 0)
    score = (worth.long() << mentions) + (hit.long() << torch.arange(mentions))  # the mentions used are the low bits of a sum
    row = [score.new_zeros(hit.shape[:-2])] * (mentions + 1)
    for s in range(slots):
        following = [row[0]]
        for j in range(mentions):
            following.append(torch.maximum(torch.maximum(row[j + 1], following[j]), row[j] + score[..., s, j]))
        row = following
    total = row[-1] >> mentions
    return Matching(total // (slots + 1), total % (slots + 1), (row[-1][..., None] >> torch.arange(mentions)) % 2 == 1)


def pl_logp(scores: Float[Tensor, "... C"], feasible: Tensor, ranking: Int[Tensor, "... K"]) -> Float[Tensor, "*batch"]:
    """Equation 3: Plackett-Luce log-probability of a ranking without replacement over the feasible candidates; -inf for one that is not feasible."""
    left, total = feasible.bool(), scores.new_zeros(scores.shape[:-1])
    for k in range(ranking.shape[-1]):
        chosen = ranking[..., k : k + 1]
        total = total + scores.masked_fill(~left, -torch.inf).log_softmax(-1).gather(-1, chosen)[..., 0]
        left = left.scatter(-1, chosen, False)
    return total


def ndcg(relevance: Tensor, ranking: Int[Tensor, "... R"], K: int = 3) -> Float[Tensor, "*batch"]:
    """Equation 4: NDCG@K with gain 2^y - 1; `relevance` [...,C] >= 0. 0 where nothing is relevant."""
    whole = torch.ones(ranking.shape, dtype=torch.float64)
    return cert_ndcg(relevance, ranking, whole, whole, K)


def cert_ndcg(
    relevance: Tensor, ranking: Int[Tensor, "... R"], validity: Tensor, support: Tensor, K: int = 3, tau: float = 0.5
) -> Float[Tensor, "*batch"]:
    """Equation 7: NDCG@K in which a position counts by its certificate's validity, if the support is at least `tau`. Both [...,R] in [0,1]."""
    gain = 2 ** relevance.double() - 1
    discount = 1 / (torch.arange(K, dtype=torch.float64) + 2).log2()
    ideal = (gain.sort(-1, descending=True).values[..., :K] * discount[: gain.shape[-1]]).sum(-1)
    certified = validity.double() * (support >= tau)
    earned = (certified[..., :K] * gain.gather(-1, ranking[..., :K]) * discount[: ranking.shape[-1]]).sum(-1)
    return torch.where(ideal > 0, earned / ideal.clamp(min=1e-12), 0.0)


def evidence_support(whole: Tensor, cited: Tensor, any_cited: Tensor) -> Tensor:
    """Equation 6: alignment of the cited spans over that of all; without any alignment 1 if and only if nothing is cited. All of one shape."""
    found = torch.where(any_cited, (cited / whole.clamp(min=1e-8)).clamp(max=1.0), 0.0)
    return torch.where(whole > 0, found, (~any_cited).to(found))
