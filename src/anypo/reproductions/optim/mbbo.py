"""Claims of multi-block bilevel optimization: error against the plain loop, speed-up by blocks and by samples, tracking, loss weights on digits.

Problem, step sizes and thresholds are those of the row's specification (random quadratics, m = 10, n = 5, d = 4) unless a comment says otherwise.
"Plain" is version 2 with every correction off: Hessian-inverse-vector products follow the newest sample.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import fmean

import torch
from torch import Tensor

from anypo.claims import Evidence, ablation, claim
from anypo.domains.optim.bilevel import Quadratic
from anypo.methods.optim.mbbo import PLAIN, Rates, State, optimize, start, step
from anypo.reproductions.optim.digits import digits

SEEDS = (3, 4, 5, 6, 7)  # settings were chosen on 100-113
TOUCHED = (2, 5, 10)
WAYS = {"v1": (1, Rates()), "v2": (2, Rates()), "plain": (2, PLAIN), "v1 without corrections": (1, PLAIN)}


@lru_cache
def _errors(way: str, touched: int, deviation: float = 1.0) -> list[float]:
    """Mean |grad F| over the last 100 of 2000 iterations, for each seed."""
    version, rates = WAYS[way]
    return [optimize(Quadratic.random(seed), version, touched, 2000, seed, rates, deviation) for seed in SEEDS]


def _ratio(way: str, other: str, touched: int) -> float:
    """Geometric mean over the seeds: some problems are much harder than others."""
    pairs = zip(_errors(way, touched), _errors(other, touched), strict=True)
    return round(math.exp(fmean(math.log(a / b) for a, b in pairs)), 3)


def _below_plain(way: str) -> Evidence:
    ratios = {touched: _ratio(way, "plain", touched) for touched in (2, 5)}
    return Evidence(ratios, "below 0.6 of the plain loop's at I = 2 and below 0.9 at I = 5 (5 seeds)", ratios[2] < 0.6 and ratios[5] < 0.9)


@claim(
    "with 2 of 10 blocks a step, version 1 ends with less than 0.6 of the plain loop's gradient norm, with 5 with less than 0.9", slow=True
)
def version_one() -> Evidence:
    return _below_plain("v1")


@ablation(version_one, "neither corrections nor the inverse of a tracked Hessian")
def plain_loop() -> Evidence:
    return _below_plain("plain")


def _corrected(way: str, without: str) -> Evidence:
    ratio = _ratio(way, without, 2)
    return Evidence(ratio, "at most 0.8 of the same version without corrections (5 seeds)", ratio <= 0.8)


@claim("with 2 of 10 blocks a step, the corrections lower version 2's final gradient norm by at least a fifth", slow=True)
def corrections_of_version_two() -> Evidence:
    return _corrected("v2", "plain")


@ablation(corrections_of_version_two, "no corrections")
def no_corrections_of_version_two() -> Evidence:
    return _corrected("plain", "plain")


# What separates version 1 from the plain loop is the inverse (0.93 on 14 other seeds, 2 of 10 blocks): the upper step is so small that it averages noise
# by itself, and a momentum that lets slow noise pass cannot lower the error at which x settles.
@claim("with 2 of 10 blocks a step, the corrections lower version 1's final gradient norm by at least a fifth", reproduced=False, slow=True)
def corrections_of_version_one() -> Evidence:
    return _corrected("v1", "v1 without corrections")


@claim("version 2, which inverts nothing, is never more than a tenth above the plain loop", slow=True)
def version_two() -> Evidence:
    ratios = {touched: _ratio("v2", "plain", touched) for touched in TOUCHED}
    return Evidence(ratios, "below 1.1 at I = 2, 5 and 10 (5 seeds)", max(ratios.values()) < 1.1)


def _falls(touched: tuple[int, ...]) -> Evidence:
    found = {way: [round(fmean(_errors(way, i)), 4) for i in touched] for way in ("v1", "v2")}
    holds = all(b < 0.8 * a for errors in found.values() for a, b in itertools.pairwise(errors))
    return Evidence(found, "each below 0.8 of the one before (mean of 5 seeds)", holds)


@claim("the more blocks a step touches (2, 5, 10), the lower the final gradient norm of both versions", slow=True)
def more_blocks() -> Evidence:
    return _falls(TOUCHED)


@ablation(more_blocks, "2 blocks each time")
def same_blocks() -> Evidence:
    return _falls((2, 2, 2))


def _nine_samples(deviation: float) -> Evidence:
    one, nine = fmean(_errors("v1", 10, 3.0)), fmean(_errors("v1", 10, deviation))
    return Evidence({"B = 1": round(one, 4), "B = 9": round(nine, 4)}, "at most half (mean of 5 seeds)", nine <= one / 2)


@claim("nine samples a block in place of one, of noise with deviation 3, at least halve the final gradient norm of version 1", slow=True)
def samples() -> Evidence:
    return _nine_samples(1.0)


@ablation(samples, "nine samples that are all the same")
def same_samples() -> Evidence:
    return _nine_samples(3.0)


@lru_cache
def tracking(gamma: float | None, alpha_h: float = 0.1, seeds: tuple[int, ...] = SEEDS[:3], steps: int = 600) -> tuple[float, float, float]:
    """Errors of the trackers with I = 5, x on exact gradient descent: (gradients at steps 50-150, at the last 100, Hessians after step 100)."""
    found = []
    for seed in seeds:
        problem, generator = Quadratic.random(seed), torch.Generator().manual_seed(seed)
        every = torch.arange(problem.blocks)

        def normal(size: int, generator: torch.Generator = generator) -> Tensor:
            return torch.randn(size, generator=generator, dtype=torch.float64)

        state = start(problem, normal(5), torch.zeros_like(problem.e), normal(10), version=1)
        lower, hessian = [], []
        for _ in range(steps):
            block = torch.randperm(10, generator=generator)[:5]
            new = step(problem, state, block, normal(5), Rates(gamma=gamma, alpha_h=alpha_h))
            exact = problem.at(state.x, state.y, every, torch.zeros(10, dtype=torch.float64)).gy
            lower.append(float((new.s_y - exact).norm(dim=1).mean()))
            assert new.H is not None
            hessian.append(float((new.H - problem.A).flatten(1).norm(dim=1).mean()))
            state = replace(new, x=state.x - 0.01 * problem.hypergradient(state.x).gradient)
        found.append((fmean(lower[50:150]), fmean(lower[-100:]), fmean(hessian[100:])))
    first, last, hessians = (fmean(values) for values in zip(*found, strict=True))
    return first, last, hessians


def _transient(gamma: float | None) -> Evidence:
    mine, without = tracking(gamma)[0], tracking(0.0)[0]
    return Evidence({"error": round(mine, 3), "moving average": round(without, 3)}, "less than half (mean of 3 seeds)", mine < without / 2)


@claim("while the iterates move, gamma's correction makes the lower gradient's tracker more than twice as accurate")
def transient() -> Evidence:
    return _transient(None)


@ablation(transient, "gamma = 0: a moving average")
def transient_without() -> Evidence:
    return _transient(0.0)


def _hessians(alpha_h: float) -> Evidence:
    error = tracking(None, alpha_h)[2]
    return Evidence(round(error, 4), "mean |H - A| below 0.05 after 100 steps (3 seeds)", error < 0.05)


@claim("the tracked Hessians are within 0.05 of the true ones")
def hessians() -> Evidence:
    return _hessians(0.1)


@ablation(hessians, "the newest sample in place of a tracker")
def newest_hessians() -> Evidence:
    return _hessians(1.0)


@dataclass(frozen=True)
class WeightedDigits:
    """m logistic regressions "is it the digit i?" with a loss weight 2 sigmoid(x_c) for every observed class c, shared by all blocks.

    A fifth of the training labels are wrong; f_i is the loss of y_i [65] on clean validation images. A sample is (training rows, validation rows).
    """

    train: Tensor  # [N,65], the last column is 1
    observed: Tensor  # [N]
    validation: Tensor
    labels: Tensor
    blocks: int = 5
    ridge: float = 0.01

    @classmethod
    def noisy(cls, seed: int, rows: int = 400) -> WeightedDigits:
        x, y, *_ = digits()
        g = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(x), generator=g)
        x, y = torch.cat([x, torch.ones(len(x), 1)], 1).double()[order], y[order]
        wrong = torch.rand(rows, generator=g) < 0.2
        other = (y[:rows] + torch.randint(1, 10, (rows,), generator=g)) % 10
        return cls(x[:rows], torch.where(wrong, other, y[:rows]), x[rows : 2 * rows], y[rows : 2 * rows])

    def at(self, x: Tensor, y: Tensor, block: Tensor, sample: tuple[Tensor, Tensor]) -> Logistic:
        rows, checks = sample
        a, classes, clean = self.train[rows], self.observed[rows], self.validation[checks]
        p = (y @ a.T).sigmoid()  # [I,B]
        error = p - (classes == block[:, None]).double()
        missed = (y @ clean.T).sigmoid() - (self.labels[checks] == block[:, None]).double()
        return Logistic(x, y, a, classes, p, error, missed @ clean / len(checks), self.ridge)

    def lower(self, x: Tensor, rounds: int = 12) -> Tensor:
        """y_i(x) [m,65] by Newton's method."""
        y, every = torch.zeros(self.blocks, self.train.shape[1], dtype=torch.float64), torch.arange(self.blocks)
        for _ in range(rounds):
            found = self.at(x, y, every, (torch.arange(len(self.train)), every))
            y = y - torch.linalg.solve(found.hessian(), found.gy)
        return y

    def loss(self, y: Tensor) -> float:
        """Mean validation loss of all blocks."""
        target = (self.labels == torch.arange(self.blocks)[:, None]).double()
        return float(torch.nn.functional.binary_cross_entropy_with_logits(y @ self.validation.T, target))


