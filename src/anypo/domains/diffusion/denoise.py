"""Denoising steps as mathematics: what one step of a flow or diffusion sampler does, and how probable it is.

Level s runs from 1 (pure noise) to 0 (data) along x_s = (1-s) x_data + s eps; the network predicts the velocity v = eps - x_data. A sampler visits
levels s_0 > s_1 > ... > s_T; step k is a Gaussian whose mean is affine in x and v, so every sampler here is a `Schedule` of three numbers a step.
Sources: Flow-GRPO (arXiv:2505.05470) for the SDE, DDPO (arXiv:2305.13301) and DDIM (arXiv:2010.02502) for the other.
Left out: higher-order solvers (their steps look at several network outputs) and learned variances.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)
Number = float | Tensor  # a level or a coefficient: one number, or a tensor that broadcasts against x


class Step(NamedTuple):
    """One Gaussian step: its mean [...,D], its standard deviation and what it led to."""

    mean: Tensor
    std: Tensor
    x_next: Tensor


class Schedule(NamedTuple):
    """A sampler: step k goes from level[k] to level[k+1] with mean keep[k] x + pull[k] v and standard deviation std[k] (0: no noise)."""

    level: Float[Tensor, " T+1"]
    keep: Float[Tensor, " T"]
    pull: Float[Tensor, " T"]
    std: Float[Tensor, " T"]

    @property
    def steps(self) -> int:
        """T."""
        return len(self.keep)


def uniform_levels(steps: int, first: float = 1.0, last: float = 0.0) -> Float[Tensor, " T+1"]:
    """Evenly spaced levels from `first` down to `last`. Raises ValueError for less than one step."""
    if steps < 1:
        raise ValueError(f"a sampler needs at least 1 step, not {steps}")
    return torch.linspace(first, last, steps + 1, dtype=torch.float64)


def predicted_data(x: Tensor, vel: Tensor, s: Number) -> Tensor:
    """The data that the velocity at (x, s) points to: x - s v."""
    return x - s * vel


def predicted_noise(x: Tensor, vel: Tensor, s: Number) -> Tensor:
    """The noise that the velocity at (x, s) explains x by: x + (1-s) v."""
    return x + (1 - s) * vel


def noise_scale(s: Number, s_first: Number, a: float) -> Tensor:
    """Flow-GRPO's diffusion coefficient g = a sqrt(s / (1-s)); at s = 1 the denominator is 1 - s_first, s_first being the second level."""
    s, s_first = torch.as_tensor(s, dtype=torch.float64), torch.as_tensor(s_first, dtype=torch.float64)
    return a * (s / (1 - torch.where(s == 1, s_first, s))).sqrt()


def sde_mean(x: Tensor, vel: Tensor, s: Number, s_next: Number, scale: Number) -> Tensor:
    """Mean of the Euler-Maruyama step with diffusion coefficient `scale`, whose drift correction keeps the ODE's marginals."""
    return x + (vel + scale**2 / (2 * s) * predicted_noise(x, vel, s)) * (s_next - s)


def sde_step(x: Tensor, vel: Tensor, noise: Tensor, s: Number, s_next: Number, s_first: Number, a: float) -> Step:
    """One step of Flow-GRPO's SDE; with a = 0 the step of the ODE. x, vel, noise [...,D]."""
    scale = noise_scale(s, s_first, a)
    std = scale * torch.as_tensor(s - s_next, dtype=torch.float64).sqrt()
    mean = sde_mean(x, vel, s, s_next, scale)
    return Step(mean, std, mean + std * noise)


def ode_step(x: Tensor, vel: Tensor, s: Number, s_next: Number) -> Tensor:
    """Euler step of the probability flow: x + v (s_next - s)."""
    return x + vel * (s_next - s)


def noisy_schedule(level: Float[Tensor, " T+1"], scale: Float[Tensor, " T"]) -> Schedule:
    """The SDE's sampler over a decreasing grid of levels, with a diffusion coefficient for each step; 0 = a step of the ODE."""
    s, change = level[:-1], level[1:] - level[:-1]
    correction = scale**2 / (2 * s)
    return Schedule(level, 1 + correction * change, change * (1 + correction * (1 - s)), scale * (-change).sqrt())


def sde_schedule(level: Float[Tensor, " T+1"], a: float) -> Schedule:
    """Flow-GRPO's sampler over a decreasing grid of levels; with a = 0 the ODE sampler."""
    return noisy_schedule(level, noise_scale(level[:-1], level[1], a))


def ode_schedule(level: Float[Tensor, " T+1"]) -> Schedule:
    """The deterministic sampler, for evaluation."""
    return sde_schedule(level, 0.0)


