"""Policies that choose moves on a finite graph from the state and the time, as a table or a small network, or from all that was visited."""

from __future__ import annotations

from collections.abc import Callable, Set

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from anypo.batch import Batch
from anypo.policy import Policy, Signals

Chooser = Callable[[int, Int[Tensor, " N"], Float[Tensor, "N S"]], Float[Tensor, "N A"]]


class PathPolicy(Policy):
    """A batch's context is the states [N,T] in which its actions were taken, from the start on.

    `features` [S,D] of the states with the time in [0,1] beside them are what the network sees; `history` adds which states were visited so far
    (present one included), [S] zeros and ones. `hidden` None: a table of logits over time, state and action instead of a network.
    """

    provides = frozenset({"logp", "entropy", "logits"})
    learning_rate = 1e-2
    optimizer = "adam"

    def __init__(
        self, features: Float[Tensor, "S D"], horizon: int, actions: int, *, hidden: tuple[int, ...] | None = (64, 64), history: bool = False,
        seed: int = 0,
    ) -> None:  # fmt: skip
        """`horizon`: number of actions T. The table begins uniform. Raises ValueError for a table with a history."""
        super().__init__()
        if hidden is None and history:
            raise ValueError("a table cannot see the history; give hidden layers, or history=False")
        self.states, self.steps, self.history = len(features), horizon, history
        self.logits = nn.Parameter(torch.zeros(horizon, len(features), actions)) if hidden is None else None
        time = torch.linspace(0, 1, horizon)[:, None, None].expand(horizon, len(features), 1)
        self.register_buffer("inputs", torch.cat([features.float().expand(horizon, *features.shape), time], -1), persistent=False)
        if hidden is not None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                self.network = perceptron(features.shape[1] + 1 + (len(features) if history else 0), hidden, actions)

    def table(self) -> Float[Tensor, "T S A"]:
        """Logits everywhere, of a policy without history."""
        return self.logits if self.logits is not None else self.network(self.inputs)

    def chooser(self) -> Chooser:
        """Logits [N,A] as a function of (time, states [N], visited [N,S]); the present parameters are looked up once."""
        if self.history:
            return lambda t, state, visited: self.network(torch.cat([self.inputs[t, state], visited], -1))
        table = self.table()
        return lambda t, state, visited: table[t, state]

    def evaluate(self, batch: Batch, needs: Set[str]) -> Signals:
        place = (torch.arange(batch.horizon)[None], batch.context)
        if self.history:
            visited = nn.functional.one_hot(batch.context, self.states).to(torch.uint8).cummax(1).values.float()
            logits = self.network(torch.cat([self.inputs[place], visited], -1))
        else:
            logits = self.table()[place]
        log_probs = logits.log_softmax(-1)
        signals = {
            "logp": log_probs.gather(-1, batch.action[..., None])[..., 0],
            "entropy": -(log_probs.exp() * log_probs).sum(-1),
            "logits": logits,
        }
        return Signals({name: signals[name] for name in needs})


def perceptron(inputs: int, hidden: tuple[int, ...], outputs: int, activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    """Linear layers with an activation between them; no hidden layer: one linear map."""
    sizes = (inputs, *hidden, outputs)
    layers: list[nn.Module] = []
    for i, (before, after) in enumerate(zip(sizes[:-1], sizes[1:], strict=True)):
        layers += [nn.Linear(before, after)] + ([activation()] if i < len(hidden) else [])
    return nn.Sequential(*layers)
