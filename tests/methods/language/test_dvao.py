"""DVAO: what it reduces to, the bound against summed rewards, groups without spread, and the component in the loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anypo.methods.language import gdpo, grpo
from anypo.methods.language.dvao import METHOD, VarianceAdaptive, adaptive_weights, advantages, sensitivity
from anypo.seams.groups import standardize
from anypo.seams.objective import ClippedSurrogate
from tests.helpers import assert_resumes, assert_trains, trained


def rewards(seed: int, rows: int = 12, objectives: int = 3) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, objectives, generator=g, dtype=torch.float64), torch.randperm(rows, generator=g) % 3


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), weight=st.floats(0.1, 10))
def test_one_reward_is_grpo(seed: int, weight: float) -> None:
    reward, group = rewards(seed, objectives=1)
    torch.testing.assert_close(advantages(reward, group, (weight,), eps=0.0), grpo.advantages(reward[:, 0], group, eps=0.0))


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (0.2, 0.5, 3.0)])
def test_equal_deviations_are_static_weights(weights: tuple[float, ...]) -> None:
    reward, group = rewards(0)
    alike = standardize(reward, group, eps=0.0)
    normalized = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    torch.testing.assert_close(advantages(alike, group, weights, eps=0.0), gdpo.advantage_combination(alike, group, normalized, eps=0.0))


@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_correlated_rewards_are_summed_rewards(factor: float) -> None:
    reward, group = rewards(1, objectives=1)
    both = torch.cat([reward, factor * reward + 2], dim=1)
    torch.testing.assert_close(advantages(both, group, (1.0, 0.3), eps=0.0), gdpo.reward_combination(both, group, (1.0, 0.3), eps=0.0))


def test_a_flat_objective_drops_out_entirely() -> None:
    reward, group = rewards(2, objectives=2)
    flat = torch.cat([reward, torch.full((len(reward), 1), 0.1, dtype=torch.float64)], dim=1)
    weights = adaptive_weights(flat, group, (1.0, 1.0, 5.0))
    assert weights[:, 2].eq(0).all()
    torch.testing.assert_close(advantages(flat, group, (1.0, 1.0, 5.0)), advantages(reward, group, (1.0, 1.0)))


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10_000), first=st.floats(0.01, 5), second=st.floats(0.01, 5), eps=st.sampled_from([0.0, 1e-8, 1e-4]))
def test_never_beyond_the_summed_rewards(seed: int, first: float, second: float, eps: float) -> None:
    reward, group = rewards(seed, objectives=2)
    mine = advantages(reward, group, (first, second), eps=eps)
    summed = gdpo.reward_combination(reward, group, (first, second), eps=0.0)
    assert (mine.abs() <= summed.abs() + 1e-9).all() and (mine * summed >= -1e-12).all()
    assert (mine**2).mean() <= 1 + 1e-9


def test_weights_sum_to_one_where_anything_varies() -> None:
    reward, group = rewards(3)
    torch.testing.assert_close(adaptive_weights(reward, group, (1.0, 2.0, 3.0), eps=0.0).sum(1), torch.ones(12, dtype=torch.float64))


@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_flat_and_lone_groups_have_no_advantage(eps: float) -> None:
    constant = torch.full((4, 2), 0.1, dtype=torch.float64)
    group = torch.tensor([0, 0, 0, 1])
    assert advantages(constant, group, (1, 1), eps=eps).eq(0).all()
    assert adaptive_weights(constant, group, (1, 1), eps=eps).eq(0).all()


def test_sensitivity_is_the_derivative() -> None:
    reward, _ = rewards(4, rows=6, objectives=2)
    group, weights = torch.zeros(6, dtype=torch.int64), (0.3, 0.7)
    jacobian = torch.autograd.functional.jacobian(lambda r: advantages(r, group, weights, eps=0.0), reward)
    own = torch.stack([jacobian[i, i] for i in range(6)])
    torch.testing.assert_close(own, sensitivity(reward, weights))


def two_rewards(prompt: Tensor, action: Tensor, mask: Tensor) -> Tensor:
    return torch.stack([(action[:, 0] == 1).double(), 5.0 * (action[:, 1] == 2).double()], dim=1)


def test_the_loop_trains_with_several_rewards_and_with_one() -> None:
    run = assert_trains(METHOD, reward=two_rewards, objectives=("correct", "format"))
    assert {"weight/correct", "weight/format"} <= run.history[-1].keys()
    assert_trains(METHOD)


def test_the_credit_works_with_another_objective() -> None:
    method = METHOD.but(objective=ClippedSurrogate(aggregation="constant"))
    assert_trains(method, reward=two_rewards, objectives=("correct", "format"))


def test_weights_must_match_the_rewards() -> None:
    with pytest.raises(ValueError, match="3 weights for 2 rewards"):
        trained(METHOD.but(credit=VarianceAdaptive(weights=(1.0, 1.0, 1.0))), 1, reward=two_rewards, objectives=("correct", "format"))


def test_a_stopped_run_continues_identically(tmp_path: Path) -> None:
    assert_resumes(METHOD, tmp_path, reward=two_rewards, objectives=("correct", "format"))
