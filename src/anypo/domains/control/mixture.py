"""A conditional Gaussian mixture of recorded actions beside twin critics and their targets: what methods that stay near recorded behaviour act with.

Stored actions lie in [-1,1] and are scaled to the environment's bounds; the Gaussians live in the same space and are clipped to it. While steps are
collected the mixture is sampled; the likeliest action is the mean of the component with the highest peak. Left out: discrete actions, full
covariances, squashed Gaussians, more critics than two.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.control.envs import Spaces
from anypo.domains.control.policy import EnvironmentPolicy, Moments, Network, gaussian_logp
from anypo.domains.control.soft import TwinCritic
from anypo.policy import Signals


class Mixture(NamedTuple):
    """K diagonal Gaussians for each of B states."""

    log_weights: Float[Tensor, "B K"]
    means: Float[Tensor, "B K D"]
    log_std: Float[Tensor, "B K D"]

    def logp(self, action: Float[Tensor, "B D"]) -> Float[Tensor, " B"]:
        """Log-density of an action for each state."""
        return (self.log_weights + gaussian_logp(action.unsqueeze(-2), self.means, self.log_std)).logsumexp(-1)


class MixtureActorCritic(EnvironmentPolicy):
    """`evaluate` provides, at the batch's observations: [N,T] `mixture_logp` (and the same as `logp`, 0 outside the mask) and [N,T,2] `q` of the
    stored actions. At `batch.signals["next_context"]`, without a gradient: [N,T,2] `next_q` of the target critics for `next_action` [N,T,D].

    Optimizers move the critics alone; the mixture is fitted once, by who prepares the run.
    """

    learning_rate = 3e-4
    optimizer = "adam"
    provides = frozenset({"logp", "mixture_logp", "q", "next_q"})

    def __init__(
        self, spaces: Spaces, *, hidden: tuple[int, ...] = (256, 256), normalize_observations: bool = False, components: int = 4,
        log_std_bounds: tuple[float, float] = (-3.0, 0.5), seed: int = 0,
    ) -> None:  # fmt: skip
        """`components`: K, at least 1. Weights depend on `seed` alone. Raises ValueError for spaces without continuous, bounded actions."""
        super().__init__()
        if spaces.low is None or spaces.high is None or not (np.isfinite(spaces.low).all() and np.isfinite(spaces.high).all()):
            raise ValueError(f"{spaces.name} has no continuous actions within finite bounds; choose Pendulum-v1 or a MuJoCo task")
        if components < 1:
            raise ValueError(f"a mixture has at least 1 component, not {components}")
        self.spaces, self.hidden_sizes, self.components, self.log_std_bounds = spaces, tuple(hidden), components, log_std_bounds
        dimensions = spaces.action_size
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.behaviour = Network((spaces.observation_size, *hidden, components * (1 + 2 * dimensions)), scale=0.01, activation="relu")
            self._spread_components()
            self.critic = TwinCritic((spaces.observation_size + dimensions, *hidden, 1))
            self.target_critic = TwinCritic((spaces.observation_size + dimensions, *hidden, 1)).requires_grad_(False)
        self.target_critic.load_state_dict(self.critic.state_dict())
        self.moments = Moments(spaces.observation_size) if normalize_observations else None
        self.centre, self.reach = (spaces.high + spaces.low) / 2, (spaces.high - spaces.low) / 2

    @torch.no_grad()
    def _spread_components(self) -> None:
        """First components that differ, as equal ones would stay equal: in every dimension their means divide [-1,1] evenly, in an order of its own."""
        k, d = self.components, self.spaces.action_size
        places = (2 * torch.arange(k) + 1) / k - 1
        bias = self.behaviour.pairs[-1][1]
        bias[k : k * (1 + d)] = torch.stack([places[torch.randperm(k)] for _ in range(d)], dim=1).flatten()
        bias[k * (1 + d) :] = -1.0

    @property
    def configuration(self) -> dict[str, Any]:
        return {
            "hidden": list(self.hidden_sizes), "normalize_observations": self.moments is not None, "components": self.components,
            "log_std_bounds": list(self.log_std_bounds),
        }  # fmt: skip

    def parameter_groups(self) -> list[dict[str, Any]]:
        return [{"params": list(self.critic.parameters()), "role": "value"}]

    def mixture(self, observation: Float[Tensor, "B O"]) -> Mixture:
        """The behaviour at normalized observations."""
        return self._as_mixture(self.behaviour(observation))

    def _as_mixture(self, output: Float[Tensor, "B F"]) -> Mixture:
        weights, means, log_std = output.split([self.components, *[self.components * self.spaces.action_size] * 2], dim=-1)
        shape = (self.components, self.spaces.action_size)
        return Mixture(weights.log_softmax(-1), means.unflatten(-1, shape), log_std.unflatten(-1, shape).clamp(*self.log_std_bounds))

    def evaluate(self, batch: Batch, needs: Set[str]) -> Signals:
        shape, observation = batch.mask.shape, self.normalize(batch.context).flatten(0, 1)
        signals = Signals()
        if "q" in needs:
            signals["q"] = self.critic(torch.cat([observation, batch.action.flatten(0, 1)], dim=1)).T.view(*shape, 2)
        if needs & {"logp", "mixture_logp"}:
            signals["mixture_logp"] = self.mixture(observation).logp(batch.action.flatten(0, 1)).view(shape)
            signals["logp"] = signals["mixture_logp"] * batch.mask
        if "next_q" in needs:
            following = self.normalize(batch.signal("next_context")).flatten(0, 1)
            with torch.no_grad():
                found = self.target_critic(torch.cat([following, batch.signal("next_action").flatten(0, 1)], dim=1))
            signals["next_q"] = found.T.view(*shape, 2)
        return signals

    def move_targets(self, rate: float) -> None:
        """Target critics <- (1 - rate) * themselves + rate * the critics (Polyak averaging)."""
        with torch.no_grad():
            torch._foreach_lerp_(list(self.target_critic.parameters()), list(self.critic.parameters()), rate)

    def noise(self, rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Gumbel noise for the choice of a component, then normal noise for its action."""
        uniform = rng.random((*shape, self.components), dtype=np.float32)
        tiny = np.float32(1e-12)
        gumbel = -np.log(-np.log(uniform + tiny) + tiny)
        return np.concatenate([gumbel, rng.standard_normal((*shape, self.spaces.action_size), dtype=np.float32)], axis=-1)

    def actor(self) -> Callable[[NDArray, NDArray | None], NDArray]:
        normalize = self._normalizer()

        @torch.no_grad()
        def act(observation: NDArray, noise: NDArray | None) -> NDArray:
            x = torch.from_numpy(normalize(observation))
            if noise is None:
                return self.likeliest(x).clamp(-1, 1).numpy()
            found, drawn = self.mixture(x), torch.from_numpy(noise)
            row = torch.arange(len(x)), (found.log_weights + drawn[:, : self.components]).argmax(-1)
            return (found.means[row] + found.log_std[row].exp() * drawn[:, self.components :]).clamp(-1, 1).numpy()

        return act

    def likeliest(self, observation: Float[Tensor, "B O"]) -> Float[Tensor, "B D"]:
        """The mean of the component with the highest peak, at normalized observations."""
        found = self.mixture(observation)
        best = (found.log_weights - found.log_std.sum(-1)).argmax(-1)
        return found.means[torch.arange(len(best)), best]

    def for_environment(self, action: NDArray) -> NDArray:
        return self.centre + self.reach * action

    def from_environment(self, action: NDArray) -> NDArray:
        return ((action - self.centre) / self.reach).clip(-1, 1).astype(np.float32)
