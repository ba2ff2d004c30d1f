"""Keys and values of running rows: prompts are read once and copied to the slots of their samples, then one token a row at a time is added.

`Slots` is preallocated and written in place; `Shared` keeps a prompt once for all its samples where that is worth more than it costs; `Padded`
wraps transformers' own cache for models that cannot take tree attention.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from anypo.domains.language.decoder import Decoder
from anypo.domains.language.kernels import Columns, attend
from anypo.domains.language.network import Network, pad_right
from anypo.domains.language.tree import pack

PREFILL_TOKENS = 1024  # packed prompt tokens read in one forward pass
SHARED_BYTES = 2 << 20  # keys and values a layer that must be spared for a prompt to be kept once: its attention costs ten calls more


def prefill(network: Network, prompts: list[Tensor], extra: int) -> tuple[Slots | Shared | Padded, Float[Tensor, "n D"]]:
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


class _Stepping:
    """What `Slots` and `Shared` have in common: a step of the decoder, and its logits."""

    network: Network
    decoder: Decoder | None

    def __init__(self, network: Network, decoder: Decoder | None) -> None:
        self.network, self.decoder = network, decoder
        self.room = torch.empty(0)  # for the logits of one step in float32

    def _room(self, recorded: Recorder, shape: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
        """Memory for the keys and values of each layer, in the precision that the decoder works in."""
        dtype = torch.float32 if self.decoder is not None and self.decoder.in_c else recorded.layers[0][0].dtype
        return [(key.new_empty(shape, dtype=dtype), value.new_empty(shape, dtype=dtype)) for key, value in recorded.layers]

    def logits(self, hidden: Float[Tensor, "n D"]) -> Float[Tensor, "n V"]:
        """float32 logits of the states that `step` gave; valid until the next call."""
        if self.network.push is not None:
            hidden = hidden + self.network.push.to(hidden)
        if self.decoder is None:
            return self.network.logits(hidden)
        found = self.decoder.head(hidden)
        if found.dtype == torch.float32:
            return self.network.scaled(found)
        if len(self.room) < len(found):
            self.room = found.new_empty(found.shape, dtype=torch.float32)
        return self.network.scaled(self.room[: len(found)].copy_(found))


class Slots(_Stepping):
    """Keys and values of all running rows, [rows, heads, columns, width] a layer, allocated once and written in place.

    Prompts end in the same column, so that every row writes its next token to the same place.
    """

    def __init__(
        self, network: Network, decoder: Decoder | None, lengths: Int64[Tensor, " G"], owner: Int64[Tensor, " n"], extra: int
    ) -> None:
        """`lengths` of the distinct prompts, and which of them each row begins with."""
        super().__init__(network, decoder)
        self.owner = owner
        self.columns = int(lengths.max())  # filled so far
        self.capacity = self.columns + extra
        self.rows = len(owner)
        self.layers: list[tuple[Tensor, Tensor]] = []
        self.first = self.columns - lengths[owner]  # where each row begins
        self.seen = (torch.arange(self.capacity) >= self.first[:, None])[:, None, None, :].to(network.device)
        self.bias = _bias(self.seen, network.head.weight.dtype)

    def fill(self, recorded: Recorder, prompts: Int64[Tensor, " m"], places: Int64[Tensor, "m columns"]) -> None:
        """Copy recorded `prompts` to their rows; `places` says where in the recorded row each column lies (anywhere before a prompt's beginning)."""
        if not self.layers:
            heads, width = recorded.layers[0][0].shape[1], recorded.layers[0][0].shape[3]
            self.layers = self._room(recorded, (self.rows, heads, self.capacity, width))
        slots = torch.isin(self.owner, prompts).nonzero().flatten()
        local = torch.empty(int(prompts.max()) + 1, dtype=torch.int64).index_copy(0, prompts, torch.arange(len(prompts)))[self.owner[slots]]
        slots, places = slots.to(places.device), places[local.to(places.device)]
        for stored, fresh in zip(self.layers, recorded.layers, strict=True):
            for to, source in zip(stored, fresh, strict=True):
                to[slots, :, : self.columns] = source[0][:, places].transpose(0, 1).to(to.dtype)

    def keep(self, order: Int64[Tensor, " m"]) -> None:
        """Slot i takes the row of slot order[i]; only rows that change places are copied."""
        holes = (order != torch.arange(len(order), device=order.device)).nonzero().flatten()
        self.rows = len(order)
        self.seen, self.first = self.seen[order], self.first[order]
        self.bias = self.bias[order] if self.bias is not None else None
        _move(self.layers, holes, order, self.columns)

    def step(self, token: Int64[Tensor, " n"], position: Int64[Tensor, " n"]) -> Float[Tensor, "n D"]:
        """The states after reading one more token a row."""
        self.columns += 1
        if self.decoder is not None:
            return self.decoder.step(token, position, self.attend)
        return self.network(token[:, None], self.seen[..., : self.columns], position[:, None], cache=self)[0][:, 0]

    def attend(self, mixed: Float[Tensor, "n H+2K W"], layer: int, scale: float) -> Float[Tensor, "n H W"]:
        """What the queries of one token a row see in all keys so far, its own included."""
        if self.decoder is not None and self.decoder.in_c:
            return attend(mixed, Columns(*self.layers[layer], self.columns, self.first), None, None, scale)
        query, key, value = _parted(mixed, self.layers[layer][0].shape[1])
        keys, values = self.write(key, value, layer)
        bias = None if self.bias is None else self.bias[..., : self.columns]
        return scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=scale).flatten(1, 2)

    def write(self, key: Float[Tensor, "n K W"], value: Float[Tensor, "n K W"], layer: int) -> tuple[Tensor, Tensor]:
        """Put one token a row into the last column; all keys and values so far [n,K,columns,W]."""
        return _append(self.layers[layer], self.rows, self.columns, key, value)

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """What the model's own attention calls."""
        return self.write(key[:, :, 0], value[:, :, 0], layer)

    def get_seq_length(self, *_: Any) -> int:
        return self.columns - 1


