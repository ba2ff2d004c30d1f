"""Keys and values of running rows: prompts are read once and copied to the slots of their samples, then one token a row at a time is added.

`Slots` is preallocated and written in place; `Padded` wraps transformers' own cache for models that cannot take tree attention.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from anypo.domains.language.decoder import Decoder
from anypo.domains.language.network import Network, pad_right
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
    """Keys and values of all running rows, [rows, heads, columns, width] a layer, allocated once and written in place.

    Prompts end in the same column, so that every row writes its next token to the same place.
    """

    def __init__(self, network: Network, lengths: Int64[Tensor, " n"], extra: int) -> None:
        self.network = network
        self.columns = int(lengths.max())  # filled so far
        self.capacity = self.columns + extra
        self.rows = len(lengths)
        self.layers: list[tuple[Tensor, Tensor]] = []
        self.seen = (torch.arange(self.capacity) >= self.columns - lengths[:, None])[:, None, None, :].to(network.device)
        dtype = network.head.weight.dtype
        self.bias = None if bool(self.seen.all()) else torch.zeros_like(self.seen, dtype=dtype).masked_fill_(~self.seen, float("-inf"))
        self.decoder = None if network.direct is None else Decoder(network.direct, network.head, self.rows)
        self.room = torch.empty(0)  # for the logits of one step in float32

    def fill(self, recorded: Recorder, slots: Int64[Tensor, " m"], places: Int64[Tensor, "m columns"]) -> None:
        """Copy recorded prompts into `slots`; `places` says where in the recorded row each column lies (anywhere before a prompt's beginning)."""
        if not self.layers:
            heads, width = recorded.layers[0][0].shape[1], recorded.layers[0][0].shape[3]
            shape = (self.rows, heads, self.capacity, width)
            self.layers = [(key.new_empty(shape), value.new_empty(shape)) for key, value in recorded.layers]
        for stored, fresh in zip(self.layers, recorded.layers, strict=True):
            for to, source in zip(stored, fresh, strict=True):
                to[slots, :, : self.columns] = source[0][:, places].transpose(0, 1)

    def keep(self, order: Int64[Tensor, " m"]) -> None:
        """Slot i takes the row of slot order[i]; only rows that change places are copied."""
        holes = (order != torch.arange(len(order), device=order.device)).nonzero().flatten()
        self.rows = len(order)
        self.seen = self.seen[order]
        self.bias = self.bias[order] if self.bias is not None else None
        if len(holes):
            for pair in self.layers:
                for stored in pair:
                    stored[holes, :, : self.columns] = stored[order[holes], :, : self.columns]

    def step(self, token: Int64[Tensor, " n"], position: Int64[Tensor, " n"]) -> Float[Tensor, "n D"]:
        """The states after reading one more token a row."""
        self.columns += 1
        if self.decoder is not None:
            return self.decoder.step(token, position, self.write, None if self.bias is None else self.bias[..., : self.columns])
        return self.network(token[:, None], self.seen[..., : self.columns], position[:, None], cache=self)[0][:, 0]

    def logits(self, hidden: Float[Tensor, "n D"]) -> Float[Tensor, "n V"]:
        """float32 logits of the states that `step` gave; valid until the next call."""
        if self.decoder is None:
            return self.network.logits(hidden)
        found = self.decoder.head(hidden)
        if found.dtype == torch.float32:
            return self.network.scaled(found)
        if len(self.room) < len(found):
            self.room = found.new_empty(found.shape, dtype=torch.float32)
        return self.network.scaled(self.room[: len(found)].copy_(found))

    def write(self, key: Float[Tensor, "n K W"], value: Float[Tensor, "n K W"], layer: int) -> tuple[Tensor, Tensor]:
        """Put one token a row into the last column; all keys and values so far [n,K,columns,W]."""
        keys, values = self.layers[layer]
        keys, values = keys[: self.rows, :, : self.columns], values[: self.rows, :, : self.columns]
        keys[:, :, -1] = key
        values[:, :, -1] = value
        return keys, values

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """What the model's own attention calls."""
        return self.write(key[:, :, 0], value[:, :, 0], layer)

    def get_seq_length(self, *_: Any) -> int:
        return self.columns - 1


def _packed_prefill(network: Network, prompts: list[Tensor], extra: int) -> tuple[Slots, Float[Tensor, "n D"]]:
    distinct, owner = _distinct(prompts)
    cache = Slots(network, torch.tensor([len(p) for p in prompts]), extra)
    states = torch.empty(0)
    for row in pack(distinct, PREFILL_TOKENS):
        recorded = Recorder()
        read, _ = network.read_packed(row, cache=recorded)
        states = read.new_empty(len(prompts), read.shape[1]) if len(states) == 0 else states
        local = torch.full((len(distinct),), -1).index_copy(0, row.rows, torch.arange(len(row.rows)))[owner]
        mine = (local >= 0).nonzero().flatten()
        places = torch.zeros(len(row.rows), cache.columns, dtype=torch.int64)
        for i, path in enumerate(row.node):
            path = path[path >= 0]
            places[i, cache.columns - len(path) :] = path
        places = places[local[mine]].to(network.device)
        cache.fill(recorded, mine.to(network.device), places)
        states[mine] = read[places[:, -1]]
    return cache, states


class Padded:
    """The transformers cache behind a padding mask, for models that cannot take a mask per token."""

    def __init__(self, network: Network, cache: Any, exists: Bool[Tensor, "n S"]) -> None:
        self.network, self.cache, self.exists = network, cache, exists

    def keep(self, order: Int64[Tensor, " m"]) -> None:
        self.cache.reorder_cache(order)
        self.exists = self.exists[order]

    def step(self, token: Int64[Tensor, " n"], position: Int64[Tensor, " n"]) -> Float[Tensor, "n D"]:
        """The states after reading one more token a row."""
        self.exists = torch.cat([self.exists, self.exists.new_ones(len(self.exists), 1)], dim=1)
        return self.network(token[:, None], self.exists.long(), position[:, None], cache=self.cache)[0][:, 0]

    def logits(self, hidden: Float[Tensor, "n D"]) -> Float[Tensor, "n V"]:
        """float32 logits of the states that `step` gave."""
        return self.network.logits(hidden)


def _padded_prefill(network: Network, prompts: list[Tensor]) -> tuple[Padded, Float[Tensor, "n D"]]:
    from transformers import DynamicCache

    distinct, owner = _distinct(prompts)
    flipped, exists = (x.flip(1).to(network.device) for x in pad_right([p.flip(0) for p in distinct]))
    position = (exists.long().cumsum(dim=1) - 1).clamp(min=0)
    cache = Padded(network, DynamicCache(config=network.config), exists)
    states, _ = network(flipped, exists.long(), position, cache=cache.cache)
    cache.keep(owner.to(network.device))
    return cache, states[owner.to(network.device), -1]


def _distinct(prompts: list[Tensor]) -> tuple[list[Tensor], Int64[Tensor, " n"]]:
    """The different prompts, and which of them each is."""
    index: dict[bytes, int] = {}
    owner = [index.setdefault(p.cpu().numpy().tobytes(), len(index)) for p in prompts]
    first = {o: i for i, o in reversed(list(enumerate(owner)))}
    return [prompts[first[o]] for o in range(len(index))], torch.tensor(owner)
