"""Policies that order: a perceptron over the whole state, a graph network shaped like the supply network, and plain base-stock levels.

Left out: policies with memory (demand is independent from period to period here).
"""

from __future__ import annotations

import json
import math
from collections.abc import Set
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from anypo.batch import Batch
from anypo.domains.combinatorial.inventory import Network, Orders, simulate
from anypo.domains.combinatorial.inventory_settings import InventorySetting
from anypo.policy import Policy, Signals

BODIES = ("mlp", "graph", "base_stock")
HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)
ROUNDS = 2  # of messages in the graph network


class InventoryPolicy(Policy):
    """One number for every lane, first those of the K stores, then those of the E warehouses, made into a request >= 0.

    Provides `cost` [N,T], the simulated cost a store and period of the batch's demand (signal `demand` [N,T,K]), differentiable in the weights
    through all periods. A stochastic policy adds Gaussian noise to its numbers and provides `logp` and `entropy` [N,T] as well; a batch's actions
    [N,T,K+E] are the numbers after the noise, its context [N,T,F] the states as `flatten` gives them.
    """

    optimizer = "adam"

    def __init__(
        self, setting: InventorySetting, body: str = "mlp", *, stochastic: bool = False, hidden: int = 32, initial_log_std: float = 0.0, seed: int = 0
    ) -> None:  # fmt: skip
        """Weights depend on `seed` alone. Raises ValueError for an unknown body."""
        super().__init__()
        if body not in BODIES:
            raise ValueError(f"unknown inventory policy '{body}'; use {', '.join(BODIES)}")
        self.setting, self.kind, self.stochastic, self.hidden = setting, body, stochastic, hidden
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.body: nn.Module = {"mlp": Perceptron, "graph": GraphNetwork, "base_stock": BaseStock}[body](setting, hidden)
        lanes = setting.stores + setting.warehouses
        self.log_std = nn.Parameter(torch.full((lanes,), float(initial_log_std))) if stochastic else None
        self.learning_rate = {"mlp": 3e-3, "graph": 1e-3, "base_stock": 0.1}[body]
        self.memoryless = stochastic  # a cost belongs to its whole path
        self.provides = frozenset({"cost"} | ({"logp", "entropy"} if stochastic else set()))
        self.name = f"{body} inventory policy"

    def requests(self, numbers: Float[Tensor, "B D"]) -> Orders:
        """The body's numbers as what is asked for."""
        wanted = torch.relu(numbers) if self.kind == "base_stock" else nn.functional.softplus(numbers + 1)
        return Orders(wanted[:, : self.setting.stores], wanted[:, self.setting.stores :])

    def decide(self, network: Network, period: int = 0) -> Orders:
        """What is asked for without noise; the period's number plays no part."""
        return self.requests(self.body(network))

    def evaluate(self, batch: Batch, needs: Set[str]) -> Signals:
        signals = Signals()
        if "cost" in needs:
            signals["cost"] = simulate(self.setting, self.decide, batch.signal("demand")).cost
        if self.log_std is not None and needs & {"logp", "entropy"}:
            mean = self.body(unflatten(self.setting, batch.context.flatten(0, 1))).view(batch.action.shape)
            scaled = (batch.action - mean) * (-self.log_std).exp()
            density = -(0.5 * scaled**2 + self.log_std + HALF_LOG_TWO_PI).sum(-1)
            signals["logp"] = torch.where(batch.mask, density, torch.zeros_like(density))
            signals["entropy"] = (self.log_std + 0.5 + HALF_LOG_TWO_PI).sum().expand(batch.mask.shape)
        return Signals({name: value for name, value in signals.items() if name in needs})

    def save_pretrained(self, folder: Path | str) -> None:
        """Weights and setting in a folder, which `load_policy` reads."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        setting = {name: value for name, value in asdict(self.setting).items() if not name.startswith("_")}
        options = {"body": self.kind, "stochastic": self.stochastic, "hidden": self.hidden}
        save_file({name: value.contiguous() for name, value in self.state_dict().items()}, folder / "policy.safetensors")
        (folder / "inventory.json").write_text(json.dumps({"setting": setting, "options": options}, indent=1))


def load_policy(folder: Path) -> InventoryPolicy:
    """A saved policy: a run's folder or its model/ folder. Raises ValueError when there is none."""
    folder = folder if (folder / "inventory.json").exists() else folder / "model"
    if not (folder / "inventory.json").exists():
        raise ValueError(f"{folder} holds no saved inventory policy (no inventory.json); give the folder of a run or its model/ folder")
    saved = json.loads((folder / "inventory.json").read_text())
    fields: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in saved["setting"].items()}
    policy = InventoryPolicy(InventorySetting(**fields), **saved["options"])
    policy.load_state_dict(load_file(folder / "policy.safetensors"))
    return policy


def flatten(network: Network) -> Float[Tensor, "B F"]:
    """A state as one vector, stores first."""
    if not network.warehouses.shape[1]:
        return network.stores.flatten(1)
    return torch.cat([network.stores.flatten(1), network.warehouses.flatten(1)], dim=1)


def unflatten(setting: InventorySetting, flat: Float[Tensor, "B F"]) -> Network:
    """The inverse of `flatten`."""
    longest = max(setting.lead_times)
    stores, warehouses = flat.split([setting.stores * longest, flat.shape[1] - setting.stores * longest], dim=1)
    return Network(
        stores.view(-1, setting.stores, longest),
        warehouses.view(len(flat), setting.warehouses, -1) if setting.warehouses else warehouses.new_zeros(len(flat), 0, 1),
    )


