"""ExPPO: exploration-preserving policy optimization (arXiv:2610.04011).

Under GRPO equally rewarded responses have equal advantages, so a right way of answering earns credit in proportion to how often it is sampled:
common ways grow and rare ones die out. ExPPO multiplies each advantage by a bounded factor of how surprising the response was beside the prompt's
other responses, and of the prompt's pass rate, then rescales the group so that its total absolute advantage stays what it was. Signs never change.
From the abstract: length-normalized surprisal relative to the prompt, pass rate, bounded shaping and a shared normalization that keeps signs and
mass. The forms of equations 2-6 and all defaults are [reconstructed].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.seams.groups import broadcast, group_mean, group_size, group_sum, standardize
from anypo.seams.reward import weighted_sum

if TYPE_CHECKING:
    from anypo.run import Run

RIGHT_ABOVE = 0.5  # a response with a reward above it is right


class Surprisal(NamedTuple):
    u: Tensor  # [N] >= 0, mean over a row's tokens
    z: Tensor  # [N] relative to the row's group


def surprisal(old_logp: Float[Tensor, "N T"], mask: Tensor, group: Int[Tensor, " N"]) -> Surprisal:
    """Equations 1-2: mean of -log-prob over each row's tokens under the policy that sampled them, absolute and relative to the group.

    Relative: standardized with the population std. Rows without tokens have 0 and count in no statistic. No gradient.
    """
    inside = mask.bool()
    length = inside.sum(dim=1)
    u = -torch.where(inside, old_logp.detach(), old_logp.new_zeros(())).sum(dim=1) / length.clamp(min=1)
    apart = int(group.max()) + 1 + torch.arange(len(group), device=group.device) if len(group) else group
    return Surprisal(u, standardize(u, torch.where(length > 0, group, apart), ddof=0, eps=1e-6))


def factors(
    advantage: Float[Tensor, " N"], z: Float[Tensor, " N"], pass_rate: Float[Tensor, " N"], lam: float = 0.5
) -> Float[Tensor, " N"]:
    """Equations 3-5, within (1 - lam, 1 + lam): above 1 for surprising right and for unsurprising wrong responses.

    The right ones are told apart as strongly as the prompt is easy (`pass_rate`), the wrong ones as it is hard.
    """
    strength = torch.where(advantage > 0, pass_rate, 1 - pass_rate)
    return 1 + lam * strength * torch.tanh(z) * torch.sign(advantage)


def shared_normalizer(
    advantage: Float[Tensor, " N"], factor: Float[Tensor, " N"], group: Int[Tensor, " N"], c_min: float = 0.5, c_max: float = 2.0
) -> Float[Tensor, " N"]:
    """Equation 6: what keeps the group's sum of |advantage| under the factors, clipped to [c_min, c_max]; 1 where all advantages are 0."""
    before, after = group_sum(advantage.abs(), group), group_sum(advantage.abs() * factor, group)
    return torch.where(before > 0, before / after.clamp(min=torch.finfo(after.dtype).tiny), torch.ones_like(before)).clamp(c_min, c_max)


def advantages(
    reward: Float[Tensor, " N"], group: Int[Tensor, " N"], mask: Tensor, old_logp: Float[Tensor, "N T"], lam: float = 0.5, c_min: float = 0.5,
    c_max: float = 2.0, right: Bool[Tensor, " N"] | None = None,
) -> Float[Tensor, "N T"]:  # fmt: skip
    """Equations 1-7: GRPO's advantages (sample std; a lone response keeps its reward) times factor and normalizer, at every token of the mask.

    `right`: the verifier's verdicts, where the reward is shaped by more than them; None = a reward above 0.5.
    """
    base = torch.where(group_size(group) == 1, reward, standardize(reward, group, ddof=1, eps=1e-6))
    verdict = reward > RIGHT_ABOVE if right is None else right
    factor = factors(base, surprisal(old_logp, mask, group).z.to(base), group_mean(verdict.to(base), group), lam)
    return broadcast(shared_normalizer(base, factor, group, c_min, c_max) * factor * base, mask)


@dataclass
class ExplorationPreserving:
    """Group-relative advantages, tilted within each group towards surprising right responses and unsurprising wrong ones."""

    lam: float = 0.5  # in [0,1); 0 = GRPO with the sample standard deviation
    c_min: float = 0.5  # in [0,1], smallest shared normalizer
    c_max: float = 2.0  # >= 1, largest shared normalizer
    weights: tuple[float, ...] | None = None  # of the K rewards; None = all 1

    compares_group = True

    def __post_init__(self) -> None:
        if not 0 <= self.lam < 1:
            raise ValueError(f"credit.lam must be in [0,1) so that advantages keep their signs, not {self.lam}")

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        assert batch.reward is not None
        reward = self._per_row(batch, batch.reward)
        right = self._per_row(batch, batch.signals.get("task_reward", batch.reward)) > RIGHT_ABOVE  # the task's verdict, before any shaping
        relative = surprisal(batch.logp, batch.mask, batch.group).z
        if right.any():
            run.log(surprisal_of_right=float(relative[right].mean()))
        return advantages(reward, batch.group, batch.mask, batch.logp, self.lam, self.c_min, self.c_max, right)

    def _per_row(self, batch: Batch, reward: Tensor) -> Tensor:
        return reward.sum(dim=1) if batch.reward_is_dense and reward.dim() == 2 else weighted_sum(reward, self.weights)


METHOD = GRPO.but(
    name="exppo",
    paper=Paper("ExPPO: exploration-preserving policy optimization", "2610.04011", 2026),
    summary="inside each group surprising right responses earn more, unsurprising wrong ones cost more; the group's total stays",
    credit=ExplorationPreserving(),
)
