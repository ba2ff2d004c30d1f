"""HDPO: what it reduces to, the pathwise objective, the weights that are kept, and training."""

import pytest
import torch

from anypo.domains.combinatorial.inventory import allocate, simulate
from anypo.domains.combinatorial.inventory_policy import InventoryPolicy
from anypo.domains.combinatorial.inventory_settings import one_store
from anypo.domains.combinatorial.setup import build
from anypo.loops.on_policy import step, train
from anypo.methods.combinatorial.hdpo import METHOD, PathwiseCost, base_stock_cost, newsvendor
from anypo.policy import Signals
from anypo.run import Run
from tests.helpers import assert_continues

SMALL = {"scenarios": 16, "batch": 8, "periods": 14, "warm_up": 8, "test_scenarios": 4, "test_periods": 20, "hidden": 8}
SHORT = METHOD.set("objective.ignore", 8).set("control.0.every", 2)


def simulated(level, demand, lead_time, underage, ignore):
    """Cost of a base-stock level by simulation and its derivative by autograd."""
    policy = InventoryPolicy(one_store(lead_time, underage), "base_stock").double()
    with torch.no_grad():
        policy.body.levels.fill_(level)
    cost = simulate(policy.setting, policy.decide, demand[..., None]).cost[:, ignore:].mean()
    return float(cost.detach()), float(torch.autograd.grad(cost, policy.body.levels)[0])


@pytest.mark.parametrize("lead_time", [1, 2, 4])
@pytest.mark.parametrize("level", [5.0, 14.3, 26.1])
def test_a_level_alone_is_infinitesimal_perturbation_analysis(lead_time, level):
    demand = 0.1 + 8 * torch.rand(5, 30, generator=torch.Generator().manual_seed(lead_time), dtype=torch.float64)
    exact = base_stock_cost(demand, level, lead_time, 1.0, 9.0, 8)
    cost, slope = simulated(level, demand, lead_time, 9.0, 8)
    assert cost == pytest.approx(float(exact.cost), rel=1e-12)
    assert slope == pytest.approx(float(exact.gradient), abs=1e-12)
    ends = [float(base_stock_cost(demand, level + d, lead_time, 1.0, 9.0, 8).cost) for d in (1e-6, -1e-6)]
    assert slope == pytest.approx((ends[0] - ends[1]) / 2e-6, abs=1e-6)


def test_the_formula_is_differentiable_in_the_level():
    demand = 8 * torch.rand(5, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    level = torch.tensor(20.0, dtype=torch.float64, requires_grad=True)
    found = base_stock_cost(demand, level, 3, 1.0, 9.0, 8)
    torch.testing.assert_close(torch.autograd.grad(found.cost, level)[0], found.gradient.detach())


def test_deterministic_demand_costs_nothing_at_the_right_level():
    demand = torch.full((2, 20), 4.0, dtype=torch.float64)
    assert simulated(20.0, demand, 4, 9.0, 5) == (0.0, 0.0)  # at the kink the slope of max(x, 0) is 0
    assert float(base_stock_cost(demand, 20.0, 4, 1.0, 9.0, 5).cost) == 0
    assert simulated(21.0, demand, 4, 9.0, 5) == pytest.approx((1.0, 1.0), rel=1e-12)


def test_one_store_is_served_what_it_asks_for_or_what_there_is():
    asked, there = torch.tensor([[3.0], [8.0], [0.0], [2.0]]), torch.tensor([5.0, 5.0, 5.0, 0.0])
    assert torch.equal(allocate(asked, there)[:, 0], torch.minimum(asked[:, 0], there))


def test_the_closed_form_is_the_smallest_cost_on_normal_demand():
    level, cost = newsvendor(5.0, 1.6, 2, 1.0, 9.0)
    demand = 5 + 1.6 * torch.randn(2000, 60, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    costs = [float(base_stock_cost(demand, level + d, 2, 1.0, 9.0, 10).cost) for d in (-0.5, 0.0, 0.5)]
    assert costs[1] == min(costs) and costs[1] == pytest.approx(cost, rel=0.01)


def test_the_objective_counts_late_periods_alone():
    policy, task = build("inventory:one_store", None, needs={"cost"}, **SMALL)
    run = Run(SHORT, policy, task, steps=1)
    batch = run.collect(task.prompts(4, run.rng))
    cost = torch.rand(4, 14)
    assert float(PathwiseCost(ignore=8)(batch, Signals(cost=cost), run).value) == pytest.approx(float(cost[:, 8:].mean()))
    batch.keep = torch.zeros(4, 14, dtype=torch.bool)
    batch.keep[1] = True
    assert float(PathwiseCost(ignore=8)(batch, Signals(cost=cost), run).value) == pytest.approx(float(cost[1, 8:].mean()))
    with pytest.raises(ValueError, match="only 14 periods"):
        PathwiseCost(ignore=14)(batch, Signals(cost=cost), run)


def test_the_cost_is_that_of_the_rollout():
    policy, task = build("inventory:warehouse", None, needs={"cost"}, **SMALL)
    run = Run(SHORT, policy, task, steps=1)
    batch = run.collect(task.prompts(4, run.rng))
    torch.testing.assert_close(policy.observe(batch, {"cost"}).cost, batch.signals["cost"])
    torch.testing.assert_close(task.score(batch, run), -batch.signals["cost"])
    assert not policy.stochastic and (batch.logp == 0).all()


@pytest.mark.parametrize("body", ["mlp", "graph", "base_stock"])
def test_a_step_lowers_the_cost(body):
    policy, task = build("inventory:warehouse", None, needs={"cost"}, policy=body, **SMALL)
    before = float(task.costs(policy).mean())
    train(Run(SHORT, policy, task, steps=6))
    assert float(task.costs(policy).mean()) < before


def test_the_run_ends_with_the_best_weights_of_its_development_paths():
    policy, task = build("inventory:one_store", None, needs={"cost"}, **SMALL)
    run = Run(SHORT.set("update.learning_rate", 0.5), policy, task, steps=6)  # far too fast: the cost jumps up and down
    train(run)
    seen = [r["development_cost"] for r in run.history if "development_cost" in r]
    assert len(seen) == 3 and len(set(seen)) == 3
    assert float(task.costs(policy, task.development_demand).mean()) == pytest.approx(min(seen)) == run.state["hdpo.best_cost"]


def test_it_trains_and_resumes_to_the_same_numbers(tmp_path):
    def run_to(out, upto):
        policy, task = build("inventory:one_store_lost", None, needs={"cost"}, **SMALL)
        run = Run(SHORT, policy, task, steps=4, out=out, checkpoint_every=2)
        run.resume()
        while run.step < upto:
            step(run)
        return run

    assert_continues(run_to, tmp_path, "loss")
