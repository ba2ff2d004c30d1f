"""CAL: conservative augmented Lagrangian safe RL (arXiv:2310.03718).

Off-policy learning under a limit on the cost of an episode. Against a soft actor-critic with a Lagrange multiplier it changes two things. The cost
of an action is an upper confidence value of an ensemble of critics, in the actor's loss and in the multiplier's, since an actor finds the places where
a single critic is too low. And the weight of the cost is that of an augmented Lagrangian: it answers a violation at once, before the multiplier has
moved, which damps the oscillation of the two. Equations of the paper in the form of its code; equation 8 of the spec ties them together.

The cost's limit is converted to the critics' discount by the code's rule, which takes the critics as those of episodes of `episode_steps` actions.
They bootstrap across a time limit, so the rule fits where 1 / (1 - cost_gamma) is small against an episode; `METHOD` is set for the 60 steps of its
default task, the paper's 0.99 for 1000. [ours] The environment has to report `info["cost"]`. Left out: several constraints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.control.sac import METHOD as SAC
from anypo.methods.control.sac import SoftActor, SoftSteps, SoftTarget, Temperature, TwinCritics, critic_loss
from anypo.methods.control.sac import actor_loss as soft_actor_loss
from anypo.policy import Gradient, Loss, Signals
from anypo.seams.replay import Replay

if TYPE_CHECKING:
    from anypo.run import Run

PerAction = Float[Tensor, " B"]
Ensemble = Float[Tensor, "E B"]
TINY = 1e-12  # of a variance, so that its root has a gradient


class Weight(NamedTuple):
    rect: Tensor  # at most lam
    weight: Tensor  # lam - rect >= 0


class Augmented(NamedTuple):
    value: float
    multiplier: float


def upper_cost(cost_q: Ensemble, k: float = 0.5) -> PerAction:
    """Equation 1: mean + k standard deviations (ddof 1) over the members; a single member has no spread. Differentiable in both."""
    if len(cost_q) == 1:
        return cost_q[0]
    return cost_q.mean(0) + k * cost_q.var(0, correction=1).clamp(min=TINY).sqrt()


def cost_target(
    cost: PerAction, terminated: Tensor, next_cost_q: Ensemble, gamma: float = 0.99, max_members: Sequence[int] | None = None
) -> Ensemble:
    """Equation 2: cost + gamma (1 - d) C(s', a') of each member's own target, or for all the largest of `max_members`. No gradient."""
    if max_members is not None:
        next_cost_q = next_cost_q[torch.as_tensor(max_members)].max(0).values.expand_as(next_cost_q)
    return (cost + gamma * (1 - terminated.to(cost.dtype)) * next_cost_q).detach()


def policy_weight(cost_q_data: Ensemble, k: float, c: float, lam: float | Tensor, limit: float) -> Weight:
    """Equations 3 and 4: rect = min(c mean(limit - U), lam) at the buffer's actions, and the cost's weight lam - rect. No gradient."""
    slack = limit - upper_cost(cost_q_data, k).mean()
    multiplier = torch.as_tensor(lam, dtype=slack.dtype)
    rect = torch.minimum(c * slack, multiplier).detach()
    return Weight(rect, multiplier.detach() - rect)


def actor_loss(
    logp: PerAction, q: Float[Tensor, "2 B"], cost_q: Ensemble, cost_q_data: Ensemble, alpha: float | Tensor, k: float, c: float,
    lam: float | Tensor, limit: float,
) -> Tensor:  # fmt: skip
    """Equation 4: SAC's loss plus the weighted upper cost of the fresh actions."""
    return soft_actor_loss(q, logp, alpha) + policy_weight(cost_q_data, k, c, lam, limit).weight * upper_cost(cost_q, k).mean()


def multiplier_gradient(cost_q_data: Ensemble, k: float, limit: float, lam: float | Tensor) -> Tensor:
    """Equation 5: lam mean(limit - U), which is the multiplier's loss and, as it steps in log lam, its slope too."""
    return lam * (limit - upper_cost(cost_q_data, k)).mean().detach()


def limit(episode_limit: float, horizon: int, gamma: float) -> float:
    """Equation 7: the limit of a critic's value, from that of an episode's undiscounted cost."""
    return episode_limit if gamma == 1 else episode_limit * (1 - gamma**horizon) / (1 - gamma) / horizon


def augmented_lagrangian(f: float, g: float, lam: float, c: float) -> Augmented:
    """Equation 8: f + [max(0, lam + c g)^2 - lam^2] / (2 c), and the multiplier of g in its gradient. At c = 0 the plain Lagrangian."""
    multiplier = max(0.0, lam + c * g)
    return Augmented(f + (multiplier**2 - lam**2) / (2 * c) if c else f + lam * g, multiplier if c else lam)


def _members(x: Float[Tensor, "N T E"]) -> Ensemble:
    return x.flatten(0, 1).T


@dataclass
class RewardAndCostTargets(SoftTarget):
    """SAC's target; beside it `cost_target` [N,T,E] and the limit in the cost critics' scale, `cost_limit` [N,T]."""

    cost_gamma: float = 0.99  # discount of costs, in (0,1)
    limit: float = 25.0  # of the undiscounted cost of an episode, >= 0
    episode_steps: int = 1000  # actions in an episode, >= 1
    max_of: int | None = None  # random members whose largest target all learn from (4 in the code), >= 1; None = each its own

    needs = frozenset({"next_q", "next_logp", "next_cost_q"})
    gives = frozenset({"cost_target", "cost_limit"})

    def targets(self, batch: Batch, found: Signals, run: Run) -> Tensor:
        assert batch.terminated is not None
        following, cost = _members(found.next_cost_q), batch.signal("cost")
        chosen = None if self.max_of is None else torch.randperm(len(following), generator=run.generator)[: self.max_of].tolist()
        target = cost_target(cost.flatten(), batch.terminated.flatten(), following, self.cost_gamma, chosen)
        batch.signals["cost_target"] = target.T.view(*batch.mask.shape, -1)
        batch.signals["cost_limit"] = torch.full_like(cost, limit(self.limit, self.episode_steps, self.cost_gamma))
        return super().targets(batch, found, run)


