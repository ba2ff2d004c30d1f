"""TS-DDR: what it reduces to, the programs and their multipliers, the penalty's phases, training and resuming."""

import numpy as np
import pytest
import torch

from anypo.domains.combinatorial.hydro import SETTINGS, HydroSetting, follow_plan, plan_on_grid, residual, roll_out, solve
from anypo.domains.combinatorial.hydro_cuts import plan_by_cuts
from anypo.domains.combinatorial.hydro_tasks import HydroPolicy, HydroTask
from anypo.domains.combinatorial.setup import build
from anypo.loops.on_policy import step, train
from anypo.methods.combinatorial.ts_ddr import METHOD, dual_loss, feasible_dual, penalty, policy_gradient, score_function, stage
from anypo.run import Run
from tests.helpers import assert_continues

NUMBERS = {"D": 10.0, "u_max": 8.0, "x_max": 30.0, "c1": 20.0, "g1": 5.0, "c2": 200.0, "C_d": 1000.0}
SMALL = {"months": 3, "paths": 4, "test_paths": 3, "hidden": 4}
SCORE = METHOD.set("objective.alpha", 0.3).set("select.prompts", 2).set("select.group_size", 3)


def small(name="one_reservoir", **options):
    return build(f"hydro:{name}", None, **(SMALL | options))


@pytest.mark.parametrize(("target", "price"), [(13.0, 20.0), (17.5, 200.0), (10.5, 0.0)])
def test_one_month_is_the_price_of_a_unit_less_to_release(target, price):
    found = stage(15.0, 4.0, target, **NUMBERS)
    exact = feasible_dual(15.0, torch.tensor([4.0]), torch.tensor([target]), **NUMBERS)
    assert found.x == pytest.approx(target) and found.dual == pytest.approx(price) and found.cost == pytest.approx(exact.cost)
    assert exact.dual.tolist() == [price]


def test_without_a_penalty_targets_are_ignored():
    setting = SETTINGS["cascade"]
    inflow = setting.draw([1, 2])
    found = [solve(setting, np.full((2, 3), 5.0), inflow, np.full(inflow.shape, x), 0.0) for x in (0.0, 9.0)]
    np.testing.assert_allclose(found[0].cost, found[1].cost)
    assert np.abs(found[0].dual).max() == 0
    free = solve(setting, np.full((2, 3), 5.0), inflow, found[0].level, setting.penalty)  # the optimum itself as targets
    np.testing.assert_allclose(free.cost, found[0].cost)


def test_paths_of_one_program_do_not_touch():
    setting = SETTINGS["cascade"]
    inflow = setting.draw([1, 2, 3])
    target = np.random.default_rng(0).uniform(0, 10, inflow.shape)
    start = np.full((3, 3), 5.0)
    together = solve(setting, start, inflow, target, 1000.0)
    alone = [solve(setting, start[:1], inflow[i : i + 1], target[i : i + 1], 1000.0) for i in range(3)]
    np.testing.assert_allclose(together.cost, [x.cost[0] for x in alone])


def test_multipliers_of_a_cascade_are_slopes():
    setting = HydroSetting("cascade", reservoirs=3, months=3, turbine=8 / 3, capacity=10.0, start=5.0)
    inflow = setting.draw([4])
    target = np.random.default_rng(1).uniform(1, 9, inflow.shape)
    shifts = np.concatenate([np.zeros((1, 9)), 1e-4 * np.eye(9), -1e-4 * np.eye(9)]).reshape(19, 3, 3)
    done = solve(setting, np.full((19, 3), 5.0), np.repeat(inflow, 19, 0), target + shifts, 1000.0)
    np.testing.assert_allclose(done.dual[0].ravel(), (done.cost[1:10] - done.cost[10:]) / 2e-4, atol=1e-3)


@pytest.mark.parametrize("name", SETTINGS)
def test_wild_targets_are_executed_feasibly(name):
    setting = SETTINGS[name]
    inflow = setting.draw(list(range(8)))
    target = np.random.default_rng(0).uniform(-20, 60, inflow.shape)
    done = roll_out(setting, inflow, target)
    assert residual(setting, inflow, done) < 1e-6
    wrong = done._replace(level=done.level + 0.1)
    assert residual(setting, inflow, wrong) > 0.05


