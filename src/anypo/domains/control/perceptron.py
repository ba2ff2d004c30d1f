"""The parts of a small policy: perceptrons that run in torch and in NumPy on the same weights, and running moments of observations."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn


class Network(nn.Module):
    """A multilayer perceptron with orthogonal initial weights; `scale` is the gain of the last layer."""

    def __init__(self, sizes: tuple[int, ...], scale: float, activation: str = "tanh") -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in zip(sizes[:-1], sizes[1:], strict=True))
        self.activation = {"tanh": torch.tanh, "relu": torch.relu}[activation]
        self.array_activation: Callable[..., NDArray] = np.tanh if activation == "tanh" else _array_relu
        for layer in self.layers:
            gain = scale if layer is self.layers[-1] else math.sqrt(2)
            nn.init.orthogonal_(layer.weight, gain)  # type: ignore[arg-type]
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
        # The parameters themselves, in order: looking them up through modules costs as much as a small product.
        self.pairs: list[tuple[nn.Parameter, nn.Parameter]] = [(layer.weight, layer.bias) for layer in self.layers]  # type: ignore[misc]

    def hidden(self, x: Tensor) -> Tensor:
        """[...,I] -> the last hidden layer [...,H]."""
        for layer in list(self.layers)[:-1]:
            x = self.activation(nn.functional.linear(x, layer.weight, layer.bias))  # type: ignore[arg-type]
        return x

    def forward(self, x: Tensor) -> Tensor:
        last = self.layers[-1]
        return nn.functional.linear(self.hidden(x), last.weight, last.bias)  # type: ignore[arg-type]

    def as_arrays(self) -> Callable[[NDArray], NDArray]:
        """The network as a NumPy function on views of the current weights (they follow in-place updates)."""
        (*before, (last_weight, last_bias)), activation = self._views(), self.array_activation

        def run(x: NDArray) -> NDArray:
            for weight, bias in before:
                x = x @ weight.T
                x += bias
                activation(x, out=x)
            return x @ last_weight.T + last_bias

        return run

    def trace(self, x: NDArray) -> list[NDArray]:
        """The input [M,I], every hidden layer and the output [M,O], for `accumulate`."""
        layers, views = [x], self._views()
        for weight, bias in views:
            layers.append(layers[-1] @ weight.T)
            layers[-1] += bias
            if len(layers) <= len(views):
                self.array_activation(layers[-1], out=layers[-1])
        return layers

    def accumulate(self, layers: list[NDArray], gradient: NDArray) -> None:
        """Add to every parameter's `.grad` what the output's gradient [M,O] makes of it: backpropagation by hand, a third of autograd's cost here."""
        for i in range(len(self.pairs) - 1, -1, -1):
            weight, bias = self.pairs[i]
            add_gradient(weight, gradient.T @ layers[i])
            add_gradient(bias, gradient.sum(0))
            if i:
                gradient = gradient @ weight.detach().numpy()
                gradient *= (layers[i] > 0) if self.activation is torch.relu else 1 - layers[i] * layers[i]

    def _views(self) -> list[tuple[NDArray, NDArray]]:
        return [(weight.detach().numpy(), bias.detach().numpy()) for weight, bias in self.pairs]


def _array_relu(x: NDArray, out: NDArray) -> NDArray:
    return np.maximum(x, 0, out=out)


def add_gradient(parameter: nn.Parameter, gradient: NDArray) -> None:
    """parameter.grad += gradient."""
    found = torch.from_numpy(gradient)
    parameter.grad = found if parameter.grad is None else parameter.grad + found


class Moments(nn.Module):
    """Running mean and variance of observations (parallel form of Welford's recurrence), applied only when told.

    `note` keeps the moments of new observations aside; `absorb` merges them. In between, the normalization stands still.
    """

    mean: Tensor
    variance: Tensor
    count: Tensor
    waiting: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(size, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("waiting", torch.zeros(3, size, dtype=torch.float64))  # rows: count, mean, variance

    def note(self, observations: NDArray) -> None:
        """Remember the moments of observations [M,O] until the next `absorb`."""
        flat = torch.from_numpy(np.asarray(observations, dtype=np.float64))
        if len(flat):
            self.waiting.copy_(torch.stack([torch.full_like(self.mean, len(flat)), flat.mean(0), flat.var(0, correction=0)]))

    def absorb(self) -> None:
        count, mean, variance = self.waiting
        if count[0] == 0:
            return
        total = self.count + count[0]
        shift = mean - self.mean
        spread = self.variance * self.count + variance * count + shift**2 * self.count * count / total
        self.mean += shift * count / total
        self.variance.copy_(spread / total)
        self.count.copy_(total)
        self.waiting.zero_()

    def scale(self) -> tuple[Tensor, Tensor]:
        """(mean, standard deviation) in force."""
        return self.mean, (self.variance + 1e-8).sqrt()
