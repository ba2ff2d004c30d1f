"""A swarm of drones that serves users on the ground and must stay connected (after the task of arXiv:2605.17999; sizes and reward [reconstructed]).

Users stand in clusters on a square; a user within `RADIUS` of a drone is served. Two drones hear each other within the communication range, and the
reward falls with every part that the swarm breaks into. All drones have one reward. From the command line: `--env UavSwarm-v0`, and
`--env UavSwarmPreserved-v0` for the form in which moves that would break the swarm are not carried out. The functions take arrays with any number
of leading dimensions. Left out: continuous moves, moving users.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import gymnasium
import numpy as np
from numpy.typing import ArrayLike, NDArray

from anypo.domains.control.array_environment import ArrayEnvironment
from anypo.domains.control.classic import Array, Moved

SIZE, STEPS = 10.0, 60  # side of the square, steps of an episode
SPEED = 0.5  # length of a step
RADIUS, OVERLAP = 1.5, 1.0  # within which a user is served, and two drones are too close
CLUSTERS, SPREAD = 3, 0.8  # of the users; standard deviation around a cluster's middle
BORDER_WEIGHT, OVERLAP_WEIGHT = 0.1, 0.1
SEEN_USERS, SEEN_DRONES = 8, 4  # how many of the nearest a drone observes
OBSERVED = 2 + 3 * SEEN_USERS + 2 * SEEN_DRONES + 2
ANGLES = np.arange(8) * np.pi / 4
MOVES = np.concatenate([np.zeros((1, 2)), np.stack([np.cos(ANGLES), np.sin(ANGLES)], axis=1)])  # stay, and eight directions


class Graph(NamedTuple):
    adj: NDArray[np.int64]  # [...,U,U], who hears whom
    components: NDArray[np.int64]  # [...]
    connected: NDArray[np.bool_]  # [...]; a single drone is
    lambda2: Array  # [...], second smallest eigenvalue of the Laplacian: 0 when not connected, and for a single drone


class Coverage(NamedTuple):
    served: NDArray[np.bool_]  # [...,M]
    coverage: Array  # [...], share of users served
    single_share: Array  # [...], share of the served users whom exactly one drone serves; 0 when none is


def distances(first: ArrayLike, second: ArrayLike) -> Array:
    """[...,U,2] and [...,M,2] -> [...,U,M]."""
    gap = np.asarray(first, dtype=np.float64)[..., :, None, :] - np.asarray(second, dtype=np.float64)[..., None, :, :]
    return np.sqrt((gap * gap).sum(-1))


def count_components(adj: NDArray) -> NDArray[np.int64]:
    """[...,U,U] -> [...]: parts of the graph, counted by their members of lowest number."""
    drones = adj.shape[-1]
    reach = (adj.astype(bool) | np.eye(drones, dtype=bool)).astype(np.float32)
    for _ in range(max(drones - 1, 1).bit_length()):  # a path twice as long each time
        reach = (reach @ reach > 0).astype(np.float32)
    return (reach.argmax(-1) == np.arange(drones)).sum(-1)


def _hearing(apart: Array, comm_range: float) -> NDArray[np.bool_]:
    return (apart <= comm_range) & ~np.eye(apart.shape[-1], dtype=bool)


def parts(positions: ArrayLike, comm_range: float) -> NDArray[np.int64]:
    """[...,U,2] -> [...]: how many parts the swarm has."""
    return count_components(_hearing(distances(positions, positions), comm_range))


def adjacency(positions: ArrayLike, comm_range: float) -> Graph:
    """Equations 1 and 7: the graph of drones at [...,U,2]."""
    adj = _hearing(distances(positions, positions), comm_range).astype(np.int64)
    components = count_components(adj)
    laplacian = adj.sum(-1)[..., None] * np.eye(adj.shape[-1]) - adj
    lambda2 = np.linalg.eigvalsh(laplacian)[..., 1] if adj.shape[-1] > 1 else np.zeros(adj.shape[:-2])
    return Graph(adj, components, components == 1, lambda2)


def coverage(positions: ArrayLike, users: ArrayLike, radius: float) -> Coverage:
    """Equations 6 and 9: who of the users [...,M,2] is served by drones at [...,U,2], and how little the drones overlap."""
    by = (distances(positions, users) <= radius).sum(-2)
    served = by > 0
    return Coverage(served, served.mean(-1), (by == 1).sum(-1) / np.maximum(served.sum(-1), 1))


def reward(
    positions: ArrayLike, previous_coverage: ArrayLike, users: ArrayLike, hit_border: ArrayLike, radius: float, comm_range: float,
    overlap_radius: float, w_c: float, w_b: float, w_o: float,
) -> Array:  # fmt: skip
    """Equation 8, the team's reward [...]: coverage, its change, and charges for parts, the border and drones too close to each other."""
    apart = distances(positions, positions)
    drones = apart.shape[-1]
    now = coverage(positions, users, radius).coverage
    broken = (count_components(_hearing(apart, comm_range)) - 1) / max(drones - 1, 1)
    close = (np.triu(apart < overlap_radius, 1)).sum((-2, -1)) / max(drones * (drones - 1) / 2, 1)
    return now + 2 * (now - np.asarray(previous_coverage)) - w_c * broken - w_b * np.asarray(hit_border, dtype=np.float64) - w_o * close


