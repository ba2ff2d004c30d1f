"""VPO: vector policy optimization (arXiv:2605.22817).

Training on one scalar reward concentrates a policy, so that a search at test time sees the same answer again and again. VPO keeps the rewards apart
and lets a rollout hold a set of m answers, worth how well its best member does, on average over random trade-offs between the rewards: a member that is
best for some trade-off holds the worth up, so members specialize. All else is GRPO, with this worth in the place of the reward. Equations 1-4 from
the abstract and third-party digests; the share of each answer (6) is [reconstructed]. Left out: the search at test time.

The batch says where the answers are: the signal `candidate` [N,T] (-1 outside), of the task or of `SetRollout`, which splits texts; a row
without it is one answer. `SetReward` scores every answer by itself. A missing answer is out of the maximum; a set of none is worth 0.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper, Rollout
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.seams.credit import group_relative
from anypo.seams.groups import broadcast
from anypo.seams.objective import ClippedSurrogate
from anypo.seams.rollout import OnPolicy
from anypo.task import Prompt

if TYPE_CHECKING:
    from anypo.run import Run

Vectors = Float[Tensor, "N m K"]
Members = Bool[Tensor, "N m"]  # or 0/1: which answers there are
TradeOffs = Float[Tensor, "*N S K"]  # non-negative, rows sum to 1; [S,K] for all rows or [N,S,K]
REQUEST = "{prompt}\nGive {size} different answers, separated by {separator}"


def worth(vector_reward: Vectors, valid: Members, weights: TradeOffs) -> Float[Tensor, "N m S"]:
    """w_s . V_ij of every answer under every trade-off; -inf for missing answers, whose rewards may be anything."""
    there = valid.bool()
    rewards = torch.where(there[..., None], vector_reward, torch.zeros_like(vector_reward))
    found = rewards @ weights.expand(len(rewards), *weights.shape[-2:]).transpose(1, 2)
    return found.masked_fill(~there[..., None], -torch.inf)


def set_reward(vector_reward: Vectors, valid: Members, weights: TradeOffs) -> Float[Tensor, " N"]:
    """Equation 2: the mean over trade-offs of the best member's worth; 0 for an empty set."""
    best = worth(vector_reward, valid, weights).amax(1).mean(1)
    return torch.where(valid.bool().any(1), best, torch.zeros_like(best))


def mean_reward(vector_reward: Vectors, valid: Members, weights: TradeOffs) -> Float[Tensor, " N"]:
    """Equation 5, Multi-RLVR: the mean over members of their mean worth; 0 for an empty set."""
    there = valid.bool()
    each = worth(vector_reward, valid, weights).mean(2).masked_fill(~there, 0.0)
    return each.sum(1) / there.sum(1).clamp(min=1)


def advantages(
    vector_reward: Vectors, valid: Members, weights: TradeOffs, group: Int[Tensor, " N"], std: bool = True, ddof: int = 0, eps: float = 1e-6
) -> Float[Tensor, " N"]:
    """Equation 3: the set's worth relative to its group. Rows of a group must share their trade-offs."""
    return group_relative(set_reward(vector_reward, valid, weights), group, std, ddof, eps)


def share(vector_reward: Vectors, valid: Members, weights: TradeOffs) -> Float[Tensor, "N m"]:
    """Equation 6: under how many of the trade-offs each answer is the best, ties split evenly; rows sum to 1, empty sets have 0."""
    values = worth(vector_reward, valid, weights)
    best = ((values == values.amax(1, keepdim=True)) & valid.bool()[..., None]).to(vector_reward.dtype)
    return (best / best.sum(1, keepdim=True).clamp(min=1)).mean(2)


def best_at_k(candidates: Float[Tensor, "n K"], weights: Float[Tensor, "S K"]) -> Tensor:
    """Equation 7: the best worth in a pool of n answers, mean over test trade-offs. Scalar."""
    return set_reward(candidates[None], torch.ones(1, len(candidates), dtype=torch.bool), weights)[0]


def pass_at_k(n: int, c: int, k: int) -> Tensor:
    """Equation 7: chance that k of n answers, of which c have all rewards 1, hold one of these. Scalar. Raises ValueError for impossible numbers."""
    from anypo.report.statistics import pass_at_k as unbiased  # loads SciPy

    return torch.tensor(unbiased(n, c, k), dtype=torch.float64)


