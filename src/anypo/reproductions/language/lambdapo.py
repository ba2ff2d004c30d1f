"""Claims of LambdaPO: five-level rewards, saturation, the bandit of lampo.py, and written sums with and without the density reward."""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import fmean

import torch

from anypo.claims import Evidence, ablation, claim
from anypo.domains.language.toys.toy_arith import make_toy_arith
from anypo.methods.language import grpo
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.methods.language.lambdapo import METHOD as LAMBDAPO
from anypo.methods.language.lambdapo import advantages
from anypo.reproductions.common import steps_to, train_on
from anypo.reproductions.language.lampo import SEEDS, OtherReference, agreement_evidence, all_wrong_groups, curves

GROUPS, SIZE, LEVELS = 500, 8, 5


def _order(tau: float) -> Evidence:
    """500 groups of 8 with rewards 0, 1/4, ..., 1 and mean log-probs of standard deviation 1 that have nothing to do with them."""
    generator, count = torch.Generator().manual_seed(0), GROUPS * SIZE
    reward = torch.randint(LEVELS, (count,), generator=generator).double() / (LEVELS - 1)
    group, mask = torch.arange(GROUPS).repeat_interleave(SIZE), torch.ones(count, 1)
    score = torch.randn(count, 1, generator=generator, dtype=torch.float64)
    by_group = reward.view(GROUPS, SIZE)
    better = by_group[:, :, None] > by_group[:, None]
    found = {}
    for name, scores in (("random scores", score), ("equal scores", torch.zeros_like(score))):
        advantage = advantages(reward, group, scores, mask, tau).view(GROUPS, SIZE)
        found[name] = float((advantage[:, :, None] > advantage[:, None])[better].double().mean())
    rounded = {name: round(share, 4) for name, share in found.items()}
    return Evidence(
        rounded, "over 94% of unequal pairs in order, all with equal scores", found["random scores"] > 0.94 and found["equal scores"] == 1
    )


@claim("with rewards of five levels the advantages keep the rewards' order but for extreme attenuation, and exactly when scores are equal")
def keeps_order() -> Evidence:
    return _order(1.0)


@ablation(keeps_order, "extreme attenuation, all or nothing (tau 0.05)")
def order_under_extreme_attenuation() -> Evidence:
    return _order(0.05)


def _pair(tau: float) -> Evidence:
    """Neighbouring levels of a five-level group; the two in the middle have mean log-probs -0.5 and -1.5, the others -1."""
    reward, group, mask = torch.arange(5, dtype=torch.float64) / 4, torch.zeros(5, dtype=torch.int64), torch.ones(5, 1)
    gaps = {}
    for name, low, high in (("rightly ordered", -1.5, -0.5), ("wrongly ordered", -0.5, -1.5)):
        score = torch.full((5, 1), -1.0, dtype=torch.float64)
        score[2], score[3] = low, high
        found = advantages(reward, group, score, mask, tau)
        gaps[name] = round(float(found[3] - found[2]), 4)
    return Evidence(gaps, "more than 1.5 times larger when wrongly ordered", gaps["wrongly ordered"] > 1.5 * gaps["rightly ordered"] > 0)


@claim("the advantage gap between two reward levels is larger when the policy prefers the worse response than when it prefers the better")
def wrong_order_counts_more() -> Evidence:
    return _pair(1.0)


@ablation(wrong_order_counts_more, "attenuation off (tau infinite)")
def pair_without_attenuation() -> Evidence:
    return _pair(math.inf)


def _confident(tau: float) -> Evidence:
    """Four right and four wrong answers among 20 tokens: mean |A| as the policy's probability of the right one grows, over that of GRPO."""
    reward, group = torch.tensor([1.0] * 4 + [0.0] * 4, dtype=torch.float64), torch.zeros(8, dtype=torch.int64)
    found = {}
    for chance in (0.05, 0.5, 0.9, 0.99):
        score = torch.where(reward > 0, math.log(chance), math.log((1 - chance) / 19))[:, None]
        found[chance] = float(advantages(reward, group, score, torch.ones(8, 1), tau).abs().mean())
    its = float(grpo.advantages(reward, group).abs().mean())
    falling = list(found.values())
    holds = falling == sorted(falling, reverse=True) and falling[-1] < 0.01 * falling[0] and its > 0.9
    numbers = {f"p={chance:g}": round(value, 4) for chance, value in found.items()}
    return Evidence(numbers | {"grpo at every p": round(its, 4)}, "falls below 1% of its first value, GRPO's stays above 0.9", holds)


