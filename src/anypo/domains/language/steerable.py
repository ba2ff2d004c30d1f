"""Steerable: a policy that can be pushed while it samples.

The push is added to the last hidden states that new actions are drawn from (what the policy provides as `hidden`, read after the prompt and after
each action), and to nothing else: what is remembered of the prompt and of earlier actions stays as it was, and `evaluate` never sees it. Left out:
pushes at layers in the middle of a network.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from jaxtyping import Float
from torch import Tensor


class Steerable:
    """Mixin of policies whose `sample` adds `push` [D] to its last hidden states."""

    push: Tensor | None = None

    @contextmanager
    def steered(self, push: Float[Tensor, " D"]) -> Iterator[None]:
        """Sampling inside the block is pushed."""
        self.push = push
        try:
            yield
        finally:
            self.push = None

    def pushed(self, hidden: Float[Tensor, "*N D"]) -> Float[Tensor, "*N D"]:
        """The states, with the push where there is one."""
        return hidden if self.push is None else hidden + self.push.to(hidden)
