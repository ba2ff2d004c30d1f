"""A method as text: for `anypo show` and, with headings, for its documentation page."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from anypo import catalogue
from anypo.claims import claims_of
from anypo.method import Method, Study

SOURCE = "src/anypo/methods"


def method_page(slug: str, item: Method | Study, markdown: bool = False) -> str:
    """What it is, what it changes against its base, its equations (public functions), defaults, claims and source file."""
    module = importlib.import_module(catalogue.find(slug))
    head, _, rest = (module.__doc__ or "").strip().partition("\n")
    heading = (lambda text: f"\n## {text}\n") if markdown else (lambda text: f"\n{text.upper()}")
    code = (lambda text: f"```\n{text}\n```") if markdown else (lambda text: text)
    lines = [f"# {head}" if markdown else head, rest.rstrip(), heading("Method"), code(item.describe())]
    if isinstance(item, Method) and item.base is not None:
        changes = [f"{path}: {old} -> {new}" for path, old, new in item.diff()]
        lines += [heading(f"Changes against {item.base.name}"), code("\n".join(changes) or "nothing")]
    variants = {} if "." in slug else catalogue.variants(slug)
    if variants:
        lines += [heading("Variants"), *(f"{'- ' if markdown else '  '}{slug}.{name}: {v.summary}" for name, v in variants.items())]
    lines += [heading("Equations"), code("\n".join(_functions(module)))]
    lines += [heading("Claims"), *(_claims(slug, markdown) or ["none yet"])]
    lines += [heading("Source"), f"{SOURCE}/{catalogue.find(slug).removeprefix('anypo.methods.').replace('.', '/')}.py"]
    return "\n".join(lines)


def _functions(module: Any) -> list[str]:
    """Signature and first sentence of every public pure function that the module defines."""
    found = []
    for name, value in vars(module).items():
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_"):
            arguments = ", ".join(inspect.signature(value).parameters)
            found.append(f"{name}({arguments})\n    {(inspect.getdoc(value) or '').splitlines()[0] if value.__doc__ else ''}")
    return found


def _claims(slug: str, markdown: bool) -> list[str]:
    module = catalogue.reproduction(slug)
    if module is None:
        return []
    mark = "- " if markdown else "  "
    return [
        f"{mark}{c.text}{'' if c.reproduced else ' [not reproduced]'}{' [slow]' if c.slow else ''}"
        + "".join(f"\n{'  - ' if markdown else '      '}must fail with: {text}" for text, _ in c.ablations)
        for c in claims_of(importlib.import_module(module))
    ]
