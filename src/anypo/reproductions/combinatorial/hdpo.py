"""Claims of HDPO: the pathwise gradient is exact and reaches the known optimum of one store; score functions; lost demand; a graph and little data.

All costs are a store and period on long test paths, the same for everyone, so that differences between policies hold little noise.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.combinatorial.inventory import Network, Orders, simulate
from anypo.domains.combinatorial.inventory_policy import GraphNetwork, InventoryPolicy
from anypo.domains.combinatorial.inventory_settings import InventorySetting, one_store
from anypo.domains.combinatorial.inventory_tasks import InventoryTask
from anypo.domains.combinatorial.setup import build
from anypo.loops.on_policy import train
from anypo.method import Method
from anypo.methods.combinatorial.hdpo import METHOD, base_stock_cost, newsvendor
from anypo.policy import Signals
from anypo.run import Run
from anypo.seams.objective import ClippedSurrogate

LEAD, UNDERAGE = 4, 9.0
OPTIMUM = newsvendor(5.0, 1.6, LEAD, 1.0, UNDERAGE)
EARLY, PATHS = 100, 128  # steps after which the score function is compared, demand paths a step


def _slopes(connected: bool) -> Evidence:
    """The derivative of the simulated cost in a base-stock level at five levels: autograd, the closed form, differences of the closed form."""
    demand = one_store().draw(64, 50, 0).double()[..., 0]
    policy = InventoryPolicy(one_store(LEAD, UNDERAGE), "base_stock").double()

    def decide(network: Network, period: int) -> Any:
        return policy.decide(network if connected else Network(*(x.detach() for x in network)))

    found, worst = {}, 0.0
    for level in (20.0, 25.3, 28.1, 31.7, 36.0):
        with torch.no_grad():
            policy.body.levels.fill_(level)
        cost = simulate(policy.setting, decide, demand[..., None]).cost[:, 30:].mean()
        slope = float(torch.autograd.grad(cost, policy.body.levels)[0])
        exact, up, down = (base_stock_cost(demand, level + d, LEAD, 1.0, UNDERAGE, 30) for d in (0.0, 1e-6, -1e-6))
        worst = max(worst, abs(slope - float(exact.gradient)), abs(slope - float(up.cost - down.cost) / 2e-6))
        found[level] = round(slope, 4)
    return Evidence({"slopes": found, "largest difference": worst}, "no difference above 1e-6", worst < 1e-6)


@claim(
    "autograd through the simulator gives the derivative of the cost in a base-stock level: that of the closed form and of finite differences"
)
def gradient_is_exact() -> Evidence:
    return _slopes(connected=True)


@ablation(gradient_is_exact, "orders forget, for the gradient, what earlier orders did to the inventory they are decided from")
def gradient_of_single_orders() -> Evidence:
    return _slopes(connected=False)


class Severed(InventoryPolicy):
    """The ablation of every claim about training: orders are taken as given, so that no gradient reaches the weights through them."""

    def evaluate(self, batch: Batch, needs: Set[str]) -> Signals:
        def decide(network: Network, period: int) -> Orders:
            return Orders(*(x.detach() for x in self.decide(network, period)))

        return Signals(cost=simulate(self.setting, decide, batch.signal("demand")).cost)


@dataclass
class RewardToGo:
    """REINFORCE's credit: the discounted rewards from an action on, standardized over the paths at each period."""

    gamma: float = 0.9  # in [0,1]

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        assert batch.reward is not None
        total, left = torch.zeros(len(batch)), []
        for reward in batch.reward.flip(1).unbind(1):
            total = reward + self.gamma * total
            left.append(total)
        found = torch.stack(left[::-1], dim=1)
        return (found - found.mean(0)) / (found.std(0) + 1e-8)


REINFORCE = METHOD.but(name="reinforce", credit=RewardToGo(), objective=ClippedSurrogate(aggregation="token_mean"))


@cache
def _trained(setting: str, body: str, steps: int, kind: str = "hdpo", **options: int) -> tuple[InventoryPolicy, InventoryTask]:
    """A policy after training from seed 0, the best weights by the development paths. `kind`: hdpo, reinforce or severed."""
    method: Method = REINFORCE if kind == "reinforce" else METHOD
    policy: Any
    task: Any
    policy, task = build(f"inventory:{setting}", None, needs=method.needs(), policy=body, **{"batch": PATHS} | options)
    if kind == "severed":
        policy = Severed(task.setting, body)
    train(Run(method, policy, task, steps=steps))
    return policy, task


def _cost(setting: str, body: str, steps: int, kind: str = "hdpo", **options: int) -> float:
    """Mean cost on the test paths."""
    policy, task = _trained(setting, body, steps, kind, **options)
    return float(task.costs(policy).mean())


