"""Claims of order-flow trading on the simulated book: windows of 40 decisions, 60 updates of 8 windows with 8 attempts each, networks of 32 x 2, Adam at
1e-2 (a run takes about 3 s); 32 held-out windows, likeliest actions, profits in spreads and not shaped."""

from __future__ import annotations

from functools import cache
from statistics import fmean
from typing import NamedTuple

import numpy as np
import torch
from gymnasium.wrappers import TimeLimit
from numpy.typing import NDArray

from anypo.claims import Evidence, ablation, claim
from anypo.domains.control.collect import Actor, Trajectories
from anypo.domains.control.order_book import Market, OrderFlow, Simulator, ofi, trailing
from anypo.domains.control.policy import ControlPolicy
from anypo.domains.control.tasks import GymTask
from anypo.loops.on_policy import train
from anypo.methods.control.orderflow import FLOW, METHOD, VARIANTS, QTable, metrics, trade
from anypo.run import Run

SEEDS = (0, 1)
STEPS, UPDATES, WINDOWS, ATTEMPTS = 40, 60, 8, 8
HELD_OUT = np.arange(1_000_000, 1_000_032)  # training seeds are below


class Result(NamedTuple):
    """Means over the held-out windows."""

    profit: float
    drawdown: float


def market(beta: float) -> GymTask:
    return GymTask(lambda **options: TimeLimit(OrderFlow(steps=STEPS, beta=beta, **options), STEPS))


def result(seen: Trajectories) -> Result:
    found = metrics(torch.from_numpy(seen.reward).double())
    return Result(float(found.net_pnl.mean()), float(found.max_drawdown.mean()))


@cache
def learned(variant: str, seed: int, beta: float = 0.5, kappa: float = 1.0, updates: int = UPDATES) -> Result:
    """A trained policy; without updates one that acts at random."""
    task = market(beta)
    policy = ControlPolicy(task.spaces, hidden=(32, 32), seed=seed)
    if not updates:
        rng = np.random.default_rng(seed)
        return result(trade(task, policy.actor(), HELD_OUT, lambda n: policy.noise(rng, (n,))))
    method = (METHOD if variant == "grpo" else VARIANTS[variant]).set("reward.kappa", kappa)
    train(Run(method.set("update.learning_rate", 1e-2).set("select.prompts", WINDOWS), policy, task, steps=updates, seed=seed))
    return result(trade(task, policy.actor(), HELD_OUT))


def at_random(rng: np.random.Generator) -> Actor:
    return lambda seen, noise: rng.integers(3, size=len(seen))


@cache
def baseline(seed: int) -> tuple[Result, Result]:
    """Q-learning after as many steps of the market, and actions at random."""
    rng, task = np.random.default_rng(seed), market(0.5)

    def draw(act: Actor) -> Trajectories:
        return trade(task, act, rng.integers(1_000_000, size=WINDOWS * ATTEMPTS))

    first = draw(at_random(rng))
    table = QTable(first.observation[..., FLOW])
    table.learn(first)
    for _ in range(UPDATES - 1):
        table.learn(draw(table.actor(rng)))
    return result(trade(task, table.actor(), HELD_OUT)), result(trade(task, at_random(rng), HELD_OUT))


def rounded(results: list[Result]) -> list[list[float]]:
    return [[round(x, 2) for x in r] for r in results]


def against_baselines(updates: int) -> Evidence:
    found = {name: [learned(name, seed, updates=updates) for seed in SEEDS] for name in ("grpo", "gspo")}
    table, chance = ([baseline(seed)[i] for seed in SEEDS] for i in (0, 1))
    holds = all(
        mine.profit > q.profit and mine.drawdown < q.drawdown and mine.profit > r.profit and r.profit < 0
        for results in found.values()
        for mine, q, r in zip(results, table, chance, strict=True)
    )
    measured = {name: rounded(results) for name, results in {**found, "q-learning": table, "at random": chance}.items()}
    return Evidence(measured, "in both seeds more profit and less drawdown than q-learning, and chance loses", holds)


@claim(
    "GRPO and GSPO on order flow earn more than tabular Q-learning after as many steps, with less drawdown; trading at random loses",
    slow=True,
)
def beats_the_table() -> Evidence:
    return against_baselines(UPDATES)


@ablation(beats_the_table, "no training")
def without_training() -> Evidence:
    return against_baselines(0)


def blind(beta: float) -> Evidence:
    found, told = ([learned("grpo", seed, beta=b) for seed in SEEDS] for b in (beta, 0.5))
    share = fmean(r.profit for r in found) / fmean(r.profit for r in told)
    measured = {"share": round(share, 3), "profit and drawdown": rounded(found)}
    return Evidence(measured, "at most a third of the profit with beta 0.5", share <= 1 / 3)


@claim("Where flow says nothing of the pressure (beta 0) the policy earns at most a third of what it earns with beta 0.5", slow=True)
def lives_on_the_flow() -> Evidence:
    return blind(0.0)


@ablation(lives_on_the_flow, "the flow still tells")
def still_told() -> Evidence:
    return blind(0.5)


def calmer(kappa: float) -> Evidence:
    plain, wary = ([learned("grpo", seed, kappa=k) for seed in SEEDS] for k in (0.0, kappa))
    less = 1 - fmean(r.drawdown for r in wary) / fmean(r.drawdown for r in plain)
    measured = {"drawdown less by": round(less, 3), "kappa 0": rounded(plain), f"kappa {kappa:g}": rounded(wary)}
    return Evidence(measured, "at least 15% less", less >= 0.15)


@claim("Losses that count four times (kappa 3) lower the mean largest drawdown of the learned policy by at least 15%", slow=True)
def is_wary() -> Evidence:
    return calmer(3.0)


@ablation(is_wary, "losses count as gains do")
def is_bold() -> Evidence:
    return calmer(0.0)


def flipped(bid_price: NDArray, bid_size: NDArray, ask_price: NDArray, ask_size: NDArray) -> NDArray:
    """Order flow in which asks count as bids do."""
    bids = ofi(bid_price, bid_size, np.zeros_like(ask_price), np.zeros_like(ask_size))
    return 2 * bids - ofi(bid_price, bid_size, ask_price, ask_size)


def correlation(beta: float, right: bool) -> float:
    """Of the flow over 20 events with the change of the middle price to the next decision, over 200 windows."""
    setting, flows, changes = Market(Simulator(beta=beta), steps=STEPS), [], []
    for seed in range(200):
        quotes = setting.window(np.random.default_rng(seed))
        depth = trailing((quotes.bid_size + quotes.ask_size) / 2, 20)
        flow = trailing((ofi if right else flipped)(*quotes), 20) / depth
        flows.append(flow[:: setting.every][4:-1])  # from the first full window on
        changes.append(np.diff(((quotes.bid_price + quotes.ask_price) / 2)[:: setting.every])[4:])
    return float(np.corrcoef(np.concatenate(flows), np.concatenate(changes))[0, 1])


def foretells(right: bool) -> Evidence:
    told, blind_ = correlation(0.5, right), correlation(0.0, right)
    return Evidence({"beta 0.5": round(told, 3), "beta 0": round(blind_, 3)}, "above 0.3 and below 0.1", told > 0.3 and blind_ < 0.1)


@claim(
    "Order flow over 20 events correlates with the next change of the middle price by over 0.3 with beta 0.5 and by less than 0.1 with beta 0"
)
def flow_foretells() -> Evidence:
    return foretells(True)


@ablation(flow_foretells, "asks counted with the sign of bids")
def wrong_sign() -> Evidence:
    return foretells(False)
