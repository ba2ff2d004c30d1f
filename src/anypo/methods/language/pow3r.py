"""POW3R: policy-aware rubric rewards (arXiv:2605.20164).

A rubric reward is the weighted mean of a response's grades on several criteria. Criteria that every response meets, or none, carry weight but teach
nothing now. POW3R keeps the rubric as the reward that is reported, and compares responses by weights that follow each criterion's contrast within
the group, renormalized so that every category of criteria keeps its human mass. Against GRPO it changes reward and credit. The weight as human
weight times a factor, and the contrast, are from a digest; the factor and the renormalization are [reconstructed].

Criteria are the task's rewards, graded in [0,1] (a penalty as 1 - violation). Weights and categories are those of `RubricReward`, or the signals
`rubric_weight` and `rubric_category` [N,J] of a task with a rubric for each prompt, where weight 0 means that the prompt has no such criterion. One
reward alone is GRPO. Left out: the judge that grades.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.seams.groups import broadcast, group_std, standardize

if TYPE_CHECKING:
    from anypo.run import Run

LARGEST_DEVIATION = 0.5  # population standard deviation of grades in [0,1], half of them 0 and half 1


class Rewards(NamedTuple):
    """Reward by the human weights, and by the training weights, [G] or [N] each."""

    static: Tensor
    adapted: Tensor


class Rubric(NamedTuple):
    """Grades with the human weights >= 0 and the categories of their criteria, [N,J] each."""

    grades: Tensor
    human: Tensor
    category: Tensor


def contrast(grades: Float[Tensor, "G J"]) -> Float[Tensor, " J"]:
    """Equation 2 for one group: each criterion's deviation over the responses, in [0,1]; 0 where all have the same grade."""
    return contrast_by_group(grades, torch.zeros(len(grades), dtype=torch.int64))[0]


def contrast_by_group(grades: Float[Tensor, "N J"], group: Int[Tensor, " N"]) -> Float[Tensor, "N J"]:
    """Equation 2 for the group of every row."""
    return group_std(grades, group) / LARGEST_DEVIATION


def reweighted(human: Float[Tensor, "*N J"], category: Int[Tensor, "*N J"], contrast: Float[Tensor, "*N J"], eta: float = 0.8) -> Tensor:
    """Equations 4-5 over the last axis, J criteria: training weights [*N,J] that sum to the human ones in each category.

    A category without any contrast keeps its human weights; a criterion of weight 0 is absent. The paper's denominators plus 1e-8 are guards here, so
    that eta 0 gives the human weights exactly. Raises ValueError for a negative weight or an eta outside [0,1].
    """
    if bool((human < 0).any()):
        raise ValueError("rubric weights are >= 0; grade a penalty as 1 - violation and give it a positive weight")
    if not 0 <= eta <= 1:
        raise ValueError(f"eta is the share of a weight that follows contrast, in [0,1], not {eta}")
    tiny = torch.finfo(human.dtype).tiny
    live = torch.where(human > 0, contrast, torch.zeros_like(contrast))
    peak = _over_category(live, category, "amax")
    raw = human * ((1 - eta) + eta * live / peak.clamp(min=tiny))
    scale = _over_category(human, category, "sum") / _over_category(raw, category, "sum").clamp(min=tiny)
    return torch.where(peak > 0, raw * scale, human)


def _over_category(values: Tensor, category: Tensor, how: str) -> Tensor:
    """The sum or the largest of non-negative values over each criterion's category, along the last axis."""
    names, index = torch.unique(category, return_inverse=True)
    index = index.expand_as(values)
    total = values.new_zeros((*values.shape[:-1], len(names))).scatter_reduce(-1, index, values, reduce=how)
    return total.gather(-1, index)


def weights(grades: Float[Tensor, "G J"], human: Float[Tensor, " J"], category: Int[Tensor, " J"], eta: float = 0.8) -> Float[Tensor, " J"]:
    """Equations 2, 4 and 5 for one group."""
    return reweighted(human, category, contrast(_present(grades, human)), eta)


def reward(grades: Float[Tensor, "G J"], human: Float[Tensor, " J"], category: Int[Tensor, " J"], eta: float = 0.8) -> Rewards:
    """Equations 1 and 6: the weighted mean of the grades by human and by training weights; both divide by the sum of the human ones."""
    return Rewards(weighted_mean(grades, human, human), weighted_mean(grades, weights(grades, human, category, eta), human))


def weighted_mean(grades: Tensor, weight: Tensor, human: Tensor) -> Tensor:
    """Sum of weight times grade over the sum of human weights, along the last axis; grades of absent criteria may be anything, NaN included."""
    return (weight * _present(grades, human)).sum(-1) / human.sum(-1).clamp(min=torch.finfo(human.dtype).tiny)


