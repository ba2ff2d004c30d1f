"""HSIR: verify-then-exit sampling and intrinsic diversity (arXiv:2605.24998).

A model that trains on its own verified solutions sees few right ones of hard problems and many with redundant steps. InDiv, found in the model's own
hidden states and attention, is low where steps repeat one another. H-GRPO (`METHOD`) is GRPO whose right responses earn it beside. `VARIANTS["sft"]`
imitates: sampling goes on in rounds until each problem has enough right solutions; one that ends wrong, but had the right answer after some step, is
cut there and kept (VeriExit); of the right ones the most diverse are kept. The parts are the paper's; the forms of the score, its weights, the
rounds, the filter and the pairs are [reconstructed]. Where a policy does not show its attention, softmax of the scaled products of hidden states
stands in [ours], and the last step counts as the answer [ours]. Left out: DPO on the pairs (their choice is `dpo_pairs`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from anypo.batch import Batch
from anypo.method import Paper, Rollout
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.seams.credit import group_relative
from anypo.seams.groups import broadcast, group_sum
from anypo.seams.objective import SequenceReinforce
from anypo.seams.reward import row_reward, weighted_sum
from anypo.seams.rollout import OnPolicy, steps_of
from anypo.task import Prompt

if TYPE_CHECKING:
    from anypo.run import Run

FULL_MARKS = 1 - 1e-6  # a reward from here on is a right answer
ATTENTION = ("states", "policy")


class Exit(NamedTuple):
    first: Tensor  # [N] int64, the first step after which the answer is right, -1 where there is none
    keep: Tensor  # [N,K] of 0/1, the steps up to it


class Rounds(NamedTuple):
    rounds: Tensor  # [Q] int64, rounds that the problem was sampled in
    accepted: Tensor  # [Q], accepted samples by then


def _membership(segment: Int[Tensor, "*N T"]) -> Float[Tensor, "*N T K"]:
    """1 where a token belongs to a step; -1 belongs to none."""
    return (segment[..., None] == torch.arange(int(segment.max()) + 1 if segment.numel() else 0, device=segment.device)).double()


def step_repr(hidden: Float[Tensor, "*N T D"], segment: Int[Tensor, "*N T"]) -> Float[Tensor, "*N K D"]:
    """Equation 1: mean hidden state of each step, float64; 0 for a step without tokens."""
    member = _membership(segment)
    inside = torch.where((segment >= 0)[..., None], hidden.double(), 0.0)
    return member.mT @ inside / member.sum(-2).clamp(min=1)[..., None]


def step_weights(attn: Float[Tensor, "*N A T"], segment: Int[Tensor, "*N T"]) -> Float[Tensor, "*N K"]:
    """Equation 2: share of each step in the attention of the answer's tokens, detached; 0 everywhere where there is no attention."""
    mass = (attn.detach().double() @ _membership(segment)).sum(-2)
    total = mass.sum(-1, keepdim=True)
    return torch.where(total > 0, mass / torch.where(total > 0, total, 1.0), 0.0)


def indiv(
    step_repr: Float[Tensor, "*N K D"], weight: Float[Tensor, "*N K"], exists: Bool[Tensor, "*N K"] | None = None
) -> Float[Tensor, "*N"]:
    """Equation 3: 1 minus the weighted mean cosine of all pairs of steps; 1 for fewer than two. Uniform where no pair has weight. `exists`: which
    steps there are (None: all)."""
    there = torch.ones_like(weight, dtype=torch.bool) if exists is None else exists
    uniform, given = there.double(), torch.where(there, weight.double(), 0.0)

    def pairs(w: Tensor) -> Tensor:
        return (w.sum(-1).square() - w.square().sum(-1)) / 2

    w = torch.where((pairs(given) > 1e-12)[..., None], given, uniform)
    unit = step_repr.double() / step_repr.double().norm(dim=-1, keepdim=True).clamp(min=1e-8)
    total = (w[..., None] * unit).sum(-2).square().sum(-1) - (w.square() * unit.square().sum(-1)).sum(-1)
    return torch.where(uniform.sum(-1) < 2, 1.0, 1 - total / 2 / pairs(w).clamp(min=1e-12))


