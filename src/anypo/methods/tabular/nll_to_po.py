"""NLL to PO: bilevel reward learning from data (arXiv:2510.07624).

Only pairs (x, y) exist, no reward. Maximum likelihood becomes two levels: an entropy-regularized policy gradient on a reward (inner), and the reward under
which its solution gives the data the highest likelihood (outer). Against REINFORCE the reward changes: a Mahalanobis distance to y whose matrix U is
tied to the entropy weight by the closed form of the Gaussian case, with the covariance of the model's residuals; or learned by implicit
differentiation (variant `bilevel`). Equation 1 is the paper's, 2-4 and 8 are known from the authors' code, 5-9 derived (the specification's numbers).
Log-probabilities and entropies of the components are joint ones: `pg_loss`, a mean over dimensions, is 1/n of theirs with the same weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.tabular.data import pairs_of
from anypo.domains.tabular.distance import LearnedMatrix, factored, mahalanobis, reward_table
from anypo.method import Method, Paper
from anypo.policy import Loss, Signals
from anypo.seams.credit import dense_reward
from anypo.seams.groups import broadcast, group_min, masked_mean
from anypo.seams.natural import conjugate_gradient, flat_gradient
from anypo.seams.regularize import EntropyBonus
from anypo.seams.rollout import OnPolicy
from anypo.seams.select import UniformPrompts
from anypo.seams.update import GradientSteps

if TYPE_CHECKING:
    from anypo.run import Run

KINDS = ("full", "diagonal", "isotropic")
TRANSFORMS = ("none", "normalize", "rbf")
MATRIX = "reward_matrix"  # U in the run's shared state
Matrix = Float[Tensor, "n n"]


class InnerLoss(NamedTuple):
    loss: Tensor
    reward: Tensor  # [G,B], transformed


class Optimal(NamedTuple):
    matrix: Tensor  # [n,n]
    inner_mean: Tensor  # [n]
    inner_covariance: Tensor  # [n,n]
    nll: Tensor


class Categorical(NamedTuple):
    reward_table: Tensor  # [C,C], guess by truth
    policy: Tensor  # [C]
    objective: Tensor
    hypergradient: Tensor  # [C,C]


class Implicit(NamedTuple):
    hypergradient: Tensor  # [n]


def transformed(reward: Float[Tensor, " N"], group: Int[Tensor, " N"], transform: str, gamma: float = 1.0) -> Float[Tensor, " N"]:
    """Equation 3: as it is, above the least of the datum's generations (so >= 0, and 0 for a lone one), or exp(gamma r)."""
    if transform not in TRANSFORMS:
        raise ValueError(f"unknown reward transform '{transform}'; use {', '.join(TRANSFORMS)}")
    if transform == "none":
        return reward
    return (gamma * reward).exp() if transform == "rbf" else reward - group_min(reward, group)


def pg_loss(
    samples: Float[Tensor, "G B n"], mean: Float[Tensor, "B n"], std: Float[Tensor, "B n"], target: Float[Tensor, "B n"], matrix: Matrix,
    transform: str = "normalize", entropy_weight: float = 0.01, rbf_gamma: float = 1.0, clamp: float | None = None,
) -> InnerLoss:  # fmt: skip
    """Equation 4 for diagonal Gaussians: mean over generations and data of (mean over dimensions of -log p) * reward, minus weight * mean entropy.
    Differentiable in mean and std; `clamp` c: -log p within [-c, c]."""
    count = samples.shape[1]
    reward = mahalanobis(samples, target, matrix).detach()
    reward = transformed(reward.flatten(), torch.arange(count).repeat(len(samples)), transform, rbf_gamma).reshape(-1, count)
    nl = (0.5 * ((samples.detach() - mean) / std) ** 2 + std.log() + 0.5 * math.log(2 * math.pi)).mean(-1)
    if clamp is not None:
        nl = nl.clamp(-clamp, clamp)
    entropy = (std.log() + 0.5 * math.log(2 * math.pi * math.e)).mean()
    return InnerLoss((nl * reward).mean() - entropy_weight * entropy, reward)


def optimal_matrix(covariance: Matrix, entropy_weight: float, kind: str = "full") -> Matrix:
    """Equation 6: the best U of its kind for data of this covariance."""
    if kind not in KINDS:
        raise ValueError(f"unknown reward matrix '{kind}'; use {', '.join(KINDS)}")
    half = entropy_weight / 2
    if kind == "full":
        return half * torch.linalg.inv(covariance)
    if kind == "diagonal":
        return torch.diag(half / covariance.diagonal())
    return half * len(covariance) / covariance.trace() * torch.eye(len(covariance), dtype=covariance.dtype)


