"""Claims of OPPO: exact Bayes factors on trees, and strings of which one hidden position decides (16 prompts, V=4, T=4, 16, 64, groups of 8, SGD 0.5).

The oracle puts 0.94 on the right token at the deciding position; everywhere else it is the policy up to 10% log-normal noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.language.toys.token_bandit import TabularTokens, TokenBandit
from anypo.method import Method
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.methods.language.oppo import METHOD, Opinion, OracleValue, advantages, evidence, values
from anypo.reproductions.common import plain_sgd, steps_to, train_on
from anypo.run import Run

SEEDS = tuple(range(5))
PROMPTS, SYMBOLS, LENGTHS = 16, 4, (4, 16, 64)
SURE, NOISE, STEP = 0.94, 0.1, 0.5
LIMIT = 40.0  # nats, in place of infinite evidence


# -- trees -----------------------------------------------------------------------------------------------------------------------------------


@dataclass
class Enumerated:
    """All strings of one prompt of an autoregressive bandit, and by prefix and next token what a Bayes factor is made of; [S,T] each."""

    value: Tensor  # success probability after the token
    before: Tensor  # and before it
    given_success: Tensor  # log-prob of the token, given the prefix and success
    given_failure: Tensor
    marginal: Tensor
    prior: Tensor  # [S]


def enumerated(seed: int, horizon: int, targets: int) -> Enumerated:
    """By sums over whole strings, without any recursion. A token after which nothing is open, or on a branch of no probability, tells nothing."""
    task = TokenBandit(1, 3, horizon, targets=targets, seed=seed)
    policy = task.policy(autoregressive=True, scale=1.0, seed=seed)
    strings = policy.all_strings()
    chance = policy.string_logp(0, strings).detach().exp()
    right = chance * task.rewards(torch.zeros(len(strings), dtype=torch.int64), strings, torch.ones_like(strings))

    def mass(weight: Tensor, length: int) -> Tensor:
        same = (strings[:, None, :length] == strings[None, :, :length]).all(-1)
        return same.double() @ weight

    total = torch.stack([mass(chance, t) for t in range(horizon + 1)], 1)
    success = torch.stack([mass(right, t) for t in range(horizon + 1)], 1)
    failure = torch.where(total - success > 1e-12, total - success, 0.0)

    def conditional(weight: Tensor) -> Tensor:
        return (weight[:, 1:] / weight[:, :-1]).log().clamp(min=-LIMIT)

    marginal, undecided = conditional(total), (success[:, :-1] > 0) & (failure[:, :-1] > 0)
    right_side, wrong_side = (torch.where(undecided, conditional(side), marginal) for side in (success, failure))
    value = success / total
    return Enumerated(value[:, 1:], value[:, :-1], right_side, wrong_side, marginal, value[:, 0])


def _exact(denominator: str) -> Evidence:
    """The largest distance to enumeration over three trees each of two levels (3 right strings) and five (40)."""
    gaps = {"value": 0.0, "advantage": 0.0}
    for horizon, targets in ((2, 3), (5, 40)):
        for seed in range(3):
            tree = enumerated(seed, horizon, targets)
            below = getattr(tree, denominator)
            inputs = (tree.given_success, below, torch.ones_like(below, dtype=torch.bool), tree.prior)
            found = advantages(*inputs, torch.zeros_like(tree.prior), clip=2 * LIMIT, close=False, anchor=False)
            gaps["value"] = max(gaps["value"], float((values(*inputs, clip=2 * LIMIT) - tree.value).abs().max()))
            gaps["advantage"] = max(gaps["advantage"], float((found - (tree.value - tree.before)).abs().max()))
    return Evidence({name: float(f"{gap:.2g}") for name, gap in gaps.items()}, "both within 1e-6", max(gaps.values()) < 1e-6)


@claim("with exact Bayes factors the running value is the true success probability of every prefix, and its steps are Q - V")
def exact() -> Evidence:
    return _exact("given_failure")


@ablation(exact, "the plain policy in the denominator in place of the failing responses")
def practical_ratio() -> Evidence:
    return _exact("marginal")


# -- one deciding position -------------------------------------------------------------------------------------------------------------------


class Pivotal(TokenBandit):
    """Right when the token at the prompt's hidden position is 0."""

    def __init__(self, horizon: int, seed: int) -> None:
        super().__init__(PROMPTS, SYMBOLS, horizon, seed=seed)
        self.pivot = torch.randint(horizon, (PROMPTS,), generator=torch.Generator().manual_seed(seed))

    def rewards(self, prompt: Tensor, action: Tensor, mask: Tensor) -> Tensor:
        return (action.gather(1, self.pivot[prompt][:, None])[:, 0] == 0).double()

    def expected_success(self, policy: TabularTokens) -> float:
        prompt = torch.arange(PROMPTS)
        return float(policy.logits.detach()[prompt, self.pivot].softmax(-1)[:, 0].mean())


@dataclass
class PivotOracle:
    """Knows what the deciding token is; a blind one does not."""

    blind: bool = False

    def __call__(self, batch: Batch, run: Run) -> Opinion:
        noise = NOISE * torch.randn(batch.logp.shape, generator=run.generator, dtype=torch.float64)
        task: Any = run.task
        decides = (torch.arange(batch.horizon) == task.pivot[batch.context][:, None]) & (not self.blind)
        sure = torch.where(batch.action == 0, math.log(SURE), math.log((1 - SURE) / (SYMBOLS - 1))).double()
        return Opinion(torch.where(decides, sure, batch.logp + noise), batch.logp)


