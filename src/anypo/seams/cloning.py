"""Cloning: what methods share that begin with a policy which imitates demonstrations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from anypo.run import Run


@dataclass
class CloneDemonstrations:
    """Before the first step, imitate the task's demonstrations, unless the policy is a pretrained one."""

    steps: int = 3000  # of the optimizer, >= 0; 0 = begin with an untrained network
    batch_size: int = 256  # actions a step, >= 1
    learning_rate: float = 3e-3  # of Adam, > 0, falling to 0

    def __call__(self, run: Run) -> None:
        policy = run.policy
        if not self.steps or bool(policy.pretrained):
            return
        shown = run.task.demonstrations(run.rng) if hasattr(run.task, "demonstrations") else None
        if shown is None:
            raise ValueError(
                f"{run.method.name} fine-tunes a policy that imitates demonstrations, and {run.task.name} brings none: give recorded steps "
                "(--option data=FILE) or a policy (--model FOLDER), or begin with an untrained one (--set prepare.0.steps=0)"
            )
        seen, action = torch.from_numpy(shown.observation), torch.from_numpy(policy.from_environment(shown.action))
        error = policy.clone(seen, action, run.generator, steps=self.steps, batch_size=self.batch_size, learning_rate=self.learning_rate)
        run.log(cloning_loss=error)
