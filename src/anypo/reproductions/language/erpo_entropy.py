"""Claims of ERPO on token_bandit with one fork (16 prompts, V=4, T=6): the other tokens are all but certain and only that of position 2 decides.

Success and entropy at the fork are exact. Two windows of progress (B=2) and weights in full (lambda 1), as one window a token would cancel the gate.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.language.toys.token_bandit import TabularTokens, TokenBandit
from anypo.methods.language.erpo_entropy import METHOD as ERPO
from anypo.methods.language.erpo_entropy import PivotShaping, advantages
from anypo.reproductions.common import BANDIT_STEP, plain_sgd, steps_to, train_on
from anypo.run import Run

SEEDS = (0, 1, 2, 3, 4)
LENGTH, FORK = 6, 2
STEPS = 40
STEP_SIZE = 0.5 * LENGTH * BANDIT_STEP  # SGD; the loss is a mean over 16 prompts and 6 tokens, so this is 0.5 for each token


class Rows(NamedTuple):
    """Responses of random lengths."""

    reward: Tensor  # [N] of 0 and 1
    group: Tensor  # [N]
    entropy: Tensor  # [N,T]
    mask: Tensor  # [N,T]


def _rows(seed: int, prompts: int = 12, size: int = 8, horizon: int = 40) -> Rows:
    g = torch.Generator().manual_seed(seed)
    count = prompts * size
    length = torch.randint(8, horizon + 1, (count, 1), generator=g)
    reward = torch.bernoulli(torch.full((count,), 0.5, dtype=torch.float64), generator=g)
    entropy = -torch.rand(count, horizon, generator=g, dtype=torch.float64).log()
    return Rows(reward, torch.arange(prompts).repeat_interleave(size), entropy, torch.arange(horizon) < length)


def _cell_means(weight: Tensor, rows: Rows, buckets: int = 8) -> Tensor:
    """Mean of the weights in every cell, the cells found without the method's own functions."""
    length = rows.mask.sum(1, keepdim=True)
    bucket = (torch.arange(rows.mask.shape[1]) * buckets / length).floor()
    cells = [(rows.group[:, None] == p) & (bucket == b) & rows.mask for p in rows.group.unique() for b in range(buckets)]
    return torch.stack([weight[cell].mean() for cell in cells if cell.any()])


def _cells(by_row: bool) -> Evidence:
    off, flipped = 0.0, 0
    for seed in SEEDS:
        rows = _rows(seed)
        found = advantages(*rows)
        weight = found.weight
        if by_row:
            weight = weight / weight.sum(1, keepdim=True) * rows.mask.sum(1, keepdim=True)
        off = max(off, float((_cell_means(weight, rows) - 1).abs().max()))
        uniform = advantages(*rows, lam=0.0).advantages
        flipped += int((found.advantages.sign() != uniform.sign()).sum())
    return Evidence({"largest distance from 1": off, "signs changed": flipped}, "below 1e-9, no sign changed", off < 1e-9 and flipped == 0)


@claim("weights average to 1 in every window of progress of a prompt, and no token's advantage changes its sign")
def cells() -> Evidence:
    return _cells(by_row=False)


@ablation(cells, "weights are normalized once more over each response")
def cells_by_row() -> Evidence:
    return _cells(by_row=True)


def _difficulty(of: str) -> Evidence:
    """Total over each prompt's tokens before and after the entropies of one of them are multiplied by 5."""
    rows = _rows(0)
    harder = rows._replace(entropy=torch.where(rows.group[:, None] == 3, 5 * rows.entropy, rows.entropy))
    changed = []
    for found in (advantages(*rows), advantages(*harder)):
        totals: Tensor = getattr(found, of).sum(1)
        changed.append(torch.zeros(12, dtype=torch.float64).index_add(0, rows.group, totals))
    moved = float(((changed[1] - changed[0]) / changed[0]).abs().max())
    pivots = [int(advantages(*r).pivot[rows.group == 3].sum()) for r in (rows, harder)]
    return Evidence(
        {"largest relative change": moved, "pivots of that prompt": pivots},
        "no total changes (1e-9) while the prompt's pivots more than double",
        moved < 1e-9 and pivots[1] > 2 * pivots[0],
    )


@claim("no prompt gains weight by being uncertain: when its entropies grow fivefold, every prompt's total weight stays")
def no_difficulty_bias() -> Evidence:
    return _difficulty("weight")


@ablation(no_difficulty_bias, "gates without normalization")
def bias_without_normalization() -> Evidence:
    return _difficulty("gate")


@dataclass
class Misplaced:
    """An ablation: every response's entropies, dealt to its tokens at random."""

    inner: PivotShaping

    needs = frozenset({"old_entropy"})
    compares_group = True

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        entropy = batch.signal("old_entropy")
        dealt = entropy.gather(1, torch.rand(entropy.shape, generator=run.generator).argsort(1))
        return self.inner(batch.but(signals=batch.signals | {"old_entropy": dealt}), run)


class Fork(NamedTuple):
    """What a run on the fork shows, mean of the seeds."""

    share: float  # |advantage| at the fork over the largest at another position, summed over the first ten steps
    steps: float  # until success 0.9
    entropy: list[float]  # at the fork, after every step, nats
    entropy_at_success: float  # when success reaches 0.9


