"""TRPO: trust region policy optimization (arXiv:1502.05477).

The importance-sampled surrogate of the return is maximized subject to a bound on the mean KL from the old policy: one natural-gradient step by
conjugate gradient on Fisher-vector products, then a backtracking line search that checks the real surrogate and the real KL. Against PPO it changes
the objective (no clip) and the update; the critic is fitted by regression as there. Equations of the paper; the acceptance ratio and the damping are
those of the authors' later code. Left out: the vine estimator (it needs a reset to every visited state) and the random tenth of the states for the
Fisher products, which pays on large batches only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.control.ppo import METHOD as PPO
from anypo.policy import Loss, Signals
from anypo.seams.credit import GAE
from anypo.seams.groups import masked_mean
from anypo.seams.natural import BatchGeometry, conjugate_gradient, scale_to_radius, split_loss
from anypo.seams.natural import line_search as backtrack
from anypo.seams.objective import token_ratio
from anypo.seams.regularize import gaussian_kl
from anypo.seams.update import GradientSteps

if TYPE_CHECKING:
    from anypo.run import MethodLoss, Run


class Step(NamedTuple):
    step: Float[Tensor, " P"]
    expected_improvement: Tensor  # of the surrogate, to first order


def bound(surrogate_value: float, epsilon: float, gamma: float, max_kl: float) -> float:
    """Equation 2: the return is at least surrogate - C max KL, with C = 4 epsilon gamma / (1 - gamma)^2 and epsilon = max |A|."""
    return surrogate_value - 4 * epsilon * gamma / (1 - gamma) ** 2 * max_kl


def surrogate(logp: Float[Tensor, "N T"], old_logp: Float[Tensor, "N T"], advantages: Float[Tensor, "N T"], mask: Tensor) -> Tensor:
    """Equation 3: masked mean of ratio * advantage, to maximize."""
    return masked_mean(token_ratio(logp, old_logp, mask) * advantages, mask)


def cg(matrix: Float[Tensor, "P P"], b: Float[Tensor, " P"], iterations: int = 10, tol: float = 1e-10, damping: float = 0.0) -> Tensor:
    """Equation 6 for an explicit matrix."""
    return conjugate_gradient(lambda v: matrix @ v + damping * v, b, iterations, tol)


def full_step(matrix: Float[Tensor, "P P"], gradient: Float[Tensor, " P"], delta: float = 0.01, damping: float = 0.0) -> Step:
    """Equations 6 and 7 with conjugate gradient to convergence; no step where the gradient is 0."""
    direction = cg(matrix, gradient, 10 * len(gradient), 1e-24, damping)
    step = scale_to_radius(direction, float(direction @ (matrix @ direction + damping * direction)), delta)
    return Step(step, gradient @ step)


def acceptable(gain: Tensor, kl: Tensor, expected: Tensor, delta: float, accept_ratio: float = 0.0) -> Tensor:
    """Equation 8: the surrogate rose, the KL is within delta, and the gain is at least `accept_ratio` of what was expected (0 = any)."""
    enough = gain >= accept_ratio * expected if accept_ratio > 0 else torch.ones_like(gain, dtype=torch.bool)
    return (gain > 0) & (kl <= delta) & enough


def line_search(
    surrogate_gain: Float[Tensor, " J"], kl: Float[Tensor, " J"], expected: Float[Tensor, " J"], delta: float, accept_ratio: float = 0.0
) -> int:
    """Equation 8 over J attempts that were all measured: the index of the first acceptable one, -1 when there is none."""
    found = acceptable(surrogate_gain, kl, expected, delta, accept_ratio).nonzero()
    return int(found[0]) if len(found) else -1


def kl(
    kind: str, mean_old: Tensor | None = None, log_std_old: Tensor | None = None, mean: Tensor | None = None, log_std: Tensor | None = None,
    logits_old: Tensor | None = None, logits: Tensor | None = None,
) -> Float[Tensor, " B"]:  # fmt: skip
    """Equation 9: KL(old || new) of every state, "gaussian" (means and log standard deviations [B,d]) or "categorical" (logits [B,A])."""
    if kind == "gaussian":
        return gaussian_kl(mean_old, log_std_old, mean, log_std)  # type: ignore[arg-type]
    if kind != "categorical":
        raise ValueError(f"unknown kind of distribution '{kind}'; use gaussian or categorical")
    old, new = logits_old.log_softmax(-1), logits.log_softmax(-1)  # type: ignore[union-attr]
    return (old.exp() * (old - new)).sum(-1)


def fisher_softmax(features: Float[Tensor, "B A P"], theta: Float[Tensor, " P"]) -> Float[Tensor, "P P"]:
    """Mean Fisher matrix of the linear softmax policy pi(a) ~ exp(features_a . theta): the mean covariance of the features under it."""
    chance = (features @ theta).softmax(-1)[..., None]
    centred = features - (chance * features).sum(1, keepdim=True)
    return torch.einsum("bap,baq->pq", chance * centred, centred) / len(features)


@dataclass
class Surrogate:
    """Ratio times advantage, without a bound of its own (equation 3)."""

    needs = frozenset({"logp"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        return Loss(-surrogate(new.logp, batch.logp, batch.advantage, batch.counted))


@dataclass
class TrustRegionStep(GradientSteps):
    """One constrained natural-gradient step of the policy (equations 5 to 8); then the critic's regression by ordinary epochs of minibatches."""

    delta: float = 0.01  # bound on the mean KL of a step, nats, > 0
    iterations: int = 10  # of conjugate gradient, >= 1
    damping: float = 0.1  # added to the Fisher matrix, >= 0
    shrink: float = 0.8  # factor of the line search, in (0,1)
    attempts: int = 10  # of the line search, >= 1; 1 = the full step or none
    accept_ratio: float = 0.0  # share of the expected gain that a step must make, in [0,1]; 0 = any gain

    needs = frozenset({"kl_old"})

    def __call__(self, batch: Batch, loss_fn: MethodLoss, run: Run) -> dict[str, float]:
        policy_loss, critic_loss = split_loss(loss_fn)
        with run.timed("update"):
            metrics = self.policy_step(BatchGeometry(batch, policy_loss, run, self.damping))
        run.advance_version()
        return metrics | ({} if critic_loss is None else super().__call__(batch, critic_loss, run))

    def policy_step(self, geometry: BatchGeometry) -> dict[str, float]:
        """Moves the policy, or leaves it exactly as it was when no step is acceptable."""
        gradient, before = -geometry.gradient(), geometry.measure()
        direction = conjugate_gradient(geometry.product, gradient, self.iterations)
        step = scale_to_radius(direction, float(direction @ geometry.product(direction)), self.delta)
        expected = float(gradient @ step)
        if not expected > 0:  # no gradient, or a curvature that rounding made negative
            return {"kl": 0.0, "gain": 0.0, "expected_gain": 0.0, "line_search": -1.0}

        def accept(point: Tensor, fraction: float) -> bool:
            found = geometry.measure(point)
            gain, divergence, wanted = torch.tensor([before.loss - found.loss, found.kl, fraction * expected], dtype=torch.float64)
            return bool(acceptable(gain, divergence, wanted, self.delta, self.accept_ratio))

        found = backtrack(geometry.start, step, accept, self.shrink, self.attempts)
        after = geometry.measure(found.point)
        return {"kl": after.kl, "gain": before.loss - after.loss, "expected_gain": expected, "line_search": float(found.index)}


METHOD = PPO.but(
    name="trpo",
    paper=Paper("Trust Region Policy Optimization", "1502.05477", 2015),
    summary="one natural-gradient step a batch inside a bound on the mean KL, found by conjugate gradient and a line search",
    credit=GAE(gamma=0.99, lam=0.97),
    objective=Surrogate(),
    update=TrustRegionStep(epochs=10, minibatches=32, learning_rate=1e-3, optimizer="adam", max_grad_norm=0.5),
)