def answer_index(pieces: Sequence[str], separator: str, size: int) -> list[int]:
    """Which answer each token (`pieces` are their texts) belongs to, a separator to the answer before it; -1 from the `size`-th separator on."""
    ends = [found.end() for found in re.finditer(re.escape(separator), "".join(pieces))]
    starts = accumulate((len(piece) for piece in pieces[:-1]), initial=0)
    index = [bisect_right(ends, start) for start in starts] if pieces else []
    return [i if i < size else -1 for i in index]


@dataclass
class SetRollout:
    """Rollouts that hold several answers. Prompts that are lists of messages ask for them; a plain text is what a base model goes on with, so it is
    left as it is unless `ask_plain`.

    Signals, of policies that write text: `candidate` [N,T], `answers` (lists of texts, at most `size` a row). A task that gives `candidate`
    itself has done the splitting.
    """

    size: int = 4  # answers a rollout, m >= 1
    separator: str = "|||"  # between two answers, not empty
    request: str = REQUEST  # template of a prompt with {prompt}, {size} and {separator}
    ask_plain: bool = False  # ask in plain texts too
    inner: Rollout = field(default_factory=OnPolicy)

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        if self.size < 1 or not self.separator:
            raise ValueError(f"rollout.size must be 1 or more, not {self.size}, and rollout.separator some text")
        batch = self.inner([p.but(content=self.asked(p.content)) for p in prompts], run)
        decode = getattr(run.policy, "decode", None)
        if "candidate" in batch.signals or decode is None or "completion" not in batch.signals:
            return batch
        texts = {token: decode(torch.tensor([token])) for token in torch.unique(batch.action[batch.mask]).tolist()}
        batch.signals["candidate"] = torch.full_like(batch.action, -1)
        for row, mask in enumerate(batch.mask):
            index = answer_index([texts[t] for t in batch.action[row][mask].tolist()], self.separator, self.size)
            batch.signals["candidate"][row, mask] = torch.tensor(index, dtype=torch.int64)
        split = [text.split(self.separator)[: self.size] for text in batch.signals["completion"]]
        batch.signals["answers"] = [[answer.strip() for answer in answers] for answers in split]
        return batch

    def asked(self, content: Any) -> Any:
        """A prompt's content with the request for a set of answers."""
        if self.size > 1 and isinstance(content, str) and self.ask_plain:
            return self.request.format(prompt=content, size=self.size, separator=self.separator)
        if self.size > 1 and isinstance(content, list) and content:
            text = self.request.format(prompt=content[-1]["content"], size=self.size, separator=self.separator)
            return [*content[:-1], {**content[-1], "content": text}]
        return content


@dataclass
class SetReward:
    """The task's rewards of every answer as if it were the whole response. Returns their mean over the row's answers, [N] or [N,K].

    Signals: `vector_reward` [N,m,K]; `answered` [N,m], which of them there are: those with a token, of texts those that are not blank (the
    first always is there, blank or not).
    """

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        members, answered = split_sets(batch)
        row, place = answered.nonzero(as_tuple=True)
        found = run.score_rewards(members)
        if found.dim() == 2 and not members.objectives:
            found = found.sum(1)  # dense: what counts is the total
        batch.objectives = members.objectives
        vectors = found.new_zeros(*answered.shape, *found.shape[1:])
        vectors[row, place] = found
        batch.signals["answered"] = answered
        batch.signals["vector_reward"] = vectors if found.dim() == 2 else vectors[..., None]
        run.log(answers=float(answered.sum(1).double().mean()))
        return vectors.sum(1) / answered.sum(1).clamp(min=1).to(vectors).view(-1, *[1] * (found.dim() - 1))


def split_sets(batch: Batch) -> tuple[Batch, Members]:
    """Every answer of every row as a row of its own, its tokens moved to the front; and which answers each row has, [N,m]."""
    index = torch.where(batch.mask, batch.signals.get("candidate", torch.zeros_like(batch.action)), -1)
    size = max(1, int(index.max()) + 1) if index.numel() else 1
    tokens = index[:, None] == torch.arange(size)[:, None]  # [N,m,T]
    answered, texts = tokens.any(2), batch.signals.get("answers")
    if texts is not None:
        size = max(len(row) for row in texts)
        answered = torch.tensor([[j == 0 or (j < len(row) and bool(row[j])) for j in range(size)] for row in texts])
        tokens = torch.cat([tokens, tokens.new_zeros(len(batch), size, batch.horizon)], dim=1)  # a text may begin inside a token
    row, place = answered.nonzero(as_tuple=True)
    mask = tokens[row, place]
    order = mask.long().argsort(dim=1, descending=True, stable=True)
    members = batch[row]
    members.signals.pop("task_reward", None)
    if texts is not None:
        members.signals["completion"] = [texts[i][j] for i, j in zip(row.tolist(), place.tolist(), strict=True)]
    return members.but(
        action=members.action.gather(1, order), mask=mask.gather(1, order), logp=members.logp.gather(1, order), valid=None
    ), answered


