"""Task and Prompt: where problems come from and how an attempt is scored.

A task is anything with prompts to start from, a way to collect trajectories and a way to score them: generated arithmetic, a JSON-lines file,
a Gymnasium environment, a card game. The loop and the seams see only this protocol.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from anypo.batch import Batch
    from anypo.run import Run


@dataclass(frozen=True)
class Prompt:
    """One problem to attempt, and how often."""

    id: int  # stable identity inside the task; the key of per-prompt state
    content: Any  # a string, a list of chat messages, a start state
    columns: dict[str, Any] = field(default_factory=dict)  # what reward functions receive beside the completion (answer, ...)
    samples: int = 1  # trajectories wanted from this prompt, >= 1
    temperature: float | None = None  # sampling temperature > 0; None = the task's own
    max_actions: int | None = None  # limit on the number of actions; None = the task's own

    def but(self, **changes: Any) -> Prompt:
        return replace(self, **changes)


class Task(Protocol):
    """What the loop asks of a domain."""

    @property
    def name(self) -> str: ...

    @property
    def objectives(self) -> tuple[str, ...]:
        """Names of the rewards; ("reward",) when there is one."""
        ...

    @property
    def prompts_per_step(self) -> int:
        """A sensible default batch for this task."""
        ...

    def prompts(self, count: int, rng: np.random.Generator) -> list[Prompt]:
        """Training problems, drawn with `rng` alone."""
        ...

    def collect(self, prompts: list[Prompt], run: Run) -> Batch:
        """`samples` trajectories of every prompt under `run.policy`; group = position of the prompt in the list."""
        ...

    def score(self, batch: Batch, run: Run) -> Tensor:
        """Rewards [N], [N,K] or [N,T] of collected trajectories."""
        ...

    def evaluate(self, run: Run) -> dict[str, float]:
        """Held-out performance of `run.policy`; touches none of the run's random streams. The first key is the headline."""
        ...


@runtime_checkable
class Resumable(Protocol):
    """What a task offers beside when a trajectory can be gone on with from its middle; methods that reset, branch or estimate values by rollouts
    need it. Components call it through `anypo.seams.rollout.continue_rows`."""

    def continue_rows(self, batch: Batch, rows: Tensor, depth: Tensor, run: Run) -> Batch:
        """New endings under `run.policy`: row `rows[i]` of a collected batch again after its first `depth[i]` actions (0: from the start).

        `rows` and `depth` are [M] int64. M whole trajectories in that order, with the group, the context and the signals of a collected batch;
        `parent` = rows, `branch_at` = depth. A row that had ended by then comes back as it was.
        """
        ...
