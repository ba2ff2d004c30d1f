"""Claims of TP-Schedule on a task in two phases: 16 prompts, ten tokens over four symbols, reward 1 when the second token is the right plan and the
last one the right answer. Groups of 8, 300 steps of SGD 5 a prompt on the mean over kept tokens. Entropies, KL and success are exact."""

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
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.methods.language.temporal_credit import METHOD as TEMPORAL
from anypo.methods.language.temporal_credit import ScheduledCredit, keep_forking, keep_percentile, magnitude
from anypo.reproductions.common import plain_sgd, train_on
from anypo.run import Run

SEEDS, STEPS, PROMPTS, SYMBOLS, HORIZON, PLAN, ANSWER = (0, 1, 2), 300, 16, 4, 10, 1, 9


class TwoPhases(TokenBandit):
    """A right plan early and a right answer late; the other tokens are free."""

    def __init__(self, seed: int) -> None:
        super().__init__(PROMPTS, SYMBOLS, HORIZON, seed=seed)

    def rewards(self, prompt: Tensor, action: Tensor, mask: Tensor) -> Tensor:
        right = action == self.targets[prompt, 0]
        return (right[:, PLAN] & right[:, ANSWER]).double()


@dataclass
class BeginningFirst(ScheduledCredit):
    """An ablation: the schedule reversed; the window begins at the first tokens and grows forwards (rows of full length)."""

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        advantage = super().__call__(batch, run)
        assert batch.keep is not None
        batch.keep = batch.keep.flip(1)
        return advantage


class Moment(NamedTuple):
    """The policy after a step, means over prompts."""

    early_entropy: float  # nats, mean over the first five positions
    success: float
    kl_place: float  # mean position (0 to 9), weighted by the position's KL to the initial policy


