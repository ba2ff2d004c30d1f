"""Claims of TRPO: the lower bound and monotonic improvement, the constraint on real batches, invariance to the scale of parameters, CartPole and
Pendulum. The two environments take half of the spec's steps, which are enough."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean

import torch
from torch import Tensor

from anypo.claims import Evidence, ablation, claim
from anypo.domains.control.setup import build
from anypo.loops import on_policy
from anypo.methods.control.trpo import METHOD as TRPO
from anypo.methods.control.trpo import TrustRegionStep, bound, fisher_softmax, full_step
from anypo.reproductions.common import RandomMDP, ShuffledCredit, on_cartpole
from anypo.run import Run
from anypo.seams.natural import BatchGeometry

STEP_SIZES = [0.0, *(10.0 ** (k / 8) for k in range(-64, 17))]  # of a mirror step: pi ~ old exp(size A)


def _monotone(penalty: bool) -> Evidence:
    """50 mirror steps on a random MDP, each of the size that maximizes the right side of equation 2."""
    smallest, slack = float("inf"), float("inf")
    for seed in range(3):
        problem = RandomMDP(seed)
        policy = problem.random_policy(seed)
        for _ in range(50):
            value, q = problem.values(policy)
            advantage, old = q - value[:, None], problem.total(policy)
            visits, epsilon = problem.visits(policy), float(advantage.abs().max()) if penalty else 0.0
            candidates = [(policy.log() + size * advantage).softmax(-1) for size in STEP_SIZES]
            promised = []
            for new in candidates:
                surrogate = old + float(visits @ (new * advantage).sum(-1))
                divergence = float((policy * (policy / new).log()).sum(-1).max().clamp(min=0))
                promised.append(bound(surrogate, epsilon, problem.gamma, divergence))
            totals = [problem.total(new) for new in candidates]
            slack = min(slack, min(t - p for t, p in zip(totals, promised, strict=True)))
            best = max(range(len(candidates)), key=promised.__getitem__)
            smallest = min(smallest, totals[best] - old)
            policy = candidates[best]
    found = {"smallest change of the return": f"{smallest:.2e}", "smallest slack of the bound": f"{slack:.2e}"}
    return Evidence(found, "both >= -1e-10 in 50 iterations of 3 MDPs", smallest >= -1e-10 and slack >= -1e-10)


@claim("Maximizing the penalized surrogate never lowers the exact return of a random MDP, and is always a lower bound of it")
def monotonic_improvement() -> Evidence:
    return _monotone(penalty=True)


@ablation(monotonic_improvement, "no KL penalty: the surrogate itself is no bound")
def no_penalty_no_bound() -> Evidence:
    return _monotone(penalty=False)


@dataclass
class Compared(TrustRegionStep):
    """TRPO's step; also measures the KL of a plain gradient step of the same Euclidean length."""

    plain: list[float] = field(default_factory=list, init=False, repr=False)

    def policy_step(self, geometry: BatchGeometry) -> dict[str, float]:
        gradient = -geometry.gradient()
        metrics = super().policy_step(geometry)
        moved = torch.cat([p.detach().reshape(-1) for p in geometry.parameters])
        plain = geometry.start + gradient / gradient.norm() * (moved - geometry.start).norm()
        metrics["plain_kl"] = geometry.measure(plain).kl
        geometry.measure(moved)
        return metrics


def _constraint(which: str) -> Evidence:
    update = Compared(epochs=10, minibatches=32, learning_rate=1e-3, optimizer="adam", max_grad_norm=0.5)
    records = [r for seed in range(2) for r in on_cartpole(TRPO.but(update=update), steps=10, seed=seed).history]
    kls = [r[which] for r in records if r["line_search"] >= 0]
    found = {"steps": len(kls), "largest KL": round(max(kls), 5), "mean KL": round(fmean(kls), 5)}
    return Evidence(
        found, "every accepted step within 0.01 (1 + 1e-6), at least 15 of them", max(kls) <= 0.01 * (1 + 1e-6) and len(kls) >= 15
    )


@claim("Every accepted step on CartPole has a mean KL within delta on its own batch")
def steps_stay_in_the_region() -> Evidence:
    return _constraint("kl")