class Shared(_Stepping):
    """Prompts once, [prompts, heads, columns, width] a layer, and the rows' own tokens apart from them, [rows, heads, columns, width].

    The samples of a prompt stand in line as so many queries of its keys, so that these are read once a step and not once a row. The two halves of a
    row's attention are joined by their normalizers: of weights exp(a) and exp(b), the first half has sigmoid(a - b).
    """

    @staticmethod
    def pays(network: Network, decoder: Decoder | None, lengths: Int64[Tensor, " G"], rows: int) -> bool:
        """Whether it spares enough: without attention of our own it needs the CPU kernel that returns normalizers, and many rows of long prompts."""
        if network.direct is None or decoder is None or network.device.type != "cpu":
            return False
        key_weight = network.direct.layers[0].key[0]
        a_token = 2 * key_weight.shape[0] * key_weight.element_size()
        spared = int(lengths.max()) * (rows - len(lengths)) * a_token
        return spared > 0 if decoder.in_c else spared >= SHARED_BYTES

    def __init__(
        self, network: Network, decoder: Decoder | None, lengths: Int64[Tensor, " G"], owner: Int64[Tensor, " n"], extra: int
    ) -> None:
        """`lengths` of the distinct prompts, and which of them each row begins with."""
        super().__init__(network, decoder)
        self.extra, self.width = extra, int(lengths.max())
        self.columns = 0  # own tokens so far
        self.prompts: list[tuple[Tensor, Tensor]] = []
        self.own: list[tuple[Tensor, Tensor]] = []
        self.first = self.width - lengths  # where each prompt begins
        self.bias = _bias((torch.arange(self.width) >= self.first[:, None])[:, None, None, :], network.head.weight.dtype)
        self._line_up(owner, len(lengths))

    def _line_up(self, owner: Int64[Tensor, " n"], prompts: int) -> None:
        """Which rows ask each prompt, as a table of `prompts` lines that are filled up with row 0, and where in it each row stands."""
        self.owner, self.asked = owner, prompts
        order = owner.argsort(stable=True)
        counts = torch.bincount(owner, minlength=prompts)
        self.samples = int(counts.max())
        rank = torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner[order]]
        self.place = torch.empty_like(owner).index_copy(0, order, owner[order] * self.samples + rank)
        self.table = torch.zeros(prompts * self.samples, dtype=torch.int64).index_copy(0, self.place, torch.arange(len(owner)))
        self.regular = torch.equal(self.place, torch.arange(len(self.table)))

    def fill(self, recorded: Recorder, prompts: Int64[Tensor, " m"], places: Int64[Tensor, "m columns"]) -> None:
        """Keep recorded `prompts`; `places` says where in the recorded row each column lies (anywhere before a prompt's beginning)."""
        if not self.prompts:
            heads, width = recorded.layers[0][0].shape[1], recorded.layers[0][0].shape[3]
            shape, own = (self.asked, heads, self.width, width), (len(self.owner), heads, self.extra, width)
            self.prompts, self.own = self._room(recorded, shape), self._room(recorded, own)
        for stored, fresh in zip(self.prompts, recorded.layers, strict=True):
            for to, source in zip(stored, fresh, strict=True):
                to[prompts] = source[0][:, places].transpose(0, 1).to(to.dtype)

    def keep(self, order: Int64[Tensor, " m"]) -> None:
        """Row i takes the place of row order[i]; prompts that nobody asks any more give theirs to the last ones."""
        _move(self.own, (order != torch.arange(len(order))).nonzero().flatten(), order, self.columns)
        owner = self.owner[order]
        asked = torch.bincount(owner, minlength=self.asked) > 0
        moved = survivors(asked)
        if len(moved) < self.asked:
            _move(self.prompts, (moved != torch.arange(len(moved))).nonzero().flatten(), moved, self.width)
            self.bias, self.first = self.bias[moved] if self.bias is not None else None, self.first[moved]
            owner = torch.empty(self.asked, dtype=torch.int64).index_copy(0, moved, torch.arange(len(moved)))[owner]
        self._line_up(owner, len(moved))

    def step(self, token: Int64[Tensor, " n"], position: Int64[Tensor, " n"]) -> Float[Tensor, "n D"]:
        """The states after reading one more token a row."""
        self.columns += 1
        assert self.decoder is not None
        return self.decoder.step(token, position, self.attend)

    def attend(self, mixed: Float[Tensor, "n H+2K W"], layer: int, scale: float) -> Float[Tensor, "n H W"]:
        """What the queries of one token a row see in its prompt and in its own keys so far."""
        if self.decoder is not None and self.decoder.in_c:
            return attend(
                mixed, Columns(*self.own[layer], self.columns), Columns(*self.prompts[layer], self.width, self.first), self.owner, scale
            )
        query, key, value = _parted(mixed, self.own[layer][0].shape[1])
        own, own_weight = _attention(query, *_append(self.own[layer], len(query), self.columns, key, value), None, scale)
        asking = query if self.regular else query[self.table]
        lines = asking.unflatten(0, (self.asked, self.samples)).transpose(1, 2).flatten(2, 3)
        keys, values = (x[: self.asked] for x in self.prompts[layer])
        found, weight = (self._by_row(x) for x in _attention(lines, keys, values, self.bias, scale))
        return torch.lerp(own, found, (weight - own_weight).sigmoid_().unsqueeze(-1).to(own.dtype)).flatten(1, 2)

    def _by_row(self, found: Float[Tensor, "G K Mg *W"]) -> Float[Tensor, "n K g *W"]:
        rows = found.unflatten(2, (self.samples, -1)).transpose(1, 2).flatten(0, 1)
        return rows if self.regular else rows[self.place]