def preserved_move(positions: ArrayLike, moves: ArrayLike, comm_range: float, size: float) -> Array:
    """Where drones at [...,U,2] come to when a joint move that breaks the swarm is carried out one drone after another, and one whose move would
    break it stays [reconstructed]."""
    here = np.array(positions, dtype=np.float64)
    wanted = (here + np.asarray(moves)).clip(0.0, size)
    breaks = parts(wanted, comm_range) > 1
    if not breaks.any():
        return wanted
    now = here.copy()
    for i in range(here.shape[-2]):
        tried = now.copy()
        tried[..., i, :] = wanted[..., i, :]
        now = np.where((parts(tried, comm_range) == 1)[..., None, None], tried, now)
    return np.where(breaks[..., None, None], now, wanted)


@dataclass(frozen=True)
class Swarm:
    """State: positions of drones and users, the coverage before, and the number of steps taken. Observed and acted upon by every drone: [N,U,O] and
    [N,U]."""

    drones: int = 5
    users: int = 40
    comm_range: float = 4.0
    connection_weight: float = 1.0  # charge for a swarm in pieces
    preserve: bool = False  # whether moves that break the swarm are held back

    def reset(self, generator: np.random.Generator) -> Array:
        """Drones in a connected square of side 2 in a corner; users around the middles of clusters."""
        drones = generator.uniform(0.0, 2.0, (self.drones, 2))
        middles = generator.uniform(RADIUS, SIZE - RADIUS, (CLUSTERS, 2))
        users = middles[np.arange(self.users) % CLUSTERS] + SPREAD * generator.standard_normal((self.users, 2))
        users = users.clip(0.0, SIZE)
        return np.concatenate([drones.ravel(), users.ravel(), [float(coverage(drones, users, RADIUS).coverage), 0.0]])

    def places(self, state: Array) -> tuple[Array, Array]:
        """Positions of the drones [N,U,2] and the users [N,M,2]."""
        flat = state.T
        return flat[:, : 2 * self.drones].reshape(-1, self.drones, 2), flat[:, 2 * self.drones : -2].reshape(-1, self.users, 2)

    def step(self, state: Array, action: NDArray) -> Moved:
        positions, users = self.places(state)
        moves = SPEED * MOVES[action]
        wanted = positions + moves
        hit = ((wanted < 0) | (wanted > SIZE)).any((1, 2))
        moved = preserved_move(positions, moves, self.comm_range, SIZE) if self.preserve else wanted.clip(0.0, SIZE)
        gain = reward(moved, state[-2], users, hit, RADIUS, self.comm_range, OVERLAP, self.connection_weight, BORDER_WEIGHT, OVERLAP_WEIGHT)
        out = state.copy()
        out[: 2 * self.drones] = moved.reshape(len(moved), -1).T
        out[-2], out[-1] = coverage(moved, users, RADIUS).coverage, state[-1] + 1
        return Moved(out, gain, np.zeros(len(gain), dtype=bool))

    def observe(self, state: Array) -> NDArray[np.float32]:
        """[N,U,O]: own position in sides of the square; offsets of the nearest users, in communication ranges, each with whether it is served; offsets
        of the nearest drones; whether the swarm is connected; the time. What there are too few of is 0."""
        positions, users = self.places(state)
        count = len(positions)
        out = np.zeros((count, self.drones, OBSERVED), np.float32)
        out[..., :2] = positions / SIZE
        to_users, apart = distances(positions, users), distances(positions, positions)
        served = np.asarray((to_users <= RADIUS).any(1))
        rows = np.arange(count)[:, None, None]
        nearest = to_users.argsort(-1, kind="stable")[..., :SEEN_USERS]
        seen = np.zeros((count, self.drones, SEEN_USERS, 3))
        seen[:, :, : nearest.shape[-1], :2] = (users[rows, nearest] - positions[:, :, None]) / self.comm_range
        seen[:, :, : nearest.shape[-1], 2] = served[rows, nearest]
        out[..., 2 : 2 + 3 * SEEN_USERS] = seen.reshape(count, self.drones, -1)
        others = np.where(np.eye(self.drones, dtype=bool), np.inf, apart).argsort(-1, kind="stable")[
            ..., : min(SEEN_DRONES, self.drones - 1)
        ]
        offsets = (positions[rows, others] - positions[:, :, None]) / self.comm_range
        out[..., 2 + 3 * SEEN_USERS : 2 + 3 * SEEN_USERS + 2 * others.shape[-1]] = offsets.reshape(count, self.drones, -1)
        out[..., -2] = np.asarray(count_components(_hearing(apart, self.comm_range)) == 1)[:, None]
        out[..., -1] = state[-1][:, None] / STEPS
        return out


class UavSwarm(ArrayEnvironment):
    """A team environment: `team_size` drones, spaces of a single one, observations [U,O] and actions [U] of all together."""

    def __init__(self, render_mode: str | None = None, **setting: float) -> None:
        """`setting`: the fields of `Swarm`."""
        super().__init__(render_mode)
        self.dynamics = Swarm(**setting)  # type: ignore[arg-type,misc]
        self.team_size = self.dynamics.drones
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (OBSERVED,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(len(MOVES))


for name, setting in {"UavSwarm-v0": {}, "UavSwarmPreserved-v0": {"preserve": True}}.items():
    if name not in gymnasium.registry:
        gymnasium.register(name, entry_point="anypo.domains.control.uav_swarm:UavSwarm", max_episode_steps=STEPS, kwargs=setting)
