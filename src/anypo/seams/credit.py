"""Which action gets how much: the estimators that several methods share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.seams.groups import broadcast, group_mean, masked_mean, masked_std, peers, standardize
from anypo.seams.reward import row_reward, weighted_sum

if TYPE_CHECKING:
    from anypo.run import Run


def group_relative(
    reward: Float[Tensor, " N"], group: Int[Tensor, " N"], std: bool = True, ddof: int = 0, eps: float = 1e-6
) -> Float[Tensor, " N"]:
    """Reward minus the group's mean, over (group std + eps) when `std` (arXiv:2402.03300). Lone members and groups without spread get 0."""
    if std:
        return standardize(reward, group, ddof, eps)
    return reward - group_mean(reward, group)


class Estimate(NamedTuple):
    """Advantages and the value targets that belong to them, [N,T] each."""

    advantages: Tensor
    returns: Tensor


def gae(
    reward: Tensor,
    value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    mask: Tensor,
    gamma: float,
    lam: float,
    next_value: Tensor | None = None,
    bootstrap_value: Tensor | None = None,
) -> Estimate:
    """Generalized advantage estimation (arXiv:1506.02438) with termination told apart from truncation (arXiv:1712.00378).

    All [N,T]; `next_value` is the value of the observation reached before any auto-reset, or else `bootstrap_value` [N] follows the last action.
    A terminated step has no value after it; a truncated one keeps its bootstrap but ends the trace.
    """
    if next_value is None:
        last = bootstrap_value if bootstrap_value is not None else value.new_zeros(value.shape[0])
        next_value = torch.cat([value[:, 1:], last[:, None]], dim=1)
    zero = value.new_zeros(())
    inside = mask.bool()
    alive = 1 - terminated.to(value.dtype)
    carry = alive * (1 - truncated.to(value.dtype))
    following = torch.cat([inside[:, 1:], torch.zeros_like(inside[:, :1])], dim=1).to(value.dtype)
    delta = torch.where(inside, reward + gamma * torch.where(alive > 0, next_value, zero) * alive - value, zero)
    advantage, out = value.new_zeros(value.shape[0]), torch.zeros_like(delta)
    for t in range(delta.shape[1] - 1, -1, -1):
        advantage = delta[:, t] + gamma * lam * carry[:, t] * following[:, t] * advantage
        out[:, t] = torch.where(inside[:, t], advantage, zero)
    return Estimate(out, torch.where(inside, out + value, zero))


def whiten(advantages: Tensor, mask: Tensor, eps: float = 1e-8) -> Float[Tensor, "N T"]:
    """(A - mean) / (std + eps) over the masked actions [N,T], population std; 0 outside the mask."""
    centred = (advantages - masked_mean(advantages, mask)) / (masked_std(advantages, mask) + eps)
    return torch.where(mask.bool(), centred, torch.zeros_like(advantages))


def dense_reward(batch: Batch, weights: tuple[float, ...] | None = None) -> Float[Tensor, "N T"]:
    """The reward as [N,T]: dense values as they are, one number a row (or the weighted sum of K) at the row's last action."""
    assert batch.reward is not None
    if batch.reward_is_dense:
        return batch.reward
    total = weighted_sum(batch.reward, weights)
    return torch.where(last_action(batch.mask), total[:, None], total.new_zeros(()))


def last_action(mask: Tensor) -> Bool[Tensor, "N T"]:
    """Where the last action of each row is; nowhere in a row without actions."""
    still_to_come = mask.long().flip(1).cumsum(1).flip(1)
    return mask.bool() & (still_to_come == 1)


@dataclass
class GroupRelative:
    """Reward relative to the other attempts at the same prompt (GRPO; without `std` Dr. GRPO)."""

    std: bool = True  # divide by the group's standard deviation
    ddof: int = 0  # 0 population, 1 sample standard deviation
    eps: float = 1e-6  # > 0, added to the standard deviation
    weights: tuple[float, ...] | None = None  # of the K rewards before they are compared; None = all 1

    compares_group = True

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        reward = row_reward(batch, self.weights)
        return broadcast(group_relative(reward, batch.group, self.std, self.ddof, self.eps), batch.mask)


