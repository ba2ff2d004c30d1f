"""Figures as inline SVG: small, the same bytes every time, readable on a light and on a dark page.

Text and axes take the page's own text colour (`currentColor`); data take the colour-blind-safe palette of Okabe and Ito (2008). Figures are
built from `matplotlib.figure.Figure` alone: no pyplot, hence no global state and no display. Left out: interaction, which needs a script.
"""

from __future__ import annotations

import hashlib
import html
import io
import itertools
import math
import re
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito (2008) without black, which is the page's; yellow comes last because it is faint on white.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442")
DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1.2)))  # tell series apart once the colours repeat
MOST_POINTS = 500  # drawn for one line
MOST_PIXELS = 256  # along one side of an embedded picture
LONGEST_LABEL = 48  # characters
INK = "#010203"  # stands for the page's text colour until the SVG is written
FONT = "Segoe UI, Helvetica Neue, Arial, sans-serif"


@dataclass(frozen=True)
class Series:
    """One line of a chart, with an optional band. NaN leaves a gap."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


@dataclass(frozen=True)
class Span:
    """One bar of a schedule: `job` (which gives the colour) occupies `lane` from `start` to `end`."""

    lane: str
    start: float
    end: float
    job: str
    label: str = ""


def learning_curves(series: Sequence[Series], x_label: str, y_label: str, title: str = "", named: Collection[int] | None = None) -> str:
    """Several runs or methods over the same axis, each with its band. With `named` the others are pale lines without name and band."""
    from matplotlib.ticker import EngFormatter

    with _figure(9.6, 3.9) as figure:
        axes = _axes(figure, x_label, y_label)
        for i, item in enumerate(series):
            x, y, low, high = _thin(item)
            shade, dash = _style(i)
            if named is not None and i not in named:
                axes.plot(x, y, color=INK, alpha=0.2, linewidth=0.8)
                continue
            if low is not None and high is not None:
                axes.fill_between(x, low, high, color=shade, alpha=0.18, linewidth=0)
            axes.plot(x, y, color=shade, linestyle=dash, linewidth=1.8, label=_label(item.name), marker="o" if len(x) == 1 else None)
        if max((abs(v) for item in series for v in _numbers(item.x)), default=0) >= 10_000:
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 20k rather than 20000
        if len(series) > 1:
            _legend(figure, len(series) if named is None else len(named))
        return _svg(figure, title or f"{y_label} against {x_label}")


def curve(x: Sequence[float], y: Sequence[float], x_label: str, y_label: str, title: str = "") -> str:
    """One small chart. From 40 points on, a centred running mean over a twentieth of them is drawn above the pale single values."""
    with _figure(3.3, 2.2) as figure:
        axes = _axes(figure, x_label, "")
        axes.set_title(_label(title or y_label), loc="left", fontsize=10, fontweight="bold")
        parts = [Series(y_label, x, y)]
        if len(x) >= 40:
            parts.append(Series("running mean", x, running_mean(y, max(len(x) // 20, 3)).tolist()))
        for i, part in enumerate(parts):
            thin_x, thin_y, _, _ = _thin(part)
            raw = i < len(parts) - 1
            mark = "o" if len(x) <= 25 else None
            axes.plot(thin_x, thin_y, color=PALETTE[0], linewidth=0.8 if raw else 1.7, alpha=0.4 if raw else 1.0, marker=mark, markersize=3)
        return _svg(figure, f"{y_label} against {x_label}")


def bars(
    names: Sequence[str],
    values: Sequence[float],
    low: Sequence[float] | None = None,
    high: Sequence[float] | None = None,
    x_label: str = "",
    points: Sequence[Sequence[float]] = (),
) -> str:
    """Horizontal bars, the first on top, with intervals [low, high] and, where given, every single result as a dot."""
    with _figure(9.6, 0.75 + 0.36 * max(len(names), 1)) as figure:
        axes = _axes(figure, x_label, "")
        place = np.arange(len(names))
        axes.barh(place, values, color=[color(i) for i in range(len(names))], alpha=0.75, height=0.62)
        if low is not None and high is not None:
            axes.hlines(place, low, high, color=INK, linewidth=1.4)
            for ends in (low, high):
                axes.scatter(ends, place, marker="|", s=36, color=INK, linewidth=1.4)
        for row, dots in zip(place, points, strict=False):
            axes.scatter(dots, np.full(len(dots), row), s=11, facecolor="none", edgecolor=INK, linewidth=0.7, zorder=3)
        axes.set_yticks(place, [_label(name) for name in names])
        axes.set_ylim(max(len(names), 1) - 0.5, -0.5)
        axes.grid(axis="y", visible=False)
        return _svg(figure, f"{x_label or 'values'} of {', '.join(names)}")


def image_grid(rows: Sequence[Sequence[ArrayLike]], row_names: Sequence[str] = (), column_names: Sequence[str] = ()) -> str:
    """Pictures in rows and columns, such as before and after. A picture is [H, W] or [H, W, 3 or 4], in [0, 1] or bytes."""
    width = max((len(row) for row in rows), default=0)
    if width == 0:
        raise ValueError("an image grid needs at least one picture")
    with _figure(min(1.25 * width + 0.9, 9.6), 1.3 * len(rows) + 0.3) as figure:
        grid = figure.subplots(len(rows), width, squeeze=False)
        for i, j in np.ndindex(grid.shape):
            axes: Any = grid[i, j]
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
            if j < len(rows[i]):
                picture = np.asarray(rows[i][j])
                stride = math.ceil(max(picture.shape[:2]) / MOST_PIXELS)
                span = 255 if picture.dtype == np.uint8 else 1
                axes.imshow(picture[::stride, ::stride], cmap="gray", vmin=0, vmax=span, interpolation="none")
            if i == 0 and j < len(column_names):
                axes.set_title(_label(column_names[j]), fontsize=9)
            if j == 0 and i < len(row_names):
                axes.set_ylabel(_label(row_names[i]), fontsize=9)
        return _svg(figure, "pictures: " + ", ".join([*row_names, *column_names]))


def gantt(spans: Sequence[Span], x_label: str = "time") -> str:
    """A machine schedule: one lane a machine, in order of first mention, one colour a job."""
    lanes = list(dict.fromkeys(span.lane for span in spans))
    jobs = list(dict.fromkeys(span.job for span in spans))
    with _figure(9.6, 1.0 + 0.36 * max(len(lanes), 1)) as figure:
        axes = _axes(figure, x_label, "")
        for job in jobs:
            mine = [span for span in spans if span.job == job]
            shade = color(jobs.index(job))
            rows, starts = [lanes.index(span.lane) for span in mine], [span.start for span in mine]
            lengths = [span.end - span.start for span in mine]
            axes.barh(rows, lengths, left=starts, height=0.66, color=shade, alpha=0.8, label=_label(job))
        for span in spans:
            place = ((span.start + span.end) / 2, lanes.index(span.lane))
            axes.text(*place, _label(span.label), ha="center", va="center", fontsize=8, clip_on=True)
        axes.set_yticks(range(len(lanes)), [_label(lane) for lane in lanes])
        axes.set_ylim(max(len(lanes), 1) - 0.5, -0.5)
        axes.grid(axis="y", visible=False)
        if 1 < len(jobs) <= 12:
            _legend(figure, len(jobs))
        return _svg(figure, f"schedule of {len(jobs)} jobs on {len(lanes)} machines")


def sparkline(values: Sequence[float | None]) -> str:
    """A line the height of a word, for a table cell; "" without two values to join."""
    y = _numbers(values)
    y = y[np.isfinite(y)]
    if len(y) < 2:
        return ""
    y = y[downsample(y, 120)]
    x = np.linspace(1, 119, len(y))
    height = 20 - 18 * (y - y.min()) / max(float(y.max() - y.min()), 1e-300)
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, height, strict=True))
    return f'<svg class="spark" viewBox="0 0 120 22" width="120" height="22" aria-hidden="true"><polyline points="{path}"/></svg>'


def running_mean(values: Sequence[float], width: int) -> NDArray[np.float64]:
    """Centred mean over `width` neighbours, fewer at the ends; NaN counts as absent. [n] -> [n]"""
    array = np.asarray(values, dtype=np.float64)
    seen = np.isfinite(array)
    total = np.concatenate([[0.0], np.cumsum(np.where(seen, array, 0.0))])
    count = np.concatenate([[0], np.cumsum(seen)])
    start = np.maximum(np.arange(len(array)) - width // 2, 0)
    end = np.minimum(np.arange(len(array)) + width // 2 + 1, len(array))
    held = count[end] - count[start]
    return np.where(held > 0, (total[end] - total[start]) / np.maximum(held, 1), np.nan)


def downsample(values: ArrayLike, most: int = MOST_POINTS) -> NDArray[np.intp]:
    """Indices of at most `most` of the values [n]: the ends, and the lowest and highest of equal stretches, so that no spike is lost."""
    array = np.asarray(values, dtype=np.float64)
    if len(array) <= most:
        return np.arange(len(array))
    edges = np.linspace(1, len(array) - 1, max((most - 2) // 2, 1) + 1).astype(int)
    chosen = {0, len(array) - 1}
    for start, end in itertools.pairwise(edges):
        part = array[start:end]
        if not np.isnan(part).all():
            chosen |= {start + int(np.nanargmin(part)), start + int(np.nanargmax(part))}
    return np.array(sorted(chosen))


def _thin(series: Series) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64] | None, NDArray[np.float64] | None]:
    x, y = _numbers(series.x), _numbers(series.y)
    if len(x) != len(y):
        raise ValueError(f"'{series.name}' has {len(x)} x values but {len(y)} y values")
    keep = downsample(y)
    low, high = (None if band is None else _numbers(band)[keep] for band in (series.low, series.high))
    return x[keep], y[keep], low, high


def _numbers(values: Sequence[float | None]) -> NDArray[np.float64]:
    """JSON's null is NaN, and what is infinite cannot be drawn either."""
    array = np.array([math.nan if v is None else v for v in values], dtype=np.float64)
    return np.where(np.isfinite(array), array, np.nan)


