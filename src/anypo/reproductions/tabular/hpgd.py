"""Claims of HPGD: its gradient is that of the leader's objective, it beats a zeroth-order leader, any follower will do, cheap unbiased truncation.

The maze of two rooms: start with incentives near zero on all cells, of which almost all of the budget belongs elsewhere. The leader's objective is
exact and with the follower's best response throughout, whatever follower the leader learned with.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.tabular.leader import IncentiveRooms, LeaderPolicy, incentive_rooms
from anypo.loops.on_policy import step
from anypo.method import Method
from anypo.methods.tabular.hpgd import METHOD, VARIANTS, ExactHypergradient, TruncatedSteps, level_chances, rt_estimator
from anypo.policy import Loss, Signals
from anypo.run import MethodLoss, Run
from anypo.seams.select import UniformPrompts

SEEDS = (0, 1, 2)
EXACT = VARIANTS["exact"]


@dataclass
class DirectOnly(ExactHypergradient):
    """The leader takes the follower's policy as given."""

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        return super().__call__(batch, Signals(new | {"reward_table": new.reward_table.detach()}), run)


@dataclass
class NoAdvantage:
    """The same from trajectories."""

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        return torch.zeros_like(batch.logp)


@dataclass
class SmoothedSteps:
    """A zeroth-order leader: one-sided differences along a Gaussian direction, two followers solved a step; the step clipped to length 1."""

    spread: float = 0.5

    def __call__(self, batch: Batch, loss_fn: MethodLoss, run: Run) -> dict[str, float]:
        weights: Tensor = run.policy.weights
        direction = torch.randn(weights.shape, generator=run.generator, dtype=weights.dtype)
        with torch.no_grad():
            before = _objective(run)
            weights += self.spread * direction
            slope = (_objective(run) - before) / self.spread * direction
            weights += slope / max(float(slope.norm()), 1.0) - self.spread * direction
        return {}


def _objective(run: Run) -> float:
    return run.task.evaluate(run)["leader_objective"]


def _game(seed: int, **options: Any) -> IncentiveRooms:
    """Without the walks that exact gradients do not look at, unless `horizon` is given."""
    return incentive_rooms(seed=seed, **{"horizon": 1, **options})


def _trained(method: Method, game: IncentiveRooms, steps: int, seed: int) -> tuple[float, float]:
    """The leader's objective at the start and at the end."""
    run = Run(method, game.policy(), game, steps=steps, seed=seed)
    first = _objective(run)
    while not run.finished:
        step(run)
    return first, _objective(run)


def _slope(run: Run) -> Tensor:
    """The gradient of the loss at the run's first step."""
    method = run.begin_step()
    batch = method.rollout(method.select(run.task, run), run)
    batch.reward = method.reward(batch, run)
    run.prepare_signals(batch, method.needs("credit", "objective"))
    batch.advantage = method.credit(batch, run)
    run.policy.zero_grad()
    run.backward(batch, run.loss_fn)
    return run.policy.weights.grad.clone()


def _is_the_gradient(method: Method) -> Evidence:
    found = []
    for seed in SEEDS:
        game = _game(seed)
        run = Run(method, game.policy(), game, steps=1, seed=seed)
        weights, small = run.policy.weights, 1e-5
        with torch.no_grad():
            weights += torch.randn(weights.shape, generator=run.generator, dtype=weights.dtype)
        slope, differences = -_slope(run), torch.zeros_like(weights)
        for i in range(len(weights)):
            for sign in (1, -1):
                with torch.no_grad():
                    weights[i] += sign * small
                    differences[i] += sign * _objective(run) / (2 * small)
                    weights[i] -= sign * small
        found.append(float(f"{float((slope - differences).detach().abs().max()):.2g}"))
    return Evidence(found, "largest difference from central differences of F below 1e-6, at 3 random incentives", max(found) < 1e-6)


@claim("the exact hypergradient is the derivative of the leader's objective through the best response")
def is_the_gradient() -> Evidence:
    return _is_the_gradient(EXACT)


@ablation(is_the_gradient, "the follower's policy taken as given")
def direct_part_is_not() -> Evidence:
    return _is_the_gradient(EXACT.but(objective=DirectOnly()))


def _trajectories(method: Method, batches: int) -> Evidence:
    game = incentive_rooms(seed=0)
    exact = _slope(Run(EXACT, game.policy(), game, steps=1))
    method = method.but(select=UniformPrompts(prompts=1, group_size=20000))
    found = torch.stack([_slope(Run(method, game.policy(), game, steps=1, seed=seed)) for seed in range(batches)]).mean(0)
    error = float((found - exact).norm() / exact.norm())
    return Evidence(round(error, 4), f"relative error of the gradient from {batches * 20000} walks below 5%", error < 0.05)


@claim("the gradient from the follower's walks agrees with the exact one", slow=True)
def walks_agree() -> Evidence:
    return _trajectories(METHOD, 5)


