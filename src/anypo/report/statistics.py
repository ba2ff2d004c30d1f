"""Statistics for few runs and yes-or-no answers: interquartile means, bootstrap intervals, pass@k and majority@k.

Sources: Agarwal et al., "Deep Reinforcement Learning at the Edge of the Statistical Precipice" (rliable, arXiv:2108.13264); Chen et al.,
"Evaluating Large Language Models Trained on Code" (pass@k, arXiv:2107.03374); Wang et al., "Self-Consistency Improves Chain of Thought
Reasoning" (majority vote, arXiv:2203.11171); Wilson, "Probable Inference" (1927).
Left out: hypothesis tests and performance profiles; an interval says what a p-value would, and more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtri
from scipy.stats import trim_mean

Statistic = Callable[[NDArray[np.float64]], ArrayLike]


def iqm(scores: ArrayLike) -> float | NDArray[np.float64]:
    """Interquartile mean: the mean of what is left after the lowest and the highest quarter of all scores are dropped.

    scores [runs], [runs, tasks] or [..., runs, tasks] -> one number, or [...]. Runs and tasks are pooled, and floor(n / 4) scores are
    dropped at each end, as in rliable (arXiv:2108.13264, section 4.3); below four scores it is the mean.
    """
    array = _scores(scores)
    pooled = array.reshape(*array.shape[:-2], -1)
    value = trim_mean(pooled, 0.25, axis=-1)
    return float(value) if np.ndim(value) == 0 else value


def stratified_bootstrap(
    scores: ArrayLike, statistic: Statistic = iqm, repetitions: int = 2000, seed: int = 0, confidence: float = 0.95
) -> tuple[float, float]:
    """Percentile bootstrap interval (low, high) of a statistic of scores [runs, tasks] (or [runs]).

    Runs are drawn with replacement within each task, independently of the other tasks (arXiv:2108.13264, section 4.1), all repetitions at
    once: `statistic` maps [repetitions, runs, tasks] to [repetitions]. One run has no spread to resample: low equals high.
    """
    array = _scores(scores)
    if array.ndim != 2:
        raise ValueError(f"scores must be [runs, tasks], not of shape {list(array.shape)}")
    _check_confidence(confidence)
    if repetitions < 1:
        raise ValueError(f"repetitions must be at least 1, not {repetitions}")
    drawn = np.random.default_rng(seed).integers(len(array), size=(repetitions, *array.shape))
    values = np.asarray(statistic(np.take_along_axis(array[None], drawn, axis=1)))
    if values.shape != (repetitions,):
        raise ValueError(f"the statistic must map [repetitions, runs, tasks] to [repetitions], not to {list(values.shape)}")
    low, high = np.quantile(values, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def probability_of_improvement(scores: ArrayLike, others: ArrayLike) -> float:
    """P(a run of `scores` beats a run of `others` on the same task), ties counting one half, averaged over tasks; in [0, 1].

    scores [runs, tasks], others [other runs, tasks]. The Mann-Whitney form of arXiv:2108.13264, section 4.3.
    """
    left, right = _scores(scores), _scores(others)
    if left.ndim != 2 or right.ndim != 2 or left.shape[1] != right.shape[1]:
        raise ValueError(f"both need [runs, tasks] with the same tasks, not {list(left.shape)} and {list(right.shape)}")
    difference = left[:, None, :] - right[None, :, :]
    return float(((difference > 0) + 0.5 * (difference == 0)).mean())


def wilson_interval(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a success rate: all p with |successes / n - p| <= z sqrt(p (1 - p) / n); it stays inside [0, 1].

    n = 0 says nothing: (0, 1).
    """
    _check_confidence(confidence)
    if not 0 <= successes <= n:
        raise ValueError(f"successes must lie in 0..n, not {successes} of {n}")
    if n == 0:
        return 0.0, 1.0
    z = float(ndtri((1 + confidence) / 2))
    rate = successes / n
    centre = (rate + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * math.sqrt(rate * (1 - rate) / n + z**2 / (4 * n**2))
    return (0.0 if successes == 0 else centre - half), (1.0 if successes == n else centre + half)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that k of n samples, drawn without replacement, hold at least one of the c right ones: 1 - C(n-c, k) / C(n, k).

    Unbiased for 1 - (1 - p)^k when the n samples are independent with success rate p (arXiv:2107.03374, equation 1). Counted in integers.
    """
    if not 0 <= c <= n:
        raise ValueError(f"the number of right samples must lie in 0..{n}, not {c}")
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs 1 <= k <= n, but there are n = {n} samples; draw at least {max(k, 1)}")
    total = math.comb(n, k)
    return (total - math.comb(n - c, k)) / total


def majority_at_k(answers: Sequence[Hashable | None], correct: Hashable, k: int) -> float:
    """Chance that the most frequent answer among k of the n samples, drawn without replacement, is the correct one.

    Equal votes are broken by lot, so t answers tied with the correct one leave it 1 / (t + 1). None (no answer found) does not vote. The
    average over all C(n, k) subsets is counted exactly, hence unbiased for the majority vote (arXiv:2203.11171) of k fresh samples.
    """
    n = len(answers)
    if not 1 <= k <= n:
        raise ValueError(f"maj@{k} needs 1 <= k <= n, but there are n = {n} samples; draw at least {max(k, 1)}")
    if correct is None:
        raise ValueError("the correct answer cannot be None, which stands for a sample without an answer")
    votes = Counter(answers)
    silent, right = votes.pop(None, 0), votes.pop(correct, 0)
    won = 0.0
    for winning in range(1, min(right, k) + 1):
        ways = _subsets_below(list(votes.values()), silent, k - winning, winning)
        won += math.comb(right, winning) * sum(count / (ties + 1) for ties, count in enumerate(ways))
    return min(won / math.comb(n, k), 1.0)


def mean_with_interval(values: ArrayLike, confidence: float = 0.95, repetitions: int = 2000, seed: int = 0) -> tuple[float, float, float]:
    """(mean, low, high) of one value a problem [problems]: how pass@k and maj@k are reported over a test set.

    Values that are all 0 or 1 get Wilson's interval, which stays honest when all problems agree;
    others the percentile bootstrap over problems.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0 or not np.isfinite(array).all():
        raise ValueError("values must be a list of finite numbers, one a problem, and at least one")
    if np.isin(array, (0.0, 1.0)).all():
        low, high = wilson_interval(int(array.sum()), array.size, confidence)
    else:
        low, high = stratified_bootstrap(array, lambda drawn: drawn.mean(axis=(-2, -1)), repetitions, seed, confidence)
    return float(array.mean()), low, high


def _subsets_below(votes: list[int], silent: int, size: int, most: int) -> list[int]:
    """[t] -> number of ways to take `size` samples so that no wrong answer has over `most` votes and exactly t of them have `most`.

    `votes` are the counts of the wrong answers; `silent` samples have no answer and no limit.
    """
    limit = size // most
    ways = {(taken, 0): math.comb(silent, taken) for taken in range(min(silent, size) + 1)}
    for available in votes:
        longer: Counter[tuple[int, int]] = Counter()
        for (taken, ties), count in ways.items():
            for more in range(min(available, most, size - taken) + 1):
                longer[taken + more, ties + (more == most)] += count * math.comb(available, more)
        ways = longer
    return [ways.get((size, ties), 0) for ties in range(limit + 1)]


def _scores(scores: ArrayLike) -> NDArray[np.float64]:
    """[..., runs, tasks] of finite numbers; a list of runs is one task."""
    array = np.asarray(scores, dtype=np.float64)
    if array.ndim == 1:
        array = array[:, None]
    if array.ndim < 2 or array.size == 0 or not np.isfinite(array).all():
        raise ValueError("scores must be finite numbers in an array [runs, tasks] with at least one run; leave failed runs out, and say so")
    return array


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, not {confidence}; 0.95 is usual")
