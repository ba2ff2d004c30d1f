import math

import pytest
import torch

from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.loops.on_policy import train
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.methods.language.sgpo import (
    METHOD,
    STATE,
    SortedQueries,
    advantages,
    curriculum,
    filter_queries,
    group_size,
    plan,
    row_weights,
    signal,
)
from anypo.run import Run
from tests.helpers import assert_resumes, assert_trains, random_rows, trained

PLAIN = {"easy": 2.0, "keep_unsolved": 1.0, "g_min": 4, "g_max": 4}


def test_without_filter_and_with_one_size_the_plan_is_all_queries():
    success, u = torch.rand(9, dtype=torch.float64).round(decimals=1), torch.rand(9).double()
    found = plan(success, u, **PLAIN)
    assert sorted(found.order.tolist()) == list(range(9)) and found.sizes.tolist() == [4] * 9


def test_plain_settings_are_grpo():
    """One size, no filter, random order: from the random state after profiling on, the steps are those of GRPO on the same queries."""
    seen = []

    class Spy(SortedQueries):
        def __call__(self, task, run):
            prompts = super().__call__(task, run)
            seen.append((prompts, run.generator.get_state()))
            return prompts

    class Replayed:
        def __call__(self, task, run):
            prompts, state = seen[run.step]
            run.generator.set_state(state)
            return prompts

    mine = trained(METHOD.but(select=Spy(order="random", pool=4, **PLAIN)), 3)
    assert all(p.samples == 4 for prompts, _ in seen for p in prompts)
    theirs = trained(GRPO.but(select=Replayed(), regularize=()), 3)
    torch.testing.assert_close(mine.policy.logits, theirs.policy.logits)


def test_equal_success_keeps_the_order_and_one_size():
    success = torch.full((6,), 0.25).double()
    assert curriculum(success, torch.ones(6).long()).tolist() == list(range(6))
    assert group_size(success).tolist() == [4] * 6


def test_the_inverse_success_is_the_best_size():
    for n in (2, 3, 4, 5, 8, 16):
        chances = [signal(1 / n, g).exactly_one for g in range(1, 64)]
        assert chances[n - 1] == pytest.approx(max(chances))
        assert signal(1 / n, n).hit >= 1 - 1 / math.e


def test_unsolved_queries_are_sampled_and_trivial_ones_dropped():
    success, u = torch.tensor([0.0, 0.0, 0.5, 1.0]).double(), torch.tensor([0.2, 0.3, 0.99, 0.0]).double()
    assert filter_queries(success, u, 1.0, 0.25).tolist() == [1, 0, 1, 0]
    assert filter_queries(success, u, 1.1, 1.0).tolist() == [1, 1, 1, 1]


def test_row_weights_make_groups_count_alike():
    rows = random_rows()
    mask = rows.mask.clone()
    mask[3] = False
    factor = row_weights(mask, rows.group)
    assert factor[3] == 0
    kept = torch.arange(8) != 3
    weighed = (factor * rows.reward)[kept].mean()
    groups = torch.stack([rows.reward[kept & (rows.group == g)].mean() for g in rows.group[kept].unique()])
    torch.testing.assert_close(weighed, groups.mean())
    assert row_weights(mask, rows.group, "size").tolist() == kept.double().tolist()
    assert row_weights(rows.mask, torch.arange(8) % 2).tolist() == [1.0] * 8
    with pytest.raises(ValueError, match="equal or size"):
        row_weights(mask, rows.group, "sum")


def test_groups_without_spread_and_lone_members_have_no_advantage():
    assert not advantages(torch.ones(4).double(), torch.tensor([0, 0, 1, 2])).any()


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="group of one"):
        SortedQueries(g_min=1)
    with pytest.raises(ValueError, match="sorted or random"):
        SortedQueries(order="hard")
    with pytest.raises(ValueError, match="sgpo keeps none"):
        trained(METHOD.set("select.easy", 0.0).set("select.keep_unsolved", 0.0), 1)


def test_walks_from_easy_to_hard_and_begins_again():
    run = trained(METHOD.but(select=SortedQueries(prompts=1, pool=4, samples=4, keep_unsolved=1.0)), 6)
    state = run.state[STATE]
    assert state["position"] == 6 and state["sizes"] == sorted(state["sizes"])
    assert "profile_actions" in run.history[0] and "profile_actions" not in run.history[1]


def test_trains_and_resumes(tmp_path):
    method = METHOD.but(select=SortedQueries(prompts=2, pool=4, samples=4, keep_unsolved=1.0))
    assert_trains(method, vocabulary=2)
    assert_resumes(method, tmp_path, vocabulary=2)


def test_a_budget_of_actions_bounds_what_is_profiled() -> None:
    """Without a pool, a run without an end (all steps its budget allows) profiles a quarter of the budget, one round more at most."""
    task = TokenBandit()
    run = Run(METHOD.but(select=SortedQueries(keep_unsolved=1.0)), task.policy(), task, steps=10**9, max_actions=2000)
    train(run)
    first = run.history[0]
    assert 0 < first["profile_actions"] <= 500 + task.prompts_per_step * 8 * 2 and run.actions >= 2000 and run.finished