def color(i: int) -> str:
    """The colour of the i-th series, so that a table can match its chart."""
    return PALETTE[i % len(PALETTE)]


def _style(i: int) -> tuple[str, Any]:
    return color(i), DASHES[i // len(PALETTE) % len(DASHES)]


@contextmanager
def _figure(width: float, height: float) -> Iterator[Figure]:
    """An empty figure of this size in inches; settings hold inside the block only."""
    import matplotlib
    from matplotlib.figure import Figure

    settings = {
        "svg.fonttype": "none",  # text stays text: small, searchable, in the page's font
        "svg.hashsalt": "anypo",
        "text.parse_math": False,  # a name may hold a dollar sign
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "grid.color": INK,
        "grid.alpha": 0.13,
        "font.family": ["DejaVu Sans"],
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.facecolor": "none",
    }
    with matplotlib.rc_context(settings):  # type: ignore[arg-type]  # the stubs want literal keys
        yield Figure(figsize=(width, height), layout="constrained", facecolor="none")


def _axes(figure: Figure, x_label: str, y_label: str) -> Axes:
    axes = figure.add_subplot()
    axes.set_xlabel(_label(x_label))
    axes.set_ylabel(_label(y_label))
    axes.grid(linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    axes.margins(x=0.02)
    return axes


def _label(text: str) -> str:
    """One line of valid characters, short enough to leave room for the data."""
    line = _line(text)
    return line if len(line) <= LONGEST_LABEL else line[: LONGEST_LABEL - 1] + "…"


def _line(text: str) -> str:
    return " ".join(text.encode("utf-8", "replace").decode().split())


def _legend(figure: Figure, entries: int) -> None:
    figure.legend(loc="outside upper left", ncols=min(entries, 5), frameon=False, fontsize=9, handlelength=1.6)


def _svg(figure: Figure, description: str) -> str:
    """The figure as one <svg> element to paste into a page: no fixed size, no prolog, short numbers, names that no other figure has."""
    buffer = io.StringIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # the page's font draws the text, not matplotlib's
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    head, body = text[text.index("<svg") :].split(">", 1)
    box = head.split('viewBox="')[1].split('"')[0]
    body = re.sub(r"<!--.*?-->|<style.*?</style>", "", body, flags=re.DOTALL)
    used = {name: i for i, name in enumerate(dict.fromkeys(re.findall(r'(?:url\(|xlink:href=")#([\w-]+)', body)))}
    body = re.sub(r"<[^>]+>", lambda tag: _tidy(tag[0], used), body)  # tags alone: what a label says stays as it is
    body = re.sub(r"\s*\n\s*", "\n", re.sub(r"<defs>\s*</defs>|<g/>", "", body)).strip()
    prefix = "f" + hashlib.sha256(body.encode("utf-8", "replace")).hexdigest()[:8] + "-"
    body = re.sub(r"<[^>]+>", lambda tag: tag[0].replace("@@", prefix), body)
    label = html.escape(_line(description), quote=True)
    width = round(float(box.split()[2]) * 4 / 3)  # points to CSS pixels: the largest useful size; a page may show it smaller
    attributes = f'viewBox="{box}" width="{width}" font-family="{FONT}" stroke-linejoin="round"'
    return f'<svg class="figure" role="img" aria-label="{label}" {attributes}>\n{body}'


def _tidy(tag: str, used: dict[str, int]) -> str:
    """One tag with the page's colour and font, short numbers, and ids renamed (`@@` becomes the figure's prefix) or dropped."""
    tag = re.sub(r' id="([^"]*)"', lambda m: f' id="@@{used[m[1]]}"' if m[1] in used else "", tag)
    tag = re.sub(r'(url\(|xlink:href=")#([\w-]+)', lambda m: f"{m[1]}#@@{used[m[2]]}", tag).replace("xlink:href", "href")
    tag = re.sub(r' transform="rotate\(-?0 [^"]*"| type="text/css"', "", tag)
    tag = re.sub(r'( d| x| y| transform)="([^"]*)"', _shorten, tag)
    tag = re.sub(r" font-family: 'DejaVu Sans';?", "", tag)
    tag = re.sub(r"font: ([^;]*?)([\d.]+px) 'DejaVu Sans'", r"font: \1\2 inherit", tag)
    return tag.replace(INK, "currentColor")


def _shorten(match: re.Match[str]) -> str:
    numbers = re.sub(r"-?\d+\.\d+", lambda m: f"{float(m[0]):.2f}".rstrip("0").rstrip("."), match[2])
    return f'{match[1]}="{" ".join(numbers.split())}"'
