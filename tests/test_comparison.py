"""The summary of a comparison: interquartile means with bootstrap intervals, at the end and along the curve."""

import json

import pytest

from anypo import api, comparison
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


def test_stored_results_serve_the_same_arguments_alone(tmp_path, monkeypatch):
    runs = []
    train = comparison._train
    monkeypatch.setattr(comparison, "_train", lambda job, told: runs.append(job["slug"]) or train(job, told))
    wanted = {"task": "token_bandit", "seeds": 1, "budget": "steps=2", "out": tmp_path}
    first = comparison.compare("grpo", "rloo", **wanted)
    assert runs == ["grpo", "rloo"]
    again = comparison.compare("grpo", "rloo", **wanted)
    assert runs == ["grpo", "rloo"] and again["methods"] == first["methods"]
    comparison.compare("grpo", **wanted, settings={"update.learning_rate": 0.5})
    assert runs == ["grpo", "rloo", "grpo"], "a result of other settings does not serve"


def test_failed_runs_are_run_again(tmp_path, monkeypatch):
    train = comparison._train

    def fail(job, told):
        raise ValueError("no room")

    monkeypatch.setattr(comparison, "_train", fail)
    wanted = {"task": "token_bandit", "seeds": 1, "budget": "steps=1", "out": tmp_path}
    assert comparison.compare("grpo", **wanted)["failures"][0]["error"] == "ValueError: no room"
    monkeypatch.setattr(comparison, "_train", train)
    assert not comparison.compare("grpo", **wanted)["failures"]


def test_runs_side_by_side_tell_how_far_they_are(tmp_path):
    seen = []
    found = comparison.compare("grpo", "rloo", task="token_bandit", seeds=1, budget="steps=3", out=tmp_path, jobs=2, progress=seen.append)
    assert [m["slug"] for m in found["methods"]] == ["grpo", "rloo"] and not found["failures"]
    assert seen[-1] == 2 and any(part % 1 for part in seen)


def test_a_compared_run_is_repeated_by_its_command(tmp_path):
    found = comparison.compare("grpo", task="token_bandit", seeds=1, budget="tokens=500", out=tmp_path / "compared")
    command = found["methods"][0]["command"]
    assert command.endswith("--budget tokens=500 --seed 0 --task token_bandit")
    alone = api.train("grpo", task="token_bandit", budget="tokens=500", seed=0, out=tmp_path / "alone")
    assert alone.after[found["methods"][0]["metric"]] == found["methods"][0]["final"]["iqm"]
    assert json.loads((tmp_path / "alone" / "config.json").read_text())["command"] == command
    assert api.arguments_of(tmp_path / "alone", "grpo")["budget"] == "tokens=500"
