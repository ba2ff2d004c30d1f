"""Maintenance of an ageing malware detector as an environment: one step is one period, an action is what is done with its labels.

From the command line: `--env MalwareMaintenance-v0`. The detector, its measures and the drifting programs are in `malware`.
"""

from __future__ import annotations

from dataclasses import dataclass

import gymnasium
import numpy as np
from numpy.typing import NDArray

from anypo.domains.control import malware as m
from anypo.domains.control.array_environment import ArrayEnvironment
from anypo.domains.control.classic import Array, Moved

NAME = "MalwareMaintenance-v0"
DECISIONS = m.PERIODS - 1  # the last period has no next one to act for
PLACES = ("period", "utility", "change", "retention", "cost", "spent")  # single numbers of a state, after the weights
SCALARS = m.WEIGHTS + len(PLACES)
MEASURES = SCALARS + 2 * m.PERIODS  # shift and mmd2 of every period
LABELS = MEASURES + m.PERIODS * m.SAMPLES
WHOLE = LABELS + m.PERIODS * m.SAMPLES * m.LATENTS


@dataclass(frozen=True)
class Maintenance:
    """State: the weights of adapter and head, `PLACES`, and the path of the episode: its drift, labels and latents. What a step does in period t reads
    that path up to t, its reward up to t + 1 (equation 7)."""

    world: int = 0  # seed of the families and of the detector at the beginning
    w_u: float = 1.0  # weights of utility, retention and cost, >= 0
    w_m: float = 0.5
    w_c: float = 0.3

    def reset(self, generator: np.random.Generator) -> Array:
        known = m.world(self.world)
        programs, labels = m.drifting(known.theta, generator)
        return self.begin(known.encode(programs), labels)

    def begin(self, latents: Array, labels: Array) -> Array:
        """The state before the first action, for a path of latents [T,200,16] and labels [T,200]."""
        known = m.world(self.world)
        drift = [m.drift(known.reference, z, known.bandwidth) for z in latents]
        scalars = np.array([1.0, served(known.weights, latents[:1], labels[:1])[0], 0.0, self._kept(known.weights)[0], 0.0, 0.0])
        shift, mmd2 = np.array([d.shift for d in drift]), np.array([d.mmd2 for d in drift])
        return np.concatenate([known.weights[0], scalars, shift, mmd2, labels.ravel(), latents.ravel()])

    def path(self, state: Array) -> tuple[Array, Array]:
        """Latents [N,T,200,16] and labels [N,T,200] of states [S,N]."""
        flat = state.T
        labels = flat[:, MEASURES:LABELS].reshape(-1, m.PERIODS, m.SAMPLES)
        return flat[:, LABELS:].reshape(*labels.shape, m.LATENTS), labels

    def step(self, state: Array, action: NDArray) -> Moved:
        latents, labels = self.path(state)
        period, rows = state[m.WEIGHTS].astype(np.int64), np.arange(state.shape[1])
        weights = state[: m.WEIGHTS].T.copy()
        for choice, t in {*zip(action.tolist(), period.tolist(), strict=True)}:
            chosen = (action == choice) & (period == t)
            weights[chosen] = self.maintain(weights[chosen], choice, latents[chosen, :t], labels[chosen, :t])
        utility, retention = served(weights, latents[rows, period], labels[rows, period]), self._kept(weights)
        cost = m.COSTS[action]
        out = state.copy()
        out[: m.WEIGHTS] = weights.T
        out[m.WEIGHTS : SCALARS] = [period + 1, utility, utility - state[m.WEIGHTS + 1], retention, cost, state[SCALARS - 1] + cost]
        return Moved(out, m.reward(utility, retention, action, self.w_u, self.w_m, self.w_c), period + 1 == m.PERIODS)

    def maintain(self, weights: Array, action: int, latents: Array, labels: Array) -> Array:
        """Weights [E,297] after an action in period t, from what was seen by then: latents [E,t,200,16] and labels [E,t,200]."""
        known, rows, seen = m.world(self.world), len(weights), latents.shape[1]
        if action == m.KEEP:
            return weights
        z, y = latents[:, -1], labels[:, -1]
        if action == m.REPLAY:
            z, y = self._joined(known.memory, z, y)
        if action != m.REFIT:
            return m.fit(weights, z, y, m.ROUNDS, whole=action != m.HEAD)
        z, y = self._joined(np.arange(m.FIRST), latents.reshape(rows, -1, m.LATENTS), labels.reshape(rows, -1))
        order = np.random.default_rng((self.world, seen)).permutation(z.shape[1])
        return m.fit(known.fresh.repeat(rows, axis=0), z, y, m.REFIT_ROUNDS, order=order)

    def _joined(self, old: NDArray[np.int64], z: Array, y: Array) -> tuple[Array, Array]:
        """Programs of the first period before others [E,n,16] and their labels."""
        known = m.world(self.world)
        before = [np.broadcast_to(x[old], (len(z), len(old), *x.shape[1:])) for x in (known.latents, known.labels)]
        return np.concatenate([before[0], z], axis=1), np.concatenate([before[1], y], axis=1)

    def _kept(self, weights: Array) -> Array:
        known = m.world(self.world)
        return served(weights, known.latents[known.memory][None], known.labels[known.memory][None])

    def observe(self, state: Array) -> NDArray[np.float32]:
        """Equation 5, [N,8] in the order of `malware.SEEN`."""
        period, utility, change, retention, cost, spent = state[m.WEIGHTS : SCALARS]
        now, rows = period.astype(np.int64) - 1, np.arange(state.shape[1])
        shift, mmd2 = state[SCALARS + now, rows], state[SCALARS + m.PERIODS + now, rows]
        columns = [utility, change, retention, shift, np.sqrt(mmd2.clip(0)), cost, spent / m.PERIODS, period / m.PERIODS]
        return np.stack(columns, axis=1).astype(np.float32)


def served(weights: Array, latents: Array, labels: Array) -> Array:
    """F1 [E] of detectors with weights [E,297] on latents [E or 1,n,16] and labels [E or 1,n]."""
    return m.f1(labels, m.adapter(latents, **m.unpack(weights)) > 0.5)


class MalwareMaintenance(ArrayEnvironment):
    """Observation: `malware.SEEN`. Action: what is done before the next period, by its number. Reward: the next period's utility, the retention, less the
    cost."""

    dynamics = Maintenance()

    def __init__(self, render_mode: str | None = None, **setting: float) -> None:
        """`setting`: the fields of `Maintenance`."""
        super().__init__(render_mode)
        self.dynamics = Maintenance(**setting)  # type: ignore[arg-type,misc]
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (len(m.SEEN),), np.float32)
        self.action_space = gymnasium.spaces.Discrete(len(m.COSTS))


if NAME not in gymnasium.registry:
    gymnasium.register(NAME, entry_point="anypo.domains.control.maintenance:MalwareMaintenance", max_episode_steps=DECISIONS)
