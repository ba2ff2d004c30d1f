"""Shortest tours and paths through cities: exact solvers, for labels and for comparison, and the nearest neighbour.

`held_karp` takes any costs and solves many small problems at once; `optimal_tour` takes symmetric costs and some dozens of cities. Left out: local
search and everything else that is not exact.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

LARGEST = 14  # cities that `held_karp` takes: its tables have 2^k k entries a problem
TOGETHER = 1 << 22  # entries of its tables at a time


class Path(NamedTuple):
    value: NDArray  # [B] cost of the best path
    order: NDArray  # [B,k] int64, the cities in its order


def held_karp(start: Float[NDArray, "B k"], between: Float[NDArray, "B k k"], end: Float[NDArray, "B k"]) -> Path:
    """The cheapest order of k >= 1 cities: the cost of going to the first, from each to the next (`between[i,j]`: from i to j), and on from the last.

    Raises ValueError for more than 14 cities.
    """
    count, cities = start.shape
    if not 1 <= cities <= LARGEST:
        raise ValueError(f"held_karp takes 1 to {LARGEST} cities, not {cities}; use optimal_tour for larger problems with symmetric costs")
    step = max(1, TOGETHER // (cities << cities))
    parts = [_held_karp(start[i : i + step], between[i : i + step], end[i : i + step]) for i in range(0, count, step)]
    return Path(np.concatenate([p.value for p in parts]), np.concatenate([p.order for p in parts]))


def _held_karp(start: NDArray, between: NDArray, end: NDArray) -> Path:
    count, cities = start.shape
    cost = np.full((1 << cities, cities, count), np.inf)  # of the best path through a set that ends in a city
    before = np.zeros((1 << cities, cities, count), dtype=np.int64)
    step = np.moveaxis(between, 0, -1)  # [k,k,B]
    for chosen in range(1, 1 << cities):
        for j in range(cities):
            rest = chosen ^ (1 << j)
            if not chosen >> j & 1:
                continue
            if rest == 0:
                cost[chosen, j] = start[:, j]
                continue
            through = cost[rest] + step[:, j]
            before[chosen, j] = through.argmin(0)
            cost[chosen, j] = through.min(0)
    rows = np.arange(count)
    total = cost[-1] + end.T
    order = np.zeros((count, cities), dtype=np.int64)
    order[:, -1] = total.argmin(0)
    left = np.full(count, (1 << cities) - 1)
    for place in range(cities - 1, 0, -1):
        at = order[:, place]
        order[:, place - 1] = before[left, at, rows]
        left = left ^ (1 << at)
    return Path(total.min(0), order)


def distances(points: Float[NDArray, "... n 2"]) -> Float[NDArray, "... n n"]:
    """Euclidean distances between all points."""
    return np.sqrt(((points[..., :, None, :] - points[..., None, :, :]) ** 2).sum(-1))


def tour_length(distance: Float[NDArray, "B n n"], tour: Int[NDArray, "B n"]) -> Float[NDArray, " B"]:
    """Length of closed tours."""
    return distance[np.arange(len(tour))[:, None], tour, np.roll(tour, -1, axis=1)].sum(1)


def optimal_tours(distance: Float[NDArray, "B n n"]) -> Int[NDArray, "B n"]:
    """Shortest closed tours that begin in city 0; of up to 11 cities for any costs, of more for symmetric ones."""
    if distance.shape[1] > 11:
        return np.array([optimal_tour(d) for d in distance])
    order = held_karp(distance[:, 0, 1:], distance[:, 1:, 1:], distance[:, 1:, 0]).order
    return np.concatenate([np.zeros((len(order), 1), dtype=np.int64), 1 + order], axis=1)


def optimal_tour(distance: Float[NDArray, "n n"]) -> Int[NDArray, " n"]:
    """The shortest closed tour from city 0, symmetric costs: an integer program over edges, with a cut for every part that a solution leaves alone.

    Raises ValueError for costs that are not symmetric and for fewer than 3 cities.
    """
    cities = len(distance)
    if cities < 3 or not np.allclose(distance, distance.T):
        raise ValueError("optimal_tour needs symmetric costs between at least 3 cities")
    a, b = np.triu_indices(cities, 1)
    edge = np.arange(len(a))
    degree = coo_array((np.ones(2 * len(a)), (np.concatenate([a, b]), np.tile(edge, 2)))).tocsr()
    rows = [LinearConstraint(degree, 2, 2)]
    while True:
        found = milp(distance[a, b], integrality=np.ones(len(a)), bounds=Bounds(0, 1), constraints=rows)
        taken = found.x > 0.5
        chosen = coo_array((np.ones(taken.sum()), (a[taken], b[taken])), shape=(cities, cities))
        parts, label = connected_components(chosen, directed=False)
        if parts == 1:
            return _walk(a[taken], b[taken], cities)
        leaving = np.array([(label[a] == part) != (label[b] == part) for part in range(parts)], dtype=float)
        rows.append(LinearConstraint(leaving, 2, np.inf))


def _walk(a: NDArray, b: NDArray, cities: int) -> NDArray:
    neighbours: list[list[int]] = [[] for _ in range(cities)]
    for i, j in zip(a.tolist(), b.tolist(), strict=True):
        neighbours[i].append(j)
        neighbours[j].append(i)
    tour = [0, neighbours[0][0]]
    while len(tour) < cities:
        one, other = neighbours[tour[-1]]
        tour.append(other if one == tour[-2] else one)
    return np.array(tour)


def nearest_neighbour(distance: Float[NDArray, "B n n"]) -> Int[NDArray, "B n"]:
    """Tours from city 0 that go to the nearest city left."""
    count, cities, _ = distance.shape
    rows, seen = np.arange(count), np.zeros((count, cities), dtype=bool)
    tour = np.zeros((count, cities), dtype=np.int64)
    seen[:, 0] = True
    for step in range(1, cities):
        tour[:, step] = np.where(seen, np.inf, distance[rows, tour[:, step - 1]]).argmin(1)
        seen[rows, tour[:, step]] = True
    return tour
