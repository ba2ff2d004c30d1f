"""Policies for environments: small networks, exact and quick.

`ControlPolicy` is an actor (softmax or diagonal Gaussian) beside a critic of its own. Trajectories carry raw observations; normalization happens
inside, with statistics that stand still while a batch is collected and trained on, so that the log-probs of a batch are those of `evaluate`.
While steps are collected the actor runs in NumPy on views of the very same weights: at this size a torch call costs more than the arithmetic.
Left out: images, recurrence, shared trunks (a row that needs one brings it).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Set
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from anypo.batch import Batch
from anypo.domains.control.envs import Spaces
from anypo.domains.control.perceptron import Moments, Network, add_gradient
from anypo.policy import Loss, LossFunction, Policy, Signals
from anypo.seams.regularize import gaussian_kl

OBSERVATION_LIMIT = 10.0  # of a normalized observation, in standard deviations
HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)
ACTOR_SIGNALS = frozenset({"logp", "entropy", "logits", "mean", "log_std", "kl_old", "hidden"})


class EnvironmentPolicy(Policy, ABC):
    """What collection asks of a policy: `actor()` acts in NumPy, `noise` draws all randomness of a segment at once."""

    memoryless = True
    spaces: Spaces
    moments: Moments | None

    @abstractmethod
    def noise(self, rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Randomness for `shape` actions, [*shape, A] or [*shape, D]."""

    @abstractmethod
    def actor(self) -> Callable[[NDArray, NDArray | None], NDArray]:
        """A function (observations [N,O], noise [N,...] or None for the likeliest action) -> actions as a batch stores them."""

    @abstractmethod
    def for_environment(self, action: NDArray) -> NDArray:
        """Stored actions as the environment takes them."""

    @abstractmethod
    def from_environment(self, action: NDArray) -> NDArray:
        """The inverse of `for_environment`, for recorded actions."""

    def begin_collection(self) -> None:
        """Take over the observation statistics of what was collected before."""
        if self.moments is not None:
            self.moments.absorb()

    def end_collection(self, observations: NDArray) -> None:
        """Note the statistics of observations [M,O] just collected."""
        if self.moments is not None:
            self.moments.note(observations)

    def after_collection(self, collector: Policy) -> None:
        """The statistics of a copy that collects (a lagging actor) are this policy's too; else it would learn from observations it never normalized."""
        moments = getattr(collector, "moments", None)
        if self.moments is not None and moments is not None:
            self.moments.load_state_dict(moments.state_dict())

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
    @abstractmethod
    def configuration(self) -> dict[str, Any]:
        """The constructor's arguments beside the spaces, as plain values."""


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
        groups: list[dict[str, Any]] = [
            {"params": actor, "role": "policy"},
            {"params": list(self.critic_network.parameters()), "role": "value"},
        ]
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
        """The same gradient as by autograd. The perceptrons' share is found by hand in NumPy, and so is the loss's where its parts know their
        gradient in closed form: calls into autograd are what small steps cost."""
        by_hand = type(self).evaluate is ControlPolicy.evaluate and "hidden" not in needs and self._trainable()
        if not by_hand or self.actor_network.layers[0].weight.device.type != "cpu":
            return super().backward(batch, needs, loss_fn, recorded)
        flat = self.normalize(batch.context).reshape(-1, self.spaces.observation_size).numpy()
        wanted = (not needs.isdisjoint(ACTOR_SIGNALS), "value" in needs)
        networks = [n for n, want in zip((self.actor_network, self.critic_network), wanted, strict=True) if want]
        traces = [network.trace(flat) for network in networks]
        outputs = iter([trace[-1] for trace in traces])
        output, value = [next(outputs) if want else None for want in wanted]
        loss = self._closed_form(output, value, batch, needs, loss_fn)
        if loss is None:
            loss = self._by_autograd(output, value, batch, needs, loss_fn)
        result, gradients = loss
        for network, trace, gradient in zip(networks, traces, gradients, strict=True):
            if gradient is not None:
                network.accumulate(trace, gradient)
        return result

    def _by_autograd(
        self, output: NDArray | None, value: NDArray | None, batch: Batch, needs: Set[str], loss_fn: LossFunction
    ) -> tuple[Loss, list[NDArray | None]]:
        """The loss and its gradient in the networks' outputs; autograd runs from the loss to these outputs and no further."""
        leaves = [None if x is None else torch.from_numpy(x).view(*batch.mask.shape, -1).requires_grad_() for x in (output, value)]
        loss = loss_fn(batch, self._signals(leaves[0], leaves[1], batch, needs, Signals()))
        if loss.value.requires_grad:
            loss.value.backward()
        gradients = [None if leaf.grad is None else leaf.grad.flatten(0, 1).numpy() for leaf in leaves if leaf is not None]
        return Loss(loss.value.detach(), loss.metrics), gradients

    def _closed_form(
        self, output: NDArray | None, value: NDArray | None, batch: Batch, needs: Set[str], loss_fn: Any
    ) -> tuple[Loss, list[NDArray | None]] | None:
        """The same without autograd, where the loss needs no other signals than log-probs and values and knows its gradient in them; else None."""
        if not getattr(loss_fn, "has_gradient", False) or not needs <= {"logp", "value"}:
            return None
        shape, arrays = batch.mask.shape, dict[str, NDArray]()
        if output is not None:
            action = batch.action.flatten(0, 1).numpy()
            logp, pull = (
                softmax_pull(output, action) if self.log_std is None else gaussian_pull(output, action, self.log_std.detach().numpy())
            )
            arrays["logp"] = logp.reshape(shape)
        if value is not None:
            arrays["value"] = value.reshape(shape)
        found = loss_fn.gradient(batch, arrays)
        if found is None:
            return None
        gradients: list[NDArray | None] = []
        if output is not None:
            gradient, spread = pull(found.signals["logp"].reshape(-1)) if "logp" in found.signals else (None, None)
            gradients.append(gradient)
            if self.log_std is not None and spread is not None:
                add_gradient(self.log_std, spread)
        if value is not None:
            gradients.append(found.signals["value"].reshape(-1, 1) if "value" in found.signals else None)
        return Loss(torch.tensor(found.value), found.metrics), gradients

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
        return action if self.discrete else np.clip(action, self.spaces.low, self.spaces.high)  # type: ignore[arg-type]

    def from_environment(self, action: NDArray) -> NDArray:
        return action if self.discrete else action.astype(np.float32)


