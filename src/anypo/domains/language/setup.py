"""How a language run is put together from names: a task, a model, and the stand-ins."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Set
from pathlib import Path
from typing import Any

from anypo.policy import Policy
from anypo.task import Task

log = logging.getLogger(__name__)
DEFAULT_TASK = "arithmetic"
DEFAULT_MODEL = "builtin"
LARGE_ON_CPU = {"prompts_per_step": 2, "evaluation_prompts": 16}  # a step, and an evaluation, of about a minute at most
TOYS = (
    "token_bandit",
    "toy_arith",
    "key_chain",
    "certified_ranking",
    "event_video",
    "toy_roles",
    "toy_languages",
    "copy_or_compute",
    "check_again",
    "errands",
    "household",
    "rubric_sums",
    "lock",
    "lookup_chain",
    "registers",
    "toy_ct",
    "physics_scenes",
)


def owns(task: str) -> bool:
    """Whether this domain knows the task by name. `jsonl:`, `hf:` and `reasoning_gym:` tasks are its own."""
    from anypo.domains.language.problems import PROBLEMS

    return (
        task in TOYS
        or task in PROBLEMS
        or task.split(":")[0] in ("jsonl", "hf", "reasoning_gym", "calculator", "grid", "textarena", "textworld")
    )


def build(task: Any, model: str | None, *, needs: Set[str] = frozenset(), seed: int = 0, **options: Any) -> tuple[Policy, Task]:
    """Policy and task. `options`: `rewards`, `max_tokens`, ... go to the task, `lora_rank`, `dtype`, `token_budget`, ... to the model.

    Raises ValueError for an unknown task, model or option.
    """
    if task in TOYS:
        return _toy(task, seed, needs, options)
    from anypo.domains.language.models import load_policy
    from anypo.domains.language.tasks import make_task

    model_options = {
        k: options.pop(k) for k in list(options) if k in ("lora_rank", "dtype", "token_budget", "gradient_checkpointing", "temperature")
    }
    built = make_task(task, **options)
    policy = load_policy(model or DEFAULT_MODEL, value_head="value" in needs, **model_options)
    if policy.is_large and policy.network.device.type == "cpu":
        for name, value in LARGE_ON_CPU.items():
            if isinstance(task, str) and hasattr(built, name) and name not in options:
                log.warning("a model of this size on a CPU: %s is %d (set it with --option %s=...)", name, value, name)
                setattr(built, name, value)
    return policy, built


def load(folder: Path, needs: Set[str] = frozenset()) -> Policy:
    """A policy saved by a run."""
    from anypo.domains.language.models import load_policy

    return load_policy(str(folder), value_head="value" in needs)


def evaluate(model: str, task: str, k: tuple[int, ...] = (1,), seed: int = 0, **options: Any) -> dict[str, Any]:
    """pass@k and maj@k with 95% intervals of a saved or named model. Raises ValueError when there is no such model or task."""
    if task in TOYS:
        from anypo import checkpoint

        policy, toy = _toy(task, seed, frozenset(), options)
        state = checkpoint.load_latest(Path(model))
        if state is None:
            raise ValueError(f"{model} holds no saved policy")
        policy.load_state_dict(state["policy"])
        exact = toy.expected_success(policy)  # type: ignore[attr-defined]
        return {"pass@1": {"value": exact, "low": exact, "high": exact}}
    from anypo.domains.language.evaluation import evaluate_policy
    from anypo.domains.language.models import load_policy
    from anypo.domains.language.tasks import make_task

    return evaluate_policy(load_policy(model), make_task(task, **options), k, seed)


def _toy(task: str, seed: int, needs: Set[str], options: dict[str, Any]) -> tuple[Policy, Task]:
    """Every stand-in is a module of `toys` with a function `build`."""
    return importlib.import_module(f"anypo.domains.language.toys.{task}").build(needs, seed, **options)
