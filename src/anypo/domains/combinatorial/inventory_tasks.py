"""InventoryTask: a supply network as a task of the common loop. A trajectory is a demand path, an action the orders of one period."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.combinatorial.inventory import Network, Orders, simulate
from anypo.domains.combinatorial.inventory_policy import BaseStock, InventoryPolicy, flatten
from anypo.domains.combinatorial.inventory_settings import InventorySetting, one_store
from anypo.run import Run
from anypo.task import Prompt

DEVELOPMENT_SEED, TEST_SEED = 1_000_001, 1_000_002  # training paths have the task's own seed, below these
DEVELOPMENT_SCENARIOS = 256
SHOWN = 60  # periods in the picture


class InventoryTask:
    """A fixed set of demand paths to train on; others to choose weights and to test by. Rewards are dense [N,T]: minus the cost a store and period.

    A prompt is a path; several samples of it meet the same demand. Every batch carries its demand as the signal `demand` [N,T,K].
    """

    objectives: tuple[str, ...] = ("reward",)

    def __init__(
        self, setting: InventorySetting | None = None, *, scenarios: int = 8192, batch: int = 1024, periods: int = 50, warm_up: int = 30,
        test_scenarios: int = 2048, test_periods: int = 130, seed: int = 0,
    ) -> None:  # fmt: skip
        """`scenarios`: training paths; `batch`: how many of them a step, at most all. `warm_up`: first periods that no measured cost counts, as the
        network begins empty. Raises ValueError for what is out of range."""
        if min(scenarios, batch, test_scenarios) < 1 or not 0 <= warm_up < min(periods, test_periods):
            raise ValueError("inventory tasks need at least 1 scenario, and more periods than the warm_up")
        if not 0 <= seed < DEVELOPMENT_SEED:
            raise ValueError(f"an inventory task's seed lies in 0..{DEVELOPMENT_SEED - 1}, not {seed}")
        self.setting = setting or one_store()
        self.name = f"inventory:{self.setting.name}"
        self.scenarios, self.prompts_per_step, self.periods, self.warm_up = scenarios, min(batch, scenarios), periods, warm_up
        self.demand = self.setting.draw(scenarios, periods, seed)
        self.test_scenarios, self.test_periods = test_scenarios, test_periods

    def prompts(self, count: int, rng: np.random.Generator) -> list[Prompt]:
        """`count` different training paths, or all of them."""
        chosen = range(self.scenarios) if count >= self.scenarios else rng.choice(self.scenarios, size=count, replace=False).tolist()
        return [Prompt(id=i, content=i) for i in chosen]

    def collect(self, prompts: list[Prompt], run: Run) -> Batch:
        policy: InventoryPolicy = run.policy  # type: ignore[assignment]
        group = torch.repeat_interleave(torch.arange(len(prompts)), torch.tensor([p.samples for p in prompts]))
        ids = torch.tensor([p.id for p in prompts])[group]
        demand, numbers = self.demand[ids], list[Tensor]()
        lanes = self.setting.stores + self.setting.warehouses
        noise = None
        if policy.log_std is not None:
            noise = torch.randn(len(ids), self.periods, lanes, generator=run.generator) * policy.log_std.detach().exp()

        def decide(network: Network, t: int) -> Orders:
            numbers.append(policy.body(network) if noise is None else policy.body(network) + noise[:, t])
            return policy.requests(numbers[-1])

        path = simulate(self.setting, decide, demand)
        mask = torch.ones(path.cost.shape, dtype=torch.bool)
        ends = torch.zeros_like(mask)
        ends[:, -1] = True
        cost = float(path.cost[:, self.warm_up :].mean())
        run.log(cost=cost, reward=-cost)  # without the start from nothing, which would hide the rest
        batch = Batch(
            action=torch.stack(numbers, dim=1), mask=mask, logp=torch.zeros(mask.shape), group=group,
            context=torch.stack([flatten(state) for state in path.states], dim=1), terminated=torch.zeros_like(mask), truncated=ends,
            version=torch.full((len(group),), run.version), signals={"prompt_id": ids, "demand": demand, "cost": path.cost},
        )  # fmt: skip
        if policy.stochastic:
            found = policy.observe(batch, {"logp", "entropy"})
            batch.logp, batch.signals["old_entropy"] = found["logp"], found["entropy"]
        return batch

    def score(self, batch: Batch, run: Run) -> Tensor:
        """Dense rewards [N,T]: minus the cost of every period, those of the warm-up among them."""
        return -batch.signal("cost")

    def evaluate(self, run: Run) -> dict[str, float]:
        """Mean cost a store and period on test paths, without noise; of a single store, beside that of the best base-stock level."""
        best = {"best_base_stock_cost": self.best_base_stock[1]} if self.setting.stores == 1 and not self.setting.warehouses else {}
        return {"cost": float(self.costs(run.policy).mean())} | best  # type: ignore[arg-type]

    @torch.no_grad()
    def figures(self, run: Run) -> list[tuple[str, str]]:
        """Demand, order and what is on hand at the first store on the first test path, in the last periods."""
        from anypo.report import plots

        policy: InventoryPolicy = run.policy  # type: ignore[assignment]
        demand = self.test_demand[:1]
        path = simulate(self.setting, policy.decide, demand)
        periods = list(range(self.test_periods))[-SHOWN:]
        shown = {
            "on hand": [float(path.states[t].stores[0, 0, 0]) for t in periods],
            "order": [float(path.orders[t].stores[0, 0]) for t in periods],
            "demand": demand[0, periods, 0].tolist(),
        }
        series = [plots.Series(name, periods, values) for name, values in shown.items()]
        return [("the first store on the first test path", plots.learning_curves(series, "period", "units"))]

    @cached_property
    def test_demand(self) -> Tensor:
        """The same for every policy and run."""
        return self.setting.draw(self.test_scenarios, self.test_periods, TEST_SEED)

    @cached_property
    def development_demand(self) -> Tensor:
        """Paths by which weights are chosen: as long as those of the test, so that policies that drift away after the periods of training are not."""
        return self.setting.draw(DEVELOPMENT_SCENARIOS, self.test_periods, DEVELOPMENT_SEED)

    @torch.no_grad()
    def costs(self, policy: InventoryPolicy, demand: Tensor | None = None) -> Tensor:
        """[S]: mean cost a store and period of every path after the warm-up; of the test paths when no demand is given."""
        chosen = self.test_demand if demand is None else demand
        return simulate(self.setting, policy.decide, chosen).cost[:, self.warm_up :].mean(1)

    @cached_property
    @torch.no_grad()
    def best_base_stock(self) -> tuple[float, float]:
        """The level of a single store with the smallest cost on the first 512 test paths, and its cost on all of them. The cost is convex in it."""
        policy = InventoryPolicy(self.setting, "base_stock")
        levels = policy.body.levels
        assert isinstance(policy.body, BaseStock) and isinstance(levels, Tensor)
        few = self.test_demand[:512]

        def cost(level: float, demand: Tensor) -> float:
            levels.fill_(level)
            return float(self.costs(policy, demand).mean())

        low, high = 0.0, 3 * float(levels[0])
        while high - low > 0.01:
            a, b = low + (high - low) * 0.382, low + (high - low) * 0.618
            low, high = (low, b) if cost(a, few) < cost(b, few) else (a, high)
        level = (low + high) / 2
        return level, cost(level, self.test_demand)
