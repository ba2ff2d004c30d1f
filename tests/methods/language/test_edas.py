"""EDAS: what it reduces to, its invariants, answer names, and the component on any credit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.language.toys.toy_arith import GruPolicy, ToyArith
from anypo.loops.on_policy import train
from anypo.methods.language.dapo import METHOD as DAPO
from anypo.methods.language.edas import (
    METHOD,
    ErrorDiversity,
    clipped_shift,
    delta,
    ramp,
    shaped_advantages,
)
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.run import Run
from anypo.seams.answers import answer_keys, answer_of, canonical
from anypo.seams.credit import GroupRelative
from anypo.seams.groups import group_sum, standardize
from tests.helpers import assert_resumes, assert_trains, trained


def rows(seed: int, count: int = 40, kinds: int = 3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Advantages of GRPO on 0/1 rewards, correct, error key, group."""
    g = torch.Generator().manual_seed(seed)
    correct = torch.randint(2, (count,), generator=g)
    group = torch.randperm(count, generator=g) % 5
    key = torch.where(correct.bool(), -1, torch.randint(kinds, (count,), generator=g))
    return standardize(correct.double(), group), correct, key, group


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000))
def test_without_strength_or_with_infinite_kappa_it_is_the_base(seed: int) -> None:
    advantages, correct, key, group = rows(seed)
    assert torch.equal(shaped_advantages(advantages, correct, key, group, 0.0, 0.0, 2.0), advantages)
    assert torch.equal(shaped_advantages(advantages, correct, key, group, 0.4, 0.2, float("inf")), advantages)


def test_distinct_errors_and_two_equal_classes_are_left_alone() -> None:
    advantages = torch.tensor([2.0, -0.5, -0.5, -0.5, -0.5], dtype=torch.float64)
    correct, group = torch.tensor([1, 0, 0, 0, 0]), torch.zeros(5, dtype=torch.int64)
    for key in ([-1, 0, 1, 2, 3], [-1, 7, 7, 4, 4]):
        assert delta(advantages, correct, torch.tensor(key), group, 0.4, 0.2).abs().max() < 1e-15


def test_the_dominant_error_is_punished_more_and_a_rare_one_less() -> None:
    advantages = torch.tensor([2.0, -0.5, -0.5, -0.5, -0.5], dtype=torch.float64)
    correct, group = torch.tensor([1, 0, 0, 0, 0]), torch.zeros(5, dtype=torch.int64)
    shaped = shaped_advantages(advantages, correct, torch.tensor([-1, 7, 7, 7, 4]), group, 0.4, 0.2, 2.0)
    assert shaped[0] == 2 and (shaped[1:4] < -0.5).all() and -0.5 < shaped[4] < 0
    same = shaped_advantages(advantages, correct, torch.tensor([-1, 7, 7, 7, 7]), group, 0.4, 0.2, 2.0)
    torch.testing.assert_close(same[1:], torch.full((4,), -0.6, dtype=torch.float64))


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10_000), alpha=st.floats(0, 5), beta=st.floats(0, 5), kappa=st.floats(1.01, 10))
def test_invariants(seed: int, alpha: float, beta: float, kappa: float) -> None:
    advantages, correct, key, group = rows(seed)
    shaped = shaped_advantages(advantages, correct, key, group, alpha, beta, kappa)
    assert (shaped * advantages >= 0).all()
    assert torch.equal(shaped[correct.bool()], advantages[correct.bool()])
    assert ((shaped - advantages).abs() <= advantages.abs() / kappa + 1e-12).all()
    moved = delta(advantages, correct, key, group, alpha, 0.0)  # beta off: only groups with several errors move, and their sum is 0
    assert group_sum(moved, group).abs().max() < 1e-9


