"""One HTML page for a run, a comparison or several runs: no script, no outside link, readable offline, on paper and in the dark.

Everything that comes from a run (a model's words above all) is escaped, and a content policy in the page forbids loading anything.
Left out: a template engine (the page is a few dozen strings) and interaction.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anypo.report import plots
from anypo.report.figures import figures_html
from anypo.report.parts import (
    NOTHING,
    command_block,
    duration,
    escape,
    facts_line,
    method_text,
    number,
    objects,
    plain,
    samples,
    section,
    write_html,
)
from anypo.report.store import Record, columns, flatten, read, read_json, write_json_atomic

MANY = 8  # methods of a comparison; beyond, its title counts them and its chart names a few
RATES = ("pass@", "maj@", "accuracy", "success", "solved", "finished")  # names of shares, shown as percentages when they lie in [0, 1]
# Metrics with these words in their names are drawn large, in this order; the rest go in a table.
CHARTS = ("reward", *RATES, "loss", "kl", "entropy", "length", "tokens_per_second")


@dataclass
class RunFolder:
    """What a run left in its folder; whatever is missing is empty."""

    path: Path
    records: list[Record]
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    samples: dict[str, Any] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)

    def fact(self, *names: str) -> str:
        """The first of these names that the summary, or else the configuration, holds; "" when none does."""
        found = (place[name] for place in (self.summary, self.config) for name in names if place.get(name) not in (None, ""))
        return plain(next(found, ""))

    @property
    def name(self) -> str:
        return self.fact("slug", "method") or self.path.name


def write_run_page(run_dir: Path | str) -> Path:
    """Writes `run_dir`/report.html from metrics.jsonl and, where they are there, config.json, samples.json, figures.json and summary.json.

    Raises ValueError when the folder holds no metrics.
    """
    run = _load(Path(run_dir))
    return write_html(run.path / "report.html", f"{run.name} on {run.fact('task', 'env') or run.path.name}", _run_body(run))


def write_compare_page(directory: Path | str, comparison: Mapping[str, Any]) -> Path:
    """Writes `directory`/report.html, and comparison.json, from which `write_report` can draw the comparison again.

    comparison: {task, model, budget, seeds, methods: [{slug, describe, diff, final: {iqm, low, high, per_seed}, seconds, command,
    curves: {x, iqm, low, high}, samples_before, samples_after}], tasks: optional list of {task, methods}}. What is missing is left out.
    """
    directory = Path(directory)
    write_json_atomic(directory / "comparison.json", comparison)
    stored = read_json(directory / "comparison.json")  # numbers and lists only, whatever arrays the caller holds
    return write_html(directory / "report.html", _compare_title(stored), _compare_body(stored))


def write_report(dirs: Sequence[Path | str], out: Path | str) -> Path:
    """Joins the folders of runs and comparisons into one page at `out` (a file, or a folder that gets report.html).

    Raises ValueError for no folder, or for one that holds neither metrics nor a comparison.
    """
    if not dirs:
        raise ValueError("a report needs at least one folder written by anypo train or anypo compare")
    target = Path(out) / "report.html" if Path(out).is_dir() else Path(out)
    runs, parts = [], []
    for path in map(Path, dirs):
        if (path / "comparison.json").exists():
            comparison = read_json(path / "comparison.json")
            parts.append((_compare_title(comparison), _compare_body(comparison)))
        else:
            run = _load(path)
            runs.append(run)
            parts.append((f"{run.name} ({run.path.resolve().name})", _run_body(run)))
    if len(parts) == 1:
        return write_html(target, *parts[0])
    links = "".join(f'<a href="#part-{i}">{escape(title)}</a>' for i, (title, _) in enumerate(parts))
    head = f'<header><p class="kind">anypo report</p><h1>{len(parts)} results</h1><nav>{links}</nav></header>'
    articles = "".join(f'<article id="part-{i}">{body}</article>' for i, (_, body) in enumerate(parts))
    return write_html(target, f"{len(parts)} results", head + _overview(runs) + articles)


def _load(path: Path) -> RunFolder:
    records = read(path / "metrics.jsonl")
    if not records:
        raise ValueError(f"{path} holds no metrics; give a folder written by anypo train, after its first step")
    run = RunFolder(path, records)
    for name in ("config", "summary", "samples", "figures"):
        try:
            value = read_json(path / f"{name}.json")
            if not isinstance(value, dict):
                raise ValueError("not an object")
            setattr(run, name, value)
        except FileNotFoundError:
            continue
        except ValueError:
            run.notices.append(f"{name}.json is damaged, so what it holds is missing here.")
    if not run.summary:
        run.notices.append(f"This run has no summary: it is still going, or it was stopped after step {records[-1]['step']}.")
    return run


def _run_body(run: RunFolder) -> str:
    notices = "".join(f'<p class="notice">{escape(notice)}</p>' for notice in run.notices)
    before, after = run.samples.get("before"), run.samples.get("after")
    return "".join(
        [
            _run_header(run),
            notices,
            section("Before and after training", _tiles(run.summary)),
            section("Learning curves", _charts(run.records)),
            section("Pictures", figures_html(run.figures.get("before"), run.figures.get("after"))),
            section("Completions before and after", samples(before, after)),
            section("The method", method_text(run.config)),
            section("Repeat this run", command_block(run.config.get("command"))),
            _settings(run.config),
        ]
    )


def _run_header(run: RunFolder) -> str:
    seconds = run.summary.get("seconds")
    facts = {
        "task": run.fact("task", "env"),
        "model": run.fact("model"),
        "steps": run.fact("steps") or str(len(run.records)),
        "seed": run.fact("seed"),
        "time": duration(seconds) if isinstance(seconds, int | float) else "",
        "tokens a second": run.fact("tokens_per_second"),
    }
    title = run.name + (f" on {facts['task']}" if facts["task"] else "")
    return f'<header><p class="kind">anypo run</p><h1>{escape(title)}</h1>{facts_line(facts)}</header>'


def _tiles(summary: Mapping[str, Any]) -> str:
    before, after = (flatten(part) if isinstance(part := summary.get(side), dict) else {} for side in ("before", "after"))
    tiles = []
    for name in dict.fromkeys([*before, *after]):
        old, new = before.get(name, math.nan), after.get(name, math.nan)
        rate = _is_rate(name, old, new)
        change = ""
        if math.isfinite(old) and math.isfinite(new):
            change = f"{(new - old) * 100:+.1f} points" if rate else f"{new - old:+.4g}"
        value = f'<span class="from">{number(old, rate)} →</span> {number(new, rate)}'
        body = f'<div class="name">{escape(name)}</div><div class="value">{value}</div><div class="quiet">{change}</div>'
        tiles.append(f'<div class="tile">{body}</div>')
    return f'<div class="tiles">{"".join(tiles)}</div>' if tiles else ""


def _charts(records: list[Record]) -> str:
    names = [name for name in dict.fromkeys(n for record in records for n in flatten(record)) if name != "step"]
    series = {name: columns(records, name) for name in names}
    series = {name: pair for name, pair in series.items() if any(map(math.isfinite, pair[1]))}
    large = sorted((name for name, (_, values) in series.items() if _rank(name) < len(CHARTS) and len(set(values)) > 1), key=_rank)
    figures = "".join(f"<figure>{plots.curve(*series[name], 'step', name)}</figure>" for name in large)
    rows = "".join(_metric_row(name, values) for name, (_, values) in series.items() if name not in large)
    head = (
        "<tr><th>metric</th><th></th>" + "".join(f'<th class="number">{n}</th>' for n in ("first", "last", "lowest", "highest")) + "</tr>"
    )
    table = f'<details><summary>All other metrics</summary><div class="scroll"><table>{head}{rows}</table></div></details>' if rows else ""
    return (f'<div class="charts">{figures}</div>' if figures else "") + table


def _rank(name: str) -> int:
    """Place of a metric among the large charts; len(CHARTS) when it is not one of them."""
    last = name.split(".")[-1]
    if name.startswith("time.") and last != "tokens_per_second":
        return len(CHARTS)
    if last in CHARTS:
        return CHARTS.index(last)
    words = last.replace("-", "_").split("_")
    matches = (i for i, word in enumerate(CHARTS) if (last.startswith(word) if word in RATES else word in words and word != "reward"))
    return next(matches, len(CHARTS))


def _metric_row(name: str, values: list[float]) -> str:
    finite = [v for v in values if math.isfinite(v)]
    cells = "".join(f'<td class="number">{number(v)}</td>' for v in (values[0], values[-1], min(finite), max(finite)))
    return f'<tr><td class="name"><code>{escape(name)}</code></td><td>{plots.sparkline(values)}</td>{cells}</tr>'


def _settings(config: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in config.items() if key not in ("describe", "diff", "command")}
    text = json.dumps(rest, indent=2, ensure_ascii=False)
    return f"<details><summary>Full configuration</summary><pre>{escape(text)}</pre></details>" if rest else ""


def _overview(runs: list[RunFolder]) -> str:
    """The rewards of several runs in one chart."""
    lines = []
    for run in runs:
        steps, values = columns(run.records, "reward")
        width = max(len(values) // 20, 3) if len(values) >= 40 else 1
        lines.append(plots.Series(f"{run.name} ({run.path.resolve().name})", steps, plots.running_mean(values, width).tolist()))
    lines = [line for line in lines if len(line.x)]
    if len(lines) < 2:
        return ""
    note = "<figcaption>Running mean of the training reward. Rewards of different tasks cannot be compared.</figcaption>"
    return section("Reward", f'<figure class="wide">{plots.learning_curves(lines, "step", "reward")}{note}</figure>')


def _compare_title(comparison: Mapping[str, Any]) -> str:
    slugs = [plain(method.get("slug")) for method in _methods(comparison)]
    task = plain(comparison.get("task"))
    if len(slugs) > MANY:
        slugs = [f"{len(slugs)} methods"]
    return (", ".join(slugs) or "comparison") + (f" on {task}" if task else "")


def _compare_body(comparison: Mapping[str, Any]) -> str:
    seeds = comparison.get("seeds")
    count = len(seeds) if isinstance(seeds, list) else seeds
    facts = {name: plain(comparison.get(name)) for name in ("task", "model", "budget")} | {"seeds": plain(count)}
    title = escape(_compare_title(comparison))
    head = f'<header><p class="kind">anypo compare</p><h1>{title}</h1>{facts_line(facts)}</header>'
    if isinstance(count, int) and count < 5:
        word = "seed says" if count == 1 else "seeds say"
        head += f'<p class="notice">An interval from {count} {word} little; use at least 5 before calling a method better.</p>'
    axis = "tokens" if "token" in plain(comparison.get("budget")) else "step"
    tasks = comparison.get("tasks") or []
    parts = [section("Result", _standings(_methods(comparison), axis))]
    parts += [section(plain(part.get("task")), _standings(_methods(part), axis)) for part in tasks if isinstance(part, Mapping)]
    parts.append(section("The methods", "".join(_compared(method) for method in _methods(comparison))))
    return head + "".join(parts)


def _methods(comparison: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The methods, best interquartile mean first, those without a result last."""
    methods = objects(comparison.get("methods"))
    return sorted(methods, key=lambda method: -_final(method, "iqm") if math.isfinite(_final(method, "iqm")) else math.inf)


