"""The shop simulator against one that walks through single events, and the properties of every schedule."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anypo.domains.combinatorial.shop import JOB_RULES, RULE_PAIRS, Instances, Shop, interval_rewards, run_rules, run_shop
from anypo.domains.combinatorial.shop_instances import KINDS, ShopSetting
from anypo.domains.combinatorial.shop_milp import at_milp


def random_instances(seed, count=4, jobs=5, operations=3, machines=3):
    """Small whole times and arrivals, so that events coincide and rules tie; jobs of unequal length."""
    rng = np.random.default_rng(seed)
    proc = rng.integers(1, 5, size=(count, jobs, operations, machines)) * (rng.random((count, jobs, operations, machines)) < 0.6)
    forced = rng.integers(machines, size=(count, jobs, operations))
    np.put_along_axis(proc, forced[..., None], rng.integers(1, 5, size=(count, jobs, operations, 1)), axis=3)
    n_ops = rng.integers(1, operations + 1, size=(count, jobs))
    proc = proc * (np.arange(operations) < n_ops[..., None])[..., None]
    return Instances(proc.astype(float), n_ops, rng.integers(0, 8, size=(count, jobs)).astype(float))


def mean_time(times):
    return np.mean([t for t in times if t > 0])


def by_events(instances, index, actions):
    """One shop, event by event, in plain Python: (start [J][O], machine [J][O], completion [J], decision times)."""
    proc, n_ops, arrival = (x[index] for x in instances)
    jobs, machines = len(n_ops), proc.shape[2]
    start, used = -np.ones(proc.shape[:2]), -np.ones(proc.shape[:2], dtype=int)
    following, running, busy_until = [0] * jobs, [0.0] * jobs, [0.0] * machines
    given, times = [0.0] * machines, []
    while True:
        here = times[-1] if times else min(arrival)
        pending = sorted(t for t in {here, *arrival, *busy_until} if t >= here)
        time = next((t for t in pending if _candidates(proc, n_ops, arrival, following, running, busy_until, t)), None)
        if time is None:
            return start, used, running, times
        candidates = _candidates(proc, n_ops, arrival, following, running, busy_until, time)
        action = actions[len(times) % len(actions)]
        work = {j: round(sum(mean_time(proc[j, o]) for o in range(following[j], n_ops[j])), 9) for j in candidates}
        score = {
            "FIFO": {j: arrival[j] for j in candidates},
            "SPT": {j: round(mean_time(proc[j, following[j]]), 9) for j in candidates},
            "MWKR": {j: -work[j] for j in candidates},
            "LWKR": work,
            "MOR": {j: following[j] - n_ops[j] for j in candidates},
        }[JOB_RULES[action // 2]]
        j = min(candidates, key=lambda j: (score[j], j))
        o = following[j]
        idle = [m for m in range(machines) if proc[j, o, m] > 0 and busy_until[m] <= time]
        m = min(idle, key=lambda m: (proc[j, o, m] if action % 2 == 0 else given[m], m))
        start[j, o], used[j, o] = time, m
        running[j] = busy_until[m] = time + proc[j, o, m]
        given[m] += proc[j, o, m]
        following[j] += 1
        times.append(time)


def _candidates(proc, n_ops, arrival, following, running, busy_until, time):
    found = []
    for j in range(len(n_ops)):
        waits = following[j] < n_ops[j] and arrival[j] <= time and running[j] <= time
        if waits and any(p > 0 and busy_until[m] <= time for m, p in enumerate(proc[j, following[j]])):
            found.append(j)
    return found


def check_schedule(instances, done):
    """No two operations of a machine or of a job overlap, order and eligibility are kept, and no machine idles while it could work."""
    for b in range(len(done.start)):
        proc, n_ops, arrival = (x[b] for x in instances)
        spans = []
        for j in range(len(n_ops)):
            clock = arrival[j]
            for o in range(n_ops[j]):
                begin, m = done.start[b, j, o], done.machine[b, j, o]
                assert proc[j, o, m] > 0 and begin >= clock
                spans.append((m, begin, begin + proc[j, o, m], j, o, clock))
                clock = begin + proc[j, o, m]
            assert clock == done.completion[b, j]
            assert (done.start[b, j, n_ops[j] :] == -1).all() and (done.machine[b, j, n_ops[j] :] == -1).all()
        for m in range(proc.shape[2]):
            mine = sorted((begin, end) for machine, begin, end, *_ in spans if machine == m)
            assert all(a[1] <= b[0] for a, b in zip(mine[:-1], mine[1:], strict=True))
            for _, begin, _, j, o, ready in spans:
                if proc[j, o, m] > 0 and ready < begin:  # it waited: this machine had work all the while
                    covered = sum(min(e, begin) - max(s, ready) for s, e in mine if s < begin and e > ready)
                    assert covered == pytest.approx(begin - ready)


@given(st.integers(0, 10_000))
@settings(max_examples=25, deadline=None)
def test_it_is_the_event_by_event_simulation(seed):
    instances = random_instances(seed, count=2)
    actions = np.random.default_rng(seed + 1).integers(len(RULE_PAIRS), size=(2, 7))
    done = run_shop(instances, actions)
    for b in range(2):
        start, used, completion, times = by_events(instances, b, actions[b])
        assert np.array_equal(done.start[b], start) and np.array_equal(done.machine[b], used)
        assert np.array_equal(done.completion[b], completion)
        assert done.decisions[b] == len(times) and np.array_equal(done.time[b, : len(times)], times)


@given(st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_schedules_are_valid_and_rewards_add_up(seed):
    instances = random_instances(seed)
    done = run_rules(instances)
    tiled = Instances(*(np.concatenate([x] * len(RULE_PAIRS)) for x in instances))
    check_schedule(tiled, done)
    assert (done.decisions == tiled.n_ops.sum(1)).all()
    makespan, total = (interval_rewards(done, tiled.arrival, o).sum(1) for o in ("makespan", "sum"))
    np.testing.assert_allclose(makespan, tiled.arrival.min(1) - done.makespan, atol=1e-9)
    np.testing.assert_allclose(total, -done.flow(tiled.arrival), atol=1e-9)


def test_an_instance_does_not_depend_on_its_neighbours():
    instances = random_instances(0, count=3)

    def choose(state, live):
        return (state[:, 3] * 7).astype(int) % 10

    together = run_shop(instances, choose, 2.0)
    for b in range(3):
        alone = run_shop(Instances(*(x[[b]] for x in instances)), choose, 2.0)
        assert np.array_equal(together.start[b], alone.start[0])
        count = alone.decisions[0]
        assert np.array_equal(together.state[b, :count], alone.state[0]) and not together.mask[b, count:].any()
        assert (together.state[b, count:] == 0).all()


def test_jobs_that_have_not_arrived_leave_no_trace():
    instances = random_instances(3, count=1, jobs=4)
    instances.arrival[0] = [0, 0, 50, 50]
    changed = instances._replace(proc=instances.proc.copy())
    changed.proc[0, 2:] *= 3
    first, other = (run_shop(x, np.zeros((1, 1), dtype=int)) for x in (instances, changed))
    early = first.time[0] < 50
    assert early.any() and np.array_equal(first.state[0][early], other.state[0][: len(early)][early])


def test_simultaneous_events_are_all_seen_before_deciding():
    """A machine falls free and a short job arrives at the same time: the shortest of the two waiting is taken."""
    proc = np.array([[[[4.0]], [[5.0]], [[1.0]]]])
    instances = Instances(proc, np.ones((1, 3), dtype=int), np.array([[0.0, 1.0, 4.0]]))
    done = run_shop(instances, np.array([[2]]))
    assert done.start[0, :, 0].tolist() == [0.0, 5.0, 4.0]


def test_bad_problems_and_actions_are_refused():
    fine = random_instances(0, count=1)
    with pytest.raises(ValueError, match="a machine with a positive time"):
        Shop(fine._replace(proc=fine.proc * 0))
    with pytest.raises(ValueError, match="one of 10 rule pairs"):
        run_shop(fine, np.array([[10]]))
    with pytest.raises(ValueError, match="unknown objective"):
        interval_rewards(run_shop(fine, np.array([[0]])), fine.arrival, "tardiness")


@pytest.mark.parametrize("kind", KINDS)
def test_generated_instances(kind):
    setting = ShopSetting(kind, load=2.0)
    instances = setting.draw(range(400))
    positive = instances.proc[instances.proc > 0]
    eligible = (instances.proc > 0).sum(-1)
    assert positive.mean() == pytest.approx(setting.mean_time, rel=0.03)
    assert (instances.arrival[:, 0] == 0).all() and (np.diff(instances.arrival) >= 0).all()
    gap = setting.operations * setting.mean_time / (setting.load * setting.machines)
    assert np.diff(instances.arrival).mean() == pytest.approx(gap, rel=0.05)
    assert np.array_equal(setting.draw([7]).proc[0], instances.proc[7])
    if kind == "homogeneous":
        assert set(np.unique(positive)) == {3, 4, 5, 6, 7} and (eligible == 2).all()
    else:
        assert set(np.unique(eligible)) == {1, 2, 3, 4} and positive.max() == 40
    for bad in ({"kind": "odd"}, {"load": 0.0}, {"jobs": 0}):
        with pytest.raises(ValueError):
            ShopSetting(**bad)


def brute_force(instance):
    """Smallest makespan over all orders and machines, all jobs there at 0."""
    proc, n_ops = instance.proc[0], instance.n_ops[0]
    best = np.inf

    def go(following, ready, free):
        nonlocal best
        if max(ready) >= best:
            return
        if all(following[j] == n_ops[j] for j in range(len(n_ops))):
            best = max(ready)
            return
        for j in range(len(n_ops)):
            if following[j] < n_ops[j]:
                for m in np.flatnonzero(proc[j, following[j]]):
                    end = max(ready[j], free[m]) + proc[j, following[j], m]
                    go(
                        [f + (i == j) for i, f in enumerate(following)],
                        [end if i == j else r for i, r in enumerate(ready)],
                        [end if i == m else f for i, f in enumerate(free)],
                    )

    go([0] * len(n_ops), [0.0] * len(n_ops), [0.0] * proc.shape[2])
    return best


@pytest.mark.parametrize("seed", range(4))
def test_the_program_finds_the_optimum(seed):
    instance = random_instances(seed, count=1, jobs=3, operations=2)
    instance = instance._replace(arrival=np.zeros((1, 3)))
    plan = at_milp(instance)
    assert plan.optimal and plan.makespan == brute_force(instance)


def test_a_plan_with_arrivals_is_a_schedule():
    instance = random_instances(5, count=1, jobs=5)
    plan = at_milp(instance)
    proc, n_ops, arrival = (x[0] for x in instance)
    spans = []
    for j in range(5):
        clock = arrival[j]
        for o in range(n_ops[j]):
            begin, m = plan.start[j, o], plan.machine[j, o]
            assert begin >= clock and proc[j, o, m] > 0
            clock = begin + proc[j, o, m]
            spans.append((m, begin, clock))
        assert clock == plan.completion[j]
    for m in range(3):
        mine = sorted(s[1:] for s in spans if s[0] == m)
        assert all(a[1] <= b[0] for a, b in zip(mine[:-1], mine[1:], strict=True))
    assert plan.makespan == plan.completion.max()


def test_without_time_the_greedy_plan_serves():
    instance = ShopSetting("heterogeneous", jobs=5).draw([1])
    plan = at_milp(instance, time_limit=1e-9)
    assert not plan.optimal and np.isfinite(plan.makespan) and (plan.start >= 0).all()
