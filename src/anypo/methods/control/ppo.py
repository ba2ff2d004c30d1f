"""PPO: proximal policy optimization (arXiv:1707.06347), for environments and, with a value head, for language models.

Each batch is used for several epochs of minibatch steps. The surrogate ratio * advantage is clipped so that moving further than epsilon in the
improving direction earns nothing, while the pessimistic minimum keeps the gradient where a move made things worse. A second variant replaces the
clip by a KL penalty whose coefficient adapts to a target. Against TRPO it needs first-order steps only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Method, Paper
from anypo.policy import Loss, Signals
from anypo.seams.credit import GAE
from anypo.seams.groups import masked_mean
from anypo.seams.objective import ClippedSurrogate, clipped, token_ratio
from anypo.seams.regularize import ValueLoss
from anypo.seams.regularize import value_loss as critic_loss
from anypo.seams.reward import TaskReward
from anypo.seams.rollout import OnPolicy
from anypo.seams.select import UniformPrompts
from anypo.seams.update import GradientSteps

if TYPE_CHECKING:
    from anypo.run import Run

PerAction = Float[Tensor, "N T"]


class PolicyLoss(NamedTuple):
    loss: Tensor  # scalar, differentiable in logp
    clip_fraction: Tensor  # share of actions whose ratio left the band
    approx_kl: Tensor  # mean of (ratio - 1) - log ratio, >= 0


def policy_loss(logp: PerAction, old_logp: PerAction, advantages: PerAction, mask: Tensor, eps: float = 0.2) -> PolicyLoss:
    """Equations 1 and 8: minus the mean clipped surrogate, and the two diagnostics."""
    ratio = token_ratio(logp, old_logp, mask)
    loss = -masked_mean(clipped(ratio, advantages, 1 - eps, 1 + eps), mask)
    left = ((ratio - 1).abs() > eps).to(ratio.dtype)
    return PolicyLoss(loss, masked_mean(left, mask), masked_mean(ratio - 1 - ratio.log(), mask))


def kl_penalty_loss(logp: PerAction, old_logp: PerAction, advantages: PerAction, kl: PerAction, mask: Tensor, beta: float) -> Tensor:
    """Equation 3: minus the mean of ratio * advantage, plus beta times the mean exact KL(old || new)."""
    ratio = token_ratio(logp, old_logp, mask)
    return -masked_mean(ratio * advantages, mask) + beta * masked_mean(kl, mask)


def beta_update(kl: float, beta: float, d_targ: float) -> float:
    """Equation 4: halve beta when the measured KL is below d_targ / 1.5, double it above 1.5 d_targ."""
    if kl < d_targ / 1.5:
        return beta / 2
    return beta * 2 if kl > 1.5 * d_targ else beta


def value_loss(value: PerAction, old_value: PerAction, returns: PerAction, mask: Tensor, eps_v: float | None = None) -> Tensor:
    """Equations 5 and 6: mean squared critic error, with `eps_v` the larger of the plain and the clipped one."""
    return critic_loss(value, returns, mask, old_value, eps_v)


def total_loss(
    logp: PerAction, old_logp: PerAction, advantages: PerAction, value: PerAction, returns: PerAction, entropy: PerAction, mask: Tensor,
    eps: float = 0.2, c1: float = 0.5, c2: float = 0.0,
) -> Tensor:  # fmt: skip
    """Equation 5: clipped policy loss + c1 * value loss - c2 * entropy."""
    policy = policy_loss(logp, old_logp, advantages, mask, eps).loss
    return policy + c1 * critic_loss(value, returns, mask) - c2 * masked_mean(entropy, mask)


@dataclass
class AdaptiveKL:
    """The KL-penalty variant: no clip, a penalty whose coefficient `AdaptBeta`, its control component, moves after each batch (equation 3).

    The KL is exact where the policy provides `kl_old`; else it is estimated from the sampled actions (k3 of old against new).
    """

    beta: float = 1.0  # first coefficient, > 0; adapts during the run
    d_targ: float = 0.01  # target mean KL a batch, > 0

    needs = frozenset({"logp"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        mask, beta = batch.counted, run.state.get("ppo.beta", self.beta)
        ratio = token_ratio(new.logp, batch.logp, mask)
        kl = new["kl_old"] if "kl_old" in new else ratio - 1 - ratio.log()
        loss = kl_penalty_loss(new.logp, batch.logp, batch.advantage, kl, mask, beta)
        return Loss(loss, {"approx_kl": float(masked_mean(kl.detach(), mask)), "beta": beta})


@dataclass
class AdaptBeta:
    """After each batch, double or halve the KL coefficient (equation 4)."""

    beta: float = 1.0  # the same first coefficient as the objective's, > 0
    d_targ: float = 0.01  # target mean KL a batch, > 0

    def __call__(self, batch: Batch, run: Run) -> None:
        logp = run.score(batch, {"logp"}).logp
        ratio = token_ratio(logp, batch.logp, batch.counted)
        measured = float(masked_mean(ratio - 1 - torch.log(ratio), batch.counted))
        run.state["ppo.beta"] = beta_update(measured, run.state.get("ppo.beta", self.beta), self.d_targ)
        run.log(measured_kl=measured)


METHOD = Method(
    name="ppo",
    paper=Paper("Proximal Policy Optimization Algorithms", "1707.06347", 2017),
    domain="control",
    summary="several epochs of minibatch steps on a clipped surrogate, with a critic and GAE",
    select=UniformPrompts(group_size=1),
    rollout=OnPolicy(),
    reward=TaskReward(),
    credit=GAE(gamma=0.99, lam=0.95),
    objective=ClippedSurrogate(clip_low=0.2, clip_high=0.2, aggregation="token_mean"),
    regularize=(ValueLoss(coefficient=0.5),),
    update=GradientSteps(epochs=10, minibatches=32, learning_rate=3e-4, optimizer="adam", max_grad_norm=0.5),
)

# On a language model: undiscounted, few epochs, the model's own learning rate, several samples a prompt.
FOR_DOMAIN = {
    "language": METHOD.but(
        domain="language",
        base=None,
        select=UniformPrompts(group_size=8),
        credit=GAE(gamma=1.0, lam=0.95),
        update=GradientSteps(epochs=2, minibatches=2),
    )
}
