"""Supply networks to train and test on, with the demand that they meet; sizes and prices from the paper's published code."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

DEMANDS = ("normal", "poisson")


@dataclass(frozen=True)
class InventorySetting:
    """K stores behind a chain of E warehouses (E = 0: straight from outside). Lead times in periods, at least 1; prices a unit and period."""

    name: str
    lead_times: tuple[int, ...]  # K
    holding: tuple[float, ...]  # K
    underage: tuple[float, ...]  # K, of a unit that is short
    mean: tuple[float, ...]  # K, of a period's demand
    deviation: tuple[float, ...] = ()  # K standard deviations of normal demand; unused for Poisson demand
    correlation: float = 0.0  # of the stores' normal demands, in [0,1]
    demand: str = "normal"  # cut off at 0, or poisson
    lost: bool = False  # whether unmet demand is gone rather than waiting
    warehouse_lead_times: tuple[int, ...] = ()  # E, from the outside supplier down
    warehouse_holding: tuple[float, ...] = ()  # E
    allocation: str = "proportional"  # how the last warehouse serves its stores
    _prices: dict[torch.dtype, tuple[Tensor, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raises ValueError for what is out of range."""
        if min(self.lead_times + self.warehouse_lead_times) < 1:
            raise ValueError("lead times are whole periods of at least 1")
        if self.demand not in DEMANDS:
            raise ValueError(f"unknown demand '{self.demand}'; use {' or '.join(DEMANDS)}")
        if min(self.holding + self.underage + self.warehouse_holding) < 0:
            raise ValueError("prices must not be negative")

    @property
    def stores(self) -> int:
        """K."""
        return len(self.lead_times)

    @property
    def warehouses(self) -> int:
        """E."""
        return len(self.warehouse_lead_times)

    def tensors(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Lead times, holding and underage prices, [1,K] each."""
        if dtype not in self._prices:
            prices = (torch.tensor([x], dtype=dtype) for x in (self.holding, self.underage))
            self._prices[dtype] = (torch.tensor([self.lead_times]), *prices)
        return self._prices[dtype]

    def draw(self, count: int, periods: int, seed: int) -> Float[Tensor, "S T K"]:
        """`count` demand paths, float32, by `seed` alone."""
        rng = np.random.default_rng(seed)
        shape = (count, periods, self.stores)
        if self.demand == "poisson":
            return torch.from_numpy(rng.poisson(self.mean, size=shape).astype(np.float32))
        own, common = rng.standard_normal(shape), rng.standard_normal((count, periods, 1))
        noise = self.correlation**0.5 * common + (1 - self.correlation) ** 0.5 * own
        return torch.from_numpy(np.maximum(np.array(self.mean) + np.array(self.deviation) * noise, 0.0).astype(np.float32))


def one_store(lead_time: int = 4, underage: float = 9.0) -> InventorySetting:
    """Normal demand that waits: the base-stock optimum is known in closed form, but for the cut-off at 0."""
    return InventorySetting("one_store", (lead_time,), (1.0,), (underage,), (5.0,), (1.6,))


def one_store_lost(lead_time: int = 4, underage: float = 9.0) -> InventorySetting:
    """Poisson demand that is lost when it is not met: base-stock policies are not optimal."""
    return InventorySetting("one_store_lost", (lead_time,), (1.0,), (underage,), (5.0,), demand="poisson", lost=True)


def serial() -> InventorySetting:
    """Four stages in a row."""
    chain = ((2, 4, 3), (0.1, 0.2, 0.5))
    return InventorySetting("serial", (4,), (1.0,), (9.0,), (5.0,), (1.6,), warehouse_lead_times=chain[0], warehouse_holding=chain[1])


def warehouse(stores: int = 5, seed: int = 0) -> InventorySetting:
    """One warehouse that serves stores of unlike, correlated demand, which is lost when it is not met."""
    rng = np.random.default_rng(seed)
    mean, share = rng.uniform(2.5, 7.5, stores), rng.uniform(0.25, 0.5, stores)
    lead = rng.integers(2, 4, stores)
    return InventorySetting(
        "warehouse", tuple(lead.tolist()), (1.0,) * stores, (9.0,) * stores, tuple(mean.tolist()), tuple((mean * share).tolist()),
        correlation=0.5, lost=True, warehouse_lead_times=(3,), warehouse_holding=(0.3,),
    )  # fmt: skip


def transshipment(stores: int = 5, seed: int = 0) -> InventorySetting:
    """A centre that keeps no stock: what arrives is passed on to the stores at once. Demand waits."""
    base = warehouse(stores, seed)
    return replace(
        base,
        name="transshipment",
        lead_times=(2,) * stores,
        underage=(4.0,) * stores,
        lost=False,
        warehouse_holding=(0.0,),
        allocation="transshipment",
    )


SETTINGS = {f.__name__: f for f in (one_store, one_store_lost, serial, warehouse, transshipment)}
