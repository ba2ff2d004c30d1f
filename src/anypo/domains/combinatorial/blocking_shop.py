"""A job shop without buffers, stepped in whole numbers of time: finished operations block their machine, blocked jobs may swap, machines shut down.

A job waits outside before its first operation and leaves after its last. In between it holds a machine: while it is processed, and then until the
next machine is free. Jobs that block each other in a cycle move on at once, all together; without that the shop can be stuck for good. A machine
that is down neither takes, nor gives away, nor processes anything; what was begun goes on later. Left out: set-up and transport times, jobs that
arrive later, waiting on purpose, two operations of a job in a row on one machine (they are one operation).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

RULES = ("SPT", "LPT", "MWKR", "LWKR", "MOR", "FIFO")


class Instance(NamedTuple):
    """J jobs on machines 0..M-1; of job j operation o runs on `machine[j][o]` for `duration[j][o]` >= 1. Jobs may differ in length."""

    machine: list[list[int]]
    duration: list[list[int]]
    shutdown: list[tuple[int, int, int]]  # (machine, from, for how long >= 0), in any order, overlapping or not


class BlockingShop:
    """One shop. `advance` moves it to its next decision, `move` takes it; `ended` once all jobs have left, or nothing can move any more."""

    def __init__(self, instance: Instance, swap: bool = True) -> None:
        """Raises ValueError for empty jobs, durations below 1 and operations of a job in a row on the same machine."""
        machine, duration, shutdown = instance
        for route, times in zip(machine, duration, strict=True):
            if not route or len(route) != len(times) or min(times) < 1 or min(route) < 0:
                raise ValueError("every job needs at least one operation, each with a machine from 0 on and a duration of at least 1")
            if any(a == b for a, b in zip(route[:-1], route[1:], strict=True)):
                raise ValueError("two operations of a job in a row on the same machine; make them one operation")
        self.machine, self.duration, self.swap = machine, duration, swap
        self.jobs = range(len(machine))
        self.machines = 1 + max(max(route) for route in machine)
        self.down_slots: list[set[int]] = [set() for _ in range(self.machines)]
        for m, begin, length in shutdown:
            if m < self.machines:
                self.down_slots[m].update(range(begin, begin + length))
        self.time = 0
        self.current = [-1] * len(machine)  # operation whose machine each job holds, -1 outside
        self.left = [0] * len(machine)  # time that is left of it, 0 when it is done
        self.ready = [0] * len(machine)  # since when the next operation may start
        self.work = [sum(times) for times in duration]  # of the operations that have not started
        self.holder = [-1] * self.machines  # job on each machine, -1 for none
        self.completion = [-1] * len(machine)
        self.start = [[-1] * len(route) for route in machine]
        self.remaining_jobs = len(machine)
        self.deadlock = False

    @property
    def ended(self) -> bool:
        return self.deadlock or self.remaining_jobs == 0

    @property
    def makespan(self) -> int:
        """-1 when the shop is stuck or not done."""
        return max(self.completion) if self.remaining_jobs == 0 else -1

    def completed(self, job: int) -> int:
        """How many operations of a job are done."""
        return self.current[job] + (self.left[job] == 0)

    def down(self, machine: int) -> bool:
        return self.time in self.down_slots[machine]

    def waiting(self, job: int) -> bool:
        """Whether a job, outside or blocked, could move but for its next machine."""
        if self.completion[job] >= 0 or self.left[job] > 0:
            return False
        return self.current[job] < 0 or not self.down(self.machine[job][self.current[job]])

    def candidates(self) -> list[int]:
        """The jobs that may move now: their next machine is free and up, and the one they hold, if any, is up."""
        found = []
        for j in self.jobs:
            if self.waiting(j):
                m = self.machine[j][self.current[j] + 1]
                if self.holder[m] < 0 and not self.down(m):
                    found.append(j)
        return found

    def move(self, job: int) -> None:
        """The job's next operation starts now, on a machine that is free."""
        if self.current[job] >= 0:
            self.holder[self.machine[job][self.current[job]]] = -1
        self._begin(job)

    def _begin(self, job: int) -> None:
        self.current[job] += 1
        o = self.current[job]
        self.holder[self.machine[job][o]] = job
        self.left[job] = self.duration[job][o]
        self.work[job] -= self.duration[job][o]
        self.start[job][o] = self.time

    def swap_cycle(self) -> bool:
        """Move the cycle of blocked jobs that holds the smallest machine; False when there is none. Every machine of it is up."""
        towards: dict[int, int] = {}
        for m, j in enumerate(self.holder):
            if j >= 0 and self.waiting(j) and not self.down(self.machine[j][self.current[j] + 1]):
                towards[m] = self.machine[j][self.current[j] + 1]
        for first in sorted(towards):
            path, at = [first], towards[first]
            while at in towards and at not in path:
                path.append(at)
                at = towards[at]
            if at == first:
                for job in [self.holder[m] for m in path]:
                    self._begin(job)
                return True
        return False

    def tick(self) -> None:
        """One unit of time: what is processed on machines that are up comes nearer to its end, and jobs that are through leave."""
        running = [j for j in self.jobs if self.left[j] > 0]
        if not running and not any(self.down(m) for m in range(self.machines)):
            self.deadlock = True  # nothing runs and nothing holds anything up: the next unit of time would be like this one
            return
        for j in running:
            if not self.down(self.machine[j][self.current[j]]):
                self.left[j] -= 1
        self.time += 1
        for j in running:
            if self.left[j] == 0:
                self.ready[j] = self.time
                if self.current[j] + 1 == len(self.machine[j]):
                    self.completion[j] = self.time
                    self.holder[self.machine[j][self.current[j]]] = -1
                    self.remaining_jobs -= 1

    def pass_time(self) -> None:
        """What happens when no job is a candidate: a swap, else a unit of time."""
        if not (self.swap and self.swap_cycle()):
            self.tick()

    def advance(self) -> list[int]:
        """To the next decision: the jobs one of which is to move, [] at the end. A lone candidate moves without being asked for."""
        while not self.ended:
            found = self.candidates()
            if len(found) > 1:
                return found
            if found:
                self.move(found[0])
            else:
                self.pass_time()
        return []


