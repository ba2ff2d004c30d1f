"""How a loss becomes a step."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anypo.batch import Batch
from anypo.policy import Loss, Policy

if TYPE_CHECKING:
    from anypo.run import MethodLoss, Run

SMALL = 1 << 16  # numbers in a gradient that is clipped in NumPy

OPTIMIZERS = {
    "sgd": "torch.optim:SGD",
    "adam": "torch.optim:Adam",
    "adamw": "torch.optim:AdamW",
    "rmsprop": "torch.optim:RMSprop",
    "adam8bit": "anypo.methods.optim.adam8bit:Adam8bit",
    "adam4bit": "anypo.methods.optim.adam4bit:Adam4bit",
    "sgd4bit": "anypo.methods.optim.adam4bit:Sgd4bit",
    "al_quant": "anypo.methods.optim.al_quant:AlOptimizer",
    "al_adafactor": "anypo.methods.optim.al_quant:AlAdafactor",
    "al_came": "anypo.methods.optim.al_quant:AlCame",
    "al_projected": "anypo.methods.optim.al_quant:AlProjected",
    "greedy_bcd": "anypo.methods.optim.greedy_bcd:GreedyBlocks",
}


@dataclass
class GradientSteps:
    """Epochs of optimizer steps over minibatches of the batch, with gradient clipping."""

    epochs: int = 1  # passes over the batch, >= 1
    minibatches: int = 1  # parts of the batch, each one optimizer step, >= 1
    learning_rate: float | None = None  # > 0; None = the policy's own default
    optimizer: str | None = None  # adamw, adam, sgd, ...; None = the policy's own default
    weight_decay: float = 0.0  # >= 0
    max_grad_norm: float | None = 1.0  # > 0; None = no clipping
    unit: str = "auto"  # what is shuffled into minibatches: group, row or action; auto = action for memoryless policies, else group
    value_learning_rate: float | None = None  # for parameters of role "value"; None = learning_rate

    def __call__(self, batch: Batch, loss_fn: MethodLoss, run: Run) -> dict[str, float]:
        optimizer = run.optimizer(self.build)
        unit = ("action" if run.policy.memoryless else "group") if self.unit == "auto" else self.unit
        if unit == "action" and self.minibatches > 1:
            batch, unit = flatten_actions(batch), "row"
        totals: dict[str, list[float]] = {}
        for _ in range(self.epochs):
            for part in minibatches(batch, self.minibatches, unit, run.generator):
                found = self.one_step(part, loss_fn, optimizer, run)
                for name, value in found.items():
                    totals.setdefault(name, []).append(value)
                if self.enough(found):
                    return _means(totals)
        return _means(totals)

    def enough(self, metrics: dict[str, float]) -> bool:
        """Whether the rest of the batch's steps is left out after one with these metrics; a method that stops early says when."""
        return False

    def one_step(self, part: Batch, loss_fn: MethodLoss, optimizer: torch.optim.Optimizer, run: Run) -> dict[str, float]:
        """Gradient, clip, optimizer step, zero; returns the loss, its metrics and the gradient norm."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for parameter in parameters:
            parameter.grad = None
        loss = self.backward(part, loss_fn, run)
        norm = float(clip_parameters(parameters, self.max_grad_norm))
        if not math.isfinite(norm):
            raise FloatingPointError("the gradient is not finite; lower the learning rate or check the reward and the objective")
        optimizer.step()
        run.advance_version()
        return {"loss": float(loss.value), **loss.metrics, "grad_norm": norm}

    def backward(self, part: Batch, loss_fn: MethodLoss, run: Run) -> Loss:
        """Add the gradient of the loss; a method that looks at the rows in other states, or several times, says how."""
        return run.backward(part, loss_fn)

    def build(self, policy: Policy) -> torch.optim.Optimizer:
        return build_optimizer(policy, self.optimizer, self.learning_rate, self.weight_decay, {"value": self.value_learning_rate})


def _means(totals: dict[str, list[float]]) -> dict[str, float]:
    return {name: sum(values) / len(values) for name, values in totals.items()}


def build_optimizer(
    policy: Policy,
    name: str | None,
    learning_rate: float | None,
    weight_decay: float = 0.0,
    role_rates: dict[str, float | None] | None = None,
) -> torch.optim.Optimizer:
    """An optimizer over the policy's parameter groups, with a learning rate of its own for some roles. Raises ValueError for an unknown name."""
    name = name or policy.optimizer
    if name not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer '{name}'; use one of {', '.join(sorted(OPTIMIZERS))}")
    module, _, attribute = OPTIMIZERS[name].partition(":")
    factory: Any = getattr(importlib.import_module(module), attribute)
    base = learning_rate or policy.learning_rate
    by_rate: dict[float, list[Tensor]] = {}  # one group for all roles that move at the same rate: fewer calls a step
    for g in policy.parameter_groups():
        by_rate.setdefault((role_rates or {}).get(g.get("role", ""), None) or base, []).extend(g["params"])
    groups: list[dict[str, Any]] = [{"params": parameters, "lr": rate} for rate, parameters in by_rate.items() if parameters]
    options: dict[str, Any] = {"lr": base, "weight_decay": weight_decay}
    if name in ("adam", "adamw") and all(
        p.dtype.is_floating_point and p.device.type in ("cpu", "cuda") for g in groups for p in g["params"]
    ):
        options["fused"] = True  # one call for all parameters; for small networks the calls are what a step costs
    return factory(groups, **options)


