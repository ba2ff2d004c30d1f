"""Tracking with a crude model: what a problem must say of itself, the regulator designed on it, and the policy built around that regulator
(arXiv:2307.08168).

A problem of this kind is an environment whose `model` (see `Model`) gives the Jacobians of the believed dynamics, the gradients of the cost and the
nominal trajectory; its observations are the state followed by the number of steps taken. `track_car` is one. Left out: corrections of the gains,
several tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.control.classic import Array
from anypo.domains.control.envs import Spaces, maker
from anypo.domains.control.perceptron import Network
from anypo.domains.control.policy import EnvironmentPolicy, gaussian_logp
from anypo.policy import Signals


class Nominal(NamedTuple):
    reference: Array  # [T+1,n]
    feedforward: Array  # [T,m], what would track it if the model were right


class Model(Protocol):
    """What is believed of a system, and what is wanted of it."""

    steps: int  # T of an episode
    size: int  # n, numbers in a state
    angles: tuple[int, ...]  # which of them are angles, whose errors are wrapped

    def jacobians(self, state: Array, action: Array) -> tuple[Array, Array]:
        """[...,n] and [...,m] -> [...,n,n] and [...,n,m]."""
        ...

    def cost_gradients(self, state: Array, action: Array) -> tuple[Array, Array]:
        """Gradients of the cost of an episode in its states [...,T+1,n] and inputs [...,T,m]."""
        ...

    def nominal(self) -> Nominal: ...


def riccati(a: Tensor, b: Tensor, q: Tensor, r: Tensor) -> tuple[Float[Tensor, "T m n"], Float[Tensor, "n n"]]:
    """Gains of the linear-quadratic regulator along Jacobians [T,n,n] and [T,n,m] (equation 5 [reconstructed]), and the cost to go at the first
    step; the last state costs as the others do."""
    gains, p = [], q
    for at, bt in zip(a.flip(0), b.flip(0), strict=True):
        gain = torch.linalg.solve(r + bt.mT @ p @ bt, bt.mT @ p @ at)
        gains.append(gain)
        p = q + at.mT @ p @ (at - bt @ gain)
    return torch.stack(gains[::-1]), p


class Regulator(NamedTuple):
    gain_first: Float[Tensor, "m n"]
    cost_to_go: Float[Tensor, "n n"]


def lqr_gains(a: Float[Tensor, "n n"], b: Float[Tensor, "n m"], q: Float[Tensor, "n n"], r: Float[Tensor, "m m"], steps: int) -> Regulator:
    """The first of `steps` gains of a system that stays the same, and its cost to go."""
    gains, p = riccati(a.expand(steps, -1, -1), b.expand(steps, -1, -1), q, r)
    return Regulator(gains[0], p)


def tracking_action(
    state: Float[Tensor, "*B n"], reference: Float[Tensor, "*B n"], feedforward: Float[Tensor, "*B m"], gain: Float[Tensor, "*B m n"]
) -> Float[Tensor, "*B m"]:
    """Equation 1: feedforward plus gain times (reference - state)."""
    return feedforward + (gain @ (reference - state).unsqueeze(-1)).squeeze(-1)


def model_of(environment: Any, name: str) -> Model:
    """What an environment says is believed of it. Raises ValueError for one that says nothing."""
    model = getattr(environment.unwrapped, "model", None)
    if not all(hasattr(model, part) for part in ("jacobians", "cost_gradients", "nominal")):
        raise ValueError(
            f"{name} has no model to take derivatives of; use --env TrackCar-v0, or an environment whose attribute `model` has jacobians, "
            "cost_gradients and nominal"
        )
    return model  # type: ignore[return-value]


class TrackingPolicy(EnvironmentPolicy):
    """A tracking controller designed on the model; a network corrects the reference that it tracks, at first by nothing.

    `evaluate` provides [N,T,m] `mean` (the action), [N,T,m,n] `feedback` (its Jacobian in the state), and, where it explores, [N,T] `logp`.
    """

    learning_rate = 1e-3
    optimizer = "adam"
    moments = None

    def __init__(
        self, spaces: Spaces, *, hidden: tuple[int, ...] = (64, 64), exploration: float = 0.0, feedback: bool = True, seed: int = 0,
        model: Model | None = None,
    ) -> None:  # fmt: skip
        """`exploration`: standard deviation of Gaussian noise on the actions. `feedback` False: gains 0 behind the network, which then corrects
        the inputs themselves. `model`: None = the environment's. Raises ValueError for an environment without one."""
        super().__init__()
        self.spaces, self.hidden_sizes, self.exploration, self.with_feedback = spaces, tuple(hidden), float(exploration), feedback
        self.model = model or model_of(maker(spaces.name)(), spaces.name)
        nominal = self.model.nominal()
        a, b = (torch.from_numpy(x) for x in self.model.jacobians(nominal.reference[:-1], nominal.feedforward))
        n, m = b.shape[1:]
        gain = riccati(a, b, torch.eye(n, dtype=a.dtype), 0.1 * torch.eye(m, dtype=a.dtype))[0]
        reference = torch.from_numpy(nominal.reference)
        scaled = (reference - reference.mean(0)) / reference.std(0).clamp(min=1e-6)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.network = Network((n, *hidden, n if feedback else m), scale=0.0)
        constants = {"reference": reference, "feedforward": nominal.feedforward, "gain": gain * feedback, "features": scaled}
        for name, value in constants.items():
            self.register_buffer(name, torch.as_tensor(value, dtype=torch.get_default_dtype()), persistent=False)
        self.provides = frozenset({"mean", "feedback", *(("logp",) if exploration > 0 else ())})

    @property
    def configuration(self) -> dict[str, Any]:
        return {"hidden": list(self.hidden_sizes), "exploration": self.exploration, "feedback": self.with_feedback}

    def mean(self, observation: Tensor) -> Tensor:
        """The action at observations [...,n+1] (a state and the steps taken)."""
        n = self.model.size
        now = observation[..., n].long().clamp(max=len(self.gain) - 1)
        state, change = observation[..., :n].to(self.gain.dtype), self.network(self.features[now])
        if not self.with_feedback:
            return self.feedforward[now] + change
        error = self.reference[now] + change - state
        if self.model.angles:
            where = list(self.model.angles)
            wrapped = error.clone()
            wrapped[..., where] = torch.remainder(error[..., where] + torch.pi, 2 * torch.pi) - torch.pi
            error = wrapped
        return tracking_action(state, state + error, self.feedforward[now], self.gain[now])

    def evaluate(self, batch: Batch, needs: Set[str]) -> Signals:
        signals = Signals()
        if not needs.isdisjoint({"mean", "logp"}):
            mean = self.mean(batch.context)
            signals["mean"] = mean
            if "logp" in needs:
                spread = mean.new_tensor(self.exploration).log().expand(mean.shape[-1])
                signals["logp"] = gaussian_logp(batch.action, mean, spread) * batch.mask
        if "feedback" in needs:
            signals["feedback"] = -self.gain[batch.context[..., self.model.size].long().clamp(max=len(self.gain) - 1)]
        return Signals({name: value for name, value in signals.items() if name in needs})

    def noise(self, rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
        return rng.standard_normal((*shape, self.spaces.action_size), dtype=np.float32)

    def actor(self) -> Callable[[NDArray, NDArray | None], NDArray]:
        def act(observation: NDArray, noise: NDArray | None) -> NDArray:
            with torch.no_grad():
                mean = self.mean(torch.from_numpy(observation)).numpy()
            return mean if noise is None or self.exploration == 0 else mean + self.exploration * noise

        return act

    def for_environment(self, action: NDArray) -> NDArray:
        return np.clip(action, self.spaces.low, self.spaces.high)  # type: ignore[arg-type]

    def from_environment(self, action: NDArray) -> NDArray:
        return action.astype(np.float32)
