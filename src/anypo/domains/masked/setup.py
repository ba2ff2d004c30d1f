"""How a masked-diffusion run is put together from names: a task, a model, and the evaluation of a saved one."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import Any

from anypo.policy import Policy
from anypo.task import Task

DEFAULT_TASK = "split_sum"
TASKS: dict[str, dict[str, Any]] = {DEFAULT_TASK: {}, "split_sum_fast": {"block": 4, "threshold": 0.5}}  # by name: settings of the task
CELLS = {"cells": False, "cells:worst": True}  # tasks of graphs; True: known are bad architectures alone
GRAPH_OPTIONS = ("width", "layers", "positions", "steps")
MODEL_OPTIONS = ("tail", "token_budget")


def owns(task: str) -> bool:
    """Whether this domain knows the task by name."""
    return task in TASKS or task in CELLS


def build(task: Any, model: str | None, *, needs: Set[str] = frozenset(), seed: int = 0, **options: Any) -> tuple[Policy, Task]:
    """Policy and task. `options`: `block`, `threshold`, `temperature`, ... go to the task, `tail` and `token_budget` to the model; for cells `width`, `layers`,
    `positions` and `steps` of a denoiser. `model`: "builtin" (None) or the folder of a saved one; None for cells is an untrained one.

    Raises ValueError for an unknown task, model or option.
    """
    import torch

    from anypo.domains.masked.models import load_policy
    from anypo.domains.masked.tasks import make_split_sum

    torch.set_num_threads(1)  # networks of this size are slower with several threads
    if isinstance(task, str) and not owns(task):
        raise ValueError(f"unknown task of masked models '{task}'; there are {', '.join((*TASKS, *CELLS))}")
    if getattr(task, "name", task) in CELLS:
        return _build_cells(task, model, options, seed)
    model_options = {name: options.pop(name) for name in MODEL_OPTIONS if name in options}
    built = make_split_sum(**TASKS[task] | options) if isinstance(task, str) else task
    return load_policy(model or "builtin", **model_options), built


def load(folder: Path, needs: Set[str] = frozenset()) -> Policy:
    """A policy saved by a run."""
    import json

    from anypo.domains.masked.graphs import load_graph_policy
    from anypo.domains.masked.models import load_policy

    config = Path(folder) / "config.json"
    graph = config.exists() and "graph" in json.loads(config.read_text())
    return load_graph_policy(folder) if graph else load_policy(str(folder))


def evaluate(model: str, task: str, k: tuple[int, ...] = (1,), seed: int = 0, **options: Any) -> dict[str, Any]:
    """pass@k and maj@k with 95% intervals of a saved model on the held-out problems; of graphs the accuracy and validity of samples. Raises ValueError
    when there is no such model or task."""
    if task in CELLS:
        graphs, cells = build(task, model, **options)
        return cells.measure(graphs, seed)  # type: ignore[attr-defined]
    from anypo.domains.language.evaluation import evaluate_policy

    policy, built = build(task, model, **options)
    return evaluate_policy(policy, built, k, seed)  # type: ignore[arg-type]


def _build_cells(task: Any, model: str | None, options: dict[str, Any], seed: int) -> tuple[Policy, Task]:
    from anypo.domains.masked.cells import CellTask
    from anypo.domains.masked.graphs import load_graph_policy

    chosen = {name: options.pop(name) for name in GRAPH_OPTIONS if name in options}
    built = CellTask(CELLS[task], **options) if isinstance(task, str) else task
    return load_graph_policy(model) if model else built.policy(seed, **chosen), built
