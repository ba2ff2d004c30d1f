"""Claims of dispatching in a blocking shop: the simulator keeps its rules, swaps prevent deadlock, the policy is as good as the best rule."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anypo.claims import Evidence, ablation, claim
from anypo.domains.combinatorial.blocking_policy import BlockingPolicy
from anypo.domains.combinatorial.blocking_shop import RULES, BlockingShop, Instance, run_by
from anypo.domains.combinatorial.blocking_tasks import BlockingSetting, BlockingTask, random_makespans, rule_makespans
from anypo.method import Method
from anypo.methods.combinatorial.isbjssp import METHOD
from anypo.reproductions.common import ShuffledCredit, train_on

SETTING = BlockingSetting()


def violations(done: BlockingShop) -> dict[str, int]:
    """What a schedule breaks: machines with two jobs, work that is not done in slots in which the machine is up, moves from or to a machine that is
    down, jobs that do not finish."""
    found = dict.fromkeys(("two jobs on a machine", "work", "moves while down", "unfinished"), 0)
    held: list[list[tuple[int, int]]] = [[] for _ in range(done.machines)]
    for j, route in enumerate(done.machine):
        if done.completion[j] < 0:
            found["unfinished"] += 1
            continue
        ends = [*done.start[j][1:], done.completion[j]]
        for o, (m, begin, end) in enumerate(zip(route, done.start[j], ends, strict=True)):
            held[m].append((begin, end))
            up = [t not in done.down_slots[m] for t in range(begin, end)]
            last = o + 1 == len(route)
            found["work"] += sum(up) < done.duration[j][o] or (last and (sum(up) > done.duration[j][o] or not up[-1]))
            found["moves while down"] += begin in done.down_slots[m] or (not last and end in done.down_slots[m])
    for spans in held:
        spans.sort()
        found["two jobs on a machine"] += sum(a[1] > b[0] for a, b in zip(spans[:-1], spans[1:], strict=True))
    return found


def _random_episodes(swap: bool) -> Evidence:
    rng = np.random.default_rng(0)
    total: dict[str, int] = {}
    for _ in range(200):
        jobs, machines = rng.integers(4, 7, size=2)
        instance = SETTING.shop(rng, int(jobs), int(machines), 0.1)
        done = run_by(instance, lambda shop, found: int(rng.choice(found)), swap)
        total = {name: total.get(name, 0) + count for name, count in violations(done).items()}
    return Evidence(total, "nothing broken in 200 random episodes", not any(total.values()))


@claim("one job a machine, work only in slots in which the machine is up, moves only between machines that are up, and every job finishes")
def simulator_keeps_its_rules() -> Evidence:
    return _random_episodes(True)


@ablation(simulator_keeps_its_rules, "blocked jobs may not swap")
def simulator_without_swaps() -> Evidence:
    return _random_episodes(False)


def _two_jobs(swap: bool) -> Evidence:
    done = run_by(Instance([[0, 1], [1, 0]], [[3, 5], [4, 2]], []), lambda shop, found: found[0], swap)
    measured = {"completion": done.completion, "deadlock": done.deadlock}
    return Evidence(measured, "both jobs swap at 4 and end at 9 and 6", done.completion == [9, 6] and not done.deadlock)


@claim("two jobs that go to each other's machine finish, by a swap")
def two_jobs_swap() -> Evidence:
    return _two_jobs(True)


@ablation(two_jobs_swap, "blocked jobs may not swap")
def two_jobs_block() -> Evidence:
    return _two_jobs(False)


STEPS, SEEDS = 15, (0, 1, 2)
TEST = 9_000_000  # seeds of the test instances; settings were chosen on others, with training seeds from 100 on
COUNT = 200


@cache
def trained(shuffled: bool, seed: int) -> BlockingPolicy:
    """A policy after a few steps of 16 instances, each scheduled 6 times."""
    method: Method = METHOD.but(credit=ShuffledCredit(METHOD.credit)) if shuffled else METHOD
    policy = BlockingPolicy(seed=seed)
    train_on(method, policy, BlockingTask(SETTING, evaluation_instances=1), steps=STEPS, seed=seed, watch=lambda run, batch: None)
    return policy


@cache
def shops_of(p_down: float) -> list[Instance]:
    """The same jobs for every `p_down`; 6 jobs on 6 machines."""
    return [SETTING.shop(np.random.default_rng(TEST + i), 6, 6, p_down) for i in range(COUNT)]


@cache
def baselines(p_down: float) -> tuple[NDArray, float]:
    """Mean makespan of every rule, and of choosing at random (three times each instance)."""
    shops = shops_of(p_down)
    return rule_makespans(shops).mean(1), float(np.mean([random_makespans(shops, k).mean() for k in range(3)]))


def _competitive(shuffled: bool, p_down: float, below_chance: float) -> tuple[dict[str, Any], bool]:
    """Every seed against all rules and the best of them, the mean over seeds against chance."""
    rules, chance = baselines(p_down)
    task = BlockingTask(SETTING, evaluation_instances=1)
    found = [float(task.makespans(trained(shuffled, seed), shops_of(p_down)).mean()) for seed in SEEDS]
    best = float(rules.min())
    measured = {
        "policy": [round(x, 2) for x in found],
        f"best rule ({RULES[int(rules.argmin())]})": round(best, 2),
        "mean of rules": round(float(rules.mean()), 2),
        "random": round(chance, 2),
    }
    level = max(found) <= min(float(rules.mean()), 1.01 * best)
    return measured, level and float(np.mean(found)) <= (1 - below_chance) * chance


def _at_the_trained_chance(shuffled: bool) -> Evidence:
    measured, holds = _competitive(shuffled, 0.05, 0.025)
    return Evidence(measured, "every seed at most 1% above the best rule; their mean at least 2.5% below random choice", holds)


# The digest asks for 3% above the best rule and 2% below random choice. A network that learned nothing, taken at its likeliest, is a rule too and comes
# near that; on the seeds by which settings were chosen the trained policy was level with the best rule and 4% below random choice.
@claim("after 15 steps the policy schedules as well as the best priority rule, and better than chance", slow=True)
def policy_is_competitive() -> Evidence:
    return _at_the_trained_chance(False)


@ablation(policy_is_competitive, "advantages go to the wrong schedules")
def policy_without_credit() -> Evidence:
    return _at_the_trained_chance(True)


def _at_other_chances(shuffled: bool) -> Evidence:
    found = {p: _competitive(shuffled, p, 0.0) for p in (0.0, 0.1)}
    measured = {f"p_down {p}": numbers for p, (numbers, _) in found.items()}
    expected = "for both, every seed at most 1% above the best rule and at most the mean of the rules; their mean below random choice"
    return Evidence(measured, expected, all(holds for _, holds in found.values()))


@claim("it stays as good as the best rule when machines never fail, and when they fail twice as often as in training", slow=True)
def policy_holds_under_other_chances() -> Evidence:
    return _at_other_chances(False)


@ablation(policy_holds_under_other_chances, "advantages go to the wrong schedules")
def policy_without_credit_under_other_chances() -> Evidence:
    return _at_other_chances(True)


def _growth(interrupted: bool) -> Evidence:
    task = BlockingTask(SETTING, evaluation_instances=1)
    columns = []
    for p_down in (0.0, 0.02, 0.05, 0.1):
        shops = shops_of(p_down)[:100]
        shops = shops if interrupted else [shop._replace(shutdown=[]) for shop in shops]
        columns.append([*rule_makespans(shops).mean(1), task.makespans(trained(False, 0), shops).mean()])
    table = np.array(columns)
    measured = {name: table[:, i].round(1).tolist() for i, name in enumerate((*RULES, "policy"))}
    return Evidence(
        measured, "every policy's mean makespan grows from p_down 0 to 0.02, 0.05 and 0.1", bool((np.diff(table, axis=0) > 0).all())
    )


@claim("the mean makespan of every rule and of the policy grows with the chance of a shutdown", slow=True)
def makespan_grows_with_shutdowns() -> Evidence:
    return _growth(True)


@ablation(makespan_grows_with_shutdowns, "machines never fail")
def makespan_without_shutdowns() -> Evidence:
    return _growth(False)
