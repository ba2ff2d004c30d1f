"""A flow actor without a likelihood, whose spread is measured by the kinetic energy of its velocity field, beside twin critics (arXiv:2602.12829).

An action begins at a random point of high entropy, is carried by a learned drift for K steps with noise of deviation `diffusion` per unit of time, and is
squashed by tanh into [-1,1]. Where the drift is 0 the action stays as random as its start. Energies are of the motion before squashing, summed over
an action's D numbers. Left out: log-densities, of which there are none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Set
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.control.envs import Spaces
from anypo.domains.control.perceptron import Moments
from anypo.domains.control.policy import EnvironmentPolicy
from anypo.domains.control.soft import TwinCritic
from anypo.domains.diffusion.action_network import ActionNetwork, finite_range
from anypo.policy import Signals

STARTS = ("uniform", "normal")
Array = TypeVar("Array", Tensor, NDArray)


def flow_step(x: Array, u: Array, z: Array, h: float, sig: float) -> Array:
    """Equation 1: x + h u + sig sqrt(h) z, [...,D] each."""
    return x + h * u + (sig * math.sqrt(h)) * z


def energy(u: Float[Tensor, "N K D"]) -> Float[Tensor, " N"]:
    """Equation 2: kinetic energy of K equal steps in unit time, the sum over steps of h |u|^2 / 2."""
    return (u * u).sum((-2, -1)) / (2 * u.shape[-2])


class EnergyFlowActorCritic(EnvironmentPolicy):
    """`evaluate` provides, at the batch's observations: [N,T,2] `q` of the stored actions; [N,T,2] `q_new` and [N,T] `energy_new` of fresh actions made from
    `batch.signals["noise"]` [N,T,(K+1)*D] (see `draw`), whose gradient runs back through the K steps (the critics' weights get none). At
    `batch.signals["next_context"]`, without a gradient: [N,T,2] `next_q` of the target critics and [N,T] `next_energy` with `next_noise`.

    Acting without noise follows the drift from the middle of the start distribution.
    """

    learning_rate = 3e-4
    optimizer = "adam"
    provides = frozenset({"q", "q_new", "energy_new", "next_q", "next_energy"})

    def __init__(
        self, spaces: Spaces, *, hidden: tuple[int, ...] = (256, 256), normalize_observations: bool = False, sampling_steps: int = 4,
        diffusion: float = 0.5, start: str = "uniform", seed: int = 0,
    ) -> None:  # fmt: skip
        """`sampling_steps`: K >= 1; large K makes the gradient through them explode. `diffusion`: sig >= 0; 0 = a deterministic flow. `start`: uniform on
        [-1,1] or normal. Weights depend on `seed` alone.

        Raises ValueError for spaces without continuous, bounded actions and for numbers out of range.
        """
        super().__init__()
        if sampling_steps < 1 or diffusion < 0 or start not in STARTS:
            raise ValueError(
                f"sampling_steps is at least 1, diffusion at least 0 and start {' or '.join(STARTS)}, not {sampling_steps}, {diffusion}, {start}"
            )
        self.centre, self.reach = finite_range(spaces)
        self.spaces, self.hidden_sizes = spaces, tuple(hidden)
        self.sampling_steps, self.diffusion, self.start = sampling_steps, diffusion, start
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.actor_network = ActionNetwork(spaces.action_size, spaces.observation_size, self.hidden_sizes)
            self.critic = TwinCritic((spaces.observation_size + spaces.action_size, *hidden, 1))
        self.target_critic = TwinCritic((spaces.observation_size + spaces.action_size, *hidden, 1)).requires_grad_(False)
        self.target_critic.load_state_dict(self.critic.state_dict())
        self.moments = Moments(spaces.observation_size) if normalize_observations else None

    @property
    def configuration(self) -> dict[str, Any]:
        return {
            "hidden": list(self.hidden_sizes),
            "normalize_observations": self.moments is not None,
            "sampling_steps": self.sampling_steps,
            "diffusion": self.diffusion,
            "start": self.start,
        }

    def parameter_groups(self) -> list[dict[str, Any]]:
        return [
            {"params": list(self.actor_network.parameters()), "role": "policy"},
            {"params": list(self.critic.parameters()), "role": "value"},
        ]

    @property
    def levels(self) -> Float[Tensor, " K"]:
        """Time of the drift at each step, from 0."""
        return torch.arange(self.sampling_steps) / self.sampling_steps

    def carry(self, observation: Float[Tensor, "B O"], noise: Float[Tensor, "B M"]) -> tuple[Float[Tensor, "B D"], Float[Tensor, "B K D"]]:
        """The end of each path before squashing, and the drifts along it, at normalized observations."""
        x, *z = noise.unflatten(-1, (self.sampling_steps + 1, -1)).unbind(-2)
        drift, drifts, h = self.actor_network.along(self.levels, observation), [], 1 / self.sampling_steps
        for k in range(self.sampling_steps):
            drifts.append(drift(k, x))
            x = flow_step(x, drifts[-1], z[k], h, self.diffusion)
        return x, torch.stack(drifts, dim=-2)

    def squash(self, x: Tensor) -> Tensor:
        return torch.tanh(x)

    def judge(self, observation: Float[Tensor, "B O"], action: Float[Tensor, "B D"]) -> Float[Tensor, "2 B"]:
        """The critics at fresh actions, as fixed functions."""
        return self.critic(torch.cat([observation, action], dim=1), frozen=True)

    def evaluate(self, batch: Batch, needs: Set[str]) -> Signals:
        shape, observation = batch.mask.shape, self.normalize(batch.context).flatten(0, 1)
        signals = Signals()
        if "q" in needs:
            signals["q"] = self.critic(torch.cat([observation, batch.action.flatten(0, 1)], dim=1)).T.view(*shape, 2)
        if needs & {"q_new", "energy_new"}:
            x, drifts = self.carry(observation, batch.signal("noise").flatten(0, 1))
            signals["energy_new"] = energy(drifts).view(shape)
            if "q_new" in needs:
                signals["q_new"] = self.judge(observation, self.squash(x)).T.view(*shape, 2)
        if needs & {"next_q", "next_energy"}:
            following = self.normalize(batch.signal("next_context")).flatten(0, 1).numpy()
            ends, spent = self._path(following, batch.signal("next_noise").flatten(0, 1).numpy())
            q = self.target_critic.trace(np.concatenate([following, np.tanh(ends)], axis=1))[-1]
            signals["next_q"] = torch.from_numpy(q).squeeze(-1).T.view(*shape, 2)
            signals["next_energy"] = torch.from_numpy(spent).view(shape)
        return signals

    def _path(self, observation: NDArray, noise: NDArray) -> tuple[NDArray, NDArray]:
        """`carry` in NumPy: ends [B,D] and energies [B]."""
        count, h = self.sampling_steps, np.float32(1 / self.sampling_steps)
        drift = self.actor_network.at_levels(self.levels)(observation)
        drawn = noise.reshape(len(noise), count + 1, -1)
        x, spent = drawn[:, 0], np.zeros(len(noise), np.float32)
        for k in range(count):
            u = drift(k, x)
            spent += 0.5 * h * (u * u).sum(1)
            x = flow_step(x, u, drawn[:, k + 1], float(h), self.diffusion)
        return x, spent

    def move_targets(self, rate: float) -> None:
        """Target critics <- (1 - rate) * themselves + rate * the critics (Polyak averaging)."""
        with torch.no_grad():
            torch._foreach_lerp_(list(self.target_critic.parameters()), list(self.critic.parameters()), rate)

    def draw(self, shape: torch.Size, generator: torch.Generator) -> Float[Tensor, "*shape M"]:
        """The randomness of an action: its start [D] and the noise of K steps, M = (K+1) D numbers."""
        size = self.spaces.action_size
        noise = torch.randn(*shape, (self.sampling_steps + 1) * size, generator=generator)
        if self.start == "uniform":
            noise[..., :size] = 2 * torch.rand(*shape, size, generator=generator) - 1
        return noise

    def noise(self, rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """The same as `draw` in NumPy."""
        size = self.spaces.action_size
        noise = rng.standard_normal((*shape, (self.sampling_steps + 1) * size), dtype=np.float32)
        if self.start == "uniform":
            noise[..., :size] = 2 * rng.random((*shape, size), dtype=np.float32) - 1
        return noise

    def actor(self) -> Callable[[NDArray, NDArray | None], NDArray]:
        normalize, width = self._normalizer(), (self.sampling_steps + 1) * self.spaces.action_size

        def act(observation: NDArray, noise: NDArray | None) -> NDArray:
            drawn = np.zeros((len(observation), width), np.float32) if noise is None else noise
            return np.tanh(self._path(normalize(observation), drawn)[0])

        return act

    def for_environment(self, action: NDArray) -> NDArray:
        return self.centre + self.reach * action

    def from_environment(self, action: NDArray) -> NDArray:
        return ((action - self.centre) / self.reach).clip(-1, 1).astype(np.float32)
