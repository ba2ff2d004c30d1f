"""BNPO: the two fixed normalizers it contains, extreme groups, decomposition, and the component in the loop."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anypo.methods.language import grpo
from anypo.methods.language.bnpo import METHOD, advantages, beta_params, normalizer, success_rates, variance_factor
from anypo.seams.groups import broadcast, group_mean
from tests.helpers import assert_resumes, assert_trains, trained


def rows(seed: int, groups: int = 4, size: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    """Binary rewards, groups in no order, ragged mask."""
    g = torch.Generator().manual_seed(seed)
    count = groups * size
    length = torch.randint(1, 5, (count,), generator=g)
    return torch.randint(2, (count,), generator=g).double(), torch.randperm(count, generator=g) % groups, torch.arange(4) < length[:, None]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000))
def test_a_uniform_normalizer_is_the_plain_baseline(seed: int) -> None:
    reward, group, mask = rows(seed)
    found = advantages(reward, group, mask, alpha=1.0, beta=1.0)
    torch.testing.assert_close(found, broadcast(reward - group_mean(reward, group), mask))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000))
def test_three_halves_is_grpo_times_pi_eighths(seed: int) -> None:
    reward, group, mask = rows(seed)
    found = advantages(reward, group, mask, alpha=1.5, beta=1.5)
    torch.testing.assert_close(found, math.pi / 8 * broadcast(grpo.advantages(reward, group, eps=0.0), mask))


def test_one_column_is_no_decomposition_and_several_are_averaged() -> None:
    reward, group, mask = rows(0)
    other = rows(1)[0]
    torch.testing.assert_close(advantages(reward[:, None], group, mask), advantages(reward, group, mask))
    both = advantages(torch.stack([reward, other], dim=1), group, mask)
    torch.testing.assert_close(both, (advantages(reward, group, mask) + advantages(other, group, mask)) / 2)


def test_groups_without_contrast_get_exactly_nothing() -> None:
    reward = torch.tensor([1.0, 1, 0, 0, 1, 0], dtype=torch.float64)
    group, mask = torch.tensor([0, 0, 1, 1, 2, 2]), torch.ones(6, 2, dtype=torch.bool)
    for fixed in (None, 1.0, 1.5, 8.0):
        found = advantages(reward, group, mask, alpha=fixed, beta=fixed)
        assert found[:4].eq(0).all() and torch.isfinite(found).all()


@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
def test_batches_whose_groups_are_all_alike_stay_finite(rate: float) -> None:
    reward = torch.tensor([rate > 0, rate == 1] * 4).double()
    group, mask = torch.arange(4).repeat_interleave(2), torch.ones(8, 1, dtype=torch.bool)
    found = beta_params(reward, group)
    assert all(math.isfinite(x) for x in found) and found.alpha >= 1 and found.beta >= 1
    assert torch.isfinite(advantages(reward, group, mask)).all()


def test_one_group_is_the_plain_baseline() -> None:
    reward, group, mask = torch.tensor([0.0, 1.0, 1.0]), torch.zeros(3, dtype=torch.int64), torch.ones(3, 1, dtype=torch.bool)
    fitted = beta_params(reward, group)
    assert fitted.alpha == fitted.beta == 1
    torch.testing.assert_close(advantages(reward, group, mask)[:, 0], reward - reward.mean())


def test_a_wide_spread_of_rates_floors_the_normalizer() -> None:
    reward, group = torch.tensor([1.0, 1, 0, 0, 1, 1, 0, 0]), torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    fitted = beta_params(reward, group)
    assert fitted.a < 0 and fitted.alpha == fitted.beta == 1


def test_a_lone_member_has_rate_zero() -> None:
    assert success_rates(torch.tensor([1.0, 1.0, 0.0]), torch.tensor([0, 1, 1])).tolist() == [0.0, 0.5, 0.5]


def test_the_normalizer_is_capped() -> None:
    ends = normalizer(torch.tensor([0.0, 1.0], dtype=torch.float64), 2.0, 3.0, w_max=50.0)
    assert ends.tolist() == [50.0, 50.0]
    assert normalizer(torch.tensor([0.0, 1.0]), 1.0, 1.0).tolist() == [1.0, 1.0]


def test_variance_is_least_at_the_stated_optimum_and_infinite_beyond_its_range() -> None:
    a, b = 2.0, 5.0
    best = variance_factor(a, b, 1 + a / 3, 1 + b / 3)
    assert all(best < variance_factor(a, b, 1 + a / 3 + da, 1 + b / 3 + db) for da, db in ((0.1, 0), (-0.1, 0), (0, 0.1), (0, -0.1)))
    assert variance_factor(a, b, 2.5, 1.0) == math.inf


def two_rewards(prompt: Tensor, action: Tensor, mask: Tensor) -> Tensor:
    return torch.stack([(action[:, 0] == 1).double(), (action[:, 1] == 2).double()], dim=1)


def test_the_loop_trains_with_one_reward_and_with_several() -> None:
    assert "beta_alpha" in assert_trains(METHOD).history[-1]
    assert_trains(METHOD, reward=two_rewards, objectives=("correct", "format"))


def test_rewards_of_another_range_are_mapped_and_strange_ones_refused() -> None:
    def signed(prompt: Tensor, action: Tensor, mask: Tensor) -> Tensor:
        return 2 * (action[:, 0] == 1).double() - 1

    assert_trains(METHOD.set("credit.lowest", -1.0), reward=signed)
    with pytest.raises(ValueError, match=r"credit\.lowest"):
        trained(METHOD, 1, reward=signed)


def test_a_stopped_run_continues_identically(tmp_path: Path) -> None:
    assert_resumes(METHOD, tmp_path)
