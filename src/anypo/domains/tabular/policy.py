"""A softmax table over the actions of every step and state, one for each copy of the problem, and a loss that is linear in it."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn

from anypo.batch import Batch
from anypo.policy import Loss, Policy, Signals

if TYPE_CHECKING:
    from anypo.run import Run


class TabularPolicy(Policy):
    """Logits [B,H,S,A]. A batch's context is the states [N,T], its `prompt_id` the copies [N], T = H.

    The signal `table` is pi itself, [B,H,S,A]: losses that are sums over all states are functions of it.
    """

    provides = frozenset({"logp", "entropy", "logits", "table"})
    learning_rate = 1.0
    optimizer = "sgd"

    def __init__(self, copies: int, horizon: int, states: int, actions: int) -> None:
        """Uniform at the start."""
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(copies, horizon, states, actions, dtype=torch.float64))

    @property
    def table(self) -> Float[Tensor, "B H S A"]:
        """The probabilities, without a gradient."""
        return self.logits.detach().softmax(-1)

    @torch.no_grad()
    def assign(self, table: Float[Tensor, "B H S A"]) -> None:
        """Take these probabilities (>= 0, summing to 1) as the policy."""
        self.logits.copy_(table.clamp(min=1e-300).log())

    def evaluate(self, batch: Batch, needs: Set[str]) -> Signals:
        signals = Signals()
        if "table" in needs:
            signals["table"] = self.logits.softmax(-1)
        if needs - {"table"}:
            logits = at_states(self.logits, batch)
            log_probs = logits.log_softmax(-1)
            signals["logp"] = log_probs.gather(-1, batch.action[..., None])[..., 0]
            signals["entropy"] = -(log_probs.exp() * log_probs).sum(-1)
            signals["logits"] = logits
        return Signals({name: value for name, value in signals.items() if name in needs})


def at_states(table: Float[Tensor, "B H S ..."], batch: Batch) -> Float[Tensor, "N T ..."]:
    """The entries of a table at the states that the batch's trajectories visited."""
    return table[batch.signals["prompt_id"][:, None], torch.arange(batch.horizon)[None], batch.context]


@dataclass
class ExpectedAdvantage:
    """Minus the sum over what counts of advantage times probability: linear in the table, its slope the estimated losses."""

    needs = frozenset({"table"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        chance = at_states(new.table, batch).gather(-1, batch.action[..., None])[..., 0]
        return Loss(-(batch.advantage.detach() * chance * batch.counted).sum())
