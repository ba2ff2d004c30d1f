"""Keys and values of running rows: prompts are read once and copied to the slots of their samples, then one token a row at a time is added.

`Slots` is preallocated and written in place; `Padded` wraps transformers' own cache for models that cannot take tree attention.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from anypo.domains.language.decoder import Decoder
from anypo.domains.language.network import Network, close, pad_right
from anypo.domains.language.tree import pack

PREFILL_TOKENS = 1024  # packed prompt tokens read in one forward pass


def prefill(network: Network, prompts: list[Tensor], extra: int) -> tuple[Slots | Padded, Float[Tensor, "n D"]]:
    """A cache that holds the prompts and has room for `extra` tokens a row, and the states after the prompts' last tokens.

    Equal prompts are read once; with tree attention, equal beginnings of prompts are too.
    """
    return _packed_prefill(network, prompts, extra) if network.takes_trees else _padded_prefill(network, prompts)


class Recorder:
    """Stands in for a cache while prompts are read: keeps the keys and values of each layer."""

    def __init__(self) -> None:
        self.layers: list[tuple[Tensor, Tensor]] = []

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.layers.append((key, value))
        return key, value

    def get_seq_length(self, *_: Any) -> int:
        return 0


class Slots:
    """Keys and values of all running rows, [rows, heads, columns, width] a layer, allocated once and written in place."""

    def __init__(self, lengths: Int64[Tensor, " n"], extra: int, device: torch.device) -> None:
        self.columns = int(lengths.max())  # filled so far
        self.capacity = self.columns + extra
        self.rows = len(lengths)
        self.layers: list[tuple[Tensor, Tensor]] = []
        self.seen = (torch.arange(self.capacity) >= self.columns - lengths[:, None])[:, None, None, :].to(device)

    def fill(self, recorded: Recorder, node: Int64[Tensor, "k S"], slots: list[Tensor]) -> None:
        """Copy the prompt whose tokens lie at `node[i]` into the slots `slots[i]`, so that it ends in the last filled column."""
        if not self.layers:
            heads, width = recorded.layers[0][0].shape[1], recorded.layers[0][0].shape[3]
            shape = (self.rows, heads, self.capacity, width)
            self.layers = [(key.new_empty(shape), value.new_empty(shape)) for key, value in recorded.layers]
        for places, mine in zip(node, slots, strict=True):
            places = places[places >= 0]
            first = self.columns - len(places)
            for stored, fresh in zip(self.layers, recorded.layers, strict=True):
                for to, source in zip(stored, fresh, strict=True):
                    to[mine, :, :first] = 0  # never attended to, but must be finite
                    to[mine, :, first : self.columns] = source[0][:, places]

    def keep(self, order: Int64[Tensor, " m"]) -> None:
        """Slot i takes the row of slot order[i]; only rows that change places are copied."""
        holes = (order != torch.arange(len(order), device=order.device)).nonzero().flatten()
        self.rows = len(order)
        self.seen = self.seen[order]
        if len(holes):
            for pair in self.layers:
                for stored in pair:
                    stored[holes, :, : self.columns] = stored[order[holes], :, : self.columns]

    def step(self, network: Network, token: Int64[Tensor, " n"], position: Int64[Tensor, " n"]) -> Float[Tensor, "n D"]:
        """The states after reading one more token a row."""
        if self.decoder is None:
            return self._step(network, token, position)
        self.columns += 1
        return self.decoder(token, position, self.update, self.seen[..., : self.columns])

    def _step(self, network: Network, token: Tensor, position: Tensor) -> Tensor:
        self.columns += 1
        return network(token[:, None], self.seen[..., : self.columns], position[:, None], cache=self)[0][:, 0]

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        keys, values = self.layers[layer]
        keys[: self.rows, :, self.columns - 1] = key[:, :, 0]
        values[: self.rows, :, self.columns - 1] = value[:, :, 0]
        return keys[: self.rows, :, : self.columns], values[: self.rows, :, : self.columns]

    def get_seq_length(self, *_: Any) -> int:
        return self.columns - 1


def _packed_prefill(network: Network, prompts: list[Tensor], extra: int) -> tuple[Slots, Float[Tensor, "n D"]]:
    """Slots that hold the prompts, and the states after their last tokens. Equal prompts, and equal beginnings of prompts, are read once."""
    distinct, owner = _distinct(prompts)
    slots = Slots(torch.tensor([len(p) for p in prompts]), extra, network.device)
    last: list[Tensor] = [torch.empty(0)] * len(distinct)
    for row in pack(distinct, PREFILL_TOKENS):
        recorded = Recorder()
        states, _ = network.read_packed(row, cache=recorded)
        slots.fill(recorded, row.node.to(network.device), [(owner == i).nonzero().flatten().to(network.device) for i in row.rows.tolist()])
        for i, places in zip(row.rows.tolist(), row.node, strict=True):
            last[i] = states[places[places >= 0][-1]]
    return slots, torch.stack(last)[owner.to(network.device)]


class Padded:
    """The transformers cache behind a padding mask, for models that cannot take a mask per token."""

    def __init__(self, cache: Any, exists: Bool[Tensor, "n S"]) -> None:
        self.cache, self.exists = cache, exists

    def keep(self, order: Int64[Tensor, " m"]) -> None:
        self.cache.reorder_cache(order)
        self.exists = self.exists[order]

    def step(self, network: Network, token: Int64[Tensor, " n"], position: Int64[Tensor, " n"]) -> Float[Tensor, "n D"]:
        """The states after reading one more token a row."""
        self.exists = torch.cat([self.exists, self.exists.new_ones(len(self.exists), 1)], dim=1)
        return network(token[:, None], self.exists.long(), position[:, None], cache=self.cache)[0][:, 0]


def _padded_prefill(network: Network, prompts: list[Tensor]) -> tuple[Padded, Float[Tensor, "n D"]]:
    from transformers import DynamicCache

    distinct, owner = _distinct(prompts)
    flipped, exists = (x.flip(1).to(network.device) for x in pad_right([p.flip(0) for p in distinct]))
    position = (exists.long().cumsum(dim=1) - 1).clamp(min=0)
    cache = Padded(DynamicCache(config=network.config), exists)
    states, _ = network(flipped, exists.long(), position, cache=cache.cache)
    cache.keep(owner.to(network.device))
    return cache, states[owner.to(network.device), -1]


def _distinct(prompts: list[Tensor]) -> tuple[list[Tensor], Int64[Tensor, " n"]]:
    """The different prompts, and which of them each is."""
    index: dict[bytes, int] = {}
    owner = [index.setdefault(p.cpu().numpy().tobytes(), len(index)) for p in prompts]
    first = {o: i for i, o in reversed(list(enumerate(owner)))}
    return [prompts[first[o]] for o in range(len(index))], torch.tensor(owner)
