"""CGPO: curriculum group policy optimization (arXiv:2605.17807).

About half of the prompts bring no gain, because they are mastered or out of reach. CGPO keeps a moving estimate of the variance of each prompt's
rewards, high where the prompt is half learned, and draws prompts with a probability that rises with it; a category calibration moves mass to
categories that are still hard, whatever their size. Against Flow-GRPO it changes which prompts are sampled (`select`) and what is noted after a
step (`control`), nothing else, so both parts go with any method that draws groups. Categories are the prompts' column `category`; without one
there is a single category. No importance weights: the curriculum changes the training distribution on purpose.
Equations: variance as the proxy and calibration by proportional fairness from the paper's abstract; moving average, exponent and the fair
program - the simplest concave one with a closed form - [reconstructed]. Left out: prompts that come and go; the pool is drawn once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.diffusion.flow_grpo import METHOD as FLOW_GRPO
from anypo.seams.groups import group_mean, group_size, group_std, group_sum
from anypo.seams.reward import row_reward
from anypo.task import Prompt, Task

if TYPE_CHECKING:
    from anypo.run import Run

CURRICULUM = "cgpo.prompts"  # in the run's state: prompt id -> [moving variance, moving mean, visits]
POOL = "cgpo.pool"  # in the run's state: the seed that the pool was drawn with


class GroupStatistics(NamedTuple):
    prompt: Int[Tensor, " M"]
    variance: Float[Tensor, " M"]  # population
    mean: Float[Tensor, " M"]


class Moving(NamedTuple):
    value: Float[Tensor, " P"]
    seen: Int[Tensor, " P"]  # visits


class Categories(NamedTuple):
    """Shares [C], each adding up to 1, in the order of the categories' numbers."""

    curriculum: Float[Tensor, " C"]
    difficulty: Float[Tensor, " C"]
    mass: Float[Tensor, " C"]


def group_stats(reward: Float[Tensor, " N"], group: Int[Tensor, " N"]) -> GroupStatistics:
    """Equation 1: variance and mean of the raw rewards of every group that has at least two members."""
    several = group_size(group) > 1
    reward, group = reward[several], group[several]
    prompt, index = torch.unique(group, return_inverse=True)
    first = torch.zeros(len(prompt), dtype=torch.int64).scatter_(0, index, torch.arange(len(index)))
    return GroupStatistics(prompt, group_std(reward, group)[first] ** 2, group_mean(reward, group)[first])


def ema(value: Float[Tensor, " P"], seen: Int[Tensor, " P"], ids: Int[Tensor, " M"], new: Float[Tensor, " M"], rho: float) -> Moving:
    """Equation 2: at distinct `ids`, the new value at the first visit, later (1 - rho) old + rho new."""
    old = value[ids]
    moved = torch.where(seen[ids] == 0, new, (1 - rho) * old + rho * new)
    return Moving(value.index_copy(0, ids, moved), seen.index_add(0, ids, torch.ones_like(ids)))


def weights(score: Float[Tensor, " P"], kappa: float = 1.0, eps: float = 1e-6) -> Float[Tensor, " P"]:
    """Equation 3: (score + eps)^kappa."""
    return (score + eps) ** kappa


def categories(
    score: Float[Tensor, " P"], mean_reward: Float[Tensor, " P"], category: Int[Tensor, " P"], eta: float = 1.0, kappa: float = 1.0,
    eps: float = 1e-6,
) -> Categories:  # fmt: skip
    """Equations 3-5: each category's share of the weights, its share of the difficulty (1 - mean reward; even when all is mastered), and the
    proportionally fair mass (curriculum + eta difficulty) / (1 + eta). Rewards in [0,1]."""
    names, index = torch.unique(category, return_inverse=True)
    zero = score.new_zeros(len(names))
    weight, count = zero.index_add(0, index, weights(score, kappa, eps)), zero.index_add(0, index, torch.ones_like(score))
    hard = (zero.index_add(0, index, 1 - mean_reward) / count).clamp(min=0)
    curriculum, total = weight / weight.sum(), hard.sum()
    difficulty = hard / total if float(total) > 1e-9 else torch.full_like(hard, 1 / len(names))
    return Categories(curriculum, difficulty, (curriculum + eta * difficulty) / (1 + eta))


def probabilities(
    score: Float[Tensor, " P"], mean_reward: Float[Tensor, " P"], category: Int[Tensor, " P"], eta: float = 1.0, kappa: float = 1.0,
    delta: float = 0.2, eps: float = 1e-6,
) -> Float[Tensor, " P"]:  # fmt: skip
    """Equation 6: the category's mass times the share of the weight inside it, mixed with `delta` of an even draw inside it."""
    mass = categories(score, mean_reward, category, eta, kappa, eps).mass[torch.unique(category, return_inverse=True)[1]]
    weight = weights(score, kappa, eps)
    return mass * ((1 - delta) * weight / group_sum(weight, category) + delta / group_size(category).to(weight))


