"""Policies of games: an actor that sees what the mover knows, beside critics that see all cards and are used in training alone."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from anypo.batch import Batch
from anypo.domains.games.tree import GameTree
from anypo.policy import Policy, Signals

CRITICS = ("q", "value")


class GamePolicy(Policy):
    """One network for both seats. A batch's context is the node of every move, [N,T].

    Provides [N,T] `logp`, `entropy`, `value`; [N,T,A] `logits` (-1e9 for moves that are not legal) and `q`. Both critics speak from player 0's view.
    """

    memoryless = True
    learning_rate = 1e-3
    optimizer = "adam"

    def __init__(self, tree: GameTree, critics: Set[str] = frozenset(), *, hidden: tuple[int, ...] = (64, 64), seed: int = 0) -> None:
        """`critics`: which of `q` and `value` to have. Weights depend on `seed` alone."""
        super().__init__()
        self.tree = tree
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.actor = _network(tree.seen.shape[1], hidden, tree.actions)
            self.q = _network(tree.full.shape[1], hidden, tree.actions) if "q" in critics else None
            self.value = _network(tree.full.shape[1], hidden, 1) if "value" in critics else None
        self.provides = frozenset({"logp", "entropy", "logits"} | (critics & set(CRITICS)))

    def parameter_groups(self) -> list[dict[str, Any]]:
        critics = [p for critic in (self.q, self.value) if critic is not None for p in critic.parameters()]
        return [{"params": list(self.actor.parameters()), "role": "policy"}, {"params": critics, "role": "value"}]

    def _logits(self, infoset: Tensor) -> Tensor:
        tree = self.tree
        return torch.where(tree.legal, self.actor(tree.seen), -1e9)[infoset]

    @property
    def table(self) -> Float[Tensor, "I A"]:
        """Probabilities at every information set."""
        with torch.no_grad():
            return self._logits(torch.arange(len(self.tree.names))).double().softmax(-1)

    def evaluate(self, batch: Batch, needs: Set[str]) -> Signals:
        signals = Signals()
        if needs & {"logp", "entropy", "logits"}:
            logits = self._logits(self.tree.infoset[batch.context])
            log_probs = logits.log_softmax(-1)
            zero = log_probs.new_zeros(())
            signals["logp"] = torch.where(batch.mask, log_probs.gather(-1, batch.action[..., None])[..., 0], zero)
            signals["entropy"] = torch.where(batch.mask, -(log_probs.exp() * log_probs).sum(-1), zero)
            signals["logits"] = logits
        full = self.tree.full[batch.context]
        if "q" in needs and self.q is not None:
            signals["q"] = self.q(full)
        if "value" in needs and self.value is not None:
            signals["value"] = self.value(full)[..., 0]
        return Signals({name: value for name, value in signals.items() if name in needs})


def _network(inputs: int, hidden: tuple[int, ...], outputs: int) -> nn.Sequential:
    sizes = (inputs, *hidden, outputs)
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(zip(sizes[:-1], sizes[1:], strict=True)):
        layers += [nn.Linear(a, b), nn.Tanh()] if i < len(hidden) else [nn.Linear(a, b)]
    return nn.Sequential(*layers)
