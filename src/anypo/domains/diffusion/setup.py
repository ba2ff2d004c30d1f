"""How a diffusion run is put together from names: a generation task, a flow model, saved models and their evaluation."""

from __future__ import annotations

import json
from collections.abc import Set
from pathlib import Path
from typing import Any

from anypo.policy import Policy
from anypo.task import Task

DEFAULT_TASK = "digits:ink"


def owns(task: str) -> bool:
    """Whether this domain knows the task by name."""
    return task.split(":")[0] in ("digits", "gaussians", "pictures", "styled_digits", "attributes", "views", "scenes", "ring", "patches")


def build(task: Any, model: str | None, *, needs: Set[str] = frozenset(), seed: int = 0, **options: Any) -> tuple[Policy, Task]:
    """Policy and task. `options`: `denoising_steps`, `noise`, `evaluation_steps`, `evaluation_samples`, ... go to the task. `model`: the folder of a saved flow
    model or of a diffusers pipeline (or its hub name) for `pictures:`; None = the model that ships for the task.

    Raises ValueError for an unknown task, model or option, or a model that does not fit the task.
    """
    import torch

    from anypo.domains.diffusion import tasks

    if isinstance(task, str) and task.startswith("pictures:"):
        from anypo.domains.diffusion.pipelines import build_pictures

        return build_pictures(task.removeprefix("pictures:"), model, **options)
    torch.set_num_threads(1)  # networks of this size are slower with several threads
    try:
        built = tasks.make_task(task, **options) if isinstance(task, str) else task
    except TypeError as error:
        raise ValueError(
            f"the task takes no such option ({error}); there are denoising_steps, noise, evaluation_steps, evaluation_samples"
        ) from error
    return load(model) if model is not None else new_policy(built), built


def new_policy(task: Any) -> Policy:
    """The model that ships for a task. Raises ValueError when there is none."""
    from anypo.domains.diffusion import builtin
    from anypo.domains.diffusion.attributes import AttributeModes
    from anypo.domains.diffusion.ring import Ring
    from anypo.domains.diffusion.styled_digits import StyledDigits, styled_flow
    from anypo.domains.diffusion.tasks import Digits, Gaussians

    if isinstance(task, StyledDigits):
        return styled_flow()
    if task.name.startswith("patches:"):
        return builtin.patches()
    if task.name in ("views", "scenes"):
        return {"views": builtin.views, "scenes": builtin.scenes}[task.name]()
    for kind, name in ((Digits, "digits"), (Gaussians, "gaussians"), (AttributeModes, "attributes"), (Ring, "ring")):
        if isinstance(task, kind):
            return builtin.flow(name)
    raise ValueError(f"no model ships for the task '{task.name}'; name one with --model")


def load(model: str | Path) -> Policy:
    """A flow model saved by a run: its folder or the `model` folder inside."""
    from anypo.domains.diffusion.policy import load as load_saved

    folder = Path(model)
    folder = folder if (folder / "policy.json").exists() else folder / "model"
    kind = json.loads((folder / "policy.json").read_text()).get("kind") if (folder / "policy.json").exists() else None
    if kind == "views":
        from anypo.domains.diffusion.views import load_views

        return load_views(folder)
    if kind == "patches":
        from anypo.domains.diffusion.patch_flow import load_patches

        return load_patches(folder)
    if kind == "scenes":
        from anypo.domains.diffusion.latent_flow import load_latent_flow

        return load_latent_flow(folder)
    return load_saved(folder)


def evaluate(model: str, task: str, *, k: tuple[int, ...] = (1,), seed: int = 0, samples: int = 400, **options: Any) -> dict[str, Any]:
    """Mean reward of `samples` held-out samples of a saved model, with 95% bootstrap intervals. `k` means nothing here."""
    from anypo.domains.diffusion.tasks import EVALUATION_SEED
    from anypo.report.statistics import mean_with_interval

    policy, built = build(task, model, **options)
    found = built.held_out(policy, samples, EVALUATION_SEED + seed)  # type: ignore[attr-defined]
    intervals = {name: mean_with_interval(values.double().numpy()) for name, values in found.items()}
    return {name: {"value": value, "low": low, "high": high} for name, (value, low, high) in intervals.items()}
