"""How a tabular run is put together from names: a problem, a table, and its exact evaluation."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import Any

from anypo.policy import Policy
from anypo.task import Task

DEFAULT_TASK = "episodic_losses"
ADVERSARIAL = "episodic_losses_adversarial"  # the good action moves on once, a third into the run


def owns(task: str) -> bool:
    """Whether this domain knows the task by name."""
    return task in (DEFAULT_TASK, ADVERSARIAL)


def build(task: Any, model: str | None, *, needs: Set[str] = frozenset(), seed: int = 0, **options: Any) -> tuple[Policy, Task]:
    """Policy and task. `options`: `horizon`, `states`, `actions`, `copies`, `good`, `others`, `switch`. `model`: the folder of a saved policy to go on
    from; None begins uniform. Raises ValueError for an unknown task or option, or a policy of another shape."""
    import inspect

    import torch

    from anypo.domains.tabular.tasks import EpisodicLosses

    torch.set_num_threads(1)  # tables of this size are slower with several threads
    if isinstance(task, str):
        if not owns(task):
            raise ValueError(f"unknown tabular task '{task}'; there are {DEFAULT_TASK} and {ADVERSARIAL}")
        known = sorted(set(inspect.signature(EpisodicLosses.__init__).parameters) - {"self", "seed"})
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise ValueError(f"tabular tasks know no option '{unknown[0]}'; there are {', '.join(known)}")
        built = EpisodicLosses(seed=seed, **({"switch": 1 / 3} if task == ADVERSARIAL else {}) | options)
        built.name = task
    else:
        built = task
    policy = built.policy()
    if model is not None:
        _restore(policy, model)
    return policy, built


def evaluate(model: str, task: str, *, k: tuple[int, ...] = (1,), seed: int = 0, **options: Any) -> dict[str, Any]:
    """Exact return of a saved policy under the mean losses that the task ends with; the interval is the number itself. `k` means nothing here.

    `seed` chooses the problem and must be the one it was trained with.
    """
    from anypo.domains.tabular.mdp import evaluate as evaluate_exactly
    from anypo.domains.tabular.mdp import from_start, optimum

    policy, built = build(task, model, seed=seed, **options)
    reward = -built.mean_losses[-1 if built.switch is not None else 0]  # type: ignore[attr-defined]
    transition, start = built.transition, built.start  # type: ignore[attr-defined]
    found = {
        "return": float(from_start(evaluate_exactly(transition, policy.table, reward).v, start).mean()),  # type: ignore[arg-type]
        "best_return": float(from_start(optimum(transition, reward).v, start).mean()),
    }
    return {name: {"value": value, "low": value, "high": value} for name, value in found.items()}


def _restore(policy: Policy, model: str) -> None:
    from anypo import checkpoint

    folder = Path(model)
    state = checkpoint.load_latest(folder) or checkpoint.load_latest(folder / "model")
    if state is None:
        raise ValueError(f"{model} holds no saved policy; give the folder of a run or its model/ folder")
    if state["policy"]["logits"].shape != policy.logits.shape:
        raise ValueError(f"the policy in {model} is for a problem of another size; give the options it was trained with")
    policy.load_state_dict(state["policy"])
