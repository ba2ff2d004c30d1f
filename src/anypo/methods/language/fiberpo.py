"""FiberPO: fibration policy optimization (arXiv:2603.08239).

PPO and GRPO clip each token's ratio, GSPO one ratio a response: one scale only. FiberPO splits the log-ratio of a token into the response's mean
(the base) and the token's residual around it (the fiber) and gates the two with budgets of their own. Near on-policy every gate is open and the
first-order direction is the true policy gradient. The construction nests: FiberPO-Domain gates domain, prompt group, response and token. The theory
behind it: the sample-based total-variation trust region has an exact unconstrained form (APC-Obj), in which samples stop contributing when the
aggregate budget is spent. Against GRPO it changes the objective. The formulas are [reconstructed] throughout from the abstract.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.policy import Loss, Signals
from anypo.seams.groups import broadcast, group_size, group_sum, masked_mean
from anypo.seams.objective import aggregate, log_ratio

if TYPE_CHECKING:
    from anypo.run import Run


class LossValue(NamedTuple):
    loss: Tensor  # scalar, differentiable in logp


class Gated(NamedTuple):
    aggregate: Tensor  # [N] mean log-ratio of each row, equation 1
    residual: Tensor  # [N,T] the token's log-ratio around it, equation 2
    ratio: Tensor  # [N,T] gated ratio, 0 outside the mask, equation 3


class DomainGated(NamedTuple):
    ratio: Tensor  # [N,T] gated ratio, 0 outside the mask, equation 6
    v_domain: Tensor  # [N] the domain's mean
    v_group: Tensor  # [N] the group's mean around it
    v_traj: Tensor  # [N] the row's mean around that


class Censored(NamedTuple):
    tv: Tensor  # half the mean |r - 1|
    objective: Tensor  # equation 7
    optimum: Tensor  # equation 8: its maximum over r >= 0


def clipgate(value: Tensor, budget: float | None) -> Tensor:
    """A log-ratio within [log(1 - budget), log(1 + budget)]: identity inside, constant (no gradient) outside; None leaves it open.

    Raises ValueError for a budget outside [0,1).
    """
    if budget is None:
        return value
    if not 0 <= budget < 1:
        raise ValueError(f"a gate's budget must be in [0,1) or None, not {budget}")
    return value.clamp(math.log1p(-budget), math.log1p(budget))


def gated_ratio(
    logp: Float[Tensor, "N T"], old_logp: Float[Tensor, "N T"], mask: Tensor, eps_token: float | None = 0.2, eps_traj: float | None = 0.05
) -> Gated:
    """Equations 1-3. The gradient flows through the aggregate."""
    inside, mean, residual = _base_and_fiber(logp, old_logp, mask)
    ratio = (clipgate(mean, eps_traj)[:, None] + clipgate(residual, eps_token)).exp()
    return Gated(mean, residual, ratio * inside)


def domain_ratio(
    logp: Float[Tensor, "N T"], old_logp: Float[Tensor, "N T"], mask: Tensor, group: Int[Tensor, " N"], domain: Int[Tensor, " N"],
    eps_domain: float | None = 0.02, eps_group: float | None = 0.03, eps_traj: float | None = 0.05, eps_token: float | None = 0.2,
) -> DomainGated:  # fmt: skip
    """Equations 5-6: each level is gated as a residual around the level above. Groups are means over rows, domains means over groups; rows without
    actions count in neither. A group lies in one domain."""
    inside, mean, residual = _base_and_fiber(logp, old_logp, mask)
    present = inside.any(1).to(mean.dtype)
    members = group_sum(present, group)
    group_mean = group_sum(mean * present, group) / members.clamp(min=1)
    share = (members > 0) / group_size(group)  # sums to 1 over the rows of a group that counts
    domain_mean = group_sum(group_mean * share, domain) / group_sum(share, domain).clamp(min=1)
    v_group, v_traj = group_mean - domain_mean, (mean - group_mean) * present
    gated = clipgate(domain_mean, eps_domain) + clipgate(v_group, eps_group) + clipgate(v_traj, eps_traj)
    ratio = (gated[:, None] + clipgate(residual, eps_token)).exp() * inside
    return DomainGated(ratio, domain_mean, v_group, v_traj)


def loss(
    logp: Float[Tensor, "N T"], old_logp: Float[Tensor, "N T"], mask: Tensor, advantages: Tensor, eps_token: float | None = 0.2,
    eps_traj: float | None = 0.05, pessimistic: bool = False,
) -> LossValue:  # fmt: skip
    """Equation 4: minus the token mean of R A, or of min(R A, rho A) when `pessimistic`. `advantages` [N] or [N,T]."""
    ratio = gated_ratio(logp, old_logp, mask, eps_token, eps_traj).ratio
    return LossValue(_surrogate(ratio, logp, old_logp, mask, advantages, pessimistic))


def apc(ratio: Float[Tensor, " n"], advantages: Float[Tensor, " n"], delta: float) -> Censored:
    """Equations 7-8: the aggregational policy censoring objective at these ratios, and its maximum in closed form.

    The penalty 2 max|A| (and a little) on the excess total variation is exact: no unit of the budget earns more than that.
    """
    count, size = len(ratio), advantages.abs()
    tv = (ratio - 1).abs().mean() / 2
    objective = (ratio * advantages).mean() - 2 * size.max() * (1 + 1e-3) * (tv - delta).clamp(min=0.0)
    order = size.argsort(descending=True, stable=True)
    unbounded = torch.full_like(size, float("inf"))
    room = torch.where(advantages[order] < 0, unbounded.new_tensor(1 / (2 * count)), unbounded)  # a ratio falls no further than to 0
    earlier = torch.cat([room.new_zeros(1), room.cumsum(0)[:-1]])
    spent = torch.minimum((delta - earlier).clamp(min=0.0), room)
    return Censored(tv, objective, advantages.mean() + 2 * (size[order] * spent).sum())


def _base_and_fiber(logp: Tensor, old_logp: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The mask [N,T] as bool, each row's mean log-ratio [N] (0 for an empty row) and the residuals around it [N,T] (0 outside the mask)."""
    inside = mask.bool()
    difference = log_ratio(logp, old_logp, mask)
    mean = difference.sum(1) / inside.sum(1).clamp(min=1)
    return inside, mean, torch.where(inside, difference - mean[:, None], torch.zeros_like(difference))


