"""How a masked-diffusion run is put together from names: a task, a model, and the evaluation of a saved one."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import Any

from anypo.policy import Policy
from anypo.task import Task

DEFAULT_TASK = "split_sum"
MODEL_OPTIONS = ("tail", "token_budget")


def owns(task: str) -> bool:
    """Whether this domain knows the task by name."""
    return task == DEFAULT_TASK


def build(task: Any, model: str | None, *, needs: Set[str] = frozenset(), seed: int = 0, **options: Any) -> tuple[Policy, Task]:
    """Policy and task. `options`: `block`, `threshold`, `temperature`, ... go to the task, `tail` and `token_budget` to the model. `model`: "builtin"
    (None) or the folder of a saved one.

    Raises ValueError for an unknown task, model or option.
    """
    import torch

    from anypo.domains.masked.models import load_policy
    from anypo.domains.masked.tasks import make_split_sum

    torch.set_num_threads(1)  # networks of this size are slower with several threads
    if isinstance(task, str) and not owns(task):
        raise ValueError(f"unknown task of masked models '{task}'; there is {DEFAULT_TASK}")
    model_options = {name: options.pop(name) for name in MODEL_OPTIONS if name in options}
    built = make_split_sum(**options) if isinstance(task, str) else task
    return load_policy(model or "builtin", **model_options), built


def load(folder: Path, needs: Set[str] = frozenset()) -> Policy:
    """A policy saved by a run."""
    from anypo.domains.masked.models import load_policy

    return load_policy(str(folder))


def evaluate(model: str, task: str, k: tuple[int, ...] = (1,), seed: int = 0, **options: Any) -> dict[str, Any]:
    """pass@k and maj@k with 95% intervals of a saved model on the held-out problems. Raises ValueError when there is no such model or task."""
    from anypo.domains.language.evaluation import evaluate_policy

    policy, built = build(task, model, **options)
    return evaluate_policy(policy, built, k, seed)  # type: ignore[arg-type]