def _parted(
    mixed: Float[Tensor, "n H+2K W"], key_heads: int
) -> tuple[Float[Tensor, "n K g W"], Float[Tensor, "n K W"], Float[Tensor, "n K W"]]:
    """Queries, keys and values. Query heads that share a key head stand in line as several queries, so that the keys need not be repeated."""
    query, key, value = mixed.split([mixed.shape[1] - 2 * key_heads, key_heads, key_heads], dim=1)
    return query.unflatten(1, (key_heads, -1)), key, value


def _attention(
    query: Float[Tensor, "b K q W"], key: Float[Tensor, "b K S W"], value: Float[Tensor, "b K S W"], bias: Tensor | None, scale: float
) -> tuple[Float[Tensor, "b K q W"], Float[Tensor, "b K q"]]:
    """Attention and the logarithm of each query's normalizer, on a CPU."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, attn_mask=bias, scale=scale)


def _append(stored: tuple[Tensor, Tensor], rows: int, columns: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Put one token a row into the last of so many columns; all that are filled."""
    keys, values = stored[0][:rows, :, :columns], stored[1][:rows, :, :columns]
    keys[:, :, -1] = key
    values[:, :, -1] = value
    return keys, values


def _move(layers: list[tuple[Tensor, Tensor]], holes: Int64[Tensor, " h"], order: Int64[Tensor, " m"], columns: int) -> None:
    """Rows order[holes] of every layer take the places `holes`."""
    if len(holes):
        for pair in layers:
            for stored in pair:
                stored[holes, :, :columns] = stored[order[holes], :, :columns]


def _bias(seen: Bool[Tensor, "n 1 1 S"], dtype: torch.dtype) -> Float[Tensor, "n 1 1 S"] | None:
    """What is added to scores, -inf where nothing must be seen; None where all is."""
    return None if bool(seen.all()) else torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, float("-inf"))


def survivors(alive: Bool[Tensor, " n"]) -> Int64[Tensor, " m"]:
    """Which row each slot holds after the living rows at the end have moved into the slots of the others; slots before `m` that live stay."""
    count = int(alive.sum())
    order = torch.arange(count)
    order[~alive[:count]] = count + alive[count:].nonzero().flatten()
    return order


def _packed_prefill(network: Network, prompts: list[Tensor], extra: int) -> tuple[Slots | Shared, Float[Tensor, "n D"]]:
    distinct, owner = _distinct(prompts)
    lengths = torch.tensor([len(p) for p in distinct])
    decoder = None if network.direct is None else Decoder(network.direct, network.head, len(owner))
    cache = (Shared if Shared.pays(network, decoder, lengths, len(owner)) else Slots)(network, decoder, lengths, owner, extra)
    columns = int(lengths.max())
    last = torch.empty(0)
    for row in pack(distinct, PREFILL_TOKENS):
        recorded = Recorder()
        read, _ = network.read_packed(row, cache=recorded)
        last = read.new_empty(len(distinct), read.shape[1]) if len(last) == 0 else last
        places = torch.zeros(len(row.rows), columns, dtype=torch.int64)
        for i, path in enumerate(row.node):
            path = path[path >= 0]
            places[i, columns - len(path) :] = path
        cache.fill(recorded, row.rows, places.to(network.device))
        last[row.rows.to(network.device)] = read[places[:, -1].to(network.device)]
    return cache, last[owner.to(network.device)]


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
