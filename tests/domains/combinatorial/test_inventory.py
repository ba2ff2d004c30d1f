"""The inventory simulator: its steps, its gradient, its policies."""

import pytest
import torch

from anypo.domains.combinatorial.inventory import Network, allocate, empty_network, period, ship, simulate, store_step
from anypo.domains.combinatorial.inventory_policy import BODIES, GraphNetwork, InventoryPolicy, flatten, load_policy, unflatten
from anypo.domains.combinatorial.inventory_settings import SETTINGS, InventorySetting, one_store_lost, serial, transshipment, warehouse


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("body", BODIES)
def test_every_policy_runs_every_network_with_a_finite_gradient(name, body):
    setting = SETTINGS[name]()
    policy = InventoryPolicy(setting, body)
    cost = simulate(setting, policy.decide, setting.draw(3, 20, 0)).cost
    assert cost.shape == (3, 20)
    cost.mean().backward()
    gradients = [p.grad for p in policy.parameters() if p.grad is not None]
    assert gradients and all(torch.isfinite(g).all() for g in gradients)


@pytest.mark.parametrize("name", SETTINGS)
def test_nothing_appears_or_vanishes(name):
    """What came from outside is what was sold, what is on hand and what is under way; unmet demand that waits counts as owed."""
    setting = SETTINGS[name]()
    policy = InventoryPolicy(setting, "mlp", seed=1).double()
    network = empty_network(setting, 4, torch.float64)
    demand = setting.draw(4, 30, 0).double()
    came, sold = torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    with torch.no_grad():
        for t in range(30):
            wanted = policy.decide(network)
            shipped = ship(setting, network, wanted)
            came += shipped.warehouses[:, 0] if setting.warehouses else shipped.stores.sum(1)
            sold += (torch.minimum(demand[:, t], network.stores[..., 0]) if setting.lost else demand[:, t]).sum(1)
            _, network = period(setting, network, shipped, demand[:, t])
            assert (network.warehouses[..., 0] >= -1e-9).all(), "a warehouse shipped more than it had"
    torch.testing.assert_close(came - sold, flatten(network).sum(1))


def test_a_transshipment_centre_keeps_nothing():
    setting = transshipment()
    policy = InventoryPolicy(setting, "mlp")
    network = Network(torch.zeros(2, 5, 2), torch.tensor([[[7.0, 1.0, 2.0]], [[0.0, 3.0, 0.0]]]))
    with torch.no_grad():
        shipped = ship(setting, network, policy.decide(network))
        _, after = period(setting, network, shipped, torch.ones(2, 5))
    torch.testing.assert_close(shipped.stores.sum(1), torch.tensor([7.0, 0.0]))
    torch.testing.assert_close(after.warehouses[:, 0, 0], torch.tensor([1.0, 3.0]))


def test_a_chain_ships_what_the_stage_above_has():
    setting = serial()
    network = empty_network(setting, 1)
    network.warehouses[0, :, 0] = torch.tensor([1.0, 2.0, 3.0])
    wanted = InventoryPolicy(setting).decide(network)
    wanted = wanted._replace(stores=torch.full_like(wanted.stores, 9.0), warehouses=torch.full_like(wanted.warehouses, 9.0))
    shipped = ship(setting, network, wanted)
    assert shipped.warehouses[0].tolist() == [9.0, 1.0, 2.0] and shipped.stores[0].tolist() == [3.0]


def test_the_softmax_layer_keeps_a_share():
    shipped = allocate(torch.tensor([[0.0, 0.0, 0.0]]), torch.tensor([8.0]), "softmax")
    torch.testing.assert_close(shipped, torch.tensor([[2.0, 2.0, 2.0]]))
    assert allocate(torch.full((1, 3), -1e4), torch.tensor([8.0]), "softmax").sum() == 0
    with pytest.raises(ValueError, match="unknown allocation"):
        allocate(torch.ones(1, 2), torch.ones(1), "auction")


@pytest.mark.parametrize("mode", ["proportional", "transshipment"])
def test_no_request_has_a_gradient_of_zero_not_nan(mode):
    request = torch.zeros(2, 3, requires_grad=True)
    allocate(request, torch.tensor([5.0, 0.0]), mode).sum().backward()
    assert torch.isfinite(request.grad).all()


