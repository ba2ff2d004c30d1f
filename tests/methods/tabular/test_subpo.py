import itertools
import math

import pytest
import torch

from anypo import api
from anypo.domains.tabular.paths import TASKS, coverage_grid, grid_moves, information_grid, items_grid, sets_bandit
from anypo.domains.tabular.set_functions import SetFunction, curvature, prefix_values
from anypo.domains.tabular.tasks import EpisodicLosses
from anypo.loops.on_policy import step, train
from anypo.methods.tabular.subpo import (
    METHOD,
    VARIANTS,
    GainsToGo,
    advantages,
    exact_gradient,
    marginals,
    objective,
    policy_loss,
    score_loss,
    set_value,
)
from anypo.run import Run

FUNCTIONS = [m(seed=3).set_function for m in (coverage_grid, items_grid, information_grid)]


def small(method=METHOD, size=20):
    return method.set("select.group_size", size)


def run_of(task, method, steps, out=None, seed=0):
    run = Run(method, task.policy(), task, steps=steps, seed=seed, out=out, checkpoint_every=2)
    if out is not None:
        run.resume()
    return train(run)


def some_paths(rows=30, length=9, seed=0):
    return torch.randint(64, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.kind)
def test_gains_telescope_and_are_those_of_sets(function):
    path = some_paths()
    found = function.gains(path)
    torch.testing.assert_close(found.first + found.gains.sum(1), function.value(path))
    order = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(function.value(path[:, order]), function.value(path))
    torch.testing.assert_close(function.value(torch.cat([path, path], 1)), function.value(path))
    assert (found.gains > -1e-12).all()


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.kind)
def test_gains_diminish_on_nested_sets(function):
    path, new = some_paths(200, 8), some_paths(200, 1, seed=9)
    early, late = (function.value(torch.cat([p, new], 1)) - function.value(p) for p in (path[:, :3], path))
    assert (late <= early + 1e-9).all()
    assert (late < early - 1e-6).any()


def test_a_state_visited_again_gains_nothing_unless_visits_add_up():
    path = torch.tensor([[7, 7, 9, 7]])
    for function in FUNCTIONS:
        assert function.gains(path).gains[0, [0, 2]].abs().max() < 1e-12
        modular = function.modular().gains(path)
        torch.testing.assert_close(modular.gains[0, 0], modular.first[0])
        assert function.modular().modular() == function.modular()


def test_information_is_half_the_log_determinant():
    function = FUNCTIONS[2]
    path = torch.tensor([[5, 6, 5, 40]])
    k = function.what["kernel"][[5, 6, 40]][:, [5, 6, 40]]
    torch.testing.assert_close(function.value(path)[0], 0.5 * torch.logdet(torch.eye(3).double() + k / function.what["noise"]))
    noisy = prefix_values(some_paths(), "information", kernel=function.what["kernel"], noise=1e7)
    torch.testing.assert_close(noisy[:, 0], torch.full((30,), 0.5e-7).double(), rtol=1e-4, atol=0)
    assert noisy[:, -1].max() <= 9 * 0.5e-7


def test_a_large_cap_counts_distinct_items():
    path = some_paths()
    found = set_value(path, "items", groups=[list(range(20)), list(range(30, 50))], cap=torch.tensor([99, 99]), count=64)
    wanted = [len({s for s in row if s < 20 or 30 <= s < 50}) for row in path.tolist()]
    assert found.tolist() == wanted


def test_curvature_of_modular_and_of_redundant_coverage():
    weight = torch.ones(3).double()
    assert curvature(SetFunction("coverage", {"cover": torch.eye(3).double(), "weight": weight}), 3) == pytest.approx(0)
    assert curvature(SetFunction("coverage", {"cover": torch.ones(3, 3).double(), "weight": weight}), 3) == pytest.approx(1)


def test_disjoint_states_make_it_reinforce_with_state_rewards():
    path, weight = torch.tensor([[0, 1, 2, 3], [3, 2, 0, 1]]), torch.rand(4, generator=torch.Generator().manual_seed(0)).double()
    found = marginals(path, "coverage", cover=torch.eye(4).double(), weight=weight)
    torch.testing.assert_close(found.gains, weight[path[:, 1:]])


def test_two_states_are_a_bandit():
    gains = marginals(
        torch.tensor([[0, 1], [0, 2]]), "coverage", cover=torch.eye(3).double(), weight=torch.tensor([1.0, 2.0, 4.0]).double()
    ).gains
    torch.testing.assert_close(policy_loss(gains, torch.zeros(2, 1).double(), "none").advantages[:, 0], torch.tensor([2.0, 4.0]).double())


def test_the_gradient_is_that_of_the_expected_value():
    generator = torch.Generator().manual_seed(2)
    theta = torch.randn(2, 4, 5, generator=generator, dtype=torch.float64)
    cover, weight = (torch.rand(4, 6, generator=generator) < 0.5).double(), torch.rand(6, generator=generator, dtype=torch.float64)
    function = SetFunction("coverage", {"cover": cover, "weight": weight})
    leaf = theta.clone().requires_grad_()
    wanted = torch.autograd.grad(objective(leaf, grid_moves(2), 0, function), leaf)[0]
    torch.testing.assert_close(exact_gradient(theta, grid_moves(2), 0, cover, weight), wanted)


