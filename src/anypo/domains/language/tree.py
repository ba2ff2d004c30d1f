"""Packed trees: every token that several sequences share is computed once.

Sequences that begin alike (the rows of a group begin with the same prompt; branches of a tree share even more) form a trie. A packed row
lays the tokens of one or more tries out in one row, ancestors first, with positions by depth; a token attends to its ancestors and itself, so
that one forward pass gives every sequence exactly the states that it would have had alone. The edges of the trie (the prompt, each branch) are
the blocks that attention is computed in: a query of an edge needs the keys of its own path only. Prefixes are found by comparing tokens, so
neither group numbers nor parent links have to be trusted. Rows are filled, not padded to the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

ALIGNMENT, ALIGNED_FROM = (
    16,
    256,
)  # a few tokens that nothing looks at make long rows a multiple of the processor's tiles: a quarter less time in bfloat16
SLACK = 1 << 14  # query-key pairs that may be wasted to save one call of the attention kernel


@dataclass
class Block:
    """Edges of similar size, attended to in one call. Places are indices into the packed row; padding points at place 0."""

    query: Int64[Tensor, "b Q"]
    key: Int64[Tensor, "b S"]
    seen: Bool[Tensor, "b Q S"] | None  # query i of an edge sees key j of its path; None: the paths are the edges themselves, so causal
    _bias: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)

    def bias(self, groups: int, dtype: torch.dtype) -> Float[Tensor, "b 1 gQ S"] | None:
        """The mask as a term to add to the scores, repeated for the `groups` query heads that share a key head."""
        if self.seen is None:
            return None
        if (groups, dtype) not in self._bias:
            added = torch.zeros_like(self.seen, dtype=dtype).masked_fill_(~self.seen, float("-inf"))
            self._bias[groups, dtype] = added[:, None].repeat(1, 1, groups, 1)
        return self._bias[groups, dtype]


@dataclass(frozen=True)
class PackedRow:
    """One or more tries laid out as a single row of L tokens."""

    tokens: Int64[Tensor, " L"]  # long rows end in a few that belong to no sequence
    position: Int64[Tensor, " L"]  # depth of the token in its sequence, from 0
    rows: Int64[Tensor, " n"]  # which sequences this row holds
    node: Int64[Tensor, "n S"]  # node[k,s]: where token s of sequence rows[k] lies in `tokens`; -1 beyond its end
    blocks: list[Block]  # the edges of the tries, each in exactly one block
    output: Int64[Tensor, " L"]  # where each token lies among the queries of all blocks, laid one after another

    @cached_property
    def mask(self) -> Bool[Tensor, "L L"]:
        """mask[i,j]: token i attends to token j (an ancestor, or itself). The dense form of `blocks`."""
        mask = torch.zeros(len(self.tokens), len(self.tokens), dtype=torch.bool)
        for path in self.node:
            path = path[path >= 0]
            mask[path[:, None], path[None, :]] = torch.ones(len(path), len(path), dtype=torch.bool).tril()
        return mask

    def to(self, device: torch.device) -> PackedRow:
        """This row on another device."""
        if device.type == "cpu":
            return self
        blocks = [Block(b.query.to(device), b.key.to(device), None if b.seen is None else b.seen.to(device)) for b in self.blocks]
        tokens, position, rows, node = (x.to(device) for x in (self.tokens, self.position, self.rows, self.node))
        return PackedRow(tokens, position, rows, node, blocks, self.output.to(device))


def row_lengths(attended: Bool[Tensor, "N T"]) -> Int64[Tensor, " N"]:
    """Number of leading positions that exist in each row. Raises ValueError where they are not contiguous from 0."""
    lengths = attended.sum(dim=1)
    expected = torch.arange(attended.shape[1], device=attended.device) < lengths[:, None]
    if not torch.equal(attended, expected):
        row = int((attended != expected).any(dim=1).nonzero()[0])
        raise ValueError(
            f"row {row} has a gap: valid positions must be contiguous from 0 (tokens of tools and turns are valid, only not in `mask`)"
        )
    return lengths


def pack(sequences: Sequence[Tensor], budget: int, prompt_lengths: Sequence[int] | None = None) -> list[PackedRow]:
    """The sequences (1-D int64 tensors of one token or more) as packed rows of at most `budget` tokens each (a longer sequence has its own)."""
    arrays = [s.detach().cpu().numpy() for s in sequences]
    return [_layout(arrays, rows) for rows in bins(sequences, budget, prompt_lengths)]


def bins(sequences: Sequence[Tensor], budget: int, prompt_lengths: Sequence[int] | None = None) -> list[list[int]]:
    """Which sequences share a packed row: index lists that cover every sequence once, each of at most `budget` distinct tokens.

    Sequences that share a prefix are neighbours. Those with one prompt (the first `prompt_lengths[i]` tokens) are torn apart only when they
    exceed the budget by themselves.
    """
    arrays = [s.detach().cpu().numpy() for s in sequences]
    order, shared = _sorted_by_prefix(arrays)
    filled: list[list[int]] = []
    used = 0
    for start, end in _units(arrays, order, prompt_lengths):
        fresh = [len(arrays[order[i]]) - shared[i] for i in range(start, end)]
        whole = sum(fresh) + shared[start]  # without a neighbour to lean on, the first sequence pays for its shared prefix too
        joins = bool(filled) and used + sum(fresh) <= budget
        if joins or whole <= budget:
            if not joins:
                filled.append([])
            used = used + sum(fresh) if joins else whole
            filled[-1] += order[start:end]
            continue
        for i in range(start, end):
            cost = fresh[i - start]
            if not filled or used + cost > budget:
                filled.append([])
                used, cost = 0, len(arrays[order[i]])
            used += cost
            filled[-1].append(order[i])
    return filled


def _units(arrays: list[np.ndarray], order: list[int], prompt_lengths: Sequence[int] | None) -> list[tuple[int, int]]:
    """Runs of neighbours in `order` that have one prompt, as (start, end); single sequences when no prompt lengths are given."""
    if prompt_lengths is None:
        return [(i, i + 1) for i in range(len(order))]
    prompts = [arrays[i][: int(prompt_lengths[i])].tobytes() for i in order]
    starts = [i for i in range(len(order)) if i == 0 or prompts[i] != prompts[i - 1]]
    return list(zip(starts, [*starts[1:], len(order)], strict=True))


def _sorted_by_prefix(arrays: list[np.ndarray]) -> tuple[list[int], list[int]]:
    """An order in which sequences with a common prefix are neighbours, and how many tokens each shares with the one before it."""
    for i, array in enumerate(arrays):
        if len(array) == 0:
            raise ValueError(f"sequence {i} is empty: a prompt needs at least one token for the first action to be conditioned on")
    # Any order of fixed-width codes groups equal prefixes; bytes compare fastest.
    order = sorted(range(len(arrays)), key=lambda i: arrays[i].tobytes())
    shared = [0]
    for previous, current in zip(order[:-1], order[1:], strict=True):
        a, b = arrays[previous], arrays[current]
        short = min(len(a), len(b))
        differs = a[:short] != b[:short]
        shared.append(int(differs.argmax()) if differs.any() else short)
    return order, shared


def _layout(arrays: list[np.ndarray], rows: list[int]) -> PackedRow:
    """The trie of the given sequences, numbered so that ancestors come first."""
    order, shared = _sorted_by_prefix([arrays[i] for i in rows])
    lengths = [len(arrays[rows[k]]) for k in order]
    total = sum(lengths) - sum(shared)
    tokens, position, parent, owner = (np.empty(total, dtype=np.int64) for _ in range(4))
    filler = -total % ALIGNMENT if total >= ALIGNED_FROM else 0
    node = np.full((len(rows), max(lengths)), -1, dtype=np.int64)
    start, path = 0, np.empty(0, dtype=np.int64)
    for k, common, length in zip(order, shared, lengths, strict=True):
        end = start + length - common
        tokens[start:end] = arrays[rows[k]][common:]
        position[start:end] = np.arange(common, length)
        path = np.concatenate([path[:common], np.arange(start, end)])
        parent[start:end] = np.concatenate([[-1], path])[common:length]
        owner[start:end] = k
        node[k, :length] = path
        start = end
    children = np.bincount(parent[parent >= 0], minlength=total)
    begins = (parent != np.arange(total) - 1) | (parent < 0) | (children[parent] > 1)
    starts = begins.nonzero()[0]
    ends = [*starts[1:], total]
    edges = [(s, node[owner[e - 1], : position[e - 1] + 1]) for s, e in zip(starts, ends, strict=True)]
    blocks, output = _blocks(edges, total)
    tokens, position, output = (np.pad(x, (0, filler)) for x in (tokens, position, output))
    return PackedRow(
        torch.from_numpy(tokens), torch.from_numpy(position), torch.tensor(rows), torch.from_numpy(node), blocks, torch.from_numpy(output)
    )


def _blocks(edges: list[tuple[int, np.ndarray]], total: int) -> tuple[list[Block], np.ndarray]:
    """Edges (first place, places of the whole path) in blocks of similar size, and the place of every token among the blocks' queries."""
    sized = sorted(((len(path), int(path[-1]) - start + 1, start, path) for start, path in edges), key=lambda e: (e[0] == e[1], e[0], e[1]))
    bundles: list[list[tuple[int, int, int, np.ndarray]]] = []
    area = 0
    for edge in sized:
        if bundles:
            joined = [*bundles[-1], edge]
            padded = len(joined) * edge[0] * max(e[1] for e in joined)
            same_kind = (edge[0] == edge[1]) == (joined[0][0] == joined[0][1])
            if same_kind and padded <= max(1.5 * (area + edge[0] * edge[1]), area + edge[0] * edge[1] + SLACK):
                bundles[-1], area = joined, area + edge[0] * edge[1]
                continue
        bundles.append([edge])
        area = edge[0] * edge[1]
    blocks, output, offset = [], np.empty(total, dtype=np.int64), 0
    for bundle in bundles:
        longest, widest = max(e[0] for e in bundle), max(e[1] for e in bundle)
        query, key = np.zeros((len(bundle), widest), dtype=np.int64), np.zeros((len(bundle), longest), dtype=np.int64)
        seen = np.zeros((len(bundle), widest, longest), dtype=bool)
        seen[:, :, 0] = True  # a padded query must see something for its softmax to be finite
        for i, (length, width, start, path) in enumerate(bundle):
            query[i, :width], key[i, :length] = np.arange(start, start + width), path
            seen[i, :width, :length] = np.tri(width, length, length - width, dtype=bool)
            output[start : start + width] = offset + i * widest + np.arange(width)
        offset += query.size
        causal = all(e[0] == e[1] for e in bundle)
        blocks.append(Block(torch.from_numpy(query), torch.from_numpy(key), None if causal else torch.from_numpy(seen)))
    return blocks, output
