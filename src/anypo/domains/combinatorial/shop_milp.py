"""AT-MILP: re-solve the known part of a job shop whenever a job arrives, as a mixed-integer linear program.

Operations that have started stay as they are; the others of all released jobs are assigned and ordered so that the makespan of what is known is
smallest, and that plan is run until the next arrival. With all jobs there from the start this is the optimum. The solver is HiGHS, through SciPy.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from anypo.domains.combinatorial.shop import Instances


class Plan(NamedTuple):
    start: NDArray  # [J,O], -1 where there is no operation
    machine: NDArray  # [J,O] int64, -1 where there is none
    completion: NDArray  # [J]
    makespan: float
    optimal: bool  # every program was solved to its end within the time limit


class _Open(NamedTuple):
    """The operations that are to be planned, and from when on jobs and machines can be had."""

    operations: list[tuple[int, int]]  # (job, operation), those of a job one after another
    ready: dict[int, float]  # job -> earliest start of its first open operation
    free: NDArray  # [M]


def at_milp(instances: Instances, index: int = 0, time_limit: float = 5.0) -> Plan:
    """Plan instance `index`, one program an arrival time. `time_limit`: seconds for each; a greedy plan serves where none is found by then."""
    proc, n_ops, arrival = (np.asarray(x[index], dtype=np.float64) for x in instances)
    jobs, operations, machines = proc.shape
    start, machine = np.full((jobs, operations), -1.0), np.full((jobs, operations), -1, dtype=np.int64)
    times, optimal = np.unique(arrival), True
    for now, following in zip(times, [*times[1:], np.inf], strict=True):
        begun = start >= 0
        end = np.where(begun, start + np.take_along_axis(proc, machine.clip(min=0)[..., None], 2)[..., 0], now)
        free = np.array([max([now, *end[begun & (machine == m)]]) for m in range(machines)])
        known = [j for j in range(jobs) if arrival[j] <= now]
        todo = [(j, o) for j in known for o in range(int(n_ops[j])) if not begun[j, o]]
        plan, solved = _solve(proc, _Open(todo, {j: max(now, end[j].max()) for j in known}, free), time_limit)
        optimal &= solved
        for (j, o), (begin, m) in plan.items():
            if begin < following:
                start[j, o], machine[j, o] = begin, m
    rows = np.arange(jobs)
    last = n_ops.astype(np.int64) - 1
    completion = start[rows, last] + proc[rows, last, machine[rows, last]]
    return Plan(start, machine, completion, float(completion.max()), optimal)


def _solve(proc: NDArray, given: _Open, time_limit: float) -> tuple[dict[tuple[int, int], tuple[float, int]], bool]:
    """(job, operation) -> (start, machine), and whether that is proven optimal."""
    greedy = _place(proc, given, given.operations, {})
    if not greedy:
        return {}, True
    horizon = max(begin + proc[j, o, m] for (j, o), (begin, m) in greedy.items())
    program = _Program(proc, given, max(horizon, float(given.free.max()), max(given.ready.values())))
    found = program.solve(time_limit)
    if found.x is None:
        return greedy, False
    begin, chosen = program.read(found.x)
    # The solver's times are exact to a tolerance only: its order and machines are kept, the times are worked out anew.
    plan = _place(proc, given, sorted(given.operations, key=lambda operation: (begin[operation], operation)), chosen)
    return plan, found.status == 0


def _place(
    proc: NDArray, given: _Open, order: list[tuple[int, int]], chosen: dict[tuple[int, int], int]
) -> dict[tuple[int, int], tuple[float, int]]:
    """Operations put one after another on the machine chosen for each, or else on that which ends it first."""
    ready, free, plan = dict(given.ready), given.free.copy(), {}
    for j, o in order:
        possible = [chosen[j, o]] if chosen else np.flatnonzero(proc[j, o] > 0).tolist()
        m = min(possible, key=lambda m: max(ready[j], free[m]) + proc[j, o, m])
        begin = max(ready[j], free[m])
        plan[j, o] = (begin, m)
        ready[j] = free[m] = begin + proc[j, o, m]
    return plan


class _Program:
    """Variables: assignment x (0 or 1), start s, order y (1 when the first of a pair goes first), and the makespan, which is minimized."""

    def __init__(self, proc: NDArray, given: _Open, horizon: float) -> None:
        self.proc, self.given, self.horizon = proc, given, horizon
        self.operations = given.operations
        self.x = {(a, m): i for i, (a, m) in enumerate((a, int(m)) for a in self.operations for m in np.flatnonzero(proc[a] > 0))}
        self.s = {a: len(self.x) + i for i, a in enumerate(self.operations)}
        shared = [(a, b) for a, b in combinations(self.operations, 2) if a[0] != b[0] and ((proc[a] > 0) & (proc[b] > 0)).any()]
        self.y = {pair: len(self.x) + len(self.s) + i for i, pair in enumerate(shared)}
        self.size = len(self.x) + len(self.s) + len(self.y) + 1
        self.rows: list[dict[int, float]] = []
        self.least: list[float] = []
        self._constrain()

    def _at_least(self, terms: dict[int, float], bound: float) -> None:
        self.rows.append(terms)
        self.least.append(bound)

    def _duration(self, a: tuple[int, int], sign: float) -> dict[int, float]:
        return {self.x[a, m]: sign * self.proc[a][m] for m in self._machines(a)}

    def _machines(self, a: tuple[int, int]) -> list[int]:
        return [int(m) for m in np.flatnonzero(self.proc[a] > 0)]

    def _constrain(self) -> None:
        after, big, makespan = dict(zip(self.operations[:-1], self.operations[1:], strict=True)), self.horizon, self.size - 1
        for a in self.operations:
            one = {self.x[a, m]: 1.0 for m in self._machines(a)}
            self._at_least(one, 1.0)
            self._at_least(dict.fromkeys(one, -1.0), -1.0)
            following = after.get(a)
            ends = {self.s[following]: 1.0} if following and following[0] == a[0] else {makespan: 1.0}
            self._at_least(ends | {self.s[a]: -1.0} | self._duration(a, -1.0), 0.0)
            for m in self._machines(a):
                self._at_least({self.s[a]: 1.0, self.x[a, m]: -self.given.free[m]}, 0.0)
        for (a, b), y in self.y.items():
            for m in set(self._machines(a)) & set(self._machines(b)):
                both = {self.x[a, m]: -big, self.x[b, m]: -big}
                self._at_least({self.s[b]: 1.0, self.s[a]: -1.0, y: -big} | both, self.proc[a][m] - 3 * big)
                self._at_least({self.s[a]: 1.0, self.s[b]: -1.0, y: big} | both, self.proc[b][m] - 2 * big)

    def solve(self, time_limit: float) -> Any:
        entries = [(r, c, v) for r, row in enumerate(self.rows) for c, v in row.items()]
        r, c, v = zip(*entries, strict=True)
        matrix = coo_array((v, (r, c)), shape=(len(self.rows), self.size)).tocsr()
        lower, upper = np.zeros(self.size), np.full(self.size, self.horizon)
        integral = np.ones(self.size)
        for a, i in self.s.items():
            lower[i] = self.given.ready[a[0]]
        integral[[*self.s.values(), self.size - 1]] = 0
        upper[[*self.x.values(), *self.y.values()]] = 1
        lower[-1] = float(self.given.free.min())
        cost = np.zeros(self.size)
        cost[-1] = 1.0
        return milp(
            cost, integrality=integral, bounds=Bounds(lower, upper), constraints=LinearConstraint(matrix, np.array(self.least), np.inf),
            options={"time_limit": time_limit, "mip_rel_gap": 0.0},
        )  # fmt: skip

    def read(self, x: NDArray) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], int]]:
        """Starts and machines of a solution."""
        chosen = {a: max(self._machines(a), key=lambda m: x[self.x[a, m]]) for a in self.operations}
        return {a: float(x[i]) for a, i in self.s.items()}, chosen