class Perceptron(nn.Sequential):
    """Three hidden layers over the flat state."""

    def __init__(self, setting: InventorySetting, hidden: int) -> None:
        inputs = setting.stores * max(setting.lead_times) + setting.warehouses * max(setting.warehouse_lead_times, default=1)
        sizes = (inputs, hidden, hidden, hidden)
        layers = [layer for a, b in zip(sizes[:-1], sizes[1:], strict=True) for layer in (nn.Linear(a, b), nn.ELU())]
        super().__init__(*layers, nn.Linear(hidden, setting.stores + setting.warehouses))

    def forward(self, network: Network) -> Tensor:
        return super().forward(flatten(network))


class BaseStock(nn.Module):
    """A level for every place; what is missing to it, counting what is on hand, waiting and under way."""

    def __init__(self, setting: InventorySetting, hidden: int = 0) -> None:
        super().__init__()
        means = [*setting.mean, *[sum(setting.mean)] * setting.warehouses]
        leads = [*setting.lead_times, *setting.warehouse_lead_times]
        self.levels = nn.Parameter(torch.tensor([mean * (lead + 1) for mean, lead in zip(means, leads, strict=True)]))

    def forward(self, network: Network) -> Tensor:
        return self.levels - torch.cat([network.stores.sum(2), network.warehouses.sum(2)], dim=1)


class GraphNetwork(nn.Module):
    """Nodes: the outside supplier, the warehouses, the stores; edges: the lanes between them. Weights are shared by all nodes and by all edges, so
    that stores that change places change their orders with them.

    A node sees its pipeline, its prices, its lead time, the mean and deviation of its demand (of a warehouse: of all its stores') and its kind. Mean
    and deviation are not in the paper's list: without them, or a memory, stores of unlike demand cannot be told apart.
    """

    source: Tensor
    target: Tensor
    fixed: Tensor
    incoming: Tensor
    outgoing: Tensor

    def __init__(self, setting: InventorySetting, hidden: int) -> None:
        super().__init__()
        stores, chain = setting.stores, setting.warehouses
        supplier, last = stores + chain, stores + chain - 1 if chain else stores
        upstream = [supplier, *range(stores, stores + chain - 1)] if chain else []
        self.register_buffer("source", torch.tensor([last] * stores + upstream))
        self.register_buffer("target", torch.arange(stores + chain))
        self.register_buffer("fixed", _node_facts(setting))
        lanes = torch.nn.functional.one_hot(torch.stack([self.target, self.source]), supplier + 1).float().transpose(1, 2)  # [2,V,D]
        self.register_buffer("incoming", lanes[0] / lanes[0].sum(1, keepdim=True).clamp(min=1))
        self.register_buffer("outgoing", lanes[1] / lanes[1].sum(1, keepdim=True).clamp(min=1))
        self.longest = max(*setting.lead_times, *setting.warehouse_lead_times) if chain else max(setting.lead_times)
        self.encode_node = _two_layers(self.longest + self.fixed.shape[1], hidden)
        self.encode_edge = _two_layers(1, hidden)
        self.edge_messages = nn.ModuleList(_two_layers(3 * hidden, hidden) for _ in range(ROUNDS))
        self.node_messages = nn.ModuleList(_two_layers(3 * hidden, hidden) for _ in range(ROUNDS))
        self.out = _two_layers(hidden, hidden, 1)

    def forward(self, network: Network) -> Tensor:
        count = len(network.stores)
        pipelines = [nn.functional.pad(x, (0, self.longest - x.shape[2])) for x in network]
        nothing = pipelines[0].new_zeros(count, 1, self.longest)
        fixed = self.fixed.to(nothing.dtype)
        node = self.encode_node(torch.cat([torch.cat([*pipelines, nothing], dim=1), fixed.expand(count, -1, -1)], dim=2))
        edge = self.encode_edge(fixed[self.target, LEAD_TIME : LEAD_TIME + 1]).expand(count, -1, -1)
        for to_edge, to_node in zip(self.edge_messages, self.node_messages, strict=True):
            edge = edge + to_edge(torch.cat([edge, node[:, self.source], node[:, self.target]], dim=2))
            node = node + to_node(torch.cat([node, self.incoming.to(edge.dtype) @ edge, self.outgoing.to(edge.dtype) @ edge], dim=2))
        return self.out(edge).squeeze(2)


LEAD_TIME = 2  # column of the node facts


def _node_facts(setting: InventorySetting) -> Float[Tensor, "V 8"]:
    """Holding, underage, lead time, mean, deviation, and whether store, warehouse or supplier; stores, warehouses, supplier."""
    deviation = setting.deviation or tuple(mean**0.5 for mean in setting.mean)  # of Poisson demand
    columns = (setting.holding, setting.underage, setting.lead_times, setting.mean, deviation)
    rows = [[*facts, 1.0, 0.0, 0.0] for facts in zip(*columns, strict=True)]
    spread = sum(x**2 for x in deviation) ** 0.5
    for price, lead in zip(setting.warehouse_holding, setting.warehouse_lead_times, strict=True):
        rows.append([price, 0.0, lead, sum(setting.mean), spread, 0.0, 1.0, 0.0])
    return torch.tensor([*rows, [0.0] * 7 + [1.0]])


def _two_layers(inputs: int, hidden: int, outputs: int | None = None) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ELU(), nn.Linear(hidden, hidden if outputs is None else outputs))
