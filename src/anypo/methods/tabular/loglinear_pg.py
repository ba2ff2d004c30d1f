"""Log-linear PG: entropy-regularized log-linear policy gradient (arXiv:2605.24939).

Theory of a softmax policy that is linear in state-action features, with a KL to a reference distribution in the return. Against the tabular softmax
the features are arbitrary (one-hot features give it back); when the regularized Q of every policy is linear in them, plain gradient ascent
converges linearly, by a Polyak-Lojasiewicz (PL) inequality whose constant is the smallest eigenvalue of the Fisher matrix, which the KL term
keeps away from zero. Equations 1-2 are standard forms of what the abstract names, 3-6 and 9-10 follow from them; the identity 7 and the
constants of 8 are [reconstructed]. Continuous actions are a fine grid with its weights as the reference. All functions take leading dimensions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from anypo.domains.tabular.linear_mdp import random_linear_mdp
from anypo.method import Paper, Study

Theta = Float[Tensor, "... d"]
Features = Float[Tensor, "... S A d"]
Table = Float[Tensor, "... S A"]
Transition = Float[Tensor, "... S A S"]
PerState = Float[Tensor, "... S"]


class Values(NamedTuple):
    policy: Tensor  # [...,S,A]
    value: Tensor  # [...,S]
    q: Tensor  # [...,S,A]
    advantage: Tensor  # [...,S,A] regularized, mean 0 under the policy
    occupancy: Tensor  # [...,S] sums to 1
    objective: Tensor  # [...]
    log_ratio: Tensor  # [...,S,A] log(policy / mu)


class Gradient(NamedTuple):
    gradient: Tensor  # [...,d]
    realizable_weights: Tensor  # [...,d] least-squares w of Q on the features
    fisher_form: Tensor  # [...,d] F (w - tau theta) / (1 - gamma)


class Terms(NamedTuple):
    fisher: Tensor  # [...,d,d]
    uncentered: Tensor  # [...,d,d]
    kl: Tensor  # [...] discounted sum
    lambda_min_fisher: Tensor  # [...]
    lambda_min_fisher_perp: Tensor | None  # [...] on the complement of ones; None unless the features sum to 1
    lambda_min_uncentered: Tensor  # [...]
    optimum: Tensor  # [...]
    suboptimality: Tensor  # [...]
    pl_lower_bound: Tensor  # [...]
    grad_norm_sq: Tensor  # [...]

    @property
    def constant(self) -> Tensor:
        """The eigenvalue [...] that the PL inequality is about."""
        return self.lambda_min_fisher if self.lambda_min_fisher_perp is None else self.lambda_min_fisher_perp


class Flow(NamedTuple):
    objective: Tensor  # [steps+1,...]


def values(
    theta: Theta, features: Features, mu: Table, transition: Transition, reward_table: Table, rho: PerState, gamma: float, tau: float
) -> Values:
    """Equations 1-4, exactly. `gamma` in [0,1), `tau` >= 0. Raises ValueError outside."""
    if not 0 <= gamma < 1 or tau < 0:
        raise ValueError(f"gamma lies in [0,1) and tau is not negative, not {gamma} and {tau}")
    logits = torch.einsum("...sad,...d->...sa", features.to(theta), theta)
    log_ratio = logits - (mu.log() + logits).logsumexp(-1, keepdim=True)
    policy = mu * log_ratio.exp()
    leave = torch.eye(mu.shape[-2]).to(theta) - gamma * torch.einsum("...sa,...sat->...st", policy, transition)
    value = torch.linalg.solve(leave, (policy * (reward_table - tau * log_ratio)).sum(-1))
    occupancy = (1 - gamma) * torch.linalg.solve(leave.mT, rho.expand(value.shape))
    q = reward_table + gamma * torch.einsum("...sat,...t->...sa", transition, value)
    return Values(policy, value, q, q - tau * log_ratio - value[..., None], occupancy, (rho * value).sum(-1), log_ratio)


def centered(features: Features, policy: Table) -> Features:
    """Features minus their mean under the policy."""
    return features - torch.einsum("...sa,...sad->...sd", policy, features)[..., None, :]


def policy_gradient(v: Values, features: Features, gamma: float) -> Theta:
    """Equation 5: grad J."""
    weight = v.occupancy[..., None] * v.policy * v.advantage
    return torch.einsum("...sa,...sad->...d", weight, centered(features.to(weight), v.policy)) / (1 - gamma)


def second_moment(weight: Table, x: Features) -> Float[Tensor, "... d d"]:
    """Sum over states and actions of weight x x^T."""
    return torch.einsum("...sad,...sae->...de", weight[..., None] * x, x)


def fisher_matrix(v: Values, features: Features) -> Float[Tensor, "... d d"]:
    """Equation 6's F."""
    return second_moment(v.occupancy[..., None] * v.policy, centered(features.to(v.policy), v.policy))