class Logistic:
    """Oracles of `WeightedDigits`."""

    def __init__(self, x: Tensor, y: Tensor, a: Tensor, classes: Tensor, p: Tensor, error: Tensor, fy: Tensor, ridge: float) -> None:
        share = x.sigmoid()
        weight = 2 * share[classes] / len(a)  # [B]
        self.a, self.error, self.ridge, self.fy = a, error, ridge, fy
        self.fx = x.new_zeros(len(y), len(x))
        self.gy = (weight * error) @ a + ridge * y
        self.curvature = weight * p * (1 - p)
        self.slope = torch.nn.functional.one_hot(classes, len(x)) * (weight * (1 - share[classes]))[:, None]  # [B,n] d weight / dx

    def hessian(self) -> Tensor:
        return torch.einsum("ib,bd,be->ide", self.curvature, self.a, self.a) + self.ridge * torch.eye(self.a.shape[1], dtype=self.a.dtype)

    def times_hessian(self, v: Tensor) -> Tensor:
        return (self.curvature * (v @ self.a.T)) @ self.a + self.ridge * v

    def times_mixed(self, v: Tensor) -> Tensor:
        return (self.error * (v @ self.a.T)) @ self.slope


# Step sizes for this problem, chosen on seeds 100-102; the trackers' rates are the defaults.
DIGITS = Rates(eta=3.0, tau=0.3, tau_v=0.3)