Pull = Callable[[NDArray], tuple[NDArray, NDArray | None]]  # gradient in logp [M] -> gradients in the output [M,A or D] and in log_std [D]


def softmax_pull(logits: NDArray, action: NDArray) -> tuple[NDArray, Pull]:
    """Log-probs [M] of actions [M] under logits [M,A], and how a gradient in them becomes one in the logits."""
    shifted = logits - logits.max(1, keepdims=True)
    weight = np.exp(shifted)
    total = weight.sum(1)
    rows = np.arange(len(action))

    def pull(gradient: NDArray) -> tuple[NDArray, None]:
        out = weight * (-gradient / total)[:, None]
        out[rows, action] += gradient
        return out, None

    return shifted[rows, action] - np.log(total), pull


def gaussian_pull(mean: NDArray, action: NDArray, log_std: NDArray) -> tuple[NDArray, Pull]:
    """Log-densities [M] of actions [M,D], and how a gradient in them becomes one in the mean and in the log standard deviation."""
    precision = np.exp(-log_std)
    scaled = (action - mean) * precision

    def pull(gradient: NDArray) -> tuple[NDArray, NDArray]:
        by_action = gradient[:, None]
        return by_action * (scaled * precision), (by_action * (scaled * scaled - 1)).sum(0)

    return -(0.5 * scaled * scaled + (log_std + HALF_LOG_TWO_PI)).sum(1), pull


def gaussian_logp(action: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Log-density of a diagonal Gaussian, summed over the last dimension."""
    scaled = (action - mean) * (-log_std).exp()
    return -(0.5 * scaled * scaled + (log_std + HALF_LOG_TWO_PI)).sum(-1)
