"""POW3R: when the weights are the human ones, what keeps a category's mass, absent criteria, smoothing, and the components in the loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anypo.methods.language.grpo import METHOD as GRPO
from anypo.methods.language.grpo import advantages as grpo_advantages
from anypo.methods.language.pow3r import (
    METHOD,
    PolicyAwareRubric,
    RubricReward,
    advantages,
    contrast,
    contrast_by_group,
    reward,
    reweighted,
    strict_completion,
    weights,
)
from tests.helpers import assert_resumes, assert_trains, trained

ONE_GROUP = torch.zeros(8, dtype=torch.int64)


def rubric(seed: int, criteria: int = 7, rows: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Binary grades [8,J] with a saturated and an unreachable criterion, positive weights and categories in no order."""
    g = torch.Generator().manual_seed(seed)
    grades = (torch.rand(rows, criteria, generator=g) < torch.rand(criteria, generator=g)).double()
    grades[:, 0], grades[:, 1] = 1.0, 0.0
    return grades, torch.rand(criteria, generator=g, dtype=torch.float64) * 5 + 0.1, torch.randint(0, 3, (criteria,), generator=g) * 4


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000))
def test_eta_zero_is_grpo_on_the_static_rubric_exactly(seed: int) -> None:
    grades, human, category = rubric(seed)
    assert torch.equal(weights(grades, human, category, eta=0.0), human)
    static = reward(grades, human, category).static
    assert torch.equal(advantages(grades, human, category, eta=0.0), grpo_advantages(static, ONE_GROUP))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), eta=st.sampled_from([0.3, 0.8, 1.0]))
def test_categories_keep_their_mass_and_order_follows_contrast(seed: int, eta: float) -> None:
    grades, human, category = rubric(seed)
    found, seen = weights(grades, human, category, eta), contrast(grades)
    assert (found >= 0).all()
    for name in category.unique():
        inside = category == name
        torch.testing.assert_close(found[inside].sum(), human[inside].sum())
        gain, order = (found / human)[inside], seen[inside].argsort()
        assert (gain[order].diff() >= -1e-12).all()


def test_equal_contrast_and_single_criteria_keep_the_human_weights() -> None:
    grades, human, category = rubric(0)
    torch.testing.assert_close(weights(grades[:, :1].expand(-1, 7) * torch.arange(8)[:, None] / 8, human, category), human)
    torch.testing.assert_close(weights(grades, human, torch.arange(7)), human)
    flat = torch.ones(8, 7, dtype=torch.float64)
    assert torch.equal(weights(flat, human, category, eta=1.0), human) and (advantages(flat, human, category) == 0).all()


def test_an_unreachable_criterion_keeps_a_floor_so_that_a_first_success_is_rewarded() -> None:
    grades, human, category = rubric(3)
    category[:] = 0
    assert 0 < weights(grades, human, category, eta=0.8)[1] < human[1] and weights(grades, human, category, eta=1.0)[1] == 0


def test_absent_criteria_change_nothing_whatever_their_grades() -> None:
    grades, human, category = rubric(1)
    human[2] = 0.0
    odd = grades.clone()
    odd[:, 2] = torch.nan
    rest = torch.arange(7) != 2
    for found, expected in zip(reward(odd, human, category), reward(grades[:, rest], human[rest], category[rest]), strict=True):
        torch.testing.assert_close(found, expected)
    assert weights(odd, human, category)[2] == 0
    assert strict_completion(torch.tensor([[1.0, 0.0], [0.9, 1.0]]), torch.tensor([1.0, 0.0])).tolist() == [True, False]


def test_groups_are_weighted_apart_and_rows_of_a_group_alike() -> None:
    cases = [rubric(seed) for seed in (4, 5)]
    _, human, category = cases[0]
    group = torch.tensor([7, 2]).repeat(8)
    grades = torch.stack([cases[0][0], cases[1][0]], dim=1).flatten(0, 1)
    found = reweighted(human.expand_as(grades), category.expand_as(grades), contrast_by_group(grades, group))
    for number, case in zip((7, 2), cases, strict=True):
        torch.testing.assert_close(found[group == number], weights(case[0], human, category).expand(8, -1))


def test_bad_settings_are_refused() -> None:
    grades, human, category = rubric(0)
    with pytest.raises(ValueError, match="1 - violation"):
        weights(grades, -human, category)
    with pytest.raises(ValueError, match="eta"):
        weights(grades, human, category, eta=1.5)
    with pytest.raises(ValueError, match="3 rubric weight numbers for 2 criteria"):
        trained(METHOD.but(reward=RubricReward(weights=(1.0, 2.0, 3.0))), 1, **TWO)


TWO: dict[str, Any] = {"reward": lambda prompt, action, mask: (action == 1).double(), "objectives": ("first", "second")}


def test_the_loop_reports_the_static_reward() -> None:
    method = METHOD.but(reward=RubricReward(weights=(3.0, 1.0), categories=(0, 0)))
    run = assert_trains(method, **TWO)
    assert all(0 <= record["reward"] <= 1 and "strict_completion" in record for record in run.history)
    assert any(record["weight_moved"] > 0 for record in run.history)


def test_eta_zero_and_one_reward_train_as_grpo() -> None:
    static = METHOD.but(reward=RubricReward(weights=(3.0, 1.0)), credit=PolicyAwareRubric(eta=0.0))
    grpo = GRPO.but(reward=static.reward)
    assert torch.equal(trained(static, 4, **TWO).policy.logits, trained(grpo, 4, **TWO).policy.logits)
    assert torch.equal(trained(METHOD, 4).policy.logits, trained(GRPO, 4).policy.logits)


def test_a_rubric_of_each_prompt_comes_by_signals() -> None:
    run = trained(METHOD, 1, **TWO)
    batch = run.collect(run.method.select(run.task, run))
    batch.signals["rubric_weight"] = torch.where(torch.arange(2) == batch.context[:, None] % 2, 1.0, 0.0).double()
    found = run.method.reward(batch, run)
    assert torch.equal(found, (batch.action == 1).double().gather(1, batch.context[:, None] % 2)[:, 0])
    batch.reward, batch.objectives = found, ()
    torch.testing.assert_close(run.method.credit(batch, run)[:, 0], grpo_advantages(found, batch.group))


def test_smoothing_mixes_a_prompts_earlier_contrast_in() -> None:
    credit = PolicyAwareRubric(smoothing=0.5)
    run = trained(METHOD, 1, **TWO)
    batch = run.collect(run.method.select(run.task, run))
    first = contrast_by_group((batch.action == 1).double(), batch.group)
    assert torch.equal(credit._smoothed(first, batch), first)
    torch.testing.assert_close(credit._smoothed(torch.zeros_like(first), batch), 0.5 * first)


def test_a_stopped_run_continues_identically(tmp_path: Path) -> None:
    assert_resumes(METHOD.but(credit=PolicyAwareRubric(smoothing=0.7)), tmp_path, **TWO)
