"""A flow actor whose unfinished actions have values, beside twin critics and their targets (arXiv:2605.13435).

A flow is deterministic: a point x on its way at time tau leads to one action, so that the worth of the action is the worth of (x, tau). A pair of inner
critics V(s,x,tau) learns it by regression, and its slope in x tells the field where to turn, without a gradient through the path. Time tau is 0 at the
noise and 1 at the action, in the critics' own scale of actions [-1,1]; levels of a batch are 1 - tau. Left out: choosing the best of several samples.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

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
from anypo.domains.diffusion.denoise import uniform_levels
from anypo.domains.diffusion.network import FREQUENCIES, level_features
from anypo.policy import Signals

EVALUATION_STREAM = 20260513  # seed of the starts of actions that are to be drawn without noise
Velocity = Callable[[Tensor, Tensor], Tensor]  # (points [B,D], times tau [B]) -> velocities [B,D], towards the action


def follow(velocity: Velocity, x: Float[Tensor, "B D"], tau: Float[Tensor, " B"], steps: int, clip: bool) -> Float[Tensor, "B D"]:
    """Where paths lead that are at x at times tau: `steps` Euler steps of at most 1 / steps, none beyond time 1; `clip`: the end is put into [-1,1]."""
    for _ in range(steps):
        dt = (1 - tau).clamp(0, 1 / steps)
        x = x + velocity(x, tau) * dt[:, None]
        tau = tau + dt
    return x.clamp(-1, 1) if clip else x


class ValuedFlowActorCritic(EnvironmentPolicy):
    """`evaluate` provides [N,T,2] `q` of the stored actions, and at M points between each stored action and noise, at levels
    `batch.signals["flow_level"]` [N,T,M] and noise `flow_noise` [N,T,M,D]: [N,T,M,D] `flow_velocity` (towards the noise), [N,T,M,2] `inner_value`, and
    without a gradient [N,T,M,D] `inner_slope`, the slope of the inner critics' mean in the point, and [N,T,M,2] `end_q`, the target critics at the
    action that the point leads to. At `batch.signals["next_context"]`, without a gradient: [N,T,2] `next_q` of the target critics for the action that
    starts from `next_noise` [N,T,D].

    Acting without noise starts from a noise of its own that is the same in every run.
    """

    learning_rate = 3e-4
    optimizer = "adam"
    provides = frozenset({"q", "flow_velocity", "inner_value", "inner_slope", "end_q", "next_q"})

    def __init__(
        self, spaces: Spaces, *, hidden: tuple[int, ...] = (256, 256), normalize_observations: bool = False, sampling_steps: int = 10,
        seed: int = 0,
    ) -> None:  # fmt: skip
        """`sampling_steps`: K >= 1 Euler steps. Weights depend on `seed` alone.

        Raises ValueError for spaces without continuous, bounded actions and for less than one step.
        """
        super().__init__()
        if sampling_steps < 1:
            raise ValueError(f"sampling_steps must be at least 1, not {sampling_steps}")
        self.centre, self.reach = finite_range(spaces)
        self.spaces, self.hidden_sizes, self.sampling_steps = spaces, tuple(hidden), sampling_steps
        pair = spaces.observation_size + spaces.action_size
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.actor_network = ActionNetwork(spaces.action_size, spaces.observation_size, self.hidden_sizes)
            self.critic = TwinCritic((pair, *hidden, 1))
            self.inner_critic = TwinCritic((pair + 1 + 2 * FREQUENCIES, *hidden, 1))
        self.target_critic = TwinCritic((pair, *hidden, 1)).requires_grad_(False)
        self.target_critic.load_state_dict(self.critic.state_dict())
        self.moments = Moments(spaces.observation_size) if normalize_observations else None

    @property
    def configuration(self) -> dict[str, Any]:
        return {
            "hidden": list(self.hidden_sizes),
            "normalize_observations": self.moments is not None,
            "sampling_steps": self.sampling_steps,
        }

    def parameter_groups(self) -> list[dict[str, Any]]:
        return [
            {"params": list(self.actor_network.parameters()), "role": "policy"},
            {"params": [*self.critic.parameters(), *self.inner_critic.parameters()], "role": "value"},
        ]

    # -- signals, at flat rows of normalized observations ------------------------------------------------------------------------------------

    def velocity_at(self, observation: Float[Tensor, "B O"]) -> Velocity:
        """The field at observations that stand still."""
        return lambda x, tau: -self.actor_network.predict(x, 1 - tau, observation)

    def inner_row(self, observation: Float[Tensor, "B O"], x: Float[Tensor, "B D"], tau: Float[Tensor, " B"]) -> Float[Tensor, "B I"]:
        """What the inner critics see."""
        return torch.cat([observation, x, level_features(tau)], dim=1)

    def slope(self, row: Float[Tensor, "B I"]) -> Float[Tensor, "B D"]:
        """Of the mean of the inner critics in the point, without a graph."""
        layers = self.inner_critic.trace(row.detach().numpy())
        pulled = self.inner_critic.pull(layers, np.full_like(layers[-1], 0.5), into_weights=False)
        first = self.spaces.observation_size
        return torch.from_numpy(pulled[:, first : first + self.spaces.action_size])

    @torch.no_grad()
    def lead(self, observation: Float[Tensor, "B O"], x: Float[Tensor, "B D"], tau: Float[Tensor, " B"]) -> Float[Tensor, "B D"]:
        """The action that a point leads to."""
        return follow(self.velocity_at(observation), x, tau, self.sampling_steps, clip=True)

    def judged(self, observation: Float[Tensor, "B O"], action: Float[Tensor, "B D"]) -> Float[Tensor, "B 2"]:
        """The target critics, without a graph."""
        return torch.from_numpy(self.target_critic.trace(torch.cat([observation, action], dim=1).numpy())[-1]).squeeze(-1).T

    def evaluate(self, batch: Batch, needs: Set[str]) -> Signals:
        shape, signals = batch.mask.shape, Signals()
        if "q" in needs:
            observation = self.normalize(batch.context).flatten(0, 1)
            signals["q"] = self.critic(torch.cat([observation, batch.action.flatten(0, 1)], dim=1)).T.view(*shape, 2)
        if needs & {"flow_velocity", "inner_value", "inner_slope", "end_q"}:
            signals.update(self._on_the_way(batch, needs))
        if "next_q" in needs:
            following = self.normalize(batch.signal("next_context")).flatten(0, 1)
            action = self._path()(following.numpy(), batch.signal("next_noise").flatten(0, 1).numpy())
            signals["next_q"] = self.judged(following, torch.from_numpy(action)).reshape(*shape, 2)
        return signals

    def _on_the_way(self, batch: Batch, needs: Set[str]) -> dict[str, Tensor]:
        level, noise = batch.signal("flow_level"), batch.signal("flow_noise")
        shape, found = level.shape, dict[str, Tensor]()
        point = ((1 - level[..., None]) * batch.action.unsqueeze(-2) + level[..., None] * noise).flatten(0, 2)
        observation = self.normalize(batch.context).unsqueeze(-2).expand(*shape, -1).flatten(0, 2)
        tau = 1 - level.flatten()
        if "flow_velocity" in needs:
            found["flow_velocity"] = -self.velocity_at(observation)(point, tau).view(*shape, -1)
        if needs & {"inner_value", "inner_slope"}:
            row = self.inner_row(observation, point, tau)
            if "inner_value" in needs:
                found["inner_value"] = self.inner_critic(row).T.view(*shape, 2)
            if "inner_slope" in needs:
                found["inner_slope"] = self.slope(row).view(*shape, -1)
        if "end_q" in needs:
            found["end_q"] = self.judged(observation, self.lead(observation, point, tau)).reshape(*shape, 2)
        return found

    def move_targets(self, rate: float) -> None:
        """Target critics <- (1 - rate) * themselves + rate * the critics (Polyak averaging)."""
        with torch.no_grad():
            torch._foreach_lerp_(list(self.target_critic.parameters()), list(self.critic.parameters()), rate)

    # -- acting ----------------------------------------------------------------------------------------------------------------------------

    def _path(self) -> Callable[[NDArray, NDArray], NDArray]:
        """(normalized observations [N,O], starts [N,D]) -> actions [N,D], in NumPy."""
        steps = self.sampling_steps
        given = self.actor_network.at_levels(uniform_levels(steps)[:-1])

        def path(observation: NDArray, x: NDArray) -> NDArray:
            velocity = given(observation)
            for k in range(steps):
                x = x - velocity(k, x) / steps
            return x.clip(-1, 1)

        return path

    def noise(self, rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Where the paths begin."""
        return rng.standard_normal((*shape, self.spaces.action_size), dtype=np.float32)

    def actor(self) -> Callable[[NDArray, NDArray | None], NDArray]:
        normalize, path, own_stream = self._normalizer(), self._path(), np.random.default_rng(EVALUATION_STREAM)

        def act(observation: NDArray, noise: NDArray | None) -> NDArray:
            start = self.noise(own_stream, (len(observation),)) if noise is None else noise
            return path(normalize(observation), start)

        return act

    def for_environment(self, action: NDArray) -> NDArray:
        return self.centre + self.reach * action

    def from_environment(self, action: NDArray) -> NDArray:
        return ((action - self.centre) / self.reach).clip(-1, 1).astype(np.float32)
