"""sGPO: sorted group policy optimization (arXiv:2606.08854).

A small inference budget is spent once, before training: k samples a query give a success rate under the initial policy. That one pass drives three
decisions which GRPO takes blindly: trivial queries are dropped and unsolvable ones sub-sampled, a query's group has 1/p members, and training walks
from easy to hard. Equations 1, 2 and 4 and the inverse-success rule of 3 from the paper; rounding, constants and the weight of unequal groups are
[reconstructed]. Left out: profiling again during training. The pool is drawn again from its own seed after a restart, so a checkpoint holds
no prompts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.policy import Loss, Signals
from anypo.seams.credit import group_relative
from anypo.seams.groups import group_size as members
from anypo.seams.objective import ClippedSurrogate, aggregate, clipped, ratio_metrics, token_ratio
from anypo.seams.reward import row_reward
from anypo.task import Prompt, Task

if TYPE_CHECKING:
    from anypo.run import Run

STATE = "sorted_queries"  # run.state: the plan and how far training has walked along it


class Signal(NamedTuple):
    mixed: float  # probability that a group has right and wrong rollouts
    hit: float  # at least one right
    exactly_one: float
    advantage_per_rollout: float  # expected positive advantage mass


class Plan(NamedTuple):
    order: Tensor  # [K] indices of the kept queries, easy to hard
    sizes: Tensor  # [K] their group sizes
    train_rollouts: int  # of one epoch
    profile_rollouts: int


def profile(reward: Float[Tensor, " N"], group: Int[Tensor, " N"]) -> Float[Tensor, " Q"]:
    """Equation 1: the share of right samples of every query, in ascending order of the group number."""
    _, index, counts = torch.unique(group, return_inverse=True, return_counts=True)
    return reward.new_zeros(len(counts)).index_add(0, index, reward) / counts


def filter_queries(
    success: Float[Tensor, " Q"], u: Float[Tensor, " Q"], easy: float = 1.0, keep_unsolved: float = 0.25
) -> Int[Tensor, " Q"]:
    """Equation 2: 0 for queries at or above `easy`, and for unsolved ones whose draw `u` in [0,1) is not below `keep_unsolved`; else 1."""
    return torch.where(success == 0, (u < keep_unsolved).long(), (success < easy).long())


def group_size(success: Float[Tensor, " Q"], g_min: int = 2, g_max: int = 16) -> Int[Tensor, " Q"]:
    """Equation 3: ceil(1/p) inside [g_min, g_max]; g_max where p = 0."""
    inverse = torch.ceil(1 / success.clamp(min=1e-12) - 1e-9)
    return inverse.clamp(g_min, g_max).long()


def curriculum(success: Float[Tensor, " Q"], keep: Int[Tensor, " Q"]) -> Int[Tensor, " K"]:
    """Equation 4: the kept queries by falling success, equal ones in their own order."""
    order = success.argsort(descending=True, stable=True)
    return order[keep[order].bool()]


def plan(
    success: Float[Tensor, " Q"], u: Float[Tensor, " Q"], easy: float = 1.0, keep_unsolved: float = 0.25, g_min: int = 2, g_max: int = 16,
    profile_n: int = 8,
) -> Plan:  # fmt: skip
    """Equations 2-4 and the rollouts of equation 7: all that follows from the one profiling pass."""
    order = curriculum(success, filter_queries(success, u, easy, keep_unsolved))
    sizes = group_size(success, g_min, g_max)[order]
    return Plan(order, sizes, int(sizes.sum()), profile_n * len(success))


def signal(p: float, g: int) -> Signal:
    """Equation 6, exact, for a query of success `p` and a group of `g`."""
    chances = [math.comb(g, k) * p**k * (1 - p) ** (g - k) for k in range(g + 1)]
    mass = sum(chance * math.sqrt(k * (g - k)) for k, chance in enumerate(chances)) / g
    return Signal(1 - p**g - (1 - p) ** g, 1 - (1 - p) ** g, g * p * (1 - p) ** (g - 1), mass)


def advantages(reward: Float[Tensor, " N"], group: Int[Tensor, " N"], eps: float = 1e-6) -> Float[Tensor, " N"]:
    """Equation 5: GRPO's, population standard deviation; groups may have any sizes."""
    return group_relative(reward, group, eps=eps)


