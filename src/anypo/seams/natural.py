"""Natural gradients and trust regions: what methods share that step in the metric of the mean KL from the policy that acted (TRPO and its kin).

The policy's parameters are one flat vector; everything else is a function of it. `fisher_vector_product` differentiates the mean KL twice (at the old
policy its Hessian is the mean Fisher matrix), `conjugate_gradient` solves with products alone, `line_search` backtracks, and `BatchGeometry` ties
them to a batch and the method's loss. Left out: chunked batches (the policies that provide an exact `kl_old` are small) and shared actor-critic
trunks, whose critic loss would leave the trust region.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from anypo.batch import Batch
from anypo.policy import Policy, Signals
from anypo.seams.groups import masked_mean

if TYPE_CHECKING:
    from anypo.run import MethodLoss, Run

Vector = Float[Tensor, " P"]
Product = Callable[[Tensor], Tensor]


def policy_parameters(policy: Policy) -> list[Tensor]:
    """The parameters of every role but "value": those that the trust region is about."""
    return [p for group in policy.parameter_groups() if group.get("role") != "value" for p in group["params"]]


def flatten(tensors: Iterable[Tensor]) -> Vector:
    """Tensors as one detached vector [P], in order."""
    return torch.cat([t.detach().reshape(-1) for t in tensors])


@torch.no_grad()
def assign(parameters: Sequence[Tensor], vector: Vector) -> None:
    """The inverse of `flatten`, in place and exact."""
    start = 0
    for parameter in parameters:
        parameter.copy_(vector[start : start + parameter.numel()].view_as(parameter))
        start += parameter.numel()


def flat_gradient(value: Tensor, parameters: Sequence[Tensor], *, create_graph: bool = False, retain_graph: bool | None = None) -> Vector:
    """Gradient [P] of a scalar; 0 for parameters it does not depend on, and everywhere for a constant."""
    if not value.requires_grad:
        return torch.cat([torch.zeros_like(p).reshape(-1) for p in parameters])
    found = torch.autograd.grad(value, parameters, create_graph=create_graph, retain_graph=retain_graph, allow_unused=True)
    pairs = zip(found, parameters, strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).reshape(-1) for g, p in pairs])


def fisher_vector_product(divergence: Tensor, parameters: Sequence[Tensor], damping: float = 0.0) -> Product:
    """v [P] -> (H + damping I) v, with H the Hessian of a scalar divergence (a mean KL from detached old distributions) at the current parameters.

    The graph of the divergence is kept for as long as the returned function lives.
    """
    slope = flat_gradient(divergence, parameters, create_graph=True)

    def product(vector: Vector) -> Vector:
        return flat_gradient(slope @ vector, parameters, retain_graph=True) + damping * vector

    return product


@torch.no_grad()
def conjugate_gradient(product: Product, b: Vector, iterations: int = 10, tol: float = 1e-10) -> Vector:
    """x [P] with product(x) = b, from x = 0: at most `iterations` products, fewer once the squared residual is below `tol`.

    `product` is v -> A v with A symmetric positive definite. Stops early where rounding has made a direction's curvature non-positive.
    """
    x, residual, direction = torch.zeros_like(b), b.clone(), b.clone()
    squared = residual @ residual
    for _ in range(iterations):
        if float(squared) <= tol:
            break
        with torch.enable_grad():
            image = product(direction)
        curvature = direction @ image
        if not float(curvature) > 0:
            break
        step = squared / curvature
        x = x + step * direction
        residual = residual - step * image
        following = residual @ residual
        direction = residual + following / squared * direction
        squared = following
    return x


def scale_to_radius(direction: Vector, curvature: float, delta: float) -> Vector:
    """sqrt(2 delta / (x^T F x)) x, so that the quadratic model of the KL is `delta`; 0 when `curvature` = x^T F x is not positive (or not finite)."""
    if not 0 < curvature < float("inf"):
        return torch.zeros_like(direction)
    return (2 * delta / curvature) ** 0.5 * direction


class Search(NamedTuple):
    point: Tensor  # [P] the accepted parameters, or the start
    index: int  # type: ignore[assignment]  # how often the step was shrunk; -1 when nothing was accepted


def line_search(start: Vector, step: Vector, accept: Callable[[Tensor, float], bool], shrink: float = 0.8, attempts: int = 10) -> Search:
    """The first of start + shrink^j step, j = 0 .. attempts - 1, that `accept(point, shrink^j)` takes; the start itself when none is."""
    for j in range(attempts):
        fraction = shrink**j
        point = start + fraction * step
        if accept(point, fraction):
            return Search(point, j)
    return Search(start, -1)


def split_loss(loss_fn: MethodLoss) -> tuple[MethodLoss, MethodLoss | None]:
    """The method's loss as that of the policy (the objective, entropy bonuses, ...) and that of the critic (the parts that need `value`; None
    without any), so that each can be moved in its own way."""

    def only(parts: list[object]) -> MethodLoss:
        found = copy.copy(loss_fn)
        found.parts = tuple(parts)  # type: ignore[arg-type]
        declared = {n for part in parts for n in getattr(part, "needs", ())}
        found.needs = frozenset(n for n in declared if not n.startswith(("old_", "ref_")))
        return found

    critic = [part for part in loss_fn.parts if "value" in getattr(part, "needs", ())]
    policy = [part for part in loss_fn.parts if part not in critic]
    return only(list(policy)), only(list(critic)) if critic else None


class Measured(NamedTuple):
    loss: float  # the policy's loss, to minimize
    kl: float  # mean KL(old || new) over the counted actions


class BatchGeometry:
    """A batch as a function of the policy's parameter vector: the loss, the mean KL from the policy that acted, their derivatives.

    The policy has to provide `kl_old`, the exact KL [N,T] from the distribution that is stored in the batch.
    """

    def __init__(self, batch: Batch, loss_fn: MethodLoss, run: Run, damping: float = 0.0) -> None:
        """`loss_fn`: the policy's part of the loss (see `split_loss`); `damping`: added to the Fisher matrix in every product."""
        self.batch, self.loss_fn, self.policy, self.damping = batch, loss_fn, run.policy, damping
        self.parameters = policy_parameters(run.policy)
        self.start = flatten(self.parameters)
        self._product: Product | None = None

    def signals(self, *needs: str) -> Signals:
        """Differentiable signals under the parameters of this moment."""
        return self.policy.evaluate(self.batch, set(needs))

    def mean(self, values: Tensor) -> Tensor:
        """Mean of [N,T] over the counted actions."""
        return masked_mean(values, self.batch.counted)

    def gradient(self) -> Vector:
        """Gradient [P] of the loss at the parameters of this moment."""
        return flat_gradient(self.loss_fn(self.batch, self.signals(*self.loss_fn.needs)).value, self.parameters)

    def product(self, vector: Vector) -> Vector:
        """(F + damping I) v with the mean Fisher matrix at the parameters of the first call."""
        if self._product is None:
            self._product = fisher_vector_product(self.mean(self.signals("kl_old").kl_old), self.parameters, self.damping)
        return self._product(vector)

    @torch.no_grad()
    def measure(self, point: Vector | None = None) -> Measured:
        """Loss and mean KL, at `point` [P] (which the policy then keeps) or at the parameters of this moment."""
        if point is not None:
            assign(self.parameters, point)
        new = self.signals(*self.loss_fn.needs, "kl_old")
        return Measured(float(self.loss_fn(self.batch, new).value), float(self.mean(new.kl_old)))
