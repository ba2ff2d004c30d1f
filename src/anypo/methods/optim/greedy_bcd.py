"""Greedy block coordinate descent: block selection, block updates, active sets (arXiv:1712.08859).

A step moves few variables. Against cyclic, random and Gauss-Southwell choices (GS, the largest gradient): the block of the largest guaranteed progress,
by its own Lipschitz constant (GSL), a diagonal bound (GSD) or the Hessian bound (GSQ); the Newton-like step of the block, by message passing where its
variables form a forest; and for L1 and bound terms proximal steps that find the active set, then Newton on the support. Equations are those
of the paper as the row's specification numbers them. Any method takes the variable-block rule for a policy's parameters with
`--set update.optimizer=greedy_bcd`. Left out: line search, and message passing on anything but forests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from anypo.domains.optim.forest import forest, message_passing
from anypo.domains.optim.linear import LinearModel, least_squares
from anypo.method import Paper, Study

Block = Sequence[int] | Tensor
REFRESH = 1000  # steps between recomputed predictions, which drift by rounding


@dataclass(frozen=True)
class Selected:
    scores: Tensor  # [blocks]
    index: int


class Step(NamedTuple):
    x: Tensor
    progress: float  # guaranteed decrease


@dataclass(frozen=True)
class Prox:
    model_decrease: Tensor  # [n] of the upper bound, >= 0
    index: int
    x: Tensor


class Sparse(NamedTuple):
    x: Tensor
    support: Tensor  # [n] 1 where x is not 0


class Point(NamedTuple):
    x: Tensor
    value: float  # f(x)
    progress: float  # decrease that the last step guaranteed


def _known(kind: str, rule: str, *rules: str) -> None:
    if rule not in rules:
        raise ValueError(f"unknown {kind} '{rule}'; use one of {', '.join(rules)}")


def gains(gradient: Float[Tensor, " n"], lipschitz: Float[Tensor, " n"], rule: str) -> Float[Tensor, " n"]:
    """g^2 ("gs") or g^2 / L ("gsl", "gsd"): twice the progress of a coordinate. 0 where L is 0, as in empty columns."""
    squares = gradient.square()
    if rule != "gs":
        squares = squares / torch.where(lipschitz > 0, lipschitz, torch.ones_like(lipschitz))
    return torch.where(lipschitz > 0, squares, torch.zeros_like(squares))


def select(gradient: Float[Tensor, " n"], lipschitz: Float[Tensor, " n"], rule: str = "gsl") -> int:
    """Equation 1: the coordinate of the largest |g| ("gs") or |g| / sqrt(L) ("gsl"); ties go to the smallest index."""
    _known("rule", rule, "gs", "gsl")
    return int(gains(gradient, lipschitz, rule).argmax())


def block_score(g: Float[Tensor, "... b"], H: Float[Tensor, "... b b"], rule: str) -> Tensor:
    """Equation 2 for blocks of one size: |g| (gs), |g|^2 / L_b (gsl), sum g^2 / (b H_ii) (gsd) or g.H^-1 g (gsq). H is positive definite."""
    if rule == "gs":
        return g.norm(dim=-1)
    if rule == "gsl":
        return g.square().sum(-1) / torch.linalg.eigvalsh(H)[..., -1]
    if rule == "gsd":
        return (g.square() / H.diagonal(dim1=-2, dim2=-1)).mean(-1)
    return (g * torch.linalg.solve(H, g)).sum(-1)


def select_block(gradient: Float[Tensor, " n"], hessian: Float[Tensor, "n n"], blocks: Sequence[Block], rule: str = "gsq") -> Selected:
    """Equation 2 over fixed blocks; ties go to the first."""
    _known("rule", rule, "gs", "gsl", "gsd", "gsq")
    chosen = [torch.as_tensor(block) for block in blocks]
    if len({len(b) for b in chosen}) == 1:
        b = torch.stack(chosen)
        scores = block_score(gradient[b], hessian[b[:, :, None], b[:, None, :]], rule)
    else:
        scores = torch.stack([block_score(gradient[b], hessian[b[:, None], b], rule) for b in chosen])
    return Selected(scores, int(scores.argmax()))


def variable_block(gradient: Float[Tensor, " n"], lipschitz: Float[Tensor, " n"], rule: str = "gsd", tau: int = 5) -> Tensor:
    """Equation 3: the `tau` largest |g| ("gs") or g^2 / L ("gsd"), sorted by index."""
    _known("rule", rule, "gs", "gsd")
    return gains(gradient, lipschitz, rule).argsort(descending=True, stable=True)[:tau].sort().values


def greedy_quadratic_block(gradient: Float[Tensor, " n"], hessian: Float[Tensor, "n n"], tau: int = 5) -> Tensor:
    """Equation 3 for GSQ, greedily: the index that most raises g_b.H_bb^-1 g_b joins, `tau` times (a pivoted Cholesky factorization)."""
    rest, diagonal = gradient.clone(), hessian.diagonal().clone()
    columns: list[Tensor] = []
    chosen: list[int] = []
    for _ in range(min(tau, len(gradient))):
        gain = torch.where(diagonal > 1e-12 * hessian.diagonal(), rest.square() / diagonal, -1.0)
        gain[chosen] = -1.0
        i = int(gain.argmax())
        if gain[i] < 0:
            break
        column = (hessian[:, i] - sum((c * c[i] for c in columns), torch.zeros_like(rest))) / diagonal[i].sqrt()
        rest = rest - column * rest[i] / diagonal[i].sqrt()
        diagonal = diagonal - column.square()
        columns.append(column)
        chosen.append(i)
    return torch.tensor(sorted(chosen))


def forest_solve(hessian: Float[Tensor, "n n"], gradient: Float[Tensor, " n"], block: Block) -> Float[Tensor, " b"]:
    """Equation 5: d with H_bb d = -g_b by message passing. Raises ValueError when the block's variables do not form a forest."""
    b = torch.as_tensor(block)
    H = hessian[b[:, None], b]
    edges = [(i, j, float(H[i, j])) for i, j in H.triu(1).nonzero().tolist()]
    return gradient.new_tensor(message_passing(H.diagonal().tolist(), edges, (-gradient[b]).tolist()))


