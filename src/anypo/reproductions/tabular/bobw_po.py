"""Claims of BOBW-PO: growth of the regret with stochastic losses, a good action that moves, fixed rates, first-order regret, exact leaders.

Two steps, two states a step, three actions, mean losses 0.35 and 0.65; eight copies of the problem at once, each with its own transitions and good
actions, are eight runs. The regret is exact, against the best fixed policy in hindsight.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from anypo.claims import Evidence, ablation, claim
from anypo.domains.tabular.tasks import EpisodicLosses
from anypo.loops.tabular import step
from anypo.method import Method
from anypo.methods.tabular.bobw_po import ftrl, with_regularizer
from anypo.run import Run

SHORT, LONG = 2400, 9600  # episodes


@lru_cache
def _regrets(
    regularizer: str, kind: str | None = None, eta: float = 0.5, cb: float = 1.0, episodes: int = SHORT, **task: float
) -> tuple[float, ...]:
    """Mean regret over the copies after SHORT episodes and at the end. `eta`: the first rate (1/c0)."""
    method: Method = with_regularizer(regularizer, kind, cb, 1 / eta)
    problem = EpisodicLosses(**task)  # type: ignore[arg-type]
    run, found = Run(method, problem.policy(), problem, steps=episodes), []
    while not run.finished:
        step(run)
        if run.step in (SHORT, episodes):
            found.append(float(problem.regret().mean()))
    return tuple(found)


def _growth(limits: dict[str, float], kind: str | None = None, eta: float = 0.5, cb: float = 1.0) -> Evidence:
    found = {}
    for name in limits:
        early, late = _regrets(name, kind, eta, cb, episodes=LONG)
        found[name] = round(late / early, 3)
    words = ", ".join(f"{name} below {limit}" for name, limit in limits.items())
    return Evidence(found, f"R(9600) / R(2400): {words} (a sqrt law gives 2, a linear one 4)", all(found[n] < limits[n] for n in limits))


@claim("with stochastic losses the regret of four times as many episodes is less than a square root law allows", slow=True)
def grows_slowly() -> Evidence:
    return _growth({"tsallis": 1.75, "shannon": 1.9})


@ablation(grows_slowly, "one fixed rate of 0.5, no bonus")
def fixed_rate_grows() -> Evidence:
    return _growth({"shannon": 1.9}, "fixed", 0.5, 0.0)


def _moving(limits: dict[str, float], kind: str | None = None, eta: float = 0.5, cb: float = 1.0) -> Evidence:
    found = {name: round(_regrets(name, kind, eta, cb, switch=1 / 3)[0] / SHORT, 4) for name in limits}
    words = ", ".join(f"{name} below {limit}" for name, limit in limits.items())
    return Evidence(found, f"regret an episode: {words} (the uniform policy has 0.2)", all(found[n] < limits[n] for n in limits))


@claim(
    "when the good action of every state moves on a third into the run, the regret an episode is below half of the uniform policy's",
    slow=True,
)
def follows_a_move() -> Evidence:
    return _moving({"tsallis": 0.06, "shannon": 0.06, "logbarrier": 0.12})


@ablation(follows_a_move, "a fixed rate of 0.001, too small to learn in this time")
def too_slow_to_follow() -> Evidence:
    return _moving({"shannon": 0.06}, "fixed", 0.001, 0.0)


def _beats_fixed(regularizer: str, kind: str | None, eta: float, cb: float) -> Evidence:
    mine = _regrets(regularizer, kind, eta, cb, episodes=LONG if kind is None else SHORT)[0]
    fixed = {rate: _regrets("shannon", "fixed", rate, 0.0)[0] for rate in (0.02, 0.5)}
    found = {"adaptive": round(mine, 1)} | {f"fixed {rate}": round(value, 1) for rate, value in fixed.items()}
    return Evidence(
        found, "R(2400) at least 5% below that of exponential weights with either fixed rate", mine < 0.95 * min(fixed.values())
    )


# Not supported with this margin: the large fixed rate is far worse, the small one (0.02) only by a few per cent at this length.
@claim(
    "the rate of each state's own has less regret on stochastic losses than exponential weights with a small or a large fixed rate",
    slow=True,
    reproduced=False,
)
def adapts() -> Evidence:
    return _beats_fixed("tsallis", None, 0.5, 1.0)


@ablation(adapts, "the Tsallis leader with a fixed rate of 0.5, no bonus")
def does_not_adapt() -> Evidence:
    return _beats_fixed("tsallis", "fixed", 0.5, 0.0)


def _first_order(kind: str) -> Evidence:
    large, small = (_regrets("logbarrier", kind, good=good, others=others)[0] for good, others in ((0.35, 0.65), (0.02, 0.32)))
    found = {"losses 0.35/0.65": round(large, 1), "losses 0.02/0.32": round(small, 1), "ratio": round(small / large, 3)}
    return Evidence(found, "with small losses of the same gaps R(2400) is below 0.75 of that with large ones", small < 0.75 * large)


@claim("with the log-barrier and a rate that follows the data the regret falls with the loss of the best policy", slow=True)
def first_order() -> Evidence:
    return _first_order("data")


@ablation(first_order, "the rate from the occupancy alone")
def not_first_order() -> Evidence:
    return _first_order("tsallis")


def _slope(policy: Tensor, regularizer: str) -> Tensor:
    """Derivative of each regularizer in p."""
    return {"tsallis": -(policy**-0.5), "shannon": policy.log() + 1, "logbarrier": -1 / policy}[regularizer]


def _optimal(solver: dict[str, str]) -> Evidence:
    generator = torch.Generator().manual_seed(0)
    loss = 5 * torch.randn(200, 6, generator=generator, dtype=torch.float64)
    eta = 0.05 + torch.rand(200, generator=generator, dtype=torch.float64)
    found = {}
    for name, solved_by in solver.items():
        condition = loss + _slope(ftrl(loss, eta, solved_by).policy, name) / eta[:, None]
        found[name] = float(f"{float((condition.amax(1) - condition.amin(1)).max()):.2g}")
    return Evidence(found, "C + psi'(p)/eta is the same for all actions to 1e-6, for every regularizer", max(found.values()) < 1e-6)


@claim("the leaders satisfy the optimality condition of their problem")
def optimal() -> Evidence:
    return _optimal({name: name for name in ("tsallis", "shannon", "logbarrier")})


@ablation(optimal, "exponential weights for every regularizer")
def not_optimal() -> Evidence:
    return _optimal(dict.fromkeys(("tsallis", "shannon", "logbarrier"), "shannon"))