def weighted_digits(seed: int, rates: Rates, touched: int = 3, batch: int = 64) -> tuple[float, float, float]:
    """Validation loss at the minima for weights 1, for the best of some equal weights, and for the weights after 300 steps of version 2."""
    problem, g = WeightedDigits.noisy(seed), torch.Generator().manual_seed(seed)

    def rows() -> tuple[Tensor, Tensor]:
        return torch.randint(len(problem.train), (batch,), generator=g), torch.randint(len(problem.validation), (batch,), generator=g)

    x = torch.zeros(10, dtype=torch.float64)
    state: State = start(problem, x, torch.zeros(problem.blocks, 65, dtype=torch.float64), rows())
    for _ in range(300):
        state = step(problem, state, torch.randperm(problem.blocks, generator=g)[:touched], rows(), rates)
    equal = [problem.loss(problem.lower(x + level)) for level in (-3.0, -2.0, -1.0, 0.0, 1.0)]
    return equal[3], min(equal), problem.loss(problem.lower(state.x))


def _learned_weights(rates: Rates) -> Evidence:
    ones, best, learned = (fmean(values) for values in zip(*(weighted_digits(seed, rates) for seed in SEEDS[:3]), strict=True))
    found = {"weights 1": round(ones, 4), "best equal weights": round(best, 4), "learned": round(learned, 4)}
    return Evidence(
        found, "at least 4% below weights 1, 1% below the best equal ones (mean of 3 seeds)", learned < min(0.96 * ones, 0.99 * best)
    )


@claim("class weights learned by version 2 on digits with a fifth of the labels wrong give a lower validation loss than equal weights")
def learned_weights() -> Evidence:
    return _learned_weights(DIGITS)


@ablation(learned_weights, "no Hessian-inverse-vector products, so that no gradient reaches the weights")
def weights_without_products() -> Evidence:
    return _learned_weights(replace(DIGITS, tau_v=0.0))
