"""Claims of Flow-GRPO and DDPO: samplers on data whose velocity is known exactly, training on eight Gaussians and on digits.

All rewards of trained models are those of the ODE with 40 steps, from held-out noise, while training drew 10 noisy steps.
"""

from __future__ import annotations

from functools import cache
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from anypo.claims import Evidence, ablation, claim
from anypo.domains.diffusion.denoise import Schedule, chain_steps, gaussian_logp, ode_schedule, sde_schedule, uniform_levels
from anypo.domains.diffusion.policy import DenoisingPolicy
from anypo.domains.diffusion.sample import as_batch, sample
from anypo.domains.diffusion.setup import build
from anypo.loops.on_policy import step
from anypo.method import Method
from anypo.methods.diffusion.flow_grpo import DDPO, METHOD, gaussian_kl, logp
from anypo.reproductions.common import ShuffledCredit
from anypo.run import Run

SEEDS = (0, 1, 2)


class ExactFlow(DenoisingPolicy):
    """The velocity E[eps - x_data | x_s] of data N(1.5, 0.5^2) in each of 4 dimensions."""

    mean, spread = 1.5, 0.5

    def velocity(self, x: Tensor, level: Tensor, condition: Any) -> Tensor:
        s = level[..., None]
        variance = (1 - s) ** 2 * self.spread**2 + s**2
        surplus = (x - (1 - s) * self.mean) / variance
        return s * surplus - (self.mean + (1 - s) * self.spread**2 * surplus)


def _without_correction(schedule: Schedule) -> Schedule:
    """The noise of the SDE on top of the plain ODE step."""
    plain = ode_schedule(schedule.level)
    return plain._replace(std=schedule.std)