def advantages(
    grades: Float[Tensor, "G J"], human: Float[Tensor, " J"], category: Int[Tensor, " J"], eta: float = 0.8, ddof: int = 0, eps: float = 1e-6
) -> Float[Tensor, " G"]:  # fmt: skip
    """Equation 6: GRPO's advantage of the adapted reward, one group."""
    return standardize(reward(grades, human, category, eta).adapted, torch.zeros(len(grades), dtype=torch.int64), ddof, eps)


def strict_completion(grades: Float[Tensor, "N J"], human: Tensor) -> Bool[Tensor, " N"]:
    """Equation 1: whether a response fully meets every criterion that its prompt has."""
    return ((grades >= 1) | (human <= 0)).all(-1)


def _present(grades: Tensor, human: Tensor) -> Tensor:
    return torch.where(human > 0, grades, torch.zeros_like(grades))


@dataclass
class RubricReward:
    """The rubric's static reward [N], which evaluation looks at; the grades go on to the credit by signals. One reward alone passes unchanged."""

    weights: tuple[float, ...] | None = None  # human weight of each of the task's J rewards, >= 0; None = all 1
    categories: tuple[int, ...] | None = None  # category of each; None = all in one

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        scored = run.score_rewards(batch)
        if not batch.objectives:
            return scored
        human = self._rows(batch, scored, "rubric_weight", self.weights, torch.ones_like(scored)).to(scored)
        category = self._rows(batch, scored, "rubric_category", self.categories, torch.zeros_like(scored)).long()
        batch.signals |= {"rubric_grades": scored, "rubric_weight": human, "rubric_category": category}
        run.log(strict_completion=float(strict_completion(scored, human).double().mean()))
        return weighted_mean(scored, human, human)

    def _rows(self, batch: Batch, scored: Tensor, signal: str, given: tuple[float, ...] | None, default: Tensor) -> Tensor:
        if signal in batch.signals:
            return batch.signals[signal]
        if given is None:
            return default
        if len(given) != scored.shape[1]:
            raise ValueError(f"{len(given)} {signal.replace('_', ' ')} numbers for {scored.shape[1]} criteria; give one for each")
        return scored.new_tensor(given).expand_as(scored)


@dataclass
class PolicyAwareRubric:
    """Rewards relative to the group, by weights that follow each criterion's contrast among the group's responses."""

    eta: float = (
        0.8  # in [0,1), share of a weight that follows contrast; the rest is a floor under criteria nobody meets yet. 0 = static rubric
    )
    smoothing: float = 0.0  # in [0,1), share of the prompt's earlier contrast that is kept; 0 = this group's alone
    ddof: int = 0  # 0 population, 1 sample standard deviation
    eps: float = 1e-6  # > 0, added to the standard deviation
    memory: dict[int, list[float]] = field(default_factory=dict, init=False, repr=False)  # smoothed contrast by prompt

    compares_group = True

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        grades, human, category = rubric_of(batch)
        seen = self._smoothed(contrast_by_group(_present(grades, human), batch.group), batch)
        weight = reweighted(human, category, seen, self.eta)
        adapted = weighted_mean(grades, weight, human)
        run.log(weight_moved=float(((weight - human).abs().sum(-1) / (2 * human.sum(-1).clamp(min=self.eps))).mean()))
        return broadcast(standardize(adapted, batch.group, self.ddof, self.eps), batch.mask)

    def _smoothed(self, seen: Float[Tensor, "N J"], batch: Batch) -> Float[Tensor, "N J"]:
        """Equation 3. A prompt's first contrast is its own past [ours]."""
        if not self.smoothing:
            return seen
        keys = batch.signal("prompt_id").tolist()
        past = torch.stack([seen.new_tensor(self.memory[key]) if key in self.memory else own for key, own in zip(keys, seen, strict=True)])
        smooth = self.smoothing * past + (1 - self.smoothing) * seen
        self.memory |= dict(zip(keys, smooth.tolist(), strict=True))
        return smooth

    def state_dict(self) -> dict[str, Any]:
        return {"memory": dict(self.memory)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.memory = dict(state["memory"])


def rubric_of(batch: Batch) -> Rubric:
    """What the reward seam left; else every objective is a criterion of weight 1 in one category, and a single or dense reward the only one."""
    if "rubric_grades" in batch.signals:
        return Rubric(*(batch.signal(name) for name in ("rubric_grades", "rubric_weight", "rubric_category")))
    assert batch.reward is not None
    grades = batch.reward if batch.objectives else batch.outcome[:, None]
    return Rubric(grades, torch.ones_like(grades), torch.zeros_like(grades, dtype=torch.int64))


METHOD = GRPO.but(
    name="pow3r",
    paper=Paper("Not Every Rubric Teaches Equally: Policy-Aware Rubric Rewards for RLVR", "2605.20164", 2026),
    summary="rubric criteria are weighted by how well they tell the prompt's responses apart; categories keep their human mass",
    reward=RubricReward(),
    credit=PolicyAwareRubric(),
)