def test_no_gradient_through_advantages_and_nothing_from_padding():
    logp = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
    advantage = (logp * 2).detach().requires_grad_()
    mask = torch.ones(3, 4).bool()
    mask[1, 2:] = False
    mask[2] = False
    padded = torch.where(mask, logp, torch.full_like(logp, -math.inf))
    loss = score_loss(padded, torch.where(mask, advantage, torch.full_like(advantage, math.nan)), mask)
    found = torch.autograd.grad(loss, [logp, advantage], allow_unused=True)
    assert found[1] is None
    assert torch.isfinite(loss)
    assert torch.isfinite(found[0]).all() and (found[0][~mask] == 0).all()


def test_the_baseline_compares_paths_of_one_group():
    gains, group = torch.rand(6, 3, generator=torch.Generator().manual_seed(0)).double(), torch.tensor([0, 1, 0, 1, 1, 2])
    found = advantages(gains, group)
    for g in range(3):
        torch.testing.assert_close(found[group == g].mean(0), torch.zeros(3).double())
    assert GainsToGo().compares_group and not GainsToGo("none").compares_group
    with pytest.raises(ValueError, match="mean or none"):
        advantages(gains, group, "median")


def test_an_action_earns_the_state_it_leads_to():
    task = sets_bandit()
    run = Run(small().set("credit.baseline", "none"), task.policy(), task, steps=1)
    batch = step(run)
    path = batch.signals["path"]
    assert torch.equal(path[:, 1:], batch.action) and torch.equal(path[:, :-1], batch.context)
    torch.testing.assert_close(batch.reward[:, 0], task.set_function.what["cover"].sum(1)[batch.action[:, 0]])
    torch.testing.assert_close(batch.advantage[:, 0], task.set_function.value(path))


def test_the_policies_agree_with_what_they_wrote():
    for task in (coverage_grid(size=6, length=6, hidden=8), coverage_grid(size=6, length=6, hidden=8, history=True), sets_bandit()):
        policy = task.policy()
        batch = task.sample(policy, torch.zeros(10, dtype=torch.int64), torch.Generator().manual_seed(0))
        found = policy.observe(batch, {"logp", "entropy"})
        torch.testing.assert_close(found.logp, batch.logp)
        torch.testing.assert_close(found.entropy, batch.signals["old_entropy"])


@pytest.mark.parametrize("name", sorted(TASKS))
def test_it_trains_and_resumes_to_the_same_numbers(name, tmp_path):
    whole = run_of(TASKS[name](), small(), 4, tmp_path / "whole")
    run_of(TASKS[name](), small(), 2, tmp_path / "halves")
    halves = run_of(TASKS[name](), small(), 4, tmp_path / "halves")
    assert [r["set_value"] for r in whole.history] == [r["set_value"] for r in halves.history]
    for mine, other in zip(whole.policy.parameters(), halves.policy.parameters(), strict=True):
        assert torch.equal(mine, other)
    assert all(math.isfinite(r["loss"]) for r in whole.history)


def test_history_and_the_modular_variant_train():
    task = coverage_grid(size=6, length=6, hidden=8, history=True)
    assert all(math.isfinite(r["loss"]) for r in run_of(task, small(VARIANTS["modular"]), 3).history)


def test_greedy_brute_force_agrees_with_the_function():
    task = sets_bandit(sets=5, picks=2)
    cover = task.set_function.what["cover"]
    for a, b in itertools.combinations(range(5), 2):
        assert float(task.set_function.value(torch.tensor([[5, a, b]]))) == float(((cover[a] + cover[b]) > 0).sum())


def test_what_it_cannot_learn_from_is_refused():
    problem = EpisodicLosses(copies=2)
    with pytest.raises(ValueError, match="set function"):
        train(Run(small(size=2), problem.policy(), problem, steps=1))
    with pytest.raises(ValueError, match="unknown set function"):
        set_value(torch.zeros(1, 1).long(), "cost")
    with pytest.raises(ValueError, match="history"):
        sets_bandit().policy().__class__(torch.zeros(2, 1), 2, 2, hidden=None, history=True)
    with pytest.raises(ValueError, match="at least 2"):
        coverage_grid(length=1)


def test_it_trains_by_name(tmp_path):
    result = api.train(METHOD, task="sets_bandit", steps=3, out=tmp_path / "run", settings={"select.group_size": 10}, picks=3)
    found = api.evaluate(str(tmp_path / "run"), picks=3)
    assert found["return"]["value"] == pytest.approx(result.after["return"])
    assert found["return"]["low"] < found["return"]["value"] < found["return"]["high"]
    with pytest.raises(ValueError, match="another size"):
        api.evaluate(str(tmp_path / "run"))
    with pytest.raises(ValueError, match="no option 'rows'"):
        api.train(METHOD, steps=1, rows=3)