def block_step(x: Float[Tensor, " n"], gradient: Tensor, hessian: Float[Tensor, "n n"], block: Block, update: str = "matrix") -> Step:
    """Equation 4: x_b - H_bb^-1 g_b ("matrix", or "forest" by message passing) or x_b - g_b / L_b with the largest eigenvalue ("gradient")."""
    _known("update", update, "matrix", "forest", "gradient")
    b = torch.as_tensor(block)
    g = gradient[b]
    if update == "forest":
        move = forest_solve(hessian, gradient, b)
    else:
        H = hessian[b[:, None], b]
        move = -torch.linalg.solve(H, g) if update == "matrix" else -g / torch.linalg.eigvalsh(H)[-1]
    return Step(x.index_add(0, b, move), -float(g @ move) / 2)


def forest_block(gradient: Float[Tensor, " n"], hessian: Float[Tensor, "n n"], tau: int) -> Tensor:
    """At most `tau` indices in the order of |g|, without any that would close a cycle of H's graph; sorted."""
    order = gradient.abs().argsort(descending=True, stable=True).tolist()
    return torch.tensor(forest(order, hessian != 0, tau))


def prox_step(
    x: Float[Tensor, " n"], gradient: Float[Tensor, " n"], lipschitz: Float[Tensor, " n"], lam: float = 0.0, low: float = -math.inf,
    high: float = math.inf,
) -> Prox:  # fmt: skip
    """Equation 6: the step of the coordinate whose bound, with lam |x_i| and low <= x_i <= high, falls most (GS-q). `x` is within its bounds."""
    L = torch.where(lipschitz > 0, lipschitz, torch.ones_like(lipschitz))
    goal = x - gradient / L
    new = (goal.sign() * (goal.abs() - lam / L).clamp(min=0)).clamp(low, high)
    d = torch.where(lipschitz > 0, new - x, torch.zeros_like(x))
    decrease = -(gradient * d + 0.5 * L * d.square() + lam * ((x + d).abs() - x.abs()))
    i = int(decrease.argmax())
    moved = x.clone()
    moved[i] = torch.where(lipschitz > 0, new, x)[i]
    return Prox(decrease, i, moved)


