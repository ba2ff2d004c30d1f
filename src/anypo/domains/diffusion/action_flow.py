"""A flow policy for environments: an action is the end of a path that starts at noise and follows a learned velocity field (arXiv:2507.21053).

Stored actions are those of the flow; they are squashed by tanh into the environment's bounds outside of it. Such a policy has no log-probs:
methods compare velocities instead, at (level, noise) pairs that the batch carries. Left out: discrete actions.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.control.envs import Spaces
from anypo.domains.control.perceptron import Moments, Network
from anypo.domains.control.policy import EnvironmentPolicy
from anypo.domains.diffusion.action_network import ActionNetwork, Predict, finite_range
from anypo.domains.diffusion.denoise import uniform_levels
from anypo.policy import Signals

INTEGRATORS = ("euler", "heun", "midpoint")
ATANH_LIMIT = 1 - 1e-6  # recorded actions this close to the bounds are taken for the bound's neighbour


class FlowActionPolicy(EnvironmentPolicy):
    """`evaluate` provides [N,T,M,D] `flow_velocity`, the field at M points between each stored action [N,T,D] and noise: at levels
    `batch.signals["flow_level"]` [N,T,M] in [0,1] and noise `flow_noise` [N,T,M,D]; and [N,T] `value` of a critic beside it.

    Acting starts from normal noise, and from its middle (0) where the likeliest action is asked for.
    """

    learning_rate = 3e-4
    optimizer = "adam"
    provides = frozenset({"flow_velocity", "value"})

    def __init__(
        self, spaces: Spaces, *, hidden: tuple[int, ...] = (64, 64), normalize_observations: bool = True, sampling_steps: int = 10,
        integrator: str = "euler", seed: int = 0,
    ) -> None:  # fmt: skip
        """`sampling_steps`, `integrator` (euler, heun or midpoint): how the path is followed; both may be changed at any time. Weights depend on `seed` alone.

        Raises ValueError for spaces without continuous, bounded actions and for a sampler that does not exist.
        """
        super().__init__()
        self.centre, self.reach = finite_range(spaces)
        self.spaces, self.hidden_sizes = spaces, tuple(hidden)
        self.sampling_steps, self.integrator = sampling_steps, integrator
        self._check_sampler()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.actor_network = ActionNetwork(spaces.action_size, spaces.observation_size, self.hidden_sizes)
            self.critic_network = Network((spaces.observation_size, *hidden, 1), scale=1.0)
        self.moments = Moments(spaces.observation_size) if normalize_observations else None

    @property
    def configuration(self) -> dict[str, Any]:
        return {
            "hidden": list(self.hidden_sizes),
            "normalize_observations": self.moments is not None,
            "sampling_steps": self.sampling_steps,
            "integrator": self.integrator,
        }

    def parameter_groups(self) -> list[dict[str, Any]]:
        return [
            {"params": list(self.actor_network.parameters()), "role": "policy"},
            {"params": list(self.critic_network.parameters()), "role": "value"},
        ]

    def evaluate(self, batch: Batch, needs: Set[str]) -> Signals:
        observation = self.normalize(batch.context)
        signals = Signals()
        if "flow_velocity" in needs:
            level, noise = batch.signal("flow_level"), batch.signal("flow_noise")
            point = (1 - level[..., None]) * batch.action.unsqueeze(-2) + level[..., None] * noise
            seen = observation.unsqueeze(-2).expand(*level.shape, -1)
            signals["flow_velocity"] = self.actor_network.predict(point, level, seen)
        if "value" in needs:
            signals["value"] = self.critic_network(observation).squeeze(-1)
        return signals

    def values(self, observation: Tensor) -> Tensor:
        """The critic at raw observations [...,O] -> [...]."""
        return self.critic_network(self.normalize(observation)).squeeze(-1)

    def noise(self, rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Where the paths begin."""
        return rng.standard_normal((*shape, self.spaces.action_size), dtype=np.float32)

    def actor(self) -> Callable[[NDArray, NDArray | None], NDArray]:
        follow, size = self.path(), self.spaces.action_size

        def act(observation: NDArray, noise: NDArray | None) -> NDArray:
            return follow(observation, np.zeros((len(observation), size), np.float32) if noise is None else noise)

        return act

    def path(self) -> Callable[[NDArray, NDArray], NDArray]:
        """A function (raw observations [N,O], starts [N,D]) -> where the paths end [N,D], with the weights of this moment."""
        self._check_sampler()
        normalize, steps = self._normalizer(), self.sampling_steps
        given = self.actor_network.at_levels(uniform_levels(2 * steps if self.integrator == "midpoint" else steps))
        follow = {"euler": _euler, "heun": _heun, "midpoint": _midpoint}[self.integrator]
        return lambda observation, start: follow(given(normalize(observation)), start, steps)

    def for_environment(self, action: NDArray) -> NDArray:
        return self.centre + self.reach * np.tanh(action)

    def from_environment(self, action: NDArray) -> NDArray:
        return np.arctanh(((action - self.centre) / self.reach).clip(-ATANH_LIMIT, ATANH_LIMIT)).astype(np.float32)

    def _check_sampler(self) -> None:
        if self.integrator not in INTEGRATORS or self.sampling_steps < 1:
            raise ValueError(
                f"a flow is followed by {', '.join(INTEGRATORS)} in 1 step or more, not {self.integrator} in {self.sampling_steps}"
            )


def _euler(velocity: Predict, x: NDArray, steps: int) -> NDArray:
    """From level 1 to level 0 in equal steps of x - v / steps."""
    for k in range(steps):
        x = x - velocity(k, x) / steps
    return x


def _midpoint(velocity: Predict, x: NDArray, steps: int) -> NDArray:
    """The same with the velocity half a step further on; the levels known are those of half steps."""
    for k in range(steps):
        x = x - velocity(2 * k + 1, x - velocity(2 * k, x) / (2 * steps)) / steps
    return x


def _heun(velocity: Predict, x: NDArray, steps: int) -> NDArray:
    """The same with the mean of the velocities at both ends of each step."""
    for k in range(steps):
        first = velocity(k, x)
        x = x - (first + velocity(k + 1, x - first / steps)) / (2 * steps)
    return x
