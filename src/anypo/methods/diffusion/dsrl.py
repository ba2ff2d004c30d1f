"""DSRL: diffusion steering in latent-noise space (arXiv:2506.15799).

A policy that imitates by a diffusion or a flow is a fixed map from an observation and the noise it starts from to an action. DSRL leaves it as it is, a
black box, and learns which noise to feed it: SAC whose actions are noise. Against SAC it changes what an action is (the policy and the rollout, which
begins with the imitating policy's own noise), the entropy's target, and how many minibatches a step is worth. `dsrl.na` (noise-aliased) learns a
critic of real actions, so that recorded steps without noise serve too, and distils it into a critic of noise. Equations from memory of the paper.
Both critics are pairs, and in both forms the actor follows the smaller of the noise critics, as in SAC. [ours]

The policy lives in `domains.diffusion.steering` (`noise_policy` is equation 1); chunks of H actions are the task's option `action_chunk`, discounted by
gamma a chunk. Left out: more critics than two, gamma to the power of H.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.diffusion.denoise import ode_step
from anypo.domains.diffusion.steering import noise_policy
from anypo.method import Paper
from anypo.methods.control.sac import METHOD as SAC
from anypo.methods.control.sac import Temperature, TwinCritics, critic_loss, q_target
from anypo.policy import Loss, Signals
from anypo.seams.cloning import CloneDemonstrations
from anypo.seams.replay import Replay
from anypo.task import Prompt

if TYPE_CHECKING:
    from anypo.run import Run

__all__ = ["METHOD", "VARIANTS", "alpha_step", "distill_loss", "noise_policy", "steer", "td_na", "td_sac"]

PerRow = Float[Tensor, " N"]
Ensemble = Float[Tensor, "J N"]


def steer(
    w: Float[Tensor, "N D"], A: Float[Tensor, "D D"], c: Float[Tensor, " D"], sigma: Sequence[float] | Tensor
) -> Float[Tensor, "N D"]:
    """The deterministic map of a linear field v(x,s) = A x + s c: Euler steps from w through the levels `sigma` [T+1]."""
    x, levels = w, [float(s) for s in sigma]
    for s, s_next in zip(levels[:-1], levels[1:], strict=True):
        x = ode_step(x, x @ A.T + s * c, s, s_next)
    return x


def td_sac(reward: PerRow, done: Tensor, q1: PerRow, q2: PerRow, logp: PerRow, gamma: float, alpha: float | Tensor) -> PerRow:
    """Equation 2: r + gamma (1 - d) (min Q^W(s',w') - alpha log pi(w'|s')), without a gradient."""
    return q_target(reward, done, torch.stack([q1, q2]), logp, gamma, alpha)


def td_na(reward: PerRow, done: Tensor, q: Ensemble, gamma: float) -> PerRow:
    """Equation 3: r + gamma (1 - d) min_j Q^A_j(s', f(s',w')), without a gradient and without entropy."""
    return q_target(reward, done, q, torch.zeros_like(reward), gamma, 0.0)


def distill_loss(qw: PerRow, qa: Ensemble, agg: str = "mean") -> Tensor:
    """Equation 3: mean squared error of the noise critic at w against the mean (or "min") of the action critics at f(s,w), which get no gradient.

    Raises ValueError for another `agg`.
    """
    if agg not in ("mean", "min"):
        raise ValueError(f"unknown aggregate '{agg}' of the action critics; use mean or min")
    target = qa.mean(0) if agg == "mean" else qa.min(0).values
    return ((qw - target.detach()) ** 2).mean()


def alpha_step(logp: PerRow, log_alpha: float, lr: float, target: float) -> float:
    """Equation 4: a gradient step of log alpha on the mean of -alpha (log pi + target); alpha falls when the entropy is above its target."""
    alpha = torch.tensor(float(log_alpha), dtype=torch.float64).exp()
    return log_alpha + lr * float(alpha * (logp.double().mean() + target))


@dataclass
class SteeredReplay(Replay):
    """Replay that begins with the imitating policy itself: until the warm-up is over the noise is N(0,I), clipped to its bounds."""

    updates_per_action: float = 10.0  # minibatches dealt for every collected action, > 0; 10 to 20 in the paper

    needs = Replay.needs | {"steered_noise"}

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        if self.buffer is not None and len(self.buffer) >= self.warmup:
            run.policy.steering.fill_(True)
        return super().__call__(prompts, run)

    def is_fixed(self, run: Run) -> bool:
        fixed = super().is_fixed(run)
        if fixed:
            run.policy.steering.fill_(True)
        return fixed


def _draw(batch: Batch, run: Run, *names: str) -> None:
    """Fresh normal noise [N,T,D] under each name; stored actions hold 2 D numbers."""
    for name in names:
        batch.signals[name] = torch.randn(*batch.mask.shape, batch.action.shape[-1] // 2, generator=run.generator)


@dataclass
class NoiseTarget:
    """The worth of noise: equation 2, with the learned temperature."""

    gamma: float = 0.99  # discount of a decision, in [0,1)

    needs = frozenset({"next_q", "next_logp"})

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        assert batch.reward is not None and batch.terminated is not None
        _draw(batch, run, "noise", "next_noise")
        found = run.score(batch, self.needs)
        alpha = run.policy.log_temperature.detach().exp()
        first, second = found.next_q.unbind(-1)
        return td_sac(batch.reward, batch.terminated, first, second, found.next_logp, self.gamma, alpha)


@dataclass
class ActionTarget:
    """The worth of an action: equation 3."""

    gamma: float = 0.99  # discount of a decision, in [0,1)

    needs = frozenset({"next_q_action"})

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        assert batch.reward is not None and batch.terminated is not None
        _draw(batch, run, "noise", "next_noise", "distill_noise")
        next_q = run.score(batch, self.needs).next_q_action
        return td_na(batch.reward, batch.terminated, next_q.movedim(-1, 0), self.gamma)


@dataclass
class ActionCritics:
    """The action critics' loss onto the credit's target."""

    needs = frozenset({"q_action"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        loss = critic_loss(new.q_action.flatten(0, 1).T, batch.advantage.flatten())
        return Loss(loss, {"critic_loss": float(loss.detach()), "q": float(new.q_action.detach().mean())})


@dataclass
class Distillation:
    """The noise critics learn what the action critics say of f(s,w), at fresh noise w."""

    agg: str = "mean"  # mean or min over the action critics

    needs = frozenset({"q_noise", "q_distilled"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        judged = new.q_distilled.flatten(0, 1).T
        loss = torch.stack([distill_loss(qw, judged, self.agg) for qw in new.q_noise.flatten(0, 1).T]).sum()
        return Loss(loss, {"distillation_loss": float(loss.detach())})


@dataclass
class NoiseTemperature(Temperature):
    """SAC's temperature, with a target of minus half the noise's dimensions (equation 4)."""

    def _target(self, batch: Batch) -> float:
        return -batch.signal("noise").shape[-1] / 2 if self.target_entropy is None else self.target_entropy


METHOD = SAC.but(
    name="dsrl",
    paper=Paper("DSRL: diffusion steering in latent-noise space", "2506.15799", 2025),
    domain="diffusion",
    summary="SAC whose actions are the noise that a frozen imitating flow starts from; the flow is a black box that is never trained further",
    prepare=CloneDemonstrations(),
    rollout=SteeredReplay(),
    credit=NoiseTarget(),
    regularize=(TwinCritics(), NoiseTemperature()),
    task="ForkedGoal-v0",
)
VARIANTS = {
    "na": METHOD.but(
        name="dsrl.na",
        summary="learns a critic of real actions, from recorded steps too, and distils it into the critic of noise",
        credit=ActionTarget(),
        regularize=(ActionCritics(), Distillation(), NoiseTemperature()),
    )
}
