"""How a control run is put together from names: an environment, a policy, saved policies and their evaluation."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import Any

from anypo.policy import Policy
from anypo.task import Task

DEFAULT_TASK = "CartPole-v1"
POLICY_OPTIONS = (
    "hidden", "normalize_observations", "initial_log_std", "initial_temperature", "exploration", "sampling_steps", "integrator", "denoising_steps",
    "fine_tuned_steps", "exploration_noise", "likelihood_noise", "components", "noise_bound", "diffusion", "start",
    "shared", "aggregation", "rounds", "reach", "team_value", "feedback", "noise_floor", "cost_critics", "initial_multiplier",
)  # fmt: skip


def owns(task: str) -> bool:
    """Whether the task is a registered Gymnasium id, one of this package's own environments, or says so (`gym:` in front)."""
    from anypo.domains.control.envs import OWN

    if task.startswith("gym:") or task in OWN:
        return True
    try:
        import gymnasium
    except ImportError:
        return False
    return task in gymnasium.registry


def build(task: Any, model: str | None, *, needs: Set[str] = frozenset(), seed: int = 0, **options: Any) -> tuple[Policy, Task]:
    """Policy and task. `options`: `hidden`, `normalize_observations`, ... go to the policy, `envs`, `horizon`, `on_env_error`, `video`, ... to the
    task. `model`: the folder of a saved policy to go on from; None begins anew from `seed`.

    Raises ValueError for an unknown environment, model or option, and for spaces that a policy cannot act in.
    """
    import inspect

    import torch

    from anypo.domains.control.tasks import GymTask

    torch.set_num_threads(1)  # networks of this size are slower with several threads
    policy_options = {name: options.pop(name) for name in POLICY_OPTIONS if name in options}
    known = [name for name, p in inspect.signature(GymTask.__init__).parameters.items() if p.kind is p.KEYWORD_ONLY]
    for name in options:
        if name not in known:
            raise ValueError(f"control knows no option '{name}'; there are {', '.join(sorted([*known, *POLICY_OPTIONS]))}")
    saved: Any = load(Path(model), needs) if model is not None else None
    if saved is not None:
        options = {"action_chunk": saved.spaces.chunk} | options
    built = task if not isinstance(task, str) and not callable(task) else GymTask(task, **options)
    return saved or new_policy(built.spaces, needs, seed, policy_options), built


def new_policy(spaces: Any, needs: Set[str], seed: int, options: dict[str, Any]) -> Policy:
    """A fresh policy of the kind that provides what the method needs (see `kinds`)."""
    from anypo.domains.control.kinds import kind_for

    if isinstance(options.get("hidden"), int):
        options["hidden"] = (options["hidden"], options["hidden"])
    try:
        return kind_for(needs)(spaces, seed=seed, **options)
    except TypeError as error:
        raise ValueError(f"the policy of this method takes no such option ({error})") from error


def load(folder: Path, needs: Set[str] = frozenset()) -> Policy:
    """A policy saved by a run: its folder or the `model` folder inside."""
    from anypo.domains.control.saved import load as load_saved

    return load_saved(folder if (folder / "policy.json").exists() else folder / "model")


def evaluate(model: str, task: str, *, k: tuple[int, ...] = (1,), seed: int = 0, episodes: int = 100, **options: Any) -> dict[str, Any]:
    """Mean return and episode length of a saved policy over `episodes` held-out starts, with 95% bootstrap intervals. `k` means nothing here."""
    from anypo.domains.control.tasks import GymTask
    from anypo.report.statistics import mean_with_interval

    policy: Any = load(Path(model))
    built = GymTask(task, **{"action_chunk": policy.spaces.chunk} | options)
    here, there = built.spaces, policy.spaces
    if (here.observation_size, here.actions, here.action_size) != (there.observation_size, there.actions, there.action_size):
        raise ValueError(f"the policy in {model} was trained for {there.name}; it does not fit the spaces of {here.name}")
    returns, lengths = built.held_out(policy, episodes, seed)
    intervals = {"return": mean_with_interval(returns), "length": mean_with_interval(lengths)}
    return {name: {"value": value, "low": low, "high": high} for name, (value, low, high) in intervals.items()}
