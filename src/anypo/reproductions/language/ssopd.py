"""Claims of SSOPD on strings that start with an answer and may ramble on (token_bandit: 32 prompts, V=6, T=10, token 0 ends, groups of 8).

Right is a string whose first four tokens are the prompt's answer and that ends before the limit, whatever comes between; the logits start at N(0, 0.5),
with 1.5 more on the right tokens and 2 less on an early end. The policy can read a witness: its table plus 4 on the witness's token at the same place,
and on the end after it. SGD with step 1 on a prompt's mean over the group of the mean over 8 tokens, 100 updates, the row's defaults (lam 0.1), three
seeds. A table corrected at a place is corrected there in every string, wrong prefix or not, which helps distillation. A small recurrent policy that had
learned to read worked sums, whose errors lie in one or two tokens, learned more slowly with the term than without. Where strings need not end the
gain over GRPO is as large, and random pairs do as well as the rule; this setting was taken because ending is part of success here, as in the paper.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.language.toys.token_bandit import TabularTokens, TokenBandit
from anypo.method import Method
from anypo.methods.language.ssopd import METHOD, WitnessCredit, choose, first_of_groups
from anypo.policy import Signals
from anypo.reproductions.common import mean_length, plain_sgd, train_on
from anypo.run import Run

SEEDS = range(3)
PROMPTS, SYMBOLS, HORIZON, ANSWER, STEPS, STEP = 32, 6, 10, 4, 100, 32.0


class Rambling(TokenBandit):
    """Right when the string begins with the prompt's answer and ends."""

    def __init__(self, seed: int) -> None:
        super().__init__(PROMPTS, SYMBOLS, HORIZON, eos=0, seed=seed, reward=self.begins_right)
        self.answer = torch.randint(1, SYMBOLS, (PROMPTS, ANSWER), generator=torch.Generator().manual_seed(seed + 2000))

    def begins_right(self, prompt: Tensor, action: Tensor, mask: Tensor) -> Tensor:
        return ((action[:, :ANSWER] == self.answer[prompt]).all(1) & (action[:, ANSWER:] == 0).any(1)).double()

    def expected_success(self, policy: TabularTokens) -> float:
        chance = policy.logits.detach().softmax(-1)
        begins = chance[:, :ANSWER].gather(-1, self.answer[..., None])[..., 0].prod(1)
        return float((begins * (1 - (1 - chance[:, ANSWER:, 0]).prod(1))).mean())

    def start(self, seed: int) -> TabularTokens:
        """The policy that knows more than it shows."""
        policy = self.policy(scale=0.5, seed=seed)
        with torch.no_grad():
            early = policy.logits[:, :ANSWER]
            early.scatter_add_(-1, self.answer[..., None], torch.full((PROMPTS, ANSWER, 1), 1.5, dtype=torch.float64))
            early[..., 0] -= 2
        return policy


@dataclass
class Reader:
    """The policy's own table, drawn to the witness's tokens and, after its last one, to the end."""

    bias: float = 4.0  # added to the logit; 0 reads nothing
    blind: bool = False  # reads nothing at every other place
    hard: bool = False  # is sure of its likeliest token

    def can_show(self, batch: Batch, rows: Tensor, demo: Tensor, run: Run) -> Tensor:
        return torch.ones(len(rows), dtype=torch.bool)

    def __call__(self, batch: Batch, rows: Tensor, demo: Tensor, run: Run) -> Tensor:
        logits = run.score(batch[rows], {"logits"}).logits.clone()
        token = torch.where(batch.mask[demo], batch.action[demo], 0)[..., None]
        bias = torch.full(token.shape, self.bias, dtype=logits.dtype)
        if self.blind:
            bias[:, 1::2] = 0
        return logits.scatter_add_(-1, token, bias) * (1000 if self.hard else 1)


@dataclass
class RandomPair(WitnessCredit):
    """Any correct and any wrong completion of the group."""

    def pairs(self, correct: Tensor, batch: Batch, run: Run) -> Tensor:
        lot = torch.randperm(len(batch), generator=run.generator)
        pair = torch.stack([first_of_groups(lot, batch.group, among) for among in (correct, ~correct)], dim=1)
        return torch.where((pair < len(batch)).all(1, keepdim=True), pair, -1)


@dataclass
class ReversedPair(WitnessCredit):
    """The longest correct and the shortest wrong completion of the group."""

    def pairs(self, correct: Tensor, batch: Batch, run: Run) -> Tensor:
        return choose(correct, -batch.lengths, batch.group)


SSOPD = plain_sgd(METHOD.but(credit=WitnessCredit(teacher=Reader())), STEP)
METHODS = {
    "ssopd": SSOPD,
    "grpo": SSOPD.set("regularize.0.lam", 0.0),
    "blind teacher": SSOPD.set("credit.teacher.bias", 0.0),
    "reversed pair": SSOPD.but(credit=ReversedPair(teacher=Reader())),
    "random pair": SSOPD.but(credit=RandomPair(teacher=Reader())),
}


class Course(NamedTuple):
    """Exact success and mean length at the end; the divergence from the teacher along the taught completions, first and last 20 updates."""

    success: float
    length: float
    first: float
    last: float


