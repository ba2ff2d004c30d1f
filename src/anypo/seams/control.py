"""What adapts between steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from anypo.batch import Batch

if TYPE_CHECKING:
    from anypo.run import Run


@dataclass
class MovingReference:
    """The reference follows the policy: an exponential moving average of its weights, or a copy every `period` steps."""

    decay: float = 0.99  # in [0,1]; 0 copies
    period: int = 1  # steps between two moves, >= 1

    def __call__(self, batch: Batch, run: Run) -> None:
        if (run.step + 1) % self.period == 0:
            run.move_policy("reference", self.decay)