def inner_covariance(matrix: Matrix, entropy_weight: float) -> Matrix:
    """Equation 5: the covariance that maximizes expected reward plus weighted joint entropy, (lam / 2) U^-1."""
    return entropy_weight / 2 * torch.linalg.inv(matrix)


def gaussian_nll(gap: Float[Tensor, " n"], covariance: Matrix, data_covariance: Matrix) -> Tensor:
    """Equation 7: expected NLL of Gaussian data under a Gaussian; `gap` between their means."""
    inverse = torch.linalg.inv(covariance)
    return 0.5 * (len(gap) * math.log(2 * math.pi) + torch.logdet(covariance) + (inverse * data_covariance.T).sum() + gap @ inverse @ gap)


def optimal_reward(mean: Float[Tensor, " n"], covariance: Matrix, entropy_weight: float, kind: str = "full") -> Optimal:
    """Equations 5-7: the best U of its kind, the inner solution under it and its NLL."""
    matrix = optimal_matrix(covariance, entropy_weight, kind)
    inner = inner_covariance(matrix, entropy_weight)
    return Optimal(matrix, mean, inner, gaussian_nll(torch.zeros_like(mean), inner, covariance))


def categorical(matrix: Float[Tensor, "C C"], distribution: Float[Tensor, " C"], entropy_weight: float) -> Categorical:
    """Equation 8: table, inner solution, E_q log p and its gradient in U, for one distribution q over classes."""
    table = reward_table(matrix)
    log_policy = (table @ distribution / entropy_weight).log_softmax(-1)
    weight = (distribution - log_policy.exp())[:, None] * distribution[None] / entropy_weight
    weight = weight - torch.diag(weight.diagonal())
    # sum over c != y of w_cy * -(e_c - e_y)(e_c - e_y)^T
    slope = weight + weight.T - torch.diag(weight.sum(0) + weight.sum(1))
    return Categorical(table, log_policy.exp(), distribution @ log_policy, slope)


def implicit(
    reward_diag: Float[Tensor, " n"], log_std: Float[Tensor, " n"], mean: Float[Tensor, " n"], policy_mean: Float[Tensor, " n"],
    covariance: Matrix, entropy_weight: float,
) -> Implicit:  # fmt: skip
    """Equation 9 for a diagonal Gaussian with U = diag(u): gradient of E_q log p in u, stationarity lam - 2 u e^{2s} = 0. `mean` is the data's.
    Of dg/ds = -4 u e^{2s} and dg/du = -2 e^{2s} only the ratio is left; the weight enters through the `log_std` that solves the inner problem."""
    outer = -1 + (covariance.diagonal() + (policy_mean - mean) ** 2) * (-2 * log_std).exp()
    return Implicit(-outer / (2 * reward_diag))


def implicit_gradient(
    inner: Tensor, outer: Tensor, parameters: Sequence[Tensor], reward: Tensor, damping: float = 1e-3, iterations: int = 20
) -> Tensor:
    """Equation 9 in general: gradient of `outer` (a function of the parameters) in `reward`, where the parameters maximize `inner`, a function of both.

    Conjugate gradients on the negative Hessian plus `damping`; they stop where its curvature is not positive.
    """
    g = flat_gradient(inner, parameters, create_graph=True)
    wanted = flat_gradient(outer, parameters, retain_graph=True)
    solved = conjugate_gradient(lambda v: damping * v - flat_gradient(g @ v, parameters, retain_graph=True).detach(), wanted, iterations)
    return torch.autograd.grad(g @ solved, reward)[0]


def entropy_weight(run: Run) -> float:
    """lam of the method's entropy bonus. Raises ValueError without one."""
    for part in run.method.regularize:
        if isinstance(part, EntropyBonus) and part.coefficient > 0:
            return part.coefficient
    raise ValueError(f"{run.method.name} ties its reward to the entropy weight; set regularize.0.coefficient above 0")


@dataclass
class MahalanobisReward:
    """Equation 2. U by equation 6 from the covariance of the model's residuals on the training pairs, or the matrix in the run's state."""

    kind: str = "full"  # full, diagonal, isotropic: tied to the entropy weight; given: what the run's state holds, the identity at first
    refresh: int = 8  # steps between two estimates of the residuals' covariance, >= 1

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        self._prepare(run)
        matrix, target = run.state[MATRIX], batch.signal("target")
        if target.dim() == 1:
            return reward_table(matrix)[batch.action[:, 0], target]
        return mahalanobis(batch.action[:, 0], target, matrix)

    def _prepare(self, run: Run) -> None:
        """U for this step into the run's state."""
        data = pairs_of(run)
        if self.kind == "given":
            classes = run.policy.log_probs(data.train.x[:1]).shape[-1] if data.train.y.dim() == 1 else data.train.y.shape[-1]
            run.state.setdefault(MATRIX, torch.eye(classes, dtype=torch.float64))
        elif data.train.y.dim() == 1:
            raise ValueError("the closed form is for vectors; for classes use the variant bilevel of nll_to_po, or reward.kind=given")
        elif MATRIX not in run.state or run.step % self.refresh == 0:
            with torch.no_grad():
                residual = data.train.y - run.policy.parts(data.train.x)[0]
            covariance = residual.T @ residual / len(residual) + 1e-9 * torch.eye(residual.shape[1], dtype=residual.dtype)
            run.state[MATRIX] = optimal_matrix(covariance, entropy_weight(run), self.kind)


