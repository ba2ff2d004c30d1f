"""OHP-RL: interventions as preference guidance (arXiv:2605.15971).

Soft actor-critic beside a person who may take over. A takeover is read as a preference: in this state the person's action is better than what the
policy was about to do, not the very action to imitate. The pairs enter the actor's loss through a gate that depends on the state: how much better the
critic finds the person's action than a fresh one of the policy. It fades once the policy is as good, and with the rate of takeovers. Known of the paper:
pairwise preferences inside SAC and a gate of critic advantages; the formulas are [reconstructed]. Half of each minibatch comes from a buffer of takeovers
(as in RLPD, arXiv:2302.02948), which begins with the person's demonstrations. The rollout with its person is in `domains.control.interventions`. Left
out: separate processes for acting and learning; the actor's two modules are one loss with one optimizer step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from anypo.batch import Batch
from anypo.domains.control.interventions import RATES, GuidedReplay
from anypo.domains.control.soft import stored_logp
from anypo.method import Paper
from anypo.methods.control.sac import METHOD as SAC
from anypo.methods.control.sac import SoftTarget
from anypo.policy import Loss, Signals

if TYPE_CHECKING:
    from anypo.run import Run

PerRow = Float[Tensor, " B"]
Twins = Float[Tensor, "2 B"]
ACTION_LIMIT = 0.999  # actions nearer to the bounds are taken for this in log-densities
LOGP_LIMIT = 20.0


class Preferred(NamedTuple):
    loss: Tensor
    per_sample: PerRow
    pairs: PerRow  # 1 where there is a pair to learn from


class Gated(NamedTuple):
    delta: PerRow
    gate: PerRow


def preference_loss(
    logp_h: PerRow, logp_pol: PerRow, intervened: PerRow, distance: PerRow, kappa: float = 1.0, min_distance: float = 0.05
) -> Preferred:
    """Equation 1: -log sigmoid(kappa (log pi(a_h) - log pi(a_pol))), its mean over the takeovers whose two actions differ; 0 without any."""
    margin = logp_h.clamp(-LOGP_LIMIT, LOGP_LIMIT) - logp_pol.clamp(-LOGP_LIMIT, LOGP_LIMIT)
    pairs = ((intervened > 0) & (distance >= min_distance)).to(margin.dtype)
    per_sample = -logsigmoid(kappa * margin) * pairs
    return Preferred(per_sample.sum() / pairs.sum().clamp(min=1), per_sample, pairs)


def gate(q_h: Twins, q_new: Twins, temperature: float = 0.5) -> Gated:
    """Equation 2: how much better the critics find the person's action than a fresh one, in units of their values, through a sigmoid. No gradient."""
    fresh = q_new.detach().min(dim=0).values
    delta = q_h.detach().min(dim=0).values - fresh
    return Gated(delta, torch.sigmoid(delta / (temperature * fresh.abs().mean().clamp(min=1e-6))))


def actor_loss(
    logp: PerRow, q_new: Twins, q_h: Twins, logp_h: PerRow, logp_pol: PerRow, intervened: PerRow, distance: PerRow, alpha: float = 0.2,
    eta: float = 0.5, kappa: float = 1.0, temperature: float = 0.5, min_distance: float = 0.05, convex: bool = False,
) -> Tensor:  # fmt: skip
    """Equation 3: SAC's actor loss plus eta times the gated preference loss. `convex`: in a pair the gate weighs the one against the other."""
    preferred = preference_loss(logp_h, logp_pol, intervened, distance, kappa, min_distance)
    return guided(alpha * logp - q_new.min(dim=0).values, preferred, gate(q_h, q_new, temperature).gate, eta, convex)


def guided(free: PerRow, preferred: Preferred, weight: PerRow, eta: float, convex: bool = False) -> Tensor:
    """SAC's loss of every sample and the weighted preference loss as one number (equation 3)."""
    if convex:
        return ((1 - weight * preferred.pairs) * free + eta * weight * preferred.per_sample).mean()
    return free.mean() + eta * (weight * preferred.per_sample).sum() / preferred.pairs.sum().clamp(min=1)


def eta_schedule(rates: Sequence[float] | Tensor, eta0: float = 0.5, rate0: float = 1.0) -> list[float]:
    """Equation 5: guidance in proportion to the rate of takeovers, at most eta0. Where nobody took over at first (rate0 = 0) it stays."""
    return [eta0 * (min(1.0, float(rate) / rate0) if rate0 > 0 else 1.0) for rate in rates]


@dataclass
class GuidedActor:
    """SAC's actor loss with the gated preferences of takeovers (equation 3)."""

    kappa: float = 1.0  # sharpness of a preference, >= 0
    gate_temperature: float = 0.5  # of the gate, in units of the critics' values, > 0
    eta: float = 0.5  # weight of the preferences at first, >= 0
    min_distance: float = 0.05  # between the two actions of a pair
    convex: bool = False  # in a pair the gate weighs SAC's loss against the preference's

    needs = frozenset({"q", "q_new", "logp_new", "mean", "log_std", "log_temperature"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        alpha = new.log_temperature[0, 0].detach().exp()
        free = alpha * new.logp_new.flatten() - new.q_new.flatten(0, 1).min(dim=1).values
        preferred = self.preferred(batch, new)
        # a takeover's stored action is the person's, so that q is that of the person's action wherever it counts
        weight = self.weight(new.q.flatten(0, 1).T, new.q_new.flatten(0, 1).T)
        first, latest = run.state.get(RATES, (1.0, 1.0))
        eta = eta_schedule([latest], self.eta, first)[0]
        loss = guided(free, preferred, weight, eta, self.convex)
        shown = float((weight * preferred.pairs).sum() / preferred.pairs.sum().clamp(min=1))
        entropy = -float(new.logp_new.detach().mean())
        return Loss(loss, {"actor_loss": float(loss.detach()), "entropy": entropy, "preference_loss": float(preferred.loss.detach()),
                           "gate": shown, "eta": eta})  # fmt: skip

    def preferred(self, batch: Batch, new: Signals) -> Preferred:
        """The preference losses of the batch."""
        action, proposed = batch.action.flatten(0, 1), batch.signal("proposed").flatten(0, 1)
        mean, log_std = new.mean.flatten(0, 1), new.log_std.flatten(0, 1)
        logp_h, logp_pol = (stored_logp(a.clamp(-ACTION_LIMIT, ACTION_LIMIT), mean, log_std) for a in (action, proposed))
        distance = (action - proposed).norm(dim=1)
        return preference_loss(logp_h, logp_pol, batch.signal("intervened").flatten(), distance, self.kappa, self.min_distance)

    def weight(self, q_h: Twins, q_new: Twins) -> PerRow:
        """How much each sample's preference counts."""
        return gate(q_h, q_new, self.gate_temperature).gate


METHOD = SAC.but(
    name="ohp_rl",
    paper=Paper("OHP-RL: interventions as preference guidance", "2605.15971", 2026),
    summary="SAC beside a person whose takeovers are preferences over the policy's proposals, gated by how the critic compares the two",
    rollout=GuidedReplay(),
    credit=SoftTarget(gamma=0.97),
    objective=GuidedActor(),
    task="Peg-v0",
)
