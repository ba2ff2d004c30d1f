"""Claims of PPO scaling: the quadratic model, and a noisy point mass with 8, 32 and 128 environments at equal outer steps (whole episodes of 50 actions,
one layer of 16, Adam 1e-3; returns are without noise, by the likeliest actions)."""

from __future__ import annotations

from functools import cache
from statistics import fmean
from typing import NamedTuple

import torch
from gymnasium.wrappers import TimeLimit

from anypo.claims import Evidence, ablation, claim
from anypo.domains.control.noisy_point import STEPS, NoisyPoint
from anypo.domains.control.policy import ControlPolicy
from anypo.domains.control.tasks import GymTask
from anypo.loops.on_policy import step
from anypo.methods.control.ppo_scaling import METHOD, moment_recursion, scaled
from anypo.run import Run

SEEDS, FRESH = (0, 1, 2), (10, 11, 12)  # FRESH: of two claims that were worded after the results of SEEDS
HERE = METHOD.set("update.learning_rate", 1e-3)


def simulated(eta: float, n: int, seed: int, noise: bool = True) -> float:
    """Mean excess loss of 200 chains of quadratic SGD (h = 1, sigma = 1) over outer steps 200 to 2000."""
    g = torch.Generator().manual_seed(seed)
    theta, total = torch.ones(200, dtype=torch.float64), 0.0
    for k in range(2000):
        theta = theta - eta * (theta + noise * torch.randn(200, generator=g, dtype=torch.float64) / n**0.5)
        total += float((theta**2).mean() / 2) if k >= 200 else 0.0
    return total / 1800


def _plateau(noise: bool) -> Evidence:
    found = {}
    for eta in (0.1, 0.5):
        for n in (1, 16):
            found[f"eta {eta}, N {n}"] = simulated(eta, n, 0, noise) / moment_recursion(eta, 1.0, 1.0, n, 1.0, 0).plateau_loss
    holds = all(abs(ratio - 1) < 0.1 for ratio in found.values())
    return Evidence({k: round(v, 3) for k, v in found.items()}, "simulated over predicted plateau within 10% of 1", holds)


@claim("Quadratic SGD stops at the excess loss that step size and batch size predict")
def plateau_is_predicted() -> Evidence:
    return _plateau(True)


@ablation(plateau_is_predicted, "no gradient noise")
def no_noise() -> Evidence:
    return _plateau(False)


class Ended(NamedTuple):
    value: float  # noise-free return, mean of the last 5 outer steps
    snr: float  # medians over the second half
    kl: float


@cache
def trained(factor: int, variant: str, seed: int, steps: int = 25) -> Ended:
    task = GymTask("NoisyPoint-v0", envs=8, horizon=STEPS)
    quiet = GymTask(lambda **options: TimeLimit(NoisyPoint(noise=0.0, **options), STEPS))
    policy = ControlPolicy(task.spaces, hidden=(16,), seed=seed, normalize_observations=False)
    run, seen = Run(scaled(HERE, factor, variant), policy, task, steps=steps, seed=seed), []
    for i in range(steps):
        step(run)
        if steps - i <= 5:
            seen.append(float(quiet.held_out(policy, 32)[0].mean()))
    late = run.history[steps // 2 :]
    snr, kl = (float(torch.tensor([record[name] for record in late]).median()) for name in ("snr", "outer_kl"))
    return Ended(fmean(seen), snr, kl)


def _over(name: str, factors: tuple[int, ...], variant: str = "recipe", seeds: tuple[int, ...] = SEEDS) -> list[float]:
    return [round(fmean(getattr(trained(factor, variant, seed), name) for seed in seeds), 4) for factor in factors]


def _rises(factors: tuple[int, ...]) -> Evidence:
    found = _over("value", factors)
    return Evidence(
        {"return": found}, "rises from each number of environments to the next, mean of 3 seeds", found[0] < found[1] < found[2]
    )


@claim("At equal outer steps the final return rises with 8, 32 and 128 environments when minibatches are added", slow=True)
def return_rises() -> Evidence:
    return _rises((1, 4, 16))


@ablation(return_rises, "8 environments each time")
def return_stays() -> Evidence:
    return _rises((1, 1, 1))


def _against(variant: str) -> Evidence:
    mine = _over("value", (16,), variant, FRESH)[0]
    others = {name: _over("value", (16,), name, FRESH)[0] for name in ("w1", "w3")}
    return Evidence(
        {"return": mine} | others, "above larger minibatches, with the rate kept and with 16 times the rate", mine > max(others.values())
    )


@claim("With 128 environments, adding minibatches ends above enlarging them, at the same and at 16 times the learning rate", slow=True)
def recipe_is_better() -> Evidence:
    return _against("recipe")


@ablation(recipe_is_better, "enlarged minibatches at 16 times the learning rate")
def enlarged() -> Evidence:
    return _against("w3")


def _signal(factors: tuple[int, int], steps: int, seeds: tuple[int, ...]) -> Evidence:
    few, many = (fmean(trained(factor, "recipe", seed, steps).snr for seed in seeds) for factor in factors)
    return Evidence(
        {"8 environments": round(few, 3), "with the factor": round(many, 3)}, "at least 4 times as large", many >= 4 * max(few, 1e-3)
    )


@claim("At the same (untrained) policy, 128 environments have a signal-to-noise ratio at least four times that of 8", slow=True)
def signal_grows() -> Evidence:
    return _signal((1, 16), 1, FRESH)


@ablation(signal_grows, "8 environments each time")
def signal_stays() -> Evidence:
    return _signal((1, 1), 1, FRESH)


# At equal outer steps the ratio falls: with 128 environments the policy is nearer to its best, where little signal is left.
@claim("Late in training the ratio with 128 environments is at least four times that of 8", slow=True, reproduced=False)
def signal_grows_late() -> Evidence:
    return _signal((1, 16), 25, SEEDS)


@ablation(signal_grows_late, "8 environments each time")
def signal_stays_late() -> Evidence:
    return _signal((1, 1), 25, SEEDS)


@claim("An outer step goes less far, in KL, with 128 environments than with 8", slow=True, reproduced=False)
def steps_get_shorter() -> Evidence:
    few, many = _over("kl", (1, 16))
    return Evidence({"KL with 8": few, "KL with 128": many}, "less", many < few)


@ablation(steps_get_shorter, "8 environments each time")
def steps_stay() -> Evidence:
    few, many = _over("kl", (1, 1))
    return Evidence({"KL with 8": few, "KL with 8 again": many}, "less", many < few)