@ablation(steps_stay_in_the_region, "a plain gradient step of the same Euclidean length")
def plain_steps_leave_the_region() -> Evidence:
    return _constraint("plain_kl")


def _rescaled(natural: bool) -> Evidence:
    """Largest difference that scaling a feature by 10 (and its parameter by 1/10) makes to the policy after a step."""
    worst = 0.0
    for seed in range(5):
        g = torch.Generator().manual_seed(seed)
        features, theta = torch.randn(20, 4, 5, generator=g, dtype=torch.float64), torch.randn(5, generator=g, dtype=torch.float64)
        advantage = torch.randn(20, 4, generator=g, dtype=torch.float64)
        scale = torch.tensor([1.0, 1.0, 10.0, 1.0, 1.0], dtype=torch.float64)
        worst = max(
            worst,
            float((_after(features, theta, advantage, natural) - _after(features * scale, theta / scale, advantage, natural)).abs().max()),
        )
    return Evidence(f"{worst:.1e}", "below 1e-4 in each of 5 problems", worst < 1e-4)


def _after(features: Tensor, theta: Tensor, advantage: Tensor, natural: bool) -> Tensor:
    """Action probabilities after one step of a linear softmax policy, natural (damping 0) or along the gradient with the same radius."""
    parameter = theta.clone().requires_grad_()
    chance = (features @ parameter).softmax(-1)
    (gradient,) = torch.autograd.grad((chance * advantage).sum(-1).mean(), parameter)
    fisher = fisher_softmax(features, theta) if natural else torch.eye(len(theta), dtype=torch.float64)
    return (features @ (theta + full_step(fisher, gradient, 0.01, 0.0).step)).softmax(-1)


@claim("Scaling a feature by 10 and its parameter by 1/10 leaves the policy after a natural step the same")
def invariant_to_scale() -> Evidence:
    return _rescaled(natural=True)


@ablation(invariant_to_scale, "the identity in place of the Fisher matrix")
def gradient_depends_on_scale() -> Evidence:
    return _rescaled(natural=False)


def _cartpole(shuffled: bool) -> Evidence:
    """The best mean return of a step within 24 steps of 1024 actions; a run ends once it has 400 (the spec asks for 300, which chance comes near to)."""
    method = TRPO.but(credit=ShuffledCredit(TRPO.credit)) if shuffled else TRPO
    seeds = (0,) if shuffled else (0, 1)
    best = [round(max(r["reward"] for r in on_cartpole(method, steps=24, seed=seed, enough=400).history)) for seed in seeds]
    return Evidence(best, "a step's mean return reaches 400, in every seed", min(best) >= 400)


@claim("TRPO reaches a mean return of 400 on CartPole within 25000 steps", slow=True)
def learns_cartpole() -> Evidence:
    return _cartpole(shuffled=False)


@ablation(learns_cartpole, "advantages dealt to the wrong environments")
def cartpole_without_credit() -> Evidence:
    return _cartpole(shuffled=True)


def _pendulum(shuffled: bool) -> Evidence:
    """Mean return over 20 held-out starts before and after 48 steps of 1024 actions; discount 0.9, as a step is 0.05 s of a fast problem."""
    method = TRPO.set("credit.gamma", 0.9).set("update.minibatches", 16)
    method = method.but(credit=ShuffledCredit(method.credit)) if shuffled else method
    before, after = [], []
    for seed in (0,) if shuffled else (0, 1):
        policy, task = build("Pendulum-v1", None, seed=seed, envs=8, horizon=128, reward_gamma=0.9)
        run = Run(method, policy, task, steps=48, seed=seed)
        before.append(round(task.evaluate(run)["return"]))
        after.append(round(task.evaluate(on_policy.train(run))["return"]))
    holds = max(before) < -1000 and min(after) > -600
    return Evidence({"before": before, "after": after}, "from below -1000 to above -600, in every seed", holds)


@claim("TRPO improves the return on Pendulum from below -1000 to above -600 within 50000 steps", slow=True)
def learns_pendulum() -> Evidence:
    return _pendulum(shuffled=False)


@ablation(learns_pendulum, "advantages dealt to the wrong environments")
def pendulum_without_credit() -> Evidence:
    return _pendulum(shuffled=True)
