"""Claims of RAT: transformed advantages are natural gradients, block Kaczmarz steps converge to them, and the direction is that of the analytic
natural gradient where the vanilla one is not; that it keeps up with TRPO on CartPole, without conjugate gradient, does not hold here."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from anypo.claims import Evidence, ablation, claim
from anypo.domains.control.setup import build
from anypo.loops import on_policy
from anypo.method import Method
from anypo.methods.control.rat import METHOD as RAT
from anypo.methods.control.rat import dual_sweep, kaczmarz, normalized, transformed_advantages, transformed_loss
from anypo.methods.control.trpo import METHOD as TRPO
from anypo.reproductions.common import ShuffledCredit
from anypo.run import Run

SEEDS = (0, 1, 2)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _problem(samples: int, parameters: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random scores [B,P], advantages [B] and ratios [B] in [0.5, 1.5]."""
    g = _generator(seed)
    scores = torch.randn(samples, parameters, generator=g, dtype=torch.float64)
    return scores, torch.randn(samples, generator=g, dtype=torch.float64), 0.5 + torch.rand(samples, generator=g, dtype=torch.float64)


def _identity(ratios_in_the_gram: bool) -> Evidence:
    worst = 0.0
    for seed, (samples, parameters) in enumerate(((6, 20), (40, 10), (64, 200))):
        scores, y, ratio = _problem(samples, parameters, seed)
        weighted = (ratio / samples)[:, None] * scores
        exact = torch.linalg.solve(0.1 * torch.eye(parameters, dtype=torch.float64) + scores.T @ weighted, weighted.T @ y)
        seen = ratio if ratios_in_the_gram else torch.ones_like(ratio)
        transformed = transformed_advantages(scores, y, seen, 0.1).y
        theta = torch.zeros(parameters, dtype=torch.float64, requires_grad=True)
        whole = torch.ones(samples, 1, dtype=torch.bool)
        loss = transformed_loss((scores @ theta)[:, None], ratio[:, None], transformed[:, None], whole)
        worst = max(worst, float((torch.autograd.grad(loss, theta)[0] + exact).abs().max()))
    return Evidence(worst, "largest difference below 1e-8", worst < 1e-8)


@claim("Backpropagating the transformed advantages gives minus the Tikhonov-regularized natural gradient of parameter space, to 1e-8")
def backpropagation_gives_the_natural_gradient() -> Evidence:
    return _identity(ratios_in_the_gram=True)


@ablation(backpropagation_gives_the_natural_gradient, "the ratios are left out of the sample-space system")
def ratios_left_out() -> Evidence:
    return _identity(ratios_in_the_gram=False)


def _errors(parameters: int, size: int, seed: int, subtract: bool = True) -> list[float]:
    """|g_j - g*| over 50 random blocks of 256 samples, for advantages H g* that the scores explain; lambda 0.1."""
    scores, _, ratio = _problem(256, parameters, seed)
    wanted = torch.randn(parameters, generator=_generator(seed + 100), dtype=torch.float64)
    g, errors, y = torch.zeros_like(wanted), [float(wanted.norm())], scores @ wanted
    for _ in range(50):
        block = torch.randperm(256, generator=_generator(1000 * seed + len(errors)))[:size]
        target = y if subtract else y + scores @ g  # the step removes H g from its target: adding it back takes the correction out
        g = kaczmarz(scores, target, ratio, [block.tolist()], g, 0.1).g
        errors.append(float((g - wanted).norm()))
    return errors


def _convergence(subtract: bool) -> Evidence:
    runs = [_errors(parameters, size, seed, subtract) for parameters in (10, 50) for size in (16, 64) for seed in SEEDS]
    falls = all(after <= before * (1 + 1e-12) + 1e-12 for run in runs for before, after in zip(run, run[1:], strict=False))
    gains = min(run[0] / max(run[-1], 1e-300) for run in runs)
    measured = {"smallest factor": float(f"{gains:.3g}"), "monotone": falls}
    return Evidence(measured, "never rises, and falls by more than 10 in 50 blocks, in all 12 runs", falls and gains > 10)


@claim(
    "Random block Kaczmarz steps approach the direction that explains the advantages monotonically, and by more than 10 times in 50 blocks"
)
def kaczmarz_converges() -> Evidence:
    return _convergence(subtract=True)


@ablation(kaczmarz_converges, "what the direction explains already is not taken off the advantages")
def kaczmarz_without_residual() -> Evidence:
    return _convergence(subtract=False)


