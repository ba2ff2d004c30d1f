"""MBBO: multi-block bilevel optimization with blockwise variance reduction (arXiv:2305.18730).

Each step touches I of m blocks and one sample of each. Every block keeps a tracker of its lower gradient, and either of its Hessian (BSVRB-v1: clipped
and inverted, for low dimensions) or of the residual of its Hessian-inverse-vector product (v2: no inverse). The trackers correct a moving average by
gamma times the change of the sampled quantity since the last iterate, which makes up for steps at which a block was not touched; the upper
gradient has a STORM momentum. Baseline: the same loop without corrections. The trackers and the two versions are the paper's from memory, the
order of the updates within a step is [reconstructed].
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.domains.optim.bilevel import Bilevel, Hypergradient, Oracles, Quadratic
from anypo.method import Paper, Study


class Tracked(NamedTuple):
    state: Tensor
    gamma: float


class Projected(NamedTuple):
    matrix: Tensor


@dataclass(frozen=True)
class Rates:
    alpha: float = 0.1  # tracker of the lower gradient, in (0,1]
    alpha_h: float = 0.1  # tracker of the Hessian (v1) or of the product's residual (v2), in (0,1]
    beta: float = 0.1  # STORM momentum, in (0,1]; 1 = none
    tau: float = 0.05  # step of y, > 0
    eta: float = 0.01  # step of x, >= 0
    lam: float = 0.5  # v1: smallest eigenvalue of the tracked Hessian, > 0
    tau_v: float = 0.05  # v2: step of v, >= 0
    radius: float = 50.0  # v2: largest norm of v, > 0
    gamma: float | None = None  # weight of the trackers' correction; None = the paper's, 0 = moving averages

    def __post_init__(self) -> None:
        if not all(0 < rate <= 1 for rate in (self.alpha, self.alpha_h, self.beta)):
            raise ValueError(f"alpha, alpha_h and beta lie in (0,1], not {self.alpha}, {self.alpha_h}, {self.beta}")


PLAIN = Rates(alpha=1.0, alpha_h=1.0, beta=1.0)  # stochastic bilevel optimization without variance reduction


@dataclass(frozen=True)
class State:
    """The iterate, the one before it, and the trackers. Either `H` and `H_prev` (v1) or `v`, `v_prev` and `u` (v2) are set."""

    x: Tensor  # [n]
    x_prev: Tensor
    y: Tensor  # [m,d]
    y_prev: Tensor
    s_y: Tensor  # [m,d] tracker of grad_y g
    z: Tensor  # [n] momentum of the hypergradient
    H: Tensor | None = None  # [m,d,d] tracker of grad_yy g
    H_prev: Tensor | None = None
    v: Tensor | None = None  # [m,d] estimate of (grad_yy g)^-1 grad_y f
    v_prev: Tensor | None = None
    u: Tensor | None = None  # [m,d] tracker of grad_yy g v - grad_y f
    estimate: Tensor | None = None  # [n] this step's hypergradient at the old x, before momentum


def hypergradient(
    problem_A: Tensor, problem_B: Tensor, problem_e: Tensor, problem_t: Tensor, problem_c: Tensor, problem_rx: float, x: Tensor
) -> Hypergradient:
    """Equation 1 of the quadratic problem."""
    return Quadratic(problem_A, problem_B, problem_e, problem_t, problem_c, problem_rx).hypergradient(x)


def correction(blocks: int, touched: int, alpha: float) -> float:
    """Equation 2's gamma; 0 at alpha = 1, where the tracker is the newest sample."""
    return 0.0 if alpha == 1 else (blocks - touched) / (touched * (1 - alpha)) + (1 - alpha)


def tracker(
    state: Float[Tensor, "m ..."],
    now: Float[Tensor, "I ..."],
    previous: Float[Tensor, "I ..."],
    block: Int[Tensor, " I"],
    alpha: float,
    gamma: float | None = None,
) -> Tracked:
    """Equation 2: rows `block` follow `now`, the sample at the current iterate, with `previous` the same sample at the last one."""
    gamma = correction(len(state), len(block), alpha) if gamma is None else gamma
    return Tracked(state.index_copy(0, block, (1 - alpha) * state[block] + alpha * now + gamma * (now - previous)), gamma)


def projection(matrix: Float[Tensor, "... d d"], lam: float) -> Projected:
    """The symmetric part with eigenvalues of at least `lam`."""
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    return Projected((vectors * values.clamp(min=lam)[..., None, :]) @ vectors.mT)


def ball(v: Float[Tensor, "I d"], radius: float) -> Float[Tensor, "I d"]:
    """Rows scaled down to a norm of at most `radius`."""
    return v * (radius / v.norm(dim=1, keepdim=True)).clamp(max=1.0)


def upper_gradient(oracles: Oracles, product: Float[Tensor, "I d"]) -> Float[Tensor, " n"]:
    """Equations 4 and 5: the mean over the touched blocks of grad_x f - grad_xy g times the estimate of (grad_yy g)^-1 grad_y f."""
    return (oracles.fx - oracles.times_mixed(product)).mean(0)


