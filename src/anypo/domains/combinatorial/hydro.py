"""Hydrothermal dispatch: reservoirs in a row and thermal plants meet a demand month by month. Feasible decisions by linear programs, with duals.

A policy names target levels; a program follows them as closely as water and turbines allow, what is missing being paid for by a penalty, so that every
executed decision is feasible. Left out: the electric network (AC power flow), head effects and start-up decisions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csr_array, kron, lil_array
from scipy.sparse import eye_array as eye

SPREAD = 0.3  # of the logarithm of an inflow


@dataclass(frozen=True)
class HydroSetting:
    """R reservoirs, the first uppermost, over T months. What is turbined or spilled flows into the next one. Water and energy in the same unit."""

    name: str = "one_reservoir"
    reservoirs: int = 1
    months: int = 12  # T
    demand: float = 10.0  # D, a month
    turbine: float = 8.0  # u_max of a reservoir, a month
    capacity: float = 30.0  # x_max of a reservoir
    start: float = 15.0  # x_0 of a reservoir
    cheap_cost: float = 20.0  # c1, a unit
    cheap_limit: float = 5.0  # g1, units a month
    deficit_cost: float = 200.0  # c2 > c1, a unit
    penalty: float = 1000.0  # C_d, for a unit of distance from a target
    correlation: float = 0.0  # of the inflows' noise from month to month, in [0,1)

    def season(self) -> Float[NDArray, " T"]:
        """Mean inflow of a reservoir's own river in each month."""
        return (6 + 3 * np.sin(2 * np.pi * np.arange(1, self.months + 1) / 12)) / self.reservoirs

    def draw(self, seeds: list[int]) -> Float[NDArray, "S T R"]:
        """Inflow paths, one a seed: log-normal around the season, log-AR(1) where there is correlation."""
        noise = np.stack([np.random.default_rng(seed).standard_normal((self.months, self.reservoirs)) for seed in seeds])
        for t in range(1, self.months):
            noise[:, t] = self.correlation * noise[:, t - 1] + (1 - self.correlation**2) ** 0.5 * noise[:, t]
        return self.season()[:, None] * np.exp(SPREAD * noise - SPREAD**2 / 2)


SETTINGS = {
    "one_reservoir": HydroSetting(),
    "cascade": HydroSetting("cascade", reservoirs=3, turbine=8 / 3, capacity=10.0, start=5.0, correlation=0.5),  # the same totals in thirds
}


class Dispatch(NamedTuple):
    """S paths of T months."""

    level: NDArray  # [S,T,R] x, at the end of each month
    turbined: NDArray  # [S,T,R] u
    spilled: NDArray  # [S,T,R] s
    thermal: NDArray  # [S,T,2]: cheap generation and deficit
    cost: NDArray  # [S] of generation and of distance from the targets
    thermal_cost: NDArray  # [S] of generation alone
    dual: NDArray  # [S,T,R]: derivative of the cost in each target


def solve(
    setting: HydroSetting, start: Float[NDArray, "S R"], inflow: Float[NDArray, "S T R"], target: Float[NDArray, "S T R"], penalty: float
) -> Dispatch:
    """Equation 2: the deterministic equivalent of all paths, in one program of independent blocks. Raises RuntimeError when the solver fails."""
    paths, months, size = inflow.shape
    _, upper, price = program(setting, months)
    right = np.zeros((paths, months, 2 * size + 1))
    right[..., :size] = inflow
    right[:, 0, :size] += start
    right[..., size : 2 * size] = target
    right[..., -1] = setting.demand
    costs = np.where(np.isnan(price), penalty, price)
    bounds = np.tile(np.stack([np.zeros_like(upper), upper], axis=1), (paths, 1))
    found = linprog(np.tile(costs, paths), A_eq=_blocks(setting, months, paths), b_eq=right.ravel(), bounds=bounds, method="highs")
    if found.x is None:
        raise RuntimeError(f"the dispatch program was not solved: {found.message}")
    x = found.x.reshape(paths, months, -1)
    dual = found.eqlin.marginals.reshape(paths, months, -1)[..., size : 2 * size]
    thermal = x[..., 3 * size : 3 * size + 2]
    thermal_cost = (thermal @ np.array([setting.cheap_cost, setting.deficit_cost])).sum(1)
    cost = (found.x * np.tile(costs, paths)).reshape(paths, -1).sum(1)
    return Dispatch(x[..., :size], x[..., size : 2 * size], x[..., 2 * size : 3 * size], thermal, cost, thermal_cost, dual)


def roll_out(
    setting: HydroSetting, inflow: Float[NDArray, "S T R"], target: Float[NDArray, "S T R"], start: Float[NDArray, "S R"] | None = None
) -> Dispatch:
    """Equation 6: month by month, each from the level that the one before has really left. `dual` is each month's own."""
    level = np.full(inflow[:, 0].shape, setting.start) if start is None else start
    months = []
    for t in range(inflow.shape[1]):
        months.append(solve(setting, level, inflow[:, t : t + 1], target[:, t : t + 1], setting.penalty))
        level = months[-1].level[:, 0]
    level, turbined, spilled, thermal, dual = (
        np.concatenate([getattr(m, name) for m in months], axis=1) for name in ("level", "turbined", "spilled", "thermal", "dual")
    )
    cost, thermal_cost = (np.sum([getattr(m, name) for m in months], axis=0) for name in ("cost", "thermal_cost"))
    return Dispatch(level, turbined, spilled, thermal, cost, thermal_cost, dual)


