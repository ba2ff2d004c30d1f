"""Policy: what every domain's policy shares, and the memory-bounded backward pass.

A policy computes exactly the signals it is asked for. The loss is a function of those signals alone, so its gradient is found in two steps:
first the gradient with respect to the signals of the whole minibatch (small tensors), then, chunk by chunk, the gradient of the signals with
respect to the parameters. Losses that couple all rows (batch whitening, aggregates over groups, several trust regions) stay exact however
small the chunks are, and rows whose signals receive no gradient are never sent through the backward pass.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from anypo.batch import Batch


class Signals(dict[str, Any]):
    """What a policy computed for a batch: `new.logp` [N,T], `new.entropy` [N,T], `new.value` [N,T], `new.hidden`, `new.logits`, ..."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            have = ", ".join(sorted(self)) or "nothing"
            raise AttributeError(f"the policy was not asked for '{name}' (it computed: {have}); add it to `needs`") from None


@dataclass
class Loss:
    """A differentiable scalar to minimize, and numbers for the log."""

    value: Tensor
    metrics: dict[str, float] = field(default_factory=dict)

    def __add__(self, other: Loss) -> Loss:
        return Loss(self.value + other.value, self.metrics | other.metrics)


LossFunction = Callable[[Batch, Signals], Loss]


class Gradient(NamedTuple):
    """A loss with its gradient in closed form: what a component's optional `gradient(batch, arrays, run)` returns, where it knows one.

    Autograd costs more than the arithmetic when a minibatch holds a few hundred numbers. A component that has `gradient` is asked only for
    minibatches on the CPU in which every action counts; it returns None for settings that only autograd covers.
    """

    value: float
    signals: dict[str, NDArray]  # by signal: d value / d signal, in the signal's shape
    metrics: dict[str, float]


class MissingSignal(ValueError):
    """A method asks for a signal that this policy cannot compute; the message names both."""


class Policy(nn.Module):
    """Base class of all policies: a torch module that evaluates trajectories and runs the chunked backward pass.

    Subclasses set `provides` and implement `evaluate`; those too large for one pass override `chunks`.
    """

    provides: frozenset[str] = frozenset({"logp"})
    if TYPE_CHECKING:  # what only one domain's policies have (`sample`, `encode`, ...) is that domain's business

        def __getattr__(self, name: str) -> Any: ...

    memoryless: bool = False  # True when action t depends on its own observation alone, so that single actions may be shuffled
    learning_rate: float = 1e-3  # a sensible default at this size; the update seam may override it
    optimizer: str = "adamw"
    unit: str = "actions"  # what people call its actions: tokens, environment steps, ...

    def evaluate(self, batch: Batch, needs: Set[str]) -> Signals:
        """Differentiable signals of the batch's own actions, exactly those in `needs`. Shapes [N,T] unless the signal says otherwise."""
        raise TypeError(f"{type(self).__name__} does not say how its trajectories are evaluated; a policy implements `evaluate`")

    def chunks(self, batch: Batch) -> Iterator[Tensor]:
        """Row indices [n] of the pieces that fit one forward and backward pass; together they cover every row once."""
        yield torch.arange(len(batch))

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Optimizer groups with a `role` each ("policy", "value", "lora", ...)."""
        return [{"params": [p for p in self.parameters() if p.requires_grad], "role": "policy"}]

    def snapshot(self) -> Policy:
        """A frozen copy, for references and behaviour policies."""
        twin = copy.deepcopy(self)
        twin.requires_grad_(False)
        return twin.eval()

    def after_collection(self, collector: Policy) -> None:
        """Told when another policy of its kind has acted in its place; what is learned from seeing alone (statistics of observations) is taken over."""

    def check(self, needs: Set[str], who: str) -> None:
        """Raise MissingSignal unless every signal in `needs` is one this policy provides."""
        missing = sorted(set(needs) - self.provides)
        if missing:
            raise MissingSignal(
                f"{who} needs the signal '{missing[0]}', which {type(self).__name__} does not provide (it has: {', '.join(sorted(self.provides))})"
            )

    @torch.no_grad()
    def observe(self, batch: Batch, needs: Set[str]) -> Signals:
        """`evaluate` without a graph, chunk by chunk."""
        pieces = list(self.chunks(batch))
        if len(pieces) == 1 and torch.equal(pieces[0], torch.arange(len(batch))):
            return self.evaluate(batch, needs)
        parts = [(rows, self.evaluate(batch[rows], needs)) for rows in pieces]
        return _assemble(parts, len(batch))

    def backward(self, batch: Batch, needs: Set[str], loss_fn: LossFunction, recorded: Signals | None = None) -> Loss:
        """Add the gradient of `loss_fn` to the parameters' `.grad`; the returned loss is detached.

        `recorded`: values of the signals known beforehand (an on-policy batch carries its own log-probs). With them, rows that receive no
        gradient cost nothing and no second forward pass is needed when the batch is split.
        """
        pieces = list(self.chunks(batch))
        if recorded is None and len(pieces) == 1:
            loss = loss_fn(batch, self.evaluate(batch, needs))
            if loss.value.requires_grad:
                loss.value.backward()
            return Loss(loss.value.detach(), loss.metrics)
        values = recorded if recorded is not None else self.observe(batch, needs)
        leaves = Signals({k: v.detach().clone().requires_grad_(v.is_floating_point()) for k, v in values.items()})
        loss = loss_fn(batch, leaves)
        if not loss.value.requires_grad:
            return Loss(loss.value.detach(), loss.metrics)
        loss.value.backward()
        gradients = {k: v.grad for k, v in leaves.items() if v.grad is not None}
        touched = torch.zeros(len(batch), dtype=torch.bool)
        for gradient in gradients.values():
            touched |= (gradient != 0).flatten(1).any(dim=1).cpu()
        rows_left = touched.nonzero().flatten()
        if len(rows_left) == 0:
            return Loss(loss.value.detach(), loss.metrics)
        kept = batch if len(rows_left) == len(batch) else batch[rows_left]
        for rows in self.chunks(kept):
            signals = self.evaluate(kept if torch.equal(rows, torch.arange(len(kept))) else kept[rows], needs)
            names = [k for k in gradients if signals[k].requires_grad]
            # a signal over the prompt is as wide as the longest prompt of its piece
            parts = [gradients[k][(rows_left[rows], *map(slice, signals[k].shape[1:]))].to(signals[k]) for k in names]
            torch.autograd.backward([signals[k] for k in names], parts)
        return Loss(loss.value.detach(), loss.metrics)


def _assemble(parts: list[tuple[Tensor, Signals]], count: int) -> Signals:
    if len(parts) == 1 and torch.equal(parts[0][0], torch.arange(count)):
        return parts[0][1]
    joined = Signals()
    for name, first in parts[0][1].items():
        out = first.new_zeros((count, *max(signals[name].shape[1:] for _, signals in parts)))
        for rows, signals in parts:
            out[(rows, *map(slice, signals[name].shape[1:]))] = signals[name]
        joined[name] = out
    return joined
