"""SAC: soft actor-critic (arXiv:1801.01290), with the learned temperature of arXiv:1812.05905.

An off-policy maximum-entropy actor-critic: twin critics with Polyak targets, a squashed Gaussian actor trained by the reparameterized gradient, and a
temperature found by dual descent on an entropy target. A time limit is no termination: the target bootstraps across it. The critic, actor and
temperature losses are one sum with one optimizer step; since none of the three sends a gradient into another's parameters, this differs from three
steps in turn only in that the actor sees the critics from before the step. [ours]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.control.soft import squash
from anypo.method import Method, Paper
from anypo.policy import Gradient, Loss, Signals
from anypo.seams.replay import Replay
from anypo.seams.reward import TaskReward
from anypo.seams.select import UniformPrompts
from anypo.seams.update import GradientSteps

if TYPE_CHECKING:
    from anypo.run import MethodLoss, Run


class Squashed(NamedTuple):
    action: Float[Tensor, "B d"]
    logp: Float[Tensor, " B"]


class SoftLosses(NamedTuple):
    critic: Tensor
    actor: Tensor
    temperature: Tensor


def squashed_logp(mu: Float[Tensor, "B d"], log_std: Float[Tensor, "B d"], eps: Float[Tensor, "B d"]) -> Squashed:
    """Equation 5: a = tanh(mu + sigma eps) and its log-density, with the stable form of log(1 - tanh^2)."""
    return Squashed(*squash(mu, log_std, eps))


def q_target(
    reward: Float[Tensor, " B"], terminated: Tensor, next_q: Float[Tensor, "2 B"], next_logp: Float[Tensor, " B"], gamma: float = 0.99,
    alpha: float | Tensor = 0.2,
) -> Float[Tensor, " B"]:  # fmt: skip
    """Equation 6: r + gamma (1 - d) (min of the target critics - alpha log pi), without a gradient. A time limit has d = 0."""
    soft_value = next_q.min(dim=0).values - alpha * next_logp
    return (reward + gamma * (1 - terminated.to(reward.dtype)) * soft_value).detach()


def critic_loss(q: Float[Tensor, "2 B"], target: Float[Tensor, " B"]) -> Tensor:
    """Equation 7: the sum over the twins of their mean squared error."""
    return ((q - target) ** 2).mean(dim=1).sum()


def actor_loss(q_new: Float[Tensor, "2 B"], logp_new: Float[Tensor, " B"], alpha: float | Tensor) -> Tensor:
    """Equation 8: mean of alpha log pi - min Q; the minimum is taken for each sample. Alpha carries no gradient here."""
    return (_constant(alpha) * logp_new - q_new.min(dim=0).values).mean()


def temperature_loss(logp_new: Float[Tensor, " B"], alpha: float | Tensor, target_entropy: float) -> Tensor:
    """Equation 9: - mean alpha (log pi + target entropy), a gradient for alpha alone."""
    return -(alpha * (logp_new.detach() + target_entropy)).mean()


def sac_losses(
    q: Float[Tensor, "2 B"], target: Float[Tensor, " B"], q_new: Float[Tensor, "2 B"], logp_new: Float[Tensor, " B"],
    alpha: float | Tensor = 0.2, target_entropy: float = -1.0,
) -> SoftLosses:  # fmt: skip
    """Equations 7 to 9."""
    return SoftLosses(critic_loss(q, target), actor_loss(q_new, logp_new, alpha), temperature_loss(logp_new, alpha, target_entropy))


def polyak(target: Tensor, online: Tensor, tau: float = 0.005) -> Tensor:
    """Equation 10: (1 - tau) target + tau online."""
    return torch.lerp(target, online, tau)


def _constant(value: float | Tensor) -> float | Tensor:
    return value.detach() if isinstance(value, Tensor) else value


def _twins(q: Float[Tensor, "B 1 2"]) -> Float[Tensor, "2 B"]:
    return q.flatten(0, 1).T


@dataclass
class SoftTarget:
    """The worth of an action: the critics' target, one number an action. Draws the minibatch's noise for the fresh actions of the actor as well."""

    gamma: float = 0.99  # discount, in [0,1)

    needs = frozenset({"next_q", "next_logp"})

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        both = torch.randn(2, *batch.action.shape, generator=run.generator)
        batch.signals["noise"], batch.signals["next_noise"] = both[0], both[1]
        return self.targets(batch, run.score(batch, self.needs), run)

    def targets(self, batch: Batch, found: Signals, run: Run) -> Tensor:
        """The targets from what the target critics found of the next state; a method with further critics adds theirs."""
        assert batch.reward is not None and batch.terminated is not None
        alpha = run.policy.log_temperature.detach().exp()  # type: ignore[union-attr, operator]
        target = q_target(
            batch.reward.flatten(), batch.terminated.flatten(), _twins(found.next_q), found.next_logp.flatten(), self.gamma, alpha
        )
        return target.view(batch.mask.shape)


@dataclass
class SoftActor:
    """The actor's loss (equation 8)."""

    needs = frozenset({"q_new", "logp_new", "log_temperature"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        alpha = new.log_temperature[0, 0].exp()
        loss = actor_loss(_twins(new.q_new), new.logp_new.flatten(), alpha)
        return Loss(loss, {"actor_loss": float(loss.detach()), "entropy": -float(new.logp_new.detach().mean())})

    def gradient(self, batch: Batch, new: dict[str, NDArray], run: Run) -> Gradient:
        """In closed form: alpha / B for log-probs, -1 / B for the smaller of the twins."""
        q, logp, alpha = new["q_new"], new["logp_new"], float(np.exp(new["log_temperature"][0, 0]))
        first = (q[..., :1] <= q[..., 1:]).astype(q.dtype)
        smaller = np.concatenate([first, 1 - first], axis=-1)
        loss = (alpha * float(logp.sum()) - float((q * smaller).sum())) / logp.size
        slopes = {"q_new": smaller / -logp.size, "logp_new": np.full_like(logp, alpha / logp.size)}
        return Gradient(loss, slopes, {"actor_loss": loss, "entropy": -float(logp.mean())})


@dataclass
class TwinCritics:
    """The critics' loss onto the credit's target (equation 7)."""

    needs = frozenset({"q"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        loss = critic_loss(_twins(new.q), batch.advantage.flatten())
        return Loss(loss, {"critic_loss": float(loss.detach()), "q": float(new.q.detach().mean())})

    def gradient(self, batch: Batch, new: dict[str, NDArray], run: Run) -> Gradient:
        """In closed form: 2 (Q - target) / B."""
        assert batch.advantage is not None
        error = new["q"] - batch.advantage.numpy()[..., None]
        loss = float((error * error).sum()) / len(error)
        return Gradient(loss, {"q": error * (2 / len(error))}, {"critic_loss": loss, "q": float(new["q"].mean())})


@dataclass
class Temperature:
    """Dual descent on the entropy (equation 9); it optimizes the logarithm of alpha."""

    target_entropy: float | None = None  # nats; None = minus the number of action dimensions

    needs = frozenset({"logp_new", "log_temperature"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        alpha = new.log_temperature[0, 0].exp()
        return Loss(temperature_loss(new.logp_new.flatten(), alpha, self._target(batch)), {"temperature": float(alpha.detach())})

    def gradient(self, batch: Batch, new: dict[str, NDArray], run: Run) -> Gradient:
        """In closed form: the loss is its own derivative in log alpha."""
        alpha = float(np.exp(new["log_temperature"][0, 0]))
        loss = -alpha * (float(new["logp_new"].mean()) + self._target(batch))
        slope = np.full_like(new["log_temperature"], loss / new["log_temperature"].size)
        return Gradient(loss, {"log_temperature": slope}, {"temperature": alpha})

    def _target(self, batch: Batch) -> float:
        return -float(batch.action.shape[-1]) if self.target_entropy is None else self.target_entropy


@dataclass
class SoftSteps(GradientSteps):
    """One optimizer step on a minibatch, then the target critics follow (equation 10)."""

    learning_rate: float | None = 3e-4
    optimizer: str | None = "adam"
    max_grad_norm: float | None = None
    tau: float = 0.005  # share of the critics in the targets whenever they follow, in (0,1]
    target_every: int = 1  # steps after which they do, >= 1

    def __call__(self, batch: Batch, loss_fn: MethodLoss, run: Run) -> dict[str, float]:
        metrics = self.one_step(batch, loss_fn, run.optimizer(self.build), run)
        if run.version % self.target_every == 0:
            run.policy.move_targets(self.tau)  # type: ignore[operator]
        return metrics


METHOD = Method(
    name="sac",
    paper=Paper("Soft Actor-Critic: Off-Policy Maximum Entropy Deep Reinforcement Learning with a Stochastic Actor", "1801.01290", 2018),
    domain="control",
    summary="off-policy maximum-entropy actor-critic: twin critics, a squashed Gaussian actor, a learned temperature",
    select=UniformPrompts(prompts=1, group_size=1),
    rollout=Replay(),
    reward=TaskReward(),
    credit=SoftTarget(),
    objective=SoftActor(),
    regularize=(TwinCritics(), Temperature()),
    update=SoftSteps(),
    loop="off_policy",
    task="Pendulum-v1",
)
