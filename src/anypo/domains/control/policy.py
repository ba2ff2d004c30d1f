"""Policies for environments: small networks, exact and quick.

`ControlPolicy` is an actor (softmax or diagonal Gaussian) beside a critic of its own. Trajectories carry raw observations; normalization happens
inside, with statistics that stand still while a batch is collected and trained on, so that the log-probs of a batch are those of `evaluate`.
While steps are collected the actor runs in NumPy on views of the very same weights: at this size a torch call costs more than the arithmetic.
Left out: images, recurrence, shared trunks (a row that needs one brings it).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Set
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from anypo.batch import Batch
from anypo.domains.control.envs import Spaces
from anypo.policy import Loss, LossFunction, Policy, Signals

OBSERVATION_LIMIT = 10.0  # of a normalized observation, in standard deviations
HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)
ACTOR_SIGNALS = frozenset({"logp", "entropy", "logits", "mean", "log_std", "kl_old", "hidden"})


class Network(nn.Module):
    """A multilayer perceptron with orthogonal initial weights; `scale` is the gain of the last layer."""

    def __init__(self, sizes: tuple[int, ...], scale: float, activation: str = "tanh") -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in zip(sizes[:-1], sizes[1:], strict=True))
        self.activation = {"tanh": torch.tanh, "relu": torch.relu}[activation]
        self.array_activation: Callable[..., NDArray] = {"tanh": np.tanh, "relu": lambda x, out: np.maximum(x, 0, out=out)}[activation]
        for layer in self.layers:
            gain = scale if layer is self.layers[-1] else math.sqrt(2)
            nn.init.orthogonal_(layer.weight, gain)  # type: ignore[arg-type]
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]

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
        for i in range(len(self.layers) - 1, -1, -1):
            layer = self.layers[i]
            _add_gradient(layer.weight, gradient.T @ layers[i])  # type: ignore[arg-type]
            _add_gradient(layer.bias, gradient.sum(0))  # type: ignore[arg-type]
            if i:
                gradient = gradient @ layer.weight.detach().numpy()  # type: ignore[operator]
                gradient *= (layers[i] > 0) if self.activation is torch.relu else 1 - layers[i] * layers[i]

    def _views(self) -> list[tuple[NDArray, NDArray]]:
        return [(layer.weight.detach().numpy(), layer.bias.detach().numpy()) for layer in self.layers]  # type: ignore[operator]


def _add_gradient(parameter: nn.Parameter, gradient: NDArray) -> None:
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


class EnvironmentPolicy(Policy):
    """What collection asks of a policy: `actor()` acts in NumPy, `noise` draws all randomness of a segment at once."""

    memoryless = True
    spaces: Spaces
    moments: Moments | None

    def noise(self, rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Randomness for `shape` actions, [*shape, A] or [*shape, D]."""
        raise NotImplementedError

    def actor(self) -> Callable[[NDArray, NDArray | None], NDArray]:
        """A function (observations [N,O], noise [N,...] or None for the likeliest action) -> actions as a batch stores them."""
        raise NotImplementedError

    def for_environment(self, action: NDArray) -> NDArray:
        """Stored actions as the environment takes them."""
        raise NotImplementedError

    def from_environment(self, action: NDArray) -> NDArray:
        """The inverse of `for_environment`, for recorded actions."""
        raise NotImplementedError

    def begin_collection(self) -> None:
        """Take over the observation statistics of what was collected before."""
        if self.moments is not None:
            self.moments.absorb()

    def end_collection(self, observations: NDArray) -> None:
        """Note the statistics of observations [M,O] just collected."""
        if self.moments is not None:
            self.moments.note(observations)

    def _normalizer(self) -> Callable[[NDArray], NDArray]:
        """`normalize` for arrays, with the statistics of this moment."""
        kind = next(self.parameters()).detach().numpy().dtype
        if self.moments is None:
            return lambda x: x.astype(kind, copy=False)
        mean, deviation = (x.to(torch.float32).numpy() for x in self.moments.scale())
        return lambda x: ((x - mean) / deviation).clip(-OBSERVATION_LIMIT, OBSERVATION_LIMIT).astype(kind, copy=False)

    def normalize(self, observation: Tensor) -> Tensor:
        """Observations [...,O] in standard deviations from their running mean, clipped; unchanged when normalization is off."""
        kind = next(self.parameters()).dtype
        if self.moments is None:
            return observation.to(kind)
        mean, deviation = (x.to(torch.float32) for x in self.moments.scale())
        return ((observation - mean) / deviation).clamp(-OBSERVATION_LIMIT, OBSERVATION_LIMIT).to(kind)

    def save_pretrained(self, folder: Path | str) -> None:
        """Weights and description in a folder, which `setup.load` reads."""
        from anypo.domains.control.saved import save

        save(self, Path(folder))

    @property
    def configuration(self) -> dict[str, Any]:
        """The constructor's arguments beside the spaces, as plain values."""
        raise NotImplementedError