@ablation(walks_agree, "the follower's policy taken as given (20000 walks)")
def walks_without_response() -> Evidence:
    return _trajectories(METHOD.but(credit=NoAdvantage()), 1)


@lru_cache
def _exact_run(seed: int) -> tuple[float, float]:
    return _trained(EXACT, _game(seed), 300, seed)


def _lures(runs: list[tuple[float, float]]) -> Evidence:
    found = {"start": [round(first, 3) for first, _ in runs], "end": [round(last, 3) for _, last in runs]}
    return Evidence(
        found,
        "the leader's objective, below 0.5 at the start, ends above 3.8 on 3 seeds",
        max(found["start"]) < 0.5 and min(found["end"]) > 3.8,
    )


@claim(
    "300 exact steps lead the follower to the far door, which as many solved followers do not achieve without the hypergradient", slow=True
)
def lures() -> Evidence:
    return _lures([_exact_run(seed) for seed in SEEDS])


@ablation(lures, "the follower's policy taken as given")
def direct_does_not() -> Evidence:
    return _lures([_trained(EXACT.but(objective=DirectOnly()), _game(seed), 300, seed) for seed in SEEDS])


@ablation(lures, "a zeroth-order leader, 150 steps of two followers each")
def smoothing_does_not() -> Evidence:
    return _lures([_trained(EXACT.but(update=SmoothedSteps()), _game(seed), 150, seed) for seed in SEEDS])


class Untaught(LeaderPolicy):
    """Its follower never learns and moves at random."""

    def teach(self) -> None:
        pass


def _any_follower(learns: bool) -> Evidence:
    ends = []
    for seed in SEEDS[:2]:
        game = _game(seed, follower="q_learning")
        policy = (LeaderPolicy if learns else Untaught)(game, seed)
        run = Run(EXACT, policy, game, steps=300, seed=seed)
        while not run.finished:
            step(run)
        ends.append(_objective(run))
    found = {"exact": [round(_exact_run(seed)[1], 3) for seed in SEEDS[:2]], "learning": [round(x, 3) for x in ends]}
    gaps = [abs(x / _exact_run(seed)[1] - 1) for x, seed in zip(ends, SEEDS, strict=False)]
    return Evidence(found, "the objective at the end differs by less than 10%, 2 seeds", max(gaps) < 0.1)


@claim("a follower that learns by soft Q-learning, 5000 moves a step, changes the outcome by less than 10%", slow=True)
def any_follower() -> Evidence:
    return _any_follower(True)


@ablation(any_follower, "a follower that never learns")
def not_an_untaught_one() -> Evidence:
    return _any_follower(False)


def _agnostic(method: Method) -> Evidence:
    ends = [_trained(method.set("update.learning_rate", 1.0), incentive_rooms(seed=s, follower="q_learning"), 100, s)[1] for s in SEEDS]
    return Evidence([round(x, 3) for x in ends], "the objective ends above 3 on 3 seeds", min(ends) > 3)


@claim("20 walks a step of a follower that learns by itself are enough", slow=True)
def agnostic() -> Evidence:
    return _agnostic(METHOD)


@ablation(agnostic, "the follower's policy taken as given")
def agnostic_without_response() -> Evidence:
    return _agnostic(METHOD.but(credit=NoAdvantage()))


def _truncation(corrected: bool) -> Evidence:
    settings, draws = TruncatedSteps(), 2000
    game = _game(0)
    run = Run(EXACT, game.policy(), game, steps=1)
    levels, lengths = [], [settings.first * 2**k for k in range(settings.levels + 1)]
    for length in lengths:
        run.policy.limit(length)
        levels.append(_slope(run))
    chances = level_chances(settings.levels)
    drawn = torch.multinomial(chances, draws, replacement=True, generator=torch.Generator().manual_seed(0)) + 1
    divided = chances if corrected else torch.ones_like(chances)
    each = torch.stack([rt_estimator(torch.stack(levels), divided, k).gradient for k in range(1, settings.levels + 1)])[drawn - 1]
    error = float((each.mean(0) - levels[-1]).norm())
    noise = float((each.var(0).sum() / draws).sqrt())
    # one training of n_k iterations passes n_0 and n_(k-1) on its way
    cost = float(torch.tensor(lengths)[drawn].double().mean()) / lengths[-1]
    found = {
        "error over noise": round(error / noise, 3),
        "error of the shortest": round(float((levels[0] - levels[-1]).norm()), 4),
        "share of iterations": round(cost, 3),
    }
    return Evidence(
        found,
        "the mean of 2000 draws is within 3 standard errors of the longest training, with less than 40% of its iterations",
        error < 3 * noise and cost < 0.4,
    )


@claim("randomly truncated training of the follower gives the gradient of the longest training at a fraction of its cost")
def truncation() -> Evidence:
    return _truncation(True)


@ablation(truncation, "differences not divided by their chances")
def biased_truncation() -> Evidence:
    return _truncation(False)
