"""Claims of VPO on sets of four answers, each a softmax over twelve: three specialists that are good at one of three rewards, a compromise that is fair
at all, eight worthless ones. Four groups of 8 sets a step, 400 steps of SGD 0.3 a row. What a search over k answers finds is exact, for trade-offs
that training never saw; answers of one-answer policies are drawn k times, sets of four are written until there are k."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.language.toys.token_bandit import TabularTokens, TokenBandit
from anypo.method import Method
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.methods.language.vpo import METHOD as VPO
from anypo.methods.language.vpo import VARIANTS, SetAdvantage
from anypo.reproductions.common import plain_sgd, train_on
from anypo.run import Run

SEEDS, STEPS, STEP_SIZE, GROUPS = (0, 1, 2), 400, 0.3, 4
ANSWERS, SLOTS, SPECIALISTS, COMPROMISE = 12, 4, 3, 3
VALUES = torch.zeros(ANSWERS, SPECIALISTS, dtype=torch.float64)  # answer -> its three rewards
VALUES[:SPECIALISTS] = 0.2 + 0.8 * torch.eye(SPECIALISTS, dtype=torch.float64)
VALUES[COMPROMISE] = 0.5
POOL = 8  # answers that the search may look at


class AnswerSets(TokenBandit):
    """One problem; every token is an answer."""

    def __init__(self, slots: int, seed: int) -> None:
        objectives = tuple(f"reward {k}" for k in range(SPECIALISTS))
        super().__init__(
            1, ANSWERS, slots, seed=seed, reward=lambda prompt, action, mask: VALUES[action[:, 0]] * mask[:, :1], objectives=objectives
        )
        self.prompts_per_step = GROUPS

    def continue_from(self, *start: Any, **options: Any) -> Batch:
        batch = super().continue_from(*start, **options)
        batch.signals["candidate"] = torch.arange(batch.horizon).expand(batch.mask.shape)
        return batch


@dataclass
class MeanFirst(SetAdvantage):
    """The operators swapped: the best member by the mean of the trade-offs drawn."""

    def trade_offs(self, group: Tensor, like: Tensor, run: Run) -> Tensor:
        return super().trade_offs(group, like, run).mean(1, keepdim=True)


METHODS: dict[str, tuple[Method, int]] = {  # with the answers that a rollout holds
    "VPO": (VPO, SLOTS),
    "scalar GRPO": (VPO.but(rollout=GRPO.rollout, reward=GRPO.reward, credit=GRPO.credit), 1),
    "random weights, one answer": (VPO, 1),
    "Multi-RLVR": (VARIANTS["multi_rlvr"], SLOTS),
    "max-scalar sets": (VARIANTS["max_scalar"], SLOTS),
    "mean of 16 draws first": (VPO.but(credit=MeanFirst()), SLOTS),
}
BASELINES = ("scalar GRPO", "random weights, one answer", "Multi-RLVR", "max-scalar sets")


class Found(NamedTuple):
    """Of a trained policy, mean over seeds."""

    best: list[float]  # best@k over trade-offs, k = 1..8
    shares: list[float]  # of the specialists and the compromise in its answers
    entropy: float  # of an answer of the pool, nats


def best_at(chance: Tensor, trade_offs: Tensor) -> list[float]:
    """Exact expected best worth among k independent answers, slot by slot in turn, k = 1..8, mean over trade-offs [S,K]. `chance` [slots, answers]."""
    order = (VALUES @ trade_offs.T).sort(0)  # of every trade-off, worths from low to high
    below = chance[:, order.indices].cumsum(1)  # [slots, answers, S]: that the slot's answer is worth no more
    everything, found = torch.ones_like(order.values), []
    for k in range(POOL):
        everything = everything * below[k % len(chance)]
        is_best = torch.diff(everything, dim=0, prepend=torch.zeros_like(everything[:1]))
        found.append(float((is_best * order.values).sum(0).mean()))
    return found


@cache
def _trained(name: str) -> Found:
    method, slots = METHODS[name]
    g = torch.Generator().manual_seed(12_345)
    trade_offs = -torch.rand(4000, SPECIALISTS, generator=g, dtype=torch.float64).log()
    trade_offs = trade_offs / trade_offs.sum(1, keepdim=True)  # Dirichlet(1)
    results = []
    for seed in SEEDS:
        task = AnswerSets(slots, seed)
        policy: TabularTokens = task.policy()
        # the loss is a mean over tokens: times the slots it is a sum over a row's
        train_on(plain_sgd(method, STEP_SIZE * slots), policy, task, steps=STEPS, seed=seed, watch=lambda run, batch: None)
        chance = policy.logits.detach()[0].softmax(-1)
        pool = chance.mean(0)
        results.append(Found(best_at(chance, trade_offs), pool[: COMPROMISE + 1].tolist(), float(-(pool * pool.log()).sum())))
    return Found(
        [fmean(r.best[k] for r in results) for k in range(POOL)], [fmean(r.shares[a] for r in results) for a in range(COMPROMISE + 1)],
        fmean(r.entropy for r in results),
    )  # fmt: skip


def _leads(name: str) -> Evidence:
    mine = _trained(name).best[-1]
    others = {other: round(_trained(other).best[-1], 3) for other in BASELINES}
    return Evidence({"this": round(mine, 3)} | others, "best@8 at least 0.1 above every other", mine >= max(others.values()) + 0.1)


@claim(
    "a search over eight answers finds at least 0.1 more with VPO than with GRPO, Multi-RLVR or sets worth their best mean reward",
    slow=True,
)
def leads() -> Evidence:
    return _leads("VPO")


@ablation(leads, "sets of one answer")
def lone_answers_do_not_lead() -> Evidence:
    return _leads("random weights, one answer")


@ablation(leads, "the worth of a set is the best of its mean rewards")
def max_scalar_does_not_lead() -> Evidence:
    return _leads("max-scalar sets")


def _covers(name: str) -> Evidence:
    found = _trained(name)
    measured = {"specialists": [round(s, 3) for s in found.shares[:SPECIALISTS]], "entropy": round(found.entropy, 3)}
    return Evidence(
        measured,
        "every specialist at least 0.15 of the answers, entropy above 1 nat",
        min(found.shares[:SPECIALISTS]) >= 0.15 and found.entropy > 1,
    )


@claim("the answers of VPO specialize: each of the three specialists is a fair part of them")
def covers() -> Evidence:
    return _covers("VPO")


@ablation(covers, "scalar rewards, one answer: GRPO")
def grpo_does_not_cover() -> Evidence:
    return _covers("scalar GRPO")


def _concentrates(name: str) -> Evidence:
    found = _trained(name)
    measured = {"compromise": round(found.shares[COMPROMISE], 3), "entropy": round(found.entropy, 3)}
    return Evidence(
        measured, "the compromise above 0.97 of the answers, entropy below 0.2", found.shares[COMPROMISE] > 0.97 and found.entropy < 0.2
    )


@claim("one scalar reward concentrates the policy on a single answer, the compromise")
def concentrates() -> Evidence:
    return _concentrates("scalar GRPO")


@ablation(concentrates, "sets and random trade-offs: VPO")
def vpo_does_not() -> Evidence:
    return _concentrates("VPO")


def _grows(name: str) -> Evidence:
    gap = [a - b for a, b in zip(_trained(name).best, _trained("scalar GRPO").best, strict=True)][:SLOTS]
    grows = all(b > a for a, b in zip(gap, gap[1:], strict=False)) and gap[-1] - gap[0] > 0.1
    return Evidence([round(g, 3) for g in gap], "the lead grows with every k up to 4, by more than 0.1", grows)


@claim("the lead over scalar GRPO grows with the number of answers that the search may look at")
def grows() -> Evidence:
    return _grows("VPO")


@ablation(grows, "sets of one answer")
def lone_answers_do_not_grow() -> Evidence:
    return _grows("random weights, one answer")


@ablation(grows, "a set is worth the mean of its answers: Multi-RLVR")
def means_do_not_grow() -> Evidence:
    return _grows("Multi-RLVR")


def _order(name: str) -> Evidence:
    # The mean of 16 draws still strays from equal weights, and with it the best member of the swapped order; that is noise, not its aim, and is
    # reported. The mean of all draws is the equal weights.
    measured = {
        "best@8": round(_trained(name).best[-1], 3),
        "mean of 16 draws first": round(_trained("mean of 16 draws first").best[-1], 3),
    }
    return Evidence(
        measured, "best@8 at least 0.1 above the compromise's 0.5 (all three specialists: 0.689)", _trained(name).best[-1] >= 0.6
    )


@claim("the order matters: first the best member under each trade-off, then the mean over trade-offs")
def order() -> Evidence:
    return _order("VPO")


@ablation(order, "first the mean of all trade-offs, then the best member")
def the_other_order() -> Evidence:
    return _order("max-scalar sets")
