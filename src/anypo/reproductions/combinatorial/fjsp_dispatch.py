"""Claims of event-based dispatching: the simulator keeps its rules, the policy reaches the best pair of rules, AT-MILP is optimal when all is known."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from anypo.claims import Evidence, ablation, claim
from anypo.domains.combinatorial.setup import build
from anypo.domains.combinatorial.shop import RULE_PAIRS, Instances, Schedule, Shop, interval_rewards, run_rules, run_shop
from anypo.domains.combinatorial.shop_instances import KINDS, ShopSetting
from anypo.domains.combinatorial.shop_milp import at_milp
from anypo.loops.on_policy import train
from anypo.methods.combinatorial.fjsp_dispatch import METHOD, hindsight
from anypo.run import Run
from anypo.seams.credit import GAE


class Blind(Shop):
    """The ablation of events: a machine is taken for idle whatever it does."""

    def advance(self) -> None:
        self.free[:] = 0.0
        super().advance()


def _overlaps(instances: Instances, done: Schedule) -> int:
    """Pairs of operations that are on the same machine, or of the same job, at the same time, and operations before their job or on a wrong machine."""
    found = 0
    rows, jobs, operations = np.nonzero(done.start >= 0)
    machine = done.machine[rows, jobs, operations]
    took = instances.proc[rows, jobs, operations, machine]
    begin = done.start[rows, jobs, operations]
    found += int(((took <= 0) | (begin < instances.arrival[rows, jobs])).sum())
    for owner in (machine, 100 + jobs):
        order = np.lexsort((operations, begin, owner, rows))  # by instance and owner, then in time
        same = (rows[order][1:] == rows[order][:-1]) & (owner[order][1:] == owner[order][:-1])
        found += int((same & (begin[order][1:] < (begin + took)[order][:-1])).sum())
    return found


def _idle(instances: Instances, done: Schedule) -> int:
    """Decisions after which, at the same time, an idle machine and a waiting job for it were left without another decision."""
    found = 0
    for b in range(len(done.start)):
        for time in np.unique(done.time[b, : done.decisions[b]]):
            begun = (done.start[b] >= 0) & (done.start[b] <= time)
            took = np.take_along_axis(instances.proc[b], done.machine[b].clip(min=0)[..., None], 2)[..., 0]
            end = np.where(begun, done.start[b] + took, 0.0)
            idle = [not (end[begun & (done.machine[b] == m)] > time).any() for m in range(instances.proc.shape[3])]
            following = begun.sum(1)
            waits = (instances.arrival[b] <= time) & (end.max(1) <= time) & (following < instances.n_ops[b])
            found += int((instances.proc[b][waits, following[waits]][:, idle] > 0).any())
    return found


def _simulated(simulator: type[Shop]) -> Evidence:
    measured: dict[str, Any] = {}
    for kind in KINDS:
        instances = ShopSetting(kind, load=2.0).draw(range(20))
        actions = np.random.default_rng(0).integers(len(RULE_PAIRS), size=(20, 60))
        done = run_shop(instances, actions, simulator=simulator)
        sums = [interval_rewards(done, instances.arrival, objective).sum(1) for objective in ("makespan", "sum")]
        errors = np.abs(sums[0] + done.makespan - instances.arrival.min(1)).max(), np.abs(sums[1] + done.flow(instances.arrival)).max()
        measured[kind] = {
            "overlaps": _overlaps(instances, done),
            "needless waits": _idle(instances, done),
            "reward error": float(max(errors)),
        }
    holds = all(m["overlaps"] == 0 and m["needless waits"] == 0 and m["reward error"] < 1e-9 for m in measured.values())
    return Evidence(measured, "no overlap, no needless wait, rewards add up to minus makespan or flow time within 1e-9", holds)


@claim("schedules under random rules never overlap, keep order and eligibility, never idle needlessly, and their rewards telescope")
def simulator_is_exact() -> Evidence:
    return _simulated(Shop)


@ablation(simulator_is_exact, "machines count as idle whatever they do")
def simulator_without_machines() -> Evidence:
    return _simulated(Blind)


STEPS, SEEDS = 40, (3, 4)
UNSEEN = range(2_000_000, 2_000_200)
# Gains over the best pair were not seen: what tells instances apart (which machine is slow) is not in the state. 200 test instances, since the mean of
# 50 moves by several percent with the draw. The method's settings were chosen on the task's own held-out instances and seeds 0 to 2; these are others.


@cache
def _learned(kind: str, objective: str, seed: int) -> dict[str, tuple[float, NDArray]]:
    """For `makespan` and `flow`: the trained policy's mean on test instances, and those [10, instances] of every fixed pair. `kind`: what is off."""
    method = {
        "nothing": METHOD,
        "long traces": METHOD.set("credit.lam", 0.95),
        "comparison": METHOD.but(credit=GAE(gamma=1.0, lam=0.95)).set("select.group_size", 1).set("select.prompts", 256),
    }[kind]
    task: Any
    policy, task = build("shop:heterogeneous", None, needs=method.needs(), seed=seed, objective=objective)
    task.held_out_instances = task.setting.draw(UNSEEN)
    found = task.evaluate(train(Run(method, policy, task, steps=STEPS, seed=seed)))
    return {name: (found[name], task.rules[name]) for name in ("makespan", "flow")}