@dataclass
class ConservativeActor(SoftActor):
    """The actor's loss with the upper cost (equation 4) and the multiplier's loss (equation 5), which look at the same slack."""

    k: float = 0.5  # standard deviations added to a cost, >= 0
    c: float = 10.0  # of the quadratic term, in multiplier a unit of cost, >= 0; 0 = the plain Lagrangian

    needs = frozenset({"q_new", "logp_new", "log_temperature", "cost_q", "cost_q_new", "log_multiplier"})
    wants = frozenset({"cost_limit"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        lam, allowed = new.log_multiplier[0, 0].exp(), float(batch.signal("cost_limit")[0, 0])
        data, fresh = _members(new.cost_q), _members(new.cost_q_new)
        alpha, q = new.log_temperature[0, 0].exp(), new.q_new.flatten(0, 1).T
        loss = actor_loss(new.logp_new.flatten(), q, fresh, data, alpha, self.k, self.c, lam, allowed)
        with torch.no_grad():
            weight = policy_weight(data, self.k, self.c, lam, allowed).weight
        metrics = {"actor_loss": float(loss.detach()), "entropy": -float(new.logp_new.detach().mean()), "cost_weight": float(weight)}
        metrics |= {"multiplier": float(lam.detach()), "cost_spread": float(_spread(fresh.detach().numpy()).mean())}
        return Loss(loss + multiplier_gradient(data, self.k, allowed, lam), metrics)

    def gradient(self, batch: Batch, new: dict[str, NDArray], run: Run) -> Gradient:
        """In closed form: beside SAC's, weight / B times the slope of the upper cost, and the multiplier's loss as its own slope."""
        lam, allowed = float(np.exp(new["log_multiplier"][0, 0])), float(batch.signal("cost_limit")[0, 0])
        soft = super().gradient(batch, new, run)
        fresh, data = (new[name].reshape(-1, new[name].shape[-1]).T for name in ("cost_q_new", "cost_q"))
        slack = allowed - float((data.mean(0) + self.k * _spread(data)).mean())
        weight, spread = lam - min(self.c * slack, lam), _spread(fresh)
        away = (fresh - fresh.mean(0)) / np.maximum((len(fresh) - 1) * spread, TINY)
        slopes = (1 / len(fresh) + self.k * away) * (weight / fresh.shape[1])
        signals = soft.signals | {
            "cost_q_new": slopes.T.reshape(new["cost_q_new"].shape).astype(new["cost_q_new"].dtype),
            "log_multiplier": np.full_like(new["log_multiplier"], lam * slack / new["log_multiplier"].size),
        }
        value = soft.value + weight * float((fresh.mean(0) + self.k * spread).mean())
        metrics = soft.metrics | {"actor_loss": value, "cost_weight": weight, "multiplier": lam, "cost_spread": float(spread.mean())}
        return Gradient(value + lam * slack, signals, metrics)


def _spread(x: NDArray) -> NDArray:
    """Standard deviation [B] over the members of an ensemble [E,B]; 0 for a single one."""
    return x.std(0, ddof=1) if len(x) > 1 else np.zeros_like(x[0])


@dataclass
class CostCritics:
    """The cost critics' loss onto the credit's targets, summed over the members."""

    needs = frozenset({"cost_q"})
    wants = frozenset({"cost_target"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        loss = critic_loss(_members(new.cost_q), _members(batch.signal("cost_target")))
        return Loss(loss, {"cost_critic_loss": float(loss.detach()), "cost_q": float(new.cost_q.detach().mean())})

    def gradient(self, batch: Batch, new: dict[str, NDArray], run: Run) -> Gradient:
        """In closed form: 2 (C - target) / B."""
        error = new["cost_q"] - batch.signal("cost_target").numpy()
        loss = float((error * error).sum()) / len(error)
        return Gradient(loss, {"cost_q": error * (2 / len(error))}, {"cost_critic_loss": loss, "cost_q": float(new["cost_q"].mean())})


METHOD = SAC.but(
    name="cal",
    paper=Paper("CAL: conservative augmented Lagrangian safe RL", "2310.03718", 2023),
    summary="keeps an episode's cost below a limit: upper confidence costs of an ensemble of critics, weighted by an augmented Lagrangian",
    task="PointCircle-v0",
    rollout=Replay(extra=("cost",)),  # one minibatch an action; the paper deals 10 to 20
    credit=RewardAndCostTargets(cost_gamma=0.95, limit=5.0, episode_steps=60),
    objective=ConservativeActor(),
    regularize=(TwinCritics(), CostCritics(), Temperature()),
    update=SoftSteps(target_every=2),
)
PLAIN = {"name": "cal.sac_lagrangian", "summary": "the baseline: the mean cost of the ensemble and a plain Lagrange multiplier"}
VARIANTS = {"sac_lagrangian": METHOD.but(**PLAIN, objective=ConservativeActor(k=0.0, c=0.0))}
