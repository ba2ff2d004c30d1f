"""RePO: replay-enhanced policy optimization (code: SihengLi99/RePO).

GRPO learns from fresh samples alone, and a prompt whose responses all earn the same wastes its step. RePO keeps a small first-in-first-out buffer
of earlier responses of every prompt, with their rewards and the log-probs they were drawn with. When a prompt comes up again, some of them are
chosen by a replay strategy and trained in a second clipped surrogate, with advantages of their own. Equations 1-5 are those of the paper's code as
the row's specification gives them. The sizes of the buffer are to be set for each run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import PER_ROW, Batch
from anypo.method import Paper, Rollout
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.policy import Loss, Signals
from anypo.seams.credit import group_relative
from anypo.seams.groups import broadcast, masked_mean
from anypo.seams.objective import clipped, kl_estimate, log_ratio, ratio_metrics, token_ratio
from anypo.seams.reward import row_reward
from anypo.seams.rollout import OnPolicy
from anypo.task import Prompt

if TYPE_CHECKING:
    from anypo.run import Run

STRATEGIES = ("all", "recent", "highest", "random", "max_variance")
TIE = 1e-12  # variances and sums of rewards closer than this are equal
NOT_KEPT = ("context", "reward", "advantage", "keep", "prompt", "prompt_text")  # what the prompt's fresh rows or later seams give
Entries = dict[str, Any]  # a prompt's buffer, oldest first: {"fields": by name, "signals": by name, "reward": [c]}


def select(
    buffer_reward: Float[Tensor, " C"], strategy: str = "max_variance", k: int = 8, min_cache: int = 8, generator: torch.Generator | None = None
) -> list[int]:  # fmt: skip
    """Equation 1: which of a prompt's buffered responses (oldest first) to replay, at most `k`; none below `min_cache`. Raises ValueError."""
    count = len(buffer_reward)
    if strategy not in STRATEGIES:
        raise ValueError(f"unknown replay strategy '{strategy}'; use one of {', '.join(STRATEGIES)}")
    if count < min_cache:
        return []
    if strategy == "all":
        return list(range(count))
    k = min(count, k)
    if strategy == "recent":
        return list(range(count - k, count))
    if strategy == "highest":
        return buffer_reward.argsort(descending=True, stable=True)[:k].tolist()
    if strategy == "random":
        return torch.randperm(count, generator=generator)[:k].tolist()
    return max_variance(buffer_reward.double(), k)


def max_variance(reward: Float[Tensor, " C"], k: int) -> list[int]:
    """The `k` members with the largest population variance; ties go to the larger sum, then to the first in lexicographic order of indices.

    The variance is convex in every member, so the best subset is some of the smallest rewards and the rest of the largest.
    """
    if k == 0:
        return []
    ordered, count = reward.sort().values, len(reward)
    low = torch.arange(k + 1)  # how many of the smallest; the rest are the largest

    def totals(values: Tensor) -> Tensor:
        reach = torch.cat([values.new_zeros(1), values.cumsum(0)])
        return reach[low] + reach[-1] - reach[count - k + low]

    total = totals(ordered)
    variance = totals((ordered - ordered.mean()) ** 2) / k - (totals(ordered - ordered.mean()) / k) ** 2
    best = variance >= variance.max() - TIE
    best &= total >= total[best].max() - TIE
    subsets = [torch.cat([ordered[:i], ordered[count - k + i :]]) for i in best.nonzero().flatten().tolist()]
    return min(earliest(reward, values) for values in subsets)


def earliest(reward: Float[Tensor, " C"], values: Float[Tensor, " k"]) -> list[int]:
    """The smallest indices, ascending, at which `reward` takes these values."""
    present, counts = torch.unique(values, return_counts=True)
    chosen = [(reward == value).nonzero().flatten()[:count] for value, count in zip(present, counts.tolist(), strict=True)]
    return torch.cat(chosen).sort().values.tolist()


