"""Compare: several methods on the same tasks under equal budgets, with interquartile means and stratified bootstrap intervals.

Every run is a training run like any other; what is compared is the held-out headline number at the end, and its curve over the budget.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from anypo.report.page import write_compare_page
from anypo.report.statistics import iqm, stratified_bootstrap
from anypo.report.store import read_json, write_json_atomic

POINTS = 10  # held-out evaluations along a run
DEFAULTS = {"tokens": 200_000, "steps": 100}
MANY_STEPS = 1_000_000  # no limit, when actions are the budget


def parse_budget(budget: str) -> tuple[str, int]:
    """ "tokens", "steps", or with an amount "tokens=50000". Raises ValueError for anything else."""
    kind, _, amount = budget.partition("=")
    if kind not in DEFAULTS or (amount and not amount.replace("_", "").isdigit()) or (amount and int(amount) < 1):
        raise ValueError(f"a budget is tokens, steps, tokens=N or steps=N with N at least 1, not '{budget}'")
    return kind, int(amount) if amount else DEFAULTS[kind]


def compare(
    *slugs: str, task: str | Sequence[str] | None = None, env: str | None = None, model: str | None = None, seeds: int = 3, budget: str = "tokens",
    out: Path | str = "runs/compare", settings: Mapping[str, Any] | None = None, jobs: int = 1,
    done: Callable[[dict[str, Any]], None] | None = None, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Train every method `seeds` times on every task and compare; writes comparison.json and report.html into `out`.

    Every single result is stored as it ends (`out`/results/), so that a comparison that was stopped goes on where it was. A run that fails is
    reported as failed, with its sentence, and does not end the others. Raises KeyError for an unknown method, ValueError for a bad budget.
    """
    from anypo.api import get_method

    if not slugs:
        raise ValueError("name at least one method to compare")
    kind, amount = parse_budget(budget)
    tasks = [task] if isinstance(task, str | type(None)) else list(task)
    for slug in slugs:
        get_method(slug)
    folder = Path(out)
    jobs_list = [
        {"slug": slug, "task": t, "env": env, "model": model, "seed": seed, "kind": kind, "amount": amount, "settings": dict(settings or {}),
         "options": options, "folder": str(folder)}
        for t in tasks for seed in range(seeds) for slug in slugs
    ]  # fmt: skip
    results = []
    if jobs <= 1:
        for job in jobs_list:
            results.append(run_one(job))
            if done:
                done(results[-1])
    else:
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            for result in pool.map(run_one, jobs_list):
                results.append(result)
                if done:
                    done(result)
    comparison = summarize(list(slugs), tasks, results, {"model": model, "budget": f"{amount:,} {kind}", "seeds": seeds, "env": env})
    write_compare_page(folder, comparison)
    return comparison


def run_one(job: Mapping[str, Any]) -> dict[str, Any]:
    """One method, task and seed: {slug, task, seed, x, y, final, metric, seconds, ...}, or {slug, task, seed, error}."""
    import torch

    from anypo import api

    name = f"{job['slug']}-{job['task'] or job['env'] or 'default'}-{job['seed']}-{job['kind']}{job['amount']}".replace(":", "_").replace(
        "/", "_"
    )
    path = Path(job["folder"]) / "results" / f"{name}.json"
    if path.exists():
        return read_json(path)
    torch.set_num_threads(1)
    identity = {"slug": job["slug"], "task": job["task"] or job["env"], "seed": job["seed"]}
    try:
        result = identity | _train(job)
    except Exception as error:  # one failing run must not end an unattended comparison; it is reported as failed
        result = identity | {"error": f"{type(error).__name__}: {error}"}
    arguments = api.run_arguments(job["amount"], job["seed"], job["settings"], {}, job["task"], job["env"], job["model"], job["options"])
    write_json_atomic(path, result | {"command": api.command(job["slug"], arguments)})
    return read_json(path)


