"""Copies of a run's metrics to TensorBoard, Weights & Biases or Trackio, for those who already watch their runs there.

The metrics file stays the record; a tracker is a view of it. Each package is imported only when asked for.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from anypo.report.store import flatten

PACKAGES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "trackio": "trackio"}


class Tracker(Protocol):
    """Where metrics are sent beside the metrics file."""

    def log(self, record: Mapping[str, Any]) -> None:
        """Sends every finite number of one record under its dotted name, at the record's `step`."""
        ...

    def close(self) -> None:
        """Sends what is still waiting."""
        ...


def open_tracker(name: str, out: Path | str, config: Mapping[str, Any]) -> Tracker:
    """A tracker for a run that writes to `out` and was set up by `config`.

    Raises ValueError for a name that is not known and for a package that is not installed.
    """
    if name not in PACKAGES:
        raise ValueError(f"unknown tracker '{name}'; choose one of {', '.join(PACKAGES)}")
    try:
        module = importlib.import_module(PACKAGES[name])
    except ImportError:
        raise ValueError(f"--log {name} needs the package {name}; install it with: pip install 'anypo[{name}]'") from None
    return TensorBoard(module, Path(out)) if name == "tensorboard" else Dashboard(module, Path(out), config)


class TensorBoard:
    """Event files under `out`/tensorboard."""

    def __init__(self, module: Any, out: Path) -> None:
        self.writer = module.SummaryWriter(log_dir=str(out / "tensorboard"))

    def log(self, record: Mapping[str, Any]) -> None:
        step, numbers = _split(record)
        for name, value in numbers.items():
            self.writer.add_scalar(name.replace(".", "/"), value, step)

    def close(self) -> None:
        self.writer.close()


class Dashboard:
    """Weights & Biases, and Trackio, which has the same interface: the run is named after its folder, in the project "anypo"."""

    def __init__(self, module: Any, out: Path, config: Mapping[str, Any]) -> None:
        self.module = module
        module.init(project="anypo", name=out.name, config=dict(config))

    def log(self, record: Mapping[str, Any]) -> None:
        step, numbers = _split(record)
        self.module.log(numbers, step=step)

    def close(self) -> None:
        self.module.finish()


def _split(record: Mapping[str, Any]) -> tuple[int, dict[str, float]]:
    numbers = {name: value for name, value in flatten(record).items() if name != "step" and math.isfinite(value)}
    return record["step"], numbers
