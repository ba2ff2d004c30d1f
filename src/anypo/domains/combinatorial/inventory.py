"""Inventory in a supply network, as differentiable steps: stores that meet demand, supplied through a chain of warehouses.

A period: orders are decided from what is on hand and under way, then demand is seen, costs are paid, and everything under way moves one period on.
All steps are piecewise linear in the orders and never write in place, so a cost over any number of periods can be differentiated by autograd through
every order. The timing is that of the paper's published code. Left out: several warehouses beside one another, capacities, fixed order costs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.domains.combinatorial.inventory_settings import InventorySetting

PerStore = Float[Tensor, "B K"]
ALLOCATIONS = ("proportional", "transshipment", "softmax")


class Moved(NamedTuple):
    """What a step leaves behind."""

    cost: Tensor  # [B]
    inventory: Tensor  # the shape that came in


class Network(NamedTuple):
    """What is on hand (place 0) and under way, everywhere. Places beyond a lead time stay 0."""

    stores: Tensor  # [B,K,L]
    warehouses: Tensor  # [B,E,W], the first is supplied from outside, the last supplies the stores


class Orders(NamedTuple):
    """What is asked for, >= 0, before it meets what is there."""

    stores: Tensor  # [B,K]
    warehouses: Tensor  # [B,E]


class Path(NamedTuple):
    """One simulation."""

    cost: Tensor  # [B,T] a store
    states: list[Network]  # T states, as they were when orders were decided
    orders: list[Orders]  # T orders, as they were shipped


def store_step(
    inventory: Float[Tensor, "B K L"], demand: PerStore, order: PerStore, lead_time: Int[Tensor, "B K"], holding: PerStore, underage: PerStore,
    lost: bool = False, profit: bool = False,
) -> Moved:  # fmt: skip
    """Demand, cost and movement at the stores. Unmet demand waits, or is gone with `lost`.

    Cost of a store: holding per unit left plus underage per unit short; with `profit` the second is minus underage per unit sold instead, of
    inventory that is there. The order arrives at the place before its lead time, so with a lead time of 1 it is on hand next period. Lead times
    and prices may also be [1,K].
    """
    on_hand = inventory[..., 0]
    left = on_hand - demand
    over, short = torch.relu(left), torch.relu(-left)  # both have slope 0 at 0, which whole numbers of demand often hit
    cost = holding * over + (-underage * torch.minimum(on_hand, demand) if profit else underage * short)
    return Moved(cost.sum(1), _move(inventory, over if lost else left, order, lead_time))


def warehouse_step(
    inventory: Float[Tensor, "B L"], shipped: PerStore, order: Float[Tensor, " B"], holding: float, edge_cost: float = 0.0
) -> Moved:
    """A warehouse ships what was allocated, which is no more than it has, and pays for what stays and for what it orders."""
    left = inventory[:, 0] - shipped.sum(1)
    cost = holding * torch.relu(left) + edge_cost * order
    return Moved(cost, _move(inventory, left, order, torch.full_like(order, inventory.shape[1], dtype=torch.int64)))


def _move(inventory: Tensor, left: Tensor, order: Tensor, lead_time: Tensor) -> Tensor:
    """One period on: what is due comes to what is left, and the order joins at place lead_time - 1."""
    moved = left[..., None]
    if inventory.shape[-1] > 1:
        moved = torch.cat([moved + inventory[..., 1:2], inventory[..., 2:], torch.zeros_like(moved)], dim=-1)
    return moved + order[..., None] * (torch.arange(inventory.shape[-1]) == lead_time[..., None] - 1)


def allocate(request: PerStore, available: Float[Tensor, " B"], mode: str = "proportional") -> PerStore:
    """Shipments out of what a warehouse has.

    proportional: the requests (>= 0), scaled down where they exceed it. transshipment: all of it, in proportion to the requests. softmax: shares of
    all of it by a softmax of the requests (any numbers) and a fixed 0, whose share stays. Where nothing is asked for nothing is shipped.
    Raises ValueError for another mode.
    """
    if mode not in ALLOCATIONS:
        raise ValueError(f"unknown allocation '{mode}'; use {', '.join(ALLOCATIONS)}")
    if mode == "softmax":
        return torch.cat([request, torch.zeros_like(request[:, :1])], dim=1).softmax(1)[:, :-1] * available[:, None]
    total = request.sum(1)
    asked = torch.where(total > 0, total, torch.ones_like(total))  # no division by 0, in the gradient neither
    share = available / asked if mode == "transshipment" else (available / asked).clamp(max=1.0)
    return request * torch.where(total > 0, share, torch.zeros_like(total))[:, None]


def empty_network(setting: InventorySetting, count: int, dtype: torch.dtype = torch.float32) -> Network:
    """Nothing on hand, nothing under way."""
    stores, chain = setting.stores, len(setting.warehouse_lead_times)
    longest = max(setting.warehouse_lead_times, default=1)
    return Network(torch.zeros(count, stores, max(setting.lead_times), dtype=dtype), torch.zeros(count, chain, longest, dtype=dtype))


def ship(setting: InventorySetting, network: Network, wanted: Orders) -> Orders:
    """Orders as far as they can be met: the outside supplier always can, a warehouse what it has."""
    chain = len(setting.warehouse_lead_times)
    if not chain:
        return wanted
    on_hand = network.warehouses[..., 0]
    upstream = [wanted.warehouses[:, 0], *(torch.minimum(wanted.warehouses[:, e], on_hand[:, e - 1]) for e in range(1, chain))]
    return Orders(allocate(wanted.stores, on_hand[:, -1], setting.allocation), torch.stack(upstream, dim=1))


def period(setting: InventorySetting, network: Network, shipped: Orders, demand: PerStore) -> tuple[Tensor, Network]:
    """Cost [B] of the whole network and its state a period later."""
    lead_time, holding, underage = setting.tensors(demand.dtype)
    cost, stores = store_step(network.stores, demand, shipped.stores, lead_time, holding, underage, lost=setting.lost)
    moved = []
    for e, (time, price) in enumerate(zip(setting.warehouse_lead_times, setting.warehouse_holding, strict=True)):
        last = e == len(setting.warehouse_lead_times) - 1
        leaving = shipped.stores if last else shipped.warehouses[:, e + 1 : e + 2]
        own, after = warehouse_step(network.warehouses[:, e, :time], leaving, shipped.warehouses[:, e], price)
        cost = cost + own
        moved.append(torch.nn.functional.pad(after, (0, network.warehouses.shape[2] - time)))
    return cost, Network(stores, torch.stack(moved, dim=1) if moved else network.warehouses)


def simulate(setting: InventorySetting, decide: Callable[[Network, int], Orders], demand: Float[Tensor, "B T K"]) -> Path:
    """All periods of a demand, from an empty network. `decide` maps a state and the period's number to what is asked for, before demand is seen."""
    network = empty_network(setting, len(demand), demand.dtype)
    costs, states, orders = [], [], []
    for t in range(demand.shape[1]):
        shipped = ship(setting, network, decide(network, t))
        states.append(network)
        orders.append(shipped)
        cost, network = period(setting, network, shipped, demand[:, t])
        costs.append(cost / setting.stores)
    return Path(torch.stack(costs, dim=1), states, orders)