@dataclass
class GAE:
    """Generalized advantage estimates from the critic; leaves the value targets in `batch.signals["returns"]`."""

    gamma: float = 0.99  # discount, in [0,1]
    lam: float = 0.95  # trace decay, in [0,1]
    normalize: bool = True  # whiten over the batch

    needs = frozenset({"old_value"})
    gives = frozenset({"returns"})

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        value = batch.signal("old_value")
        terminated, truncated = per_action_ends(batch)
        estimate = gae(dense_reward(batch), value, terminated, truncated, batch.mask, self.gamma, self.lam, batch.next_value)
        batch.signals["returns"] = estimate.returns
        return whiten(estimate.advantages, batch.mask) if self.normalize else estimate.advantages


@dataclass
class NoCredit:
    """Nothing to hand out: the objective looks at no advantages (imitation, gradients through the actions themselves)."""

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        return torch.zeros(batch.mask.shape)


def per_action_ends(batch: Batch) -> tuple[Tensor, Tensor]:
    """`terminated` and `truncated` as [N,T]; where they are given per row [N], they hold at the row's last action."""
    ends = []
    for flag in (batch.terminated, batch.truncated):
        if flag is None:
            flag = torch.zeros(len(batch), dtype=torch.bool)
        if flag.dim() == 1:
            flag = last_action(batch.mask) & flag[:, None]
        ends.append(flag)
    return ends[0], ends[1]


class Pairs(NamedTuple):
    """Every row against the other members of its group, [N,G] each with G the size of the largest group; 0 where there is no other member."""

    rows: Tensor  # int64, the other member
    gap: Tensor  # reward of the row minus that of the other
    doubt: Tensor  # 1 - the policy's confidence in the order that the rewards give, in (0,1); 1/2 for equal rewards


def sequence_score(logp: Float[Tensor, "N T"], mask: Tensor, how: str = "mean") -> Float[Tensor, " N"]:
    """The detached mean (or "sum") of a row's log-probs over the mask; 0 for a row without actions. Raises ValueError for another `how`."""
    if how not in ("mean", "sum"):
        raise ValueError(f"unknown sequence score '{how}'; use mean or sum")
    total = torch.where(mask.bool(), logp.detach(), logp.new_zeros(())).sum(1)
    return total / mask.sum(1).clamp(min=1) if how == "mean" else total


def preference_pairs(reward: Float[Tensor, " N"], group: Int[Tensor, " N"], score: Float[Tensor, " N"], tau: float) -> Pairs:
    """Reward gaps and doubts sigmoid(-sgn(r_i - r_j) (s_i - s_j) / tau) of all pairs inside groups (arXiv:2605.19416, 2605.21235; [reconstructed]
    as one minus a Bradley-Terry preference of the policy's scores). Doubts are symmetric, gaps antisymmetric. `tau` > 0; infinite: all doubts 1/2.
    Raises ValueError for another `tau`."""
    if not tau > 0:
        raise ValueError(f"tau is a temperature above 0, not {tau}")
    rows, other = peers(group)
    gap = reward[:, None] - reward[rows]
    doubt = torch.sigmoid(-gap.sign() * (score[:, None] - score[rows]).to(gap) / tau)
    return Pairs(rows, gap, torch.where(other, doubt, torch.zeros_like(doubt)))


def pair_matrix(rows: Int[Tensor, "N G"], values: Float[Tensor, "N G"]) -> Float[Tensor, "N N"]:
    """Values of pairs as one matrix over all rows, 0 outside groups and on the diagonal."""
    return values.new_zeros(len(values), len(values)).scatter(1, rows, values)