@dataclass
class TransformedReward:
    """Equation 3 as the advantage of the single action."""

    transform: str = "normalize"  # none, normalize, rbf
    rbf_gamma: float = 1.0  # > 0

    @property
    def compares_group(self) -> bool:
        return self.transform == "normalize"

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        return broadcast(transformed(dense_reward(batch).sum(1), batch.group, self.transform, self.rbf_gamma), batch.mask)


@dataclass
class ScoreFunction:
    """Equation 4: -log p times the detached reward, mean over the batch's actions."""

    clamp: float | None = None  # > 0: -log p within +-clamp, without gradient beyond; None = as it is

    needs = frozenset({"logp"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        nl = -torch.where(batch.counted, new.logp, new.logp.new_zeros(()))
        if self.clamp is not None:
            nl = nl.clamp(-self.clamp, self.clamp)
        return Loss(masked_mean(nl * batch.advantage.detach(), batch.counted))


@dataclass
class Reparametrized:
    """Equation 4, second form: minus the reward of samples that carry the gradient themselves; untransformed, with the run's U."""

    needs = frozenset({"sample"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        return Loss(-masked_mean(mahalanobis(new.sample, batch.signal("target")[:, None], run.state[MATRIX]), batch.counted))


@dataclass
class OuterStep:
    """Algorithm B: every `every` steps, one Adam step of U's Cholesky factor (softplus diagonal) up the likelihood of the validation pairs."""

    every: int = 20  # inner steps to one outer step, >= 1
    learning_rate: float = 0.05  # > 0
    damping: float = 1e-3  # >= 0, added to the inner problem's curvature
    iterations: int = 20  # of conjugate gradients, >= 1
    learned: LearnedMatrix | None = field(default=None, init=False, repr=False)

    def __call__(self, batch: Batch, run: Run) -> None:
        if (run.step + 1) % self.every:
            return
        if self.learned is None:
            self.learned = LearnedMatrix(run.state[MATRIX])
        raw, data = self.learned.raw.detach().requires_grad_(), pairs_of(run)
        expected = run.policy.expected_reward(*data.train, factored(raw)).mean()
        inner = expected + entropy_weight(run) * run.policy.entropy(data.train.x).mean()
        outer = run.policy.log_prob(*data.validation).mean()
        parameters = [p for p in run.policy.parameters() if p.requires_grad]
        self.learned.ascend(implicit_gradient(inner, outer, parameters, raw, self.damping, self.iterations).tril(), self.learning_rate)
        run.state[MATRIX] = self.learned.matrix
        run.log(outer_nll=-float(outer.detach()))

    def state_dict(self) -> dict[str, Any]:
        return {"learned": self.learned.state_dict() if self.learned else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.learned = LearnedMatrix.restored(state["learned"]) if state["learned"] else None


METHOD = Method(
    name="nll_to_po",
    paper=Paper("From Data to Rewards: a Bilevel Optimization Perspective on Maximum Likelihood Estimation", "2510.07624", 2025),
    domain="tabular",
    summary="likelihood as a policy gradient: a Mahalanobis reward tied to the entropy weight in closed form, or learned by implicit differentiation",
    task="gaussian_data",
    select=UniformPrompts(group_size=5),
    rollout=OnPolicy(),
    reward=MahalanobisReward(),
    credit=TransformedReward(),
    objective=ScoreFunction(),
    regularize=(EntropyBonus(0.01),),
    update=GradientSteps(learning_rate=1e-3, optimizer="adam", max_grad_norm=None),
)

VARIANTS = {
    "bilevel": METHOD.but(
        name="nll_to_po.bilevel",
        summary="the reward matrix is learned: implicit differentiation through the inner policy gradient",
        reward=MahalanobisReward("given"),
        control=OuterStep(),
    ),
    "rsample": METHOD.but(
        name="nll_to_po.rsample",
        summary="the inner gradient goes through the samples instead of the score function",
        objective=Reparametrized(),
    ),
}
