"""The pieces of HTML that every page is made of. Whatever comes from a run, a model's words above all, passes through `escape`."""

from __future__ import annotations

import html
import math
import shlex
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from anypo.report.store import write_bytes_atomic

MOST_SAMPLES = 10
NOTHING = "\N{EN DASH}"  # shown where a number is missing


def write_html(path: Path, title: str, body: str) -> Path:
    """Writes a whole page around `body`, which is HTML; `title` is text. The page's own policy forbids it to load anything."""
    style = files("anypo.report").joinpath("page.css").read_text("utf-8")
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style></head>\n<body>\n{body}\n"
        "<footer>Written by anypo. This page holds all that it shows and opens without a network.</footer>\n</body></html>\n"
    )
    write_bytes_atomic(path, page.encode("utf-8", "replace"))
    return path


def section(title: str, body: str) -> str:
    """`body` under a heading; "" when there is nothing to show."""
    return f"<section><h2>{escape(title)}</h2>{body}</section>\n" if body else ""


def facts_line(facts: Mapping[str, str]) -> str:
    """Names and values in one line, without the empty ones."""
    return f'<p class="facts">{"".join(f"<span>{name} <b>{escape(value)}</b></span>" for name, value in facts.items() if value)}</p>'


def samples(before: Any, after: Any) -> str:
    """Up to ten prompts with the answer before and after training; the two lists are matched by prompt, in order."""
    left, right = objects(before), objects(after)
    waiting: dict[str, list[Mapping[str, Any]]] = {}
    for sample in right:
        waiting.setdefault(plain(sample.get("prompt")), []).append(sample)
    pairs: list[tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]] = []
    for sample in left:
        same = waiting.get(plain(sample.get("prompt")))
        pairs.append((sample, same.pop(0) if same else None))
    pairs += [(None, sample) for rest in waiting.values() for sample in rest]
    return "".join(_sample(old, new) for old, new in pairs[:MOST_SAMPLES])


def objects(value: Any) -> list[Mapping[str, Any]]:
    """The JSON objects in a list; [] for anything else."""
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _sample(old: Mapping[str, Any] | None, new: Mapping[str, Any] | None) -> str:
    sides = []
    for label, sample in (("before", old), ("after", new)):
        reward = f"reward <b>{escape(plain(sample['reward']))}</b>" if sample and sample.get("reward") is not None else ""
        said = f"<pre>{escape(plain(sample.get('completion')))}</pre>" if sample else '<p class="quiet">not recorded</p>'
        sides.append(f'<div class="side"><div class="label">{label}<span>{reward}</span></div>{said}</div>')
    prompt = escape(plain((old or new or {}).get("prompt")))
    head = f'<div class="prompt"><div class="label">prompt</div><pre>{prompt}</pre></div>'
    return f'<div class="sample">{head}<div class="sides">{"".join(sides)}</div></div>'


def method_text(config: Mapping[str, Any]) -> str:
    """A method's description (`describe`) and its difference from its base (`diff`: a list of [path, base value, own value])."""
    describe = config.get("describe")
    return (f"<pre>{escape(plain(describe))}</pre>" if describe else "") + _diff(config.get("diff"))


def _diff(diff: Any) -> str:
    if not isinstance(diff, list):
        return ""
    if not diff:
        return '<p class="quiet">It has no base that it differs from.</p>'
    rows = []
    for entry in diff:
        path, old, new = ([*map(plain, entry), "", "", ""] if isinstance(entry, list) else [plain(entry), "", ""])[:3]
        cells = f"<td><del><code>{escape(old)}</code></del></td><td><ins><code>{escape(new)}</code></ins></td>"
        rows.append(f"<tr><td><code>{escape(path)}</code></td>{cells}</tr>")
    head = "<tr><th>what differs</th><th>its base</th><th>this method</th></tr>"
    return f'<h3>Difference from its base</h3><div class="scroll"><table>{head}{"".join(rows)}</table></div>'


def command_block(command: Any) -> str:
    """A command line, given as text or as a list of arguments; one click selects it."""
    text = shlex.join(map(str, command)) if isinstance(command, list) else plain(command)
    return f'<pre class="command">{escape(text)}</pre>' if text else ""


def escape(text: str) -> str:
    return html.escape(text, quote=True)


def plain(value: Any) -> str:
    """A value in plain words: chat messages a line each, numbers short, nothing for None."""
    if value is None:
        return ""
    if not isinstance(value, float | list):
        return str(value)
    if isinstance(value, list):
        chat = value and all(isinstance(item, dict) and "content" in item for item in value)
        return "\n".join(f"{item.get('role', '')}: {item['content']}" for item in value) if chat else ", ".join(map(plain, value))
    return number(value)


def number(value: float, rate: bool = False) -> str:
    """Four digits, or a percentage when it is a rate."""
    if not math.isfinite(value):
        return NOTHING
    if rate:
        return f"{value * 100:.1f}%"
    whole = abs(value) >= 1000 or float(value).is_integer()
    return f"{value:,.0f}" if whole and abs(value) < 1e9 else f"{value:.4g}"


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
