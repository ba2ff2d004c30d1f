"""BNPO: Beta normalization policy optimization (arXiv:2506.02864).

With a binary verifier every prompt has a success rate. REINFORCE with a group baseline does not normalize the centred reward, GRPO divides it by
the group's standard deviation; both are fixed. BNPO fits a Beta distribution to the success rates of the batch at every step and divides by a
second Beta density, chosen so that the variance of the gradient is smallest: the normalization follows the policy as it improves. Rewards of
several binary parts are normalized one by one and the advantages averaged. Equations 1-4 and 7 from the paper, the floor, the cap and the mean in
7 from the authors' code. As there, a lone response has baseline 0.
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
from anypo.seams.groups import broadcast, group_mean, group_size
from anypo.seams.objective import ClippedSurrogate
from anypo.seams.reward import objectives

if TYPE_CHECKING:
    from anypo.run import Run

SMALLEST_VARIANCE = 1e-12  # of the success rates, when all groups are alike


class BetaParameters(NamedTuple):
    """The Beta(a, b) of the success rates and the Beta(alpha, beta) that normalizes."""

    a: float
    b: float
    alpha: float
    beta: float


def success_rates(reward: Float[Tensor, " N"], group: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
    """Equation 1: the mean reward of each row's group, every member included; 0 for a lone member."""
    rate = group_mean(reward, group)
    return torch.where(group_size(group) > 1, rate, torch.zeros_like(rate))


def beta_params(reward: Float[Tensor, " N"], group: Int[Tensor, " N"]) -> BetaParameters:
    """Equations 2-3: moment estimates of (a, b) over the groups (unbiased variance), and the normalizer of least variance, floored at 1.

    One group alone gives the uniform density (alpha = beta = 1), which is the plain baseline.
    """
    _, index = torch.unique(group, return_inverse=True)
    groups = int(index.max()) + 1
    rate = torch.zeros(groups, dtype=torch.float64).index_copy(0, index, success_rates(reward, group).double())
    mean, variance = (float(rate.mean()), float(rate.var(correction=1))) if groups > 1 else (0.0, 1.0)
    concentration = mean * (1 - mean) / max(variance, SMALLEST_VARIANCE) - 1
    a, b = concentration * mean, concentration * (1 - mean)
    return BetaParameters(a, b, max(1.0, 1 + a / 3), max(1.0, 1 + b / 3))


def normalizer(rate: Float[Tensor, " N"], alpha: float, beta: float, w_max: float = 1e6) -> Float[Tensor, " N"]:
    """Equations 4-5: one over the Beta(alpha, beta) density at the success rate, at most `w_max`. Finite at 0 and 1."""
    p, a, b = rate.double(), torch.tensor(alpha, dtype=torch.float64), torch.tensor(beta, dtype=torch.float64)
    log_density = _power_log(p, alpha - 1) + _power_log(1 - p, beta - 1) - _log_beta(a, b)
    return torch.exp(-log_density).clamp(max=w_max).to(rate.dtype)


def advantages(
    reward: Tensor, group: Int[Tensor, " N"], mask: Tensor, alpha: float | None = None, beta: float | None = None, w_max: float = 1e6
) -> Float[Tensor, "N T"]:
    """Equations 1-7: rewards [N] or [N,K] in [0,1] and mask [N,T] -> [N,T]. `alpha` and `beta` fix the normalizer instead of fitting it."""
    columns = reward[:, None] if reward.dim() == 1 else reward
    parts = []
    for column in columns.unbind(dim=1):
        fitted = beta_params(column, group)
        rate = success_rates(column, group)
        weight = normalizer(rate, fitted.alpha if alpha is None else alpha, fitted.beta if beta is None else beta, w_max)
        parts.append(weight * (column - rate))
    return broadcast(torch.stack(parts).mean(dim=0), mask)


def variance_factor(a: float, b: float, alpha: float, beta: float) -> float:
    """Variance of the normalized gradient when the success rates are Beta(a, b): E[p(1-p)/f(p; alpha, beta)^2]. Infinite for alpha >= (a+3)/2
    or beta >= (b+3)/2. Smallest at alpha = 1 + a/3, beta = 1 + b/3 [derived]."""
    if alpha >= (a + 3) / 2 or beta >= (b + 3) / 2:
        return float("inf")
    numbers = [torch.tensor(x, dtype=torch.float64) for x in (alpha, beta, a + 3 - 2 * alpha, b + 3 - 2 * beta, a, b)]
    return float(torch.exp(2 * _log_beta(*numbers[:2]) + _log_beta(*numbers[2:4]) - _log_beta(*numbers[4:])))


def _log_beta(a: Tensor, b: Tensor) -> Tensor:
    return torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)


def _power_log(base: Tensor, exponent: float) -> Tensor:
    """exponent * log(base), with 0 * log 0 = 0."""
    return torch.xlogy(torch.full_like(base, exponent), base)


@dataclass
class BetaNormalization:
    """Centred binary rewards over a Beta density that follows the batch's success rates."""

    alpha: float | None = None  # >= 1, fixes the normalizer (1 and 1: plain baseline; 1.5 and 1.5: GRPO up to a factor); None = fitted
    beta: float | None = None  # >= 1, as alpha
    lowest: float = 0.0  # the reward of a wrong response
    highest: float = 1.0  # the reward of a right one, > lowest
    w_max: float = 1e6  # > 0, largest normalizer

    compares_group = True

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        reward = (objectives(batch) - self.lowest) / (self.highest - self.lowest)
        if bool(((reward < 0) | (reward > 1)).any()):
            raise ValueError("bnpo needs binary rewards between credit.lowest and credit.highest; set these two to the task's reward range")
        fitted = [beta_params(column, batch.group) for column in reward.unbind(dim=1)]
        run.log(beta_alpha=sum(f.alpha for f in fitted) / len(fitted), beta_beta=sum(f.beta for f in fitted) / len(fitted))
        return advantages(reward, batch.group, batch.mask, self.alpha, self.beta, self.w_max)


METHOD = GRPO.but(
    name="bnpo",
    paper=Paper("BNPO: Beta Normalization Policy Optimization", "2506.02864", 2025),
    summary="the centred reward over a Beta density fitted to the batch's success rates",
    credit=BetaNormalization(),
    objective=ClippedSurrogate(clip_low=0.2, clip_high=0.28, aggregation="constant", max_len=1),
    regularize=(),
).set("select.group_size", 16)
