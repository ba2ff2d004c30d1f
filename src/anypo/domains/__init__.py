"""Domains: what an action is, where problems come from, how a policy is evaluated. Each has a `setup` module with the same three functions.

`owns(task)` says whether a task name is this domain's; `build(...)` makes a policy and a task; `DEFAULT_TASK` is what a method of this domain
trains on when nothing is named.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

ORDER = ("language", "control")  # asked first, in this order; the others follow by name


def names() -> list[str]:
    """The domains on disk."""
    found = sorted(p.parent.name for p in Path(__file__).parent.glob("*/setup.py"))
    return [d for d in ORDER if d in found] + [d for d in found if d not in ORDER]


def setup(domain: str) -> ModuleType:
    """The setup module of a domain."""
    return importlib.import_module(f"anypo.domains.{domain}.setup")


def owner(task: str, first: str) -> str:
    """The domain that a task name belongs to; `first` (the method's own) is asked first, and language takes what nobody knows."""
    for domain in dict.fromkeys([first, *names()]):
        if domain in names() and setup(domain).owns(task):
            return domain
    return "language"
