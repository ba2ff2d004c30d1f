"""Packing: the trie is right, and packed rows give what plain rows give."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from anypo.domains.language.tree import PackedRow, bins, pack, row_lengths

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=9)


def read_back(sequences: list[Tensor], budget: int, prompt_lengths: list[int] | None = None) -> dict[int, list[int]]:
    found = {}
    for row in pack(sequences, budget, prompt_lengths):
        for which, places in zip(row.rows.tolist(), row.node, strict=True):
            found[which] = row.tokens[places[places >= 0]].tolist()
    return found


def dense(row: PackedRow) -> Tensor:
    """The attention mask that the blocks stand for, read at the places their outputs are read from."""
    seen_by = []
    for block in row.blocks:
        seen = torch.ones(*block.query.shape, block.key.shape[1]).tril().bool() if block.seen is None else block.seen
        for i, key in enumerate(block.key):
            for sees in seen[i]:
                seen_by.append(torch.zeros(len(row.tokens), dtype=torch.bool).index_fill(0, key[sees], True))
    return torch.stack(seen_by)[row.output]


@settings(max_examples=60, deadline=None)
@given(SEQUENCES, st.integers(1, 30), st.booleans())
def test_packed_rows_hold_every_sequence_once(lists: list[list[int]], budget: int, with_prompts: bool) -> None:
    sequences = [torch.tensor(x) for x in lists]
    prompt_lengths = [max(1, len(x) // 2) for x in lists] if with_prompts else None
    assert read_back(sequences, budget, prompt_lengths) == dict(enumerate(lists))


@settings(max_examples=60, deadline=None)
@given(SEQUENCES, st.integers(1, 30), st.booleans())
def test_a_token_sees_exactly_its_own_prefix(lists: list[list[int]], budget: int, with_prompts: bool) -> None:
    sequences = [torch.tensor(x) for x in lists]
    for row in pack(sequences, budget, [1] * len(lists) if with_prompts else None):
        for places in row.node:
            path = places[places >= 0].tolist()
            for depth, node in enumerate(path):
                assert row.mask[node].nonzero().flatten().tolist() == path[: depth + 1]
                assert row.position[node] == depth
        assert torch.equal(dense(row), row.mask)
        assert len(row.tokens) <= budget or len(row.rows) == 1
        assert set(row.node[row.node >= 0].tolist()) == set(range(len(row.tokens)))  # nothing is padding


def test_a_prefix_is_stored_once() -> None:
    prompt = torch.arange(100, 228)
    group = [torch.cat([prompt, torch.full((48,), i)]) for i in range(8)]
    (row,) = pack(group, 1024)
    assert len(row.tokens) == 128 + 8 * 48


def test_groups_stay_together_unless_they_exceed_the_budget() -> None:
    def group(prompt: int, members: int) -> list[Tensor]:
        return [torch.tensor([prompt, prompt, 10 + i, 10 + i]) for i in range(members)]

    interleaved = [s for pair in zip(group(1, 3), group(2, 3), strict=True) for s in pair]
    assert sorted(map(sorted, bins(interleaved, 12, [2] * 6))) == [[0, 2, 4], [1, 3, 5]]
    assert [len(b) for b in bins(group(1, 6), 8, [2] * 6)] == [3, 3]
    assert bins(interleaved, 16, [2] * 6) in ([[0, 2, 4, 1, 3, 5]], [[1, 3, 5, 0, 2, 4]])


def test_gaps_and_empty_sequences_are_refused() -> None:
    assert row_lengths(torch.tensor([[True, True, False], [False, False, False]])).tolist() == [2, 0]
    with pytest.raises(ValueError, match="row 1 has a gap"):
        row_lengths(torch.tensor([[True, True], [False, True]]))
    with pytest.raises(ValueError, match="sequence 1 is empty"):
        pack([torch.tensor([1]), torch.tensor([], dtype=torch.int64)], 8)