def _fork(seed: int, branches: int) -> tuple[TokenBandit, TabularTokens]:
    """Position 2 starts uniform; everywhere else one token is all but certain (logit 4, noise 0.3, so that entropies differ)."""
    right = (torch.arange(16)[:, None] + torch.arange(branches)) % 4
    task = TokenBandit(
        16, 4, LENGTH, seed=seed, reward=lambda prompt, action, mask: (action[:, FORK, None] == right[prompt]).any(1).double()
    )
    policy = task.policy(scale=0.3, seed=seed)
    with torch.no_grad():
        policy.logits[..., 0] += 4
        policy.logits[:, FORK] = 0
    return task, policy


CREDITS = {
    "erpo": PivotShaping(buckets=2, lam=1.0),
    "grpo": PivotShaping(buckets=2, lam=0.0),
    "one window a token": PivotShaping(buckets=LENGTH, lam=1.0),
    "misplaced": Misplaced(PivotShaping(buckets=2, lam=1.0)),
}


@cache
def _trained(credit: str, branches: int = 1) -> Fork:
    method = plain_sgd(ERPO.but(credit=CREDITS[credit]), STEP_SIZE)
    found = []
    for seed in SEEDS:
        task, policy = _fork(seed, branches)
        right = (torch.arange(16)[:, None] + torch.arange(branches)) % 4

        def watch(run: Run, batch: Batch, policy: TabularTokens = policy, right: Tensor = right) -> tuple[float, float, Tensor]:
            assert batch.advantage is not None
            log_probs = policy.logits.detach()[:, FORK].log_softmax(-1)
            success = float(log_probs.exp().gather(1, right).sum(1).mean())
            return success, float(-(log_probs.exp() * log_probs).sum(1).mean()), batch.advantage.abs().sum(0)

        seen = train_on(method, policy, task, steps=STEPS, seed=seed, watch=watch)
        size = torch.stack([s for _, _, s in seen[:10]]).sum(0)
        others = torch.cat([size[:FORK], size[FORK + 1 :]])
        steps = steps_to([success for success, _, _ in seen], 0.9)
        entropy = [e for _, e, _ in seen]
        found.append(Fork(float(size[FORK] / others.max()), steps, entropy, entropy[int(min(steps, STEPS)) - 1]))
    return Fork(
        fmean(f.share for f in found),
        fmean(f.steps for f in found),
        [fmean(values) for values in zip(*(f.entropy for f in found), strict=True)],
        fmean(f.entropy_at_success for f in found),
    )


def _concentrates(credit: str) -> Evidence:
    mine, grpo = _trained(credit), _trained("grpo")
    found = {"share of the fork": round(mine.share, 3), "steps to 0.9": mine.steps, "steps to 0.9, grpo": grpo.steps}
    holds = mine.share > 1.2 and mine.steps < 0.85 * grpo.steps
    return Evidence(found, "over 1.2 times any other position's advantage; 0.9 in less than 0.85 of GRPO's steps", holds)


@claim("the learning signal concentrates on the fork, and the outcome it decides is learned in fewer steps than with GRPO")
def concentrates() -> Evidence:
    return _concentrates("erpo")


@ablation(concentrates, "weights off (lambda 0): GRPO")
def uniform() -> Evidence:
    return _concentrates("grpo")


@ablation(concentrates, "the entropies dealt to other tokens")
def misplaced() -> Evidence:
    return _concentrates("misplaced")


@ablation(concentrates, "one window a token, which cancels the gate")
def cancelled() -> Evidence:
    return _concentrates("one window a token")


def _two_branches(credit: str) -> Evidence:
    mine, grpo = _trained(credit, 2), _trained("grpo", 2)
    found = {"entropy at 0.9": mine.entropy_at_success, "entropy at 0.9, grpo": grpo.entropy_at_success}
    found |= {"steps to 0.9": mine.steps, "steps to 0.9, grpo": grpo.steps}
    holds = mine.entropy_at_success >= 0.9 * grpo.entropy_at_success and mine.steps < 0.85 * grpo.steps
    return Evidence({k: round(v, 3) for k, v in found.items()}, "at least 0.9 of GRPO's entropy, in less than 0.85 of its steps", holds)


@claim("with two equally good branches it gets to 0.9 success sooner than GRPO, with nearly as much entropy left at the fork by then")
def two_branches() -> Evidence:
    return _two_branches("erpo")


@ablation(two_branches, "weights off (lambda 0): GRPO")
def two_branches_uniform() -> Evidence:
    return _two_branches("grpo")


@ablation(two_branches, "the entropies dealt to other tokens")
def two_branches_misplaced() -> Evidence:
    return _two_branches("misplaced")


@claim("the entropy at the fork collapses less than with GRPO in the same number of steps", reproduced=False)
def less_collapse() -> Evidence:
    """It collapses sooner: this reconstruction amplifies the pivots' advantages of either sign, which is all that speeds the fork up."""
    mine, grpo = (_trained(credit, 2).entropy for credit in ("erpo", "grpo"))
    found = {f"step {n}": [round(mine[n - 1], 3), round(grpo[n - 1], 3)] for n in (10, 20, 40)}
    return Evidence(found, "above GRPO's (second) at each of these steps", all(mine[n - 1] > grpo[n - 1] for n in (10, 20, 40)))
