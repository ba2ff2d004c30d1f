"""Group statistics against plain loops, and what must not matter: order, adjacency, numbering, and what lies outside masks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anypo.seams import groups

REWARDS = st.sampled_from([-2.0, 0.0, 0.1, 0.3, 1.0, 7.5])
BATCHES = st.lists(st.tuples(REWARDS, st.integers(-3, 4)), min_size=1, max_size=14)
FUNCTIONS = {
    "sum": groups.group_sum,
    "mean": groups.group_mean,
    "std": groups.group_std,
    "std1": lambda v, g: groups.group_std(v, g, ddof=1),
    "max": groups.group_max,
    "min": groups.group_min,
    "standardize": groups.standardize,
    "leave_one_out": groups.leave_one_out_mean,
}


def tensors(batch: list[tuple[float, int]]) -> tuple[Tensor, Tensor]:
    return torch.tensor([r for r, _ in batch], dtype=torch.float64), torch.tensor([g for _, g in batch])


def naive(name: str, values: list[float], i: int) -> float:
    """The statistic of one group for its member i, written out."""
    n, mean = len(values), sum(values) / len(values)
    spread = sum((v - mean) ** 2 for v in values)
    if name == "sum":
        return sum(values)
    if name == "mean":
        return mean
    if name in ("max", "min"):
        return max(values) if name == "max" else min(values)
    if name == "std":
        return (spread / n) ** 0.5
    if name == "std1":
        return (spread / (n - 1)) ** 0.5 if n > 1 else 0.0
    if name == "standardize":
        return (values[i] - mean) / ((spread / n) ** 0.5 + 1e-6) if len(set(values)) > 1 else 0.0
    return (sum(values) - values[i]) / (n - 1) if n > 1 else values[i]


@pytest.mark.parametrize("name", FUNCTIONS)
@settings(max_examples=40, deadline=None)
@given(batch=BATCHES)
def test_equals_a_plain_loop_over_groups(name: str, batch: list[tuple[float, int]]) -> None:
    values, group = tensors(batch)
    found = FUNCTIONS[name](values, group)
    for i, (_, number) in enumerate(batch):
        members = [j for j, (_, g) in enumerate(batch) if g == number]
        wanted = naive(name, [batch[j][0] for j in members], members.index(i))
        assert float(found[i]) == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize("name", FUNCTIONS)
@settings(max_examples=25, deadline=None)
@given(batch=BATCHES, data=st.data())
def test_order_and_numbering_do_not_matter(name: str, batch: list[tuple[float, int]], data: st.DataObject) -> None:
    values, group = tensors(batch)
    order = torch.tensor(data.draw(st.permutations(range(len(batch)))))
    found = FUNCTIONS[name](values, group)
    torch.testing.assert_close(FUNCTIONS[name](values[order], group[order]), found[order], atol=1e-12, rtol=1e-9)
    torch.testing.assert_close(FUNCTIONS[name](values, 1000 - 17 * group), found, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_columns_are_independent(name: str) -> None:
    values = torch.randn(9, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    group = torch.tensor([0, 1, 2] * 3)
    found = FUNCTIONS[name](values, group)
    for k in range(3):
        torch.testing.assert_close(found[:, k], FUNCTIONS[name](values[:, k], group))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_rows_give_no_values(name: str) -> None:
    empty = torch.zeros(0, dtype=torch.float64)
    assert FUNCTIONS[name](empty, torch.zeros(0, dtype=torch.int64)).shape == (0,)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e6, -7.3])
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_equal_members_standardize_to_exactly_zero(value: float, eps: float) -> None:
    values = torch.full((7,), value, dtype=torch.float64)
    assert groups.standardize(values, torch.zeros(7, dtype=torch.int64), eps=eps).eq(0).all()
    assert not groups.has_spread(values, torch.zeros(7, dtype=torch.int64)).any()


def test_lone_members_have_no_deviation_and_no_baseline_of_their_own() -> None:
    values, group = torch.tensor([3.0, 1.0, 2.0]), torch.tensor([5, 7, 7])
    assert groups.group_std(values, group, ddof=1)[0] == 0
    assert groups.standardize(values, group, ddof=1)[0] == 0
    assert groups.leave_one_out_mean(values, group)[0] == 3
    assert groups.group_size(group).tolist() == [1, 2, 2]


def test_masked_statistics_see_only_the_mask() -> None:
    values = torch.tensor([[1.0, 2.0, float("nan")], [6.0, float("inf"), float("-inf")]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    inside = torch.tensor([1.0, 2.0, 6.0])
    for m in (mask, mask.float()):
        torch.testing.assert_close(groups.masked_mean(values, m), inside.mean())
        torch.testing.assert_close(groups.masked_std(values, m), inside.std(correction=0))
        torch.testing.assert_close(groups.masked_std(values, m, ddof=1), inside.std(correction=1))


def test_a_full_mask_gives_what_a_ragged_one_does() -> None:
    values = torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wider = torch.cat([values, torch.full((4, 1), float("nan"), dtype=torch.float64)], dim=1)
    mask = torch.tensor([True, True, True, False]).expand(4, 4)
    torch.testing.assert_close(groups.masked_mean(values, mask[:, :3]), groups.masked_mean(wider, mask))
    torch.testing.assert_close(groups.masked_std(values, mask[:, :3]), groups.masked_std(wider, mask))


def test_empty_masks_give_zero_and_no_gradient_trouble() -> None:
    values = torch.full((2, 3), float("nan"), requires_grad=True)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    mean = groups.masked_mean(values, mask)
    mean.backward()
    assert mean == 0 and groups.masked_std(values.detach(), mask) == 0
    assert values.grad is not None and values.grad.eq(0).all()


def test_broadcast_is_zero_outside_the_mask() -> None:
    mask = torch.tensor([[True, False], [False, False]])
    found = groups.broadcast(torch.tensor([2.0, float("nan")]), mask)
    assert found.tolist() == [[2.0, 0.0], [0.0, 0.0]]