def step(problem: Bilevel, state: State, block: Int[Tensor, " I"], sample: Any, rates: Rates) -> State:
    """One iteration on distinct blocks. The products and Hessians that the upper gradient uses are those before this step's update."""
    s = state
    now, before = problem.at(s.x, s.y[block], block, sample), problem.at(s.x_prev, s.y_prev[block], block, sample)

    def follow(kept: Tensor, new: Tensor, old: Tensor, alpha: float = rates.alpha_h) -> Tensor:
        return tracker(kept, new, old, block, alpha, rates.gamma).state

    s_y = follow(s.s_y, now.gy, before.gy, rates.alpha)
    if s.H is not None and s.H_prev is not None:
        product = torch.linalg.solve(projection(s.H[block], rates.lam).matrix, now.fy)
        product_before = torch.linalg.solve(projection(s.H_prev[block], rates.lam).matrix, before.fy)
        changed = {"H": follow(s.H, now.hessian(), before.hessian()), "H_prev": s.H}
    elif s.v is not None and s.v_prev is not None and s.u is not None:
        product, product_before = s.v[block], s.v_prev[block]
        u = follow(s.u, now.times_hessian(product) - now.fy, before.times_hessian(product_before) - before.fy)
        changed = {"u": u, "v": s.v.index_copy(0, block, ball(product - rates.tau_v * u[block], rates.radius)), "v_prev": s.v}
    else:
        raise ValueError("the state has neither Hessians nor Hessian-inverse-vector products; make it with start(...)")
    estimate = upper_gradient(now, product)
    z = estimate + (1 - rates.beta) * (s.z - upper_gradient(before, product_before))
    y = s.y.index_copy(0, block, s.y[block] - rates.tau * s_y[block])
    return replace(s, x=s.x - rates.eta * z, x_prev=s.x, y=y, y_prev=s.y, s_y=s_y, z=z, estimate=estimate, **changed)


def v1_step(
    problem_A: Tensor, problem_B: Tensor, problem_e: Tensor, problem_t: Tensor, problem_c: Tensor, problem_rx: float, block: Tensor,
    noise: Tensor, x: Tensor, xprev: Tensor, y: Tensor, yprev: Tensor, s_y: Tensor, H: Tensor, Hold: Tensor, z: Tensor, alpha: float,
    alpha_h: float, beta: float, tau: float, eta: float, lam: float,
) -> State:  # fmt: skip
    """`step` of version 1 on the quadratic problem."""
    problem = Quadratic(problem_A, problem_B, problem_e, problem_t, problem_c, problem_rx)
    state = State(x, xprev, y, yprev, s_y, z, H=H, H_prev=Hold)
    return step(problem, state, block, noise, Rates(alpha, alpha_h, beta, tau, eta, lam))


def v2_step(
    problem_A: Tensor, problem_B: Tensor, problem_e: Tensor, problem_t: Tensor, problem_c: Tensor, problem_rx: float, block: Tensor,
    noise: Tensor, x: Tensor, xprev: Tensor, y: Tensor, yprev: Tensor, s_y: Tensor, v: Tensor, vprev: Tensor, u: Tensor, z: Tensor,
    alpha: float, alpha_h: float, beta: float, tau: float, eta: float, tau_v: float, radius: float, lam: float = 0.5,
) -> State:  # fmt: skip
    """`step` of version 2 on the quadratic problem; it has no use for `lam`."""
    problem = Quadratic(problem_A, problem_B, problem_e, problem_t, problem_c, problem_rx)
    state = State(x, xprev, y, yprev, s_y, z, v=v, v_prev=vprev, u=u)
    return step(problem, state, block, noise, Rates(alpha, alpha_h, beta, tau, eta, lam, tau_v, radius))


def start(problem: Bilevel, x: Float[Tensor, " n"], y: Float[Tensor, "m d"], sample: Any, version: int = 2) -> State:
    """The first state, from one sample of every block: trackers at their first values, v at zero."""
    if version not in (1, 2):
        raise ValueError(f"there are versions 1 and 2, not {version}")
    first, v = problem.at(x, y, torch.arange(problem.blocks), sample), torch.zeros_like(y)
    H = first.hessian() if version == 1 else None
    product = torch.linalg.solve(H, first.fy) if H is not None else v
    z = upper_gradient(first, product)
    if H is not None:
        return State(x, x, y, y, first.gy, z, H=H, H_prev=H)
    return State(x, x, y, y, first.gy, z, v=v, v_prev=v, u=-first.fy)


def optimize(
    problem: Quadratic, version: int, touched: int, steps: int, seed: int, rates: Rates = Rates(), deviation: float = 1.0, last: int = 100
) -> float:
    """Mean |grad F| at the `last` of `steps` iterates from x ~ N(0,1), y = 0, each step on `touched` blocks; noise of the given deviation."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=problem.A.dtype)

    state = start(problem, normal(problem.c.shape[1]), torch.zeros_like(problem.e), deviation * normal(problem.blocks), version)
    norms = []
    for t in range(steps):
        block = torch.randperm(problem.blocks, generator=generator)[:touched]
        state = step(problem, state, block, deviation * normal(touched), rates)
        if t >= steps - last:
            norms.append(float(problem.hypergradient(state.x).gradient.norm()))
    return fmean(norms)


def run(seed: int = 0, steps: int = 500, touched: int = 5) -> dict[str, Any]:
    """Mean |grad F| over the last tenth of the steps on a random quadratic problem of 10 blocks: {v1, v2, plain}."""
    problem, last = Quadratic.random(seed), max(steps // 10, 1)
    ways = {"v1": (1, Rates()), "v2": (2, Rates()), "plain": (2, PLAIN)}
    return {name: optimize(problem, version, touched, steps, seed, r, last=last) for name, (version, r) in ways.items()}


STUDY = Study(
    name="mbbo",
    paper=Paper(
        "Blockwise Stochastic Variance-Reduced Methods with Parallel Speedup for Multi-Block Bilevel Optimization", "2305.18730", 2023
    ),
    domain="optim",
    run=run,
    kind="component",
    summary="bilevel optimization over many blocks, some touched a step, with a variance-reduced tracker for each block and no large inverse",
)
