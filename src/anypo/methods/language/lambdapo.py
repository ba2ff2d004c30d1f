"""LambdaPO: lambda policy optimization, pairwise preference advantages and a semantic density reward (arXiv:2605.19416).

The group's mean makes one number of the relations between responses. LambdaPO's advantage is the sum, over all other members of the group, of
reward differences, each attenuated by the policy's own confidence in the order that the rewards establish. The density reward is how well trace
and reference solution cover one another (precision and recall), which tells wrong answers apart. The earlier version of LamPO (lampo.py), with which
it shares the pairs; LamPO's advantage is 2/(G-1) times this one. As a sum it grows with the group: tune the step, or use scale="group". The paper was
withdrawn; the sum of attenuated differences is from digests of it, the confidence, the density and their weights are [reconstructed].
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.seams.credit import pair_matrix, preference_pairs, sequence_score
from anypo.seams.groups import broadcast, group_max
from anypo.seams.objective import ClippedSurrogate
from anypo.seams.regularize import KLPenalty
from anypo.seams.reward import row_reward, with_agreement

if TYPE_CHECKING:
    from anypo.run import Run


class Density(NamedTuple):
    """Precision, recall and their harmonic mean, by the paper's letters."""

    P: float
    R: float
    F: float


def density(trace: Sequence[Hashable] | Tensor, solution: Sequence[Hashable] | Tensor, beta: float = 1.0) -> float:
    """Equation 1: F measure, recall weighted by `beta`, of the tokens that trace and solution share as multisets; in [0,1], 0 without overlap."""
    first, second = (tokens.tolist() if isinstance(tokens, Tensor) else tokens for tokens in (trace, solution))
    shared = (Counter(first) & Counter(second)).total()
    return _f_measure(shared / len(first), shared / len(second), beta) if shared else 0.0


def soft_density(trace: Float[Tensor, "n D"], solution: Float[Tensor, "m D"], beta: float = 1.0) -> Density:
    """Equation 1 for embedded tokens: P the mean over the trace of its best cosine in the solution, R the reverse (greedy matching as in
    BERTScore, arXiv:1904.09675). All 0 when one of them is empty; F is 0 unless both are positive."""
    if not len(trace) or not len(solution):
        return Density(0.0, 0.0, 0.0)
    cosine = torch.nn.functional.normalize(trace, dim=-1) @ torch.nn.functional.normalize(solution, dim=-1).T
    precision, recall = float(cosine.amax(1).mean()), float(cosine.amax(0).mean())
    return Density(precision, recall, _f_measure(precision, recall, beta) if min(precision, recall) > 0 else 0.0)


def _f_measure(precision: float, recall: float, beta: float) -> float:
    return (1 + beta**2) * precision * recall / (beta**2 * precision + recall)


def pair_weights(
    reward: Float[Tensor, " N"], group: Int[Tensor, " N"], old_logp: Float[Tensor, "N T"], mask: Tensor, tau: float = 1.0
) -> Float[Tensor, "N N"]:
    """Equations 3-4: the attenuation 1 - q_ij in (0,1), symmetric, 1/2 for equal rewards; 0 outside groups and on the diagonal."""
    pairs = preference_pairs(reward, group, sequence_score(old_logp, mask), tau)
    return pair_matrix(pairs.rows, pairs.doubt)


def advantages(
    reward: Float[Tensor, " N"], group: Int[Tensor, " N"], old_logp: Float[Tensor, "N T"], mask: Tensor, tau: float = 1.0, scale: str | None = None
) -> Float[Tensor, " N"]:  # fmt: skip
    """Equations 4-5: the sum over the other members of attenuation times reward difference; with scale "group" over the group's largest size.
    Sums to 0 over a group; 0 for a lone member and for groups that earn all the same. Raises ValueError for another scale."""
    if scale not in (None, "group"):
        raise ValueError(f"unknown scale '{scale}'; use group or none")
    pairs = preference_pairs(reward, group, sequence_score(old_logp, mask), tau)
    total = (pairs.doubt * pairs.gap).sum(1)
    if scale is None:
        return total
    largest = group_max(total.abs(), group)
    return torch.where(largest > 0, total / largest.clamp(min=torch.finfo(total.dtype).tiny), torch.zeros_like(total))


@dataclass
class DensityReward:
    """The task's reward plus eta times the density of the reference solution in the response, where the problem has one."""

    eta: float = 0.2  # >= 0; 0: outcome alone
    beta: float = 1.0  # > 0, weight of recall against precision
    embed: Callable[[list[str]], Tensor] | None = None  # tokens -> [n,D], for `soft_density`; None compares the tokens themselves
    weights: tuple[float, ...] | None = None  # of the task's K rewards, which become one here; None = all 1

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        return with_agreement(batch, run, self.measure, self.eta, self.weights)

    def measure(self, trace: list[str], solution: list[str]) -> float:
        """Density of two token lists; 0 when one of them is empty."""
        if self.embed is None or not trace or not solution:
            return density(trace, solution, self.beta)
        return soft_density(self.embed(trace), self.embed(solution), self.beta).F


@dataclass
class PairwisePreference:
    """Sum of the reward differences to the prompt's other responses, attenuated by the policy's confidence in their order."""

    tau: float = 1.0  # > 0, temperature of the policy's preference; inf: Dr. GRPO times G/2
    scale: str | None = None  # "group": over the group's largest advantage; None: the plain sum, which grows with G
    weights: tuple[float, ...] | None = None  # of K rewards, where the reward seam leaves them apart; None = all 1

    compares_group = True

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        reward = row_reward(batch, self.weights)
        return broadcast(advantages(reward, batch.group, batch.logp, batch.mask, self.tau, self.scale), batch.mask)


METHOD = GRPO.but(
    name="lambdapo",
    paper=Paper("LambdaPO: A Lambda Style Policy Optimization for Reasoning Language Models", "2605.19416", 2026),
    summary="sum of reward differences to every other response, attenuated by the policy's confidence in their order; density reward",
    reward=DensityReward(),
    credit=PairwisePreference(),
    objective=ClippedSurrogate(clip_low=0.2, clip_high=0.2, aggregation="token_mean"),
    regularize=(KLPenalty(beta=0.01, aggregation="token_mean"),),
)
