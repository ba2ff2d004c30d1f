"""Trading on the top of a limit order book: order flow in, a target position out (after arXiv:2605.25527; what is not marked [paper] is [reconstructed]).

A hidden pressure makes buyers or sellers come more often; queues at the best quotes grow and shrink, and prices move by a tick when one is eaten. What a
trader does moves nothing, so a whole window is drawn when an episode begins, and attempts from one seed meet the same market. From the command line:
`--env OrderFlow-v0`. A LOBSTER order book file takes the simulator's place with `OrderFlow(data=...)`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import gymnasium
import numpy as np
from numpy.typing import ArrayLike, NDArray

from anypo.domains.control.array_environment import ArrayEnvironment
from anypo.domains.control.classic import Array, Moved

NAME = "OrderFlow-v0"
WINDOWS = (1, 5, 20)  # events of the flow features
SEEN = ("flow of 1 event", "flow of 5", "flow of 20", "queue imbalance", "spread", "position")
LOBSTER_TICK = 100  # prices of a LOBSTER file are ten-thousandths of a dollar, a tick is a cent


class Quotes(NamedTuple):
    """Best quotes after every event [K]: prices in ticks, sizes in lots."""

    bid_price: Array
    bid_size: Array
    ask_price: Array
    ask_size: Array


def ofi(bid_price: ArrayLike, bid_size: ArrayLike, ask_price: ArrayLike, ask_size: ArrayLike) -> Array:
    """Equation 1: order-flow imbalance [K] of every event, 0 for the first. Bids that come and asks that go count up."""
    pb, qb, pa, qa = (np.asarray(x, dtype=np.float64) for x in (bid_price, bid_size, ask_price, ask_size))
    bids = (pb[1:] >= pb[:-1]) * qb[1:] - (pb[1:] <= pb[:-1]) * qb[:-1]
    asks = (pa[1:] <= pa[:-1]) * qa[1:] - (pa[1:] >= pa[:-1]) * qa[:-1]
    return np.concatenate([[0.0], bids - asks])


def trailing(values: Array, window: int) -> Array:
    """Sum [K] over an event and the `window` - 1 before it."""
    total = np.concatenate([[0.0], values.cumsum()])
    ends = np.arange(1, len(total))
    return total[ends] - total[np.maximum(ends - window, 0)]


def window_feature(
    bid_price: ArrayLike, bid_size: ArrayLike, ask_price: ArrayLike, ask_size: ArrayLike, window: int, eps: float = 1e-8
) -> Array:
    """Equation 2: order flow of the last `window` events over their mean depth [K]; nothing of it is known later than its event."""
    depth = (np.asarray(bid_size, dtype=np.float64) + np.asarray(ask_size)) / 2
    count = np.minimum(np.arange(len(depth)) + 1, window)
    return trailing(ofi(bid_price, bid_size, ask_price, ask_size), window) / (trailing(depth, window) / count + eps)


def spread_reward(action: ArrayLike, mid: ArrayLike, spread: ArrayLike, cost: float) -> Array:
    """Equation 4: profits [N,T] in spreads of positions [N,T] under middle prices [N,T+1] and spreads [N,T] > 0, less `cost` spreads a unit traded. The
    position before the first is 0."""
    held, price = np.asarray(action, dtype=np.float64), np.asarray(mid)
    traded = np.abs(np.diff(held, prepend=0.0, axis=-1))
    return held * np.diff(price, axis=-1) / np.asarray(spread) - cost * traded


@dataclass(frozen=True)
class Simulator:
    """Best quotes driven by a pressure x <- rho x + sigma n: buyers come with intensity lam exp(beta x), sellers with lam exp(-beta x)."""

    rho: float = 0.95  # in [0,1)
    sigma: float = 0.3  # >= 0
    beta: float = 0.5  # 0: the flow says nothing of what is to come
    lam: float = 3.0  # orders an event, > 0
    q0: int = 20  # lots of a new queue, >= 2
    p_wide: float = 0.1  # chance that the ask is quoted a tick further, in [0,1]

    def __call__(self, count: int, rng: np.random.Generator) -> Quotes:
        """Quotes after 0 to `count` events."""
        noise, x = rng.standard_normal(count), 0.0
        pressure = np.empty(count)
        for k in range(count):
            pressure[k] = x = self.rho * x + self.sigma * noise[k]
        buy, sell = self.lam * np.exp(self.beta * pressure), self.lam * np.exp(-self.beta * pressure)
        bids, asks = (rng.poisson(buy) - rng.poisson(sell)).tolist(), (rng.poisson(sell) - rng.poisson(buy)).tolist()
        wide = rng.random(count + 1) < self.p_wide
        found = np.array([*self._queues(bids, asks)], dtype=np.float64)
        return Quotes(found[:, 0], found[:, 1], found[:, 0] + 1 + wide, found[:, 2])

    def _queues(self, bids: list[int], asks: list[int]) -> Iterator[tuple[int, int, int]]:
        """Bid price and the sizes of both queues, before and after every event."""
        price, qb, qa, next_queue, most = 1000, self.q0, self.q0, max(self.q0 // 2, 1), 4 * self.q0
        yield price, qb, qa
        for bid, ask in zip(bids, asks, strict=True):
            qb, qa = min(qb + bid, most), min(qa + ask, most)
            if qa <= 0:
                price, qa, qb = price + 1, self.q0, next_queue
            elif qb <= 0:
                price, qb, qa = price - 1, self.q0, next_queue
            yield price, qb, qa


def read_order_book(file: str | Path) -> Quotes:
    """The best quotes of a LOBSTER "orderbook" file: rows ask price, ask size, bid price, bid size, then deeper levels. Rows without two sides, and
    crossed or locked ones, are dropped. Raises ValueError for a file that is not such a table or has no row left."""
    try:
        table = np.loadtxt(file, delimiter=",", ndmin=2)
    except ValueError as error:
        raise ValueError(f"{file} is not a LOBSTER orderbook file: {error}") from error
    if table.shape[1] < 4:
        raise ValueError(
            f"{file} has {table.shape[1]} columns; a LOBSTER orderbook file begins with ask price, ask size, bid price, bid size"
        )
    ask, ask_size, bid, bid_size = table[:, :4].T
    good = (ask > bid) & (bid > 0) & (ask_size > 0) & (bid_size > 0)
    if not good.any():
        raise ValueError(f"{file} has no row with a bid below an ask")
    return Quotes(bid[good] / LOBSTER_TICK, bid_size[good], ask[good] / LOBSTER_TICK, ask_size[good])


@dataclass(frozen=True)
class Market:
    """State: the number of decisions taken, the position, and of every decision of the window its middle price and spread (ticks), its flow features and
    the imbalance of its queues."""

    simulator: Simulator = Simulator()
    steps: int = 100  # decisions of an episode
    every: int = 5  # events from one to the next
    cost: float = 0.05  # spreads a unit traded, >= 0; half a spread is a market order
    recorded: Quotes | None = None  # windows are cut from it instead of simulated

    def reset(self, generator: np.random.Generator) -> Array:
        return self.begin(self.window(generator))

    def window(self, generator: np.random.Generator) -> Quotes:
        events = self.steps * self.every
        if self.recorded is None:
            return self.simulator(events, generator)
        start = int(generator.integers(len(self.recorded.bid_price) - events))
        return Quotes(*(x[start : start + events + 1] for x in self.recorded))

    def begin(self, quotes: Quotes) -> Array:
        """The state before the first decision of a window of steps * every + 1 quotes."""
        mid, spread = (quotes.bid_price + quotes.ask_price) / 2, quotes.ask_price - quotes.bid_price
        lean = (quotes.bid_size - quotes.ask_size) / (quotes.bid_size + quotes.ask_size)
        columns = [mid, spread, *(window_feature(*quotes, window=w) for w in WINDOWS), lean]
        return np.concatenate([[0.0, 0.0], *(x[:: self.every] for x in columns)])

    def known(self, state: Array) -> Array:
        """[6,T+1,N]: middle price, spread, features and imbalance at every decision of the windows in states [S,N]."""
        return state[2:].reshape(6, self.steps + 1, -1)

    def step(self, state: Array, action: NDArray) -> Moved:
        now, rows, held = state[0].astype(np.int64), np.arange(state.shape[1]), action - 1.0
        mid, spread = self.known(state)[:2]
        gain = held * (mid[now + 1, rows] - mid[now, rows]) / spread[now, rows] - self.cost * np.abs(held - state[1])
        out = state.copy()
        out[0], out[1] = now + 1, held
        return Moved(out, gain, now + 1 == self.steps)

    def observe(self, state: Array) -> NDArray[np.float32]:
        """Equation 3, [N,6] in the order of `SEEN`."""
        seen = self.known(state)[:, state[0].astype(np.int64), np.arange(state.shape[1])]
        return np.concatenate([seen[2:], seen[1:2], state[1:2]]).T.astype(np.float32)


class OrderFlow(ArrayEnvironment):
    """Observation: `SEEN`. Actions 0, 1, 2: short, flat, long until the next decision. Reward: its profit in spreads (equation 4), not yet shaped."""

    def __init__(
        self, render_mode: str | None = None, *, data: str | Path | None = None, steps: int = 100, every: int = 5, cost: float = 0.05,
        **simulator: float,
    ) -> None:  # fmt: skip
        """`data`: a LOBSTER order book file. `simulator`: fields of `Simulator`. Raises ValueError for a file shorter than an episode."""
        super().__init__(render_mode)
        recorded = None if data is None else read_order_book(data)
        if recorded is not None and len(recorded.bid_price) <= steps * every:
            raise ValueError(f"{data} has {len(recorded.bid_price)} usable rows; an episode takes {steps * every + 1}, set fewer steps")
        self.dynamics = Market(Simulator(**simulator), steps, every, cost, recorded)  # type: ignore[misc,arg-type]
        self.observation_space = gymnasium.spaces.Box(-math.inf, math.inf, (len(SEEN),), np.float32)
        self.action_space = gymnasium.spaces.Discrete(3)


if NAME not in gymnasium.registry:
    gymnasium.register(NAME, entry_point="anypo.domains.control.order_book:OrderFlow", max_episode_steps=100)
