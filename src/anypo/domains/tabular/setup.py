"""How a tabular run is put together from names: a problem, a policy, and its evaluation."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Set
from pathlib import Path
from typing import Any

from anypo.policy import Policy
from anypo.task import Task

DEFAULT_TASK = "episodic_losses"
ADVERSARIAL = "episodic_losses_adversarial"  # the good action moves on once, a third into the run
EPISODIC = (DEFAULT_TASK, ADVERSARIAL)
MODULES = {
    "paths": ("coverage_grid", "items_grid", "information_grid", "sets_bandit"),
    "data": ("gaussian_data", "wine", "breast_cancer", "pendulum_model"),
    "leader": ("incentive_rooms", "four_rooms"),
    "robust_mdp": ("fail_state",),
    "lock": ("combination_lock",),
    "preferences": ("preference_bandit",),
}  # modules of this domain with makers of tasks by name (`TASKS`)
NAMES = (*EPISODIC, *(name for names in MODULES.values() for name in names))


def owns(task: str) -> bool:
    """Whether this domain knows the task by name."""
    return task in NAMES


def build(task: Any, model: str | None, *, needs: Set[str] = frozenset(), seed: int = 0, **options: Any) -> tuple[Policy, Task]:
    """Policy and task. `options`: those of the task's maker (`horizon`, `states`, `actions`, `copies`, `good`, `others`, `switch` for the episodic
    losses). `model`: the folder of a saved policy to go on from; None begins anew. Raises ValueError for an unknown task or option, or a policy of
    another shape."""
    import torch

    torch.set_num_threads(1)  # tables of this size are slower with several threads
    built = _named(task, seed, options) if isinstance(task, str) else task
    policy = built.policy()
    if model is not None:
        _restore(policy, model)
    return policy, built


def evaluate(model: str, task: str, *, k: tuple[int, ...] = (1,), seed: int = 0, **options: Any) -> dict[str, Any]:
    """The task's measures of a saved policy. For the episodic losses the exact return under the mean losses that the task ends with, the interval the
    number itself; else means over sampled paths or test pairs, with 95% intervals. `k` means nothing here.

    `seed` chooses the problem and must be the one it was trained with.
    """
    policy, built = build(task, model, seed=seed, **options)
    if task not in EPISODIC:
        measured = built.measure(policy)  # type: ignore[attr-defined]
        half = {name: 1.96 * float(v.double().std(correction=0)) / max(len(v) - 1, 1) ** 0.5 for name, v in measured.items()}
        return {name: _interval(float(v.mean()), half[name]) for name, v in measured.items()}
    from anypo.domains.tabular.mdp import evaluate as evaluate_exactly
    from anypo.domains.tabular.mdp import from_start, optimum

    reward = -built.mean_losses[-1 if built.switch is not None else 0]  # type: ignore[attr-defined]
    transition, start = built.transition, built.start  # type: ignore[attr-defined]
    found = {
        "return": float(from_start(evaluate_exactly(transition, policy.table, reward).v, start).mean()),  # type: ignore[arg-type]
        "best_return": float(from_start(optimum(transition, reward).v, start).mean()),
    }
    return {name: _interval(value, 0.0) for name, value in found.items()}


def _interval(value: float, half: float) -> dict[str, float]:
    return {"value": value, "low": value - half, "high": value + half}


def _named(task: str, seed: int, options: dict[str, Any]) -> Any:
    if not owns(task):
        raise ValueError(f"unknown tabular task '{task}'; there are {', '.join(NAMES)}")
    if task in EPISODIC:
        from anypo.domains.tabular.tasks import EpisodicLosses

        built = _make(EpisodicLosses, seed, ({"switch": 1 / 3} if task == ADVERSARIAL else {}) | options)
        built.name = task
        return built
    module = next(name for name, names in MODULES.items() if task in names)
    return _make(importlib.import_module(f"anypo.domains.tabular.{module}").TASKS[task], seed, options)


def _make(maker: Callable[..., Any], seed: int, options: dict[str, Any]) -> Any:
    """Raises ValueError for an option that the maker does not have."""
    import inspect

    known = sorted(set(inspect.signature(maker).parameters) - {"self", "seed"})
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(f"this tabular task knows no option '{unknown[0]}'; there are {', '.join(known)}")
    return maker(seed=seed, **options)


def _restore(policy: Policy, model: str) -> None:
    from anypo import checkpoint

    folder = Path(model)
    state = checkpoint.load_latest(folder) or checkpoint.load_latest(folder / "model")
    if state is None:
        raise ValueError(f"{model} holds no saved policy; give the folder of a run or its model/ folder")
    shapes = [{name: value.shape for name, value in s.items()} for s in (state["policy"], policy.state_dict())]
    if shapes[0] != shapes[1]:
        raise ValueError(f"the policy in {model} is for a problem of another size; give the options it was trained with")
    policy.load_state_dict(state["policy"])
