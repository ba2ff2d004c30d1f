"""Claims of GROW on errands: a corridor with a key and a door, and three kinds of problems in small rooms. Success is exact but for the policy with
memory, which is judged on 256 sampled errands a text."""

from __future__ import annotations

import functools
import time
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anypo.claims import Evidence, ablation, claim
from anypo.domains.language.toys.errands import ErrandPolicy, Errands, clone
from anypo.loops.on_policy import step, train
from anypo.method import Method
from anypo.methods.language.grow import METHOD as GROW
from anypo.methods.language.grow import advantages, sample_rewards
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.reproductions.common import ShuffledCredit
from anypo.run import Run
from anypo.seams.credit import group_relative
from anypo.seams.groups import broadcast, group_sum

TRAJECTORIES = GRPO.set("regularize.0.beta", 0.01).set("update.minibatches", 4)
SHUFFLED = GROW.but(credit=ShuffledCredit(GROW.credit))
ONE_GROUP = GROW.set("credit.by_task", False)


def _between_samples(by_samples: bool) -> Evidence:
    g = torch.Generator().manual_seed(0)
    reward = torch.randint(2, (32,), generator=g).double()
    group, worst = torch.arange(32) % 4, [0.0, 0.0]
    for i, length in enumerate((torch.full((32,), 6), torch.randint(1, 7, (32,), generator=g))):
        mask = torch.arange(6) < length[:, None]
        samples = sample_rewards(reward, mask, torch.ones_like(mask), w_format=0.0)
        whole = broadcast(group_relative(reward, group), mask)
        found = advantages(samples, mask, group) if by_samples else whole
        if i == 0:
            worst[0] = float((found - whole).abs().max())
            continue
        share = (group_sum(length * reward, group) / group_sum(length, group))[:, None]
        expected = torch.where(mask, (reward[:, None] - share) / ((share * (1 - share)).sqrt() + 1e-6), 0.0)
        worst[1] = float((found - expected).abs().max())
    return Evidence({"equal lengths": worst[0], "unequal lengths": worst[1]}, "both differences below 1e-9", max(worst) < 1e-9)


@claim(
    "with equal lengths a sample's advantage is GRPO's; with unequal ones the mean and the spread are those of success weighted by length"
)
def between_samples() -> Evidence:
    return _between_samples(True)


@ablation(between_samples, "advantages between trajectories")
def between_trajectories() -> Evidence:
    return _between_samples(False)


def _run(
    method: Method, task: Errands, seed: int, updates: int, *, history: bool = False, cloned: bool = False, budget: int | None = None
) -> tuple[Run, Tensor]:
    """A trained run, and the success on every text before it."""
    policy = task.policy(history=history, seed=seed)
    if cloned:
        clone(policy, task, steps=150, noise=0.6, seed=seed)
    before = task.success_by_text(policy)
    return train(Run(method, policy, task, steps=updates, seed=seed, max_actions=budget)), before


def _success(run: Run) -> Tensor:
    task: Any = run.task
    return task.success_by_text(run.policy)


class Compared(NamedTuple):
    samples: float  # success of 100 updates on samples
    trajectories: float  # of as many environment steps on trajectories with a full-history GRU
    actions: int
    seconds: tuple[float, float]


@functools.lru_cache(maxsize=8)
def _compared(seed: int) -> Compared:
    start = time.process_time()
    run, _ = _run(GROW, Errands(), seed, 100)
    middle = time.process_time()
    full, _ = _run(TRAJECTORIES, Errands(), seed, 10_000, history=True, budget=run.actions)
    seconds = (middle - start, time.process_time() - middle)
    return Compared(float(_success(run).mean()), float(_success(full).mean()), run.actions, seconds)


def _short_against_full(shuffled: bool) -> Evidence:
    pairs = [_compared(seed) for seed in range(3)]
    mine = fmean(pair.samples for pair in pairs)
    if shuffled:
        mine = fmean(float(_success(_run(SHUFFLED, Errands(), i, 100, budget=p.actions)[0]).mean()) for i, p in enumerate(pairs))
    theirs = fmean(pair.trajectories for pair in pairs)
    seconds = [round(sum(pair.seconds[i] for pair in pairs), 1) for i in range(2)]
    measured = {"samples": round(mine, 3), "trajectories": round(theirs, 3), "processor seconds": seconds}
    return Evidence(measured, "samples succeed at least as often (mean of 3 seeds)", mine >= theirs)


@claim(
    "in the corridor 100 updates on samples succeed as often as GRPO on trajectories with a full-history GRU after as many steps", slow=True
)
def short_context_loses_nothing() -> Evidence:
    return _short_against_full(False)


@ablation(short_context_loses_nothing, "advantages dealt to the wrong trajectories")
def nothing_to_learn_from() -> Evidence:
    return _short_against_full(True)


def _context_share(history: bool) -> Evidence:
    """Of the first five updates: observations that the log-probs depend on, against those of the same trajectories with their whole history."""
    task, read, whole = Errands(), 0, 0
    policy: ErrandPolicy = task.policy(history=history)
    run = Run(GROW, policy, task, steps=5)
    for _ in range(5):
        batch = step(run)
        read += policy.context_read(batch)
        whole += int((batch.lengths * (batch.lengths + 1) // 2).sum())
    return Evidence(round(read / whole, 3), "below 0.5 of the context of whole trajectories", read < 0.5 * whole)


@claim(
    "the samples' log-probs depend on less than half of the observations that those of whole trajectories depend on, summed over actions"
)
def context_is_short() -> Evidence:
    return _context_share(False)


@ablation(context_is_short, "the policy remembers its whole history")
def context_is_whole() -> Evidence:
    return _context_share(True)


def _rooms(method: Method) -> Evidence:
    before, after = [], []
    for seed in range(3):
        run, start = _run(method, Errands("rooms", horizon=12), seed, 80, cloned=True)
        before.append(float(start.mean()))
        after.append(float(_success(run).mean()))
    found = {"cloned": round(fmean(before), 3), "trained": round(fmean(after), 3)}
    return Evidence(found, "a rise of more than 0.25 (mean of 3 seeds)", fmean(after) - fmean(before) > 0.25)


@claim("over the texts of the small rooms (empty room, fetch, door and key) mean success rises by more than 0.25 above the cloned policy")
def rooms_are_learned() -> Evidence:
    return _rooms(GROW)


@ablation(rooms_are_learned, "advantages dealt to the wrong trajectories")
def rooms_are_not_learned() -> Evidence:
    return _rooms(SHUFFLED)


@functools.lru_cache(maxsize=2)
def _hardest(by_task: bool) -> float:
    """Success on the text that succeeds least after 60 updates, mean of 6 seeds. In 20 steps a random walk reaches the door in 0.16 of the cases, and
    brings the key anywhere in about 0.01."""
    method = GROW if by_task else ONE_GROUP
    return fmean(float(_success(_run(method, Errands(horizon=20), seed, 60)[0]).min()) for seed in range(6))


def _groups_help_the_hardest(by_task: bool) -> Evidence:
    mine, one = _hardest(by_task), _hardest(False)
    return Evidence({"this": round(mine, 3), "one group": round(one, 3)}, "more than 0.1 above one group", mine > one + 0.1)


@claim(
    "where the texts' success rates are very different, groups by task leave the hardest text better off than one group of all samples",
    slow=True,
)
def groups_help_the_hardest() -> Evidence:
    return _groups_help_the_hardest(True)


@ablation(groups_help_the_hardest, "one group of all samples")
def one_group() -> Evidence:
    return _groups_help_the_hardest(False)
