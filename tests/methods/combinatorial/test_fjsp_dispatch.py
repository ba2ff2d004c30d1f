"""fjsp_dispatch: what it reduces to, its credit, and training."""

import heapq

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anypo.domains.combinatorial.setup import build
from anypo.loops.on_policy import step
from anypo.methods.combinatorial.fjsp_dispatch import METHOD, SameInstanceGAE, hindsight, rewards, simulate, without_luck
from anypo.run import Run
from anypo.seams.credit import GAE, whiten
from tests.helpers import assert_continues

SHOP = {"jobs": 4, "instances": 4, "evaluation_instances": 3, "hidden": 8}


def one_operation(times, arrival=None):
    """Jobs of one operation: times [J,M]."""
    proc = torch.as_tensor(times, dtype=torch.float64)[:, None, :]
    arrival = torch.zeros(len(proc), dtype=torch.float64) if arrival is None else torch.as_tensor(arrival, dtype=torch.float64)
    return proc, torch.ones(len(proc), dtype=torch.int64), arrival


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8))
@settings(max_examples=30, deadline=None)
def test_on_one_machine_the_shortest_first_is_optimal_for_the_sum(times):
    found = simulate(*one_operation([[t] for t in times]), torch.tensor([2]))
    assert found.flow == sum(np.cumsum(sorted(times)))
    assert found.makespan == sum(times)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_identical_machines_and_one_operation_are_list_scheduling(times, machines):
    arrival = list(range(len(times)))
    found = simulate(*one_operation([[t] * machines for t in times], arrival), torch.tensor([0]))
    free = [0.0] * machines
    expected = []
    for ready, time in zip(arrival, times, strict=True):  # in order of arrival, on the machine that is free first
        end = max(heapq.heappop(free), ready) + time
        heapq.heappush(free, end)
        expected.append(end)
    assert found.completion.tolist() == expected


@pytest.mark.parametrize("action", range(10))
def test_a_lone_job_ends_after_its_chosen_times(action):
    g = torch.Generator().manual_seed(action)
    proc = torch.randint(1, 9, (1, 4, 3), generator=g).double()
    found = simulate(proc, torch.tensor([4]), torch.tensor([2.5]).double(), torch.tensor([action]))
    chosen = proc[0].gather(1, found.machine[0][:, None]).sum()
    assert found.makespan == 2.5 + float(chosen) and found.n_decisions == 4
    if action % 2 == 0:
        assert float(chosen) == float(proc[0].min(1).values.sum())


def test_rewards_telescope_and_refuse_other_objectives():
    problem = one_operation(torch.randint(1, 9, (6, 2), generator=torch.Generator().manual_seed(0)), [0, 0, 1, 5, 5, 9])
    done = simulate(*problem, torch.tensor([3, 1]))
    assert rewards(*problem, torch.tensor([3, 1])).total == -done.makespan
    assert rewards(*problem, torch.tensor([3, 1]), "sum").total == -done.flow
    with pytest.raises(ValueError, match="unknown objective"):
        rewards(*problem, torch.tensor([0]), "late")


def test_hindsight_chooses_one_rule_for_all():
    assert hindsight(torch.tensor([[4.0, 1.0], [2.0, 2.0]])) == (1, 2.0)


def test_the_luck_of_an_instance_is_taken_off():
    advantages = torch.tensor([[1.0, 5.0], [3.0, 1.0], [10.0, 10.0], [7.0, 2.0]])
    found = without_luck(advantages, torch.tensor([0, 0, 1, 2]))
    assert found.tolist() == [[-2.0, 4.0], [2.0, -4.0], [10.0, 10.0], [7.0, 2.0]]
    shifted = advantages + torch.tensor([50.0, 50.0, 0.0, 0.0])[:, None]
    torch.testing.assert_close(without_luck(shifted, torch.tensor([0, 0, 1, 2])), found)


def collected(group_size):
    policy, task = build("shop:heterogeneous", None, **SHOP)
    run = Run(METHOD.set("select.group_size", group_size), policy, task, steps=1)
    batch = run.collect(run.method.select(task, run))
    run.prepare_signals(batch, {"old_value"})
    batch.reward = task.score(batch, run)
    return batch, run


def test_one_schedule_an_instance_is_ppos_credit():
    batch, run = collected(1)
    torch.testing.assert_close(SameInstanceGAE(0.9, 0.8)(batch, run), GAE(0.9, 0.8)(batch, run))


def test_undiscounted_credit_is_what_is_left_less_the_value():
    batch, run = collected(2)
    left = batch.reward.flip(1).cumsum(1).flip(1)
    residual = left - batch.signals["old_value"]
    others = residual.view(-1, 2, batch.horizon).flip(1).reshape(residual.shape)
    torch.testing.assert_close(SameInstanceGAE()(batch, run), whiten(residual - others, batch.mask), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(batch.signals["returns"], left, atol=1e-4, rtol=1e-4)
    assert not SameInstanceGAE()(batch, run).requires_grad


def test_the_batch_is_an_episode_in_units_of_p():
    batch, run = collected(2)
    task = run.task
    done_by = batch.reward.sum(1) * task.scale
    instances = task.setting.draw([int(i) for i in batch.signals["prompt_id"][::2]])
    assert batch.context.shape == (8, 12, 12) and (done_by < 0).all() and len(instances.proc) == 4


def test_it_trains_and_resumes_to_the_same_numbers(tmp_path):
    def run_to(out, upto):
        policy, task = build("shop:homogeneous", None, needs=METHOD.needs(), **SHOP)
        run = Run(METHOD, policy, task, steps=4, out=out, checkpoint_every=2)
        run.resume()
        while run.step < upto:
            step(run)
        return run

    assert_continues(run_to, tmp_path)