def _surrogate(ratio: Tensor, logp: Tensor, old_logp: Tensor, mask: Tensor, advantages: Tensor, pessimistic: bool) -> Tensor:
    per_token = broadcast(advantages, mask) if advantages.dim() == 1 else advantages
    value = ratio * per_token
    if pessimistic:
        value = torch.minimum(value, log_ratio(logp, old_logp, mask).exp() * per_token)
    return -aggregate(value, mask, "token_mean")


@dataclass
class FiberGate:
    """The two-level gate: responses and their tokens."""

    eps_token: float | None = 0.2  # budget of a token around its response, in [0,1); None = no gate
    eps_traj: float | None = 0.05  # budget of the response's mean log-ratio, in [0,1); None = no gate
    pessimistic: bool = False  # the smaller of the gated and the plain surrogate, which pulls back from outside the band

    needs = frozenset({"logp"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        mask = batch.counted
        gated = gated_ratio(new.logp, batch.logp, mask, self.eps_token, self.eps_traj)
        value = _surrogate(gated.ratio, new.logp, batch.logp, mask, batch.advantage, self.pessimistic)
        closed = (clipgate(gated.aggregate, self.eps_traj) != gated.aggregate).to(value.dtype)
        drift = float(gated.aggregate.detach().abs().max())
        return Loss(value, {"closed_trajectories": float(masked_mean(closed, mask.any(1))), "largest_drift": drift})


@dataclass
class DomainFiberGate:
    """The four-level gate (FiberPO-Domain): domains, prompt groups, responses, tokens. The signal `domain` [N] numbers the domains; a task without
    it is one domain."""

    eps_domain: float | None = 0.02  # budgets of each level around the one above, in [0,1); None = no gate
    eps_group: float | None = 0.03
    eps_traj: float | None = 0.05
    eps_token: float | None = 0.2
    pessimistic: bool = False  # the smaller of the gated and the plain surrogate

    needs = frozenset({"logp"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        mask = batch.counted
        domain = batch.signals.get("domain", torch.zeros_like(batch.group))
        budgets = (self.eps_domain, self.eps_group, self.eps_traj, self.eps_token)
        gated = domain_ratio(new.logp, batch.logp, mask, batch.group, domain, *budgets)
        value = _surrogate(gated.ratio, new.logp, batch.logp, mask, batch.advantage, self.pessimistic)
        return Loss(value, {"largest_domain_drift": float(gated.v_domain.detach().abs().max())})


METHOD = GRPO.but(
    name="fiberpo",
    paper=Paper("Fibration Policy Optimization", "2603.08239", 2026),
    summary="the mean log-ratio of a response and its tokens' residuals around it are gated apart, each with a budget of its own",
    objective=FiberGate(),
    regularize=(),
)
FIBERPO_DOMAIN = METHOD.but(
    name="fiberpo.domain", summary="four gates: domain, prompt group, response and token", objective=DomainFiberGate()
)
VARIANTS = {"domain": FIBERPO_DOMAIN}