@functools.cache
def course(name: str, seed: int) -> Course:
    task = Rambling(seed)
    policy = task.start(seed)

    def watch(run: Run, batch: Batch) -> float | None:
        weight = batch.signals["frontier"]
        return run.history[-1]["distillation"] / float(weight[weight > 0].mean()) if bool((weight > 0).any()) else None

    gaps = train_on(METHODS[name], policy, task, steps=STEPS, seed=seed, watch=watch)
    first, last = (fmean(gap for gap in part if gap is not None) for part in (gaps[:20], gaps[-20:]))
    return Course(task.expected_success(policy), mean_length(policy), first, last)


def over_seeds(name: str) -> Course:
    return Course(*(fmean(values) for values in zip(*(course(name, seed) for seed in SEEDS), strict=True)))


def _better(name: str) -> Evidence:
    found = {n: over_seeds(n).success for n in (name, "grpo")}
    return Evidence(
        {n: round(v, 3) for n, v in found.items()}, "at least 0.03 above GRPO after 100 updates", found[name] >= found["grpo"] + 0.03
    )


@claim("after 100 updates SSOPD succeeds more often than GRPO")
def better() -> Evidence:
    return _better("ssopd")


@ablation(better, "a teacher that does not read the witness")
def better_blind() -> Evidence:
    return _better("blind teacher")


def _shorter(name: str) -> Evidence:
    found = {n: over_seeds(n).length for n in (name, "random pair")}
    holds = found[name] <= found["random pair"] - 0.1
    return Evidence({n: round(v, 2) for n, v in found.items()}, "shorter by at least 0.1 tokens after 100 updates", holds)


@claim("shortest correct to longest wrong gives shorter strings than a random correct to a random wrong completion")
def shorter() -> Evidence:
    return _shorter("ssopd")


@ablation(shorter, "the rule reversed: longest correct to shortest wrong")
def shorter_reversed() -> Evidence:
    return _shorter("reversed pair")


def _as_accurate(name: str) -> Evidence:
    found = {n: over_seeds(n).success for n in (name, "random pair")}
    return Evidence({n: round(v, 3) for n, v in found.items()}, "at least that of random pairs", found[name] >= found["random pair"])


# The rule is ahead on some seeds and behind on others; the mean over the longest wrong completion leaves each of its tokens less weight.
@claim("shortest correct to longest wrong is at least as accurate as a random correct to a random wrong completion", reproduced=False)
def as_accurate() -> Evidence:
    return _as_accurate("ssopd")


@ablation(as_accurate, "the rule reversed: longest correct to shortest wrong")
def as_accurate_reversed() -> Evidence:
    return _as_accurate("reversed pair")


def _closer(name: str) -> Evidence:
    found = over_seeds(name)
    return Evidence([round(found.first, 3), round(found.last, 3)], "lower by at least 30%", found.last <= 0.7 * found.first)


@claim("the divergence from the teacher along wrong completions falls during training")
def closer() -> Evidence:
    return _closer("ssopd")


@ablation(closer, "GRPO alone (lam 0)")
def closer_under_grpo() -> Evidence:
    return _closer("grpo")


# -- where the term acts -----------------------------------------------------------------------------------------------------------------------


def _touched(reader: Reader, one_group: bool = False) -> Evidence:
    """The gradient in the logits of one batch, of which every group is mixed, all right or all wrong."""
    task = Rambling(0)
    method: Method = METHOD.but(credit=WitnessCredit(teacher=reader))
    run = Run(method, task.start(0), task, steps=1)
    batch = run.collect([p.but(samples=8) for p in task.prompts(PROMPTS, run.rng)])
    batch.reward = torch.where(batch.group == 0, 1.0, task.score(batch, run))  # the first group is all right
    longest = [_longest_wrong(batch, g) for g in batch.group.unique().tolist()]
    expected = sorted(row for row in longest if row is not None)
    if one_group:
        batch = batch.but(group=torch.zeros_like(batch.group))
    run.method.credit(batch, run)
    logits = run.score(batch, {"logits"}).logits.requires_grad_()
    run.method.regularize[0](batch, Signals(logits=logits), run).value.backward()
    assert logits.grad is not None
    size = logits.grad.abs().amax(-1)
    rows = (size.amax(1) > 1e-12).nonzero().flatten().tolist()
    agreeing = float(size[:, 1::2].max())
    found = {
        "groups": len(longest),
        "taught rows": len(rows),
        "as expected": rows == expected,
        "gradient where they agree": float(f"{agreeing:.1g}"),
    }
    return Evidence(
        found, "the longest wrong row of every mixed group and no other; 0 where they agree", rows == expected and agreeing < 1e-12
    )


def _longest_wrong(batch: Batch, group: int) -> int | None:
    assert batch.reward is not None
    rows = (batch.group == group).nonzero().flatten().tolist()
    wrong = [row for row in rows if batch.reward[row] == 0]
    return max(wrong, key=lambda row: (int(batch.lengths[row]), -row)) if 0 < len(wrong) < len(rows) else None


@claim("the term touches the longest wrong completion of mixed groups alone, and there only places at which teacher and student differ")
def touched() -> Evidence:
    return _touched(Reader(blind=True))


@ablation(touched, "witnesses from other groups")
def touched_across_groups() -> Evidence:
    return _touched(Reader(blind=True), one_group=True)


@ablation(touched, "imitation of the teacher's likeliest token in place of its distribution")
def touched_by_imitation() -> Evidence:
    return _touched(Reader(blind=True, hard=True))