def _sweeps(damped: bool) -> Evidence:
    """Relative error of the transform after 50 sweeps at lambda 0.1 and 10 at lambda 1, over blocks of 32; 256 samples, 20 parameters."""
    errors = []
    for lam, sweeps in ((0.1, 50), (1.0, 10)):
        for seed in SEEDS:
            scores, y, ratio = _problem(256, 20, seed)
            exact, g = transformed_advantages(scores, y, ratio, lam).y, _generator(seed)
            found, direction = torch.zeros_like(y), torch.zeros(20, dtype=torch.float64)
            for _ in range(sweeps):
                blocks = torch.randperm(256, generator=g).view(-1, 32)
                if damped:
                    found = dual_sweep(scores, y, ratio, blocks, found, lam).y
                else:  # plain Kaczmarz remembers no transform, so its limit is the least-squares direction
                    direction = kaczmarz(scores, y, ratio, blocks, direction, lam).g
                    found = (y - scores @ direction) / lam
            errors.append(float((found - exact).norm() / exact.norm()))
    return Evidence(float(f"{max(errors):.3g}"), "relative error below 1e-3 in all 6 runs", max(errors) < 1e-3)


@claim("Dual sweeps reach the exact transform of the whole batch within 1e-3, in 50 sweeps at lambda 0.1 and 10 at lambda 1")
def dual_sweeps_are_exact() -> Evidence:
    return _sweeps(damped=True)


@ablation(dual_sweeps_are_exact, "plain Kaczmarz sweeps, which forget the transform")
def plain_sweeps_are_not() -> Evidence:
    return _sweeps(damped=False)


def _cosines(std: float, natural: bool) -> list[float]:
    """A 2-D Gaussian's mean is to go towards a target 0.5 away, 1024 samples of minus the squared distance: cosine with the analytic natural gradient.

    Parameters: mean and log standard deviation; Fisher matrix diag(1/std^2, 1/std^2, 2, 2); gradient of E[-|a - t|^2]: (2 (t - mean), -2 std^2).
    """
    cosines = []
    for seed in SEEDS:
        noise = torch.randn(1024, 2, generator=_generator(seed), dtype=torch.float64)
        angle = 0.7 + seed
        target = 0.5 * torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64)
        action = std * noise
        worth = normalized(-((action - target) ** 2).sum(1))
        scores = torch.cat([noise / std, noise**2 - 1], dim=1)
        spread = torch.full((2,), std, dtype=torch.float64)
        analytic = torch.cat([2 * target * spread**2, -(spread**2)])  # the inverse Fisher matrix times the gradient
        ones = torch.ones_like(worth)
        found = transformed_advantages(scores, worth, ones, 1e-3).natural_gradient if natural else scores.T @ worth / 1024
        cosines.append(float(torch.cosine_similarity(found, analytic, dim=0)))
    return cosines


def _direction(natural: bool) -> Evidence:
    cosines = _cosines(0.1, natural)
    return Evidence([round(c, 3) for c in cosines], "above 0.95 in every one of 3 seeds", min(cosines) > 0.95)


@claim("For a 2-D Gaussian whose standard deviations are 0.1, the direction's cosine with the analytic natural gradient is above 0.95")
def direction_is_natural() -> Evidence:
    return _direction(natural=True)


@ablation(direction_is_natural, "the vanilla gradient, whose cosine is near 0.6")
def vanilla_direction_is_not() -> Evidence:
    return _direction(natural=False)


def _cartpole(method: Method, seed: int) -> float:
    """Mean return over 20 held-out starts after 20 steps of 1024 actions."""
    torch.set_num_threads(1)
    policy, task = build("CartPole-v1", None, seed=seed, envs=8, horizon=128)
    return task.evaluate(on_policy.train(Run(method, policy, task, steps=20, seed=seed)))["return"]


def _keeps_up(method: Method, seeds: tuple[int, ...]) -> Evidence:
    pairs = [(_cartpole(method, seed), _cartpole(TRPO, seed)) for seed in seeds]
    measured = {"rat": [round(mine) for mine, _ in pairs], "trpo": [round(theirs) for _, theirs in pairs]}
    mine, theirs = (sum(column) for column in zip(*pairs, strict=True))
    return Evidence(measured, "at least 0.9 times TRPO's return at equal samples, mean of the seeds", mine >= 0.9 * theirs)


# It held for seeds 0 and 1 until a change of rounding; over four seeds RAT misses by a little (449 of TRPO's 500), and with 15 batches of 2048 by more
# (409): single seeds fall back to 200 to 400 after they had reached 500, where TRPO stays.
@claim("On CartPole-v1 RAT's return after 20480 steps is at least TRPO's minus 10%, mean of four seeds", slow=True, reproduced=False)
def keeps_up_with_trpo() -> Evidence:
    return _keeps_up(RAT, (0, 1, 2, 3))


@ablation(keeps_up_with_trpo, "advantages dealt to the wrong environments")
def keeps_up_without_credit() -> Evidence:
    return _keeps_up(RAT.but(credit=ShuffledCredit(RAT.credit)), (0,))
