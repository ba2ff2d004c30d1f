from __future__ import annotations

import itertools
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anypo.report.statistics import (
    iqm,
    majority_at_k,
    mean_with_interval,
    pass_at_k,
    probability_of_improvement,
    stratified_bootstrap,
    wilson_interval,
)


def mean(scores):
    return scores.mean(axis=(-2, -1))


def test_iqm_by_hand():
    assert iqm([1, 2, 3, 4, 5, 6, 7, 100]) == pytest.approx((3 + 4 + 5 + 6) / 4)
    assert iqm([[0, 1], [2, 3], [100, -50]]) == pytest.approx((0 + 1 + 2 + 3) / 4)  # floor(6 / 4) = 1 score at each end
    assert iqm([1, 2, 6]) == pytest.approx(3.0)


def test_iqm_pools_the_last_two_axes():
    scores = np.random.default_rng(0).normal(size=(5, 8, 3))
    assert iqm(scores) == pytest.approx([iqm(part.ravel()) for part in scores])


@pytest.mark.parametrize("bad", [[], [[]], 3.0, [1.0, math.nan], [[math.inf]]])
def test_scores_must_be_finite_and_present(bad):
    with pytest.raises(ValueError, match="finite numbers"):
        iqm(bad)


def test_bootstrap_resamples_runs_inside_each_task():
    # Runs agree within a task and tasks differ: a stratified bootstrap sees no spread, a pooled one would.
    scores = np.tile([0.0, 10.0, 20.0], (6, 1))
    assert stratified_bootstrap(scores, mean) == (10.0, 10.0)


def test_bootstrap_draws_tasks_independently():
    # Two tasks with opposite orders of the same runs: drawing whole runs would always give a mean of 0.5.
    scores = np.array([[0.0, 1.0], [1.0, 0.0]])
    low, high = stratified_bootstrap(scores, mean)
    assert (low, high) == (0.0, 1.0)


def test_bootstrap_interval_matches_the_normal_one_for_means():
    scores = np.random.default_rng(1).normal(size=(400, 1))
    low, high = stratified_bootstrap(scores, mean, repetitions=4000)
    error = 1.96 * scores.std() / 20
    assert low == pytest.approx(scores.mean() - error, abs=0.012)
    assert high == pytest.approx(scores.mean() + error, abs=0.012)
    narrow = stratified_bootstrap(scores, mean, confidence=0.5)
    assert low < narrow[0] < narrow[1] < high


def test_bootstrap_is_repeatable_and_reports_misuse():
    scores = np.random.default_rng(2).normal(size=(5, 2))
    assert stratified_bootstrap(scores, seed=3) == stratified_bootstrap(scores, seed=3) != stratified_bootstrap(scores, seed=4)
    assert stratified_bootstrap([0.7]) == pytest.approx((0.7, 0.7))
    with pytest.raises(ValueError, match="must map"):
        stratified_bootstrap(scores, np.mean)
    with pytest.raises(ValueError, match="between 0 and 1"):
        stratified_bootstrap(scores, confidence=95)
    with pytest.raises(ValueError, match="at least 1"):
        stratified_bootstrap(scores, repetitions=0)
    with pytest.raises(ValueError, match=r"\[runs, tasks\]"):
        stratified_bootstrap(np.zeros((2, 2, 2)))


def test_probability_of_improvement_by_hand():
    assert probability_of_improvement([[1, 0], [3, 0]], [[2, 0], [0, 1]]) == pytest.approx(
        ((0 + 1 + 1 + 1) / 4 + (0.5 + 0 + 0.5 + 0) / 4) / 2
    )
    x, y = np.random.default_rng(0).integers(0, 4, size=(2, 7, 3))
    assert probability_of_improvement(x, y) + probability_of_improvement(y, x) == pytest.approx(1)
    with pytest.raises(ValueError, match="same tasks"):
        probability_of_improvement(np.ones((2, 3)), np.ones((2, 2)))


