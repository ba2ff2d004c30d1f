"""TayPO: Taylor expansion policy optimization (arXiv:2003.06259).

The return of a policy is a series in the deviations eps = pi / mu - 1 from the policy mu that acted. Its first order is the surrogate of TRPO and PPO;
the second credits pairs of deviations, an earlier and a later action, and so removes part of what one-step ratios miss once pi is far from mu. Against
PPO the objective changes (no clip on the surrogate, eps is bounded instead), the critic's targets are corrected to first order, and minibatches hold
whole rows, for a pair needs both of its actions. Series, orders and off-policy evaluation are the paper's; the backward recursions, the value target
and the optimizer's settings are [reconstructed]. The paper pairs an action with one later action drawn from a geometric distribution; here it is paired
with all of them under the same weights.
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
from anypo.seams.credit import dense_reward, gae, per_action_ends, whiten
from anypo.seams.groups import masked_mean
from anypo.seams.objective import token_ratio
from anypo.seams.rollout import LaggedRollout
from anypo.seams.update import GradientSteps

if TYPE_CHECKING:
    from anypo.run import Run

PerAction = Float[Tensor, "N T"]
StateAction = Float[Tensor, "S A"]


class Expansion(NamedTuple):
    q_orders: Float[Tensor, "K1 S A"]  # Q_0 = Q^mu, ..., Q_order
    q_pi: StateAction


def deviations(logp: PerAction, old_logp: PerAction, mask: Tensor, eps_max: float | None = None) -> PerAction:
    """pi / mu - 1 in [-1, eps_max] (None: no bound above); 0 outside the mask, no gradient where bounded."""
    eps = token_ratio(logp, old_logp, mask) - 1
    return eps if eps_max is None else eps.clamp(max=eps_max)


def later(values: PerAction, discount: PerAction) -> PerAction:
    """sum over t' > t of values[t'] times the product of discount[t..t'-1]; `discount` is 0 where an episode ends."""
    after = values.new_zeros(len(values))
    out = [after]
    for t in range(values.shape[1] - 1, 0, -1):
        after = discount[:, t - 1] * (values[:, t] + after)
        out.append(after)
    return torch.stack(out[::-1], dim=1)


def trajectory_terms(eps: PerAction, q: PerAction, terminated: Tensor, gamma: float, order: int) -> Float[Tensor, "order N"]:
    """Equation 4 at t = 0: every trajectory's estimates of U_1 .. U_order [reconstructed as backward recursions]."""
    discount = gamma * (1 - terminated.to(eps.dtype))
    inner, terms = eps * q, []
    for _ in range(order):
        after = later(inner, discount)
        terms.append(inner[:, 0] + after[:, 0])
        inner = eps * after
    return torch.stack(terms)


def expansion_terms(
    logp: PerAction, old_logp: PerAction, q: PerAction, terminated: Tensor, mask: Tensor, gamma: float, order: int
) -> list[Tensor]:
    """Equations 1 and 4: means over trajectories of mu of U_1 .. U_order; `q` is Q^mu (or the advantage), `order` >= 1."""
    inside = torch.where(mask.bool(), q, torch.zeros_like(q))
    return list(trajectory_terms(deviations(logp, old_logp, mask), inside, terminated, gamma, order).mean(1))


def policy_loss(
    logp: PerAction, old_logp: PerAction, advantages: PerAction, terminated: Tensor, mask: Tensor, gamma: float = 0.99, c: float = 1.0,
    lam2: float = 0.9, eps_max: float | None = 1.0,
) -> Tensor:  # fmt: skip
    """Equation 5: minus the masked mean of eps_t A_t + c eps_t sum over t' > t of (gamma lam2)^(t'-t) eps_t' A_t'. Both factors of a pair have a
    gradient; pairs do not cross `terminated` actions."""
    eps = deviations(logp, old_logp, mask, eps_max)
    first = eps * torch.where(mask.bool(), advantages, torch.zeros_like(advantages)).detach()
    if c == 0:
        return -masked_mean(first, mask)
    return -masked_mean(first + c * eps * later(first, gamma * lam2 * (1 - terminated.to(eps.dtype))), mask)


def tabular_expansion(
    reward: StateAction, transition: Float[Tensor, "S A S"], policy: StateAction, behaviour: StateAction, gamma: float, order: int
) -> Expansion:
    """Equation 6, exactly: Q_K = sum over k <= K of (gamma (I - gamma P^mu)^-1 (P^pi - P^mu))^k Q^mu, and Q^pi. `gamma` in [0,1)."""
    states, actions = reward.shape

    def moves(table: StateAction) -> Tensor:
        return torch.einsum("sat,tb->satb", transition, table).reshape(states * actions, states * actions)

    identity = torch.eye(states * actions, dtype=reward.dtype)
    resolvent = identity - gamma * moves(behaviour)
    term = torch.linalg.solve(resolvent, reward.flatten())
    orders = [term]
    for _ in range(order):
        term = gamma * torch.linalg.solve(resolvent, moves(policy - behaviour) @ term)
        orders.append(orders[-1] + term)
    q_pi = torch.linalg.solve(identity - gamma * moves(policy), reward.flatten())
    return Expansion(torch.stack(orders).reshape(order + 1, states, actions), q_pi.reshape(states, actions))


def value_targets(
    returns: PerAction, advantages: PerAction, eps: PerAction, ends: Tensor, mask: Tensor, gamma: float, lam: float = 1.0
) -> PerAction:
    """Equation 7 [reconstructed]: the behaviour's target plus sum over t' >= t of (gamma lam)^(t'-t) eps_t' A_t'; 0 outside the mask."""
    first = eps * torch.where(mask.bool(), advantages, torch.zeros_like(advantages))
    corrected = returns + first + later(first, gamma * lam * (1 - ends.to(first.dtype)))
    return torch.where(mask.bool(), corrected, torch.zeros_like(corrected))


@dataclass
class CorrectedGAE:
    """Generalized advantages under the policy that acted; where that is not the current one, the critic's targets in `batch.signals["returns"]` are
    corrected to first order."""

    gamma: float = 0.99  # discount, in [0,1]
    lam: float = 0.95  # trace decay of the advantages and of the correction, in [0,1]
    eps_max: float | None = 1.0  # bound on deviations in the targets, > 0; None = no bound
    normalize: bool = True  # whiten over the batch

    needs = frozenset({"old_value"})
    gives = frozenset({"returns"})

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        terminated, truncated = per_action_ends(batch)
        value, mask = batch.signal("old_value"), batch.mask
        found = gae(dense_reward(batch), value, terminated, truncated, mask, self.gamma, self.lam, batch.next_value)
        returns = found.returns
        if "sampled_elsewhere" in batch.signals:
            eps = deviations(run.score(batch, {"logp"}).logp, batch.logp, mask, self.eps_max)
            returns = value_targets(returns, found.advantages, eps, terminated | truncated, mask, self.gamma, self.lam)
        batch.signals["returns"] = returns
        return whiten(found.advantages, mask) if self.normalize else found.advantages


@dataclass
class TaylorSurrogate:
    """First and second order of the expansion around the policy that acted. Rows must reach it whole: minibatches of rows, not of actions."""

    gamma: float = 0.99  # discount, in [0,1]
    c: float = 1.0  # weight of the pairs, in [0,1]; 0 = first order
    lam2: float = 0.9  # decay of the pairing range, in [0,1]; 0 = no pairs
    eps_max: float | None = 1.0  # bound on deviations, > 0; None = no bound

    needs = frozenset({"logp"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        mask = batch.counted
        terminated, truncated = per_action_ends(batch)
        loss = policy_loss(new.logp, batch.logp, batch.advantage, terminated | truncated, mask, self.gamma, self.c, self.lam2, self.eps_max)
        moved = masked_mean(deviations(new.logp.detach(), batch.logp, mask).abs(), mask)
        return Loss(loss, {"deviation": float(moved)})


METHOD = PPO.but(
    name="taypo",
    paper=Paper("Taylor Expansion Policy Optimization", "2003.06259", 2020),
    summary="the surrogate's second order: pairs of an early and a later deviation from the policy that acted are credited together",
    credit=CorrectedGAE(gamma=0.99, lam=0.95),
    objective=TaylorSurrogate(),
    update=GradientSteps(epochs=4, minibatches=4, learning_rate=3e-4, optimizer="adam", max_grad_norm=0.5, unit="row"),
)

VARIANTS = {
    "first_order": METHOD.but(name="taypo.first_order", summary="without the pairs: the first-order surrogate", objective=TaylorSurrogate(c=0.0)),
    "lagged": METHOD.but(name="taypo.lagged", summary="actors that are up to 20 optimizer steps old, as in a distributed learner", rollout=LaggedRollout(20)),
}  # fmt: skip
