"""Claims of partner selection: what keeps cooperation, why spread is needed, what noise adds, and whether the equation describes the game.

60 agents, payoffs 3, 0, 5, 1, continuation 0.95, 200 steps of 0.5, logits clipped at 4 unless a claim says otherwise. Out-for-tat leaves after any
defection. Long runs show what the claims at time 100 do not: with a learning rate of 2 the cooperation that noise starts is gone in the end.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from anypo.claims import Evidence, ablation, claim
from anypo.methods.games.partner_selection import agents, landscape, simulate

AGENTS = 60
SPREAD, NARROW = 2.5, 0.05  # standard deviation of the logits at the start


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _start(spread: float, runs: int, seed: int = 0) -> Tensor:
    return spread * torch.randn(runs, AGENTS, generator=_generator(seed), dtype=torch.float64)


def _halves() -> Tensor:
    """[N]: every other agent at +3, the others at -3."""
    return torch.where(torch.arange(AGENTS) % 2 == 0, 3.0, -3.0).double()


def _rounded(x: Tensor) -> list[float]:
    return [round(float(v), 3) for v in x.reshape(-1)]


def _pays(rule: str) -> Evidence:
    """The largest gradient over an agent's own cooperation, opponents half at 0.5 + s and half at 0.5 - s."""
    x, best = torch.linspace(0.02, 0.98, 97, dtype=torch.float64), {}
    for s in (0.0, 0.2, 0.4, 0.48):
        pool = torch.tensor([0.5 + s, 0.5 - s], dtype=torch.float64).expand(len(x), 2)
        best[s] = float(landscape(x, pool, torch.ones(2, dtype=torch.float64), rule).gradient.max())
    return Evidence(
        {str(s): round(v, 3) for s, v in best.items()},
        "without spread the average reward falls with cooperation everywhere, with a spread of 0.48 it rises somewhere",
        best[0.0] < -0.1 and best[0.48] > 0.1,
    )


@claim("leaving defectors makes cooperation pay, but only where opponents differ")
def spread_makes_it_pay() -> Evidence:
    return _pays("out_for_tat")


@ablation(spread_makes_it_pay, "random matching every round")
def random_matching_never_pays() -> Evidence:
    return _pays("always_switch")


def _dies(rule: str) -> Evidence:
    starts = {
        "spread": _start(SPREAD, 8), "narrow": _start(NARROW, 8), "cooperating": torch.full((AGENTS,), 3.0).double(), "halves": _halves(),
    }  # fmt: skip
    last = {name: float(simulate(theta, rule=rule).cooperation[-1].max()) for name, theta in starts.items()}
    return Evidence({k: round(v, 3) for k, v in last.items()}, "below 0.05 from every start", max(last.values()) < 0.05)


@claim("with random matching every round cooperation dies out from every start")
def cooperation_dies() -> Evidence:
    return _dies("always_switch")


@ablation(cooperation_dies, "partner selection")
def selection_keeps_some() -> Evidence:
    return _dies("out_for_tat")


def _kept(rule: str) -> Evidence:
    spread = simulate(_start(SPREAD, 8), rule=rule).cooperation[-1]
    halves = float(simulate(_halves(), rule=rule).cooperation[-1])
    return Evidence(
        {"spread": _rounded(spread), "halves": round(halves, 3)},
        "above 0.2 in each of 8 spread populations, within 0.02 of a half where half the agents start as cooperators",
        float(spread.min()) > 0.2 and abs(halves - 0.5) < 0.02,
    )


@claim("without noise a population with spread keeps cooperating when partners are left for defecting")
def selection_keeps_cooperation() -> Evidence:
    return _kept("out_for_tat")


@ablation(selection_keeps_cooperation, "random matching every round")
def nothing_is_kept() -> Evidence:
    return _kept("always_switch")


def _no_emergence(spread: float) -> Evidence:
    last = simulate(_start(spread, 8), _generator(1), eta=0.1).cooperation[-1]
    return Evidence(_rounded(last), "below 0.05 in each of 8 runs", float(last.max()) < 0.05)


@claim("with partner selection but hardly any spread, and a learning rate of 0.1, cooperation does not emerge")
def spread_is_necessary() -> Evidence:
    return _no_emergence(NARROW)


@ablation(spread_is_necessary, "a population with spread")
def spread_suffices() -> Evidence:
    return _no_emergence(SPREAD)