def _train(job: Mapping[str, Any]) -> dict[str, Any]:
    from anypo import api, loops
    from anypo.run import Run

    method, policy, task, _ = api.build(
        job["slug"], task=job["task"], env=job["env"], model=job["model"], seed=job["seed"], settings=job["settings"], **job["options"]
    )
    by_steps = job["kind"] == "steps"
    run = Run(
        method,
        policy,
        task,
        steps=job["amount"] if by_steps else MANY_STEPS,
        seed=job["seed"],
        max_actions=None if by_steps else job["amount"],
    )
    first = task.evaluate(run)
    metric = next(iter(first))
    curve = [(0.0, first[metric])]

    def measure(record: dict[str, Any]) -> None:
        if run.progress >= len(curve) / POINTS:
            curve.append((float(run.step if by_steps else run.actions), task.evaluate(run)[metric]))

    run.on_step.append(measure)
    before = api.sample_completions(run)
    start = time.perf_counter()
    loops.named(method.loop)(run)
    after = task.evaluate(run)
    return {
        "metric": metric, "x": [x for x, _ in curve], "y": [y for _, y in curve], "before": first, "after": after, "final": after[metric],
        "steps": run.step, "actions": run.actions, "seconds": round(time.perf_counter() - start, 1),
        "samples_before": before, "samples_after": api.sample_completions(run),
    }  # fmt: skip


def summarize(slugs: list[str], tasks: list[Any], results: list[dict[str, Any]], about: dict[str, Any]) -> dict[str, Any]:
    """The comparison as plain data: per task and over all tasks, every method's IQM with a 95% interval, curves, samples and commands."""
    names = list(dict.fromkeys(r["task"] for r in results))
    per_task = [
        {"task": t, "methods": [_method(slug, [r for r in results if r["task"] == t and r["slug"] == slug]) for slug in slugs]}
        for t in names
    ]
    overall = [_method(slug, [r for r in results if r["slug"] == slug]) for slug in slugs] if len(names) > 1 else per_task[0]["methods"]
    failures = [{k: r[k] for k in ("slug", "task", "seed", "error")} for r in results if "error" in r]
    return about | {
        "task": ", ".join(map(str, names)),
        "methods": overall,
        "tasks": per_task if len(names) > 1 else [],
        "failures": failures,
    }


def _method(slug: str, results: list[dict[str, Any]]) -> dict[str, Any]:
    from anypo.api import get_method

    method = get_method(slug)
    good = [r for r in results if "error" not in r]
    found: dict[str, Any] = {
        "slug": slug,
        "describe": method.describe(),
        "diff": [list(d) for d in method.diff()],
        "failed": len(results) - len(good),
    }
    if not good:
        return found | {
            "final": {"iqm": None, "low": None, "high": None, "per_seed": []},
            "curves": {"x": [], "iqm": [], "low": [], "high": []},
        }
    by_task = [[r for r in good if r["task"] == t] for t in dict.fromkeys(r["task"] for r in good)]
    runs = min(map(len, by_task))

    def spread(value: Callable[[dict[str, Any]], float]) -> tuple[float, float, float]:
        """Interquartile mean over runs and tasks, and its 95% interval."""
        scores = [[value(column[i]) for column in by_task] for i in range(runs)]
        return float(iqm(scores)), *(stratified_bootstrap(scores, iqm) if runs > 1 else (math.nan, math.nan))

    final, low, high = spread(lambda r: r["final"])
    grid = [i / POINTS for i in range(POINTS + 1)]
    ends = [r["x"][-1] for r in good]
    curve = [spread(lambda r, share=share: _at(r, share)) for share in grid]  # type: ignore[misc]
    return found | {
        "metric": good[0]["metric"],
        "final": {"iqm": final, "low": low, "high": high, "per_seed": [r["final"] for r in good]},
        "curves": {
            "x": [share * sum(ends) / len(ends) for share in grid],
            "iqm": [middle for middle, _, _ in curve],
            "low": [low for _, low, _ in curve],
            "high": [high for _, _, high in curve],
        },
        "seconds": sum(r["seconds"] for r in good) / len(good),
        "samples_before": good[0]["samples_before"],
        "samples_after": good[0]["samples_after"],
        "command": good[0]["command"],
    }


def _at(result: dict[str, Any], share: float) -> float:
    """The curve's value at a share of the budget, by linear interpolation."""
    import numpy as np

    return float(np.interp(share * result["x"][-1], result["x"], result["y"]))