def test_wilson_by_hand():
    assert wilson_interval(0, 0) == (0.0, 1.0)
    z = 1.959963984540054
    assert wilson_interval(0, 10) == pytest.approx((0.0, z**2 / (10 + z**2)))
    low, high = wilson_interval(7, 20)
    for end in (low, high):  # the ends solve |7/20 - p| = z sqrt(p (1 - p) / 20)
        assert abs(0.35 - end) == pytest.approx(z * math.sqrt(end * (1 - end) / 20))
    with pytest.raises(ValueError, match=r"0\.\.n"):
        wilson_interval(3, 2)


@given(st.integers(1, 10_000), st.data())
def test_wilson_holds_the_rate_and_mirrors(n, data):
    successes = data.draw(st.integers(0, n))
    low, high = wilson_interval(successes, n)
    assert 0 <= low <= successes / n <= high <= 1 and low < high
    assert wilson_interval(n - successes, n) == pytest.approx((1 - high, 1 - low))


@given(st.integers(1, 9), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(n, data):
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == float(Fraction(sum(map(any, subsets)), len(subsets)))


def test_pass_at_k_identities():
    assert pass_at_k(200, 13, 1) == 13 / 200
    assert pass_at_k(5, 0, 5) == 0.0 and pass_at_k(5, 1, 5) == 1.0
    p, n, k = 0.3, 12, 4  # unbiased: the average over binomial c is 1 - (1 - p)^k
    average = sum(math.comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1))
    assert average == pytest.approx(1 - (1 - p) ** k)
    for n, c, k in [(4, 5, 1), (4, 2, 5), (4, 2, 0), (4, -1, 1)]:
        with pytest.raises(ValueError):
            pass_at_k(n, c, k)


def vote(answers, correct):
    counts = Counter(answer for answer in answers if answer is not None)
    best = max(counts.values(), default=0)
    winners = [answer for answer, count in counts.items() if count == best]
    return Fraction(1, len(winners)) if correct in winners else Fraction(0)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(["a", "b", "c", None]), min_size=1, max_size=8), st.data())
def test_majority_at_k_is_the_average_vote_over_all_subsets(answers, data):
    k = data.draw(st.integers(1, len(answers)))
    votes = [vote(subset, "a") for subset in itertools.combinations(answers, k)]
    assert majority_at_k(answers, "a", k) == pytest.approx(float(sum(votes) / len(votes)), abs=1e-12)


def test_majority_at_k_identities():
    answers = ["42", "42", "41", None, "7"]
    assert majority_at_k(answers, "42", 1) == pytest.approx(2 / 5)
    assert majority_at_k(answers, "42", 5) == 1.0
    assert majority_at_k(["42", "41"], "42", 2) == pytest.approx(0.5)
    assert majority_at_k([None, None], "42", 2) == 0.0
    with pytest.raises(ValueError, match="draw at least 9"):
        majority_at_k(answers, "42", 9)
    with pytest.raises(ValueError, match="cannot be None"):
        majority_at_k(answers, None, 1)


def test_majority_at_k_of_many_samples_is_fast_and_sharpens():
    answers = ["r"] * 40 + [f"w{i % 5}" for i in range(88)]
    rates = [majority_at_k(answers, "r", k) for k in (1, 8, 32, 128)]
    assert rates[0] == pytest.approx(40 / 128) and rates == sorted(rates) and rates[-1] == 1.0


def test_mean_with_interval():
    assert mean_with_interval([1, 1, 1, 0]) == (0.75, *wilson_interval(3, 4))
    assert mean_with_interval([1.0] * 5)[1] < 1.0  # five of five is no proof of perfection
    middle, low, high = mean_with_interval([0.2, 0.5, 0.9, 0.4])
    assert middle == pytest.approx(0.5) and 0.2 <= low < 0.5 < high <= 0.9
    for bad in ([], [[1.0]], [math.nan]):
        with pytest.raises(ValueError, match="one a problem"):
            mean_with_interval(bad)
