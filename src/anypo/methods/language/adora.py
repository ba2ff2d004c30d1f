"""ADORA: advantage dynamics via online rollout adaptation (arXiv:2602.10019).

Under GRPO a prompt's advantages count the same for the whole of training. ADORA looks at each prompt's fresh responses, decides whether the prompt
is at present an advantageous sample, and multiplies its group's advantages by a weight: disadvantageous ones are attenuated (weak or multimodal
models) or advantageous ones amplified (strong text models). Advantageous by length: some right response is longer than the wrong ones on average,
so longer thinking pays. By difficulty: solvable, but hard for this policy. The weights fit around the advantages of any other credit (`inner`).
Equations 1, 2 and 5 from the authors' code; the difficulty criterion (3) and the factor of amplification are [reconstructed].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Credit, Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.seams.groups import broadcast, group_max, group_size, group_sum, standardize
from anypo.seams.reward import row_reward

if TYPE_CHECKING:
    from anypo.run import Run

CRITERIA = ("length", "difficulty", "both", "either")
MODES = ("attenuate", "amplify")


def advantageous(
    reward: Float[Tensor, " N"], group: Int[Tensor, " N"], mask: Tensor, r_ok: float = 0.5, l_max: float = torch.inf, criterion: str = "length",
    kappa: float = 0.5, empty_correct_is_tas: bool = False,
) -> Bool[Tensor, " N"]:  # fmt: skip
    """Equations 2-4: whether each row's group is advantageous now.

    Wrong responses of `l_max` tokens or more were cut off and do not count. A missing length (no right response, or no wrong one that counts) is
    -inf: no right response is never longer, any right response is longer than none. Raises ValueError for another criterion.
    """
    if criterion not in CRITERIA:
        raise ValueError(f"unknown criterion '{criterion}'; use one of {', '.join(CRITERIA)}")
    length, right = mask.bool().sum(dim=1).double(), reward > r_ok
    wrong = (~right & (length < l_max)).double()
    longest_right = group_max(torch.where(right, length, -torch.inf), group)
    wrong_count = group_sum(wrong, group)
    typical_wrong = torch.where(wrong_count > 0, group_sum(wrong * length, group) / wrong_count.clamp(min=1), -torch.inf)
    share = group_sum(right.double(), group) / group_size(group)
    by_length = longest_right > typical_wrong
    if empty_correct_is_tas:
        by_length = by_length | (share == 0)
    by_difficulty = (share > 0) & (share <= kappa)
    chosen = {"length": by_length, "difficulty": by_difficulty, "both": by_length & by_difficulty, "either": by_length | by_difficulty}
    return chosen[criterion]


def weights(
    reward: Float[Tensor, " N"], group: Int[Tensor, " N"], mask: Tensor, r_ok: float = 0.5, l_max: float = torch.inf, criterion: str = "length",
    kappa: float = 0.5, mode: str = "attenuate", lam: float = 0.1, empty_correct_is_tas: bool = False,
) -> Float[Tensor, " N"]:  # fmt: skip
    """Equation 5: `lam` for disadvantageous groups ("attenuate") or for advantageous ones ("amplify"), else 1. A constant of the step."""
    return _weight(advantageous(reward, group, mask, r_ok, l_max, criterion, kappa, empty_correct_is_tas), mode, lam, reward)


def advantages(
    reward: Float[Tensor, " N"], group: Int[Tensor, " N"], mask: Tensor, r_ok: float = 0.5, l_max: float = torch.inf, criterion: str = "length",
    kappa: float = 0.5, mode: str = "attenuate", lam: float = 0.1, empty_correct_is_tas: bool = False,
) -> Float[Tensor, "N T"]:  # fmt: skip
    """Equations 1-6: `base_advantages` times the group's weight, at every token of the mask."""
    weight = weights(reward, group, mask, r_ok, l_max, criterion, kappa, mode, lam, empty_correct_is_tas)
    return broadcast(weight * base_advantages(reward, group), mask)


def base_advantages(reward: Float[Tensor, " N"], group: Int[Tensor, " N"], eps: float = 1e-6) -> Float[Tensor, " N"]:
    """Equation 1: GRPO's with the sample standard deviation; a lone response keeps its reward."""
    return torch.where(group_size(group) == 1, reward, standardize(reward, group, ddof=1, eps=eps))


def _weight(tas: Tensor, mode: str, lam: float, like: Tensor) -> Tensor:
    if mode not in MODES:
        raise ValueError(f"unknown mode '{mode}'; use attenuate or amplify")
    changed = tas if mode == "amplify" else ~tas
    return torch.where(changed, like.new_tensor(lam), like.new_ones(()))


@dataclass
class RolloutAdaptation:
    """Advantages weighted group by group by what the fresh responses say about the prompt."""

    lam: float = 0.1  # >= 0; weight of disadvantageous groups, or of advantageous ones (2.0) in mode amplify; 1 = off
    mode: str = "attenuate"  # or amplify
    criterion: str = "length"  # length, difficulty, both or either
    kappa: float = 0.5  # in (0,1]; share of right responses up to which a prompt is hard
    r_ok: float = 0.5  # a response with a reward above it is right
    l_max: float | None = None  # tokens from which a wrong response counts as cut off; None = the task's limit
    empty_correct_is_tas: bool = False  # whether a prompt without any right response has a length advantage (multimodal models)
    weights: tuple[float, ...] | None = None  # of the K rewards; None = all 1
    inner: Credit | None = None  # the credit whose advantages are weighted; None = equation 1

    compares_group = True

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        reward = row_reward(batch, self.weights)
        limit = batch.limit if self.l_max is None else self.l_max
        tas = advantageous(reward, batch.group, batch.mask, self.r_ok, limit, self.criterion, self.kappa, self.empty_correct_is_tas)
        one_a_group = 1 / group_size(batch.group).double()
        run.log(tas_share=float((tas * one_a_group).sum() / one_a_group.sum()))
        plain = self.inner(batch, run) if self.inner else broadcast(base_advantages(reward, batch.group), batch.mask)
        return _weight(tas, self.mode, self.lam, plain)[:, None] * plain


METHOD = GRPO.but(
    name="adora",
    paper=Paper("ADORA: Training Reasoning Models with Dynamic Advantage Estimation on Reinforcement Learning", "2602.10019", 2026),
    summary="a prompt's advantages are weighted by whether its fresh responses show that longer thinking pays",
    credit=RolloutAdaptation(),
)

MULTIMODAL = METHOD.but(
    name="adora.multimodal",
    summary="prompts without any right response keep their full weight too",
    credit=RolloutAdaptation(empty_correct_is_tas=True),
)

AMPLIFY = METHOD.but(
    name="adora.amplify",
    summary="prompts on which longer thinking pays count double; the others as they are",
    credit=RolloutAdaptation(mode="amplify", lam=2.0),
)

VARIANTS = {"multimodal": MULTIMODAL, "amplify": AMPLIFY}
