"""AVSPO: adaptive virtual sample policy optimization, with the advantage collapse rate (arXiv:2605.21125).

When all responses to a prompt earn the same, GRPO's advantage is zero and the group is wasted. The advantage collapse rate (ACR) is the share of
such groups; measured early it foretells where training ends. While it lies above an adaptive threshold, AVSPO mixes virtual rewards into the
statistics of collapsed groups, so that real responses of an all-right group get a positive and those of an all-wrong group a negative advantage.
Virtual samples are numbers in a mean and a deviation: they have no gradient and appear nowhere else. Equations as transcribed by a third party;
the shift for tasks whose wrong answer does not earn 0 is [ours]. All-wrong groups push mass away from everything they tried, which can unlearn a
format: watch it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.seams.groups import broadcast, group_max, group_size, group_std, standardize
from anypo.seams.reward import row_reward

if TYPE_CHECKING:
    from anypo.run import Run

TOLERANCE = 1e-6  # a group whose standard deviation is below this has collapsed


class Injection(NamedTuple):
    """What one step of equations 1-5 gives."""

    advantages: Tensor  # [N]
    tau: float  # the threshold after its update
    triggered: int  # 1 when virtual samples were mixed in


def acr(reward: Float[Tensor, " N"], group: Int[Tensor, " N"], tol: float = TOLERANCE) -> float:
    """Equation 1: the share of groups (not of rows) whose rewards have a standard deviation below `tol`."""
    collapsed = (group_std(reward, group) < tol).double()
    one_a_group = 1 / group_size(group).double()
    return float((collapsed * one_a_group).sum() / one_a_group.sum())


def virtual(reward: Float[Tensor, " G"], acr: float, alpha: float = 0.5, r_anchor: float = 0.1) -> Float[Tensor, " K"]:
    """Equations 2-3: the virtual rewards of one group, the largest first."""
    values, exists = _virtual_values(reward.max()[None], torch.tensor([len(reward)]), acr, alpha, r_anchor)
    return values[exists]


def threshold(tau: float, rate: float, mean_reward: float, prev_J: float | None, eta: float = 0.01) -> float:
    """Equation 4: the threshold moves towards the collapse rate when the mean reward rose, away when it fell; unchanged on the first step."""
    if prev_J is None or mean_reward == prev_J:
        return tau
    return tau + eta * math.copysign(1.0, mean_reward - prev_J) * (rate - tau)


def advantages(
    reward: Float[Tensor, " N"], group: Int[Tensor, " N"], tau: float, prev_J: float | None, eta: float = 0.01, alpha: float = 0.5,
    r_anchor: float = 0.1, eps: float = 1e-8,
) -> Injection:  # fmt: skip
    """Equations 1-5: GRPO's advantages, and in collapsed groups, when the collapse rate exceeds the threshold, those against virtual rewards."""
    rate = acr(reward, group)
    tau = threshold(tau, rate, float(reward.mean()), prev_J, eta)
    plain = standardize(reward, group, ddof=0, eps=eps)
    if rate <= tau:
        return Injection(plain, tau, 0)
    mixed = _against_virtual(reward, group, rate, alpha, r_anchor, eps)
    return Injection(torch.where(group_std(reward, group) < TOLERANCE, mixed, plain), tau, 1)


def _against_virtual(reward: Tensor, group: Tensor, rate: float, alpha: float, r_anchor: float, eps: float) -> Tensor:
    """Every real reward against the statistics of a group of equal rewards and its virtual ones, [N]."""
    real, size = group_max(reward, group), group_size(group)
    values, exists = _virtual_values(real, size, rate, alpha, r_anchor)
    total = size + exists.sum(1)
    mean = (size * real + values.sum(1)) / total
    spread = size * (real - mean) ** 2 + torch.where(exists, (values - mean[:, None]) ** 2, torch.zeros_like(values)).sum(1)
    return (reward - mean) / ((spread / total).sqrt() + eps)


def _virtual_values(largest: Tensor, size: Tensor, rate: float, alpha: float, r_anchor: float) -> tuple[Tensor, Tensor]:
    """Virtual rewards [M,K] of M groups with the given largest reward and size [M], 0 beyond each group's number of them, and which exist."""
    count = (size.double() * rate**alpha).ceil().clamp(min=1).minimum(size.double()).to(largest)
    k = torch.arange(1, int(count.max()) + 1, dtype=largest.dtype)
    exists = k <= count[:, None]
    below = largest[:, None] * (1 - k / (count[:, None] + 1))
    above = r_anchor * (count[:, None] - k + 1) / count[:, None]
    return torch.where(exists, torch.where(largest[:, None] > 0, below, above), torch.zeros_like(below)), exists


@dataclass
class VirtualSamples:
    """GRPO's advantages, with virtual rewards in the statistics of collapsed groups while too many groups collapse."""

    tau: float = 0.5  # initial threshold of the collapse rate, in [0,1]; 1 with eta 0 never injects
    eta: float = 0.01  # rate at which the threshold moves, in [0,1]
    alpha: float = 0.5  # > 0, exponent of the number of virtual samples; smaller gives more
    r_anchor: float = 0.1  # > 0, largest virtual reward of an all-wrong group
    eps: float = 1e-8  # > 0, added to the standard deviation
    wrong: float = 0.0  # the reward of a wrong answer; shifted to 0 before virtual rewards are placed
    weights: tuple[float, ...] | None = None  # of the K rewards; None = all 1
    now: dict[str, Any] = field(default_factory=dict, repr=False)  # the moving threshold and the last mean reward

    compares_group = True

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        reward = row_reward(batch, self.weights)
        reward = reward - self.wrong
        found = advantages(
            reward, batch.group, self.now.get("tau", self.tau), self.now.get("mean_reward"), self.eta, self.alpha, self.r_anchor, self.eps
        )
        self.now = {"tau": found.tau, "mean_reward": float(reward.mean())}
        run.log(acr=acr(reward, batch.group), acr_threshold=found.tau, virtual_samples=found.triggered)
        return broadcast(found.advantages, batch.mask)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.now)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.now = dict(state)


METHOD = GRPO.but(
    name="avspo",
    paper=Paper("Advantage Collapse in Group Relative Policy Optimization: Diagnosis and Mitigation", "2605.21125", 2026),
    summary="virtual rewards in the statistics of groups that earn all the same, while too many groups do",
    credit=VirtualSamples(),
)