def _makespan(off: str, seeds: tuple[int, ...] = SEEDS) -> Evidence:
    found = [_learned(off, "makespan", seed)["makespan"] for seed in seeds]
    means = found[0][1].mean(1)
    best, median = hindsight(torch.from_numpy(found[0][1])), float(np.median(means))
    measured = {
        "policy": [round(value, 2) for value, _ in found],
        f"best pair ({RULE_PAIRS[best.best_rule]})": round(best.best_mean, 2),
        "median pair": round(median, 2),
    }
    holds = all(value <= 1.01 * best.best_mean and value < median for value, _ in found)
    return Evidence(measured, "at most 1% above the best fixed pair in hindsight and below the median pair, every seed", holds)


@claim(
    "heterogeneous shops: the policy's makespan is within 1% of the best fixed pair of rules in hindsight and below the median pair",
    slow=True,
)
def reaches_the_best_pair() -> Evidence:
    return _makespan("nothing")


@ablation(reaches_the_best_pair, "the credit of plain PPO: trace decay 0.95, one schedule of each of 256 instances")
def plain_credit() -> Evidence:
    return _makespan("comparison", SEEDS[:1])


@ablation(reaches_the_best_pair, "trace decay 0.95")
def short_traces() -> Evidence:
    return _makespan("long traces", SEEDS[:1])


def _sum(objective: str) -> Evidence:
    value, rules = _learned("nothing", objective, SEEDS[0])["flow"]
    first = float(rules[RULE_PAIRS.index("FIFO-FAST")].mean())
    measured = {"policy": round(value, 1), "FIFO-FAST": round(first, 1), "best pair": round(float(rules.mean(1).min()), 1)}
    return Evidence(measured, "at least 5% below FIFO-FAST", value < 0.95 * first)


@claim("with the total time in the shop as the objective the policy beats FIFO-FAST by at least 5%", slow=True)
def beats_first_come_first_served() -> Evidence:
    return _sum("sum")


@ablation(beats_first_come_first_served, "the reward of the makespan")
def with_the_other_reward() -> Evidence:
    return _sum("makespan")


def _planned(time_limit: float) -> Evidence:
    """4 jobs that are all there at 0, ten instances of either kind."""
    measured: dict[str, Any] = {}
    for kind in KINDS:
        instances = ShopSetting(kind, jobs=4).draw(range(10))
        instances = instances._replace(arrival=np.zeros_like(instances.arrival))
        best = run_rules(instances).makespan.reshape(len(RULE_PAIRS), -1).min(0)
        planned = np.array([at_milp(instances, i, time_limit).makespan for i in range(10)])
        measured[kind] = {
            "mean": float(planned.mean()), "best pair of each": float(best.mean()), "above it": int((planned > best + 1e-9).sum()),
        }  # fmt: skip
    return Evidence(measured, "never above the best rule pair of the instance", all(m["above it"] == 0 for m in measured.values()))


@claim("AT-MILP with all of 4 jobs there from the start is never longer than any pair of rules")
def program_is_optimal() -> Evidence:
    return _planned(5.0)


@ablation(program_is_optimal, "no time for the program: its greedy start")
def program_without_time() -> Evidence:
    return _planned(1e-9)
