"""A flexible job shop with arrivals, simulated by events for many instances at once.

A job is a chain of operations; an operation runs on one of several machines, with a time for each. Whenever a released job waits and a machine
that may take its next operation is idle, a decision is asked for: a pair of dispatching rules, of which one picks the job and the other the
machine. Between two decisions nothing is left to choose, so the time of the next one follows at once from when jobs and machines become free;
single events are never stepped through. Left out: waiting on purpose, breakdowns, set-up times, preemption.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

JOB_RULES = ("FIFO", "SPT", "MWKR", "LWKR", "MOR")
MACHINE_RULES = ("FAST", "LEAST")
RULE_PAIRS = tuple(f"{job}-{machine}" for job in JOB_RULES for machine in MACHINE_RULES)  # action a = 2 * job rule + machine rule
OBJECTIVES = ("makespan", "sum")
DIGITS = 9  # scores are compared after rounding to so many decimals, so that sums in another order still tie

Choose = Callable[[NDArray, NDArray], NDArray]  # (states [B,8+M], rows that decide [B] bool) -> actions [B]


class Instances(NamedTuple):
    """B problems of J jobs, up to O operations each, and M machines."""

    proc: NDArray  # [B,J,O,M] times > 0; 0 where a machine may not take the operation, or there is no such operation
    n_ops: NDArray  # [B,J] operations of each job, in 1..O
    arrival: NDArray  # [B,J] release times, in any order


class Schedule(NamedTuple):
    """What happened, with the decisions that led to it. T is the largest number of decisions of an instance; unused cells hold -1 (or 0)."""

    start: NDArray  # [B,J,O]
    machine: NDArray  # [B,J,O] int64
    completion: NDArray  # [B,J]
    decisions: NDArray  # [B] how many each instance took
    time: NDArray  # [B,T] of each decision
    action: NDArray  # [B,T] int64
    state: NDArray  # [B,T,8+M]

    @property
    def makespan(self) -> NDArray:
        return self.completion.max(1)

    def flow(self, arrival: NDArray) -> NDArray:
        """[B]: sum over the jobs of the time between release and completion."""
        return (self.completion - arrival).sum(1)

    @property
    def mask(self) -> NDArray:
        """[B,T] bool: which decisions exist."""
        return np.arange(self.time.shape[1]) < self.decisions[:, None]


class Shop:
    """The state of B shops. `advance` moves each to its next decision, `act` takes it; both return nothing until `done` [B] is all True."""

    def __init__(self, instances: Instances) -> None:
        """Raises ValueError for operations that no machine may take and for jobs without operations."""
        proc, n_ops, arrival = (np.asarray(x) for x in instances)
        count, jobs, operations, machines = proc.shape
        exists = np.arange(operations) < n_ops[..., None]
        eligible = proc > 0
        if (exists & ~eligible.any(-1)).any() or n_ops.min() < 1 or n_ops.max() > operations:
            raise ValueError("every job needs 1 to O operations, and every operation a machine with a positive time")
        eligible &= exists[..., None]
        mean = np.where(exists, proc.sum(-1) / np.maximum(eligible.sum(-1), 1), 0.0).round(DIGITS)
        end = np.zeros((count, jobs, 1))
        self.mean_time = np.concatenate(
            [mean, end], axis=2
        )  # [B,J,O+1] of each operation over the machines that may take it; 0 after the last
        self.work = np.concatenate([mean[..., ::-1].cumsum(-1)[..., ::-1], end], axis=2).round(DIGITS)  # [B,J,O+1] from an operation on
        never = np.full((count, jobs, 1, machines), np.inf)
        self.duration = np.concatenate([np.where(eligible, proc, np.inf), never], axis=2)  # [B,J,O+1,M], infinite where not eligible
        self.barred = np.where(np.isfinite(self.duration), 0.0, np.inf)
        self.n_ops, self.arrival = n_ops, arrival.astype(np.float64)
        self.rows = np.arange(count)
        self.time = self.arrival.min(1)
        self.next = np.zeros((count, jobs), dtype=np.int64)  # operation of each job that is to start next
        self.ready = self.arrival.copy()  # [B,J] when that operation may start, or when the last one ends
        self.free = np.zeros((count, machines))  # when each machine ends what it does
        self.busy = np.zeros((count, machines))  # time each machine was given so far
        self.current, self.closed = self.duration[:, :, 0].copy(), self.barred[:, :, 0].copy()  # [B,J,M] of the next operations
        self.priority = np.stack(
            [self.arrival, mean[..., 0], -self.work[..., 0], self.work[..., 0], -1.0 * n_ops], axis=1
        )  # [B,5,J] smallest wins
        self.candidate = np.zeros((count, jobs), dtype=bool)
        self.done = np.zeros(count, dtype=bool)
        self.start = np.full((count, jobs, operations), -1.0)
        self.machine = np.full((count, jobs, operations), -1, dtype=np.int64)

    def advance(self) -> None:
        """To the first time at which some job's next operation could start: the job is there, and a machine that may take it is idle."""
        possible = (self.free[:, None, :] + self.closed).min(2)
        np.maximum(possible, self.ready, out=possible)
        first = possible.min(1)
        self.done = np.isinf(first)
        self.time = np.where(self.done, self.time, np.maximum(self.time, first))
        self.candidate = possible <= self.time[:, None]

    def state(self, scale: float) -> NDArray:
        """[B,8+M]: what can be seen of the shop now. Jobs that have not arrived leave no trace. `scale` is the mean time of an operation, P.

        Shares of the jobs that are candidates, released and unfinished, released; mean and largest remaining work of the candidates over P O;
        smallest and largest mean time of their next operation over P; time since the last arrival over P; for each machine the time until it is
        free over P. All 0 once the shop is done.
        """
        jobs, operations = self.n_ops.shape[1], self.start.shape[2]
        now, candidate = self.time[:, None], self.candidate
        released = self.arrival <= now
        unfinished = released & ((self.next < self.n_ops) | (self.ready > now))
        waiting = np.maximum(candidate.sum(1), 1)
        work, mean = self.priority[:, 3], self.priority[:, 1]
        known = np.where(candidate, work, 0.0)
        found = np.empty((len(self.rows), 8 + self.free.shape[1]))
        found[:, 0] = candidate.sum(1) / jobs
        found[:, 1] = unfinished.sum(1) / jobs
        found[:, 2] = released.sum(1) / jobs
        found[:, 3] = known.sum(1) / waiting / (scale * operations)
        found[:, 4] = known.max(1) / (scale * operations)
        found[:, 5] = np.where(candidate, mean, np.inf).min(1) / scale
        found[:, 6] = np.where(candidate, mean, 0.0).max(1) / scale
        found[:, 7] = (self.time - np.where(released, self.arrival, -np.inf).max(1)) / scale
        found[:, 8:] = np.maximum(self.free - now, 0.0) / scale
        if self.done.any():
            found[self.done] = 0.0
        return found

    def act(self, action: NDArray) -> None:
        """Start one operation in every shop that is not done: the job by rule action // 2, its machine by rule action % 2, ties to the smallest
        index. Raises ValueError for an action outside 0..9."""
        if action.min() < 0 or action.max() >= len(RULE_PAIRS):
            raise ValueError(
                f"an action is one of {len(RULE_PAIRS)} rule pairs, numbered from 0; got {int(action.min())}..{int(action.max())}"
            )
        job = np.where(self.candidate, self.priority[self.rows, action // 2], np.inf).argmin(1)
        times = self.current[self.rows, job]  # [B,M]
        score = np.where((action % 2 == 0)[:, None], times.round(DIGITS), self.busy)
        machine = np.where((self.free <= self.time[:, None]) & np.isfinite(times), score, np.inf).argmin(1)
        r = self.rows if not self.done.any() else np.flatnonzero(~self.done)
        j, m, now = job[r], machine[r], self.time[r]
        o, took = self.next[r, j], times[r, m]
        self.start[r, j, o], self.machine[r, j, o] = now, m
        self.free[r, m] = self.ready[r, j] = now + took
        self.busy[r, m] = (self.busy[r, m] + took).round(DIGITS)
        self.next[r, j] = following = o + 1
        self.current[r, j], self.closed[r, j] = self.duration[r, j, following], self.barred[r, j, following]
        self.priority[r, 1, j] = self.mean_time[r, j, following]
        left = self.work[r, j, following]
        self.priority[r, 2, j], self.priority[r, 3, j] = -left, left
        self.priority[r, 4, j] += 1


def run_shop(instances: Instances, choose: Choose | NDArray, scale: float = 1.0, simulator: type[Shop] = Shop) -> Schedule:
    """Simulate all instances to their end. `choose` maps states to actions; an array [B,T] of actions is taken in turn instead."""
    shop = simulator(instances)
    times, actions, states = list[NDArray](), list[NDArray](), list[NDArray]()
    decisions = np.zeros(len(shop.rows), dtype=np.int64)
    shop.advance()
    while not shop.done.all():
        state = shop.state(scale)
        action = choose[:, len(times) % choose.shape[1]] if isinstance(choose, np.ndarray) else choose(state, ~shop.done)
        decisions += ~shop.done
        times.append(shop.time)
        actions.append(np.where(shop.done, 0, action))
        states.append(state)
        shop.act(action)
        shop.advance()
    stacked = (np.stack(x, axis=1) for x in (times, actions, states))
    return Schedule(shop.start, shop.machine, shop.ready, decisions, *stacked)


def run_rules(instances: Instances) -> Schedule:
    """Every instance under every fixed rule pair: 10 B rows, the first B under pair 0."""
    count = len(instances.proc)
    tiled = Instances(*(np.concatenate([x] * len(RULE_PAIRS)) for x in instances))
    return run_shop(tiled, np.repeat(np.arange(len(RULE_PAIRS)), count)[:, None])


def interval_rewards(schedule: Schedule, arrival: NDArray, objective: str) -> NDArray:
    """[B,T]: reward of each decision for the interval up to the next one; that of the last ends with the last job. 0 where there is no decision.

    makespan: minus the interval's length. sum: minus the integral over it of the number of released unfinished jobs. Raises ValueError for another
    objective.
    """
    if objective not in OBJECTIVES:
        raise ValueError(f"unknown objective '{objective}'; use {' or '.join(OBJECTIVES)}")
    begin, mask, last = schedule.time, schedule.mask, schedule.makespan[:, None]
    end = np.where(mask[:, 1:], begin[:, 1:], last)
    end = np.concatenate([end, last], axis=1)
    if objective == "makespan":
        return np.where(mask, begin - end, 0.0)
    overlap = np.minimum(schedule.completion[:, None, :], end[..., None]) - np.maximum(arrival[:, None, :], begin[..., None])
    return np.where(mask, -np.maximum(overlap, 0.0).sum(-1), 0.0)