def test_a_lone_error_and_an_all_wrong_group_do_not_move() -> None:
    advantages = torch.tensor([1.0, -1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    correct, key, group = torch.tensor([1, 0, 0, 0, 0]), torch.tensor([-1, 3, 3, 3, 3]), torch.tensor([0, 0, 1, 1, 1])
    assert torch.equal(shaped_advantages(advantages, correct, key, group, 0.4, 0.2, 2.0), advantages)


def test_the_same_error_in_two_groups_is_two_classes() -> None:
    advantages = torch.full((6,), -1.0, dtype=torch.float64)
    key, group = torch.tensor([1, 1, 2, 1, 3, 4]), torch.tensor([0, 0, 0, 1, 1, 1])
    found = delta(advantages, torch.zeros(6), key, group, 1.0, 1.0)
    torch.testing.assert_close(found[:3], delta(advantages[:3], torch.zeros(3), key[:3], group[:3], 1.0, 1.0))
    assert found[3:].abs().max() < 1e-15


def test_no_gradient_is_needed_and_shapes_broadcast() -> None:
    advantages = torch.tensor([[-1.0, -2.0, 0.0], [3.0, 3.0, 3.0]])
    assert clipped_shift(advantages, torch.tensor([[-10.0], [0.0]]), 2.0).tolist() == [[-1.5, -3.0, 0.0], [3.0, 3.0, 3.0]]


def test_ramp() -> None:
    assert [ramp(step, 0, 0) for step in (0, 5)] == [1.0, 1.0]
    assert [ramp(step, 2, 4) for step in (0, 2, 4, 6, 9)] == [0.0, 0.0, 0.5, 1.0, 1.0]


@pytest.mark.parametrize(("one", "other"), [("42", "42.0"), ("1,000", "1000"), ("2/4", "1/2"), (" Paris. ", "paris"), ("0.5", "1/2")])
def test_equal_answers_have_one_spelling(one: str, other: str) -> None:
    assert canonical(one) == canonical(other)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("we get \\boxed{7} or 8", "7"), ("sum\n#### 12", "12"), ("3+4=7.0", "7"), ("yes", "yes"), ("so it is 5 or 6 apples", "6"),
        ("no idea at all", "none"), ("", "none"), ("=", "none"), ("1/0", "1/0"), ("9" * 5000, "9" * 5000),
    ],
)  # fmt: skip
def test_answers_are_found_in_texts(text: str, answer: str) -> None:
    assert answer_of(text) == answer


def test_answer_keys_come_from_the_signal_the_text_or_the_tokens() -> None:
    mask = torch.tensor([[True, True], [True, False], [True, False]])
    batch = Batch(torch.tensor([[1, 2], [1, 5], [1, 7]]), mask, torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64))
    first, second, third = answer_keys(batch).tolist()
    assert second == third != first  # what lies outside the mask does not count
    batch.signals["completion"] = ["4", "x=4.0", "5"]
    first, second, third = answer_keys(batch).tolist()
    assert first == second != third
    batch.signals["answer_key"] = torch.tensor([9, 9, 9])
    assert answer_keys(batch).tolist() == [9, 9, 9]


def test_answer_keys_of_vector_actions_compare_what_counts() -> None:
    action = torch.zeros(3, 2, 4)
    action[1, 1], action[2, 0] = 7.0, 7.0  # row 1 differs in padding alone
    mask = torch.tensor([[True, True], [True, False], [True, True]])
    mask[0, 1] = False
    batch = Batch(action, mask, torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64))
    keys = answer_keys(batch).tolist()
    assert keys[0] == keys[1] != keys[2]


def test_off_it_trains_as_grpo() -> None:
    off = METHOD.set("credit.alpha", 0.0).set("credit.beta", 0.0)
    assert torch.equal(trained(off, 4).policy.logits, trained(GRPO.set("select.group_size", 10), 4).policy.logits)


def test_the_loop_trains_on_tokens_on_texts_and_on_dapo() -> None:
    assert_trains(METHOD.set("credit.warmup_steps", 3))
    assert_trains(DAPO.but(credit=ErrorDiversity(inner=GroupRelative(), beta=0.3)))
    policy, task = GruPolicy(hidden=16), ToyArith(small=True)
    run = train(Run(METHOD.set("select.prompts", 8), policy, task, steps=2))
    assert all(torch.isfinite(p).all() for p in policy.parameters()) and len(run.history) == 2


def test_a_stopped_run_continues_identically(tmp_path: Path) -> None:
    assert_resumes(METHOD, tmp_path)
