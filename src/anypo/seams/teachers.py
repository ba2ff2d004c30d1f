"""Who says how likely a batch's actions ought to be: what distillation learns from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from anypo.batch import Batch

if TYPE_CHECKING:
    from anypo.run import Run


class Teacher(Protocol):
    """Log-probs [N,T] of a batch's own actions."""

    def __call__(self, batch: Batch, run: Run) -> Tensor: ...