def _level(kind: str) -> Evidence:
    policy, _ = _trained("one_store", "base_stock", 60, kind)
    level = float(policy.body.levels.detach())
    measured = {"level": round(level, 3), "optimal level": round(OPTIMUM.level, 3)}
    return Evidence(measured, "within 1% of the optimal level", abs(level / OPTIMUM.level - 1) < 0.01)


@claim("trained by its pathwise gradient, a base-stock level comes within 1% of the optimal one")
def level_is_found() -> Evidence:
    return _level("hdpo")


@ablation(level_is_found, "no gradient through the orders")
def level_is_not_found() -> Evidence:
    return _level("severed")


def _optimal(kind: str) -> Evidence:
    demand = InventoryTask(one_store()).test_demand[..., 0].double()
    best = float(base_stock_cost(demand, OPTIMUM.level, LEAD, 1.0, UNDERAGE, 30).cost)
    cost = _cost("one_store", "mlp", 400 if kind == "hdpo" else 10, kind)  # severed weights do not move, however many steps
    measured = {"cost": round(cost, 3), "optimal level on the same paths": round(best, 3), "closed form": round(OPTIMUM.cost, 3)}
    return Evidence(measured, "within 1% of the cost of the optimal policy on the same test paths", cost < 1.01 * best)


@claim("one store whose unmet demand waits: the perceptron's cost comes within 1% of the optimum", slow=True)
def reaches_the_optimum() -> Evidence:
    return _optimal("hdpo")


@ablation(reaches_the_optimum, "no gradient through the orders")
def learns_nothing() -> Evidence:
    return _optimal("severed")


def _lost(body: str, steps: int) -> Evidence:
    cost = _cost("one_store_lost", body, steps)
    level, best = _trained("one_store_lost", body, steps)[1].best_base_stock
    measured = {"cost": round(cost, 3), "best base-stock level": round(level, 2), "its cost": round(best, 3)}
    return Evidence(measured, "at least 2% below the best base-stock level", cost < 0.98 * best)


@claim("one store whose unmet demand is lost: the perceptron costs at least 2% less than the best base-stock level", slow=True)
def beats_base_stock() -> Evidence:
    return _lost("mlp", 150)


@ablation(beats_base_stock, "the same gradient trains a base-stock level instead of a network")
def base_stock_does_not() -> Evidence:
    return _lost("base_stock", 60)


def _against_reinforce(setting: str, kind: str = "hdpo") -> Evidence:
    pathwise, score = _cost(setting, "mlp", EARLY if kind == "hdpo" else 10, kind), _cost(setting, "mlp", EARLY, "reinforce")
    measured = {"pathwise": round(pathwise, 3), "score function": round(score, 3)}
    return Evidence(measured, "at least 5% above the cost by the pathwise gradient", score > 1.05 * pathwise)


@claim("one warehouse and five stores: after as many simulated periods REINFORCE on the same network costs at least 5% more", slow=True)
def score_function_is_slower() -> Evidence:
    return _against_reinforce("warehouse")


@ablation(score_function_is_slower, "no gradient through the orders")
def severed_is_no_faster() -> Evidence:
    return _against_reinforce("warehouse", "severed")


# With one lane the score function is no worse: rewards to go, standardized over paths that share their periods, hold little noise there.
@claim("one store: after as many simulated periods REINFORCE on the same network costs at least 5% more", slow=True, reproduced=False)
def score_function_is_slower_with_one_store() -> Evidence:
    return _against_reinforce("one_store")


class Unlinked(GraphNetwork):
    """The ablation of the graph: every lane reads the same node, and no node hears of its lanes."""

    def __init__(self, setting: InventorySetting, hidden: int) -> None:
        super().__init__(setting, hidden)
        self.source.fill_(setting.stores + setting.warehouses)
        self.target.fill_(setting.stores + setting.warehouses)
        self.incoming.zero_()
        self.outgoing.zero_()


FEW = {"scenarios": 32, "batch": 32}


def _little_data(linked: bool) -> Evidence:
    perceptron = _cost("warehouse", "mlp", 120, **FEW)
    if linked:
        graph = _cost("warehouse", "graph", 60, **FEW)
    else:
        policy, task = build("inventory:warehouse", None, needs={"cost"}, policy="graph", **FEW)
        policy.body = Unlinked(task.setting, 32)
        train(Run(METHOD, policy, task, steps=20))
        graph = float(task.costs(policy).mean())
    measured = {"graph, 60 steps" if linked else "graph": round(graph, 3), "perceptron, 120 steps": round(perceptron, 3)}
    return Evidence(measured, "at least 5% below the perceptron", graph < 0.95 * perceptron)


@claim(
    "one warehouse and five stores, 32 demand paths to learn from: the graph policy's test cost is at least 5% below the perceptron's",
    slow=True,
)
def graph_needs_less_data() -> Evidence:
    return _little_data(linked=True)


@ablation(graph_needs_less_data, "a graph without lanes: nodes tell one another nothing")
def graph_without_lanes() -> Evidence:
    return _little_data(linked=False)
