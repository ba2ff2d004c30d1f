from __future__ import annotations

import math
from html.parser import HTMLParser

import numpy as np
import pytest

from anypo.report import MetricsStore, read_json, write_compare_page, write_json_atomic, write_report, write_run_page

VOID = {"meta", "br", "link", "img", "input", "hr"}
HOSTILE = '</pre><script>alert("1")</script><img src="https://evil.example/x.png" onerror=alert(1)> & \ud800'


class Page(HTMLParser):
    """Checks that tags close in order, and collects tags, attributes and text."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.attributes, self.words, self.open = [], [], [], []
        self.source = path.read_text("utf-8")
        self.feed(self.source)
        self.close()
        assert self.open == []
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    def check_nothing_is_loaded(self):
        assert not {"script", "link", "iframe", "img", "object", "base"} & set(self.tags)
        targets = [value for name, value in self.attributes if name in ("href", "src", "action", "xlink:href")]
        assert all(value.startswith(("#", "data:")) for value in targets)
        assert not [name for name, _ in self.attributes if name.startswith("on")]
        assert "default-src 'none'" in self.source and "@import" not in self.source


def run_folder(path, steps=50, reward_only=False, **config):
    store = MetricsStore(path / "metrics.jsonl")
    for step in range(1, steps + 1):
        record = {"step": step, "reward": step / steps, "loss": 0.1 + 0.01 * step, "kl": 0.01 * step, "entropy": None, "odd": step % 3}
        record |= {"time": {"tokens_per_second": 2000.0 + step}} | ({"pass@1": 0.4 + 0.001 * step} if step % 10 == 0 else {})
        store.append({"step": step, "reward": 0.5} if reward_only else record)
    method = {"describe": "dr_grpo: no deviation", "diff": [["credit.divide_by_std", "True", "False"]]}
    write_json_atomic(path / "config.json", {"method": "dr_grpo", "command": "anypo train dr_grpo --seed 7", "seed": 7} | method | config)
    summary = {"slug": "dr_grpo", "task": "arithmetic", "model": "builtin", "steps": steps, "seconds": 75.0, "tokens_per_second": 2025.0}
    scores = {"before": {"pass@1": 0.125, "length": 30.5}, "after": {"pass@1": 0.75, "length": 20.25}}
    write_json_atomic(path / "summary.json", summary | scores)
    before = [{"prompt": f"sum {i}", "completion": f"wrong {i}", "reward": 0.0} for i in range(12)]
    after = [{"prompt": f"sum {i}", "completion": f"right {i}", "reward": [1.0, 0.5]} for i in range(12)]
    write_json_atomic(path / "samples.json", {"before": before, "after": after[::-1]})
    return path


def comparison(hostile=""):
    methods = [
        {
            "slug": slug + hostile,
            "describe": f"about {slug}",
            "diff": [["objective.clip", "0.2", "0.28"]],
            "final": {"iqm": score, "low": score - 0.1, "high": score + 0.1, "per_seed": np.array([score - 0.05, score + 0.05])},
            "curves": {"x": np.arange(5), "iqm": np.linspace(0, score, 5), "low": np.zeros(5), "high": np.ones(5)},
            "seconds": 12.5,
            "samples_before": [{"prompt": "q", "completion": "first " + slug, "reward": 0}],
            "samples_after": [{"prompt": "q", "completion": "then " + slug, "reward": 1}],
            "command": ["anypo", "train", slug, "--set", "a b"],
        }
        for slug, score in (("grpo", 0.5), ("dapo", 0.75))
    ]
    return {"task": "countdown", "model": "builtin", "budget": "50000 tokens", "seeds": [0, 1], "methods": methods}


def test_a_run_page_shows_the_run(tmp_path):
    path = write_run_page(run_folder(tmp_path))
    assert path == tmp_path / "report.html"
    page = Page(path)
    page.check_nothing_is_loaded()
    for words in (
        "dr_grpo on arithmetic",
        "12.5% → 75.0% +62.5 points",
        "30.5 → 20.25 -10.25",
        "1 min 15 s",
        "anypo train dr_grpo --seed 7",
        "credit.divide_by_std True False",
        "dr_grpo: no deviation",
        "prompt sum 9 before reward 0 wrong 9 after reward 1, 0.5 right 9",
        "odd 1 2 0 2",
    ):
        assert words in page.text
    assert "wrong 10" not in page.text  # ten are enough
    assert page.source.count('class="figure"') == 5  # reward, pass@1, loss, KL, tokens a second; entropy has no value to draw
    assert len(page.source) < 200_000


def test_the_same_run_gives_the_same_page(tmp_path):
    run_folder(tmp_path, reward_only=True)
    assert write_run_page(tmp_path).read_bytes() == write_run_page(tmp_path).read_bytes()


def test_hostile_text_stays_text_everywhere(tmp_path):
    run_folder(
        tmp_path / "run",
        reward_only=True,
        command=HOSTILE,
        describe=HOSTILE,
        diff=[[HOSTILE] * 3],
        method=HOSTILE,
        note=HOSTILE,
        model=HOSTILE,
    )
    sample = {"prompt": [{"role": "user", "content": HOSTILE}], "completion": HOSTILE, "reward": HOSTILE}
    write_json_atomic(tmp_path / "run" / "samples.json", {"before": [sample], "after": [sample]})
    scores = {"before": {HOSTILE: 0.0}, "after": {HOSTILE: 1.0}}
    write_json_atomic(tmp_path / "run" / "summary.json", {"slug": HOSTILE, "task": HOSTILE, "steps": HOSTILE} | scores)
    MetricsStore(tmp_path / "run" / "metrics.jsonl").append({"step": 99, HOSTILE: 1.0, "reward_" + HOSTILE: 2.0, "kl " + HOSTILE: 1.0})
    write_compare_page(tmp_path / "compare", comparison(HOSTILE) | {"task": HOSTILE, "model": HOSTILE, "budget": HOSTILE})
    write_report([tmp_path / "run", tmp_path / "compare"], tmp_path / "all.html")
    for path in (write_run_page(tmp_path / "run"), tmp_path / "compare" / "report.html", tmp_path / "all.html"):
        page = Page(path)
        page.check_nothing_is_loaded()
        assert '<script>alert("1")</script>' in page.text


@pytest.mark.parametrize("missing", ["config", "summary", "samples"])
def test_a_page_is_written_with_what_there_is(tmp_path, missing):
    run_folder(tmp_path, reward_only=True)
    (tmp_path / f"{missing}.json").unlink()
    assert "Learning curves" in Page(write_run_page(tmp_path)).text
    (tmp_path / f"{missing}.json").write_text('{"half')
    assert f"{missing}.json is damaged" in Page(write_run_page(tmp_path)).text
    (tmp_path / f"{missing}.json").write_text("[]")
    assert f"{missing}.json is damaged" in Page(write_run_page(tmp_path)).text


def test_a_run_that_was_stopped_says_so(tmp_path):
    run_folder(tmp_path, steps=3, reward_only=True)
    for name in ("config", "summary", "samples"):
        (tmp_path / f"{name}.json").unlink()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')
    assert "stopped after step 3" in Page(write_run_page(tmp_path)).text


@pytest.mark.parametrize(
    "odd",
    [
        {"before": 3, "after": None, "seconds": "soon", "steps": None},
        {"before": {"pass@1": None}, "after": {"pass@1": 1.5, "maj@8": {"value": 0.5}}, "seconds": 1e300, "task": ["a", 2]},
    ],
)
def test_odd_values_do_not_stop_the_page(tmp_path, odd):
    run_folder(tmp_path, reward_only=True, diff="none", command=None, describe=["a", 1.5])
    write_json_atomic(tmp_path / "summary.json", odd)
    write_json_atomic(
        tmp_path / "samples.json", {"before": "none", "after": [3, {"prompt": None}, {"completion": None, "reward": math.nan}]}
    )
    Page(write_run_page(tmp_path)).check_nothing_is_loaded()


def test_a_folder_without_metrics_is_a_sentence(tmp_path):
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ValueError, match="holds no metrics; give a folder written by anypo train"):
            write_run_page(folder)
    with pytest.raises(ValueError, match="at least one folder"):
        write_report([], tmp_path / "r.html")


def test_a_comparison_ranks_methods_and_warns_about_few_seeds(tmp_path):
    page = Page(write_compare_page(tmp_path, comparison()))
    page.check_nothing_is_loaded()
    assert page.text.index("dapo") < page.text.index("grpo")
    for words in (
        "dapo, grpo on countdown",
        "dapo 0.75 0.65 to 0.85 0.7, 0.8 12.5 s",
        "An interval from 2 seeds",
        "anypo train dapo --set 'a b'",
        "first grpo",
        "objective.clip 0.2 0.28",
        "50000 tokens",
    ):
        assert words in page.text
    assert page.source.count('class="figure"') == 2
    assert read_json(tmp_path / "comparison.json")["methods"][0]["final"]["per_seed"] == pytest.approx([0.45, 0.55])


def test_a_comparison_of_many_methods_counts_them_and_names_a_few_lines(tmp_path):
    many = comparison()
    first = many["methods"][0]
    many["methods"] = [first | {"slug": f"method_{i}", "final": first["final"] | {"iqm": 1 - i / 20}} for i in range(12)]
    page = Page(write_compare_page(tmp_path, many))
    assert "12 methods on countdown" in page.text and "method_0, method_1" not in page.text
    chart = page.source.split("<figure")[1]
    assert [i for i in range(12) if f"method_{i}<" in chart] == [0, 1, 2, 3, 6, 11]
    assert all(f"method_{i}" in page.text for i in range(12))  # bars and table hold them all


def test_a_comparison_over_several_tasks_and_with_holes(tmp_path):
    several = comparison()
    several["tasks"] = [{"task": "sorting", "methods": several["methods"]}, {"task": "sums", "methods": []}]
    several["methods"] = [{"slug": "crashed", "final": None, "curves": None}, *several["methods"]]
    several["seeds"] = 10
    page = Page(write_compare_page(tmp_path, several))
    assert "sorting" in page.text and "An interval from" not in page.text
    assert page.text.index("dapo") < page.text.index("crashed")
    assert page.source.count('class="figure"') == 4
    Page(write_compare_page(tmp_path, {}))


def test_a_report_joins_runs_and_comparisons(tmp_path):
    for name in ("one", "two"):
        run_folder(tmp_path / name, reward_only=True)
    write_compare_page(tmp_path / "three", comparison())
    page = Page(write_report([tmp_path / "one", str(tmp_path / "two"), tmp_path / "three"], tmp_path))
    page.check_nothing_is_loaded()
    ids = [value for name, value in page.attributes if name == "id"]
    assert {"part-0", "part-1", "part-2"} <= set(ids)
    assert "dr_grpo (one)" in page.text and "dr_grpo (two)" in page.text and "dapo, grpo on countdown" in page.text
    assert (tmp_path / "report.html").exists()
    alone = Page(write_report([tmp_path / "one"], tmp_path / "alone.html"))
    assert "results" not in alone.text
