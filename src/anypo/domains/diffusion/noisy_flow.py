"""A flow policy whose actions carry Gaussian noise on top: the actor and critic of arXiv:2602.01156.

An action is the end of a path from normal noise by the midpoint rule, plus noise of a learned, state-free deviation. The flow alone decides how many ways
of acting there are; the noise gives every action a likelihood given its path. Stored actions are [start, end, noise], 3 D numbers in units of the
environment's bounds, which are enforced outside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Set
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn

from anypo.batch import Batch
from anypo.domains.control.envs import Spaces
from anypo.domains.diffusion.action_flow import FlowActionPolicy
from anypo.domains.diffusion.denoise import HALF_LOG_TWO_PI
from anypo.policy import Signals


class NoisyFlowPolicy(FlowActionPolicy):
    """`evaluate` provides [N,T,D] `path_velocity`, the field on the straight line between the stored start and end at level `batch.signals["path_level"]`
    [N,T]; [N,T,D] `log_std` of the noise and [N,T] its `entropy`; [N,T] `value` of a critic.

    Acting without noise starts from its middle (0) and adds none.
    """

    provides = frozenset({"path_velocity", "log_std", "entropy", "value"})

    def __init__(
        self, spaces: Spaces, *, hidden: tuple[int, ...] = (64, 64), normalize_observations: bool = True, sampling_steps: int = 10,
        integrator: str = "midpoint", initial_log_std: float = -0.7, noise_floor: float = 0.05, seed: int = 0,
    ) -> None:  # fmt: skip
        """`initial_log_std`: of the noise, in units of the action bounds. `noise_floor`: its least deviation, > 0, without which it may vanish for all states.

        Raises ValueError for spaces without continuous, bounded actions and for numbers out of range.
        """
        if noise_floor <= 0:
            raise ValueError(f"noise_floor must be above 0, not {noise_floor}")
        super().__init__(
            spaces, hidden=hidden, normalize_observations=normalize_observations, sampling_steps=sampling_steps, integrator=integrator,
            seed=seed,
        )  # fmt: skip
        self.initial_log_std, self.noise_floor = initial_log_std, noise_floor
        self.raw_log_std = nn.Parameter(torch.full((spaces.action_size,), float(initial_log_std)))

    @property
    def configuration(self) -> dict[str, Any]:
        return super().configuration | {"initial_log_std": self.initial_log_std, "noise_floor": self.noise_floor}

    def parameter_groups(self) -> list[dict[str, Any]]:
        return [*super().parameter_groups(), {"params": [self.raw_log_std], "role": "policy"}]

    @property
    def log_std(self) -> Float[Tensor, " D"]:
        return self.raw_log_std.clamp(min=math.log(self.noise_floor))

    def evaluate(self, batch: Batch, needs: Set[str]) -> Signals:
        observation, shape = self.normalize(batch.context), batch.mask.shape
        signals = Signals()
        if "path_velocity" in needs:
            start, end, _ = batch.action.chunk(3, dim=-1)
            level = batch.signal("path_level")
            point = (1 - level[..., None]) * end + level[..., None] * start
            signals["path_velocity"] = self.actor_network.predict(point, level, observation)
        if "log_std" in needs:
            signals["log_std"] = self.log_std.expand(*shape, -1)
        if "entropy" in needs:
            signals["entropy"] = (self.log_std + 0.5 + HALF_LOG_TWO_PI).sum().expand(shape)
        if "value" in needs:
            signals["value"] = self.critic_network(observation).squeeze(-1)
        return signals

    def noise(self, rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Where the paths begin, and what is added at their ends in units of its deviation."""
        return rng.standard_normal((*shape, 2 * self.spaces.action_size), dtype=np.float32)

    def actor(self) -> Callable[[NDArray, NDArray | None], NDArray]:
        follow, size, std = self.path(), self.spaces.action_size, self.log_std.detach().exp().numpy()

        def act(observation: NDArray, noise: NDArray | None) -> NDArray:
            drawn = np.zeros((len(observation), 2 * size), np.float32) if noise is None else noise
            start = drawn[:, :size]
            return np.concatenate([start, follow(observation, start), std * drawn[:, size:]], axis=1)

        return act

    def for_environment(self, action: NDArray) -> NDArray:
        _, end, noise = np.split(action, 3, axis=-1)
        return self.centre + self.reach * (end + noise).clip(-1, 1)

    def from_environment(self, action: NDArray) -> NDArray:
        """Recorded actions as ends of paths of which no start is known (NaN), without noise."""
        end = ((action - self.centre) / self.reach).clip(-1, 1).astype(np.float32)
        return np.concatenate([np.full_like(end, np.nan), end, np.zeros_like(end)], axis=-1)
