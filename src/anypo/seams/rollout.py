"""How trajectories are produced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from anypo.batch import Batch
from anypo.task import Prompt

if TYPE_CHECKING:
    from anypo.run import Run


@dataclass
class OnPolicy:
    """Independent attempts at every prompt under the current policy, collected by the task."""

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        return run.collect(prompts)
