"""Engines: where rollouts and learners run. `local` is this process."""

from __future__ import annotations

KNOWN = ("local",)


def check(engine: str) -> None:
    """Raises ValueError unless the engine exists."""
    if engine not in KNOWN:
        raise ValueError(f"engine '{engine}' is not available; use {' or '.join(KNOWN)}")
