"""An optimizer whose states are kept in fewer bits between steps: decode, the rule's exact update, encode.

The rule says what the update is, the storage which quantizer a state gets. Left out: sparse gradients and gradients of complex numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from anypo.domains.optim.quantizer import Quantizer, Stored
from anypo.domains.optim.rules import Rule, States


class Storage(Protocol):
    def __call__(self, kind: str, role: str, numel: int) -> Quantizer | None:
        """The quantizer of a state of this kind and size, of a tensor of this role; None = kept in full precision."""
        ...


def by_size(min_size: int, **quantizers: Quantizer) -> Storage:
    """A quantizer for each kind, for states of at least `min_size` entries; other kinds are kept in full precision."""

    def storage(kind: str, role: str, numel: int) -> Quantizer | None:
        return quantizers.get(kind) if numel >= min_size else None

    return storage


class QuantizedOptimizer(torch.optim.Optimizer):
    """Steps of `rule` with decoupled weight decay. A parameter group may name its tensors' `role` (weight, bias, norm, embedding), or ask for
    `full_precision` states.

    Raises ValueError for a learning rate <= 0 or a decay < 0.
    """

    def __init__(self, params: Iterable[Any], rule: Rule, storage: Storage, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        if lr <= 0 or weight_decay < 0:
            raise ValueError(f"{type(self).__name__.lower()} needs lr > 0 and weight_decay >= 0, not {lr}, {weight_decay}")
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "role": "weight", "full_precision": False})
        self.rule, self.storage = rule, storage

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return result

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        gradient = parameter.grad.to(torch.promote_types(parameter.grad.dtype, torch.float32))  # type: ignore[union-attr]
        t = state["t"] = state.get("t", 0) + 1
        states = self._decoded(state, group)
        direction = self.rule.direction(gradient, states, t)
        if group["weight_decay"]:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(direction.to(parameter.dtype), alpha=-group["lr"])
        for name, values in states.items():
            quantizer = self._quantizer(name, group, values.numel())
            if quantizer is None:
                state[name] = values
            else:
                state[f"{name}_shape"] = list(values.shape)
                state[f"{name}_codes"], state[f"{name}_scale"] = quantizer.encode(values)

    def _quantizer(self, name: str, group: dict[str, Any], numel: int) -> Quantizer | None:
        kind = self.rule.kinds.get(name)
        return None if kind is None or group["full_precision"] else self.storage(kind, group["role"], numel)

    def _decoded(self, state: dict[str, Any], group: dict[str, Any]) -> States:
        """Every state in full precision, by name; none before the first step."""
        found: States = {
            name: value for name, value in state.items() if isinstance(value, Tensor) and not name.endswith(("_codes", "_scale"))
        }
        for name in self.rule.kinds:
            if f"{name}_codes" in state:
                shape = torch.Size(state[f"{name}_shape"])
                quantizer = self._quantizer(name, group, shape.numel())
                assert quantizer is not None
                found[name] = quantizer.decode(Stored(state[f"{name}_codes"], state[f"{name}_scale"]), shape)
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        # torch casts every state to its parameter's type; codes are integers and moments are not rounded to 16 bits
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor):
                    self.state[parameter][name] = value.to(parameter.device).clone()

    def state_bytes(self) -> int:
        """Bytes that the states occupy."""
        tensors = (value for state in self.state.values() for value in state.values() if isinstance(value, Tensor))
        return sum(value.numel() * value.element_size() for value in tensors)
