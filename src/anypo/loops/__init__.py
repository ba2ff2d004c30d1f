"""The loops. One training loop serves every on-policy method of every domain; others exist only where the mathematics differs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anypo.run import Run


def named(name: str) -> Callable[[Run], Run]:
    """The `train` function of a loop. Raises ValueError with the loops that exist."""
    known = sorted(p.stem for p in Path(__file__).parent.glob("*.py") if not p.stem.startswith("_"))
    if name not in known:
        raise ValueError(f"unknown loop '{name}'; the loops are {', '.join(known)}")
    return importlib.import_module(f"anypo.loops.{name}").train
