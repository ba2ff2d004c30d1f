"""Stochastic dual dynamic programming of a row of reservoirs: forward simulations and Benders cuts on a tree of five inflows a month.

What targets are compared with in time and cost where a grid is too large. The tree's months are independent: the correlation of inflows is
ignored, as are the states that it would add. Reservoirs rise and fall together: one branch is the same quantile for all of them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csr_array, hstack, vstack

from anypo.domains.combinatorial.hydro import HydroSetting, branches, program


class Cuts(NamedTuple):
    """Cost to go after month t is at least constant[t][k] + slope[t][k] . level, and 0."""

    constant: list[list[float]]
    slope: list[list[NDArray]]
    bound: list[float]  # on the expected cost from the start, an iteration each; never falls


class Month(NamedTuple):
    level: NDArray  # [R], at the end
    cost: float  # of generation
    total: float  # with the cost to go
    worth: NDArray  # [R]: derivative of the total in the level before


def month(
    setting: HydroSetting, level: Float[NDArray, " R"], inflow: Float[NDArray, " R"], constant: list[float], slope: list[NDArray]
) -> Month:
    """The best decision of a month when the cost to go is the largest of the cuts. Raises RuntimeError when the solver fails."""
    matrix, upper, price = program(setting, 1)
    size = setting.reservoirs
    rows = [*range(size), 2 * size]  # balances and demand; there are no targets
    equal = hstack([csr_array(matrix[rows]), csr_array((len(rows), 1))])
    costs = np.append(np.where(np.isnan(price), 0.0, price), 1.0)
    above = right = None
    if constant:
        cuts = np.zeros((len(constant), len(costs)))
        cuts[:, :size], cuts[:, -1] = np.stack(slope), -1.0
        above, right = csr_array(cuts), -np.array(constant)
    bounds = np.stack([np.zeros(len(costs)), np.append(upper, np.inf)], axis=1)
    found = linprog(
        costs, A_ub=above, b_ub=right, A_eq=vstack([equal]), b_eq=np.append(level + inflow, setting.demand), bounds=bounds, method="highs"
    )
    if found.x is None:
        raise RuntimeError(f"the month's program was not solved: {found.message}")
    return Month(found.x[:size], float(found.fun - found.x[-1]), float(found.fun), found.eqlin.marginals[:size])


def plan_by_cuts(setting: HydroSetting, iterations: int = 20, seed: int = 0) -> Cuts:
    """`iterations` of one simulated path and one backward pass. Each pass adds a cut a month at the levels that the path has visited."""
    rng = np.random.default_rng(seed)
    tree = branches(setting)
    found = Cuts([[] for _ in range(setting.months)], [[] for _ in range(setting.months)], [])
    for _ in range(iterations):
        level = np.full(setting.reservoirs, setting.start)
        visited = [level]
        for t in range(setting.months - 1):
            inflow = np.full(setting.reservoirs, rng.choice(tree[t]))
            level = month(setting, level, inflow, found.constant[t], found.slope[t]).level
            visited.append(level)
        for t in range(setting.months - 1, -1, -1):
            solved = [month(setting, visited[t], np.full(setting.reservoirs, w), found.constant[t], found.slope[t]) for w in tree[t]]
            total, worth = float(np.mean([x.total for x in solved])), np.mean([x.worth for x in solved], axis=0)
            if t:
                found.constant[t - 1].append(total - float(worth @ visited[t]))
                found.slope[t - 1].append(worth)
        found.bound.append(total)
    return found