def verify_exit(step_correct: Tensor, mask: Tensor, min_step: int = 0) -> Exit:
    """Equation 4. `step_correct` [N,K]: whether the answer read out after a step is right; steps before `min_step` do not count."""
    place = torch.arange(mask.shape[1], device=mask.device)
    hit = step_correct.bool() & mask.bool() & (place >= min_step)
    first = torch.where(hit.any(1), hit.long().argmax(1), -1) if mask.shape[1] else torch.full((len(mask),), -1)
    return Exit(first, ((place <= first[:, None]) & mask.bool()).double())


def sampling_rounds(hits: Int[Tensor, "Q R"], want: int) -> Rounds:
    """Equation 5: a problem leaves once it has `want` accepted samples. `hits`: accepted samples of each round."""
    sampled = hits.cumsum(1) - hits < want
    return Rounds(sampled.sum(1), (hits * sampled).sum(1))


def select(score: Float[Tensor, " N"], correct: Tensor, group: Int[Tensor, " N"], keep: float = 0.5) -> Int[Tensor, " N"]:
    """Equation 6: 1 for the ceil(keep n) most diverse of a group's n right rows, the earlier of equals first and at least one."""
    order = score.argsort(descending=True, stable=True)
    order = order[(correct[order] <= 0).long().argsort(stable=True)]
    order = order[group[order].argsort(stable=True)]
    place = torch.arange(len(group), device=group.device)
    start = torch.searchsorted(group[order].contiguous(), group[order].contiguous())
    rank = torch.empty_like(place).index_copy(0, order, place - start)
    quota = (keep * group_sum((correct > 0).double(), group) - 1e-9).ceil().clamp(min=1)
    return ((correct > 0) & (rank < quota)).long()


def dpo_pairs(score: Float[Tensor, " N"], correct: Tensor, group: Int[Tensor, " N"]) -> list[list[int]]:
    """Equation 7: [the most diverse right row, the least diverse wrong one] of each group that has both, groups ascending."""
    found = []
    for g in group.unique(sorted=True):
        good, bad = (((group == g) & side).nonzero().flatten() for side in (correct > 0, correct <= 0))
        if len(good) and len(bad):
            found.append([int(good[score[good].argmax()]), int(bad[score[bad].argmin()])])
    return found


def advantages(
    score: Float[Tensor, " N"], correct: Tensor, group: Int[Tensor, " N"], lam: float = 0.3, eps: float = 1e-6
) -> Float[Tensor, " N"]:
    """Equation 8: correct (1 + lam InDiv) relative to the group."""
    return group_relative(correct * (1 + lam * score), group, True, 0, eps)


def diversity(batch: Batch, run: Run, attention: str = "states") -> Float[Tensor, " N"]:
    """InDiv of every row's steps before its last one, which is the answer. Raises ValueError for an unknown source of attention."""
    if attention not in ATTENTION:
        raise ValueError(f"attention is that of {' or '.join(ATTENTION)}, not '{attention}'")
    steps, hidden = steps_of(batch, run), batch.signal("old_hidden").double()
    answer = (steps == steps.amax(1, keepdim=True)) & (steps >= 0)
    segment = torch.where(answer, -1, steps)
    if not bool((segment >= 0).any()):
        return torch.ones(len(batch), dtype=torch.float64)
    if attention == "policy":
        mass = batch.signal("old_attention").double()
    else:
        clean = torch.where((steps >= 0)[..., None], hidden, 0.0)
        product = (clean @ clean.mT / math.sqrt(hidden.shape[-1])).masked_fill((segment < 0)[:, None], -torch.inf)
        mass = torch.where((segment >= 0).any(1)[:, None, None], product, 0.0).softmax(-1)
    mass = torch.where(answer[..., None], mass, 0.0)
    return indiv(step_repr(hidden, segment), step_weights(mass, segment), _membership(segment).any(1))


@dataclass
class DiverseReward:
    """The task's reward as one number a row, and `lam` InDiv of it more where it is positive."""

    lam: float = 0.3  # >= 0; 0: the reward alone
    attention: str = "states"  # of the answer on the steps: products of hidden states, or policy, its own signal `attention` [N,T,T]
    weights: tuple[float, ...] | None = None  # of the K rewards; None = all 1

    @property
    def needs(self) -> frozenset[str]:
        return _needs(self.attention)

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        scored = run.score_rewards(batch)
        outcome = weighted_sum(scored, self.weights if batch.objectives else None)
        found = diversity(batch, run, self.attention).to(outcome)
        run.log(diversity=float(found.mean()))
        return outcome + self.lam * found * outcome.clamp(min=0)