def residual(setting: HydroSetting, inflow: Float[NDArray, "S T R"], done: Dispatch) -> float:
    """The largest violation of any constraint by executed decisions: balances, demand, bounds."""
    before = np.concatenate([np.full(inflow[:, :1].shape, setting.start), done.level[:, :-1]], axis=1)
    out = done.turbined + done.spilled
    arriving = np.concatenate([np.zeros_like(out[..., :1]), out[..., :-1]], axis=-1)
    balance = np.abs(before + inflow + arriving - out - done.level).max()
    supply = np.abs(done.turbined.sum(-1) + done.thermal.sum(-1) - setting.demand).max()
    least = min(float(x.min()) for x in (done.level, done.turbined, done.spilled, done.thermal))
    over = [done.level.max() - setting.capacity, done.turbined.max() - setting.turbine, done.thermal[..., 0].max() - setting.cheap_limit]
    return float(max(balance, supply, -least, *over))


@lru_cache(maxsize=16)
def program(setting: HydroSetting, months: int) -> tuple[csr_array, NDArray, NDArray]:
    """Equality matrix, upper bounds and prices (NaN: the penalty) of one path; a month's variables are x, u, s (R each), g1, g2, and the distances below
    and above the targets; its rows the balances, the targets and the demand."""
    size = setting.reservoirs
    width, height = 5 * size + 2, 2 * size + 1
    x, u, s, g, below, above = 0, size, 2 * size, 3 * size, 3 * size + 2, 4 * size + 2
    matrix = lil_array((months * height, months * width))
    for t in range(months):
        row, column = t * height, t * width
        for r in range(size):
            for offset in (x, u, s):
                matrix[row + r, column + offset + r] = 1.0
            if r:
                matrix[row + r, column + u + r - 1] = matrix[row + r, column + s + r - 1] = -1.0
            if t:
                matrix[row + r, column - width + x + r] = -1.0
            matrix[row + size + r, column + x + r] = matrix[row + size + r, column + below + r] = 1.0
            matrix[row + size + r, column + above + r] = -1.0
            matrix[row + 2 * size, column + u + r] = 1.0
        matrix[row + 2 * size, column + g] = matrix[row + 2 * size, column + g + 1] = 1.0
    free = [np.inf] * size
    upper = [setting.capacity] * size + [setting.turbine] * size + free + [setting.cheap_limit, np.inf] + free + free
    price = [0.0] * 3 * size + [setting.cheap_cost, setting.deficit_cost] + [np.nan] * 2 * size
    return csr_array(matrix), np.tile(upper, months), np.tile(price, months)


@lru_cache(maxsize=16)
def _blocks(setting: HydroSetting, months: int, paths: int) -> csr_array:
    matrix = program(setting, months)[0]
    return csr_array(kron(eye(paths), matrix))


BRANCHES = (
    -1.2815515655446004,
    -0.5244005127080409,
    0.0,
    0.5244005127080407,
    1.2815515655446004,
)  # quantiles .1, .3, .5, .7, .9 of a standard normal


class GridPlan(NamedTuple):
    """Stochastic dynamic programming of one reservoir: expected cost to go."""

    grid: NDArray  # [G] levels
    value: NDArray  # [T+1,G], before the month's inflow is seen; the last is 0


def branches(setting: HydroSetting) -> Float[NDArray, "T 5"]:
    return setting.season()[:, None] * np.exp(SPREAD * np.array(BRANCHES) - SPREAD**2 / 2)


def plan_on_grid(setting: HydroSetting, points: int = 61) -> GridPlan:
    """Exact up to the grid and five equally likely inflows a month. Raises ValueError for several reservoirs or correlated inflows."""
    if setting.reservoirs > 1 or setting.correlation:
        raise ValueError("the dynamic program is for one reservoir with independent inflows")
    grid = np.linspace(0.0, setting.capacity, points)
    value = np.zeros((setting.months + 1, points))
    for t in range(setting.months - 1, -1, -1):
        water = grid[:, None] + branches(setting)[t]
        value[t] = _best(setting, water.ravel(), grid, value[t + 1])[1].reshape(water.shape).mean(1)
    return GridPlan(grid, value)


def follow_plan(setting: HydroSetting, plan: GridPlan, inflow: Float[NDArray, "S T 1"]) -> Float[NDArray, " S"]:
    """Thermal cost of each path under the plan's decisions."""
    level, total = np.full(len(inflow), setting.start), np.zeros(len(inflow))
    for t in range(inflow.shape[1]):
        water = level + inflow[:, t, 0]
        level = _best(setting, water, plan.grid, plan.value[t + 1])[0]
        total += thermal_cost(setting, np.minimum(water - level, min(setting.turbine, setting.demand)))
    return total


def thermal_cost(setting: HydroSetting, turbined: NDArray) -> NDArray:
    """What the rest of the demand costs."""
    need = setting.demand - turbined
    return setting.cheap_cost * np.minimum(need, setting.cheap_limit) + setting.deficit_cost * np.maximum(need - setting.cheap_limit, 0.0)


def _best(setting: HydroSetting, water: Float[NDArray, " B"], grid: NDArray, after: NDArray) -> tuple[NDArray, NDArray]:
    """The best level to leave of each amount of water, among the grid and the kinks of the month's cost, and its cost to go."""
    most = np.minimum(water, setting.capacity)[:, None]
    kinks = water[:, None] - np.array([0.0, setting.turbine, setting.demand, setting.demand - setting.cheap_limit])
    level = np.clip(np.concatenate([np.broadcast_to(grid, (len(water), len(grid))), kinks], axis=1), 0.0, most)
    use = np.minimum(water[:, None] - level, min(setting.turbine, setting.demand))
    total = thermal_cost(setting, use) + np.interp(level, grid, after)
    choice = total.argmin(1)
    rows = np.arange(len(water))
    return level[rows, choice], total[rows, choice]
