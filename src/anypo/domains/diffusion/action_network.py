"""The network of policies that find an action by refining noise: a perceptron that sees the unfinished action, its noise level and the observation.

As in `domains.control`, training runs in torch and collection in NumPy on views of the same weights. While an action is refined its observation
stands still and the levels are known beforehand, so their share of the first layer is computed once.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn

from anypo.domains.control.envs import Spaces
from anypo.domains.control.perceptron import Network
from anypo.domains.diffusion.network import FREQUENCIES, level_features

Predict = Callable[[int, NDArray], NDArray]  # (index of a level, unfinished actions [N,D]) -> output [N,D]


class ActionNetwork(Network):
    """[...,D] from unfinished actions [...,D], levels in [0,1] [...] and observations [...,O]; close to 0 at the start."""

    def __init__(self, size: int, observation_size: int, hidden: tuple[int, ...]) -> None:
        super().__init__((size + observation_size + 1 + 2 * FREQUENCIES, *hidden, size), scale=0.01, activation="relu")
        self.size, self.observation_size = size, observation_size

    def predict(self, action: Float[Tensor, "... D"], level: Float[Tensor, ...], observation: Float[Tensor, "... O"]) -> Tensor:
        return self(torch.cat([action, observation, level_features(level)], dim=-1))

    def along(self, levels: Float[Tensor, " K"], observation: Float[Tensor, "B O"]) -> Callable[[int, Tensor], Tensor]:
        """`predict` at levels and observations that are known: along(levels, observations)(k, actions [B,D]) is the output at levels[k]."""
        (weight, bias), *rest = self.pairs
        by_action, by_observation, by_level = weight.split(
            (self.size, self.observation_size, weight.shape[1] - self.size - self.observation_size), 1
        )
        fixed = nn.functional.linear(observation, by_observation, bias)
        shares = nn.functional.linear(level_features(levels.to(fixed.dtype)), by_level)

        def predict(k: int, action: Tensor) -> Tensor:
            x = torch.addmm(fixed + shares[k], action, by_action.T)
            for weight, bias in rest:
                x = nn.functional.linear(torch.relu(x), weight, bias)
            return x

        return predict

    def at_levels(self, levels: Float[Tensor, " K"]) -> Callable[[NDArray], Predict]:
        """`predict` in NumPy at levels that are known: at_levels(levels)(observations [N,O])(k, actions [N,D]) is the output at levels[k]."""
        (weight, bias), *rest = self._views()
        by_action, by_observation, by_level = np.split(weight.T, (self.size, self.size + self.observation_size))
        shares = level_features(levels.to(torch.float32)).numpy() @ by_level + bias

        def given(observation: NDArray) -> Predict:
            fixed = observation @ by_observation

            def predict(k: int, action: NDArray) -> NDArray:
                x = action @ by_action
                x += fixed
                x += shares[k]
                for weight, bias in rest:
                    np.maximum(x, 0, out=x)
                    x = x @ weight.T
                    x += bias
                return x

            return predict

        return given


def finite_range(spaces: Spaces) -> tuple[NDArray, NDArray]:
    """Centre and half-width [D] of the action bounds. Raises ValueError for spaces without continuous, bounded actions."""
    if spaces.low is None or spaces.high is None:
        raise ValueError(f"{spaces.name} has discrete actions; this method acts in continuous ones, so choose Pendulum-v1 or a MuJoCo task")
    if not (np.isfinite(spaces.low).all() and np.isfinite(spaces.high).all()):
        raise ValueError(f"{spaces.name} has actions without bounds; this method scales its actions to finite bounds")
    return (spaces.high + spaces.low) / 2, (spaces.high - spaces.low) / 2
