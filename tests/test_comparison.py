"""The summary of a comparison: interquartile means with bootstrap intervals, at the end and along the curve."""

import pytest

from anypo.comparison import summarize
from anypo.report.statistics import iqm, stratified_bootstrap


def result(task, seed, final):
    return {
        "slug": "grpo", "task": task, "seed": seed, "metric": "pass@1", "x": [0.0, 100.0], "y": [0.1, final], "final": final, "seconds": 1.0,
        "samples_before": [], "samples_after": [], "command": "anypo train grpo",
    }  # fmt: skip


def test_curves_have_the_interval_of_the_final_scores_at_their_end():
    finals = {"arithmetic": [0.5, 0.7, 0.9], "countdown": [0.1, 0.2, 0.6]}
    results = [result(task, seed, value) for task, values in finals.items() for seed, value in enumerate(values)]
    found = summarize(["grpo"], list(finals), results, {})
    scores = [list(run) for run in zip(*finals.values(), strict=True)]
    low, high = stratified_bootstrap(scores, iqm)
    for part, expected in ((found["methods"][0], (iqm(scores), low, high)), (found["tasks"][0]["methods"][0], None)):
        curve = part["curves"]
        ends = tuple(curve[name][-1] for name in ("iqm", "low", "high"))
        assert ends == pytest.approx(tuple(part["final"][name] for name in ("iqm", "low", "high")))
        assert expected is None or ends == pytest.approx(expected)
        assert curve["iqm"][0] == curve["low"][0] == curve["high"][0] == pytest.approx(0.1)
    assert min(map(min, finals.values())) < low < high < max(map(max, finals.values()))


def test_failed_runs_are_counted_and_named():
    results = [result("arithmetic", 0, 0.5), {"slug": "grpo", "task": "arithmetic", "seed": 1, "error": "lost"}]
    found = summarize(["grpo"], ["arithmetic"], results, {})
    assert found["methods"][0]["failed"] == 1 and found["failures"] == [{"slug": "grpo", "task": "arithmetic", "seed": 1, "error": "lost"}]
