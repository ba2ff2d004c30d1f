"""Claims of PBPO: noise of block ratios in samples, clipping by hand, and learning on split_sum with the built-in masked model.

Blocks of two tokens, one pass a block, so that the accuracy of sampled decoding is a finite sum over right answers and is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.masked.models import load_policy
from anypo.domains.masked.policy import MaskedPolicy
from anypo.domains.masked.tasks import SplitSum, exact_accuracy, make_split_sum
from anypo.method import Method
from anypo.methods.masked.pbpo import METHOD as PBPO
from anypo.methods.masked.pbpo import FreshViews, block_objective, block_ratio, token_objective, variance
from anypo.reproductions.common import ShuffledCredit, train_on
from anypo.run import Run

BLOCK = 2
EARLY, STEPS = 10, 40
SEEDS = (0, 1, 2)
DRAWS = 1_000_000
SPREAD = 0.05  # variance of a token ratio
Weights = Callable[[Tensor, int], Tensor]  # log-ratios [n,W] -> weights [n,W]


def _product(log_ratio: Tensor, width: int) -> Tensor:
    one_block = torch.zeros(log_ratio.shape, dtype=torch.int64)
    return block_ratio(log_ratio, torch.zeros_like(log_ratio), torch.ones_like(one_block, dtype=torch.bool), one_block)


def _moments(weights: Weights, width: int) -> tuple[float, float]:
    """Sample variance of a weight, and of the sum over the block of weight times an independent standard normal score."""
    generator = torch.Generator().manual_seed(width)
    sigma = math.sqrt(math.log(1 + SPREAD))
    noise = torch.randn(2, DRAWS, width, generator=generator)
    weight = weights(sigma * noise[0] - sigma**2 / 2, width)
    return float(weight[:, 0].double().var()), float((weight * noise[1]).sum(1).double().var())


def _growth(weights: Weights) -> Evidence:
    found = {width: _moments(weights, width) for width in (1, 2, 4, 8)}
    wanted = {width: variance(SPREAD, width) for width in found}
    off = max(
        max(abs(found[w][0] / wanted[w].block - 1), abs(found[w][1] / wanted[w].score_sum_block - 1)) for w in found
    )  # fmt: skip
    single = [_moments(lambda log_ratio, width: log_ratio.exp(), w) for w in found]
    flat = max(abs(v / SPREAD - 1) for v, _ in single)
    measured = {f"W={w}": round(v, 4) for w, (v, _) in found.items()} | {"worst error": round(off, 3), "token-local, error": round(flat, 3)}
    return Evidence(
        measured, "within 10% of (1 + t2)^W - 1 and W (1 + t2)^W; token-local within 10% of t2 at every W", off < 0.1 and flat < 0.1
    )


@claim(
    "the variance of a block's product ratio, and of the gradient weighted by it, grows geometrically with the block's width; a token's stays"
)
def noise_grows() -> Evidence:
    return _growth(_product)


@ablation(noise_grows, "every token is weighted by its own ratio")
def noise_of_tokens() -> Evidence:
    return _growth(lambda log_ratio, width: log_ratio.exp())


def _silenced(objective: Callable[..., Tensor]) -> Evidence:
    """Tokens without gradient when one of eight in a block has a ratio of 3, the others 1, and the advantage is positive."""
    old = torch.full((1, 8), -1.5, dtype=torch.float64)
    logp = old.clone()
    logp[0, 3] += math.log(3.0)
    logp.requires_grad_(True)
    ones = torch.ones(1, 8, dtype=torch.bool)
    loss = objective(logp, old, ones, torch.zeros(1, 8, dtype=torch.int64), torch.ones(1, dtype=torch.float64), 0.2)
    (slope,) = torch.autograd.grad(loss, logp)
    silent = int((slope == 0).sum())
    return Evidence(silent, "1 of 8", silent == 1)


@claim("one outlying token ratio silences that token alone, not the block of eight that it stands in")
def outlier() -> Evidence:
    return _silenced(token_objective)


@ablation(outlier, "the block is clipped by the product of its ratios")
def outlier_in_product() -> Evidence:
    return _silenced(block_objective)


def _later_tokens(visible: bool) -> Evidence:
    """Largest change of the first block's log-probs when the tokens of the second one are replaced."""
    policy, generator = load_policy(), torch.Generator().manual_seed(0)
    prompts = [policy.encode(p.content) for p in SplitSum().trained[:64]]
    action = torch.randint(10, (64, 4), generator=generator)
    other = torch.cat([action[:, :BLOCK], (action[:, BLOCK:] + 1 + torch.randint(9, (64, 2), generator=generator)) % 10], dim=1)
    first, second = (_first_block(policy, prompts, tokens, visible) for tokens in (action, other))
    change = float((first - second).abs().max())
    return Evidence(change, "exactly 0", change == 0.0)