def _needs(attention: str) -> frozenset[str]:
    return frozenset({"old_hidden", "old_attention"} if attention == "policy" else {"old_hidden"})


@dataclass
class VerifyThenExit:
    """Rounds of attempts at the problems that lack right solutions. A wrong one is cut after the first step whose read-out answer is right, and
    ends with that answer. The signal `accepted` [N] says which rows are right."""

    inner: Rollout = field(default_factory=OnPolicy)
    want: int = 4  # right solutions a problem, >= 1
    max_rounds: int = 4  # >= 1
    min_step: int = 0  # first step that may be cut at, >= 0: an answer that is right by luck before it does not count
    exits: bool = True  # False: rejection sampling in rounds
    answer_prompt: str = "\nThe answer is "  # what asks for the answer, where the task does not say (`answer_prompt`)
    answer_tokens: int = 16  # most tokens of an answer that is read out, >= 1

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        accepted, pool, parts = torch.zeros(len(prompts), dtype=torch.int64), list(range(len(prompts))), []
        failed = saved = 0
        for _ in range(self.max_rounds):
            batch = self.inner([prompts[q] for q in pool], run)
            batch.group = torch.tensor(pool)[batch.group]
            batch.signals["accepted"] = right = self.right(batch, run)
            if self.exits:
                batch = self.rescued(batch, ~right, run)
                failed, saved = failed + int((~right).sum()), saved + int((batch.signals["accepted"] & ~right).sum())
            batch.signals = {n: v for n, v in batch.signals.items() if n not in ("task_reward", "old_entropy")}
            accepted.index_add_(0, batch.group, batch.signals["accepted"].long())
            parts.append(batch)
            pool = [q for q in pool if accepted[q] < self.want]
            if not pool:
                break
        run.log(sampling_rounds=len(parts), problems_solved=float((accepted > 0).double().mean()), rescued=saved / max(failed, 1))
        return Batch.concat(parts)

    def right(self, batch: Batch, run: Run) -> Bool[Tensor, " N"]:
        """Full marks by the task's own check, else by its reward."""
        check: Callable[[Batch], Tensor] | None = getattr(run.task, "correct", None)
        if check is not None:
            return check(batch)
        reward = run.task.score(batch, run)
        return (reward if reward.dim() == 1 else reward.sum(1)) >= FULL_MARKS

    def rescued(self, batch: Batch, wrong: Bool[Tensor, " N"], run: Run) -> Batch:
        """The batch with those of the rows `wrong` cut short that had the right answer after a step. Raises ValueError for a policy without text."""
        policy: Any = run.policy
        if not isinstance(batch.context, list) or not hasattr(policy, "decode"):
            raise ValueError(
                f"{run.method.name} reads answers out of unfinished texts, which '{run.task.name}' has not; set rollout.exits=false"
            )
        steps = steps_of(batch, run)
        asks = _tokens(policy, getattr(run.task, "answer_prompt", self.answer_prompt))
        probes = []
        for row in wrong.nonzero().flatten().tolist():
            for step in range(self.min_step, int(steps[row].max())):
                begun = torch.cat([batch.action[row, (steps[row] >= 0) & (steps[row] <= step)], asks])
                if len(batch.context[row]) + len(begun) + self.answer_tokens <= policy.context_limit:
                    probes.append((row, step, begun))
        if not probes:
            return batch
        rows, starts = torch.tensor([row for row, _, _ in probes]), [torch.cat([batch.context[row], begun]) for row, _, begun in probes]
        out = policy.sample(starts, [1] * len(starts), max_tokens=self.answer_tokens, temperature=1.0, generator=run.generator, greedy=True)
        whole = [torch.cat([begun, drawn[kept]]) for (_, _, begun), drawn, kept in zip(probes, out.tokens, out.valid, strict=True)]
        cut = self.rewritten(batch, rows, whole, policy)
        correct = torch.zeros(len(batch), int(steps.max()), dtype=torch.bool)
        after = torch.tensor([step for _, step, _ in probes])
        correct[rows, after] = self.right(cut, run) & out.finished
        first = verify_exit(correct, torch.ones_like(correct), self.min_step).first
        chosen = (after == first[rows]).nonzero().flatten()
        return self.spliced(
            batch, cut[chosen], rows[chosen], first[rows[chosen]], torch.tensor([len(b) - len(asks) for _, _, b in probes])[chosen], run
        )

    def rewritten(self, batch: Batch, rows: Int[Tensor, " M"], whole: list[Tensor], policy: Any) -> Batch:
        """Rows of a batch with other texts; what was known of single actions is dropped."""
        old = batch[rows]
        action = nn.utils.rnn.pad_sequence(whole, batch_first=True)
        mask = torch.arange(action.shape[1]) < torch.tensor([len(w) for w in whole])[:, None]
        signals = {n: v for n, v in old.signals.items() if not (isinstance(v, Tensor) and v.dim() > 1)}
        signals["completion"] = [policy.decode(w) for w in whole]
        return old.but(
            action=action, mask=mask, valid=mask, logp=batch.logp.new_zeros(mask.shape), segment=None, terminated=torch.ones(len(rows), dtype=torch.bool),
            truncated=torch.zeros(len(rows), dtype=torch.bool), signals=signals | {"accepted": torch.ones(len(rows), dtype=torch.bool)},
        )  # fmt: skip

    def spliced(self, batch: Batch, cut: Batch, rows: Tensor, first: Tensor, length: Tensor, run: Run) -> Batch:
        """The batch with `cut` in the place of `rows`; their first `length` actions are steps up to `first`, the others the answer."""
        if not len(rows):
            return batch
        cut.logp = run.score(cut, {"logp"}).logp
        if batch.segment is not None:
            before = nn.functional.pad(batch.segment[rows], (0, max(0, cut.horizon - batch.horizon)))[:, : cut.horizon]
            cut.segment = torch.where(torch.arange(cut.horizon) < length[:, None], before, first[:, None] + 1)
        others = torch.ones(len(batch), dtype=torch.bool).index_fill(0, rows, False).nonzero().flatten()
        kept = batch[others]
        kept.signals = {n: v for n, v in kept.signals.items() if n in cut.signals}
        return Batch.concat([kept.but(valid=kept.attended), cut])[torch.cat([others, rows]).argsort()]


