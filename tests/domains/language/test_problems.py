"""The generated problems: splits that never meet, and checks that accept every right answer and no trick."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anypo.domains.language.problems import (
    PROBLEMS,
    Problem,
    ProblemKind,
    check_countdown,
    check_exact,
    check_walk,
    held_out_problems,
    is_held_out,
    problem_kind,
    training_problems,
)

KINDS = list(PROBLEMS.values())
each_kind = pytest.mark.parametrize("kind", KINDS, ids=list(PROBLEMS))


@given(kind=st.sampled_from(KINDS), seed=st.integers(0, 2**32 - 1))
def test_a_solution_passes_its_check_and_fits(kind: ProblemKind, seed: int) -> None:
    problem = kind.generate(np.random.default_rng(seed))
    solution = kind.solve(problem)
    assert kind.check(solution, **problem.columns) == 1.0
    assert len(solution) < kind.max_tokens
    assert problem.columns["answer"] == problem.answer


@given(kind=st.sampled_from(KINDS), seed=st.integers(0, 2**32 - 1), extra=st.text("0123456789udlr.,;=ax", min_size=1, max_size=4))
def test_anything_added_to_a_solution_makes_it_wrong(kind: ProblemKind, seed: int, extra: str) -> None:
    problem = kind.generate(np.random.default_rng(seed))
    assert kind.check(kind.solve(problem) + extra, **problem.columns) == 0.0


@settings(max_examples=300)
@given(kind=st.sampled_from(KINDS), seed=st.integers(0, 1000), text=st.text(max_size=40))
def test_any_text_is_judged_without_an_error(kind: ProblemKind, seed: int, text: str) -> None:
    assert kind.check(text, **kind.generate(np.random.default_rng(seed)).columns) in (0.0, 1.0)


@settings(max_examples=300)
@given(text=st.text("0123456789+-*/() .", max_size=70))
def test_countdown_survives_any_formula(text: str) -> None:
    assert check_countdown(text, answer="22", numbers=[3, 5, 7]) in (0.0, 1.0)


@each_kind
def test_the_splits_never_meet(kind: ProblemKind) -> None:
    training = {p.prompt for p in training_problems(kind, 2000, np.random.default_rng(0))}
    held_out = {p.prompt for p in held_out_problems(kind, 300)}
    assert len(training) == 2000 and len(held_out) == 300
    assert not training & held_out
    assert all(is_held_out(prompt) for prompt in held_out) and not any(is_held_out(prompt) for prompt in training)


@each_kind
def test_about_one_prompt_in_eight_is_held_out(kind: ProblemKind) -> None:
    rng = np.random.default_rng(3)
    share = np.mean([is_held_out(prompt) for prompt in {kind.generate(rng).prompt for _ in range(4000)}])
    assert 0.09 < share < 0.16


def test_the_split_is_the_same_everywhere() -> None:
    # Written down once: if the hash changes, models pre-trained before the change have seen the new held-out problems.
    assert [a for a in range(40) if is_held_out(f"{a}+1=")] == [1, 11, 14]


def test_a_seed_gives_the_same_problems_again() -> None:
    first, again = (training_problems("walk", 20, np.random.default_rng(5)) for _ in range(2))
    assert first == again != training_problems("walk", 20, np.random.default_rng(6))
    assert held_out_problems("walk", 50)[:20] == held_out_problems("walk", 20)


def test_a_kind_that_is_too_small_says_so() -> None:
    def generate(rng: np.random.Generator) -> Problem:
        number = str(rng.integers(30))
        return Problem(f"say {number}:", number, {"answer": number})

    tiny = ProblemKind("tiny", generate, check_exact, 4, lambda problem: problem.answer)
    held_out = sum(is_held_out(f"say {number}:") for number in range(30))
    assert len(held_out_problems(tiny, held_out)) == held_out
    with pytest.raises(ValueError, match=f"only {held_out} distinct held-out problems.*at most {held_out}, not 31"):
        held_out_problems(tiny, 31)
    with pytest.raises(ValueError, match=r"only \d+ distinct training problems"):
        training_problems(tiny, 31, np.random.default_rng(0))


def test_bad_requests_are_named() -> None:
    with pytest.raises(ValueError, match="unknown problem kind 'sums'; the kinds are arithmetic"):
        problem_kind("sums")
    with pytest.raises(ValueError, match="0 or more"):
        held_out_problems("arithmetic", -1)
    assert held_out_problems("arithmetic", 0) == []


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("85", 1),
        (" 85\n", 1),
        ("84", 0),
        ("", 0),
        ("085", 0),
        ("+85", 0),
        ("85 ok", 0),
        ("85.0", 0),
        ("84 85", 0),
        ("8585", 0),
        ("８５", 0),
    ],
)
def test_arithmetic_answers(completion: str, reward: float) -> None:
    assert check_exact(completion, answer="85") == reward


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("3*5+7", 1),
        ("7+5*3", 1),
        ("(7 + 3*5)", 1),
        ("22", 0),  # the target itself
        ("3*5", 0),  # one number unused
        ("3*5+7+7-7", 0),  # one number used again
        ("3*5+7*1", 0),  # a number that was not given
        ("35-7-5", 0),  # two numbers joined to one
        ("3*5--7", 0),  # signs are not operations
        ("+3*5+7", 0),
        ("3*5+7=22", 0),
        ("3*5+7.0", 0),
        ("3*5+07", 0),
        ("3**5+7", 0),
        ("9**9**9**9", 0),  # never computed
        ("3*5+7 #", 0),
        ("__import__('os')", 0),
        ("(" * 60 + "3", 0),
        ("3*5+7" + " " * 70 + "-1", 0),
        ("5/(3-3)", 0),
        ("", 0),
    ],
)
def test_countdown_answers(completion: str, reward: float) -> None:
    assert check_countdown(completion, answer="22", numbers=[3, 5, 7]) == reward


def test_countdown_divides_exactly() -> None:
    assert check_countdown("8/(3-8/3)", answer="24", numbers=[8, 3, 8, 3]) == 1.0
    assert check_countdown("8/(3-8/3)", answer="24", numbers=[8, 3, 8, 3, 1]) == 0.0
    assert check_countdown("7/2*2", answer="6", numbers=[7, 2, 2]) == 0.0  # no rounding down


@pytest.mark.parametrize(
    ("completion", "reward"),
    [("{0},{1},{2}", 1), ("{2}", 0), ("{2},{2},{2}", 0), ("{0},{1}", 0), ("{0},{1},{2},{2}", 0), ("{0}, {1}, {2}", 0), ("", 0)],
)
def test_chain_answers_need_every_total(completion: str, reward: float) -> None:
    problem = next(p for p in held_out_problems("chain", 20) if len(set(p.answer.split(","))) == 3)
    assert PROBLEMS["chain"].check(completion.format(*problem.answer.split(",")), **problem.columns) == reward


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("rru", 1),  # any shortest way
        ("rur", 0),  # into the wall on b2
        ("urr", 0),
        ("ru", 0),  # not there yet
        ("rrul", 0),  # past the goal
        ("rrudu", 0),  # there, but not by a shortest way
        ("lrr", 0),  # over the edge
        ("RRU", 0),
        ("rrx", 0),
        ("", 0),
    ],
)
def test_walk_answers(completion: str, reward: float) -> None:
    assert check_walk(completion, answer="rru", start="a1", goal="c2", walls=["b2", "e5"]) == reward


def test_sorting_answers() -> None:
    columns = held_out_problems("sorting", 1)[0].columns
    digits = columns["answer"].split()
    check = PROBLEMS["sorting"].check
    assert check(" ".join(digits), **columns) == 1.0
    assert check("".join(digits), **columns) == 0.0
    assert check(" ".join(digits[::-1]), **columns) == 0.0
    assert check(" ".join(digits[:-1]), **columns) == 0.0
