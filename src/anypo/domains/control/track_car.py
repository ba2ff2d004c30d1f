"""A small car that follows a figure eight, and what a designer believes of it (after the hardware car of arXiv:2307.08168; all numbers
[reconstructed]).

The real car accelerates and steers less than the believed one, is dragged, longer and shaken by noise. From the command line: `--env TrackCar-v0`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import gymnasium
import numpy as np
from numpy.typing import ArrayLike, NDArray

from anypo.domains.control.array_environment import ArrayEnvironment
from anypo.domains.control.classic import Array, Moved
from anypo.domains.control.tracking import Nominal

NAME = "TrackCar-v0"
STEPS, INTERVAL = 100, 0.1  # of an episode; seconds
RATE = 0.6  # radians a second along the figure eight
STEERING = 0.6  # largest angle, radians
EFFORT = 0.01  # cost of squared inputs


class Moves(NamedTuple):
    next: Array  # [...,n]
    a: Array  # [...,n,n], its Jacobian in the state
    b: Array  # [...,n,m], and in the input


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
        most = np.array([5.0, STEERING], dtype=np.float32)
        self.action_space = gymnasium.spaces.Box(-most, most, dtype=np.float32)


if NAME not in gymnasium.registry:
    gymnasium.register(NAME, entry_point="anypo.domains.control.track_car:TrackCar", max_episode_steps=STEPS)
