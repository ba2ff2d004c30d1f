"""SPO: single-stream policy optimization (arXiv:2509.13232).

One response a prompt instead of GRPO's group. The baseline is a persistent estimate of the prompt's success probability, a Beta tracker whose
forgetting adapts to how far the policy has moved since the prompt was last seen; advantages are normalized over the batch, so no group can be
without signal; prompts near one half are drawn more often. Equations 4, 6 and 7 from the paper, the others from its code as the row's
specification gives them. Prompts are profiled when they are first drawn instead of all before training. Left out: batches of whatever arrived.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.seams.groups import broadcast, standardize
from anypo.seams.objective import ClippedSurrogate, log_ratio
from anypo.seams.reward import row_reward
from anypo.task import Prompt, Task

if TYPE_CHECKING:
    from anypo.run import Run

TRACKER = "success_tracker"  # run.state: prompt id -> [alpha, beta]
PREVIOUS = "success_tracker_previous"  # run.state: prompt id -> the response of the last visit and its log-probs
UNKNOWN = [0.5, 0.5]  # a prompt without any sample (equation 1 with n0 = 0)


class Tracker(NamedTuple):
    alpha: Tensor  # [P] > 0, weight of the successes
    beta: Tensor  # [P] > 0, weight of the failures
    value: Tensor  # [P] alpha / (alpha + beta)


class Forgetting(NamedTuple):
    shift: Tensor  # [P] how far the policy has moved, >= 0
    rho: Tensor  # [P] what is kept of the tracker


class Advantages(NamedTuple):
    raw: Tensor  # [B] reward minus tracked value
    advantages: Tensor  # [B] normalized over the batch


class Weights(NamedTuple):
    weight: Tensor  # [P]
    prob: Tensor  # [P] sums to 1


def init(successes: Float[Tensor, " P"], n0: int = 8, rho_min: float = 0.875) -> Tracker:
    """Equation 1: the tracker after `n0` offline samples, with the weight of a memory of 1 / (1 - rho_min) samples."""
    if n0 == 0:
        half = torch.full_like(successes, 0.5)
        return Tracker(half, half, half)
    memory = 1 / (1 - rho_min)
    return _tracker(memory * (successes + 0.5) / (n0 + 1), memory * (n0 - successes + 0.5) / (n0 + 1))


def rho(
    logp_prev: Float[Tensor, "P T"], logp_now: Float[Tensor, "P T"], mask: Tensor, visited: Tensor, d_half: float = 0.06,
    rho_min: float = 0.875, rho_max: float = 0.96,
) -> Forgetting:  # fmt: skip
    """Equations 2-3: the mean absolute log-ratio of the response stored at the last visit halves what is kept every `d_half`."""
    distance = log_ratio(logp_prev, logp_now, mask).abs().sum(1) / mask.sum(1).clamp(min=1)
    shift = torch.where(visited.bool(), distance, torch.zeros_like(distance))
    return Forgetting(shift, (2 ** (-shift / d_half)).clamp(rho_min, rho_max))


def advantages(
    reward: Float[Tensor, " B"], alpha: Float[Tensor, " B"], beta: Float[Tensor, " B"], eps: float = 1e-8, ddof: int = 1
) -> Advantages:
    """Equations 4-5, with the trackers from before this reward; a batch of one and a batch without spread get 0."""
    raw = reward - alpha / (alpha + beta)
    return Advantages(raw, standardize(raw, torch.zeros(len(raw), dtype=torch.int64), ddof, eps))


def update(reward: Float[Tensor, " P"], alpha: Tensor, beta: Tensor, rho: Tensor) -> Tracker:
    """Equation 6: forget, then count the reward in [0,1] as a success and the rest of it as a failure."""
    return _tracker(rho * alpha + reward, rho * beta + (1 - reward))


def weights(alpha: Float[Tensor, " P"], beta: Float[Tensor, " P"], explore: float = 0.05) -> Weights:
    """Equation 7: the standard deviation of the outcome plus a floor."""
    value = alpha / (alpha + beta)
    weight = (value * (1 - value)).sqrt() + explore
    return Weights(weight, weight / weight.sum())


def _tracker(alpha: Tensor, beta: Tensor) -> Tracker:
    return Tracker(alpha, beta, alpha / (alpha + beta))


def tracked(ids: list[int], run: Run) -> tuple[Tensor, Tensor]:
    """alpha and beta of these prompts, float64 [len(ids)] each."""
    known = run.state.setdefault(TRACKER, {})
    pairs = torch.tensor([known.get(i, UNKNOWN) for i in ids], dtype=torch.float64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def reward_in_unit(batch: Batch, reward_weights: tuple[float, ...] | None) -> Float[Tensor, " N"]:
    """One reward a row, clipped to [0,1], float64."""
    reward = row_reward(batch, reward_weights)
    return reward.double().clamp(0, 1)


@dataclass
class PrioritizedPrompts:
    """Prompts near one half success are drawn more often; a prompt that appears for the first time is profiled with `initial_samples`."""

    prompts: int | None = None  # prompts a step, >= 1; None = the task's own default
    group_size: int = 1  # attempts at each prompt, >= 1
    candidates: int = 4  # prompts to choose from, as a multiple of those wanted, >= 1; 1 = uniform sampling
    explore: float = 0.05  # > 0, floor of the sampling weight
    initial_samples: int = 8  # offline attempts at a new prompt, >= 0
    rho_min: float = 0.875  # in [0,1), gives the offline samples the weight of a memory of 1 / (1 - rho_min)
    weights: tuple[float, ...] | None = None  # of the K rewards; None = all 1

    def __call__(self, task: Task, run: Run) -> list[Prompt]:
        count = self.prompts or task.prompts_per_step
        drawn = task.prompts(count * self.candidates, run.rng)
        different = list({p.id: p for p in drawn}.values())
        if len(different) < count:
            different = drawn  # a task with fewer problems than a step wants repeats them
        if self.initial_samples:
            self.profile(different, run)
        chance = weights(*tracked([p.id for p in different], run), self.explore).prob.numpy()
        chosen = (
            range(count) if len(different) == count else run.rng.choice(len(different), size=count, replace=False, p=chance / chance.sum())
        )
        return [different[i].but(samples=self.group_size) for i in chosen]

    def profile(self, prompts: list[Prompt], run: Run) -> None:
        """Offline samples of the prompts without a tracker."""
        known = run.state.setdefault(TRACKER, {})
        fresh = list({p.id: p for p in prompts if p.id not in known}.values())
        if not fresh:
            return
        batch = run.collect([p.but(samples=self.initial_samples) for p in fresh])
        batch.reward = run.score_rewards(batch)
        successes = torch.zeros(len(fresh), dtype=torch.float64).index_add(0, batch.group, reward_in_unit(batch, self.weights))
        start = init(successes, self.initial_samples, self.rho_min)
        known.update(zip([p.id for p in fresh], torch.stack([start.alpha, start.beta], 1).tolist(), strict=True))
        run.log(profile_actions=float(batch.mask.sum()))


@dataclass
class TrackedValue:
    """Reward minus the prompt's tracked value, normalized over the batch's rows."""

    normalize: bool = True  # equation 5
    eps: float = 1e-8  # > 0
    ddof: int = 1  # 0 population, 1 sample standard deviation
    weights: tuple[float, ...] | None = None  # of the K rewards; None = all 1

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        found = advantages(reward_in_unit(batch, self.weights), *tracked(batch.signal("prompt_id").tolist(), run), self.eps, self.ddof)
        return broadcast((found.advantages if self.normalize else found.raw).to(batch.logp), batch.mask)


@dataclass
class UpdateTracker:
    """After the policy's step: forget by the shift since the last visit, count the rewards, remember the response.

    Several attempts at a prompt in one batch are one visit: the tracker forgets once and counts all of them.
    """

    rho_min: float = 0.875  # in (0,1], fastest forgetting
    rho_max: float = 0.96  # in (0,1], slowest; memory of at most 1 / (1 - rho_max) visits
    d_half: float = 0.06  # > 0, the shift that halves what is kept
    weights: tuple[float, ...] | None = None  # of the K rewards; None = all 1

    def __call__(self, batch: Batch, run: Run) -> None:
        ids = batch.signal("prompt_id").tolist()
        reward = reward_in_unit(batch, self.weights)
        row_of = {prompt: row for row, prompt in enumerate(ids)}  # the last attempt at each prompt
        prompts, rows = list(row_of), torch.tensor(list(row_of.values()))
        kept = self.forgetting(prompts, batch[rows], run)
        position = torch.tensor([prompts.index(i) for i in ids]) if len(prompts) < len(ids) else torch.arange(len(ids))
        zero = torch.zeros(len(prompts), dtype=torch.float64)
        count, total = zero.index_add(0, position, torch.ones_like(reward)), zero.index_add(0, position, reward)
        alpha, beta = tracked(prompts, run)
        new = torch.stack([kept.rho * alpha + total, kept.rho * beta + count - total], 1)
        run.state[TRACKER].update(zip(prompts, new.tolist(), strict=True))
        previous = run.state.setdefault(PREVIOUS, {})
        for prompt, row in row_of.items():
            previous[prompt] = remembered(batch, row)
        run.log(policy_shift=float(kept.shift.mean()), tracked_value=float((alpha / (alpha + beta)).mean()))

    def forgetting(self, prompts: list[int], rows: Batch, run: Run) -> Forgetting:
        """Equations 2-3 for one row of each prompt; the stored response is scored under the policy as it is now, in the row's context."""
        previous = run.state.get(PREVIOUS, {})
        result = Forgetting(torch.zeros(len(prompts), dtype=torch.float64), torch.full((len(prompts),), self.rho_max, dtype=torch.float64))
        seen = torch.tensor([i for i, prompt in enumerate(prompts) if prompt in previous], dtype=torch.int64)
        if len(seen):
            old = recalled([previous[prompts[i]] for i in seen.tolist()], rows[seen])
            now = run.score(old, {"logp"}).logp
            visited = torch.ones(len(seen), dtype=torch.bool)
            found = rho(old.logp.double(), now.double(), old.mask, visited, self.d_half, self.rho_min, self.rho_max)
            result.shift[seen], result.rho[seen] = found.shift, found.rho
        return result


