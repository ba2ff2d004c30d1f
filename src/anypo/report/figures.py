"""Pictures on a run's page: what a task draws of its policy before and after training.

A task that has something to look at offers `figures(run) -> [(title, picture), ...]`. A picture is SVG text (`anypo.report.plots` makes it), PNG
bytes, or a matplotlib Figure. Pictures with the same title from before and after training stand side by side; one without a partner (a curve
over the whole run, say) has the full width.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from anypo.report.parts import escape, objects, plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    Picture = str | bytes | Figure

PNG = b"\x89PNG"


def pack(figures: Iterable[tuple[str, Picture]]) -> list[dict[str, str]]:
    """Titles and pictures as plain JSON: [{title, svg}] or [{title, png}] with base64 text. Raises TypeError for what is no picture."""
    return [{"title": title} | _packed(picture, title) for title, picture in figures]


def _packed(picture: Any, title: str) -> dict[str, str]:
    if isinstance(picture, str) and picture.lstrip().startswith("<svg"):
        return {"svg": picture}
    if hasattr(picture, "savefig"):
        buffer = io.BytesIO()
        picture.savefig(buffer, format="png", dpi=150, bbox_inches="tight")
        picture = buffer.getvalue()
    if isinstance(picture, bytes) and picture.startswith(PNG):
        return {"png": base64.b64encode(picture).decode("ascii")}
    raise TypeError(f"the figure '{title}' is a {type(picture).__name__}; give SVG text, PNG bytes or a matplotlib Figure")


def figures_html(before: Any, after: Any) -> str:
    """The packed figures of both moments as HTML; "" when there are none."""
    left, right = ({plain(item.get("title")): item for item in objects(side)} for side in (before, after))
    return "".join(_shown(title, left.get(title), right.get(title)) for title in dict.fromkeys([*left, *right]))


def _shown(title: str, old: Mapping[str, Any] | None, new: Mapping[str, Any] | None) -> str:
    if old is None or new is None:
        return f'<figure class="wide">{_drawn(old or new or {}, title)}<figcaption>{escape(title)}</figcaption></figure>'
    sides = "".join(
        f'<div class="side"><div class="label">{label}</div>{_drawn(item, f"{title}, {label}")}</div>'
        for label, item in (("before", old), ("after", new))
    )
    return f'<div class="sample"><div class="prompt">{escape(title)}</div><div class="sides">{sides}</div></div>'


def _drawn(item: Mapping[str, Any], description: str) -> str:
    svg, png = plain(item.get("svg")), plain(item.get("png"))
    if svg.lstrip().startswith("<svg"):
        return svg
    return f'<img alt="{escape(description)}" src="data:image/png;base64,{escape(png)}">' if png else ""
