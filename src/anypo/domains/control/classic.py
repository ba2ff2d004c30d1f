"""The classic-control problems, stepped for many environments at once.

CartPole-v1, Acrobot-v1 and Pendulum-v1 as Gymnasium defines them (the same equations in the same order, double precision inside), with the state
of N environments in one array [state, N], so that a step costs a few array operations instead of N calls. A test holds them against Gymnasium's
own step and reset. Left out: rendering and other parameters than the registered ones; such environments run one by one (`envs.Separate`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Dynamics(Protocol):
    """One problem for any number of environments."""

    def reset(self, generator: np.random.Generator) -> Array: ...  # a first state [S]

    def step(self, state: Array, action: NDArray) -> Moved: ...

    def observe(self, state: Array) -> NDArray[np.float32]: ...  # [S,N] -> [N,O]


class Moved(NamedTuple):
    """What one step leaves: state [S,N], reward [N], terminated [N] bool."""

    state: Array
    reward: Array
    terminated: NDArray[np.bool_]


@dataclass(frozen=True)
class CartPole:
    """Balance a pole on a cart (Barto, Sutton and Anderson, 1983). State: position, velocity, angle, angular velocity."""

    def reset(self, generator: np.random.Generator) -> Array:
        return generator.uniform(low=-0.05, high=0.05, size=(4,))

    def step(self, state: Array, action: NDArray) -> Moved:
        x, x_dot, theta, theta_dot = state
        force = np.where(action == 1, 10.0, -10.0)
        cosine, sine = np.cos(theta), np.sin(theta)
        temp = (force + 0.05 * np.square(theta_dot) * sine) / 1.1
        angular = (9.8 * sine - cosine * temp) / (0.5 * (4.0 / 3.0 - 0.1 * np.square(cosine) / 1.1))
        linear = temp - 0.05 * angular * cosine / 1.1
        state = state + 0.02 * np.stack((x_dot, linear, theta_dot, angular))
        terminated = (np.abs(state[0]) > 2.4) | (np.abs(state[2]) > 12 * 2 * math.pi / 360)
        return Moved(state, np.ones(len(terminated)), terminated)

    def observe(self, state: Array) -> NDArray[np.float32]:
        return state.T.astype(np.float32)


@dataclass(frozen=True)
class Pendulum:
    """Swing a pendulum up and hold it. State: angle, angular velocity."""

    def reset(self, generator: np.random.Generator) -> Array:
        high = np.array([math.pi, 1.0])
        return generator.uniform(low=-high, high=high)

    def step(self, state: Array, action: NDArray) -> Moved:
        theta, speed = state
        torque = action[:, 0].clip(-2.0, 2.0)
        wrapped = ((theta + math.pi) % (2 * math.pi)) - math.pi
        cost = wrapped**2 + 0.1 * speed**2 + 0.001 * (torque**2)
        speed = (speed + (3 * 10.0 / 2.0 * np.sin(theta) + 3.0 * torque) * 0.05).clip(-8, 8)
        return Moved(np.stack((theta + speed * 0.05, speed)), -cost, np.zeros(len(cost), dtype=bool))

    def observe(self, state: Array) -> NDArray[np.float32]:
        out = np.empty((state.shape[1], 3), dtype=np.float32)
        out[:, 0], out[:, 1], out[:, 2] = np.cos(state[0]), np.sin(state[0]), state[1]
        return out


@dataclass(frozen=True)
class Acrobot:
    """Swing a two-link chain above a line (Sutton, 1996; the book's equations). State: two angles, two angular velocities."""

    def reset(self, generator: np.random.Generator) -> Array:
        return generator.uniform(low=-0.1, high=0.1, size=(4,)).astype(np.float32).astype(np.float64)

    def step(self, state: Array, action: NDArray) -> Moved:
        torque, h = action - 1.0, 0.2
        k1 = self._derivative(state, torque)
        k2 = self._derivative(state + h / 2 * k1, torque)
        k3 = self._derivative(state + h / 2 * k2, torque)
        k4 = self._derivative(state + h * k3, torque)
        state = state + h / 6.0 * (k1 + 2 * k2 + 2 * k3 + k4)
        angles = state[:2]
        if (np.abs(angles) > math.pi).any():
            state[:2] = np.where(np.abs(angles) > math.pi, (angles + math.pi) % (2 * math.pi) - math.pi, angles)
        state[2:] = state[2:].clip([[-4 * math.pi], [-9 * math.pi]], [[4 * math.pi], [9 * math.pi]])
        terminated = -np.cos(state[0]) - np.cos(state[1] + state[0]) > 1.0
        return Moved(state, np.where(terminated, 0.0, -1.0), terminated)

    def _derivative(self, state: Array, torque: Array) -> Array:
        theta1, theta2, speed1, speed2 = state
        cosine2, sine2 = np.cos(theta2), np.sin(theta2)
        d1 = 0.25 + (1.25 + cosine2) + 2.0
        d2 = 0.25 + 0.5 * cosine2 + 1.0
        phi2 = 4.9 * np.cos(theta1 + theta2 - math.pi / 2)
        phi1 = -0.5 * speed2**2 * sine2 - speed2 * speed1 * sine2 + 14.7 * np.cos(theta1 - math.pi / 2) + phi2
        change2 = (torque + d2 / d1 * phi1 - 0.5 * speed1**2 * sine2 - phi2) / (1.25 - d2**2 / d1)
        change1 = -(d2 * change2 + phi1) / d1
        return np.stack((speed1, speed2, change1, change2))

    def observe(self, state: Array) -> NDArray[np.float32]:
        out = np.empty((state.shape[1], 6), dtype=np.float32)
        out[:, 0:4:2], out[:, 1:4:2] = np.cos(state[:2]).T, np.sin(state[:2]).T
        out[:, 4:] = state[2:].T
        return out


KNOWN: dict[str, Dynamics] = {"CartPole-v1": CartPole(), "Acrobot-v1": Acrobot(), "Pendulum-v1": Pendulum()}
