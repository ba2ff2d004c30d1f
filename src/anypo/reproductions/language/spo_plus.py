"""Claims of SPO++: token centring, the first step and the mean success on a bandit whose failures are four times as long, and the order of arrival.

The bandit: 64 prompts, 6 symbols; the first token decides (0 is right, probability 0.35 at the start), a right string ends after 4 tokens and a wrong
one after 16. One string a prompt and step, 8 offline samples a prompt as in SPO, a token-mean loss, SGD with a step of 0.5 a prompt.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from statistics import fmean

import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.language.toys.token_bandit import TabularTokens, TokenBandit
from anypo.method import Method
from anypo.methods.language.spo_plus import METHOD as SPO_PLUS
from anypo.methods.language.spo_plus import advantages, event_value, spo_residual
from anypo.methods.language.spo_single import METHOD as SPO
from anypo.methods.language.spo_single import PrioritizedPrompts, update
from anypo.reproductions.common import plain_sgd, train_on
from anypo.run import Run
from anypo.seams.groups import broadcast

SEEDS = range(5)
PROMPTS, SYMBOLS, SHORT, LONG = 64, 6, 4, 16
STEPS, STEP = 200, 0.5 * PROMPTS
METHODS = {"spo++": SPO_PLUS, "by trajectory": SPO_PLUS.set("credit.measure", "trajectory"), "spo": SPO}


class LongFailures(TokenBandit):
    """Strings whose first token decides: 0 ends well after 4 tokens, anything else badly after 16."""

    def __init__(self, seed: int) -> None:
        super().__init__(PROMPTS, SYMBOLS, LONG, seed=seed, reward=lambda prompt, action, mask: (action[:, 0] == 0).double())

    def mask(self, action: Tensor) -> Tensor:
        return torch.arange(LONG) < torch.where(action[:, 0] == 0, SHORT, LONG)[:, None]

    def policy(self, **options: object) -> TabularTokens:
        policy = super().policy(**options)
        with torch.no_grad():
            policy.logits[:, 0, 0] = math.log((SYMBOLS - 1) * 0.35 / 0.65)
        return policy

    def expected_success(self, policy: TabularTokens) -> float:
        return float(policy.logits.detach()[:, 0].softmax(-1)[:, 0].mean())


@cache
def _trained(name: str, seed: int) -> tuple[float, float, list[float]]:
    """Of the first step the token mean of the advantages and the change of the sampled tokens' summed log-prob; the success after every step."""
    method: Method = METHODS[name].but(select=PrioritizedPrompts(candidates=1))
    task, first = LongFailures(seed), dict[str, float]()
    policy = task.policy()

    def look(run: Run, batch: Batch) -> float:
        assert batch.advantage is not None
        if not first:
            first["token mean"] = float(batch.advantage[batch.mask].mean())
            first["change"] = float((run.score(batch, {"logp"}).logp - batch.logp).sum())
        return task.expected_success(policy)

    curve = train_on(plain_sgd(method, STEP), policy, task, steps=STEPS, seed=seed, watch=look)
    return first["token mean"], first["change"], curve


def _centred(standardize: Callable[..., Tensor]) -> Evidence:
    """The largest |sum of the advantages over all action tokens| of 200 batches of 32 rows of 1 to 64 tokens, holes included."""
    generator, sums = torch.Generator().manual_seed(0), []
    for _ in range(200):
        value = torch.rand(32, generator=generator, dtype=torch.float64)
        reward = torch.bernoulli(value, generator=generator)
        length = torch.randint(1, 65, (32, 1), generator=generator)
        mask = (torch.arange(64) < length) & (torch.rand(32, 64, generator=generator) < 0.8)
        sums.append(abs(float(broadcast(standardize(reward, value, mask), mask).sum())))
    return Evidence({"largest": max(sums), "smallest": min(sums)}, "below 1e-6", max(sums) < 1e-6)


@claim("the advantages of all action tokens sum to 0 whatever the lengths")
def centred() -> Evidence:
    return _centred(lambda reward, value, mask: advantages(reward, value, mask).advantages)