def _tokens(policy: Any, text: str) -> Int[Tensor, " L"]:
    """Tokens of text inside a completion."""
    tokenizer = getattr(policy, "tokenizer", None)
    return (
        policy.encode(text) if tokenizer is None else torch.tensor(tokenizer(text, add_special_tokens=False).input_ids, dtype=torch.int64)
    )


@dataclass
class KeepDiverse:
    """The same weight for the kept rows, whose mean over all rows is 1, and 0 for the others: the most diverse right ones of each problem."""

    keep: float = 0.5  # share of a problem's right rows, in (0,1]; 1: all
    attention: str = "states"  # as in DiverseReward

    @property
    def needs(self) -> frozenset[str]:
        return _needs(self.attention)

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        right = batch.signals["accepted"] if "accepted" in batch.signals else row_reward(batch) >= FULL_MARKS
        kept = select(diversity(batch, run, self.attention), right, batch.group, self.keep)
        run.log(imitated=float(kept.sum()))
        return broadcast(kept.to(batch.logp) * len(batch) / kept.sum().clamp(min=1), batch.mask)


METHOD = GRPO.but(
    name="hsir",
    paper=Paper("HSIR: Harnessing Self-Improvement in Large Reasoning Models", "2605.24998", 2026),
    summary="right responses earn more the less their steps repeat one another, seen in the policy's own hidden states",
    reward=DiverseReward(),
    task="check_again",
)
VARIANTS = {
    "sft": METHOD.but(
        name="hsir.sft",
        summary="imitation of the most diverse right solutions; wrong ones are cut where they were right",
        rollout=VerifyThenExit(), reward=GRPO.reward, credit=KeepDiverse(), objective=SequenceReinforce(), regularize=(),
    )
}  # fmt: skip