def clip_gradients(policy: Policy, max_norm: float | None) -> Tensor:
    """Scale all gradients to a total norm of at most `max_norm`; returns the norm before."""
    return clip_parameters(policy.parameters(), max_norm)


def clip_parameters(parameters: Iterable[Tensor], max_norm: float | None) -> Tensor:
    """`clip_gradients` for some parameters."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros(())
    if all(g.device.type == "cpu" and g.dtype == torch.float32 and g.numel() <= SMALL for g in gradients):
        return _clip_arrays([g.numpy() for g in gradients], max_norm)
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    if max_norm is not None and float(norm) > max_norm:
        torch._foreach_mul_(gradients, max_norm / (float(norm) + 1e-6))
    return norm


def _clip_arrays(gradients: list[NDArray], max_norm: float | None) -> Tensor:
    """The same for small gradients on the CPU, where a torch call costs more than the arithmetic."""
    norm = math.sqrt(sum(float(np.vdot(g, g)) for g in gradients))
    if max_norm is not None and norm > max_norm:
        for gradient in gradients:
            gradient *= np.float32(max_norm / (norm + 1e-6))
    return torch.tensor(norm)


def minibatches(batch: Batch, parts: int, unit: str, generator: torch.Generator) -> Iterator[Batch]:
    """The batch in `parts` random pieces of whole groups, rows or actions. One part is the batch itself, untouched."""
    if unit not in ("group", "row", "action"):
        raise ValueError(f"unknown minibatch unit '{unit}'; use auto, group, row or action")
    if parts <= 1:
        yield batch
        return
    if unit == "action":
        batch = flatten_actions(batch)
    index = torch.unique(batch.group, return_inverse=True)[1] if unit == "group" else torch.arange(len(batch))
    order = torch.randperm(int(index.max()) + 1, generator=generator)
    pieces = order.chunk(min(parts, len(order)))
    if unit == "group":
        yield from (batch[torch.isin(index, chosen).nonzero().flatten()] for chosen in pieces)
        return
    yield from batch[order].split([len(chosen) for chosen in pieces])


def flatten_actions(batch: Batch) -> Batch:
    """N trajectories of T actions as rows of one action each: every tensor [N,T,...] becomes [M,1,...] over the M counted actions."""
    horizon, chosen = batch.horizon, batch.counted.flatten().nonzero().flatten()

    def flat(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dim() >= 2 and value.shape[1] == horizon:
            return value.flatten(0, 1)[chosen].unsqueeze(1)
        if isinstance(value, Tensor):
            return value.repeat_interleave(horizon, dim=0)[chosen]
        return value if value is None else [value[i // horizon] for i in chosen.tolist()]

    changed = {name: flat(getattr(batch, name)) for name in Batch.__dataclass_fields__ if name not in ("signals", "objectives")}
    return Batch(**changed, objectives=batch.objectives, signals={name: flat(value) for name, value in batch.signals.items()})
