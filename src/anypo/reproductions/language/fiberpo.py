"""Claims of FiberPO: the gate's Jacobian, what a common shift does, the exactness of APC-Obj, and how far a domain drifts in a batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import torch
from scipy.optimize import linprog
from torch import Tensor

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.method import Method
from anypo.methods.language.fiberpo import FIBERPO_DOMAIN, DomainFiberGate, apc, domain_ratio, gated_ratio
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.reproductions.common import plain_sgd, train_on
from anypo.run import Run

TOKEN, TRAJECTORY = 0.15, 0.1


@dataclass
class Sample:
    """Random log-probs, some gates open and some closed."""

    logp: Tensor  # [N,T]
    old_logp: Tensor
    mask: Tensor


def _sample(seed: int) -> Sample:
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(5, 4, generator=generator, dtype=torch.float64)
    change = 0.15 * torch.randn(5, 4, generator=generator, dtype=torch.float64) + 0.12 * torch.randn(
        5, 1, generator=generator, dtype=torch.float64
    )
    mask = torch.arange(4)[None] < torch.tensor([4, 2, 3, 1, 4])[:, None]
    return Sample(old + change, old, mask)


def _equation_5(sample: Sample) -> Tensor:
    """The Jacobian [N,T,N,T] written out: R (B/n + F (1(t=t') - 1/n)) inside a trajectory, 0 between trajectories."""
    gated = gated_ratio(sample.logp, sample.old_logp, sample.mask, TOKEN, TRAJECTORY)
    rows, horizon = sample.logp.shape
    base = ((gated.aggregate > math.log1p(-TRAJECTORY)) & (gated.aggregate < math.log1p(TRAJECTORY))).double()
    fiber = ((gated.residual > math.log1p(-TOKEN)) & (gated.residual < math.log1p(TOKEN))).double()
    length = sample.mask.sum(1).double()[:, None, None]
    block = base[:, None, None] / length + fiber[:, :, None] * (torch.eye(horizon, dtype=torch.float64) - 1 / length)
    block = gated.ratio[:, :, None] * block * sample.mask[:, :, None] * sample.mask[:, None]
    whole = sample.logp.new_zeros(rows, horizon, rows, horizon)
    whole[torch.arange(rows), :, torch.arange(rows)] = block
    return whole


def _jacobian(detached: bool) -> Evidence:
    """Distance of the autograd Jacobian from equation 5, size of its entries between trajectories, and its distance from identity on-policy."""

    def ratio(logp: Tensor, sample: Sample) -> Tensor:
        gated = gated_ratio(logp, sample.old_logp, sample.mask, TOKEN, TRAJECTORY)
        if not detached:
            return gated.ratio
        base = gated.aggregate.detach()[:, None]
        token = (logp - sample.old_logp - base).clamp(math.log1p(-TOKEN), math.log1p(TOKEN))
        return (base.clamp(math.log1p(-TRAJECTORY), math.log1p(TRAJECTORY)) + token).exp() * sample.mask

    equation, between, identity = 0.0, 0.0, 0.0
    for seed in range(20):
        sample = _sample(seed)
        found = torch.autograd.functional.jacobian(lambda x, sample=sample: ratio(x, sample), sample.logp)
        equation = max(equation, float((found - _equation_5(sample)).abs().max()))
        other = ~torch.eye(5, dtype=torch.bool)
        between = max(between, float(found.permute(0, 2, 1, 3)[other].abs().max()))
        same = torch.autograd.functional.jacobian(lambda x, sample=sample: ratio(x, sample), sample.old_logp)
        flat = same.reshape(20, 20)
        identity = max(identity, float((flat - torch.diag(sample.mask.flatten().double())).abs().max()))
    measured = {"from equation 5": equation, "between trajectories": between, "from identity on-policy": identity}
    return Evidence(measured, "below 1e-12, exactly 0, below 1e-12", equation < 1e-12 and between == 0.0 and identity < 1e-12)


@claim("the gate's Jacobian is block-diagonal over trajectories, equals its closed form and is the identity on-policy")
def jacobian_is_blocks() -> Evidence:
    return _jacobian(False)


@ablation(jacobian_is_blocks, "no gradient through the aggregate")
def jacobian_detached() -> Evidence:
    return _jacobian(True)


def _shift(eps_traj: float | None) -> Evidence:
    """A common shift of 1 on all of a trajectory's log-ratios: growth of R, and the gradient of its sum along the shift against its own size."""
    growth, along, size = 0.0, 0.0, 0.0
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        old = -torch.rand(1, 6, generator=generator, dtype=torch.float64)
        residual = 0.03 * torch.randn(1, 6, generator=generator, dtype=torch.float64)
        mask = torch.ones(1, 6, dtype=torch.bool)
        weights = torch.randn(1, 6, generator=generator, dtype=torch.float64)
        near, far = (old + residual), (old + residual + 1.0).requires_grad_()
        before, after = (gated_ratio(x, old, mask, 0.2, eps_traj).ratio for x in (near, far))
        growth = max(growth, float((after.detach() / before).max()))
        gradient = torch.autograd.grad((weights * after).sum(), far)[0]
        along, size = max(along, abs(float(gradient.sum()))), max(size, float(gradient.abs().max()))
    measured = {"growth of R": round(growth, 4), "gradient along the shift": along, "largest gradient": round(size, 3)}
    # R grows from at least 1 - budget to at most 1 + budget, whatever the shift.
    limit = (1 + 0.05) / (1 - 0.05)
    return Evidence(
        measured,
        f"growth at most {limit:.3f}, no gradient along it, some across",
        growth <= limit and along < 1e-12 and size > 0.1,
    )


@claim("outside its trajectory's budget a common shift of the tokens changes the ratio no further and gets no gradient; relative moves do")
def shift_is_gated() -> Evidence:
    return _shift(0.05)


@ablation(shift_is_gated, "the trajectory gate open")
def shift_is_not_gated() -> Evidence:
    return _shift(None)


def _censoring(penalty: float) -> Evidence:
    """Closed-form optimum against the linear program of the constrained problem, and against a search over J_APC (its penalty scaled)."""
    random = np.random.default_rng(0)
    program_gap, excess = 0.0, -math.inf
    for _ in range(50):
        count = int(random.integers(2, 7))
        advantages, delta = random.normal(size=count), float(random.uniform(0.05, 0.6))
        optimum = float(apc(torch.ones(count, dtype=torch.float64), torch.tensor(advantages), delta).optimum)
        # r and u >= |r - 1|: maximize r A / n with sum u <= 2 n delta
        side = np.eye(count)
        rows = np.block([[side, -side], [-side, -side], [np.zeros((1, count)), np.ones((1, count))]])
        limits = np.concatenate([np.ones(count), -np.ones(count), [2 * count * delta]])
        program = linprog(np.concatenate([-advantages / count, np.zeros(count)]), A_ub=rows, b_ub=limits, bounds=[(0, None)] * (2 * count))
        program_gap = max(program_gap, abs(-program.fun - optimum))
        searched = random.exponential(size=(100, count)) * random.choice([0.0, 0.5, 1.0, 3.0, 10.0], size=(100, count))
        searched[:count] = 1 + 20 * np.eye(count)
        for ratios in searched:
            found = apc(torch.tensor(ratios), torch.tensor(advantages), delta)
            surrogate = float((torch.tensor(ratios) * torch.tensor(advantages)).mean())
            excess = max(excess, surrogate - penalty * (surrogate - float(found.objective)) - optimum)
    measured = {"from the linear program": program_gap, "largest excess of J over the optimum": excess}
    return Evidence(measured, "gap below 1e-8 on 50 problems, no ratios exceed the optimum", program_gap < 1e-8 and excess < 1e-9)


@claim("APC-Obj has the maximum of the constrained trust-region problem: the closed form is the linear program's, and no ratios exceed it")
def censoring_is_exact() -> Evidence:
    return _censoring(1.0)


@ablation(censoring_is_exact, "a penalty of half the size")
def censoring_too_weak() -> Evidence:
    return _censoring(0.5)


class _TwoDomains(TokenBandit):
    """16 prompts in two domains, by parity; the reward is the share of right tokens."""

    def __init__(self, seed: int) -> None:
        super().__init__(16, 4, 3, seed=seed, partial=True)

    def continue_from(self, prompt: Tensor, *rest: object, **options: object) -> Batch:  # type: ignore[override]
        batch = super().continue_from(prompt, *rest, **options)  # type: ignore[arg-type]
        batch.signals["domain"] = prompt % 2
        return batch


def _domain_drift(method: Method, seed: int) -> tuple[float, float]:
    """(largest |v_domain| at the end of a batch, exact success at the end): 60 batches of 8 epochs, SGD step 1 a prompt."""
    task = _TwoDomains(seed)
    policy = task.policy()

    def drift(run: Run, batch: Batch) -> float:
        new = run.policy.observe(batch, {"logp"}).logp
        return float(domain_ratio(new, batch.logp, batch.mask, batch.group, batch.signals["domain"]).v_domain.abs().max())

    seen = train_on(plain_sgd(method, 16.0, epochs=8), policy, task, steps=60, seed=seed, watch=drift)
    return max(seen), task.expected_success(policy)


def _training(gates: DomainFiberGate) -> Evidence:
    found = {}
    for name, method in {"fiberpo_domain": FIBERPO_DOMAIN.but(objective=gates), "grpo": GRPO.but(regularize=())}.items():
        runs = [_domain_drift(method, seed) for seed in range(3)]
        found[name] = (fmean(r[0] for r in runs), fmean(r[1] for r in runs))
    (ours, success), (grpo, grpo_success) = found["fiberpo_domain"], found["grpo"]
    measured = {name: {"drift": round(d, 3), "success": round(s, 3)} for name, (d, s) in found.items()}
    return Evidence(measured, "drift < 0.7 of GRPO's, success within 0.04 (3 seeds)", ours < 0.7 * grpo and success > grpo_success - 0.04)


# The gates hold a domain together: with the domain's gate alone off, the group and trajectory gates still do (drift 0.03), so the ablation opens all.
@claim("over 8 epochs a batch the four gates keep the largest drift of a domain below 0.7 of GRPO's, at a success within 0.04", slow=True)
def domains_drift_less() -> Evidence:
    return _training(DomainFiberGate())


@ablation(domains_drift_less, "all four gates open")
def domains_without_gates() -> Evidence:
    return _training(DomainFiberGate(None, None, None, None))
