"""The soft actor-critic's policy: a squashed Gaussian actor, twin critics computed as one, their targets, and a learned temperature.

Stored actions lie in (-1,1) and are scaled to the environment's bounds. The twin critics share every matrix product ([2,I,O] weights), which is most
of what a step of this size costs. Left out: discrete actions.
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
from anypo.domains.control.perceptron import Moments, Network, add_gradient
from anypo.domains.control.policy import HALF_LOG_TWO_PI, EnvironmentPolicy
from anypo.policy import Loss, Signals

ATANH_LIMIT = 1 - 1e-6  # logged actions this close to the bounds are taken for the bound's neighbour


class TwinCritic(nn.Module):
    """Two independent perceptrons [B,I] -> [2,B], evaluated together; or another number of `members`."""

    def __init__(self, sizes: tuple[int, ...], members: int = 2) -> None:
        super().__init__()
        self.members = members
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for inputs, outputs in zip(sizes[:-1], sizes[1:], strict=True):
            bound = 1 / math.sqrt(inputs)
            self.weights.append(nn.Parameter(torch.empty(members, inputs, outputs).uniform_(-bound, bound)))
            self.biases.append(nn.Parameter(torch.empty(members, 1, outputs).uniform_(-bound, bound)))
        self.layers = list(zip(self.weights, self.biases, strict=True))  # the same parameters, without the lists' slow access

    def forward(self, x: Float[Tensor, "B I"], *, frozen: bool = False) -> Float[Tensor, "2 B"]:
        """`frozen`: no gradient reaches the weights, only the input."""
        hidden = x.expand(self.members, *x.shape)
        for i, (weight, bias) in enumerate(self.layers):
            if frozen:
                weight, bias = weight.detach(), bias.detach()
            hidden = torch.baddbmm(bias, hidden, weight)
            if i + 1 < len(self.layers):
                hidden = torch.relu(hidden)
        return hidden.squeeze(-1)

    def trace(self, x: NDArray) -> list[NDArray]:
        """The input [B,I], every hidden layer [2,B,H] and the output [2,B,1], in NumPy, for `pull`."""
        layers = [x]
        for weight, bias in self._views():
            layers.append(np.matmul(layers[-1], weight))
            layers[-1] += bias
            if len(layers) <= len(self.layers):
                np.maximum(layers[-1], 0, out=layers[-1])
        return layers

    def pull(self, layers: list[NDArray], gradient: NDArray, into_weights: bool) -> NDArray:
        """From the outputs' gradient [2,B,1]: added to the weights' `.grad`, or as the gradient in the input [B,I]. The other half is not computed."""
        views = self._views()
        for i in range(len(views) - 1, -1, -1):
            if into_weights:
                before = layers[i].swapaxes(-1, -2)
                add_gradient(self.layers[i][0], np.matmul(before, gradient))
                add_gradient(self.layers[i][1], gradient.sum(1, keepdims=True))
            if i or not into_weights:
                gradient = np.matmul(gradient, views[i][0].swapaxes(-1, -2))
            if i:
                gradient *= layers[i] > 0
        return gradient.sum(0)

    def _views(self) -> list[tuple[NDArray, NDArray]]:
        return [(w.detach().numpy(), b.detach().numpy()) for w, b in self.layers]


class SquashedGaussianActorCritic(EnvironmentPolicy):
    """`evaluate` provides, at the batch's observations: [N,T,2] `q` of the stored actions, [N,T,2] `q_new` and [N,T] `logp_new` of fresh actions
    reparameterized with `batch.signals["noise"]` [N,T,D] (the critics' weights get no gradient there), [N,T] `log_temperature`, [N,T] `logp` and
    [N,T,D] `mean`, `log_std` before squashing. At `batch.signals["next_context"]`, without a gradient: [N,T,2] `next_q` of the target critics and
    [N,T] `next_logp` for actions drawn with `next_noise`.
    """

    learning_rate = 3e-4
    optimizer = "adam"
    provides = frozenset({"logp", "mean", "log_std", "q", "q_new", "logp_new", "log_temperature", "next_q", "next_logp"})

    def __init__(
        self, spaces: Spaces, *, hidden: tuple[int, ...] = (256, 256), normalize_observations: bool = False, initial_temperature: float = 1.0,
        log_std_bounds: tuple[float, float] = (-5.0, 2.0), seed: int = 0,
    ) -> None:  # fmt: skip
        """Weights depend on `seed` alone. Raises ValueError for spaces without continuous, bounded actions."""
        super().__init__()
        if spaces.low is None or spaces.high is None:
            raise ValueError(
                f"{spaces.name} has discrete actions; this method acts in continuous ones, so choose Pendulum-v1 or a MuJoCo task"
            )
        if not (np.isfinite(spaces.low).all() and np.isfinite(spaces.high).all()):
            raise ValueError(f"{spaces.name} has actions without bounds; this method scales its actions to finite bounds")
        self.spaces, self.hidden_sizes, self.log_std_bounds = spaces, tuple(hidden), log_std_bounds
        self.initial_temperature = initial_temperature
        dimensions = spaces.action_size
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.actor_network = Network((spaces.observation_size, *hidden, 2 * dimensions), scale=0.01, activation="relu")
            self.critic = TwinCritic((spaces.observation_size + dimensions, *hidden, 1))
        self.target_critic = TwinCritic((spaces.observation_size + dimensions, *hidden, 1)).requires_grad_(False)
        self.target_critic.load_state_dict(self.critic.state_dict())
        self.log_temperature = nn.Parameter(torch.tensor(math.log(initial_temperature)))
        self.moments = Moments(spaces.observation_size) if normalize_observations else None
        self.centre, self.reach = (spaces.high + spaces.low) / 2, (spaces.high - spaces.low) / 2

    @property
    def configuration(self) -> dict[str, Any]:
        return {
            "hidden": list(self.hidden_sizes),
            "normalize_observations": self.moments is not None,
            "initial_temperature": self.initial_temperature,
            "log_std_bounds": list(self.log_std_bounds),
        }

    def parameter_groups(self) -> list[dict[str, Any]]:
        return [
            {"params": list(self.actor_network.parameters()), "role": "policy"},
            {"params": [p for critic, _ in self.judges().values() for p in critic.parameters()], "role": "value"},
            *({"params": [value], "role": name.removeprefix("log_")} for name, value in self.scalars().items()),
        ]

    def judges(self) -> dict[str, tuple[TwinCritic, TwinCritic]]:
        """Critics of actions and their targets, by the signal's name: `q` brings `q_new` and `next_q`. A subclass may have more."""
        return {"q": (self.critic, self.target_critic)}

    def scalars(self) -> dict[str, nn.Parameter]:
        """Learned numbers that are signals of the same name."""
        return {"log_temperature": self.log_temperature}

    def distribution(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log standard deviation before squashing, of normalized observations [...,O]."""
        mean, log_std = self.actor_network(observation).chunk(2, dim=-1)
        return mean, log_std.clamp(*self.log_std_bounds)

    def evaluate(self, batch: Batch, needs: Set[str]) -> Signals:
        shape = batch.mask.shape
        observation = self.normalize(batch.context).flatten(0, 1)
        signals = Signals()
        fresh = {f"{name}_new": critic for name, (critic, _) in self.judges().items() if f"{name}_new" in needs}
        for name, (critic, _) in self.judges().items():
            if name in needs:
                signals[name] = self._pairs(critic(torch.cat([observation, batch.action.flatten(0, 1)], dim=1)), shape)
        if fresh or needs & {"logp_new", "mean", "log_std", "logp"}:
            mean, log_std = self.distribution(observation)
            if needs & {"mean", "log_std"}:
                signals["mean"], signals["log_std"] = mean.unflatten(0, shape), log_std.unflatten(0, shape)
            if "logp" in needs:
                signals["logp"] = stored_logp(batch.action.flatten(0, 1), mean, log_std).view(shape) * batch.mask
            if fresh or "logp_new" in needs:
                action, logp = squash(mean, log_std, batch.signal("noise").flatten(0, 1))
                signals["logp_new"] = logp.view(shape)
                for name, critic in fresh.items():
                    signals[name] = self._pairs(critic(torch.cat([observation, action], dim=1), frozen=True), shape)
        signals.update({name: value.expand(shape) for name, value in self.scalars().items() if name in needs})
        if any(name.startswith("next_") for name in needs):
            signals.update(self._following(batch, shape))
        return signals

    def _following(self, batch: Batch, shape: torch.Size) -> dict[str, Tensor]:
        observation = self.normalize(batch.signal("next_context")).flatten(0, 1).numpy()
        mean, log_std = _halves(self.actor_network.trace(observation)[-1])
        action, logp = squash_arrays(mean, log_std.clip(*self.log_std_bounds), batch.signal("next_noise").flatten(0, 1).numpy())
        acted, found = np.concatenate([observation, action], axis=1), {"next_logp": torch.from_numpy(logp).view(shape)}
        for name, (_, target) in self.judges().items():
            found[f"next_{name}"] = self._pairs(torch.from_numpy(target.trace(acted)[-1]).squeeze(-1), shape)
        return found

    def backward(self, batch: Batch, needs: Set[str], loss_fn: Any, recorded: Signals | None = None) -> Loss:
        """The same gradient as by autograd; by hand in NumPy where the loss knows its own in closed form, as SAC's does."""
        by_hand = type(self).evaluate is SquashedGaussianActorCritic.evaluate and getattr(loss_fn, "has_gradient", False)
        judges, scalars = {name: critic for name, (critic, _) in self.judges().items()}, self.scalars()
        judged = judges.keys() | {f"{name}_new" for name in judges} | {"logp_new"}
        if not by_hand or needs != judged | scalars.keys():
            return super().backward(batch, needs, loss_fn, recorded)
        observation = self.normalize(batch.context).flatten(0, 1).numpy()
        noise = batch.signal("noise").flatten(0, 1).numpy()
        acted = np.concatenate([observation, batch.action.flatten(0, 1).numpy()], axis=1)
        stored = {name: critic.trace(acted) for name, critic in judges.items()}
        actor = self.actor_network.trace(observation)
        mean, log_std = _halves(actor[-1])
        bounded = log_std.clip(*self.log_std_bounds)
        action, logp = squash_arrays(mean, bounded, noise)
        acted = np.concatenate([observation, action], axis=1)
        fresh = {name: critic.trace(acted) for name, critic in judges.items()}
        shape = batch.mask.shape
        arrays = {name: layers[-1].T.reshape(*shape, -1) for name, layers in stored.items()}
        arrays |= {f"{name}_new": layers[-1].T.reshape(*shape, -1) for name, layers in fresh.items()} | {"logp_new": logp.reshape(shape)}
        arrays |= {name: np.full(shape, value.item(), dtype=np.float32) for name, value in scalars.items()}
        found = loss_fn.gradient(batch, arrays)
        if found is None or not judged <= set(found.signals):
            return super().backward(batch, needs, loss_fn, recorded)
        slopes, by_action = found.signals, np.zeros_like(action)
        for name, critic in judges.items():
            critic.pull(stored[name], slopes[name].reshape(-1, critic.members).T[..., None], into_weights=True)
            towards = critic.pull(fresh[name], slopes[f"{name}_new"].reshape(-1, critic.members).T[..., None], into_weights=False)
            by_action = by_action + towards[:, observation.shape[1] :]
        by_logp = slopes["logp_new"].reshape(-1, 1)
        by_x = by_action * (1 - action * action) + by_logp * (2 * action)  # the log-density grows by 2 tanh(x) with x
        by_log_std = (by_x * np.exp(bounded) * noise - by_logp) * (bounded == log_std)
        self.actor_network.accumulate(actor, np.concatenate([by_x, by_log_std], axis=1))
        for name, value in scalars.items():
            if name in slopes:
                add_gradient(value, np.asarray(slopes[name].sum(), dtype=np.float32))
        return Loss(torch.tensor(found.value), found.metrics)

    def _pairs(self, q: Float[Tensor, "E M"], shape: torch.Size) -> Float[Tensor, "N T E"]:
        return q.T.view(*shape, len(q))

    def move_targets(self, rate: float) -> None:
        """Target critics <- (1 - rate) * themselves + rate * the critics (Polyak averaging)."""
        with torch.no_grad():
            for critic, target in self.judges().values():
                torch._foreach_lerp_([p for pair in target.layers for p in pair], [p for pair in critic.layers for p in pair], rate)

    def noise(self, rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
        return rng.standard_normal((*shape, self.spaces.action_size), dtype=np.float32)

    def actor(self) -> Callable[[NDArray, NDArray | None], NDArray]:
        network, normalize, low, high = self.actor_network.as_arrays(), self._normalizer(), *self.log_std_bounds

        def act(observation: NDArray, noise: NDArray | None) -> NDArray:
            mean, log_std = _halves(network(normalize(observation)))
            return np.tanh(mean if noise is None else mean + noise * np.exp(log_std.clip(low, high)))

        return act

    def for_environment(self, action: NDArray) -> NDArray:
        return self.centre + self.reach * action

    def from_environment(self, action: NDArray) -> NDArray:
        return ((action - self.centre) / self.reach).clip(-1, 1).astype(np.float32)


def _halves(x: NDArray) -> tuple[NDArray, NDArray]:
    middle = x.shape[1] // 2
    return x[:, :middle], x[:, middle:]


def squash(mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """tanh of a Gaussian sample and its log-density, [B,D] each -> ([B,D], [B]); the stable form of log(1 - tanh^2) (arXiv:1801.01290, appendix C)."""
    x = mean + log_std.exp() * noise
    change = 2 * (math.log(2) - x - nn.functional.softplus(-2 * x))
    return torch.tanh(x), -(0.5 * noise * noise + (log_std + HALF_LOG_TWO_PI) + change).sum(-1)


def squash_arrays(mean: NDArray, log_std: NDArray, noise: NDArray) -> tuple[NDArray, NDArray]:
    """`squash` in NumPy."""
    x = mean + np.exp(log_std) * noise
    change = 2 * (math.log(2) - x - np.logaddexp(0, -2 * x))
    return np.tanh(x), -(0.5 * noise * noise + (log_std + HALF_LOG_TWO_PI) + change).sum(1)


def stored_logp(action: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Log-density of squashed actions [B,D] in [-1,1]; those at the bounds are moved inside by a millionth."""
    x = torch.atanh(action.clamp(-ATANH_LIMIT, ATANH_LIMIT))
    return -(
        0.5 * ((x - mean) * (-log_std).exp()) ** 2 + log_std + HALF_LOG_TWO_PI + 2 * (math.log(2) - x - nn.functional.softplus(-2 * x))
    ).sum(-1)