def gradient(
    theta: Theta, features: Features, mu: Table, transition: Transition, reward_table: Table, rho: PerState, gamma: float, tau: float
) -> Gradient:
    """Equations 5 and 7: the two forms agree when Q is linear in the features (up to a constant of each state that they contain)."""
    v, features = values(theta, features, mu, transition, reward_table, rho, gamma, tau), features.to(theta)
    w = (torch.linalg.pinv(features.flatten(-3, -2)) @ v.q.flatten(-2)[..., None])[..., 0]
    form = (fisher_matrix(v, features) @ (w - tau * theta)[..., None])[..., 0] / (1 - gamma)
    return Gradient(policy_gradient(v, features, gamma), w, form)


def soft_optimum(mu: Table, transition: Transition, reward_table: Table, rho: PerState, gamma: float, tau: float) -> Float[Tensor, ...]:
    """Equation 10: J* over all policies, by soft value iteration (plain for `tau` 0)."""
    value, change = torch.zeros_like(rho), 1.0
    while change > 1e-14 * (1 + float(value.abs().max())):
        q = reward_table + gamma * torch.einsum("...sat,...t->...sa", transition, value)
        new = tau * (mu.log() + q / tau).logsumexp(-1) if tau > 0 else q.amax(-1)
        value, change = new, float((new - value).abs().max())
    return (rho * value).sum(-1)


def complement_of_ones(size: int) -> Float[Tensor, "d d-1"]:
    """An orthonormal basis of the vectors that sum to 0. Raises ValueError for one feature, which sums to 1 only when it is constant."""
    if size < 2:
        raise ValueError("a single feature that is always 1 cannot tell actions apart; give at least two features")
    basis = torch.eye(size, dtype=torch.float64)
    basis[:, 0] = 1
    return torch.linalg.qr(basis).Q[:, 1:]


def pl_terms(
    theta: Theta, features: Features, mu: Table, transition: Transition, reward_table: Table, rho: PerState, gamma: float, tau: float
) -> Terms:
    """Equations 6, 8-10: |grad J|^2 >= pl_lower_bound when Q is linear in features of norm at most 1."""
    v, features = values(theta, features, mu, transition, reward_table, rho, gamma, tau), features.to(theta)
    weight = v.occupancy[..., None] * v.policy
    fisher, uncentered = fisher_matrix(v, features), second_moment(weight, features)
    smallest, perp = torch.linalg.eigvalsh(fisher)[..., 0], None
    if torch.allclose(features.sum(-1), torch.ones_like(features[..., 0])):
        basis = complement_of_ones(features.shape[-1]).to(theta)
        perp = torch.linalg.eigvalsh(basis.mT @ fisher @ basis)[..., 0]
    optimum = soft_optimum(mu, transition, reward_table, rho, gamma, tau)
    gap = optimum - v.objective
    bound = 2 * tau * (smallest if perp is None else perp) ** 2 / (1 - gamma) * gap
    return Terms(
        fisher, uncentered, (weight * v.log_ratio).sum((-2, -1)) / (1 - gamma), smallest, perp, torch.linalg.eigvalsh(uncentered)[..., 0],
        optimum, gap, bound, (policy_gradient(v, features, gamma) ** 2).sum(-1),
    )  # fmt: skip


def flow(
    theta: Theta, features: Features, mu: Table, transition: Transition, reward_table: Table, rho: PerState, gamma: float, tau: float,
    lr: float, steps: int,
) -> Float[Tensor, "steps+1 ... d"]:  # fmt: skip
    """The gradient flow by Euler steps: theta before each step and after the last."""
    seen = [theta]
    for _ in range(steps):
        v = values(theta, features, mu, transition, reward_table, rho, gamma, tau)
        theta = theta + lr * policy_gradient(v, features, gamma)
        seen.append(theta)
    return torch.stack(seen)


def flow_objective(
    theta: Theta, features: Features, mu: Table, transition: Transition, reward_table: Table, rho: PerState, gamma: float, tau: float,
    lr: float, steps: int,
) -> Flow:  # fmt: skip
    """J along the flow."""
    path = flow(theta, features, mu, transition, reward_table, rho, gamma, tau, lr, steps)
    return Flow(values(path, features, mu, transition, reward_table, rho, gamma, tau).objective)


def run(seed: int = 0, gamma: float = 0.9, tau: float = 0.3, lr: float = 0.5, steps: int = 500) -> dict[str, Any]:
    """The flow on a random linear MDP from theta ~ N(0, 9): suboptimality and PL constant at its start and its end."""
    problem = random_linear_mdp(seed)
    start = 3 * torch.randn(problem.features.shape[-1], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    terms = pl_terms(flow(start, *problem, gamma, tau, lr, steps), *problem, gamma, tau)
    named = {"suboptimality": terms.suboptimality, "pl_constant": terms.constant}
    return {f"{name}_{when}": float(x[i]) for name, x in named.items() for when, i in (("start", 0), ("end", -1))}


STUDY = Study(
    name="loglinear_pg",
    paper=Paper("Global linear convergence of entropy-regularized softmax policy gradient beyond tabular MDPs", "2605.24939", 2026),
    domain="tabular",
    run=run,
    kind="theory",
    summary="softmax policies linear in features, with a KL in the return: why plain gradient ascent converges linearly, and when it does not",
)