def draw(prob: Float[Tensor, " P"], u: Float[Tensor, " B"]) -> Int[Tensor, " B"]:
    """Equation 7: prompts with replacement, by the inverse distribution function at uniforms `u` in [0,1)."""
    return torch.searchsorted(prob.cumsum(0), u.to(prob), right=True).clamp(max=len(prob) - 1)


@dataclass
class CurriculumPrompts:
    """Prompts whose rewards vary most are drawn most, with replacement; categories share out the draws by proportional fairness."""

    prompts: int | None = None  # prompts a step, >= 1; None = the task's own default
    group_size: int = 8  # attempts at each prompt, >= 2
    pool: int | None = None  # prompts to choose from, >= 1; None = all of a task that says its `count`, else 16 steps' worth
    kappa: float = 1.0  # >= 0, how sharply the draw follows the variance; 0 = not at all
    eta: float = 1.0  # >= 0, weight of a category's difficulty against its variance
    delta: float = 0.2  # in [0,1], share of even draws inside a category
    eps: float = 1e-6  # > 0, added to every variance

    def __call__(self, task: Task, run: Run) -> list[Prompt]:
        candidates = self.candidates(task, run)
        names = {name: i for i, name in enumerate(dict.fromkeys(str(p.columns.get("category", "")) for p in candidates))}
        category = torch.tensor([names[str(p.columns.get("category", ""))] for p in candidates])
        score, mean, _ = tracked([p.id for p in candidates], run)
        prob = probabilities(score, mean, category, self.eta, self.kappa, self.delta, self.eps)
        chosen = draw(prob, torch.from_numpy(run.rng.random(self.prompts or task.prompts_per_step))).tolist()
        run.log(effective_prompts=float(1 / (prob**2).sum()), drawn_variance=float(score[chosen].mean()))
        return [candidates[i].but(samples=self.group_size) for i in chosen]

    def candidates(self, task: Task, run: Run) -> list[Prompt]:
        """The pool, each prompt once; the same all through a run."""
        seed = run.state.setdefault(POOL, int(run.rng.integers(2**62)))
        size = self.pool or getattr(task, "count", None) or 16 * (self.prompts or task.prompts_per_step)
        if getattr(self, "_drawn", (None,))[0] != (size, seed):
            found = {p.id: p for p in task.prompts(size, np.random.default_rng(seed))}
            self._drawn = ((size, seed), [found[i] for i in sorted(found)])
        return self._drawn[1]


def tracked(ids: list[int], run: Run) -> tuple[Tensor, Tensor, Tensor]:
    """Moving variance and mean (float64) and visits of prompts, for rewards in [0,1]; unvisited ones have the largest variance there is."""
    known = run.state.setdefault(CURRICULUM, {})
    found = torch.tensor([known.get(i, (0.25, 0.5, 0)) for i in ids], dtype=torch.float64).reshape(-1, 3)
    return found[:, 0], found[:, 1], found[:, 2].long()


@dataclass
class TrackVariance:
    """After the policy's step: the variance and the mean of the rewards of every prompt that was drawn."""

    rho: float = 0.3  # in (0,1], weight of the newest visit
    low: float = 0.0  # smallest reward there is
    high: float = 1.0  # largest reward there is, > low
    weights: tuple[float, ...] | None = None  # of the K rewards; None = all 1

    def __call__(self, batch: Batch, run: Run) -> None:
        if not self.high > self.low:
            raise ValueError(f"control.0.high must be above control.0.low, not {self.high} and {self.low}")
        reward = (row_reward(batch, self.weights).double() - self.low) / (self.high - self.low)
        if not -1e-6 <= float(reward.min()) <= float(reward.max()) <= 1 + 1e-6:
            raise ValueError(
                f"{run.method.name} compares rewards between {self.low} and {self.high}, and some lie outside; set control.0.low and control.0.high"
            )
        new = group_stats(reward, batch.signal("prompt_id"))
        ids, all_of_them = new.prompt.tolist(), torch.arange(len(new.prompt))
        score, mean, seen = tracked(ids, run)
        moved, averaged = (ema(old, seen, all_of_them, now, self.rho) for old, now in ((score, new.variance), (mean, new.mean)))
        values = torch.stack([moved.value, averaged.value], dim=1).tolist()
        run.state[CURRICULUM] |= {i: [*pair, visits] for i, pair, visits in zip(ids, values, moved.seen.tolist(), strict=True)}


METHOD = FLOW_GRPO.but(
    name="cgpo",
    paper=Paper("CGPO: curriculum group policy optimization", "2605.17807", 2026),
    summary="prompts are drawn by the variance of their rewards, and hard categories get their fair share of the draws",
    task="styled_digits",
    select=CurriculumPrompts(),
    control=(TrackVariance(),),
)
