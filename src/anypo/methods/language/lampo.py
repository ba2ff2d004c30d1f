"""LamPO: lambda-style policy optimization with a pairwise decomposed advantage (arXiv:2605.21235).

GRPO compares a response with its group's mean. LamPO, after LambdaRank, adds up the reward gaps to every other member of the group, and weights
each gap by how far the old policy is from ordering that pair as the rewards do: a pair that it orders rightly and surely counts little, one that it
orders wrongly counts up to twice. A reference solution, where there is one, adds a small ROUGE-L reward. The successor of LambdaPO
(lambdapo.py), with which it shares the pairs. The paper was withdrawn; equations 1, 4 and 6 from digests of it, the weight of equation 3
[reconstructed], the length-normalized score of equation 2 and the F1 form of ROUGE-L [ours].
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.seams.credit import pair_matrix, preference_pairs, sequence_score
from anypo.seams.groups import broadcast, group_size, group_std
from anypo.seams.objective import ClippedSurrogate
from anypo.seams.regularize import KLPenalty
from anypo.seams.reward import row_reward, with_agreement

if TYPE_CHECKING:
    from anypo.run import Run


def rouge_l(response: Sequence[Hashable] | Tensor, reference: Sequence[Hashable] | Tensor) -> float:
    """Equation 1: F1 of the longest common subsequence of two token sequences, in [0,1]; 0 when they share nothing."""
    first, second = (tokens.tolist() if isinstance(tokens, Tensor) else tokens for tokens in (response, reference))
    common = longest_common(first, second)
    return 2 * common / (len(first) + len(second)) if common else 0.0  # = 2PR/(P+R) with P = common/|first|, R = common/|second|


def longest_common(first: Sequence[Hashable], second: Sequence[Hashable]) -> int:
    """Length of the longest common subsequence. One integer holds a row of the dynamic programme (Hyyro 2004): bit j is 0 where the length grows
    at token j of `second`, so that a row costs one addition."""
    places: dict[Hashable, int] = {}
    for j, token in enumerate(second):
        places[token] = places.get(token, 0) | 1 << j
    row = every = (1 << len(second)) - 1
    for token in first:
        match = row & places.get(token, 0)
        row = ((row + match) | (row - match)) & every
    return len(second) - row.bit_count()


def pair_weights(
    reward: Float[Tensor, " N"], group: Int[Tensor, " N"], old_logp: Float[Tensor, "N T"], mask: Tensor, tau: float = 1.0, score: str = "mean"
) -> Float[Tensor, "N N"]:  # fmt: skip
    """Equations 2-3: 2 sigmoid(-sgn(r_i - r_j) (s_i - s_j) / tau) in (0,2), symmetric, 1 for equal rewards; 0 outside groups and on the diagonal."""
    pairs = preference_pairs(reward, group, sequence_score(old_logp, mask, score), tau)
    return pair_matrix(pairs.rows, 2 * pairs.doubt)


def advantages(
    reward: Float[Tensor, " N"], group: Int[Tensor, " N"], old_logp: Float[Tensor, "N T"], mask: Tensor,
    tau: float = 1.0, score: str = "mean", std: bool = False, ddof: int = 0, eps: float = 1e-6,
) -> Float[Tensor, " N"]:  # fmt: skip
    """Equations 4-5: the mean over the other members of weight times reward gap, over the group's (deviation + eps) when `std`. Sums to 0 over a
    group; 0 for a lone member and for groups that earn all the same."""
    pairs = preference_pairs(reward, group, sequence_score(old_logp, mask, score), tau)
    total = (2 * pairs.doubt * pairs.gap).sum(1) / (group_size(group) - 1).clamp(min=1)
    if not std:
        return total
    deviation = group_std(reward, group, ddof)
    return torch.where(deviation > 0, total / (deviation + eps).clamp(min=torch.finfo(total.dtype).tiny), torch.zeros_like(total))


@dataclass
class RougeReward:
    """The task's reward plus eta times ROUGE-L to the reference solution, where the problem has one."""

    eta: float = 0.1  # >= 0; 0: outcome alone
    weights: tuple[float, ...] | None = None  # of the task's K rewards, which become one here; None = all 1

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        return with_agreement(batch, run, rouge_l, self.eta, self.weights)


@dataclass
class PairwiseAdvantage:
    """Reward gaps to the prompt's other responses, weighted by how unsure the old policy is of their order."""

    tau: float = 1.0  # > 0, temperature of the policy's confidence; about 10 with score sum; inf: RLOO
    score: str = "mean"  # of a row's log-probs: mean or sum
    std: bool = False  # divide by the group's standard deviation
    ddof: int = 0  # 0 population, 1 sample standard deviation
    eps: float = 1e-6  # > 0, added to the standard deviation
    weights: tuple[float, ...] | None = None  # of K rewards, where the reward seam leaves them apart; None = all 1

    compares_group = True

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        reward = row_reward(batch, self.weights)
        found = advantages(reward, batch.group, batch.logp, batch.mask, self.tau, self.score, self.std, self.ddof, self.eps)
        return broadcast(found, batch.mask)


METHOD = GRPO.but(
    name="lampo",
    paper=Paper("LamPO: A Lambda Style Policy Optimization for Reasoning Language Models", "2605.21235", 2026),
    summary="reward gaps to every other response, weighted by how unsure the old policy is of the pair's order; ROUGE-L reward",
    reward=RougeReward(),
    credit=PairwiseAdvantage(),
    objective=ClippedSurrogate(clip_low=0.2, clip_high=0.2, aggregation="token_mean"),
    regularize=(KLPenalty(beta=0.01, aggregation="token_mean"),),
)