def cumulative_alpha(s: Number) -> Tensor:
    """The variance-preserving abar of level s: the flow's point x over sqrt((1-s)^2 + s^2) is sqrt(abar) x_data + sqrt(1-abar) eps."""
    s = torch.as_tensor(s, dtype=torch.float64)
    return (1 - s) ** 2 / ((1 - s) ** 2 + s**2)


def ddim_std(abar_t: Number, abar_p: Number, eta: float, min_std: float = 0.0) -> Tensor:
    """Standard deviation of the DDIM step from abar_t to the less noisy abar_p: 0 for eta = 0, the ancestral DDPM step for eta = 1."""
    abar_t, abar_p = torch.as_tensor(abar_t, dtype=torch.float64), torch.as_tensor(abar_p, dtype=torch.float64)
    return (eta * ((1 - abar_p) / (1 - abar_t)).sqrt() * (1 - abar_t / abar_p).sqrt()).clamp(min=min_std)


def ddim_mean(x: Tensor, eps_pred: Tensor, abar_t: Number, abar_p: Number, std: Number) -> Tensor:
    """Mean of the DDIM step for a network that predicts the noise; x and eps_pred [...,D] in variance-preserving coordinates."""
    abar_t, abar_p = torch.as_tensor(abar_t, dtype=torch.float64), torch.as_tensor(abar_p, dtype=torch.float64)
    data = (x - (1 - abar_t).sqrt() * eps_pred) / abar_t.sqrt()
    return abar_p.sqrt() * data + (1 - abar_p - std**2).clamp(min=0).sqrt() * eps_pred


def ddim_schedule(level: Float[Tensor, " T+1"], eta: float) -> Schedule:
    """The same DDIM step in the flow's coordinates, for a network that predicts the velocity: no singularity at s = 1, and at eta = 0 the Euler
    step of the ODE exactly. A last step to level 0 has no noise."""
    s, following = level[:-1], level[1:]
    size = ((1 - following) ** 2 + following**2).sqrt()
    std = size * ddim_std(cumulative_alpha(s), cumulative_alpha(following), eta)
    rest = (following**2 - std**2).clamp(min=0).sqrt()
    return Schedule(level, (1 - following) + rest, rest * (1 - s) - (1 - following) * s, std)


def reduced(values: Float[Tensor, "*N D"], reduce: str) -> Float[Tensor, "*N"]:
    """Sum or mean over the last axis. Raises ValueError for another name."""
    if reduce not in ("sum", "mean"):
        raise ValueError(f"unknown reduction '{reduce}'; use sum or mean")
    return values.sum(-1) if reduce == "sum" else values.mean(-1)


def gaussian_logp(x_next: Tensor, mean: Tensor, std: Number, reduce: str = "sum") -> Float[Tensor, "*N"]:
    """Log-density of x_next [...,D] under N(mean, std^2), std > 0 broadcast against it; the gradient flows through `mean` alone."""
    std = torch.as_tensor(std, dtype=mean.dtype)
    return reduced(-(((x_next.detach() - mean) / std) ** 2) / 2 - std.log() - HALF_LOG_TWO_PI, reduce)


def gaussian_kl(mean: Tensor, other_mean: Tensor, std: Number, reduce: str = "sum") -> Float[Tensor, "*N"]:
    """KL(N(mean, std^2) || N(other_mean, std^2)) of [...,D]; symmetric, since the deviations are equal."""
    return reduced(((mean - other_mean) / std) ** 2 / 2, reduce)


def chain_steps(x: Float[Tensor, "N T+1 D"], vel: Float[Tensor, "N T D"], sigma: Tensor, a: float) -> tuple[Tensor, Tensor]:
    """Means [N,T,D] and standard deviations [T,1] of the SDE's steps along stored chains, `sigma` being their T+1 levels."""
    level = torch.as_tensor(sigma, dtype=torch.float64)
    s, following = level[:-1, None], level[1:, None]
    scale = noise_scale(s, level[1], a)
    return sde_mean(x[:, :-1], vel, s, following, scale).to(vel.dtype), (scale * (s - following).sqrt()).to(vel.dtype)


def logp(x: Float[Tensor, "N T+1 D"], vel: Float[Tensor, "N T D"], sigma: Tensor, a: float, reduce: str) -> Float[Tensor, "N T"]:
    """Log-probability of every step of stored chains under the velocities `vel` at their points."""
    mean, std = chain_steps(x, vel, sigma, a)
    return gaussian_logp(x[:, 1:], mean, std, reduce)


def kl(x: Tensor, vel: Tensor, ref_vel: Float[Tensor, "N T D"], sigma: Tensor, a: float, reduce: str) -> Float[Tensor, "N T"]:
    """KL of every step of stored chains [N,T+1,D] from the sampler with `vel` to the one with `ref_vel`."""
    mean, std = chain_steps(x, vel, sigma, a)
    return gaussian_kl(mean, chain_steps(x, ref_vel, sigma, a)[0], std, reduce)
