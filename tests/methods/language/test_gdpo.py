"""GDPO: with one reward it is GRPO; objectives without spread, weights, conditions, and the component in the loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anypo.methods.language import grpo
from anypo.methods.language.gdpo import METHOD, DecoupledNormalization, advantage_combination, advantages, condition, reward_combination
from tests.helpers import assert_resumes, assert_trains, trained


def rewards(seed: int, rows: int = 12, objectives: int = 3) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, objectives, generator=g, dtype=torch.float64), torch.randperm(rows, generator=g) % 3


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000))
def test_one_reward_in_one_group_is_grpo(seed: int) -> None:
    reward, _ = rewards(seed, objectives=1)
    group = torch.zeros(len(reward), dtype=torch.int64)
    torch.testing.assert_close(advantages(reward, group, (1.0,), eps=0.0), grpo.advantages(reward[:, 0], group, eps=0.0))


@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_proportional_rewards_combine_alike(factor: float) -> None:
    reward, group = rewards(0, objectives=1)
    both = torch.cat([reward, factor * reward], dim=1)
    summed, decoupled = (f(both, group, (1.0, 1.0), eps=0.0) for f in (reward_combination, advantage_combination))
    torch.testing.assert_close(decoupled, 2 * summed)


def test_an_objective_without_spread_contributes_nothing() -> None:
    reward, group = rewards(1, objectives=2)
    flat = torch.cat([reward, torch.full((len(reward), 1), 0.1, dtype=torch.float64)], dim=1)
    torch.testing.assert_close(advantages(flat, group, (1.0, 2.0, 5.0), eps=0.0), advantages(reward, group, (1.0, 2.0), eps=0.0))
    constant = torch.ones(6, 2, dtype=torch.float64)
    assert advantages(constant, torch.arange(6) % 2, (1, 1), eps=0.0).eq(0).all()


def test_the_total_is_normalized_over_the_whole_batch() -> None:
    reward, group = rewards(2)
    reward[group == 1] = 1.0  # a group without an advantage is part of the statistics
    found = advantages(reward, group, (1.0, 1.0, 1.0), eps=0.0)
    assert abs(found.mean()) < 1e-12 and abs(found.std(correction=0) - 1) < 1e-12
    plain = advantages(reward, group, (1.0, 1.0, 1.0), eps=0.0, batch_norm=False)
    torch.testing.assert_close(found, plain / plain.std(correction=0))
    assert found[group == 1].abs().max() < 1e-12


def test_scale_of_a_reward_does_not_matter_but_its_weight_does() -> None:
    reward, group = rewards(3, objectives=2)
    scaled = reward * torch.tensor([100.0, 1.0])
    torch.testing.assert_close(advantages(scaled, group, (1, 1), eps=0.0), advantages(reward, group, (1, 1), eps=0.0))
    assert not torch.allclose(advantages(reward, group, (5, 1)), advantages(reward, group, (1, 1)))


def test_conditions_read_the_raw_hard_reward_and_leave_the_input_alone() -> None:
    reward = torch.tensor([[1.0, 1.0, 0.2], [0.0, 1.0, 0.9], [1.0, 0.5, 0.9]])
    before = reward.clone()
    assert condition(reward, [(1, 0, 1.0)]).tolist() == [
        [1.0, 1.0, pytest.approx(0.2)],
        [0, 0, pytest.approx(0.9)],
        [1, 0.5, pytest.approx(0.9)],
    ]
    chained = condition(reward, [(1, 0, 1.0), (2, 1, 0.6)])
    assert chained[:, 2].tolist() == [pytest.approx(0.2), pytest.approx(0.9), 0.0]
    assert torch.equal(reward, before)


def two_rewards(prompt: Tensor, action: Tensor, mask: Tensor) -> Tensor:
    return torch.stack([(action[:, 0] == 1).double(), 5.0 * (action[:, 1] == 2).double()], dim=1)


def test_the_loop_trains_with_several_rewards_and_with_one() -> None:
    run = assert_trains(METHOD, reward=two_rewards, objectives=("correct", "format"))
    assert {"reward/correct", "reward/format"} <= run.history[-1].keys()
    assert_trains(METHOD)


def test_weights_must_match_the_rewards() -> None:
    with pytest.raises(ValueError, match="3 weights for 2 rewards"):
        method = METHOD.but(credit=DecoupledNormalization(weights=(1.0, 1.0, 1.0)))
        trained(method, 1, reward=two_rewards, objectives=("correct", "format"))


def test_conditions_must_name_objectives_that_exist() -> None:
    with pytest.raises(ValueError, match="objective 4"):
        method = METHOD.but(credit=DecoupledNormalization(conditions=((4, 0, 1.0),)))
        trained(method, 1, reward=two_rewards, objectives=("correct", "format"))


def test_a_stopped_run_continues_identically(tmp_path: Path) -> None:
    assert_resumes(METHOD, tmp_path, reward=two_rewards, objectives=("correct", "format"))
