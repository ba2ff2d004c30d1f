"""Claims and the reproducer: a paper's sentences that could be false, run as experiments.

A claim returns Evidence. A claim about a mechanism has an ablation: the same experiment with the mechanism off. The reproducer runs both and
accepts the claim only when it holds and no ablation does; so a claim that would hold anyway is caught. A claim that an honest run does not
support stays, marked `reproduced=False`, with what was measured.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from types import ModuleType
from typing import Any

Experiment = Callable[[], "Evidence"]


@dataclass(frozen=True)
class Evidence:
    """What an experiment found."""

    measured: Any  # numbers or short text, JSON-serializable
    expected: str  # the condition in words, e.g. "> 0.9"
    holds: bool

    def __post_init__(self) -> None:
        object.__setattr__(self, "holds", bool(self.holds))


@dataclass
class Claim:
    """One sentence with its experiment and the ablations that must not hold."""

    text: str
    experiment: Experiment
    slow: bool = False
    reproduced: bool = True  # False: an honest run does not support it; reported, never counted as a failure
    ablations: list[tuple[str, Experiment]] = field(default_factory=list)

    def __call__(self) -> Evidence:
        return self.experiment()


def claim(text: str, *, slow: bool = False, reproduced: bool = True) -> Callable[[Experiment], Claim]:
    """Mark an experiment as a claim. `slow` claims take more than about ten seconds and are left out of the quick runs."""

    def wrap(experiment: Experiment) -> Claim:
        return Claim(text, experiment, slow, reproduced)

    return wrap


def ablation(of: Claim, text: str) -> Callable[[Experiment], Experiment]:
    """Mark the same experiment with the claim's mechanism off; its evidence must not hold. `text` says what is off."""

    def wrap(experiment: Experiment) -> Experiment:
        of.ablations.append((text, experiment))
        return experiment

    return wrap


def claims_of(module: ModuleType) -> list[Claim]:
    """The claims of a reproduction module, in the order they are written."""
    return [value for value in vars(module).values() if isinstance(value, Claim)]


def run_claim(item: Claim) -> dict[str, Any]:
    """Run a claim and its ablations: {text, measured, expected, holds, seconds, slow, reproduced, ablations: [{text, measured, holds}]}.

    `holds` is True when the claim holds and every ablation does not. An exception is evidence against the claim, named in `measured`.
    """
    start = time.perf_counter()
    found = _guarded(item.experiment)
    ablations = []
    for text, experiment in item.ablations:
        off = _guarded(experiment)
        ablations.append({"text": text, "measured": off.measured, "holds": off.holds or off.expected == "no exception"})
    mechanism_matters = not any(a["holds"] for a in ablations)
    return {
        "text": item.text,
        "measured": found.measured,
        "expected": found.expected,
        "holds": found.holds and mechanism_matters,
        "seconds": round(time.perf_counter() - start, 2),
        "slow": item.slow,
        "reproduced": item.reproduced,
        "ablations": ablations,
    }


def reproduce_one(slug: str, module: str, quick: bool = False) -> dict[str, Any]:
    """All claims of one row: {slug, claims, holds}. With `quick`, slow claims are skipped and listed under `skipped`."""
    import torch

    torch.set_num_threads(1)
    items = claims_of(importlib.import_module(module))
    chosen = [c for c in items if not (quick and c.slow)]
    results = [run_claim(c) for c in chosen]
    return {
        "slug": slug,
        "claims": results,
        "skipped": [c.text for c in items if quick and c.slow],
        "holds": all(r["holds"] or not r["reproduced"] for r in results),
    }


def reproduce(
    rows: Iterable[tuple[str, str]], *, quick: bool = False, jobs: int = 1, done: Callable[[dict[str, Any]], None] | None = None
) -> list[dict[str, Any]]:
    """Run the claims of several rows, given as (slug, reproduction module), in `jobs` processes; `done` hears of each row as it ends."""
    rows = list(rows)
    results = []
    if jobs <= 1:
        for slug, module in rows:
            results.append(reproduce_one(slug, module, quick))
            if done:
                done(results[-1])
        return results
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(reproduce_one, slug, module, quick) for slug, module in rows]
        for future in futures:
            results.append(future.result())
            if done:
                done(results[-1])
    return results


def reproduce_slugs(
    *slugs: str, quick: bool = False, jobs: int = 1, domain: str | None = None, done: Callable[[dict[str, Any]], None] | None = None
) -> list[dict[str, Any]]:
    """Run the claims of the named rows, or of all rows when none is named. Raises KeyError for an unknown row, ValueError for one without claims."""
    from anypo import catalogue

    if not slugs:
        rows = [(e.slug, catalogue.reproduction(e.slug)) for e in catalogue.entries() if domain in (None, e.domain)]
        return reproduce([(slug, module) for slug, module in rows if module], quick=quick, jobs=jobs, done=done)
    chosen = []
    for slug in slugs:
        catalogue.find(slug)
        module = catalogue.reproduction(slug)
        if module is None:
            raise ValueError(f"{slug} has no claims yet")
        chosen.append((slug, module))
    return reproduce(chosen, quick=quick, jobs=jobs, done=done)


def _guarded(experiment: Experiment) -> Evidence:
    try:
        return experiment()
    except Exception as error:  # an experiment that breaks is evidence against the claim, and must not end the other rows
        return Evidence(f"{type(error).__name__}: {error}", "no exception", False)