METHODS = {
    "oppo": METHOD.but(credit=OracleValue(oracle=PivotOracle())),
    "blind": METHOD.but(credit=OracleValue(oracle=PivotOracle(blind=True))),
    "grpo": GRPO.but(objective=METHOD.objective, regularize=()),
}


def on_pivot(name: str, horizon: int, seed: int, steps: int) -> list[tuple[float, float]]:
    """By step: the share of |A| at the deciding position, and the exact success."""
    task = Pivotal(horizon, seed)
    policy = task.policy()
    method: Method = plain_sgd(METHODS[name], STEP * PROMPTS * horizon)  # each prompt's mean over its group of the sum over tokens

    def watch(run: Run, batch: Batch) -> tuple[float, float]:
        assert batch.advantage is not None
        size = batch.advantage.abs()
        share = size.gather(1, task.pivot[batch.context][:, None]).sum() / size.sum().clamp(min=1e-12)
        return float(share), task.expected_success(policy)

    return train_on(method, policy, task, steps=steps, seed=seed, watch=watch, stop=lambda seen: seen[1] >= 0.8)


@cache
def first_share(name: str, horizon: int, seeds: Iterable[int] = SEEDS) -> float:
    return fmean(on_pivot(name, horizon, seed, 1)[0][0] for seed in seeds)


@cache
def steps_needed(name: str, horizon: int, seeds: Iterable[int] = SEEDS, most: int = 60) -> float:
    return fmean(steps_to([success for _, success in on_pivot(name, horizon, seed, most)], 0.8) for seed in seeds)


def _share(name: str) -> Evidence:
    found = {f"T={t}": round(first_share(name, t), 3) for t in LENGTHS[1:]}
    holds = all(first_share(name, t) >= 5 / t for t in LENGTHS[1:])
    return Evidence(found | {"grpo": [round(first_share("grpo", t), 3) for t in LENGTHS[1:]]}, "at least 5/T (GRPO: 1/T)", holds)


@claim("at the first step the deciding position has at least five times the share of all credit that GRPO gives it, for 16 and 64 tokens")
def share() -> Evidence:
    return _share("oppo")


@ablation(share, "an oracle that does not know the deciding token")
def share_of_the_blind() -> Evidence:
    return _share("blind")


def _widens(name: str) -> Evidence:
    """Steps to 0.8 success; the same step size, and advantages of root mean square 1 on both sides."""
    gain = {t: steps_needed("grpo", t) / steps_needed(name, t) for t in LENGTHS}
    found = {f"T={t}": f"{steps_needed(name, t):.1f}, grpo {steps_needed('grpo', t):.1f}" for t in LENGTHS}
    holds = gain[4] > 1 and gain[16] > 1.2 * gain[4] and gain[64] > 1.2 * gain[16]
    return Evidence(
        found, "fewer steps than GRPO at every length, and the ratio grows by more than 1.2 from 4 to 16 and from 16 to 64", holds
    )


@claim("OPPO needs fewer steps to 0.8 success than GRPO, and its advantage widens with the length of the response")
def widens() -> Evidence:
    return _widens("oppo")


@ablation(widens, "an oracle that does not know the deciding token")
def widens_for_the_blind() -> Evidence:
    return _widens("blind")


# -- the flags -------------------------------------------------------------------------------------------------------------------------------


def rows() -> dict[str, Tensor]:
    """64 rows of up to 9 random log-probs, priors and outcomes."""
    g = torch.Generator().manual_seed(0)
    oracle, base = -torch.rand(2, 64, 9, generator=g, dtype=torch.float64) * 4
    return {
        "oracle_logp": oracle, "base_logp": base, "mask": torch.arange(9) < torch.randint(1, 10, (64, 1), generator=g),
        "prior": 0.05 + 0.9 * torch.rand(64, generator=g, dtype=torch.float64), "reward": torch.randint(2, (64,), generator=g).double(),
    }  # fmt: skip


def _flags(close: bool, anchor: bool, state_weight: bool) -> Evidence:
    given = rows()
    inputs = {name: given[name] for name in ("oracle_logp", "base_logp", "mask")}
    total = advantages(**given, close=close, anchor=False).sum(1)
    wrong_sign = advantages(**given, anchor=anchor) * (2 * given["reward"] - 1)[:, None] < 0
    plain = advantages(**given, close=False, anchor=False, state_weight=state_weight)
    found = {
        "sum minus (r - V_0)": float((total - (given["reward"] - given["prior"])).abs().max()),
        "entries against the outcome": int(wrong_sign.sum()),
        "distance from the distillation reward": float((plain - evidence(**inputs)).abs().max()),
    }
    holds = found["sum minus (r - V_0)"] < 1e-9 and not wrong_sign.any() and found["distance from the distillation reward"] < 1e-9
    return Evidence({name: float(f"{value:.2g}") for name, value in found.items()}, "all three 0", holds)


@claim(
    "closing makes a row's credit add up to outcome minus prior, anchoring leaves no entry against the outcome, no state weight is distillation"
)
def flags() -> Evidence:
    return _flags(close=True, anchor=True, state_weight=False)


@ablation(flags, "not closed")
def not_closed() -> Evidence:
    return _flags(close=False, anchor=True, state_weight=False)


@ablation(flags, "not anchored")
def not_anchored() -> Evidence:
    return _flags(close=True, anchor=False, state_weight=False)


@ablation(flags, "with the state weight")
def with_state_weight() -> Evidence:
    return _flags(close=True, anchor=True, state_weight=True)
