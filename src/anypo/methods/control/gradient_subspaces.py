"""Gradient subspaces: do policy gradients lie in a few slowly turning directions? (arXiv:2401.06604).

PPO as it is, with an instrument in its update: every few batches, before the first step of the epochs, the top eigenvectors of the Hessian of the
actor's and of the critic's loss, the share of the gradient that lies in their span, and how much the span turned since the last look. `snapshot`
measures any run with a loss (SAC's too); a loss that adds actor and critic is fine, for each network sees its own part alone. The variant
`projected` moves inside the span only; that update is [reconstructed] from the paper's outlook, equation 8 of this row. Left out: the paper's
benchmarks, batches of 1e5 states, and phases of training found from the return curve.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.control.ppo import METHOD as PPO
from anypo.policy import Loss, Policy
from anypo.seams.natural import Product, assign, flat_gradient, flatten
from anypo.seams.natural import fisher_vector_product as hessian_vector_product
from anypo.seams.update import GradientSteps

if TYPE_CHECKING:
    from anypo.run import MethodLoss, Run

Basis = Float[Tensor, "P k"]
ORDERS = ("largest", "magnitude")
ACCURACY = (
    1e-4  # largest residual |H v - lambda v| of an eigenpair, in units of the largest |lambda|; lambda is then right to about its square
)


class Subspace(NamedTuple):
    eigenvalues: Float[Tensor, " k"]  # the first is the largest
    basis: Basis  # orthonormal

    @property
    def projector(self) -> Float[Tensor, "P P"]:
        return self.basis @ self.basis.mT


class Snapshot(NamedTuple):
    eigenvalues: Float[Tensor, " k"]
    basis: Basis
    gradient: Float[Tensor, " P"]
    fraction: float  # of the squared gradient inside the span
    chance: float  # k / P, what a random span would hold


def _first(values: Float[Tensor, " m"], k: int, order: str) -> Tensor:
    """Indices of the k largest values ("largest") or magnitudes ("magnitude"). Raises ValueError for another order or a k out of range."""
    if order not in ORDERS:
        raise ValueError(f"unknown order of eigenvalues '{order}'; use largest or magnitude")
    if not 1 <= k <= len(values):
        raise ValueError(f"a subspace of {k} directions does not fit {len(values)} parameters; choose k between 1 and that number")
    return (values if order == "largest" else values.abs()).argsort(descending=True, stable=True)[:k]


def subspace(hessian: Float[Tensor, "P P"], k: int, order: str = "largest") -> Subspace:
    """Equation 1: the top k eigenpairs of an explicit symmetric matrix."""
    values, vectors = torch.linalg.eigh((hessian + hessian.mT) / 2)
    chosen = _first(values, k, order)
    return Subspace(values[chosen], vectors[:, chosen])


def lanczos(product: Product, size: int, k: int, order: str = "largest", accuracy: float = ACCURACY) -> Subspace:
    """Equations 1 and 9: the same from products v -> H v alone, in float64, with full re-orthogonalization.

    Goes on from 2k + 10 products until every residual is below `accuracy` times the largest |eigenvalue| (or the space is used up). Where the space
    of the products closes (a repeated eigenvalue), a random direction opens it again; random starts have a seed of their own.
    """
    generator = torch.Generator().manual_seed(size)
    found, diagonal, beside = torch.zeros(0, size, dtype=torch.float64), list[float](), list[float]()

    def orthogonal(v: Tensor) -> Tensor:
        for _ in range(2):
            v = v - found.mT @ (found @ v)
        return v

    following, norm, scale = torch.randn(size, generator=generator, dtype=torch.float64), 0.0, 0.0
    while True:
        found = torch.cat([found, (following / following.norm())[None]])
        image = product(found[-1])
        diagonal.append(float(found[-1] @ image))
        scale = max(scale, float(image.norm()))
        following = orthogonal(image)
        norm = float(following.norm())
        done = len(found) == size
        if done or (len(found) >= 2 * k + 10 and len(found) % 5 == 0):
            middle, next_to_it = (torch.tensor(x, dtype=torch.float64) for x in (diagonal, beside))
            values, vectors = torch.linalg.eigh(middle.diag() + next_to_it.diag(1) + next_to_it.diag(-1))
            chosen = _first(values, k, order)
            if done or norm * float(vectors[-1, chosen].abs().max()) <= accuracy * float(values.abs().max()):
                return Subspace(values[chosen], found.mT @ vectors[:, chosen])
        if norm <= 1e-10 * scale:  # an invariant subspace: go on outside it
            following, norm = orthogonal(torch.randn(size, generator=generator, dtype=torch.float64)), 0.0
        beside.append(norm)


def fraction(basis: Basis, gradient: Float[Tensor, " P"]) -> Tensor:
    """Equation 2: |V^T g|^2 / |g|^2 in [0,1]; 0 for a zero gradient."""
    whole = gradient @ gradient
    inside = basis.mT @ gradient
    return torch.where(whole > 0, (inside @ inside) / torch.where(whole > 0, whole, torch.ones_like(whole)), torch.zeros_like(whole))


def overlap(basis1: Basis, basis2: Basis) -> Tensor:
    """Equation 3: |V1^T V2|_F^2 / k in [0,1]; 1 for equal spans, whatever their bases."""
    return (basis1.mT @ basis2).square().sum() / basis1.shape[-1]


def projected(basis: Basis, gradient: Float[Tensor, " P"]) -> Float[Tensor, " P"]:
    """V V^T g."""
    return basis @ (basis.mT @ gradient)


def projected_update(theta: Float[Tensor, " P"], gradient: Float[Tensor, " P"], basis: Basis, lr: float) -> Float[Tensor, " P"]:
    """Equation 8: a gradient step inside the span."""
    return theta - lr * projected(basis, gradient)


def parameters_by_role(policy: Policy, roles: tuple[str, ...]) -> dict[str, list[Tensor]]:
    """The networks of a policy: its parameters by role, without roles that it has not."""
    found: dict[str, list[Tensor]] = {}
    for group in policy.parameter_groups():
        if group.get("role") in roles and group["params"]:
            found.setdefault(group["role"], []).extend(group["params"])
    return found


def snapshot(
    batch: Batch, loss_fn: MethodLoss, policy: Any, k: int = 10, order: str = "largest", roles: tuple[str, ...] = ("policy", "value")
) -> dict[str, Snapshot]:
    """Equations 1, 2 and 5 for every role: eigenpairs of the loss's Hessian on the whole batch, and its raw gradient there. Works on a float64 copy;
    the policy and its gradients stay as they are. At the policy that acted every ratio is 1, so no clip flattens the loss."""
    twin = copy.deepcopy(policy).double()
    loss, found = loss_fn(batch, twin.evaluate(batch, set(loss_fn.needs))).value, {}
    for role, parameters in parameters_by_role(twin, roles).items():
        gradient = flat_gradient(loss, parameters, retain_graph=True)
        top = lanczos(hessian_vector_product(loss, parameters), len(gradient), k, order)
        found[role] = Snapshot(*top, gradient, float(fraction(top.basis, gradient)), k / len(gradient))
    return found


@dataclass
class SubspaceSteps(GradientSteps):
    """Gradient steps; every `every` batches a look at the Hessians first. Logs `subspace/ROLE` (equation 2) and `overlap/ROLE` with the last look."""

    k: int = 10  # directions, from 1 to the number of a network's parameters
    every: int = 10  # batches between two looks, >= 1
    order: str = "largest"  # largest or magnitude, of the eigenvalues
    project: bool = False  # steps inside the span of the last look only (equation 8)
    latest: dict[str, Snapshot] = field(default_factory=dict, init=False, repr=False)  # by role

    def __call__(self, batch: Batch, loss_fn: MethodLoss, run: Run) -> dict[str, float]:
        if run.step % self.every == 0 or (self.project and not self.latest):
            now = snapshot(batch, loss_fn, run.policy, self.k, self.order)
            run.log(**{f"subspace/{role}": seen.fraction for role, seen in now.items()})
            run.log(**{f"overlap/{role}": float(overlap(self.latest[role].basis, now[role].basis)) for role in now if role in self.latest})
            self.latest = now
        return super().__call__(batch, loss_fn, run)

    def backward(self, part: Batch, loss_fn: MethodLoss, run: Run) -> Loss:
        loss = super().backward(part, loss_fn, run)
        for role, parameters in parameters_by_role(run.policy, tuple(self.latest) if self.project else ()).items():
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            basis = self.latest[role].basis
            assign(gradients, projected(basis, flatten(gradients).to(basis.dtype)))
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"latest": {role: list(seen) for role, seen in self.latest.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.latest = {role: Snapshot(*seen) for role, seen in state["latest"].items()}


METHOD = PPO.but(
    name="gradient_subspaces",
    paper=Paper("Identifying Policy Gradient Subspaces", "2401.06604", 2024),
    summary="PPO under an instrument: the share of actor and critic gradients in the span of top Hessian eigenvectors, and how that span turns",
    update=SubspaceSteps(epochs=10, minibatches=32, learning_rate=3e-4, optimizer="adam", max_grad_norm=0.5),
)

VARIANTS = {
    "projected": METHOD.but(
        name="gradient_subspaces.projected",
        summary="plain SGD inside the span of the top Hessian eigenvectors of the last look",
        update=SubspaceSteps(epochs=10, minibatches=32, learning_rate=1e-2, optimizer="sgd", max_grad_norm=0.5, project=True),
    )
}
