"""FLAC: field least-energy actor-critic (arXiv:2602.12829).

Maximum-entropy learning with a flow as the actor lacks the log-density that SAC pays for. FLAC pays for kinetic energy instead: the actor carries a start
of high entropy along a learned drift, without a drift the action stays random, and the energy bounds how far its distribution has moved. Against SAC
it changes the policy, and puts the energy in the place of the log-density: in the critics' target (that of the next action), in the actor's loss and
in the dual variable, which holds the mean energy at a budget. Energies are sums over an action's dimensions; so is the budget.
Abstract and README of the paper; equations 1, 4, 5 and 6 are [reconstructed] from the bridge that they describe, equation 7 is derived.

The policy lives in `domains.diffusion.energy_flow` (`energy` and a step of `rollout` are there).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from jaxtyping import Float
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.diffusion.energy_flow import energy, flow_step
from anypo.method import Paper
from anypo.methods.control.sac import METHOD as SAC
from anypo.methods.control.sac import SoftSteps, TwinCritics, q_target
from anypo.methods.control.sac import actor_loss as soft_actor_loss
from anypo.policy import Loss, Signals

if TYPE_CHECKING:
    from anypo.run import MethodLoss, Run

__all__ = ["METHOD", "actor_loss", "bridge", "dual", "energy", "path_kl", "rollout", "td_target"]

PerRow = Float[Tensor, " N"]
Ensemble = Float[Tensor, "J N"]
LOG_WEIGHT = "flac.log_alpha"  # in the run's state


class Bridge(NamedTuple):
    drift: Tensor  # at (x, tau), in the shape of x
    mean: float  # of the action
    var: float


def rollout(x0: Float[Tensor, "N D"], u: Float[Tensor, "N K D"], z: Float[Tensor, "N K D"], sig: float) -> Float[Tensor, "N D"]:
    """Equation 1: x_K from given drifts and noise, K steps of h = 1 / K."""
    x = x0
    for k in range(u.shape[1]):
        x = flow_step(x, u[:, k], z[:, k], 1 / u.shape[1], sig)
    return x


def path_kl(energy: PerRow, sig: float) -> Tensor:
    """Equation 3: KL of the path from the one without a drift (Girsanov), mean energy / sig^2; it bounds the KL of the actions. `sig` > 0."""
    return energy.mean() / sig**2


def td_target(reward: PerRow, done: Tensor, energy: PerRow, q: Ensemble, gamma: float, alpha: float | Tensor) -> PerRow:
    """Equation 4: r + gamma (1 - d) (min_j Q_j(s',a') - alpha e(s')), without a gradient; SAC's target with energies as log-densities."""
    return q_target(reward, done, q, energy, gamma, alpha)


def actor_loss(energy: PerRow, q: Ensemble, alpha: float | Tensor) -> Tensor:
    """Equation 5: mean of alpha e - min_j Q_j; alpha carries no gradient."""
    return soft_actor_loss(q, energy, alpha)


def dual(energies: Sequence[float] | Tensor, log_alpha: float, lr: float, E_bar: float, lo: float, hi: float) -> list[float]:
    """Equation 6: log alpha after each of the mean energies; more than the budget raises it. Kept in [lo, hi]."""
    found = []
    for e in energies:
        log_alpha = min(max(log_alpha + lr * (float(e) - E_bar), lo), hi)
        found.append(log_alpha)
    return found


def bridge(x: Tensor, tau: float, m: float, sig: float, alpha_s: float, w: float, x0: float) -> Bridge:
    """Equation 7, check case Q(a) = -(a - m)^2 / (2 w), alpha_s = alpha sig^2: the optimal drift, and the action's distribution from the start x0."""
    drift = sig**2 * (m - x) / (alpha_s * w + sig**2 * (1 - tau))
    var = 1 / (1 / sig**2 + 1 / (alpha_s * w))
    return Bridge(drift, var * (x0 / sig**2 + m / (alpha_s * w)), var)


def weight(run: Run) -> float:
    """alpha, as `StartWeight` or the last step of the dual left it."""
    return math.exp(run.state[LOG_WEIGHT])


@dataclass
class StartWeight:
    """Before the first step: the weight of the energy."""

    initial: float = 1.0  # alpha, >= 0

    def __call__(self, run: Run) -> None:
        if self.initial < 0:
            raise ValueError(f"prepare.0.initial must be at least 0, not {self.initial}")
        run.state.setdefault(LOG_WEIGHT, math.log(self.initial) if self.initial else float("-inf"))


@dataclass
class EnergyTarget:
    """The worth of an action (equation 4). Draws the minibatch's noise for the fresh actions of the actor as well."""

    gamma: float = 0.99  # discount, in [0,1)

    needs = frozenset({"next_q", "next_energy"})

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        assert batch.reward is not None and batch.terminated is not None
        for name in ("noise", "next_noise"):
            batch.signals[name] = run.policy.draw(batch.mask.shape, run.generator)
        found = run.score(batch, self.needs)
        return td_target(batch.reward, batch.terminated, found.next_energy, found.next_q.movedim(-1, 0), self.gamma, weight(run))


@dataclass
class EnergyActor:
    """The actor's loss (equation 5), with its gradient through the K steps of the flow."""

    needs = frozenset({"q_new", "energy_new"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        alpha = weight(run)
        loss = actor_loss(new.energy_new, new.q_new.movedim(-1, 0), alpha)
        return Loss(loss, {"actor_loss": float(loss.detach()), "energy": float(new.energy_new.detach().mean()), "alpha": alpha})


@dataclass
class EnergySteps(SoftSteps):
    """An optimizer step and Polyak targets as in SAC, then a step of the dual (equation 6)."""

    max_grad_norm: float | None = 10.0  # > 0; None = no clipping; back-propagation through the flow may explode
    budget: float = 0.25  # E_bar: mean energy of an action, for each of its dimensions, > 0
    dual_rate: float = 3e-4  # of log alpha, >= 0; 0 = alpha stays as it is
    lowest: float = -10.0  # of log alpha
    highest: float = 10.0

    def __call__(self, batch: Batch, loss_fn: MethodLoss, run: Run) -> dict[str, float]:
        metrics = super().__call__(batch, loss_fn, run)
        if self.dual_rate:
            wanted = self.budget * run.policy.spaces.action_size
            run.state[LOG_WEIGHT] = dual([metrics["energy"]], run.state[LOG_WEIGHT], self.dual_rate, wanted, self.lowest, self.highest)[0]
        return metrics


METHOD = SAC.but(
    name="flac",
    paper=Paper("FLAC: field least-energy actor-critic", "2602.12829", 2026),
    domain="diffusion",
    summary="SAC for a flow actor without a likelihood: kinetic energy of its drift in place of the log-density, held at a budget by a dual variable",
    prepare=StartWeight(),
    credit=EnergyTarget(),
    objective=EnergyActor(),
    regularize=TwinCritics(),
    update=EnergySteps(),
    task="Pendulum-v1",
)
