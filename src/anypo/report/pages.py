"""Writes one documentation page a method: `python -m anypo.report.pages docs/methods`."""

from __future__ import annotations

import sys
from pathlib import Path

from anypo import catalogue
from anypo.report.describe import method_page


def write_pages(folder: Path) -> list[Path]:
    """One Markdown page for every catalogue row, and an index; pages of rows that are gone are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = catalogue.entries()
    for old in folder.glob("*.md"):
        old.unlink()
    written = []
    for row in rows:
        path = folder / f"{row.slug}.md"
        path.write_text(method_page(row.slug, catalogue.get(row.slug), markdown=True) + "\n")
        written.append(path)
    lines = ["# Methods", "", "| method | domain | kind | changes | claims |", "| --- | --- | --- | --- | --- |"]
    lines += [f"| [{r.name}]({r.slug}.md) | {r.domain} | {r.kind} | {', '.join(r.seams)} | {r.status} |" for r in rows]
    (folder / "index.md").write_text("\n".join(lines) + "\n")
    return written


if __name__ == "__main__":
    print(f"{len(write_pages(Path(sys.argv[1])))} pages")