def advantages(
    reward: Float[Tensor, " N"], group: Int[Tensor, " N"], is_online: Tensor, mode: str = "split", ddof: int = 1, eps: float = 1e-4
) -> Float[Tensor, " N"]:
    """Equation 2. "split": fresh and replayed responses of a prompt are normalized apart; "mixed": together. Raises ValueError for another mode."""
    if mode not in ("split", "mixed"):
        raise ValueError(f"the advantage mode is split or mixed, not '{mode}'")
    _, index = torch.unique(group, return_inverse=True)
    return group_relative(reward, 2 * index + is_online.long() if mode == "split" else index, ddof=ddof, eps=eps)


class LossParts(NamedTuple):
    on: Tensor
    off: Tensor
    loss: Tensor


def loss(
    logp: Float[Tensor, "N T"], old_logp: Float[Tensor, "N T"], advantages: Tensor, mask: Tensor, is_online: Tensor, clip: float = 0.2,
    off_coef: float = 1.0, agg: str = "seq",
) -> LossParts:  # fmt: skip
    """Equations 3-5 without the KL. `advantages` [N] or [N,T]; `old_logp` is that of the policy that drew the row. "seq": both parts are sums of
    row means over the number of ALL rows; "token": each is a mean over its own tokens. Raises ValueError for another aggregation."""
    advantage = broadcast(advantages, mask) if advantages.dim() == 1 else advantages
    inside, online = mask.bool(), is_online.bool()
    value = -clipped(token_ratio(logp, old_logp, mask), advantage, 1 - clip, 1 + clip)
    if agg == "seq":
        row = torch.where(inside, value, torch.zeros_like(value)).sum(1) / inside.sum(1).clamp(min=1)
        on, off = (torch.where(kind, row, torch.zeros_like(row)).sum() / max(len(row), 1) for kind in (online, ~online))
    elif agg == "token":
        on, off = (masked_mean(value, inside & kind[:, None]) for kind in (online, ~online))
    else:
        raise ValueError(f"unknown aggregation '{agg}'; use seq or token")
    return LossParts(on, off, on + off_coef * off)


@dataclass
class ReplayRollout:
    """Fresh attempts, and for every prompt earlier ones from its buffer (`run.state["replay"]`, filled by `FillReplay` after each step).

    Signal: `is_online` [N]. Replayed rows keep the log-probs and rewards they had, and share the `group` of their prompt.
    """

    strategy: str = "max_variance"  # all, recent, highest, random, max_variance
    replayed: int = 8  # K, at most so many of a prompt, >= 0
    min_cache: int = 8  # C_min, a smaller buffer is not replayed from, >= 1
    inner: Rollout = field(default_factory=OnPolicy)

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        batch = self.inner(prompts, run)
        batch.signals["is_online"] = torch.ones(len(batch), dtype=torch.bool)
        run.score_rewards(batch)
        buffers, parts = run.state.get("replay", {}), [batch]
        for group in torch.unique(batch.group).tolist():
            first = int((batch.group == group).nonzero()[0, 0])
            entries = buffers.get(int(batch.signal("prompt_id")[first]))
            chosen = self.choose(entries["reward"], run) if entries else []
            if chosen:
                parts.append(recalled(entries, chosen, batch[torch.full((len(chosen),), first)]))
        replayed = Batch.concat(parts) if len(parts) > 1 else batch
        run.log(replayed=len(replayed) / len(batch) - 1)
        return replayed

    def choose(self, rewards: Tensor, run: Run) -> list[int]:
        return select(rewards, self.strategy, self.replayed, max(self.min_cache, 1), run.generator) if self.replayed else []


@dataclass
class FillReplay:
    """Puts the fresh rows of the step into their prompts' buffers; the oldest go when a buffer is full."""

    capacity: int = 32  # C, responses a prompt, >= 1; more than `rollout.replayed`, or all strategies choose the same

    def __call__(self, batch: Batch, run: Run) -> None:
        if self.capacity < 1:
            raise ValueError(f"the capacity of the replay buffer must be at least 1, not {self.capacity}")
        buffers = run.state.setdefault("replay", {})
        ids = batch.signal("prompt_id")
        for key in torch.unique(ids).tolist():
            fresh = remembered(batch[((ids == key) & online(batch)).nonzero().flatten()])
            buffers[key] = latest(buffers.get(key), fresh, self.capacity)


