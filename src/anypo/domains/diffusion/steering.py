"""A frozen flow policy that is steered by the noise it starts from: the actor and the critics of arXiv:2506.15799.

An imitating policy is a fixed map (observation, noise w) -> action, here the Euler steps of a cloned flow; a squashed Gaussian actor chooses w within
[-b,b], one critic pair judges noise and another judges actions. The map is only ever called, in NumPy: no gradient goes through it, and its weights
belong to no optimizer. `black_box` puts any other such map in its place.

Stored actions are [w / b, action], 2 D numbers, so that a buffer serves both critics. Left out: more than two critics of each kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Set
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.control.envs import Spaces
from anypo.domains.control.perceptron import Moments
from anypo.domains.control.policy import HALF_LOG_TWO_PI
from anypo.domains.control.soft import SquashedGaussianActorCritic, TwinCritic, squash_arrays
from anypo.domains.diffusion.action_network import ActionNetwork
from anypo.domains.diffusion.denoise import uniform_levels
from anypo.policy import Signals

NOISE_LIMIT = 1 - 1e-6  # largest |w / b| that is stored
EVALUATION_STREAM = 20250618  # seed of the noise of actions that are to be drawn without one before there is an actor
FrozenMap = Callable[[NDArray, NDArray], NDArray]  # (raw observations [N,O], noise [N,D] in [-b,b]) -> actions [N,D] in [-1,1]


class Noise(NamedTuple):
    w: Float[Tensor, "N D"]
    logp: Float[Tensor, " N"]


def noise_policy(mu: Float[Tensor, "N D"], log_std: Float[Tensor, "N D"], z: Float[Tensor, "N D"], b: float) -> Noise:
    """Equation 1: w = b tanh(mu + sigma z) and its log-density."""
    squashed = torch.tanh(mu + log_std.exp() * z)
    density = -0.5 * z * z - log_std - HALF_LOG_TWO_PI - (b * (1 - squashed * squashed) + 1e-6).log()
    return Noise(b * squashed, density.sum(-1))


class SteeredPolicy(SquashedGaussianActorCritic):
    """`evaluate` provides, beside the soft actor-critic's signals in terms of w (`q` of the stored noise, `q_new` and `logp_new` of fresh noise, `next_q`,
    `next_logp`, `log_temperature`): [N,T,D] `steered_noise`, the stored w; [N,T,2] `q_action`, the action critics at the stored actions;
    [N,T,2] `q_noise`, the noise critics at w = `batch.signals["distill_noise"]` [N,T,D] (clipped to [-b,b]), and without a gradient [N,T,2]
    `q_distilled`, the action critics at f(s,w) for the same w, and `next_q_action`, their targets at f(s',w') for the actor's w' drawn with `next_noise`.

    Until `steering` is set, acting is the imitating policy: w is normal noise.
    """

    provides = frozenset(
        {"q", "q_new", "logp_new", "log_temperature", "next_q", "next_logp", "steered_noise"}
        | {"q_action", "next_q_action", "q_noise", "q_distilled"}
    )
    black_box: FrozenMap | None = None  # takes the place of the cloned flow; a function is not saved with the policy

    def __init__(
        self, spaces: Spaces, *, hidden: tuple[int, ...] = (128, 128), normalize_observations: bool = True, initial_temperature: float = 0.1,
        sampling_steps: int = 10, noise_bound: float = 1.5, seed: int = 0,
    ) -> None:  # fmt: skip
        """`sampling_steps`: Euler steps of the flow, >= 1. `noise_bound`: b > 0, largest size of each number of w. `initial_temperature`: low, for with sparse
        rewards a large entropy bonus makes it worth while to put off the goal. Weights depend on `seed` alone.

        Raises ValueError for spaces without continuous, bounded actions and for numbers out of range.
        """
        if sampling_steps < 1 or noise_bound <= 0:
            raise ValueError(f"sampling_steps is at least 1 and noise_bound above 0, not {sampling_steps} and {noise_bound}")
        super().__init__(spaces, hidden=hidden, initial_temperature=initial_temperature, seed=seed)
        self.sampling_steps, self.noise_bound = sampling_steps, noise_bound
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + 1)
            self.base_network = ActionNetwork(spaces.action_size, spaces.observation_size, tuple(hidden)).requires_grad_(False)
            self.action_critic = TwinCritic((spaces.observation_size + spaces.action_size, *hidden, 1))
        self.target_action_critic = TwinCritic((spaces.observation_size + spaces.action_size, *hidden, 1)).requires_grad_(False)
        self.target_action_critic.load_state_dict(self.action_critic.state_dict())
        self.moments = Moments(spaces.observation_size) if normalize_observations else None
        self.register_buffer("pretrained", torch.zeros((), dtype=torch.bool))
        self.register_buffer("steering", torch.zeros((), dtype=torch.bool))

    @property
    def configuration(self) -> dict[str, Any]:
        kept = {name: value for name, value in super().configuration.items() if name != "log_std_bounds"}
        return kept | {"sampling_steps": self.sampling_steps, "noise_bound": self.noise_bound}

    def parameter_groups(self) -> list[dict[str, Any]]:
        return [*super().parameter_groups(), {"params": list(self.action_critic.parameters()), "role": "value"}]

    def end_collection(self, observations: NDArray) -> None:
        """A cloned flow keeps seeing observations in the scale of its demonstrations."""
        if not self.pretrained:
            super().end_collection(observations)

    # -- the frozen map --------------------------------------------------------------------------------------------------------------------

    def clone(
        self, observation: Float[Tensor, "M O"], action: Float[Tensor, "M 2*D"], generator: torch.Generator, *, steps: int, batch_size: int = 256,
        learning_rate: float = 3e-3,
    ) -> float:  # fmt: skip
        """Imitate the actions of stored rows by flow matching (Adam, a rate that falls to 0 along a cosine), once and for all; returns the mean squared
        error over the last tenth of the steps."""
        if self.moments is not None:
            self.moments.note(observation.numpy())
            self.moments.absorb()
        seen, data, losses = self.normalize(observation), action[:, -self.spaces.action_size :], []
        optimizer = torch.optim.Adam(self.base_network.requires_grad_(True).parameters(), learning_rate, fused=True)
        falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(steps):
            rows = torch.randint(len(data), (batch_size,), generator=generator)
            level, noise = torch.rand(batch_size, generator=generator), torch.randn(batch_size, data.shape[1], generator=generator)
            point = (1 - level[:, None]) * data[rows] + level[:, None] * noise
            loss = ((self.base_network.predict(point, level, seen[rows]) - (noise - data[rows])) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            falling.step()
            losses.append(float(loss.detach()))
        optimizer.zero_grad()
        self.base_network.requires_grad_(False)
        self.pretrained.fill_(True)  # type: ignore[operator]
        tail = losses[-max(1, steps // 10) :]
        return sum(tail) / len(tail)

    def frozen_map(self) -> FrozenMap:
        """f: the black box, or the cloned flow followed from level 1 to 0, its end clipped to the bounds."""
        if self.black_box is not None:
            return self.black_box
        normalize, steps = self._normalizer(), self.sampling_steps
        given = self.base_network.at_levels(uniform_levels(steps)[:-1])

        def follow(observation: NDArray, noise: NDArray) -> NDArray:
            velocity, x = given(normalize(observation)), noise
            for k in range(steps):
                x = x - velocity(k, x) / steps
            return x.clip(-1, 1)

        return follow

    # -- signals ---------------------------------------------------------------------------------------------------------------------------

    def evaluate(self, batch: Batch, needs: Set[str]) -> Signals:
        size, shape = self.spaces.action_size, batch.mask.shape
        scaled, action = batch.action[..., :size], batch.action[..., size:]
        signals = Signals()
        if "q" in needs and bool(scaled.isnan().any()):
            raise ValueError("recorded actions carry no noise, which the noise critic is trained on; dsrl.na learns from actions alone")
        if "steered_noise" in needs:
            signals["steered_noise"] = self.noise_bound * scaled
        observation = self.normalize(batch.context).flatten(0, 1)
        if "q" in needs:
            signals["q"] = self._pairs(self.critic(torch.cat([observation, scaled.flatten(0, 1)], dim=1)), shape)
        if needs & {"q_new", "logp_new"}:
            drawn = noise_policy(*self.distribution(observation), batch.signal("noise").flatten(0, 1), self.noise_bound)
            signals["logp_new"] = drawn.logp.view(shape)
            if "q_new" in needs:
                row = torch.cat([observation, drawn.w / self.noise_bound], dim=1)
                signals["q_new"] = self._pairs(self.critic(row, frozen=True), shape)
        if "log_temperature" in needs:
            signals["log_temperature"] = self.log_temperature.expand(shape)
        if "q_action" in needs:
            signals["q_action"] = self._pairs(self.action_critic(torch.cat([observation, action.flatten(0, 1)], dim=1)), shape)
        if needs & {"q_noise", "q_distilled"}:
            fresh = self._bounded(batch.signal("distill_noise").flatten(0, 1))
            if "q_noise" in needs:
                signals["q_noise"] = self._pairs(self.critic(torch.cat([observation, fresh], dim=1)), shape)
            if "q_distilled" in needs:
                signals["q_distilled"] = self._judged(self.action_critic, batch.context, fresh.numpy(), shape)
        if needs & {"next_q", "next_logp"}:
            signals.update(self._following(batch, shape))
            signals["next_logp"] = signals["next_logp"] - size * math.log(self.noise_bound)
        if "next_q_action" in needs:
            following = batch.signal("next_context")
            scaled_next, _ = squash_arrays(*self._distribution(following), batch.signal("next_noise").flatten(0, 1).numpy())
            signals["next_q_action"] = self._judged(self.target_action_critic, following, scaled_next, shape)
        return signals

    def _bounded(self, noise: Tensor) -> Tensor:
        """Normal noise as w / b, clipped to the bounds."""
        return (noise / self.noise_bound).clamp(-NOISE_LIMIT, NOISE_LIMIT)

    def _distribution(self, observation: Tensor) -> tuple[NDArray, NDArray]:
        """`distribution` at raw observations [N,T,O], in NumPy and flat."""
        mean, log_std = np.split(self.actor_network.trace(self.normalize(observation).flatten(0, 1).numpy())[-1], 2, axis=1)
        return mean, log_std.clip(*self.log_std_bounds)

    def _judged(self, critic: TwinCritic, observation: Tensor, scaled: NDArray, shape: torch.Size) -> Tensor:
        """[N,T,2]: action critics at f(s, b * scaled), without a gradient."""
        action = self.frozen_map()(observation.flatten(0, 1).numpy(), self.noise_bound * scaled)
        row = np.concatenate([self.normalize(observation).flatten(0, 1).numpy(), action], axis=1, dtype=np.float32)
        return self._pairs(torch.from_numpy(critic.trace(row)[-1]).squeeze(-1), shape)

    def move_targets(self, rate: float) -> None:
        super().move_targets(rate)
        with torch.no_grad():
            torch._foreach_lerp_(list(self.target_action_critic.parameters()), list(self.action_critic.parameters()), rate)

    # -- acting ----------------------------------------------------------------------------------------------------------------------------

    def actor(self) -> Callable[[NDArray, NDArray | None], NDArray]:
        network, normalize, low, high = self.actor_network.as_arrays(), self._normalizer(), *self.log_std_bounds
        bound, follow, steering = np.float32(self.noise_bound), self.frozen_map(), bool(self.steering)
        own_stream = np.random.default_rng(EVALUATION_STREAM)

        def act(observation: NDArray, noise: NDArray | None) -> NDArray:
            if steering:
                mean, log_std = np.split(network(normalize(observation)), 2, axis=1)
                scaled = np.tanh(mean if noise is None else mean + noise * np.exp(log_std.clip(low, high)))
            else:
                drawn = self.noise(own_stream, (len(observation),)) if noise is None else noise
                scaled = (drawn / bound).clip(-NOISE_LIMIT, NOISE_LIMIT)
            return np.concatenate([scaled, follow(observation, bound * scaled)], axis=1, dtype=np.float32)

        return act

    def for_environment(self, action: NDArray) -> NDArray:
        return super().for_environment(action[..., -self.spaces.action_size :])

    def from_environment(self, action: NDArray) -> NDArray:
        """Recorded actions, with no (NaN) noise beside them."""
        taken = super().from_environment(action)
        return np.concatenate([np.full_like(taken, np.nan), taken], axis=-1)