def by_rule(shop: BlockingShop, candidates: Sequence[int], rule: str) -> int:
    """The candidate that a priority rule takes, ties to the smallest: shortest or longest next operation (SPT, LPT), most or least work of operations
    not yet started (MWKR, LWKR), most such operations (MOR), ready for longest (FIFO). Raises ValueError for another rule."""

    def following(j: int) -> int:
        return shop.duration[j][shop.current[j] + 1]

    keys: dict[str, Callable[[int], int]] = {
        "SPT": following,
        "LPT": lambda j: -following(j),
        "MWKR": lambda j: -shop.work[j],
        "LWKR": lambda j: shop.work[j],
        "MOR": lambda j: shop.current[j] - len(shop.machine[j]),
        "FIFO": lambda j: shop.ready[j],
    }
    if rule not in keys:
        raise ValueError(f"unknown rule '{rule}'; there are {', '.join(RULES)}")
    return min(candidates, key=keys[rule])


def run_by(instance: Instance, choose: Callable[[BlockingShop, list[int]], int], swap: bool = True) -> BlockingShop:
    """A shop run to its end (or until it is stuck), `choose` taking one of two or more candidates."""
    shop = BlockingShop(instance, swap)
    while found := shop.advance():
        shop.move(choose(shop, found))
    return shop


def draw_shutdowns(rng: np.random.Generator, machines: int, p_down: float, longest: int, horizon: int) -> list[tuple[int, int, int]]:
    """Every machine that is up fails at each time before `horizon` with probability `p_down`, for 1 to `longest` units of time."""
    found = []
    for m in range(machines if p_down > 0 else 0):
        time = int(rng.geometric(p_down)) - 1
        while time < horizon:
            length = int(rng.integers(1, longest + 1))
            found.append((m, time, length))
            time += length + int(rng.geometric(p_down)) - 1
    return found
