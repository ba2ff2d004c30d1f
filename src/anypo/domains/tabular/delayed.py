"""Tables that learn from losses which arrive late: the queue of episodes and the multiplicative-weights step.

The loss of an episode is known some episodes after it was played; what is still under way when a run ends is lost.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from anypo.batch import Batch
from anypo.policy import Signals

if TYPE_CHECKING:
    from anypo.run import MethodLoss, Run
    from anypo.task import Prompt

FLOOR = 1e-12  # smallest probability that is divided by, or that a logarithm is taken of


def multiplicative_weights(policy: Float[Tensor, "... A"], loss: Float[Tensor, "... A"], eta: float) -> Float[Tensor, "... A"]:
    """policy * exp(-eta * loss), normalized over the actions."""
    return (policy.clamp(min=FLOOR).log() - eta * loss).softmax(-1)


@dataclass
class DelayedFeedback:
    """Plays an episode with the present policy and hands on those that arrive now, each with the table that played it (`play_table` [N,H,S,A]).

    When nothing arrives the episode just played is handed on with an empty `keep`: it counts for the log and for nothing else.
    """

    delay: int = 20  # episodes from the play to the news of it, >= 0; the mean when random
    random: bool = False  # geometric delays instead of a fixed one, of all copies together
    waiting: list[tuple[int, Batch]] = field(default_factory=list, init=False, repr=False)  # (step of arrival, episodes)

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        if self.delay < 0:
            raise ValueError(f"rollout.delay must be at least 0 episodes, not {self.delay}")
        played = run.collect(prompts)
        if "occupancy" not in played.signals:
            raise ValueError(
                f"{run.method.name} needs the occupancies of a tabular task, which '{run.task.name}' lacks; use episodic_losses"
            )
        played.signals["play_table"] = run.policy.table[played.signals["prompt_id"]]  # type: ignore[index]
        wait = self.delay
        if self.random and self.delay:
            wait = int(torch.empty(()).geometric_(1 / (1 + self.delay), generator=run.generator)) - 1
        self.waiting.append((run.step + wait, played))
        arrived = [batch for at, batch in self.waiting if at == run.step]
        self.waiting = [(at, batch) for at, batch in self.waiting if at > run.step]
        run.log(arrived=len(arrived))
        return Batch.concat(arrived) if arrived else played.but(keep=torch.zeros_like(played.mask), signals=dict(played.signals))

    def state_dict(self) -> dict[str, Any]:
        return {"waiting": [[at, batch.state_dict()] for at, batch in self.waiting]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.waiting = [(at, Batch(**batch)) for at, batch in state["waiting"]]


@dataclass
class MultiplicativeWeights:
    """The next table: exponential weights on the slope of the loss in the present one."""

    eta: float = 0.05  # > 0

    def __call__(self, batch: Batch, loss_fn: MethodLoss, run: Run) -> dict[str, float]:
        if loss_fn.needs - {"table"}:
            raise ValueError(f"{run.method.name} follows losses that are functions of the signal 'table' alone")
        table = run.policy.table.requires_grad_()  # type: ignore[operator,union-attr]
        loss = loss_fn(batch, Signals(table=table))
        if batch.counted.any():
            slope = torch.autograd.grad(loss.value, table)[0]
            run.policy.assign(multiplicative_weights(table.detach(), slope, self.eta))  # type: ignore[operator]
            run.advance_version()
        return {"loss": float(loss.value.detach()), **loss.metrics}