@dataclass
class SortedQueries:
    """Profile a pool of queries once, then walk through the kept ones from easy to hard, each with a group of its own size.

    A step takes `prompts` queries, however many rollouts that makes; after the last query the walk begins again.
    """

    prompts: int | None = None  # queries a step, >= 1; None = the task's own default
    pool: int | None = (
        None  # queries to profile, >= 1; None = as many as the steps can use, or a quarter of a budget of actions can profile
    )
    samples: int = 8  # k, profiling samples a query, >= 1
    easy: float = 1.0  # success from which a query is dropped; above 1 keeps all
    keep_unsolved: float = 0.25  # in [0,1], share of the queries without any success that stays
    g_min: int = 2  # >= 2
    g_max: int = 16  # >= g_min
    order: str = "sorted"  # sorted, or random (an ablation)
    weights: tuple[float, ...] | None = None  # of the K rewards; None = all 1

    def __post_init__(self) -> None:
        if not 2 <= self.g_min <= self.g_max:
            raise ValueError(f"group sizes need 2 <= g_min <= g_max, not {self.g_min} and {self.g_max}; a group of one learns nothing")
        if self.order not in ("sorted", "random"):
            raise ValueError(f"the order is sorted or random, not '{self.order}'")

    def __call__(self, task: Task, run: Run) -> list[Prompt]:
        count = self.prompts or task.prompts_per_step
        if STATE not in run.state:
            run.state[STATE] = self.profiled(task, count, run)
        state = run.state[STATE]
        queries, order, sizes = self.queries(task, state["pool"], state["seed"]), state["order"], state["sizes"]
        places = [(state["position"] + i) % len(order) for i in range(count)]
        state["position"] += count
        run.log(epoch=state["position"] / len(order), group_size=sum(sizes[i] for i in places) / count)
        return [queries[order[i]].but(samples=sizes[i]) for i in places]

    def queries(self, task: Task, pool: int, seed: int) -> list[Prompt]:
        """The pool, each problem once; the same for the same seed."""
        if getattr(self, "_drawn", (None,))[0] != (pool, seed):
            found = list({p.id: p for p in task.prompts(pool, np.random.default_rng(seed))}.values())
            self._drawn = ((pool, seed), found)
        return self._drawn[1]

    def profiled(self, task: Task, count: int, run: Run) -> dict[str, object]:
        """Sample, score and plan. Raises ValueError when the filter leaves nothing."""
        budget = run.max_actions // 4 if run.max_actions and self.pool is None else None  # an attempt takes an action at least
        affordable = count * run.total_steps if budget is None else max(count, min(count * run.total_steps, budget // self.samples))
        pool, seed = self.pool or affordable, int(run.rng.integers(2**62))
        queries, before = self.queries(task, pool, seed), run.actions
        success: list[Tensor] = []
        for start in range(0, len(queries), count):
            if budget is not None and success and run.actions - before >= budget:
                break
            batch = run.collect([p.but(samples=self.samples) for p in queries[start : start + count]])
            batch.reward = run.score_rewards(batch)
            reward = row_reward(batch, self.weights)
            success.append(profile(reward.double().clamp(0, 1), batch.group))
        rate = torch.cat(success)
        u = torch.from_numpy(run.rng.random(len(rate)))
        found = plan(rate, u, self.easy, self.keep_unsolved, self.g_min, self.g_max, self.samples)
        if not len(found.order):
            raise ValueError("sgpo keeps none of the queries: all are trivial or unsolved; raise select.easy or select.keep_unsolved")
        walk = torch.from_numpy(run.rng.permutation(len(found.order))) if self.order == "random" else torch.arange(len(found.order))
        run.log(profile_actions=float(run.actions - before), kept=len(found.order) / len(rate), profiled_success=float(rate.mean()))
        return {"pool": pool, "seed": seed, "order": found.order[walk].tolist(), "sizes": found.sizes[walk].tolist(), "position": 0}


@dataclass
class GroupWeighted(ClippedSurrogate):
    """The clipped surrogate in which every group counts alike, whatever its size."""

    group_weight: str = "equal"  # equal, or size: every rollout counts alike

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        mask = batch.counted
        ratio, low, high = token_ratio(new.logp, batch.logp, mask), 1 - self.clip_low, 1 + self.clip_high
        value = clipped(ratio, batch.advantage, low, high, self.dual_clip) * row_weights(mask, batch.group, self.group_weight)[:, None].to(
            ratio
        )
        return Loss(aggregate(-value, mask, self.aggregation, self.max_len or batch.limit), ratio_metrics(ratio, low, high, mask))


def row_weights(mask: Tensor, group: Int[Tensor, " N"], group_weight: str = "equal") -> Float[Tensor, " N"]:
    """Factors that turn a mean over rows into a mean over groups of group means; rows without actions have 0. Raises ValueError."""
    if group_weight not in ("equal", "size"):
        raise ValueError(f"group_weight is equal or size, not '{group_weight}'")
    used = mask.bool().any(1)
    factor = torch.ones(len(group), dtype=torch.float64)
    if group_weight == "equal" and bool(used.any()):
        kept = group[used]
        factor[used] = len(kept) / (len(torch.unique(kept)) * members(kept).double())
    return factor * used


METHOD = GRPO.but(
    name="sgpo",
    paper=Paper("sGPO: Trading Inference FLOPs for Training Efficiency in RLVR", "2606.08854", 2026),
    summary="one profiling pass filters queries, sets each group's size to 1/success, and sorts training from easy to hard",
    select=SortedQueries(),
    objective=GroupWeighted(clip_low=0.2, clip_high=0.2, aggregation="seq_mean"),
    regularize=(),
)