def descend(
    model: LinearModel, choose: Callable[[Tensor], Block], update: str = "matrix", x: Float[Tensor, " n"] | None = None
) -> Iterator[Point]:
    """Steps without end on the block that `choose` names for each gradient; predictions follow the moved variables alone."""
    x = model.matrix.new_zeros(model.matrix.shape[1]) if x is None else x
    z, count = model.matrix @ x, 0
    while True:
        count += 1
        gradient = model.gradient(z)
        block = torch.as_tensor(choose(gradient))
        new, progress = block_step(x, gradient, model.hessian, block, update)
        z = model.matrix @ new if count % REFRESH == 0 else z + model.matrix[:, block] @ (new - x)[block]
        x = new
        yield Point(x, float(model.loss(z)), progress)


def prox_descend(model: LinearModel, lam: float, low: float = -math.inf, high: float = math.inf) -> Iterator[Tensor]:
    """x after each step of `prox_step`, from 0, without end."""
    x = model.matrix.new_zeros(model.matrix.shape[1])
    z, count = model.matrix @ x, 0
    while True:
        count += 1
        new = prox_step(x, model.gradient(z), model.lipschitz, lam, low, high)
        i = new.index
        z = model.matrix @ new.x if count % REFRESH == 0 else z + model.matrix[:, i] * (new.x - x)[i]
        x = new.x
        yield x


def lasso_run(A: Float[Tensor, "N n"], b: Float[Tensor, " N"], lam: float, steps: int) -> Sparse:
    """`steps` >= 1 steps of `prox_descend` on |A x - b|^2 / 2 + lam |x|_1."""
    x = next(islice(prox_descend(least_squares(A, b), lam), steps - 1, None))
    return Sparse(x, (x != 0).long())


def newton_on_support(model: LinearModel, x: Float[Tensor, " n"], lam: float) -> Float[Tensor, " n"]:
    """Equation 7: x_S - H_SS^-1 (g_S + lam sign x_S) on the support S; the minimum over S for least squares when no sign changes."""
    support = x.nonzero().flatten()
    gradient = model.gradient(model.matrix @ x) + lam * x.sign()
    return block_step(x, gradient, model.hessian, support, "matrix").x if len(support) else x


def residual(model: LinearModel, x: Float[Tensor, " n"], lam: float) -> float:
    """Largest violation of the optimality conditions of f + lam |x|_1."""
    g = model.gradient(model.matrix @ x)
    return float(torch.where(x != 0, (g + lam * x.sign()).abs(), (g.abs() - lam).clamp(min=0)).max())


def two_metric(model: LinearModel, lam: float, patience: int = 20, tolerance: float = 1e-8, most: int = 100_000) -> tuple[Tensor, int]:
    """Proximal steps until the signs stand still for `patience` of them, then Newton on the support; back where a sign changes or the result is not optimal.

    Returns x and the number of proximal steps."""
    signs, still, wait, x = None, 0, patience, model.matrix.new_zeros(model.matrix.shape[1])
    for count, x in zip(range(1, most + 1), prox_descend(model, lam), strict=False):
        still = still + 1 if signs is not None and torch.equal(x.sign(), signs) else 0
        signs = x.sign()
        if still >= wait:
            candidate = newton_on_support(model, x, lam)
            if torch.equal(candidate.sign(), signs) and residual(model, candidate, lam) <= tolerance:
                return candidate, count
            still, wait = 0, 2 * wait
    return x, most


