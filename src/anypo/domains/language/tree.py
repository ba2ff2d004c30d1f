"""Packed trees: every token that several sequences share is computed once.

Sequences that begin alike (the rows of a group begin with the same prompt; branches of a tree share even more) form a trie. A packed row
holds the nodes of one or more tries, an attention mask in which a token sees its ancestors and itself, and positions by depth, so that one
forward pass over the packed row gives every sequence exactly the states that it would have had alone. Prefixes are found by comparing tokens,
so neither group numbers nor parent links have to be trusted. Left out: padding (rows are filled, never stretched).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int64
from torch import Tensor


@dataclass(frozen=True)
class PackedRow:
    """One or more tries laid out as a single row of L tokens, ancestors before descendants."""

    tokens: Int64[Tensor, " L"]
    position: Int64[Tensor, " L"]  # depth of the token in its sequence, from 0
    mask: Bool[Tensor, "L L"]  # mask[i,j]: token i attends to token j (j is an ancestor of i, or i itself)
    rows: Int64[Tensor, " n"]  # which sequences this row holds
    node: Int64[Tensor, "n S"]  # node[k,s]: where token s of sequence rows[k] lies in `tokens`; -1 beyond its end


def row_lengths(attended: Bool[Tensor, "N T"]) -> Int64[Tensor, " N"]:
    """Number of leading positions that exist in each row. Raises ValueError where they are not contiguous from 0."""
    lengths = attended.sum(dim=1)
    expected = torch.arange(attended.shape[1], device=attended.device) < lengths[:, None]
    if not torch.equal(attended, expected):
        row = int((attended != expected).any(dim=1).nonzero()[0])
        raise ValueError(f"row {row} has a gap: valid positions must be contiguous from 0 (tokens of tools and turns are valid, not masked away)")
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
    tokens = np.empty(total, dtype=np.int64)
    position = np.empty(total, dtype=np.int64)
    mask = np.zeros((total, total), dtype=bool)
    node = np.full((len(rows), max(lengths)), -1, dtype=np.int64)
    start, path = 0, np.empty(0, dtype=np.int64)
    for k, common, length in zip(order, shared, lengths, strict=True):
        end = start + length - common
        tokens[start:end] = arrays[rows[k]][common:]
        position[start:end] = np.arange(common, length)
        mask[start:end, path[:common]] = True
        mask[start:end, start:end] = np.tri(end - start, dtype=bool)
        path = np.concatenate([path[:common], np.arange(start, end)])
        node[k, :length] = path
        start = end
    return PackedRow(*(torch.from_numpy(a) for a in (tokens, position, mask)), torch.tensor(rows), torch.from_numpy(node))
