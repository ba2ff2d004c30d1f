"""A deterministic actor with twin critics and targets of both: what methods of the TD3 family act and learn with (arXiv:1802.09477).

Stored actions lie in [-1,1] and are scaled to the environment's bounds. While steps are collected Gaussian noise is added to the action. Left out:
discrete actions, dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from anypo.batch import Batch
from anypo.domains.control.envs import Spaces
from anypo.domains.control.policy import EnvironmentPolicy, Moments, Network, gaussian_logp
from anypo.domains.control.soft import TwinCritic
from anypo.policy import Signals


class DeterministicActorCritic(EnvironmentPolicy):
    """`evaluate` provides, at the batch's observations: [N,T,2] `q` of the stored actions, [N,T,D] `action_new` = pi(s), [N,T] `q_actor` of it under
    the first critic (whose weights get no gradient), [N,T] `logp` of the stored actions under the exploration noise, [N,T,O] `observation` as the
    networks see it. At `batch.signals["next_context"]`, without a gradient: [N,T,2] `next_q` of the target critics for the target actor's action
    plus `next_noise` [N,T,D], clipped to the bounds.
    """

    learning_rate = 3e-4
    optimizer = "adam"
    provides = frozenset({"logp", "q", "action_new", "q_actor", "observation", "next_q"})

    def __init__(
        self,
        spaces: Spaces,
        *,
        hidden: tuple[int, ...] = (256, 256),
        normalize_observations: bool = False,
        exploration: float = 0.1,
        seed: int = 0,
    ) -> None:
        """`exploration`: standard deviation of the noise on collected actions, in units of [-1,1]. Weights depend on `seed` alone.

        Raises ValueError for spaces without continuous, bounded actions.
        """
        super().__init__()
        if spaces.low is None or spaces.high is None or not (np.isfinite(spaces.low).all() and np.isfinite(spaces.high).all()):
            raise ValueError(f"{spaces.name} has no continuous actions within finite bounds; choose Pendulum-v1 or a MuJoCo task")
        self.spaces, self.hidden_sizes, self.exploration = spaces, tuple(hidden), exploration
        dimensions = spaces.action_size
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.actor_network = Network((spaces.observation_size, *hidden, dimensions), scale=0.01, activation="relu")
            self.critic = TwinCritic((spaces.observation_size + dimensions, *hidden, 1))
            self.target_actor = Network((spaces.observation_size, *hidden, dimensions), scale=0.01, activation="relu").requires_grad_(False)
            self.target_critic = TwinCritic((spaces.observation_size + dimensions, *hidden, 1)).requires_grad_(False)
        self.target_actor.load_state_dict(self.actor_network.state_dict())
        self.target_critic.load_state_dict(self.critic.state_dict())
        self.moments = Moments(spaces.observation_size) if normalize_observations else None
        self.centre, self.reach = (spaces.high + spaces.low) / 2, (spaces.high - spaces.low) / 2

    @property
    def configuration(self) -> dict[str, Any]:
        return {"hidden": list(self.hidden_sizes), "normalize_observations": self.moments is not None, "exploration": self.exploration}

    def parameter_groups(self) -> list[dict[str, Any]]:
        return [
            {"params": list(self.actor_network.parameters()), "role": "policy"},
            {"params": list(self.critic.parameters()), "role": "value"},
        ]

    def evaluate(self, batch: Batch, needs: Set[str]) -> Signals:
        shape, observation = batch.mask.shape, self.normalize(batch.context).flatten(0, 1)
        signals = Signals()
        if "observation" in needs:
            signals["observation"] = observation.unflatten(0, shape)
        if "q" in needs:
            signals["q"] = self.critic(torch.cat([observation, batch.action.flatten(0, 1)], dim=1)).T.view(*shape, 2)
        if needs & {"action_new", "q_actor", "logp"}:
            action = torch.tanh(self.actor_network(observation))
            signals["action_new"] = action.unflatten(0, shape)
            if "q_actor" in needs:
                signals["q_actor"] = self.critic(torch.cat([observation, action], dim=1), frozen=True)[0].view(shape)
            if "logp" in needs:
                log_std = torch.full_like(action, float(np.log(self.exploration)))
                signals["logp"] = gaussian_logp(batch.action.flatten(0, 1), action, log_std).view(shape) * batch.mask
        if "next_q" in needs:
            signals["next_q"] = self._following(batch).T.view(*shape, 2)
        return signals

    @torch.no_grad()
    def _following(self, batch: Batch) -> Tensor:
        observation = self.normalize(batch.signal("next_context")).flatten(0, 1)
        action = (torch.tanh(self.target_actor(observation)) + batch.signal("next_noise").flatten(0, 1)).clamp(-1, 1)
        return self.target_critic(torch.cat([observation, action], dim=1))

    def move_targets(self, rate: float) -> None:
        """Targets <- (1 - rate) * themselves + rate * the networks (Polyak averaging)."""
        pairs: tuple[tuple[nn.Module, nn.Module], ...] = ((self.target_actor, self.actor_network), (self.target_critic, self.critic))
        with torch.no_grad():
            for target, network in pairs:
                torch._foreach_lerp_(list(target.parameters()), list(network.parameters()), rate)

    def noise(self, rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
        return rng.standard_normal((*shape, self.spaces.action_size), dtype=np.float32)

    def actor(self) -> Callable[[NDArray, NDArray | None], NDArray]:
        network, normalize, deviation = self.actor_network.as_arrays(), self._normalizer(), self.exploration

        def act(observation: NDArray, noise: NDArray | None) -> NDArray:
            action = np.tanh(network(normalize(observation)))
            return action if noise is None else (action + np.float32(deviation) * noise).clip(-1, 1)

        return act

    def for_environment(self, action: NDArray) -> NDArray:
        return self.centre + self.reach * action

    def from_environment(self, action: NDArray) -> NDArray:
        return ((action - self.centre) / self.reach).clip(-1, 1).astype(np.float32)