def remembered(batch: Batch, row: int) -> dict[str, Any]:
    """What is kept of a row: its actions up to the last that exists, their masks and log-probs, and the temperature they were drawn at."""
    exists = batch.attended[row]
    length = int(exists.nonzero().max()) + 1 if bool(exists.any()) else 0
    entry = {name: value[row, :length].clone() for name, value in _parts(batch).items()}
    if "temperature" in batch.signals:
        entry["temperature"] = batch.signals["temperature"][row].clone()
    return entry


def recalled(entries: list[dict[str, Any]], rows: Batch) -> Batch:
    """Stored responses as a batch, in the contexts of `rows`."""
    parts: dict[str, Any] = {name: pad_sequence([e[name] for e in entries], batch_first=True) for name in _parts(rows)}
    signals = {"temperature": torch.stack([e["temperature"] for e in entries])} if all("temperature" in e for e in entries) else {}
    return Batch(**parts, group=rows.group, context=rows.context, signals=signals)


def _parts(batch: Batch) -> dict[str, Tensor]:
    return {"action": batch.action, "mask": batch.mask, "valid": batch.attended, "logp": batch.logp}


METHOD = GRPO.but(
    name="spo_single",
    paper=Paper("Single-stream Policy Optimization", "2509.13232", 2025),
    summary="one response a prompt; a persistent, KL-adaptive estimate of the prompt's success replaces the group",
    select=PrioritizedPrompts(),
    credit=TrackedValue(),
    objective=ClippedSurrogate(clip_low=0.2, clip_high=0.28, aggregation="token_mean", dual_clip=10.0),
    regularize=(),
    control=(UpdateTracker(),),
)