def _marginals(corrected: bool) -> Evidence:
    """Mean and variance of 10,000 samples of 4 numbers by 200 steps, over those of the ODE from the same noise."""
    found, levels = {}, uniform_levels(200)
    start = torch.randn(10_000, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ode = sample(ExactFlow(), start, None, ode_schedule(levels))[:, -1]
    for a in (0.3, 0.7):
        schedule = sde_schedule(levels, a)
        schedule = schedule if corrected else _without_correction(schedule)
        x = sample(ExactFlow(), start, None, schedule, torch.Generator().manual_seed(1))[:, -1]
        found[f"a {a}"] = {"mean": round(float(x.mean() / ode.mean()), 4), "variance": round(float(x.var() / ode.var()), 4)}
    holds = all(abs(value - 1) <= 0.05 for ratios in found.values() for value in ratios.values())
    return Evidence(found, "mean and variance within 5% of the ODE's samples, at a = 0.3 and 0.7", holds)


@claim("the SDE's samples have the mean and the variance of the ODE's, however much noise it adds")
def same_marginals() -> Evidence:
    return _marginals(corrected=True)


@ablation(same_marginals, "the noise without the drift correction")
def wrong_marginals_without_correction() -> Evidence:
    return _marginals(corrected=False)


def _replay(corrected: bool) -> Evidence:
    """Largest difference between the log-probability a chain was stored with and the one recomputed from its points, mean over dimensions."""
    policy, task = build("digits:ink", None)
    prompt, levels = torch.arange(50) % 10, uniform_levels(10)
    start = torch.randn(50, 64, generator=torch.Generator().manual_seed(0))
    schedule, condition = sde_schedule(levels, 0.7), task.condition(prompt)
    x = sample(policy, start, condition, schedule, torch.Generator().manual_seed(1))
    batch = as_batch(policy, x, condition, schedule, prompt, prompt)
    velocity = policy.observe(batch, {"velocity"})["velocity"]
    again = logp(x, velocity, levels, 0.7, "mean")
    if not corrected:
        again = gaussian_logp(x[:, 1:], chain_steps(x, velocity, levels, 0.0)[0], chain_steps(x, velocity, levels, 0.7)[1], "mean")
    difference = float((again - batch.logp / 64).abs().max())
    return Evidence(difference, "at most 1e-5, so that all ratios are 1", difference <= 1e-5)


@claim("replaying a stored chain gives the log-probabilities it was drawn with")
def replay() -> Evidence:
    return _replay(corrected=True)


@ablation(replay, "the mean of the ODE's step instead of the SDE's")
def replay_with_the_wrong_mean() -> Evidence:
    return _replay(corrected=False)


def _trained(method: Method, task_name: str, steps: int, seed: int) -> tuple[dict[str, float], dict[str, float], float]:
    """Held-out numbers before and after, and the KL to the start summed over a chain's steps (mean over the last batch)."""
    policy, task = build(task_name, None)
    run = Run(method, policy, task, steps=steps, seed=seed)
    run.named_policy("reference")
    before = task.evaluate(run)
    for _ in range(steps):
        batch = step(run)
    new, old = (run.score(batch, {"mean", "log_std"}, which) for which in ("policy", "reference"))
    kl = gaussian_kl(new.mean, new.log_std, old.mean, old.log_std).sum(1).mean()
    return before, task.evaluate(run), float(kl)


PENALTY = "regularize.0.beta"


@cache
def _on_gaussians(beta: float, seed: int) -> tuple[float, float, float]:
    before, after, kl = _trained(METHOD.set(PENALTY, beta), "gaussians:0", 60, seed)
    return before["reward"], after["reward"], kl


def _rises(pairs: list[tuple[float, float]]) -> Evidence:
    found = {"before": [round(b, 3) for b, _ in pairs], "after": [round(a, 3) for _, a in pairs]}
    return Evidence(found, "half of the way from the start to 0, on every seed", all(a >= b / 2 for b, a in pairs))


@claim("trained with 10 noisy steps, the flow moves to the rewarded Gaussian when sampled by 40 steps of the ODE")
def learns_with_few_steps() -> Evidence:
    return _rises([_on_gaussians(0.0, seed)[:2] for seed in SEEDS])


@ablation(learns_with_few_steps, "the advantages dealt to the wrong chains")
def learns_nothing_from_shuffled_credit() -> Evidence:
    method = METHOD.set(PENALTY, 0.0).but(credit=ShuffledCredit(METHOD.credit))
    found = [_trained(method, "gaussians:0", 60, seed) for seed in SEEDS[:1]]
    return _rises([(before["reward"], after["reward"]) for before, after, _ in found])


def _kl(beta: float) -> Evidence:
    found = {
        "kl": round(fmean(_on_gaussians(beta, s)[2] for s in SEEDS), 3),
        "kl at beta 0": round(fmean(_on_gaussians(0.0, s)[2] for s in SEEDS), 3),
    }
    return Evidence(
        found, "the KL of a chain to the reference is at most a third of that without the penalty", found["kl"] * 3 <= found["kl at beta 0"]
    )


@claim("the closed-form KL penalty (beta 1) keeps the chains near the reference at equal updates")
def stays_near_reference() -> Evidence:
    return _kl(1.0)


@ablation(stays_near_reference, "beta 0")
def leaves_reference() -> Evidence:
    return _kl(0.0)


def _readable(beta: float) -> Evidence:
    """Digits rewarded for ink, 25 updates: the reward, and the share in which a classifier still sees the digit asked for."""
    found = [_trained(METHOD.set(PENALTY, beta), "digits:ink", 25, seed)[:2] for seed in SEEDS[:2]]
    shown = [{name: (round(before[name], 3), round(after[name], 3)) for name in before} for before, after in found]
    holds = all(after["reward"] >= before["reward"] + 0.15 and after["recognized"] >= 0.6 for before, after in found)
    return Evidence(shown, "at least 0.15 more ink, and at least 0.6 of the digits still recognized, on each of 2 seeds", holds)


@claim("rewarded for ink, digits grow bold and stay readable with the KL penalty (beta 0.04)")
def bold_and_readable() -> Evidence:
    return _readable(0.04)


@ablation(bold_and_readable, "beta 0: the pictures turn white")
def white_without_penalty() -> Evidence:
    return _readable(0.0)


def _ddpo(shuffled: bool) -> Evidence:
    """DDPO on the probability of a 3 whatever was asked for, 20 updates."""
    method = DDPO.but(credit=ShuffledCredit(DDPO.credit)) if shuffled else DDPO
    found = [_trained(method, "digits:classifier:3", 20, seed)[:2] for seed in SEEDS[:2]]
    shown = [(round(before["reward"], 3), round(after["reward"], 3)) for before, after in found]
    return Evidence(shown, "from about 0.1 to at least 0.5, on each of 2 seeds", all(b <= 0.15 and a >= 0.5 for b, a in shown))


@claim("DDPO, with ancestral steps and rewards standardized by prompt, turns all digits into threes")
def ddpo_learns() -> Evidence:
    return _ddpo(shuffled=False)


@ablation(ddpo_learns, "the advantages dealt to the wrong chains")
def ddpo_shuffled() -> Evidence:
    return _ddpo(shuffled=True)