@dataclass
class SetAdvantage:
    """A set's worth relative to the other sets of its prompt, at every token of the rollout; trade-offs are drawn once a prompt.

    Without the signals of `SetReward` a row is one answer, with the batch's rewards.
    """

    draws: int = 16  # S, random trade-offs a prompt, >= 1; 0 = one that weighs all rewards alike
    alpha: float = 1.0  # > 0, of the Dirichlet they are drawn from; small: single rewards, large: all alike
    members: str = "best"  # what a set is worth: best, or mean of its answers (Multi-RLVR with draws=0)
    scale: tuple[float, ...] | None = None  # > 0, what each reward is divided by; None = they have a common scale
    by_answer: bool = False  # equation 6: a good set's advantage in shares, to the answers that made it good
    std: bool = True  # divide by the group's standard deviation
    ddof: int = 0  # 0 population, 1 sample standard deviation
    eps: float = 1e-6  # > 0, added to the standard deviation

    compares_group = True

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        if self.members not in ("best", "mean"):
            raise ValueError(f"a set is worth its best member or their mean; credit.members is best or mean, not '{self.members}'")
        vectors, valid = self.sets(batch)
        weights = self.trade_offs(batch.group, vectors, run)
        value = (set_reward if self.members == "best" else mean_reward)(vectors, valid, weights)
        run.log(set_reward=float(value.double().mean()))
        advantage = broadcast(group_relative(value, batch.group, self.std, self.ddof, self.eps), batch.mask)
        if not self.by_answer or "candidate" not in batch.signals:
            return advantage
        index = batch.signals["candidate"]
        factor = share(vectors, valid, weights) * valid.sum(1, keepdim=True)
        spread = torch.where(index >= 0, factor.gather(1, index.clamp(0, factor.shape[1] - 1)), torch.ones_like(advantage))
        return torch.where(advantage > 0, advantage * spread, advantage)

    def sets(self, batch: Batch) -> tuple[Vectors, Members]:
        """The rewards of all answers, on a common scale."""
        assert batch.reward is not None
        if "vector_reward" in batch.signals:
            vectors, valid = batch.signals["vector_reward"], batch.signals["answered"]
        else:
            reward = batch.reward if batch.objectives else batch.outcome[:, None]
            vectors, valid = reward[:, None], torch.ones(len(reward), 1, dtype=torch.bool)
        if self.scale is None:
            return vectors, valid
        if len(self.scale) != vectors.shape[2]:
            raise ValueError(f"credit.scale has {len(self.scale)} numbers for {vectors.shape[2]} rewards; give one for each")
        return vectors / vectors.new_tensor(self.scale), valid

    def trade_offs(self, group: Int[Tensor, " N"], like: Vectors, run: Run) -> Float[Tensor, "N S K"]:
        """Equation 1, one draw for each group."""
        kinds = like.shape[2]
        if self.draws == 0:
            return like.new_full((1, kinds), 1 / kinds)
        names, index = torch.unique(group, return_inverse=True)
        drawn = run.rng.dirichlet([self.alpha] * kinds, size=(len(names), self.draws))
        return torch.as_tensor(drawn, dtype=like.dtype)[index]


METHOD = GRPO.but(
    name="vpo",
    paper=Paper("Vector Policy Optimization: Training for Diversity Improves Test-Time Search", "2605.22817", 2026),
    summary="a rollout is a set of answers, worth its best member's reward on average over random trade-offs of the rewards",
    rollout=SetRollout(),
    reward=SetReward(),
    credit=SetAdvantage(),
    objective=ClippedSurrogate(clip_low=0.2, clip_high=0.28, aggregation="token_mean"),
    regularize=(),
)

VARIANTS = {
    "by_answer": METHOD.but(
        name="vpo.by_answer", summary="VPO whose praise goes to the answers that are the best of their set", credit=SetAdvantage(by_answer=True)
    ),
    "max_scalar": METHOD.but(
        name="vpo.max_scalar", summary="a set is worth the best of its answers by the mean of the rewards", credit=SetAdvantage(draws=0)
    ),
    "multi_rlvr": METHOD.but(
        name="vpo.multi_rlvr", summary="a set is worth the mean of its answers, by the mean of the rewards",
        credit=SetAdvantage(draws=0, members="mean"),
    ),
}  # fmt: skip