def test_sold_out_profit_is_no_cost_of_waiting_demand():
    empty = torch.zeros(1, 1, 1)
    args = {
        "order": torch.ones(1, 1),
        "lead_time": torch.ones(1, 1, dtype=torch.int64),
        "holding": torch.ones(1, 1),
        "underage": torch.full((1, 1), 9.0),
    }
    found = store_step(empty, torch.full((1, 1), 4.0), **args, lost=True, profit=True)
    assert float(found.cost) == 0 and float(found.inventory) == 1


def test_the_gradient_is_that_of_finite_differences():
    """In double precision, on demand without ties, away from kinks almost surely."""
    setting = warehouse()
    policy = InventoryPolicy(setting, "graph", hidden=8, seed=3).double()
    demand = setting.draw(2, 12, 0).double()
    weight = next(policy.parameters())
    cost = simulate(setting, policy.decide, demand).cost.mean()
    (slope,) = torch.autograd.grad(cost, weight)
    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        ends = []
        for sign in (1, -1):
            weight.add_(sign * 1e-6 * direction)
            ends.append(float(simulate(setting, policy.decide, demand).cost.mean()))
            weight.sub_(sign * 1e-6 * direction)
    assert float((slope * direction).sum()) == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-5)


def permuted(setting, order):
    """The same network with its stores in another order."""
    changed = {name: tuple(getattr(setting, name)[i] for i in order) for name in ("lead_times", "holding", "underage", "mean", "deviation")}
    fixed = {
        name: getattr(setting, name)
        for name in ("name", "correlation", "demand", "lost", "warehouse_lead_times", "warehouse_holding", "allocation")
    }
    return InventorySetting(**changed, **fixed)


def test_stores_that_change_places_take_their_orders_along():
    setting, order = warehouse(), [3, 0, 4, 2, 1]
    policy = InventoryPolicy(setting, "graph").double()
    twin = InventoryPolicy(permuted(setting, order), "graph").double()
    weights = {name: value for name, value in policy.state_dict().items() if not name.startswith("body.fixed")}
    twin.load_state_dict(weights, strict=False)
    network = Network(torch.rand(3, 5, 3).double(), torch.rand(3, 1, 3).double())
    here, there = policy.decide(network), twin.decide(Network(network.stores[:, order], network.warehouses))
    torch.testing.assert_close(here.stores[:, order], there.stores)
    torch.testing.assert_close(here.warehouses, there.warehouses)
    assert isinstance(policy.body, GraphNetwork) and here.stores.detach().std() > 1e-4


def test_states_survive_flattening_and_policies_saving(tmp_path):
    setting = warehouse(stores=2)
    network = Network(torch.rand(3, 2, max(setting.lead_times)), torch.rand(3, 1, 3))
    for here, there in zip(network, unflatten(setting, flatten(network)), strict=True):
        assert torch.equal(here, there)
    policy = InventoryPolicy(setting, "graph", stochastic=True, seed=4)
    policy.save_pretrained(tmp_path)
    loaded = load_policy(tmp_path)
    assert loaded.setting == setting and torch.equal(loaded.decide(network).stores, policy.decide(network).stores)
    with pytest.raises(ValueError, match="no saved inventory policy"):
        load_policy(tmp_path / "nothing")


def test_demand_has_the_moments_it_says():
    setting = warehouse()
    drawn = setting.draw(400, 50, 0).flatten(0, 1).double()
    torch.testing.assert_close(drawn.mean(0), torch.tensor(setting.mean, dtype=torch.float64), rtol=0.02, atol=0.0)
    off_diagonal = torch.corrcoef(drawn.T)[~torch.eye(5, dtype=torch.bool)]
    assert (off_diagonal - 0.5).abs().max() < 0.05 and drawn.min() >= 0
    poisson = one_store_lost().draw(200, 50, 0)
    assert torch.equal(poisson, poisson.round()) and float(poisson.var()) == pytest.approx(5, rel=0.05)


def test_settings_out_of_range_are_refused():
    with pytest.raises(ValueError, match="lead times"):
        InventorySetting("x", (0,), (1.0,), (9.0,), (5.0,))
    with pytest.raises(ValueError, match="unknown demand"):
        InventorySetting("x", (1,), (1.0,), (9.0,), (5.0,), demand="weekly")
    with pytest.raises(ValueError, match="unknown inventory policy"):
        InventoryPolicy(warehouse(), "oracle")