def _final(method: Mapping[str, Any], name: str) -> float:
    value = (method.get("final") or {}).get(name)
    return float(value) if isinstance(value, int | float) else math.nan


def _standings(methods: list[Mapping[str, Any]], axis: str) -> str:
    """Curves with bands, bars with intervals, and the table; a method has one colour in all three."""
    if not methods:
        return ""
    lines = []
    for method in methods:
        curves = method.get("curves") or {}
        lines.append(
            plots.Series(plain(method.get("slug")), curves.get("x") or [], curves.get("iqm") or [], curves.get("low"), curves.get("high"))
        )
    out = ""
    if any(len(line.x) for line in lines):
        named = [*range(4), len(lines) // 2, len(lines) - 1] if len(lines) > MANY else None
        caption = "Interquartile mean over seeds; bands are 95% confidence intervals."
        caption += " Named are the first four, the one in the middle and the last." if named else ""
        chart = plots.learning_curves(lines, axis, "score (IQM)", named=named)
        out += f'<figure class="wide">{chart}<figcaption>{caption}</figcaption></figure>'
    finished = [method for method in methods if math.isfinite(_final(method, "iqm"))]
    if finished:
        values, low, high = ([_final(method, name) for method in finished] for name in ("iqm", "low", "high"))
        dots = [list(_leaves((method.get("final") or {}).get("per_seed"))) for method in finished]
        caption = "<figcaption>Final interquartile mean, its 95% confidence interval, and every single run as a dot.</figcaption>"
        names = [plain(method.get("slug")) for method in finished]
        out += f'<figure class="wide">{plots.bars(names, values, low, high, "final score (IQM)", dots)}{caption}</figure>'
    return out + _table(methods)


def _table(methods: list[Mapping[str, Any]]) -> str:
    rows = []
    for i, method in enumerate(methods):
        iqm, low, high = (_final(method, name) for name in ("iqm", "low", "high"))
        singles = ", ".join(number(v) for v in _leaves((method.get("final") or {}).get("per_seed")))
        seconds = method.get("seconds")
        cells = [
            f'<td class="first"><span class="dot" style="background:{plots.color(i)}"></span>{escape(plain(method.get("slug")))}</td>',
            f'<td class="number"><b>{number(iqm)}</b></td>',
            f'<td class="number">{number(low)} to {number(high)}</td>',
            f'<td class="runs">{singles}</td>',
            f'<td class="number">{duration(seconds) if isinstance(seconds, int | float) else NOTHING}</td>',
        ]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    right = (f'<th class="number">{name}</th>' for name in ("IQM", "95% interval"))
    head = f'<tr><th>method</th>{"".join(right)}<th>single runs</th><th class="number">time</th></tr>'
    return f'<div class="scroll"><table>{head}{"".join(rows)}</table></div>'


def _compared(method: Mapping[str, Any]) -> str:
    answers = samples(method.get("samples_before"), method.get("samples_after"))
    body = method_text(method) + (f"<h3>Repeat it</h3>{command}" if (command := command_block(method.get("command"))) else "")
    body += f"<h3>Completions before and after</h3>{answers}" if answers else ""
    return f"<details><summary>{escape(plain(method.get('slug')))}</summary>{body}</details>"


def _leaves(value: Any) -> Iterator[float]:
    """Every number in a list, however deep."""
    if isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, int | float):
        yield float(value)


def _is_rate(name: str, *values: float) -> bool:
    known = [v for v in values if math.isfinite(v)]
    return name.split(".")[-1].startswith(RATES) and all(0 <= v <= 1 for v in known)
