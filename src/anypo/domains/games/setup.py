"""How a run on a game is put together from names: a game, networks, and exact exploitability."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import Any

from anypo.policy import Policy
from anypo.task import Task

DEFAULT_TASK = "kuhn_poker"
GAMES = ("kuhn_poker", "leduc_poker")
SMOOTH = ("stag_hunt", "iterated_dilemma")  # differentiable games, played with exact values from many starts


def owns(task: str) -> bool:
    """Whether this domain knows the task by name: the two poker games, the differentiable ones, or any OpenSpiel game by `openspiel:<name>`."""
    return task in GAMES or task in SMOOTH or task.startswith("openspiel:")


def build(task: Any, model: str | None, *, needs: Set[str] = frozenset(), seed: int = 0, **options: Any) -> tuple[Policy, Task]:
    """Policy and task. `options`: `hidden`, the networks' layer sizes. `model`: the folder of a saved policy, whose actor is gone on with.
    Differentiable games take `starts` and, the dilemma, `gamma`; all of a saved policy is gone on with.

    Raises ValueError for an unknown game or option, ImportError when OpenSpiel is not installed.
    """
    import torch

    from anypo.domains.games.policy import GamePolicy
    from anypo.domains.games.tasks import SelfPlay

    torch.set_num_threads(1)  # networks of this size are slower with several threads
    if task in SMOOTH or hasattr(task, "starts"):
        return _build_smooth(task, model, seed, options)
    unknown = sorted(set(options) - {"hidden"})
    if unknown:
        raise ValueError(f"games know no option '{unknown[0]}'; there is hidden")
    hidden = options.get("hidden", (64, 64))
    built = SelfPlay(task.removeprefix("openspiel:")) if isinstance(task, str) else task
    policy = GamePolicy(built.tree, needs, hidden=(hidden, hidden) if isinstance(hidden, int) else tuple(hidden), seed=seed)
    if model is not None:
        _restore_actor(policy, model)
    return policy, built


def evaluate(model: str, task: str, *, k: tuple[int, ...] = (1,), seed: int = 0, **options: Any) -> dict[str, Any]:
    """Exact exploitability of a saved policy; the interval is the number itself. Of differentiable games the share of starts that ended in the wanted
    basin and the mean value, with 95% intervals over starts. `k` and `seed` mean nothing here."""
    policy, built = build(task, model, **options)
    if task in SMOOTH:
        measured = built.measure(policy)  # type: ignore[attr-defined]
        half = {name: 1.96 * float(v.std(correction=0)) / max(len(v) - 1, 1) ** 0.5 for name, v in measured.items()}
        return {
            n: {"value": float(v.mean()), "low": float(v.mean()) - half[n], "high": float(v.mean()) + half[n]} for n, v in measured.items()
        }
    exact = built.tree.exploitability(policy.table)  # type: ignore[attr-defined]
    return {"exploitability": {"value": exact, "low": exact, "high": exact}}


def _build_smooth(task: Any, model: str | None, seed: int, options: dict[str, Any]) -> tuple[Policy, Task]:
    import inspect

    from anypo.domains.games.smooth import TASKS

    known = sorted(set(inspect.signature(TASKS[task]).parameters) - {"seed"}) if isinstance(task, str) else []
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(f"this game knows no option '{unknown[0]}'; there are {', '.join(known) or 'none'}")
    built = TASKS[task](seed=seed, **options) if isinstance(task, str) else task
    policy = built.policy()
    if model is not None:
        state = _saved(model)["policy"]
        if "theta" not in state or state["theta"].shape != policy.theta.shape:
            raise ValueError(f"the policy in {model} is for another game or another number of starts; give the options it was trained with")
        policy.load_state_dict(state)
    return policy, built


def _saved(model: str) -> dict[str, Any]:
    from anypo import checkpoint

    folder = Path(model)
    state = checkpoint.load_latest(folder) or checkpoint.load_latest(folder / "model")
    if state is None:
        raise ValueError(f"{model} holds no saved policy; give the folder of a run or its model/ folder")
    return state


def _restore_actor(policy: Policy, model: str) -> None:
    state = _saved(model)
    actor = {name.removeprefix("actor."): value for name, value in state["policy"].items() if name.startswith("actor.")}
    own = policy.actor.state_dict()  # type: ignore[operator,union-attr]
    if {name: value.shape for name, value in actor.items()} != {name: value.shape for name, value in own.items()}:
        raise ValueError(f"the policy in {model} is for another game or has layers of another size")
    policy.actor.load_state_dict(actor)  # type: ignore[operator,union-attr]