@torch.no_grad()
def _first_block(policy: MaskedPolicy, prompts: list[Tensor], action: Tensor, visible: bool) -> Tensor:
    if not visible:
        mask = torch.ones_like(action, dtype=torch.bool)
        segment = (torch.arange(4) // BLOCK).expand(action.shape)
        batch = Batch(action=action, mask=mask, logp=torch.zeros(mask.shape), group=torch.arange(64), context=prompts, segment=segment)
        return policy.evaluate(batch, {"logp"}).logp[:, :BLOCK]
    masked = torch.where(torch.arange(4) < BLOCK, policy.mask_id, action)
    ids = torch.cat([torch.stack(prompts), masked], dim=1)
    which, place = torch.arange(64).repeat_interleave(BLOCK), torch.arange(3, 3 + BLOCK).repeat(64)
    log_probs = policy.read(ids, which, place, torch.ones(len(which))).log_softmax(-1)
    return log_probs.gather(1, action[:, :BLOCK].reshape(-1, 1)).view(64, BLOCK)


@claim("the log-probs of a block do not depend on the tokens of later blocks")
def blind_to_later_blocks() -> Evidence:
    return _later_tokens(visible=False)


@ablation(blind_to_later_blocks, "the state shows the tokens after the block")
def later_blocks_shown() -> Evidence:
    return _later_tokens(visible=True)


@dataclass
class CleanOld(FreshViews):
    """The pitfall: masked views for the new log-probs, the clean states' log-probs as the old ones."""

    def view(self, batch: Batch, run: Run) -> Batch:
        return super().view(batch, run).but(logp=batch.logp)


def _ratios(update: FreshViews) -> Evidence:
    """Token ratios of an untrained policy to itself, over four views of a batch."""
    policy, task = load_policy(), make_split_sum(block=BLOCK)
    run = Run(PBPO.but(update=update), policy, task, steps=1)
    batch = run.collect(PBPO.select(task, run))
    ratios = torch.stack([(run.score(view, {"logp"}).logp - view.logp).exp() for view in (update.view(batch, run) for _ in range(4))])
    outside = float(((ratios - 1).abs() > 0.2).double().mean())
    measured = {"largest distance from 1": round(float((ratios - 1).abs().max()), 4), "outside the clip": round(outside, 3)}
    return Evidence(measured, "every ratio exactly 1 in every view", bool((ratios == 1).all()))


@claim("before the first step every token ratio is 1 in every view, so that a view alone clips nothing")
def same_view() -> Evidence:
    return _ratios(PBPO.update)


@ablation(same_view, "old log-probs of the clean states")
def mixed_states() -> Evidence:
    return _ratios(CleanOld())


class Curve(NamedTuple):
    early: float  # exact accuracy over all prompts after EARLY steps
    late: float  # exact accuracy over the held-out prompts, mean of every fourth step in the second half of STEPS


def _train(method: Method, seed: int, steps: int = STEPS) -> Curve:
    """A run of 16 prompts with 8 answers each a step, from the built-in model."""
    policy, task, kept = load_policy(), make_split_sum(block=BLOCK), SplitSum().kept
    early, late = 0.0, [0.0]

    def watch(run: Run, batch: Batch) -> None:
        nonlocal early
        if run.step == EARLY:
            early = exact_accuracy(policy, BLOCK)
        if run.step > STEPS // 2 and run.step % 4 == 0:
            late.append(exact_accuracy(policy, BLOCK, kept))

    train_on(method, policy, task, steps=steps, seed=seed, watch=watch)
    return Curve(early, fmean(late[1:] or late))


@cache
def _start() -> float:
    return exact_accuracy(load_policy(), BLOCK)


@cache
def _with_views(seed: int) -> Curve:
    return _train(PBPO, seed)


@cache
def _clean(seed: int) -> Curve:
    return _train(PBPO.set("update.mask_prompt", 0.0).set("update.mask_prefix", 0.0), seed)


def _learns(after: list[float]) -> Evidence:
    gain = min(after) - _start()
    measured = {"before": round(_start(), 3), "after": [round(a, 3) for a in after]}
    return Evidence(
        measured, "before within 0.2 and 0.5, and at least 0.15 more, worst of 3 seeds", 0.2 <= _start() <= 0.5 and gain >= 0.15
    )


@claim("ten steps of RL raise the accuracy of sampled block decoding by at least 0.15", slow=True)
def learns() -> Evidence:
    return _learns([_with_views(seed).early for seed in SEEDS])


@ablation(learns, "advantages dealt to the wrong rows")
def learns_without_credit() -> Evidence:
    return _learns([_train(PBPO.but(credit=ShuffledCredit(PBPO.credit)), seed, EARLY).early for seed in SEEDS])


@claim("with four epochs a batch, masked views cost no held-out accuracy against clean ones", slow=True)
def views_cost_nothing() -> Evidence:
    # A comparison, not a mechanism: views that mask everything, or old log-probs of the clean states, do no worse on a problem this small.
    masked, clean = ([run(seed).late for seed in SEEDS] for run in (_with_views, _clean))
    good = sum(m >= c for m, c in zip(masked, clean, strict=True))
    measured = {"views": [round(m, 3) for m in masked], "without masking": [round(c, 3) for c in clean]}
    return Evidence(measured, "at least as accurate on 2 of 3 seeds", good >= 2)