@ablation(centred, "SPO's whitening over trajectories")
def trajectories_are_not() -> Evidence:
    return _centred(lambda reward, value, mask: spo_residual(reward, value, mask).advantages)


def _no_push(name: str) -> Evidence:
    """SPO's push against that of the named method."""
    found = {who: [_trained(who, seed)[:2] for seed in SEEDS] for who in ("spo", name)}
    mine, theirs = found[name], found["spo"]
    holds = (
        max(mean for mean, _ in theirs) < -0.3
        and max(abs(mean) for mean, _ in mine) < 1e-6
        and all(change < 0 and -change >= 5 * abs(own) for (_, own), (_, change) in zip(mine, theirs, strict=True))
    )
    shown = {
        who: {"token mean": [round(m, 3) + 0.0 for m, _ in rows], "change of log-prob": [round(c, 2) for _, c in rows]}
        for who, rows in found.items()
    }
    return Evidence(
        shown, "SPO's token mean below -0.3, this one's 0 within 1e-6, and a fall at least 5 times as small, in every seed", holds
    )


@claim(
    "where failures are four times as long, SPO's first step pushes down what it sampled as a whole; under the token measure it does not",
    slow=True,
)
def no_push() -> Evidence:
    return _no_push("spo++")


@ablation(no_push, "event-ordered evidence, but whitened over trajectories")
def push_by_trajectory() -> Evidence:
    return _no_push("by trajectory")


def _arrival(judge: Callable[[Tensor, Tensor], Tensor]) -> Evidence:
    """The largest change of a value when the same 60 results of 8 versions of one prompt arrive in 20 other orders."""
    generator = torch.Generator().manual_seed(0)
    version = torch.randint(8, (60,), generator=generator)
    reward = torch.bernoulli(0.1 + version.double() / 10, generator=generator)
    plain, changes = judge(version, reward), []
    for _ in range(20):
        order = torch.randperm(60, generator=generator)
        changes.append(float((judge(version[order], reward[order]) - plain).abs().max()))
    return Evidence({"largest change": max(changes), "smallest": min(changes)}, "below 1e-9", max(changes) < 1e-9)


def _in_order_of_receipt(version: Tensor, reward: Tensor) -> Tensor:
    """SPO's tracker: every arrival forgets and counts."""
    alpha = beta = value = torch.tensor([0.5], dtype=torch.float64)
    for gain in reward:
        alpha, beta, value = update(gain[None], alpha, beta, torch.tensor([0.9], dtype=torch.float64))
    return value


@claim("the order in which results arrive changes no prompt's value for any version of the policy")
def arrival() -> Evidence:
    return _arrival(lambda version, reward: event_value(version, reward, torch.arange(9)).value)


@ablation(arrival, "SPO's tracker, in order of receipt")
def receipt() -> Evidence:
    return _arrival(_in_order_of_receipt)


def _learns_better(name: str) -> Evidence:
    """Success over the whole training; at its end, near 1, it is SPO that is ahead."""
    mean = {who: [fmean(_trained(who, seed)[2]) for seed in SEEDS] for who in ("spo", name)}
    last = {who: round(fmean(_trained(who, seed)[2][-1] for seed in SEEDS), 4) for who in ("spo", name)}
    gain = [a - b for a, b in zip(mean[name], mean["spo"], strict=True)]
    found = {
        "mean success": {who: round(fmean(values), 4) for who, values in mean.items()},
        "gain by seed": [round(g, 4) for g in gain],
        "at the end": last,
    }
    return Evidence(found, "mean success over training at least 0.005 above SPO's in every seed", min(gain) > 0.005)


@claim("on the same bandit the mean success over 200 steps is above SPO's", slow=True)
def learns_better() -> Evidence:
    return _learns_better("spo++")


@ablation(learns_better, "event-ordered evidence, but whitened over trajectories")
def learns_no_better_by_trajectory() -> Evidence:
    return _learns_better("by trajectory")
