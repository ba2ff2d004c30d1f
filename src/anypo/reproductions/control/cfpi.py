"""Claims of CFPI: the closed forms against random search and their constraints, two modes that no average should hide, and Pendulum from a mixture of
three noisy controllers (30000 steps). Networks (64,64), minibatches of 128, Adam 1e-3, 3840 critic updates, discount 0.95."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anypo.claims import Evidence, ablation, claim
from anypo.domains.control.collect import episodes
from anypo.domains.control.mixture import MixtureActorCritic
from anypo.domains.control.replay import Recording, joined
from anypo.domains.control.setup import build
from anypo.domains.control.tasks import EVALUATION_SEED
from anypo.loops import off_policy
from anypo.methods.control.cfpi import METHOD, Judge, delta, improved, jensen, jensen_center, lse_components, mixture_logpdf, single
from anypo.reproductions.control.spot import Arcs, Recorded, controller, record
from anypo.run import Run

LOG_TAU = 0.5


def covariances(generator: torch.Generator, *shape: int, d: int) -> Tensor:
    """Random positive definite matrices [*shape,d,d]."""
    half = torch.randn(*shape, d, d, generator=generator, dtype=torch.float64)
    return half @ half.mT + 0.1 * torch.eye(d, dtype=torch.float64)


def _best(natural: bool) -> Evidence:
    """The shifted mean against 100000 points that keep the limit, half of them on its surface; margins in units of the largest possible gain."""
    margins, slack = [], []
    for seed in range(5):
        g = torch.Generator().manual_seed(seed)
        mean, slope = torch.randn(2, 3, generator=g, dtype=torch.float64)
        cov = covariances(g, d=3)
        radius = (2 * LOG_TAU) ** 0.5
        found = single(mean, cov, slope, LOG_TAU)
        if not natural:
            found = mean + radius * slope / (slope @ torch.linalg.solve(cov, slope)).sqrt()
        direction = torch.randn(100_000, 3, generator=g, dtype=torch.float64)
        length = torch.rand(100_000, 1, generator=g, dtype=torch.float64) ** (1 / 3)
        length[:50_000] = 1
        points = mean + radius * length * direction / direction.norm(dim=1, keepdim=True) @ torch.linalg.cholesky(cov).T
        gain = radius * float((slope @ cov @ slope).sqrt())
        margins.append(float((found @ slope - (points @ slope).max()) / gain))
        density = mixture_logpdf(torch.ones(1, dtype=torch.float64), mean[None], cov[None], found)
        slack.append(abs(float(density + delta(torch.ones(1, dtype=torch.float64), cov[None], LOG_TAU))))
    measured = {"smallest margin": f"{min(margins):.1e}", "largest slack of the limit": f"{max(slack):.1e}"}
    return Evidence(measured, "no margin below 0 and no slack above 1e-8, in 5 problems", min(margins) >= 0 and max(slack) < 1e-8)


@claim("For a linear Q and a Gaussian the closed form beats 100000 random actions that keep the density limit, and the limit binds")
def closed_form_is_optimal() -> Evidence:
    return _best(natural=True)


@ablation(closed_form_is_optimal, "a step along the plain gradient to the same limit")
def plain_gradient_is_not() -> Evidence:
    return _best(natural=False)


def _constraints(stretch: float) -> Evidence:
    """The largest excess over each limit in 2000 random mixtures of 4 Gaussians in 3 dimensions; shifts are multiplied by `stretch`."""
    g = torch.Generator().manual_seed(0)
    weights = torch.randn(2000, 4, generator=g, dtype=torch.float64).softmax(-1)
    means, covs = torch.randn(2000, 4, 3, generator=g, dtype=torch.float64), covariances(g, 2000, 4, d=3)
    gradients, limit = torch.randn(2000, 5, 3, generator=g, dtype=torch.float64), delta(weights, covs, 2.0)
    parts = lse_components(weights, means, covs, gradients[:, :4], limit)
    moved = means + stretch * (parts.mu - means)
    normal = torch.distributions.MultivariateNormal(means, covs)
    own = -(weights.log() + normal.log_prob(moved)) - limit[:, None]
    whole = -mixture_logpdf(weights[:, None], means[:, None], covs[:, None], moved) - limit[:, None]
    pooled = jensen(weights, means, covs, gradients[:, 4], limit)
    center, _ = jensen_center(weights, means, covs)
    averaged = -(weights * normal.log_prob((center + stretch * (pooled.mu - center))[:, None])).sum(-1) - limit
    excess = {
        "component": float(own[parts.usable].max()), "mixture": float(whole[parts.usable].max()), "jensen": float(averaged[pooled.usable].max()),
    }  # fmt: skip
    enough = int(parts.usable.sum()) > 2000 and int(pooled.usable.sum()) > 50
    measured = {name: f"{value:.1e}" for name, value in excess.items()} | {"usable": [int(parts.usable.sum()), int(pooled.usable.sum())]}
    return Evidence(measured, "no excess above 1e-8, more than 2000 and 50 usable", max(excess.values()) < 1e-8 and enough)


@claim("Every operator keeps its surrogate limit, and the largest-component operator that of the mixture's density itself")
def limits_are_kept() -> Evidence:
    return _constraints(1.0)


@ablation(limits_are_kept, "shifts as long as the authors' code makes them, whose squared length is doubled once more")
def doubled_radicand_breaks_them() -> Evidence:
    return _constraints(2**0.5)


MODE_SEEDS = (0, 1, 2)
CENTERS = torch.tensor([[-0.6, 0.0], [0.6, 0.0]])


def two_peaks(action: Tensor) -> Tensor:
    """The true reward [...] of actions [...,2]: 1 + the second coordinate near either center, nothing between them."""
    squared = (action.unsqueeze(-2) - CENTERS).square().sum(-1).amin(-1)
    return (-squared / (2 * 0.2**2)).exp() * (1 + action[..., 1])


def two_peaks_judge(action: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        leaf = action.detach().requires_grad_()
        reward = two_peaks(leaf)
        (gradient,) = torch.autograd.grad(reward.sum(), leaf)
    return reward.detach(), gradient


def _modes(components: int) -> Evidence:
    """A mixture fitted to 2000 actions around two centers (standard deviation 0.1) and improved by the true reward; tau = e^0.1."""
    judge: Judge = two_peaks_judge
    away, rewards = [], []
    for seed in MODE_SEEDS:
        rng = np.random.default_rng(seed)
        action = (CENTERS.numpy()[rng.integers(2, size=2000)] + 0.1 * rng.standard_normal((2000, 2))).astype(np.float32)
        state, ended = np.zeros((2000, 2), np.float32), np.ones(2000, bool)
        task = Recorded(Arcs, Recording(state, action, two_peaks(torch.from_numpy(action)).numpy(), state, ended, ~ended))
        method = METHOD.set("prepare.0.steps", 500).set("prepare.0.learning_rate", 0.01)
        policy: Any = build(task, None, needs=method.needs(), seed=seed, hidden=(16,), components=components)[0]
        Run(method, policy, task, steps=1, seed=seed).begin_step()
        with torch.no_grad():
            found = policy.mixture(torch.zeros(1, 2))
            acted = improved(found.log_weights.exp(), found.means, torch.diag_embed((2 * found.log_std).exp()), judge, 0.1)
        away.append(round(float(torch.cdist(acted, CENTERS).min()), 3))
        rewards.append(round(float(two_peaks(acted)), 3))
    measured = {"distance to the nearest mode": away, "true reward": rewards}
    return Evidence(measured, "within 0.25 of a mode and a reward above 0.8, in every seed", max(away) < 0.25 and min(rewards) > 0.8)


@claim("On actions with two modes the operator of two Gaussians stays on a mode and has a true reward above 0.8")
def a_mixture_stays_on_a_mode() -> Evidence:
    return _modes(2)


@ablation(a_mixture_stays_on_a_mode, "a single Gaussian")
def one_gaussian_lands_between() -> Evidence:
    return _modes(1)


SEEDS = (0, 1, 2)
OPPOSITE = (1.0, -1.0, 0.0)  # a good controller, its opposite, and none
WEAKER = (1.0, 0.5, 0.0)  # a good controller, one of half its torque, and none: what a wrong torque does was never recorded


def noisy(factor: float, noise: float, seed: int) -> Any:
    """The swing-up controller at up to 0.7 of the torque of 2, times `factor`, with normal noise."""
    rng = np.random.default_rng(seed)
    return lambda x: (factor * controller(x).clip(-1.4, 1.4) + noise * rng.standard_normal((len(x), 1))).clip(-2, 2)


@functools.cache
def learned(seed: int, factors: tuple[float, ...]) -> Any:
    """Mixture and critics of 50 episodes of each controller, 30000 steps; the noise is 0.4, or 0.8 where no torque is opposite."""
    torch.set_num_threads(1)
    noise = 0.4 if factors == OPPOSITE else 0.8
    parts = [record(noisy(factor, noise, 10 * seed + i), 50, 1000 * seed + 100 * i) for i, factor in enumerate(factors)]
    task = Recorded("Pendulum-v1", joined(parts))
    method = METHOD.set("prepare.0.steps", 2000).set("prepare.0.batch_size", 128).set("credit.gamma", 0.95)
    method = method.set("rollout.batch_size", 128).set("update.learning_rate", 1e-3).set("update.tau", 0.02)
    policy, _ = build(task, None, needs=method.needs(), seed=seed, hidden=(64, 64))
    return off_policy.train(Run(method, policy, task, steps=60, seed=seed))


@functools.cache
def cloning(seed: int, factors: tuple[float, ...]) -> float:
    """The better of two clones of the recording by the fitted mixture, from 20 held-out starts: actions drawn from it, or its highest peak's mean."""
    run, rng = learned(seed, factors), np.random.default_rng(seed)
    clone = MixtureActorCritic(run.policy.spaces, **run.policy.configuration)
    clone.load_state_dict({name: value for name, value in run.policy.state_dict().items() if name in clone.state_dict()})
    starts = list(range(EVALUATION_SEED, EVALUATION_SEED + 20))
    seen = episodes(run.task.environments(20), starts, clone.actor(), clone.for_environment, lambda n: clone.noise(rng, (n,)))
    return max(float(seen.reward.sum(1).mean()), float(run.task.held_out(clone, 20)[0].mean()))


