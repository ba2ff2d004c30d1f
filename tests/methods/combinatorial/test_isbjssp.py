"""isbjssp: what the blocking shop reduces to, the graph network, and training."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anypo.domains.combinatorial.blocking_policy import BlockingPolicy, Observer, adjacency_of, gathered
from anypo.domains.combinatorial.blocking_shop import RULES, BlockingShop, Instance, by_rule, draw_shutdowns, run_by
from anypo.domains.combinatorial.blocking_tasks import BlockingSetting, BlockingTask, play
from anypo.domains.combinatorial.setup import build
from anypo.loops.on_policy import step, train
from anypo.methods.combinatorial.isbjssp import METHOD, VARIANTS, candidates, graph, messages, simulate
from anypo.reproductions.combinatorial.isbjssp import violations
from anypo.run import Run
from tests.helpers import assert_continues

NONE = torch.zeros(0)
SMALL = {"instances": 3, "evaluation_instances": 2, "jobs": 4, "machines": 4, "hidden": 8}


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.sampled_from(RULES))
@settings(max_examples=30, deadline=None)
def test_any_order_on_one_machine_takes_the_sum(times, rule):
    found = simulate([[0]] * len(times), [[t] for t in times], NONE, rule)
    assert found.makespan == sum(times) and not found.deadlock


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=4), st.sampled_from(RULES))
@settings(max_examples=30, deadline=None)
def test_without_shared_machines_the_longest_job_decides(durations, rule):
    machines = [[10 * j + o for o in range(len(times))] for j, times in enumerate(durations)]
    assert simulate(machines, durations, NONE, rule).completion == [sum(times) for times in durations]


@given(st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_one_job_takes_its_work_and_the_pauses(seed):
    rng = np.random.default_rng(seed)
    times = rng.integers(1, 9, size=4).tolist()
    shutdown = [(int(rng.integers(4)), int(rng.integers(30)), int(rng.integers(1, 4))) for _ in range(6)]
    done = run_by(Instance([[0, 1, 2, 3]], [times], shutdown), lambda shop, found: found[0])
    time = 0
    for m, length in enumerate(times):
        blocked = {m} if m == 0 else {m - 1, m}
        while any(time in done.down_slots[x] for x in blocked):  # neither given away nor taken
            time += 1
        assert done.start[0][m] == time
        while length:
            length -= time not in done.down_slots[m]
            time += 1
    assert done.makespan == time


def test_a_shutdown_of_a_machine_that_nobody_needs_changes_nothing():
    setting = BlockingSetting(p_down=0.0)
    instance = setting.draw(3)
    other = instance._replace(shutdown=[(len(instance.machine[0]), 0, 50)])
    for rule in RULES:
        one, two = (run_by(i, lambda shop, found, rule=rule: by_rule(shop, found, rule)) for i in (instance, other))
        assert one.start == two.start


@pytest.mark.parametrize("seed", range(20))
def test_random_episodes_break_no_rule_and_finish(seed):
    rng = np.random.default_rng(seed)
    instance = BlockingSetting().shop(rng, 5, 4, 0.15)
    done = run_by(instance, lambda shop, found: int(rng.choice(found)))
    assert not any(violations(done).values())


def test_longer_cycles_swap_at_once_and_a_down_machine_holds_them():
    ring = [[0, 1], [1, 2], [2, 0]]
    assert simulate(ring, [[2, 1]] * 3, NONE, "SPT").start == [[0, 2]] * 3
    assert simulate(ring, [[2, 1]] * 3, torch.tensor([[1, 2, 3]]), "SPT").start == [[0, 5]] * 3
    assert simulate(ring, [[2, 1]] * 3, NONE, "SPT", swap=False).deadlock


def test_a_finished_operation_stays_on_a_machine_that_goes_down():
    found = simulate([[0, 1]], [[3, 2]], torch.tensor([[0, 3, 4]]), "SPT")
    assert found.start == [[0, 7]] and found.makespan == 9
    assert candidates([[0, 1]], [[3, 2]], torch.tensor([[0, 3, 4]]), "SPT", 5) == []


def test_rules_and_their_ties():
    shop = BlockingShop(Instance([[0, 1], [1, 0, 2], [2, 1]], [[3, 4], [2, 1, 1], [3, 9]], []))
    found = shop.candidates()
    assert found == [0, 1, 2]
    assert [by_rule(shop, found, rule) for rule in RULES] == [1, 0, 2, 1, 1, 0]
    with pytest.raises(ValueError, match="unknown rule"):
        by_rule(shop, found, "EDD")


@pytest.mark.parametrize("bad", [([[0, 0]], [[1, 1]]), ([[]], [[]]), ([[0]], [[0]])])
def test_impossible_jobs_are_refused(bad):
    with pytest.raises(ValueError, match="operation"):
        BlockingShop(Instance(*bad, []))


def test_shutdowns_come_at_their_rate_and_never_overlap():
    found = draw_shutdowns(np.random.default_rng(0), 2, 0.1, 5, 20_000)
    for m in range(2):
        mine = [(s, d) for machine, s, d in found if machine == m]
        assert all(a[0] + a[1] <= b[0] for a, b in zip(mine[:-1], mine[1:], strict=True))
        up = 20_000 - sum(d for _, d in mine)
        assert abs(len(mine) / up - 0.1) < 0.01
    assert draw_shutdowns(np.random.default_rng(0), 2, 0.0, 5, 100) == []


def test_the_policys_graph_is_the_disjunctive_graph():
    """Padded and batched messages, from machines and what is done, equal those along the edge lists."""
    shop = BlockingShop(BlockingSetting(p_down=0.0).draw(1))
    for _ in range(4):
        shop.move(shop.advance()[0])
    found = shop.advance()
    observer = Observer(shop, 7, 8, 5.0)
    view = observer.look(found)
    listed = graph(shop.machine, shop.duration, [shop.completed(j) for j in shop.jobs])
    nodes = [8 * j + o for j, o in listed.nodes]
    assert np.flatnonzero(view.alive).tolist() == nodes
    h = torch.randn(1, 1, 56, 3, generator=torch.Generator().manual_seed(0))
    dense = gathered(h, adjacency_of(torch.from_numpy(observer.machine)[None]), torch.from_numpy(view.alive).float()[None, None])
    expected = messages(h[0, 0, nodes], torch.tensor(listed.predecessor), torch.tensor(listed.disjunctive))
    torch.testing.assert_close(dense[0, 0, nodes], expected)
    assert [divmod(int(view.following[j]), 8) for j in found] == [(j, shop.current[j] + 1) for j in found]
    assert np.allclose(view.features[nodes, :4].sum(1), 1)


def batch_of(seed=0):
    policy, task = build("blocking:random", None, seed=seed, **SMALL)
    run = Run(METHOD, policy, task, steps=1, seed=seed)
    return run.collect([p.but(samples=2) for p in task.prompts(3, run.rng)]), run


def test_a_batch_is_whole_episodes_in_units_of_the_mean_duration():
    batch, run = batch_of()
    total = run.task.score(batch, run).sum(1) * run.task.setting.mean_time
    again = run.policy.observe(batch, {"logp", "entropy", "logits"})
    torch.testing.assert_close(batch.logp, again.logp)
    assert (total < 0).all() and (batch.terminated.sum(1) == 1).all()
    assert (batch.logp[~batch.mask] == 0).all() and torch.isfinite(again.entropy).all()
    assert (batch.signals["candidate"].sum(-1)[batch.mask] >= 2).all()
    torch.testing.assert_close(again.logits.softmax(-1)[batch.mask].sum(-1), torch.ones(int(batch.mask.sum())))


def test_rewards_telescope_to_the_makespan():
    setting = BlockingSetting()
    task = BlockingTask(setting, evaluation_instances=1)
    batch, run = batch_of()
    instances = [setting.draw(int(i)) for i in batch.signals["prompt_id"]]
    moves = iter(range(batch.horizon))

    def choose(machine, view):
        t = next(moves)
        return batch.action[batch.mask[:, t], t].numpy()

    done = play(instances, choose, setting.mean_time)
    makespan = torch.tensor([float(shop.makespan) for shop in done.shops])
    torch.testing.assert_close(task.score(batch, run).sum(1) * setting.mean_time, -makespan)


def test_names_of_jobs_mean_nothing():
    policy = BlockingPolicy(hidden=8)
    instance = BlockingSetting().draw(5)
    order = np.random.default_rng(0).permutation(len(instance.machine)).tolist()
    renamed = instance._replace(machine=[instance.machine[j] for j in order], duration=[instance.duration[j] for j in order])
    logits = []
    for shop in (BlockingShop(instance), BlockingShop(renamed)):
        observer = Observer(shop, len(order), len(instance.machine[0]), 5.0)
        view = type(observer.look([]))(*(torch.from_numpy(x)[None, None] for x in observer.look(shop.advance())))
        logits.append(policy(torch.from_numpy(observer.machine)[None], view)[0][0, 0])
    torch.testing.assert_close(logits[1], logits[0][order])


@pytest.mark.parametrize("method", [METHOD, VARIANTS["critic"]])
def test_it_trains_with_finite_numbers(method):
    policy, task = build("blocking:random", None, needs=method.needs(), **SMALL)
    before = [p.clone() for p in policy.parameters()]
    run = train(Run(method, policy, task, steps=2))
    assert all(np.isfinite(v) for r in run.history for v in r.values() if isinstance(v, float))
    assert any(not torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))


def test_it_resumes_to_the_same_numbers(tmp_path):
    def run_to(out, upto):
        policy, task = build("blocking:random", None, needs=METHOD.needs(), **SMALL)
        run = Run(METHOD, policy, task, steps=4, out=out, checkpoint_every=2)
        run.resume()
        while run.step < upto:
            step(run)
        return run

    assert_continues(run_to, tmp_path)


def test_a_saved_policy_comes_back_and_mistakes_are_named(tmp_path):
    policy, task = build("blocking:random", None, **SMALL)
    policy.save_pretrained(tmp_path)
    again, _ = build("blocking:random", str(tmp_path), **SMALL)
    assert (task.makespans(again) == task.makespans(policy)).all()
    for name, options, sentence in (
        ("blocking:odd", {}, "did you mean blocking:random"),
        ("blocking:random", {"load": 1}, "know no option 'load'"),
        ("blocking:random", {"smallest": 1}, "2 <= smallest"),
    ):
        with pytest.raises(ValueError, match=sentence):
            build(name, None, **options)
