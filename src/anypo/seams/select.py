"""Which problems next, and how many attempts at each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from anypo.task import Prompt, Task

if TYPE_CHECKING:
    from anypo.run import Run


@dataclass
class UniformPrompts:
    """Fresh prompts, each attempted `group_size` times."""

    prompts: int | None = None  # prompts a step, >= 1; None = the task's own default
    group_size: int = 8  # attempts at each prompt, >= 1

    def __call__(self, task: Task, run: Run) -> list[Prompt]:
        if self.group_size < 1:
            raise ValueError(f"select.group_size must be at least 1, not {self.group_size}")
        drawn = task.prompts(self.prompts or task.prompts_per_step, run.rng)
        return [prompt.but(samples=self.group_size) for prompt in drawn]


@dataclass
class NoPrompts:
    """Nothing to draw: the stage trains on a fixed set."""

    def __call__(self, task: Task, run: Run) -> list[Prompt]:
        return []