def test_the_surrogate_of_an_affine_rule_has_its_gradient():
    g = torch.Generator().manual_seed(0)
    dual, inflow = (torch.randn(5, 4, generator=g, dtype=torch.float64) for _ in range(2))
    a, b = (torch.zeros(4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    found = torch.autograd.grad(dual_loss(dual[..., None], (a + b * inflow)[..., None]), (a, b))
    torch.testing.assert_close(found, tuple(policy_gradient(dual, inflow)))


def test_the_multipliers_carry_no_gradient():
    dual, target = (torch.ones(2, 3, 1, requires_grad=True) for _ in range(2))
    dual_loss(dual, target).backward()
    assert dual.grad is None and torch.equal(target.grad, torch.full((2, 3, 1), 0.5))


def test_the_score_function_ignores_a_constant_cost():
    noise = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    assert score_function(torch.full((4,), 7.0), noise, torch.ones(3), 0.5).gradient.abs().max() == 0


def test_score_objective_is_the_score_function_of_each_path():
    policy, task = small(sigma=1.5)
    method = SCORE.set("objective.alpha", 0.0)
    run = Run(method, policy, task, steps=1)
    batch = run.collect(method.select(task, run))
    target = policy.evaluate(batch, {"target"})
    loss = float(run.loss_fn(batch, target).value.detach())
    parts = []
    for group in (0, 1):
        rows = batch.group == group
        noise, mean = batch.signals["noise"][rows].flatten(1), target.target.detach()[rows][0].flatten()
        parts.append(float(score_function(batch.signals["cost"][rows], noise, mean, 1.5).loss))
    assert loss == pytest.approx(sum(parts) / 2, rel=1e-4)


def test_phases_of_the_penalty():
    assert [penalty(i, 8) for i in range(8)] == [0.1, 0.1, 1.0, 1.0, 10.0, 10.0, 30.0, 30.0]
    assert penalty(3, 3) == 30.0 and penalty(0, 0) == 0.1


@pytest.mark.parametrize("body", ["lstm", "affine"])
def test_targets_do_not_see_later_inflows(body):
    policy = HydroPolicy(SETTINGS["cascade"], body)
    inflow = torch.rand(2, 12, 3, generator=torch.Generator().manual_seed(0)) * 4
    later = inflow.clone()
    later[:, 7:] += 1
    assert torch.equal(policy.targets(inflow)[:, :7], policy.targets(later)[:, :7])


def test_inflows_have_the_seasons_mean_and_the_months_correlation():
    for setting in SETTINGS.values():
        inflow = setting.draw(list(range(4000)))
        np.testing.assert_allclose(inflow.mean((0, 2)), setting.season(), rtol=0.03)
        noise = np.log(inflow / setting.season()[:, None])[..., 0]
        assert np.corrcoef(noise[:, 4], noise[:, 5])[0, 1] == pytest.approx(setting.correlation, abs=0.05)


def test_plans_are_no_worse_than_releasing_all_water():
    task = HydroTask(test_paths=32)
    release = roll_out(task.setting, task.test_inflow, np.zeros_like(task.test_inflow)).thermal_cost.mean()
    assert task.best < release
    with pytest.raises(ValueError, match="one reservoir"):
        plan_on_grid(SETTINGS["cascade"])


def test_hindsight_is_below_any_plan():
    setting = SETTINGS["one_reservoir"]
    inflow = setting.draw(list(range(10)))
    best = solve(setting, np.full((10, 1), setting.start), inflow, np.zeros_like(inflow), 0.0).thermal_cost
    assert (follow_plan(setting, plan_on_grid(setting), inflow) >= best - 1e-6).all()


def test_lower_bounds_of_the_cuts_rise_to_the_grid_plan():
    setting = HydroSetting(months=3, start=4.0)
    bound = plan_by_cuts(setting, 12).bound
    assert all(b >= a - 1e-6 for a, b in zip(bound[:-1], bound[1:], strict=True))
    plan = plan_on_grid(setting)
    assert bound[-1] == pytest.approx(np.interp(setting.start, plan.grid, plan.value[0]), rel=0.01)


def test_bad_settings_are_refused():
    for options in ({"policy": "tree"}, {"paths": 0}, {"sigma": -1.0}, {"speed": 1}):
        with pytest.raises(ValueError):
            small(**options)
    with pytest.raises(ValueError, match="cascade"):
        small("lake")
    policy, task = small()
    with pytest.raises(ValueError, match="sigma"):
        step(Run(METHOD.set("objective.alpha", 0.5), policy, task, steps=1))


@pytest.mark.parametrize(("method", "options"), [(METHOD, {}), (METHOD, {"policy": "affine"}), (SCORE, {"sigma": 1.0})])
def test_four_steps_are_two_and_two_more(method, options, tmp_path):
    def run_to(out, upto):
        policy, task = small("cascade", **options)
        run = Run(method, policy, task, steps=upto, out=out, checkpoint_every=2)
        run.resume()
        return train(run)

    method = method.but(rollout=FixedPhase())  # phases depend on the run's length
    assert_continues(run_to, tmp_path, "cost")


class FixedPhase:
    def __call__(self, prompts, run):
        return run.collect(prompts)


def test_a_saved_rule_costs_the_same(tmp_path):
    policy, task = small("cascade")
    train(Run(METHOD, policy, task, steps=1))
    policy.save_pretrained(tmp_path)
    again, _ = build("hydro:cascade", str(tmp_path), **SMALL)
    assert torch.equal(task.costs(policy), task.costs(again))
    with pytest.raises(ValueError, match="3 months of cascade"):
        build("hydro:cascade", str(tmp_path), months=4)
