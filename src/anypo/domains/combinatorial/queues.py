"""Queueing networks with several classes of jobs, simulated for many independent copies at once.

A server chooses which of its classes to serve. A learned rule is a softmax over its non-empty classes; beyond a limit on all jobs together the rule gives
way to back-pressure (the guard). Exponential services are simulated as a uniformized chain (every step one possible event), others event by
event with preemptive resume. Everything random is given from outside, so that two rules can meet the same arrivals and services.
Left out: travel between stations and set-up times. Where several servers may serve a class they share its first job.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray

FEATURES = 4  # of a class: 1, its share of all jobs, whether it waits, log(1 + its jobs)
SERVICES = ("exponential", "hyperexponential", "uniform")
SQUARED_VARIATION = 4.0  # of hyperexponential services: variance over squared mean
EMPTY = -1  # no class is served, or there is nothing to choose


@dataclass(frozen=True)
class QueueNetwork:
    """C classes, S servers. `classes[s]`: what server s may serve; `following[c]`: the class a served job joins, -1 where it leaves."""

    name: str
    arrival: tuple[float, ...]  # jobs a unit of time, >= 0
    service: tuple[float, ...]  # jobs a unit of time while served, > 0
    classes: tuple[tuple[int, ...], ...]
    following: tuple[int, ...]
    cost: tuple[float, ...]  # of a job and unit of time, >= 0

    @cached_property
    def allowed(self) -> NDArray:
        """[S,C] bool: which server may serve which class."""
        return np.array([[c in mine for c in range(len(self.service))] for mine in self.classes])

    @cached_property
    def moves(self) -> NDArray:
        """[C+1,C]: what serving a class changes; the last row is nothing."""
        moves = np.zeros((len(self.service) + 1, len(self.service)))
        for c, after in enumerate(self.following):
            moves[c, c] -= 1
            if after >= 0:
                moves[c, after] += 1
        return moves


def from_lists(arrival: list[float], service: list[float], server: list[int], following: list[int], cost: list[float]) -> QueueNetwork:
    """A network in which every class has one server, whose number is `server[c]`."""
    classes = tuple(tuple(c for c, s in enumerate(server) if s == number) for number in range(max(server) + 1))
    return QueueNetwork("given", tuple(arrival), tuple(service), classes, tuple(following), tuple(cost))


NETWORKS = {
    network.name: network
    for network in (
        QueueNetwork("criss_cross", (0.8, 0.8, 0.0), (2.0, 2.0, 1.0), ((0, 1), (2,)), (2, -1, -1), (1.0, 1.0, 1.0)),
        QueueNetwork("tandem", (0.5, 0.4, 0.0, 0.0), (1.6, 1.4, 1.5, 1.3), ((0, 1), (2, 3)), (2, 3, -1, -1), (1.0, 2.0, 1.0, 2.0)),
        QueueNetwork("rybko_stolyar", (0.9, 0.0, 0.9, 0.0), (6.0, 1.5, 6.0, 1.5), ((0, 3), (1, 2)), (1, -1, 3, -1), (1.0, 1.0, 1.0, 1.0)),
        QueueNetwork("n_model", (1.2, 0.4), (1.0, 1.0), ((0,), (0, 1)), (-1, -1), (1.0, 2.0)),  # its rates are this package's own choice
    )
}


class Paths(NamedTuple):
    """B copies, T steps."""

    queues: NDArray  # [B,T+1,C] jobs of each class
    choice: NDArray  # [B,T,S] int64: the class that a server chose, -1 where it had nothing to choose
    logp: NDArray  # [B,T]: log-probability of what the rule chose (0 where there is nothing to choose, or the guard chose)
    duration: NDArray  # [B,T], > 0


def pressure(network: QueueNetwork, queues: Float[NDArray, "B C"]) -> Float[NDArray, "B C"]:
    """Equation 1: service rate times the drop in weighted jobs that serving the class brings."""
    held = np.asarray(network.cost) * queues
    after = np.asarray(network.following)
    return np.asarray(network.service) * (held - np.where(after >= 0, held[:, after], 0.0))


def weights(
    network: QueueNetwork, queues: Float[NDArray, "B C"], theta: Float[NDArray, "B C 4"], allowed: NDArray, threshold: float
) -> Float[NDArray, "B C"]:
    """Equations 2 and 3: how a server that may serve the classes `allowed` [B,C] weighs them, all 0 where it has nothing to do.

    Largest weight 1. Beyond `threshold` jobs the class with the largest positive pressure, the first of equals, has weight 1 and the others 0.
    """
    total = queues.sum(1, keepdims=True)
    open_to = allowed & (queues > 0)
    score = theta[..., 0] + theta[..., 1] * (queues / (1 + total)) + theta[..., 2] + theta[..., 3] * np.log1p(queues)
    score = np.where(open_to, score, -np.inf)
    found = np.exp(score - np.maximum(score.max(1, keepdims=True), -1e300))
    outside = np.flatnonzero(total[:, 0] > threshold)
    if outside.size:
        worth = np.where(open_to[outside], pressure(network, queues[outside]), 0.0)
        best = worth.argmax(1)
        found[outside] = 0.0
        found[outside, best] = worth[np.arange(len(outside)), best] > 0
    return found


def simulate_chain(
    network: QueueNetwork, theta: Float[NDArray, "B C 4"], start: Float[NDArray, "B C"], uniforms: Float[NDArray, "B T 2"], threshold: float
) -> Paths:
    """Equation 4: exponential services as a uniformized chain, a possible event a step. Every step lasts as long."""
    count, steps = uniforms.shape[:2]
    size = len(network.service)
    fastest = (network.allowed * np.asarray(network.service)).max(1)
    edges = np.cumsum([*network.arrival, *fastest])
    event = np.searchsorted(edges / edges[-1], uniforms[..., 0], side="right").clip(max=len(edges) - 1)
    event = event.T
    comes = np.concatenate([np.eye(size), np.zeros((len(fastest), size))])[event]  # [T,B,C]
    serves = np.concatenate([np.zeros((size, size), dtype=bool), network.allowed])[event]
    chance = np.asarray(network.service) / np.concatenate([np.ones(size), fastest])[event][..., None]  # of a service being accepted
    u = np.ascontiguousarray(uniforms[..., 1].T)
    queues, rows, last = start.astype(float), np.arange(count), size - 1
    path = np.empty((steps + 1, count, size))
    picked, mine, whole = np.empty((steps, count), dtype=np.int64), np.empty((steps, count)), np.empty((steps, count))
    for t in range(steps):
        path[t] = queues
        reached = weights(network, queues, theta, serves[t], threshold).cumsum(1)
        whole[t] = reached[:, last]
        point = u[t] * whole[t]
        chosen = np.minimum((reached <= point[:, None]).sum(1), last)
        upto = reached[rows, chosen]
        mine[t] = weight = upto - np.where(chosen > 0, reached[rows, chosen - 1], 0.0)
        accepted = point - upto + weight < weight * chance[t, rows, chosen]
        picked[t] = chosen
        queues = queues + comes[t] + network.moves[np.where(accepted, chosen, size)]
    path[steps] = queues
    busy = whole > 0
    logp = np.log(np.where(busy, mine, 1.0) / np.where(busy, whole, 1.0)).T
    choice = np.full((count, steps, len(fastest)), EMPTY)
    for server in range(len(fastest)):
        choice[..., server] = np.where(busy & (event == size + server), picked, EMPTY).T
    return Paths(path.transpose(1, 0, 2), choice, logp, np.full((count, steps), 1.0 / edges[-1]))


def simulate_events(
    network: QueueNetwork, theta: Float[NDArray, "B C 4"], gaps: Float[NDArray, "B C T"], work: Float[NDArray, "B C T"],
    uniforms: Float[NDArray, "B T S"], threshold: float,
) -> Paths:  # fmt: skip
    """Any services, from an empty network, an arrival or a completion a step. `gaps`: times between arrivals; `work`: service times in order of
    service. Servers choose anew after every event; a job that was put aside goes on where it was."""
    count, steps, servers = uniforms.shape
    size = len(network.service)
    rows, queues = np.arange(count), np.zeros((count, size))
    waiting, left = gaps[:, :, 0].copy(), work[:, :, 0].copy()  # until the next arrival; of the job in service or next to be
    come, done = np.zeros((count, size), dtype=np.int64), np.zeros((count, size), dtype=np.int64)
    path, duration = np.empty((count, steps + 1, size)), np.empty((count, steps))
    choice, logp = np.full((count, steps, servers), EMPTY), np.zeros((count, steps))
    for t in range(steps):
        path[:, t] = queues
        speed = np.zeros((count, size))
        for server in range(servers):
            weight = weights(network, queues, theta, np.broadcast_to(network.allowed[server], queues.shape), threshold)
            reached = weight.cumsum(1)
            chosen = (reached <= (uniforms[:, t, server] * reached[:, -1])[:, None]).sum(1).clip(max=size - 1)
            busy = weight[rows, chosen] > 0
            speed[rows[busy], chosen[busy]] += 1
            choice[busy, t, server] = chosen[busy]
            logp[busy, t] += np.log(weight[rows, chosen][busy] / reached[busy, -1])
        served = np.where(speed > 0, left / np.where(speed > 0, speed, 1.0), np.inf)
        until = np.concatenate([waiting, served], axis=1)
        event = until.argmin(1)
        span = until[rows, event]
        duration[:, t] = span
        waiting, left = waiting - span[:, None], left - span[:, None] * speed
        arrived, completed = event < size, event >= size
        who, c = rows[arrived], event[arrived]
        queues[who, c] += 1
        come[who, c] += 1
        waiting[who, c] = gaps[who, c, come[who, c].clip(max=steps - 1)]
        who, c = rows[completed], event[completed] - size
        queues[who] += network.moves[c]
        done[who, c] += 1
        left[who, c] = work[who, c, done[who, c].clip(max=steps - 1)]
    path[:, steps] = queues
    return Paths(path, choice, logp, duration)


def draw_services(services: str, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray:
    """Service times with mean 1: exponential, hyperexponential (two exponentials of balanced means) or uniform between 0 and 2."""
    if services == "uniform":
        return rng.uniform(0.0, 2.0, shape)
    times = rng.standard_exponential(shape)
    if services == "hyperexponential":
        first = 0.5 * (1 + ((SQUARED_VARIATION - 1) / (SQUARED_VARIATION + 1)) ** 0.5)
        times *= np.where(rng.random(shape) < first, 0.5 / first, 0.5 / (1 - first))
    return times


def average_cost(network: QueueNetwork, paths: Paths) -> Float[NDArray, " B"]:
    """Equation 5: cost a unit of time, counted before each event."""
    costs = (paths.queues[:, :-1] @ np.asarray(network.cost)) * paths.duration
    return costs.sum(1) / paths.duration.sum(1)


def draw_streams(network: QueueNetwork, services: str, seed: int, steps: int) -> tuple[NDArray, ...]:
    """What is random in a copy of `steps` steps: uniforms [T,2] of the chain, or gaps [C,T], work [C,T] and uniforms [T,S] of the events."""
    rng = np.random.default_rng(seed)
    if services == "exponential":
        return (rng.random((steps, 2)),)
    size = len(network.service)
    with np.errstate(divide="ignore"):
        gaps = rng.standard_exponential((size, steps)) / np.asarray(network.arrival)[:, None]
    work = draw_services(services, (size, steps), rng) / np.asarray(network.service)[:, None]
    return gaps, work, rng.random((steps, len(network.classes)))