@claim("as the policy becomes confident of the right order the group's advantages vanish, while GRPO's stay of order one")
def vanishes() -> Evidence:
    return _confident(1.0)


@ablation(vanishes, "attenuation off (tau infinite)")
def confident_without_attenuation() -> Evidence:
    return _confident(math.inf)


@lru_cache
def _success(scale: str | None) -> list[list[float]]:
    return curves(LAMBDAPO.but(regularize=()).set("credit.scale", scale), 200).success


@lru_cache
def _success_of_grpo() -> list[list[float]]:
    return curves(GRPO.but(regularize=()), 200).success


def _speed(scale: str | None) -> Evidence:
    mine, its = ([steps_to(curve, 0.9) for curve in success] for success in (_success(scale), _success_of_grpo()))
    end = round(fmean(curve[-1] for curve in _success(scale)), 3)
    found = {"steps to 0.9": mine, "grpo, steps to 0.9": its, "success after 200 steps": end}
    return Evidence(
        {k: str(v) for k, v in found.items()}, "at most 200 steps on every seed; GRPO in fewer", max(mine) <= 200 and max(its) < min(mine)
    )


@claim("scaled by the group's largest advantage it reaches 0.9 on the bandit within 200 steps, still after GRPO", slow=True)
def scaled_speed() -> Evidence:
    return _speed("group")


@ablation(scaled_speed, "the plain sum, which saturates")
def plain_speed() -> Evidence:
    return _speed(None)


@claim("in all-wrong groups the density reward gives non-zero advantages, ordered by how well the trace covers the solution", slow=True)
def all_wrong() -> Evidence:
    return agreement_evidence(all_wrong_groups(LAMBDAPO, LAMBDAPO))


@ablation(all_wrong, "outcome alone (eta 0)")
def all_wrong_without_density() -> Evidence:
    return agreement_evidence(all_wrong_groups(LAMBDAPO.set("reward.eta", 0.0), LAMBDAPO))


@ablation(all_wrong, "the solutions of other problems as references")
def all_wrong_with_other_references() -> Evidence:
    return agreement_evidence(all_wrong_groups(LAMBDAPO.but(reward=OtherReference(LAMBDAPO.reward)), LAMBDAPO))


STEPS = 50
# At the default eta (0.2) the effect is not larger than the spread between seeds and other problems' references do as well, hence 1.
DENSE = LAMBDAPO.set("reward.eta", 1.0)
ARITH = {"density": DENSE, "none": LAMBDAPO.set("reward.eta", 0.0), "other": DENSE.but(reward=OtherReference(DENSE.reward))}


@lru_cache
def _arith_success(name: str) -> float:
    """Expected success of written sums 50 steps after a warm start at 0.3, mean of 3 seeds."""
    found = []
    for seed in SEEDS:
        policy, task = make_toy_arith(steps=True, seed=seed)
        train_on(ARITH[name], policy, task, steps=STEPS, seed=seed, watch=lambda run, batch: None)
        found.append(task.expected_success(policy))
    return fmean(found)


def _further(name: str) -> Evidence:
    mine, without = _arith_success(name), _arith_success("none")
    found = {"success": round(mine, 3), "success, outcome alone": round(without, 3)}
    return Evidence(found, "more than 0.015 above the outcome alone", mine > without + 0.015)


@claim("with a density reward as large as the outcome's, written sums are learned further in 50 steps than on the outcome alone", slow=True)
def learns_further() -> Evidence:
    return _further("density")


@ablation(learns_further, "the solutions of other problems as references")
def with_other_references() -> Evidence:
    return _further("other")