class GreedyBlocks(torch.optim.Optimizer):
    """Gradient steps on the `tau` parameters of the largest lr g^2 over all groups (GSD with 1/lr as the bound of the curvature); the rest stand still.

    `weight_decay` is that of SGD, part of the gradient. Raises ValueError for lr <= 0, tau < 1 or a decay < 0.
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-2, weight_decay: float = 0.0, tau: int = 5) -> None:
        if lr <= 0 or weight_decay < 0 or tau < 1:
            raise ValueError(f"greedy_bcd needs lr > 0, weight_decay >= 0 and tau >= 1, not {lr}, {weight_decay}, {tau}")
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.tau = tau

    def chosen(self, gradient: Float[Tensor, " n"], bounds: Float[Tensor, " n"]) -> Tensor:
        """Indices of the parameters that move."""
        return variable_block(gradient, bounds, "gsd", self.tau)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        moving = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not moving:
            return result
        gradients = [p.grad.flatten() + group["weight_decay"] * p.flatten() for p, group in moving]
        bounds = [torch.full_like(g, 1 / group["lr"]) for g, (_, group) in zip(gradients, moving, strict=True)]
        chosen = torch.zeros(sum(map(len, gradients)), dtype=torch.bool, device=gradients[0].device)
        chosen[self.chosen(torch.cat(gradients), torch.cat(bounds))] = True
        for (p, group), g, here in zip(moving, gradients, chosen.split([len(g) for g in gradients]), strict=True):
            p.sub_((group["lr"] * g * here).view_as(p))
        return result


def run(seed: int = 0, rows: int = 300, columns: int = 100, most: int = 5000) -> dict[str, Any]:
    """Steps to a relative gap of 1e-6 of least squares with columns of unequal scale: {gs, gsl, random}."""
    generator = torch.Generator().manual_seed(seed)
    model = scaled_least_squares(generator, rows, columns)
    rules: dict[str, Callable[[Tensor], Block]] = {
        "gs": lambda g: [select(g, model.lipschitz, "gs")],
        "gsl": lambda g: [select(g, model.lipschitz, "gsl")],
        "random": lambda g: torch.randint(columns, (1,), generator=generator),
    }
    return {name: steps_to_gap(model, choose, most=most) for name, choose in rules.items()}


def scaled_least_squares(generator: torch.Generator, rows: int = 300, columns: int = 100, scaled: bool = True) -> LinearModel:
    """A normal matrix with columns times exp(N(0,1)), or of length 1, and a normal target."""
    A = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    scale = torch.randn(columns, generator=generator, dtype=torch.float64).exp()
    b = torch.randn(rows, generator=generator, dtype=torch.float64)
    return least_squares(A * scale if scaled else A / A.norm(dim=0), b)


def steps_to_gap(
    model: LinearModel, choose: Callable[[Tensor], Block], update: str = "matrix", gap: float = 1e-6, most: int = 5000
) -> float:
    """Steps from 0 until f - f* <= gap (f(0) - f*) for least squares; infinity after `most`."""
    zero = model.matrix.new_zeros(model.matrix.shape[1])
    start = float(model.loss(model.matrix @ zero))
    best = float(model.loss(model.matrix @ block_step(zero, model.gradient(model.matrix @ zero), model.hessian, torch.arange(len(zero))).x))
    for count, point in zip(range(1, most + 1), descend(model, choose, update), strict=False):
        if point.value - best <= gap * (start - best):
            return count
    return math.inf


STUDY = Study(
    name="greedy_bcd",
    paper=Paper(
        "Let's Make Block Coordinate Descent Converge Faster: Faster Greedy Rules, Message-Passing, Active-Set Complexity, and Superlinear Convergence",
        "1712.08859",
        2022,
    ),
    domain="optim",
    run=run,
    kind="component",
    summary="coordinate descent on the block of most guaranteed progress, Newton steps on forests; usable from any method as update.optimizer=greedy_bcd",
)
