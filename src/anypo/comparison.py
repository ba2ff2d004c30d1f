"""Compare: several methods on the same tasks under equal budgets, with interquartile means and stratified bootstrap intervals.

Every run is a training run like any other; what is compared is the held-out headline number at the end, and its curve over the budget.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from anypo.report.page import write_compare_page
from anypo.report.statistics import iqm, stratified_bootstrap
from anypo.report.store import read_json, write_json_atomic

POINTS = 10  # held-out evaluations along a run


def compare(
    *slugs: str, task: str | Sequence[str] | None = None, env: str | None = None, model: str | None = None, seeds: int = 3, budget: str = "tokens",
    out: Path | str = "runs/compare", settings: Mapping[str, Any] | None = None, jobs: int = 1,
    progress: Callable[[float], None] | None = None, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Train every method `seeds` times on every task and compare; writes comparison.json and report.html into `out`.

    Every single result is stored as it ends (`out`/results/), so that a comparison that was stopped goes on where it was; what failed, or was
    trained with other arguments, is run again. A run that fails is reported as failed, with its sentence, and does not end the others.
    `progress` is told how many runs are done, parts of running ones included. Raises KeyError for an unknown method, ValueError for a bad budget.
    """
    from anypo.api import get_method, parse_budget

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
    results: list[dict[str, Any]] = [{}] * len(jobs_list)
    parts = [0.0] * len(jobs_list)
    for number, part, result in _one_by_one(jobs_list) if jobs <= 1 else _side_by_side(jobs_list, jobs):
        parts[number] = part
        results[number] = result or {}
        if progress:
            progress(sum(parts))
    comparison = summarize(list(slugs), tasks, results, {"model": model, "budget": f"{amount:,} {kind}", "seeds": seeds, "env": env})
    write_compare_page(folder, comparison)
    return comparison


Progress = tuple[int, float, dict[str, Any] | None]  # number of the job, part of it that is done, its result at the end


def _one_by_one(jobs: list[dict[str, Any]]) -> Iterator[Progress]:
    for number, job in enumerate(jobs):
        yield number, 1.0, run_one(job)


def _side_by_side(jobs: list[dict[str, Any]], processes: int) -> Iterator[Progress]:
    context = get_context("spawn")
    with context.Manager() as manager, ProcessPoolExecutor(processes, mp_context=context) as pool:
        news = manager.Queue()
        running = {pool.submit(run_one, job, news, number): number for number, job in enumerate(jobs)}
        while running:
            ended, _ = wait(running, timeout=1, return_when=FIRST_COMPLETED)
            while not news.empty():
                number, part = news.get()
                yield number, part, None
            for future in ended:
                yield running.pop(future), 1.0, future.result()


def run_one(job: Mapping[str, Any], news: Any = None, number: int = 0) -> dict[str, Any]:
    """One method, task and seed: {slug, task, seed, x, y, final, metric, seconds, ...}, or {slug, task, seed, error}.

    `news`: a queue that is told (number, part done) after every step.
    """
    import torch

    from anypo import api

    name = f"{job['slug']}-{job['task'] or job['env'] or 'default'}-{job['seed']}-{job['kind']}{job['amount']}".replace(":", "_").replace(
        "/", "_"
    )
    path = Path(job["folder"]) / "results" / f"{name}.json"
    arguments = api.run_arguments(
        job["amount"], job["seed"], job["settings"], {}, job["task"], job["env"], job["model"], job["options"], job["kind"]
    )
    command = api.command(job["slug"], arguments)
    if path.exists():
        stored = read_json(path)
        if "error" not in stored and stored["command"] == command:
            return stored
    torch.set_num_threads(1)
    identity = {"slug": job["slug"], "task": job["task"] or job["env"], "seed": job["seed"]}
    try:
        result = identity | _train(job, None if news is None else lambda part: news.put((number, part)))
    except Exception as error:  # one failing run must not end an unattended comparison; it is reported as failed
        result = identity | {"error": f"{type(error).__name__}: {error}"}
    write_json_atomic(path, result | {"command": command})
    return read_json(path)


def _train(job: Mapping[str, Any], told: Callable[[float], None] | None) -> dict[str, Any]:
    from anypo import api, loops
    from anypo.run import Run

    method, policy, task, _ = api.build(
        job["slug"], task=job["task"], env=job["env"], model=job["model"], seed=job["seed"], settings=job["settings"], **job["options"]
    )
    by_steps = job["kind"] == "steps"
    run = Run(method, policy, task, **api.limits(job["kind"], job["amount"]), seed=job["seed"])
    first = task.evaluate(run)
    metric = next(iter(first))
    curve = [(0.0, first[metric])]

    def measure(record: dict[str, Any]) -> None:
        if run.progress >= len(curve) / POINTS:
            curve.append((float(run.step if by_steps else run.actions), task.evaluate(run)[metric]))
        if told:
            told(min(run.progress, 1.0))

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
