"""HDPO: hindsight differentiable inventory policies, and policies shaped like the supply network (arXiv:2306.11246).

How an inventory moves is known, and demand does not depend on what is ordered. So the cost of a policy on a fixed path of demand, seen in hindsight,
is a differentiable function of its weights: the simulator is run with the policy in it, and autograd goes back through every order of every period.
No score function, no critic, no credit: the policy's signal `cost` is the objective. The second idea is a graph network with the topology of the
supply network, whose weights all stores share, which needs less data.
Equations 1-4 (`store_step`, `warehouse_step`, `allocate`) are the domain's, in domains/combinatorial/inventory.py. The timing of a period, the
feasibility layers and the settings are those of the paper's published code. Left out: quantile forecasts and the
newsvendor heuristics built on them, and real series of demand.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.combinatorial.inventory import allocate, store_step, warehouse_step
from anypo.method import Method, Paper
from anypo.policy import Loss, Signals
from anypo.seams.credit import NoCredit
from anypo.seams.groups import masked_mean
from anypo.seams.reward import TaskReward
from anypo.seams.rollout import OnPolicy
from anypo.seams.select import UniformPrompts
from anypo.seams.update import GradientSteps

if TYPE_CHECKING:
    from anypo.run import Run

__all__ = ["METHOD", "KeepBest", "PathwiseCost", "allocate", "base_stock_cost", "newsvendor", "store_step", "warehouse_step"]


class BaseStockCost(NamedTuple):
    cost: Tensor  # mean of a period
    gradient: Tensor  # in the level


class Newsvendor(NamedTuple):
    level: float
    cost: float


def base_stock_cost(
    demand: Float[Tensor, "S T"], level: float, lead_time: int, holding: float, underage: float, ignore: int
) -> BaseStockCost:
    """Equation 6: mean cost of a store whose unmet demand waits under a base-stock level, and its pathwise derivative, over periods from `ignore` on.

    The store begins empty. What is left at the end of a period is the level less the demand of the last lead_time + 1 periods; before the first order
    has come, less all demand without the level. No simulation is needed.
    """
    total = torch.cat([demand.new_zeros(len(demand), 1), demand.cumsum(1)], dim=1)
    arrived = (torch.arange(demand.shape[1]) >= lead_time).to(demand.dtype)
    since = (torch.arange(demand.shape[1]) - lead_time).clamp(min=0)
    left = (arrived * level - (total[:, 1:] - total[:, since]))[:, ignore:]
    cost = holding * left.clamp(min=0) + underage * (-left).clamp(min=0)
    slope = arrived[ignore:] * (holding * (left > 0) - underage * (left < 0).to(demand.dtype))
    return BaseStockCost(cost.mean(), slope.mean())


def newsvendor(mu: float, sigma: float, lead_time: int, holding: float, underage: float) -> Newsvendor:
    """Equation 6: the optimal base-stock level and its cost a period, for independent normal demand that is not cut off at 0 and waits when unmet."""
    normal = NormalDist()
    z = normal.inv_cdf(underage / (underage + holding))
    spread = sigma * (lead_time + 1) ** 0.5
    return Newsvendor((lead_time + 1) * mu + z * spread, (holding + underage) * normal.pdf(z) * spread)


@dataclass
class PathwiseCost:
    """Equation 5: the mean simulated cost a store and period, differentiated through the simulator."""

    ignore: int = 30  # first periods that do not count, >= 0

    needs = frozenset({"cost"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        if self.ignore >= batch.horizon:
            raise ValueError(
                f"objective.ignore is {self.ignore}, but a path has only {batch.horizon} periods; lower it or give the task more periods"
            )
        late = torch.arange(batch.horizon) >= self.ignore
        return Loss(masked_mean(new.cost, batch.counted & late))


@dataclass
class KeepBest:
    """Remember the weights with the smallest cost on development paths; the run ends with them."""

    every: int = 10  # steps between two looks, >= 1

    def __call__(self, batch: Batch, run: Run) -> None:
        last = run.step + 1 >= run.total_steps or (run.max_actions is not None and run.actions >= run.max_actions)
        if not last and (run.step + 1) % self.every:
            return
        cost = float(run.task.costs(run.policy, run.task.development_demand).mean())  # type: ignore[attr-defined]
        run.log(development_cost=cost)
        if cost < run.state.get("hdpo.best_cost", float("inf")):
            run.state["hdpo.best_cost"] = cost
            run.move_policy("best")
        elif last:
            run.policy.load_state_dict(run.named_policy("best").state_dict())
            run.advance_version()


METHOD = Method(
    name="hdpo",
    paper=Paper("Deep Reinforcement Learning for Inventory Networks: Toward Reliable Policy Optimization", "2306.11246", 2023),
    domain="combinatorial",
    kind="system",
    task="inventory:one_store",
    summary="the gradient of the simulated cost, through every order of a fixed demand path, in place of a score function",
    select=UniformPrompts(group_size=1),
    rollout=OnPolicy(),
    reward=TaskReward(),
    credit=NoCredit(),
    objective=PathwiseCost(),
    update=GradientSteps(epochs=1, minibatches=1, max_grad_norm=1.0),
    control=(KeepBest(),),
)