class ControlPolicy(EnvironmentPolicy):
    """Actor and critic perceptrons. Discrete actions: softmax. Continuous: Gaussian with a state-independent log standard deviation, whose raw
    sample is stored and clipped to the bounds for the environment alone.

    `evaluate` provides [N,T] `logp`, `entropy`, `value`, `kl_old` (exact KL of the policy that acted to this one, from the distribution in
    `batch.signals`: `old_logits`, or `old_mean` and `old_log_std`), [N,T,H] `hidden` (the actor's last hidden layer), and the distribution:
    [N,T,A] `logits`, or [N,T,D] `mean` and `log_std`.
    """

    learning_rate = 5e-3
    optimizer = "adam"

    def __init__(
        self, spaces: Spaces, *, hidden: tuple[int, ...] = (64, 64), normalize_observations: bool | None = None, initial_log_std: float = 0.0,
        seed: int = 0,
    ) -> None:  # fmt: skip
        """`normalize_observations`: None = for continuous actions only. Weights depend on `seed` alone."""
        super().__init__()
        self.spaces, self.hidden_sizes, self.initial_log_std = spaces, tuple(hidden), initial_log_std
        self.discrete = spaces.actions is not None
        normalize = not self.discrete if normalize_observations is None else normalize_observations
        outputs = spaces.actions if spaces.actions is not None else spaces.action_size
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.actor_network = Network((spaces.observation_size, *hidden, outputs), scale=0.01)
            self.critic_network = Network((spaces.observation_size, *hidden, 1), scale=1.0)
        self.log_std = None if self.discrete else nn.Parameter(torch.full((outputs,), float(initial_log_std)))
        self.moments = Moments(spaces.observation_size) if normalize else None
        distribution = {"logits"} if self.discrete else {"mean", "log_std"}
        self.provides = frozenset({"logp", "entropy", "value", "kl_old", "hidden"} | distribution)

    @property
    def configuration(self) -> dict[str, Any]:
        return {
            "hidden": list(self.hidden_sizes),
            "normalize_observations": self.moments is not None,
            "initial_log_std": self.initial_log_std,
        }

    def parameter_groups(self) -> list[dict[str, Any]]:
        actor = [*self.actor_network.parameters(), *([self.log_std] if self.log_std is not None else [])]
        groups = [{"params": actor, "role": "policy"}, {"params": list(self.critic_network.parameters()), "role": "value"}]
        return [dict(g, params=[p for p in g["params"] if p.requires_grad]) for g in groups]

    def evaluate(self, batch: Batch, needs: Set[str]) -> Signals:
        observation = self.normalize(batch.context)
        signals = Signals()
        output = None
        if not needs.isdisjoint(ACTOR_SIGNALS):
            features = self.actor_network.hidden(observation)
            if "hidden" in needs:
                signals["hidden"] = features
            last = self.actor_network.layers[-1]
            output = nn.functional.linear(features, last.weight, last.bias)  # type: ignore[arg-type]
        value = self.critic_network(observation) if "value" in needs else None
        return self._signals(output, value, batch, needs, signals)

    def backward(self, batch: Batch, needs: Set[str], loss_fn: LossFunction, recorded: Signals | None = None) -> Loss:
        """The same gradient as by autograd; the perceptrons' share of it is found by hand in NumPy, which is what makes small steps quick."""
        by_hand = type(self).evaluate is ControlPolicy.evaluate and "hidden" not in needs and self._trainable()
        if not by_hand or self.actor_network.layers[0].weight.device.type != "cpu":
            return super().backward(batch, needs, loss_fn, recorded)
        observation = self.normalize(batch.context)
        flat, shape = observation.reshape(-1, observation.shape[-1]).numpy(), batch.mask.shape
        wanted = (not needs.isdisjoint(ACTOR_SIGNALS), "value" in needs)
        networks = [n for n, want in zip((self.actor_network, self.critic_network), wanted, strict=True) if want]
        traces = [network.trace(flat) for network in networks]
        leaves = [torch.from_numpy(trace[-1]).view(*shape, -1).requires_grad_() for trace in traces]
        found = iter(leaves)
        output, value = (next(found) if want else None for want in wanted)
        loss = loss_fn(batch, self._signals(output, value, batch, needs, Signals()))
        if loss.value.requires_grad:
            loss.value.backward()
            for network, trace, leaf in zip(networks, traces, leaves, strict=True):
                if leaf.grad is not None:
                    network.accumulate(trace, leaf.grad.reshape(len(flat), -1).numpy())
        return Loss(loss.value.detach(), loss.metrics)

    def _trainable(self) -> bool:
        layers = (*self.actor_network.layers, *self.critic_network.layers)
        return all(layer.weight.requires_grad and layer.bias.requires_grad for layer in layers)  # type: ignore[union-attr]

    def _signals(self, output: Tensor | None, value: Tensor | None, batch: Batch, needs: Set[str], signals: Signals) -> Signals:
        """Everything in `needs` from the networks' outputs [N,T,A or D] and [N,T,1]."""
        if output is not None:
            (self._softmax if self.discrete else self._gaussian)(output, batch, needs, signals)
        if value is not None:
            signals["value"] = value.squeeze(-1)
        return signals

    def _softmax(self, logits: Tensor, batch: Batch, needs: Set[str], signals: Signals) -> None:
        log_probs = logits.log_softmax(-1)
        if "logits" in needs:
            signals["logits"] = logits
        if "logp" in needs:
            signals["logp"] = log_probs.gather(-1, batch.action.unsqueeze(-1)).squeeze(-1) * batch.mask
        if "entropy" in needs:
            signals["entropy"] = -(log_probs.exp() * log_probs).sum(-1)
        if "kl_old" in needs:
            old = batch.signal("old_logits").log_softmax(-1)
            signals["kl_old"] = (old.exp() * (old - log_probs)).sum(-1)

    def _gaussian(self, mean: Tensor, batch: Batch, needs: Set[str], signals: Signals) -> None:
        assert self.log_std is not None
        log_std = self.log_std
        if "mean" in needs or "log_std" in needs:
            signals["mean"], signals["log_std"] = mean, log_std.expand_as(mean).clone()  # a batch must not follow the parameter
        if "logp" in needs:
            signals["logp"] = gaussian_logp(batch.action, mean, log_std) * batch.mask
        if "entropy" in needs:
            signals["entropy"] = (log_std + 0.5 + HALF_LOG_TWO_PI).sum().expand(batch.mask.shape)
        if "kl_old" in needs:
            signals["kl_old"] = gaussian_kl(batch.signal("old_mean"), batch.signal("old_log_std"), mean, log_std)

    def values(self, observation: Tensor) -> Tensor:
        """The critic at raw observations [...,O] -> [...]."""
        return self.critic_network(self.normalize(observation)).squeeze(-1)

    def noise(self, rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Gumbel noise for the softmax (the largest perturbed logit is a sample), normal noise for the Gaussian."""
        if self.spaces.actions is not None:
            uniform = rng.random((*shape, self.spaces.actions), dtype=np.float32)
            tiny = np.float32(1e-12)
            return -np.log(-np.log(uniform + tiny) + tiny)
        return rng.standard_normal((*shape, self.spaces.action_size), dtype=np.float32)

    def actor(self) -> Callable[[NDArray, NDArray | None], NDArray]:
        network, normalize = self.actor_network.as_arrays(), self._normalizer()
        if self.log_std is None:
            return lambda x, noise: (network(normalize(x)) + (0 if noise is None else noise)).argmax(-1)
        deviation = self.log_std.detach().exp().numpy()
        return lambda x, noise: network(normalize(x)) + (0 if noise is None else noise * deviation)

    def for_environment(self, action: NDArray) -> NDArray:
        return action if self.discrete else action.clip(self.spaces.low, self.spaces.high)

    def from_environment(self, action: NDArray) -> NDArray:
        return action if self.discrete else action.astype(np.float32)


def gaussian_logp(action: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Log-density of a diagonal Gaussian, summed over the last dimension."""
    scaled = (action - mean) * (-log_std).exp()
    return -(0.5 * scaled * scaled + (log_std + HALF_LOG_TWO_PI)).sum(-1)


def gaussian_kl(old_mean: Tensor, old_log_std: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Exact KL(old || new) of diagonal Gaussians, summed over the last dimension."""
    ratio = (2 * (old_log_std - log_std)).exp()
    shift = ((old_mean - mean) * (-log_std).exp()) ** 2
    return 0.5 * (ratio + shift - 1 - 2 * (old_log_std - log_std)).sum(-1)