def _emerges(eta: float) -> Evidence:
    start = _start(NARROW, 16)
    found = {
        rule: simulate(start, _generator(1), rule=rule, eta=eta).cooperation[-50:].mean(0) for rule in ("out_for_tat", "always_switch")
    }
    chosen, random = (float(x.mean()) for x in found.values())
    return Evidence(
        {rule: round(float(x.mean()), 3) for rule, x in found.items()} | {"single runs": _rounded(found["out_for_tat"])},
        "over the last quarter above 0.08, and at least 0.04 above random matching, mean of 16 runs",
        chosen > 0.08 and chosen - random >= 0.04,
    )


@claim("with a learning rate of 2 noise makes the spread that partner selection needs, and cooperation emerges for a time")
def noise_makes_spread() -> Evidence:
    return _emerges(2.0)


@ablation(noise_makes_spread, "a learning rate of 0.1")
def too_little_noise() -> Evidence:
    return _emerges(0.1)


def _gone(steps: int) -> Evidence:
    last = simulate(_start(NARROW, 4, seed=2), _generator(3), steps, eta=2.0).cooperation[-50:].mean(0)
    return Evidence(_rounded(last), "below 0.05 in each of 4 runs", float(last.max()) < 0.05)


@claim("the cooperation that a learning rate of 2 starts is gone by time 1000")
def emergence_is_transient() -> Evidence:
    return _gone(2000)


@ablation(emergence_is_transient, "measured at time 100")
def not_yet_gone() -> Evidence:
    return _gone(200)


def _histogram(theta: Tensor) -> Tensor:
    edges = torch.arange(-4.5, 5.0, dtype=theta.dtype)
    return torch.bucketize(theta.flatten().contiguous(), edges).bincount(minlength=len(edges) + 1).double() / theta.numel()


def _distance(one: Tensor, other: Tensor) -> float:
    """Total variation between the histograms of two sets of logits."""
    return float((_histogram(one) - _histogram(other)).abs().sum() / 2)


def _stationary(clip: float) -> Evidence:
    theta, generator, seen = _halves(), _generator(4), []
    for _ in range(60):
        theta = simulate(theta, generator, 25, eta=2.0, clip=clip).theta
        seen.append(theta)
    late = torch.stack(seen)[20:]
    found = {"earlier and later": _distance(late[:20], late[20:]), "groups": _distance(late[:, ::2], late[:, 1::2])}
    return Evidence(
        {k: round(v, 3) for k, v in found.items()} | {"cooperation": round(float(late.sigmoid().mean()), 3)},
        "total variation below 0.15 between two halves of the time from 250 to 750, and between former cooperators and former defectors",
        max(found.values()) < 0.15,
    )


# Bounds of 2 and not 4: there the stationary distribution at this learning rate is defection alone, and agreement would mean nothing.
@claim("with bounded logits, here by 2, there is one stationary distribution: time does not matter, nor how an agent began")
def forgets_its_start() -> Evidence:
    return _stationary(2.0)


@ablation(forgets_its_start, "logits without bounds")
def unbounded_logits_freeze() -> Evidence:
    return _stationary(float("inf"))


@cache
def _equation() -> Tensor:
    """[20] mean cooperation of the stochastic equation from time 30 to 40, 50 encounters an update."""
    return simulate(_start(SPREAD, 20), _generator(5), 80, eta=0.1, m=50).cooperation[-20:].mean(0)


def _agree(discount: float) -> Evidence:
    game = agents(_start(SPREAD, 20), _generator(6), 400, eta=0.1, discount=discount).cooperation[-100:].mean(0)
    equation, played = float(_equation().mean()), float(game.mean())
    return Evidence(
        {"equation": round(equation, 3), "game": round(played, 3)},
        "within 0.12 of each other, means of 20 runs",
        abs(equation - played) < 0.12,
    )


# A discount of 0.9 shortens the sight of later partners, so the game ends below the equation: by 0.08 on other seeds, 0.03 with 0.97. The
# specification's 0.1, to be widened if needed, would be within noise of that.
@claim(
    "the stochastic equation describes agents who play, leave and learn by REINFORCE: the same mean cooperation at a learning rate of 0.1",
    slow=True,
)
def equation_describes_the_game() -> Evidence:
    return _agree(0.9)


@ablation(equation_describes_the_game, "immediate rewards, blind to the next partners")
def blind_agents_do_not_follow() -> Evidence:
    return _agree(0.0)