@functools.cache
def gap() -> float:
    """The return of the controller less that of uniform torques, from the same starts."""
    rng = np.random.default_rng(0)
    policies = (controller, lambda x: rng.uniform(-2, 2, (len(x), 1)))
    good, random = (float(record(act, 20, EVALUATION_SEED).reward.sum()) / 20 for act in policies)
    return good - random


def _over_cloning(log_tau: float, factors: tuple[float, ...], seeds: tuple[int, ...], trained: bool = True) -> list[float]:
    """The operator's return from the same starts less that of cloning, as a share of the gap."""
    shares = []
    for seed in seeds:
        run = learned(seed, factors)
        policy = copy.deepcopy(run.policy)
        policy.log_tau.fill_(log_tau)
        if not trained:
            policy.critic.load_state_dict(build(run.task, None, needs=METHOD.needs(), seed=seed, hidden=(64, 64))[0].critic.state_dict())
        shares.append(round((float(run.task.held_out(policy, 20)[0].mean()) - cloning(seed, factors)) / gap(), 3))
    return shares


def _better(trained: bool) -> Evidence:
    shares = _over_cloning(LOG_TAU, OPPOSITE, SEEDS, trained)
    return Evidence(shares, "at least 0.15 of the gap between the controller and random torques, in every seed", min(shares) >= 0.15)


@claim(
    "From a mixture of Pendulum controllers the operator with tau = e^0.5 beats cloning by at least 15% of the random-expert gap", slow=True
)
def better_than_cloning() -> Evidence:
    return _better(trained=True)


@ablation(better_than_cloning, "critics that learned nothing")
def untrained_critics_do_not_help() -> Evidence:
    return _better(trained=False)


def _worse(log_tau: float) -> Evidence:
    shares = _over_cloning(log_tau, WEAKER, SEEDS[:2])
    return Evidence(shares, "below cloning by more than 0.2 of the gap, in every seed", max(shares) < -0.2)


# True in every seed that the setting was chosen on, false in one of the two it is measured on (-0.47 and 0.02 of the gap). Where opposite torques
# were recorded too, the critic is right everywhere and no limit is too wide: log tau 200 then reaches the controller's return.
@claim(
    "Where wrong torques were never recorded, a limit so wide that it never binds (log tau 200) makes the operator worse than cloning",
    slow=True,
    reproduced=False,
)
def too_large_a_step_hurts() -> Evidence:
    return _worse(200.0)


@ablation(too_large_a_step_hurts, "a narrow limit, tau = e^0.1")
def a_small_step_does_not() -> Evidence:
    return _worse(0.1)
