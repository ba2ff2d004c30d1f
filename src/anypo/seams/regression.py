"""Policy optimization as least squares: the log-ratio of a whole response is regressed onto what the response is worth.

The optimum of E[r] - beta KL(pi || mu) satisfies beta log(pi/mu)(y) = r(y) - V*(x) for every y, whatever distribution the responses came from, so a
squared error takes the place of ratios and clips. REBEL compares responses in pairs, A*-PO and OAPL subtract an estimate of V*. Left out: what
gives the advantages, which is the credit's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.policy import Loss, Signals
from anypo.seams.groups import group_max, group_mean, group_size

if TYPE_CHECKING:
    from anypo.run import Run


def sequence_log_ratio(logp: Float[Tensor, "N T"], anchor_logp: Float[Tensor, "N T"], mask: Tensor) -> Float[Tensor, " N"]:
    """S: the sum over a row's actions of log pi - log anchor, neither averaged nor bounded; 0 for a row without actions."""
    inside, zero = mask.bool(), logp.new_zeros(())
    return (torch.where(inside, logp, zero) - torch.where(inside, anchor_logp, zero)).sum(1)


def preference_margin(
    logp: Float[Tensor, "N T"], ref_logp: Float[Tensor, "N T"], mask: Tensor, pairs: Int[Tensor, "P 2"], beta: float
) -> Float[Tensor, " P"]:
    """DPO's margin (arXiv:2305.18290): beta times how much more the better row of a pair gained on the reference than the worse one."""
    ratio = sequence_log_ratio(logp, ref_logp, mask)
    return beta * (ratio[pairs[:, 0]] - ratio[pairs[:, 1]])


def row_advantage(advantage: Float[Tensor, "N T"], mask: Tensor) -> Float[Tensor, " N"]:
    """One number a row from advantages per action: their mean over the row's actions (itself where a credit gave the row one number)."""
    inside = mask.bool()
    return torch.where(inside, advantage, torch.zeros_like(advantage)).sum(1) / inside.sum(1).clamp(min=1)


def soft_value(reward: Float[Tensor, " N"], group: Int[Tensor, " N"], beta: float) -> Float[Tensor, " N"]:
    """beta log mean exp(reward / beta) over each row's group: the optimal value V* of the KL-regularized problem, estimated from samples of the
    reference. Between the group's mean (beta = infinity) and its maximum (beta -> 0), both of which are allowed. Raises ValueError for beta < 0."""
    if beta < 0:
        raise ValueError(f"the temperature of the optimal value must be at least 0, not {beta}")
    if beta == float("inf"):
        return group_mean(reward, group)
    largest = group_max(reward, group)
    return largest if beta == 0 else largest + beta * group_mean(((reward - largest) / beta).exp(), group).log()


def regression_error(log_ratio: Float[Tensor, " N"], advantage: Float[Tensor, " N"], beta: float) -> Float[Tensor, " N"]:
    """(beta S - A)^2 of every row; the advantage carries no gradient."""
    return (beta * log_ratio - advantage.detach()) ** 2


def mean_of_groups(values: Float[Tensor, " N"], group: Int[Tensor, " N"]) -> Tensor:
    """Mean over groups of each group's mean; 0 for no rows."""
    if len(values) == 0:
        return values.sum()
    weight = 1 / group_size(group).to(values.dtype)
    return (values * weight).sum() / weight.sum()


@dataclass
class AdvantageRegression:
    """Squared error of beta times the response's log-ratio to an anchor policy against its advantage; mean over groups of each group's mean."""

    beta: float = 0.1  # weight of the KL to the anchor, > 0, in units of reward
    anchor: str = "old"  # old: the policy that acted; ref: the frozen reference

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"logp", "ref_logp"}) if self.anchor == "ref" else frozenset({"logp"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        if self.anchor not in ("old", "ref"):
            raise ValueError(f"objective.anchor must be old or ref, not '{self.anchor}'")
        mask = batch.counted
        anchor_logp = batch.logp if self.anchor == "old" else batch.signal("ref_logp")
        log_ratio = sequence_log_ratio(new.logp, anchor_logp, mask)
        error = regression_error(log_ratio, row_advantage(batch.advantage, mask), self.beta)
        return Loss(mean_of_groups(error, batch.group), {"sequence_log_ratio": float(log_ratio.detach().abs().mean())})
