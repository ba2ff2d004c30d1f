from __future__ import annotations

import functools
import math
import re
import sys
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anypo.report import plots
from anypo.report.plots import Series, Span


def parse(svg):
    """The element tree; raises when the figure is not well-formed, or when its own references do not resolve."""
    tree = ElementTree.fromstring(svg)
    ids = [e.get("id") for e in tree.iter() if e.get("id")]
    assert len(ids) == len(set(ids))
    values = [value for e in tree.iter() for value in e.attrib.values() if not value.startswith("data:")]
    assert {name for value in values for name in re.findall(r"^(?:url\()?#([\w-]+)", value)} == set(ids)
    return tree


def words(svg):
    return [e.text for e in parse(svg).iter() if e.tag.endswith("text")]


@functools.cache
def every_figure():
    noise = np.random.default_rng(0).normal(size=2000)
    return {
        "curves": plots.learning_curves(
            [Series("a", range(2000), noise, noise - 1, noise + 1), Series("b", [0, 9], [1, 2])], "step", "reward"
        ),
        "curve": plots.curve(range(2000), noise, "step", "loss"),
        "bars": plots.bars(["a", "b"], [1, 2], [0.5, 1], [1.5, 3], "IQM", [[0.9, 1.1], []]),
        "images": plots.image_grid([[np.zeros((4, 4)), np.ones((900, 600, 3))]], ["row"], ["before", "after"]),
        "gantt": plots.gantt([Span("m1", 0, 2, "job 1", "1"), Span("m2", 1, 3, "job 2")]),
        "empty": plots.learning_curves([], "step", "reward"),
    }


def test_figures_are_small_well_formed_and_stand_alone():
    for name, svg in every_figure().items():
        parse(svg)
        assert svg.startswith("<svg ") and svg.rstrip().endswith("</svg>")
        assert len(svg) < 60_000, name
        assert "http" not in svg and "#010203" not in svg and "currentColor" in svg


def test_figures_are_the_same_bytes_every_time_and_share_no_names():
    first, second = every_figure(), every_figure.__wrapped__()
    assert first == second
    names = [set(re.findall(r' id="([^"]*)"', svg)) for svg in first.values()]
    assert len(set.union(*names)) == sum(map(len, names))


def test_pyplot_is_never_touched(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # importing it would now fail
    import matplotlib

    names = [name for name in matplotlib.rcParams if name != "backend"]  # reading that one imports pyplot
    before = [matplotlib.rcParams[name] for name in names]
    every_figure.__wrapped__()
    assert [matplotlib.rcParams[name] for name in names] == before


def test_names_are_text_and_nothing_else():
    name = '<script>$x$ id="a" url(#b) 文</script>'
    svg = plots.learning_curves([Series(name, [0, 1], [0, 1]), Series("other", [0, 1], [1, 0])], "step", "reward")
    assert name in words(svg)
    assert "<script" not in svg
    long = words(plots.bars(["a\n\ud800" + "b" * 500], [1]))
    assert any(word.startswith("a ?bbb") and len(word) == plots.LONGEST_LABEL for word in long)


def test_labels_axes_and_legend_are_there():
    assert {"a", "b", "step", "reward"} <= set(words(every_figure()["curves"]))
    assert {"m1", "m2", "job 1", "job 2", "time"} <= set(words(every_figure()["gantt"]))
    assert {"20k"} <= set(words(plots.learning_curves([Series("a", [0, 100_000], [0, 1])], "tokens", "score")))


def test_gaps_and_nulls_do_not_stop_a_figure():
    parse(plots.learning_curves([Series("a", [0, 1, 2], [None, math.inf, 1], [None] * 3, [None] * 3)], "step", "reward"))
    parse(plots.curve([1, 2], [math.nan, math.nan], "step", "loss"))
    parse(plots.bars([], []))
    parse(plots.gantt([]))
    with pytest.raises(ValueError, match="'a' has 2 x values but 1 y values"):
        plots.learning_curves([Series("a", [0, 1], [1])], "step", "reward")
    with pytest.raises(ValueError, match="at least one picture"):
        plots.image_grid([])


@given(st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), max_size=300), st.integers(4, 80))
def test_downsampling_keeps_the_ends_and_the_extremes(values, most):
    chosen = plots.downsample(values, most)
    assert len(chosen) <= max(most, 0) and list(chosen) == sorted(set(chosen))
    if values:
        assert chosen[0] == 0 and chosen[-1] == len(values) - 1
    kept = np.asarray(values)[chosen] if values else np.array([])
    if np.isfinite(values).any():
        assert np.nanmax(kept) == np.nanmax(values) and np.nanmin(kept) == np.nanmin(values)


def test_running_mean_by_hand():
    assert plots.running_mean([1, 2, 6, math.nan, 3], 3) == pytest.approx([1.5, 3, 4, 4.5, 3])
    assert np.isnan(plots.running_mean([math.nan], 3)).all()
    assert plots.running_mean([], 3).tolist() == []


def test_sparkline():
    assert plots.sparkline([1.0]) == "" and plots.sparkline([math.nan, None]) == ""
    assert 'points="1.0,20.0 119.0,2.0"' in plots.sparkline([0.0, None, 5.0])
    assert "nan" not in plots.sparkline([2.0, 2.0])
