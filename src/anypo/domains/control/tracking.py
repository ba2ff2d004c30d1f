"""Tracking with a crude model: a small car on a figure eight, what a designer believes of it, and a policy built around a tracking controller (after
the hardware car of arXiv:2307.08168; all numbers [reconstructed]).

A problem of this kind is an environment whose `model` (see `Model`) gives the Jacobians of the believed dynamics, the gradients of the cost and the
nominal trajectory; its observations are the state followed by the number of steps taken. From the command line: `--env TrackCar-v0`. Left out:
corrections of the gains, several tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import gymnasium
import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.control.array_environment import ArrayEnvironment
from anypo.domains.control.classic import Array, Moved
from anypo.domains.control.envs import Spaces, maker
from anypo.domains.control.perceptron import Network
from anypo.domains.control.policy import EnvironmentPolicy, gaussian_logp
from anypo.policy import Signals

NAME = "TrackCar-v0"
STEPS, INTERVAL = 100, 0.1  # of an episode; seconds
RATE = 0.6  # radians a second along the figure eight
STEERING = 0.6  # largest angle, radians
EFFORT = 0.01  # cost of squared inputs


class Moves(NamedTuple):
    next: Array  # [...,n]
    a: Array  # [...,n,n], its Jacobian in the state
    b: Array  # [...,n,m], and in the input


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


def car_step(state: ArrayLike, action: ArrayLike, dt: float, gain_a: float, gain_s: float, drag: float, length: float) -> Moves:
    """One step of a car with state (x, y, speed, heading) [...,4] and input (acceleration, steering angle) [...,2]; the angle is clamped."""
    x, u = np.asarray(state, dtype=np.float64), np.asarray(action, dtype=np.float64)
    speed, heading = x[..., 2], x[..., 3]
    angle = gain_s * u[..., 1].clip(-STEERING, STEERING)
    cos, sin, tan = np.cos(heading), np.sin(heading), np.tan(angle)
    change = np.stack([speed * cos, speed * sin, gain_a * u[..., 0] - drag * speed, speed * tan / length], axis=-1)
    a = np.broadcast_to(np.eye(4), (*x.shape, 4)).copy()
    a[..., 0, 2], a[..., 1, 2], a[..., 2, 2], a[..., 3, 2] = dt * cos, dt * sin, 1 - dt * drag, dt * tan / length
    a[..., 0, 3], a[..., 1, 3] = -dt * speed * sin, dt * speed * cos
    b = np.zeros((*x.shape, 2))
    b[..., 2, 0] = dt * gain_a
    b[..., 3, 1] = np.where(np.abs(u[..., 1]) < STEERING, dt * speed * gain_s * (1 + tan**2) / length, 0.0)
    return Moves(x + dt * change, a, b)


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


def figure_eight(steps: int) -> Array:
    """[steps,2]: positions, one an interval."""
    t = RATE * INTERVAL * np.arange(steps)
    return np.stack([0.9 * np.sin(t), 0.45 * np.sin(2 * t)], axis=-1)


@dataclass(frozen=True)
class Car:
    """The car as somebody believes it to be. The cost is squared distance to the figure eight plus a little for the inputs."""

    gain_a: float = 1.0  # of acceleration, > 0
    gain_s: float = 1.0  # of steering, > 0
    drag: float = 0.0  # a second, >= 0
    length: float = 0.3  # between the axles, > 0
    steps: int = STEPS

    size = 4
    angles = (3,)

    def step(self, state: ArrayLike, action: ArrayLike) -> Moves:
        return car_step(state, action, INTERVAL, self.gain_a, self.gain_s, self.drag, self.length)

    def jacobians(self, state: Array, action: Array) -> tuple[Array, Array]:
        moves = self.step(state, action)
        return moves.a, moves.b

    def cost_gradients(self, state: Array, action: Array) -> tuple[Array, Array]:
        by_state = np.zeros_like(state)
        by_state[..., :2] = 2 * (state[..., :2] - figure_eight(self.steps + 1))
        return by_state, 2 * EFFORT * action

    def nominal(self) -> Nominal:
        """The states whose positions are the figure eight, step by step, and the inputs that lead from one to the next."""
        way = np.diff(figure_eight(self.steps + 2), axis=0)
        speed = np.hypot(way[:, 0], way[:, 1]) / INTERVAL
        heading = np.unwrap(np.arctan2(way[:, 1], way[:, 0]))
        reference = np.concatenate([figure_eight(self.steps + 1), speed[:, None], heading[:, None]], axis=1)
        push = (np.diff(speed) / INTERVAL + self.drag * speed[:-1]) / self.gain_a
        steer = np.arctan(self.length * np.diff(heading) / (INTERVAL * speed[:-1])) / self.gain_s
        return Nominal(reference, np.stack([push, steer], axis=1))


REAL = Car(gain_a=0.7, gain_s=0.85, drag=0.15, length=0.35)


@dataclass(frozen=True)
class RealCar:
    """State: the car's, steps taken, and the noise of all of the episode's steps, which is drawn when it begins."""

    car: Car = REAL
    noise: float = 0.002  # standard deviation a step of each number, >= 0

    def reset(self, generator: np.random.Generator) -> Array:
        drawn = self.noise * generator.standard_normal(4 * self.car.steps)
        return np.concatenate([Car(steps=self.car.steps).nominal().reference[0], [0.0], drawn])

    def step(self, state: Array, action: NDArray) -> Moved:
        out, steps = state.copy(), self.car.steps
        now = state[4].astype(np.int64)
        noise = state[5:].reshape(steps, 4, -1)[now % steps, :, np.arange(state.shape[1])]
        out[:4] = (self.car.step(state[:4].T, action).next + noise).T
        out[4] += 1
        wanted = figure_eight(steps + 1).T
        cost = ((state[:2] - wanted[:, now]) ** 2).sum(0) + EFFORT * (action.T.astype(np.float64) ** 2).sum(0)
        cost += np.where(now + 1 == steps, ((out[:2] - wanted[:, -1:]) ** 2).sum(0), 0.0)
        return Moved(out, -cost, np.zeros(len(cost), dtype=bool))

    def observe(self, state: Array) -> NDArray[np.float32]:
        return state[:5].T.astype(np.float32)


class TrackCar(ArrayEnvironment):
    """Observation: position, speed, heading, steps taken. Action: acceleration and steering angle. Reward: minus the cost. 100 steps an episode."""

    model = Car()

    def __init__(self, render_mode: str | None = None, noise: float = 0.002) -> None:
        super().__init__(render_mode)
        self.dynamics = RealCar(noise=noise)  # type: ignore[misc]
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (5,), np.float32)
        self.action_space = gymnasium.spaces.Box(np.array([-5.0, -STEERING]), np.array([5.0, STEERING]), dtype=np.float32)


def model_of(environment: Any, name: str) -> Model:
    """What an environment says is believed of it. Raises ValueError for one that says nothing."""
    model = getattr(environment.unwrapped, "model", None)
    if not all(hasattr(model, part) for part in ("jacobians", "cost_gradients", "nominal")):
        raise ValueError(
            f"{name} has no model to take derivatives of; use --env {NAME}, or an environment whose attribute `model` has jacobians, "
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


if NAME not in gymnasium.registry:
    gymnasium.register(NAME, entry_point="anypo.domains.control.tracking:TrackCar", max_episode_steps=STEPS)
