"""Claims of LPO on combination locks: coverage by the bonus, rare switches, a small kept set with the right widths, sensitivities that fall.

Locks of 11 states and 3 actions, each with a combination of its own; as many at once are as many runs. Opening the lock again and again returns 1.46 from
the start, the distractor in state 0 returns 1.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from anypo.claims import Evidence, ablation, claim
from anypo.domains.tabular.lock import CombinationLock
from anypo.loops.tabular import step
from anypo.methods.tabular.lpo import METHOD, VARIANTS, copies_of, leverage, sensitivity_of
from anypo.run import Run

SEED = 0
FEW, MANY = 6, 24  # locks; many where a mean return is compared, as about one lock in ten is still closed after 2000 episodes
METHODS = {"bonus": METHOD, "no bonus": METHOD.set("control.0.explore", False), "every episode": VARIANTS["every_episode"]}
EARLY, SUBSET, LATE, FULL = 500, 1500, 2000, 5000  # episodes


class Mark(NamedTuple):
    switches: Tensor  # [B] so far
    visits: Tensor  # [B,S*A] collected
    kept: Tensor  # [B,S*A] kept, without copies
    copies: Tensor  # [B,S*A] kept, with copies


class Trained(NamedTuple):
    marks: dict[int, Mark]
    returns: Tensor  # [B] exact, after the exploit phase


@lru_cache
def _train(which: str, episodes: int, locks: int) -> Trained:
    task = CombinationLock(copies=locks, seed=SEED)
    run, marks = Run(METHODS[which], task.policy(), task, steps=episodes, seed=SEED), {}
    visits, kept = torch.zeros(2, locks, task.features.shape[-1], dtype=torch.float64)
    while not run.finished:
        batch = step(run)
        assert batch.advantage is not None
        pair = task.features[batch.context[:, 0], batch.action[:, 0]]
        visits, kept = visits + pair, kept + pair * (batch.advantage > 0)
        if run.step in (EARLY, SUBSET, LATE, FULL):
            copies = batch.signals["gram"].diagonal(dim1=-2, dim2=-1) - 1
            marks[run.step] = Mark(run.method.control[0].switches, visits, kept, copies)  # type: ignore[attr-defined]
    return Trained(marks, task.measure(run.policy)["return"])  # type: ignore[arg-type]


def _known(copies: Tensor) -> list[int]:
    """States of which every action has a width below 0.3."""
    return ((1 / (copies + 1)).sqrt() < 0.3).view(-1, 11, 3).all(-1).sum(-1).tolist()


def _outcome(which: str) -> tuple[list[int], list[float]]:
    found = _train(which, FULL, FEW)
    return _known(found.marks[FULL].copies), [round(x, 3) for x in found.returns.tolist()]


def _covers(which: str) -> Evidence:
    known, returns = _outcome(which)
    return Evidence(
        {"known": known, "return": returns}, "all 11 states and a return above 1.3 on every lock", min(known) == 11 and min(returns) > 1.3
    )


@claim("in 5000 episodes all states of a lock become known, and the policy then found opens it again and again", slow=True)
def covers() -> Evidence:
    return _covers("bonus")


@ablation(covers, "no bonus, every state counted as known")
def does_not_cover() -> Evidence:
    return _covers("no bonus")


def _stuck(which: str) -> Evidence:
    known, returns = _outcome(which)
    holds = max(known) <= 5 and max(returns) <= 1.001
    return Evidence({"known": known, "return": returns}, "at most 5 of the 11 states and a return of at most 1 on every lock", holds)


@claim("without the bonus the same learner stays with the distractor: few states become known and the lock is never opened", slow=True)
def stuck() -> Evidence:
    return _stuck("no bonus")


@ablation(stuck, "the lack of the bonus")
def not_stuck() -> Evidence:
    return _stuck("bonus")


def _span(counts: Tensor) -> str:
    return f"{int(counts.min())} to {int(counts.max())}"


def _switches(which: str) -> Evidence:
    found, baseline = _train(which, LATE, MANY), _train("every episode", LATE, MANY)
    early, late = (found.marks[n].switches for n in (EARLY, LATE))
    gap = float((baseline.returns - found.returns).mean())
    measured = {"at 500": _span(early), "at 2000": _span(late), "mean return given up": round(gap, 3)}
    holds = int(early.max()) < 150 and bool((late < 2.5 * early).all()) and gap <= 0.1
    return Evidence(measured, "below 150, then below 2.5 times as many, with at most 0.1 of the return at every switch given up", holds)


@claim(
    "the policy switches fewer than 150 times in 500 episodes, not 2.5 times as often in 2000, at the return of constant switching",
    slow=True,
)
def switches_rarely() -> Evidence:
    return _switches("bonus")


@ablation(switches_rarely, "no subsampling: every pair is kept")
def switches_always() -> Evidence:
    return _switches("every episode")


def _subset(with_copies: bool) -> Evidence:
    mark = _train("bonus", LATE, MANY).marks[SUBSET]
    share = (mark.kept.sum(-1) / SUBSET).max()
    ratio = ((mark.visits + 1) / ((mark.copies if with_copies else mark.kept) + 1)).sqrt()
    right = ((ratio > 0.5) & (ratio < 2)).double().mean(-1)
    measured = {"largest share kept": round(float(share), 3), "least share of widths within a factor 2": round(float(right.min()), 3)}
    holds = float(share) < 0.25 and float(right.min()) >= 0.9
    return Evidence(measured, "less than a quarter kept; at least 0.9 of the widths within a factor 2 of those of all data", holds)


@claim("less than a quarter of 1500 pairs is kept, and nine of ten widths are within a factor 2 of those computed on all pairs", slow=True)
def subset_suffices() -> Evidence:
    return _subset(True)


@ablation(subset_suffices, "kept pairs count once, without copies")
def copies_are_needed() -> Evidence:
    return _subset(False)


def _falls(remember: bool) -> Evidence:
    """Random unit features, 4 repeated directions among fresh ones; the sensitivity of each kept point right before and right after."""
    g = torch.Generator().manual_seed(SEED)
    least, count = 1.0, 0
    for _ in range(20):
        stream = torch.nn.functional.normalize(torch.randn(100, 5, generator=g, dtype=torch.float64), dim=-1)
        stream[::2] = stream[:4].repeat(13, 1)[:50]
        gram = torch.eye(5, dtype=torch.float64)
        for point in stream:
            before = sensitivity_of(leverage(gram, point[None]), 1.0, 400.0)
            m = copies_of(before, 1.5)
            if float(torch.rand((), generator=g)) < float(1 / m):
                gram = gram + remember * m * point[:, None] * point
                least = min(least, 1 - float(sensitivity_of(leverage(gram, point[None]), 1.0, 400.0) / before))
                count += 1
    return Evidence({"smallest relative fall": least, "kept points": count}, "every kept point falls by more than 1 %", least > 0.01)


@claim("once a point is kept, the sensitivity of its direction is lower than before")
def sensitivity_falls() -> Evidence:
    return _falls(True)


@ablation(sensitivity_falls, "kept points are not remembered")
def nothing_falls() -> Evidence:
    return _falls(False)
