"""Q-Flow: value propagation along flow policies (arXiv:2605.13435).

To make a flow policy's actions worth more, others send the critic's gradient back through the solver (unstable) or distil the flow into a single step
(less expressive). Q-Flow uses that a flow is deterministic: an inner value of the points on the way is regressed onto what the critic says of the action
that they lead to, and the field learns flow matching with the inner value's slope, over alpha, added to its target. Offline on recorded steps, and
online with the same losses. Against SAC it changes the policy, what a minibatch brings (points on the way), the target (no entropy, the mean of the
critics) and the actor's loss, and adds the inner value's. Equations from the paper and its code. The critics' error is summed over the pair. [ours]

The policy lives in `domains.diffusion.valued_flow`. Pure functions count time as the paper does: tau = 0 is noise, 1 the action; the library's level is
1 - tau and its velocity has the other sign. Left out: the best of several samples by the critic when acting.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.diffusion.valued_flow import follow
from anypo.method import Paper
from anypo.methods.control.sac import METHOD as SAC
from anypo.methods.control.sac import TwinCritics
from anypo.policy import Loss, Signals
from anypo.seams.replay import Replay

if TYPE_CHECKING:
    from anypo.run import Run

Points = Float[Tensor, "*N D"]
Ensemble = Float[Tensor, "J *N"]


def interp(x0: Points, x1: Points, tau: Float[Tensor, "*N"]) -> Points:
    """Equation 2: the point at time tau between noise x0 and action x1."""
    return (1 - tau[..., None]) * x0 + tau[..., None] * x1


def psi(x: Points, tau: Float[Tensor, " N"], A: Float[Tensor, "D D"], c: Float[Tensor, " D"], K: int, clip: bool) -> Points:
    """Equation 3 for the field v(x,t) = A x + t c: the action that a point leads to."""
    return follow(lambda y, t: y @ A.T + t[:, None] * c, x, tau, K, clip)


def combined(values: Ensemble, agg: str) -> Float[Tensor, "*N"]:
    """Mean or min over the ensemble. Raises ValueError for another name."""
    if agg not in ("mean", "min"):
        raise ValueError(f"unknown aggregate '{agg}' of the critics; use mean or min")
    return values.mean(0) if agg == "mean" else values.min(0).values


def td_target(reward: Tensor, done: Tensor, q: Ensemble, gamma: float, c_r: float = 1.0, agg: str = "mean") -> Tensor:
    """Equation 1: c_r r + gamma (1 - d) agg_j Q_j(s',a'), without a gradient."""
    return (c_r * reward + gamma * (1 - done.to(q.dtype)) * combined(q, agg)).detach()


def inner_loss(v: Ensemble, q_end: Ensemble, agg: str = "mean") -> Tensor:
    """Equation 4: mean squared error of the inner values, combined first, against the combined critics at the action led to, which get no gradient."""
    return ((combined(v, agg) - combined(q_end, agg).detach()) ** 2).mean()


def v_target(x0: Points, x1: Points, grad: Points, alpha: float) -> Points:
    """Equation 5 [code]: the field wanted, x1 - x0 + grad / (alpha + 1e-8), without a gradient; alpha = inf leaves flow matching."""
    return (x1 - x0 + grad / (alpha + 1e-8)).detach()


def policy_loss(v: Points, x0: Points, x1: Points, grad: Points, alpha: float) -> Tensor:
    """Equation 5: mean squared error of the field against `v_target`, over points and dimensions."""
    return ((v - v_target(x0, x1, grad, alpha)) ** 2).mean()


def bounded(grad: Points, limit: float | None) -> Points:
    """Vectors no longer than `limit`; None leaves them."""
    return grad if limit is None else grad * (limit / grad.norm(dim=-1, keepdim=True).clamp(min=1e-12)).clamp(max=1.0)


@dataclass
class FlowReplay(Replay):
    """Replay whose minibatches bring points on the way from noise to every action, and the noise of the next action."""

    draws: int = 1  # points an action, >= 1

    needs = Replay.needs | {"flow_velocity"}

    def draw(self, run: Run) -> Batch:
        if self.draws < 1:
            raise ValueError(f"rollout.draws must be at least 1, not {self.draws}")
        batch = super().draw(run)
        shape, size = (*batch.mask.shape, self.draws), batch.action.shape[-1]
        batch.signals["flow_level"] = torch.rand(shape, generator=run.generator)
        batch.signals["flow_noise"] = torch.randn(*shape, size, generator=run.generator)
        batch.signals["next_noise"] = torch.randn(*batch.mask.shape, size, generator=run.generator)
        return batch


@dataclass
class FlowTarget:
    """The worth of an action (equation 1)."""

    gamma: float = 0.99  # discount, in [0,1)
    scale: float = 1.0  # c_r of the reward
    agg: str = "mean"  # mean or min over the critics

    needs = frozenset({"next_q"})

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        assert batch.reward is not None and batch.terminated is not None
        next_q = run.score(batch, self.needs).next_q.movedim(-1, 0)
        return td_target(batch.reward, batch.terminated, next_q, self.gamma, self.scale, self.agg)


@dataclass
class SteeredMatching:
    """Flow matching that leans towards what the inner value prefers (equation 5)."""

    alpha: float = 10.0  # how much the data weighs, > 0; 0.1 to 100 in the paper, math.inf is behaviour cloning
    limit: float | None = None  # largest length of the inner value's slope, > 0; None = none

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"flow_velocity", "inner_slope"} if self.alpha < math.inf else {"flow_velocity"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        if self.alpha <= 0:
            raise ValueError(f"objective.alpha must be above 0, not {self.alpha}")
        inside = batch.counted
        field, noise = -new.flow_velocity[inside], batch.signal("flow_noise")[inside]
        action = batch.action[inside].unsqueeze(-2).expand_as(noise)
        slope = bounded(new.inner_slope[inside], self.limit) if "inner_slope" in self.needs else torch.zeros_like(noise)
        loss = policy_loss(field, noise, action, slope, self.alpha)
        return Loss(loss, {"actor_loss": float(loss.detach()), "slope": float(slope.norm(dim=-1).mean())})


@dataclass
class InnerValue:
    """The inner value's regression (equation 4)."""

    agg: str = "mean"  # mean or min over the ensembles

    needs = frozenset({"inner_value", "end_q"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        inside = batch.counted
        loss = inner_loss(new.inner_value[inside].movedim(-1, 0), new.end_q[inside].movedim(-1, 0), self.agg)
        return Loss(loss, {"inner_loss": float(loss.detach())})


METHOD = SAC.but(
    name="q_flow",
    paper=Paper("Q-Flow: value propagation along flow policies", "2605.13435", 2026),
    domain="diffusion",
    summary="actor-critic for flow policies: values of unfinished actions, learned by regression, steer flow matching without a gradient through the solver",
    rollout=FlowReplay(),
    credit=FlowTarget(),
    objective=SteeredMatching(),
    regularize=(TwinCritics(), InnerValue()),
    task="Pendulum-v1",
)