def _look(policy: TabularTokens, start: Tensor, targets: Tensor) -> Moment:
    logp = policy.logits.detach().log_softmax(-1)
    chance = logp.exp()
    entropy, kl = -(chance * logp).sum(-1).mean(0), (chance * (logp - start)).sum(-1).mean(0)
    right = chance.gather(2, targets[..., None])[..., 0]
    place = (kl * torch.arange(HORIZON)).sum() / kl.sum()
    return Moment(float(entropy[: HORIZON // 2].mean()), float((right[:, PLAN] * right[:, ANSWER]).mean()), float(place))


CREDITS: dict[str, Any] = {
    "scheduled": TEMPORAL.credit,
    "grpo": GRPO.credit,
    "static": ScheduledCredit(initial=0.5, r_min=1.0, r_max=2.0),
    "reversed": BeginningFirst(),
    "static beginning": BeginningFirst(initial=0.5, r_min=1.0, r_max=2.0),
}


@cache
def _trained(name: str) -> list[Moment]:
    """Every step of a run, mean over seeds."""
    method = plain_sgd(TEMPORAL.but(credit=CREDITS[name], regularize=()), 5.0 * PROMPTS)
    runs = []
    for seed in SEEDS:
        task = TwoPhases(seed)
        policy = task.policy()
        start, targets = policy.logits.detach().log_softmax(-1), task.targets[:, 0]

        def watch(run: Run, batch: Batch, policy: TabularTokens = policy, start: Tensor = start, targets: Tensor = targets) -> Moment:
            return _look(policy, start, targets)

        runs.append(train_on(method, policy, task, steps=STEPS, seed=seed, watch=watch))
    return [Moment(*(fmean(values) for values in zip(*step, strict=True))) for step in zip(*runs, strict=True)]


def _window(forking: bool) -> Evidence:
    """200 rows with holes in the mask, at 101 steps of a run."""
    g = torch.Generator().manual_seed(0)
    mask = torch.rand(200, 30, generator=g) < torch.rand(200, 1, generator=g)
    entropy = torch.rand(200, 30, generator=g)
    shares, suffix = [], True
    for m in magnitude(torch.arange(101), 100).tolist():
        kept = keep_forking(mask, entropy, m) if forking else keep_percentile(mask, m)
        shares.append(float(kept.sum() / mask.sum()))
        after = kept.long().cummax(1).values.bool()  # from the first kept token on
        suffix = suffix and torch.equal(after & mask, kept)
    grows = all(b >= a for a, b in zip(shares, shares[1:], strict=False))
    return Evidence(
        {"share at 0, 40, 70, 80 of 100 steps": [round(shares[i], 3) for i in (0, 40, 70, 80)], "a suffix": suffix, "never shrinks": grows},
        "a suffix that never shrinks, below 0.15 at the start, not yet whole at step 70, whole from step 80 on",
        suffix and grows and shares[0] < 0.15 and shares[70] < 1 and set(shares[80:]) == {1.0},
    )


@claim("the trained tokens are the end of each response, which grows from a token to the whole response at 80% of the run")
def window() -> Evidence:
    return _window(forking=False)


@ablation(window, "tokens chosen by entropy")
def scattered() -> Evidence:
    return _window(forking=True)


def _keeps_entropy(name: str) -> Evidence:
    mine, grpo = _trained(name), _trained("grpo")
    middle = STEPS // 2
    lead = min(a.early_entropy - b.early_entropy for a, b in zip(mine[9:middle], grpo[9:middle], strict=True))
    gap = mine[middle - 1].early_entropy - grpo[middle - 1].early_entropy
    measured = {
        "entropy half way": [round(c[middle - 1].early_entropy, 3) for c in (mine, grpo)],
        "success": [round(c[-1].success, 3) for c in (mine, grpo)],
    }
    holds = lead > 0 and gap > 0.15 and mine[-1].success >= grpo[-1].success - 0.02
    return Evidence(measured, "above GRPO from step 10 to the middle, by 0.15 nats there; success at least GRPO's - 0.02", holds)


@claim("the first half of the response stays more uncertain than under GRPO until the middle of training, at no cost in final success")
def keeps_entropy() -> Evidence:
    return _keeps_entropy("scheduled")


@ablation(keeps_entropy, "no schedule: GRPO")
def grpo_keeps_less() -> Evidence:
    return _keeps_entropy("grpo")


@ablation(keeps_entropy, "the schedule reversed: the beginning first")
def reversed_keeps_less() -> Evidence:
    return _keeps_entropy("reversed")


@ablation(keeps_entropy, "a window that never grows: uncertain, but no success")
def static_keeps_it_in_vain() -> Evidence:
    return _keeps_entropy("static")


def _fails(name: str) -> Evidence:
    success = _trained(name)[-1].success
    return Evidence(round(success, 3), "final success below 0.5", success < 0.5)


@claim("the window must grow: training the last half of the response alone never learns the plan")
def static_fails() -> Evidence:
    return _fails("static")


@ablation(static_fails, "the window grows")
def growing_succeeds() -> Evidence:
    return _fails("scheduled")


def _as_good(name: str) -> Evidence:
    mine, other = _trained("scheduled")[-1].success, _trained(name)[-1].success
    return Evidence({"end first": round(mine, 3), "this": round(other, 3)}, "less than 0.02 apart", abs(mine - other) < 0.02)


@claim("which end comes first hardly matters for final success: the reversed schedule ends less than 0.02 away")
def reversed_is_as_good() -> Evidence:
    return _as_good("reversed")


@ablation(reversed_is_as_good, "the beginning alone, in a window that never grows")
def beginning_alone_is_not() -> Evidence:
    return _as_good("static beginning")


def _moves(name: str) -> Evidence:
    curve = _trained(name)
    early, end = curve[STEPS // 5 - 1].kl_place, curve[-1].kl_place
    return Evidence({"at a fifth": round(early, 2), "at the end": round(end, 2)}, "from above 7.5 to below 6.5", early > 7.5 and end < 6.5)


@claim("the KL to the initial policy moves from late to early positions over training")
def kl_moves_forward() -> Evidence:
    return _moves("scheduled")


@ablation(kl_moves_forward, "no schedule: GRPO")
def kl_stays_in_the_middle() -> Evidence:
    return _moves("grpo")


@ablation(kl_moves_forward, "a window that never grows")
def kl_stays_late() -> Evidence:
    return _moves("static")