def remembered(rows: Batch) -> Entries:
    """Rows as a buffer keeps them: their own tensors and texts, without what all responses to a prompt have in common."""
    own = {name: getattr(rows, name) for name in PER_ROW if name not in NOT_KEPT and isinstance(getattr(rows, name), Tensor)}
    signals = {
        n: value for n, value in rows.signals.items() if n not in NOT_KEPT and (isinstance(value, Tensor) or isinstance(value[0], str))
    }
    return {"fields": own, "signals": signals, "reward": rows.outcome.double()}


def latest(old: Entries | None, new: Entries, capacity: int) -> Entries:
    """Both buffers joined, the last `capacity` entries of them."""
    names = new["signals"].keys() & (old or new)["signals"].keys()
    parts = [part for part in (old, new) if part]
    joined = Batch.concat([Batch(**part["fields"], signals={n: part["signals"][n] for n in names}) for part in parts])[-capacity:]
    fields = {name: getattr(joined, name) for name in new["fields"]}
    return {"fields": fields, "signals": joined.signals, "reward": torch.cat([part["reward"] for part in parts])[-capacity:]}


def recalled(entries: Entries, chosen: list[int], fresh: Batch) -> Batch:
    """Buffered responses as rows; `fresh` holds as many rows of the same prompt, which give what the buffer does not keep."""
    rows = Batch(**entries["fields"], signals=entries["signals"])[torch.tensor(chosen)]
    own = {name: getattr(rows, name) for name in entries["fields"] if name != "group"}
    known = {n: value for n, value in rows.signals.items() if n in fresh.signals}  # others are computed for the whole batch later
    return fresh.but(**own, signals=fresh.signals | known | {"is_online": torch.zeros(len(rows), dtype=torch.bool)})


@dataclass
class ReplayRelative:
    """Reward relative to the other fresh responses of the prompt, or to its other replayed ones."""

    mode: str = "split"  # split: apart, mixed: together
    ddof: int = 1  # 0 population, 1 sample standard deviation
    eps: float = 1e-4  # > 0, added to the standard deviation
    weights: tuple[float, ...] | None = None  # of the K rewards before they are compared; None = all 1

    compares_group = True

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        reward = row_reward(batch, self.weights)
        return broadcast(advantages(reward, batch.group, online(batch), self.mode, self.ddof, self.eps), batch.mask)


def online(batch: Batch) -> Tensor:
    """[N] bool: rows drawn in this step; all of them without replay."""
    return batch.signals.get("is_online", torch.ones(len(batch), dtype=torch.bool))


@dataclass
class ReplaySurrogate:
    """One clipped surrogate on the fresh rows, another on the replayed ones, and the KL to the reference on the fresh ones."""

    clip: float = 0.2  # the ratio stays in [1 - clip, 1 + clip]
    off_coef: float = 1.0  # >= 0, weight of the replayed part
    aggregation: str = "seq"  # seq or token
    beta: float = 0.0  # >= 0, weight of the KL (k3) to the frozen reference; 0 keeps none

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"logp", "ref_logp"}) if self.beta else frozenset({"logp"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        mask, fresh = batch.counted, online(batch)
        parts = loss(new.logp, batch.logp, batch.advantage, mask, fresh, self.clip, self.off_coef, self.aggregation)
        ratio = token_ratio(new.logp, batch.logp, mask).detach()
        stale = masked_mean(log_ratio(new.logp, batch.logp, mask).detach().abs(), mask & ~fresh[:, None])
        metrics = ratio_metrics(ratio, 1 - self.clip, 1 + self.clip, mask) | {"staleness": float(stale)}
        if not self.beta:
            return Loss(parts.loss, metrics)
        kl = masked_mean(kl_estimate(new.logp, batch.signal("ref_logp"), mask), mask & fresh[:, None])
        return Loss(parts.loss + self.beta * kl, metrics | {"kl": float(kl.detach())})


METHOD = GRPO.but(
    name="repo",
    paper=Paper("RePO: Replay-Enhanced Policy Optimization", "2506.09340", 2025),
    summary="earlier responses of the prompt are replayed in a second surrogate, with advantages of their own",
    rollout=ReplayRollout(),
    credit=ReplayRelative(),
    objective=ReplaySurrogate(),
    regularize=(),
    control=(FillReplay(),),
)
