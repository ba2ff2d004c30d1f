"""DPPO: diffusion policy policy optimization (arXiv:2409.00588).

A diffusion policy makes an action in K denoising steps. DPPO fine-tunes one that imitates demonstrations: each denoising step is an action of an inner
problem nested in the environment's, with an exact Gaussian likelihood, and the environment's reward comes at the last. Against PPO it changes what is
an action (the rollout), the credit (a critic of the environment's state alone, advantages discounted towards the noisy steps) and the objective (a
clip that is tighter at the noisy steps), and it begins by cloning. Only the last K' steps are trained, and their deviations have a floor, for
exploration and in the likelihood. Equations of the paper and its code. Left out: short DDIM chains, the optional cloning term in the loss.

The policy lives in `domains.diffusion.action_diffusion` (`schedule`, `mean` and `logp` are equations 1 to 4); chunks of H actions are the task's
option `action_chunk`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.diffusion.action_diffusion import inner_actions, logp, mean, schedule
from anypo.method import Paper
from anypo.methods.control.ppo import METHOD as PPO
from anypo.policy import Loss, Signals
from anypo.seams.cloning import CloneDemonstrations
from anypo.seams.credit import dense_reward, per_action_ends, whiten
from anypo.seams.credit import gae as generalized_advantages
from anypo.seams.groups import masked_mean
from anypo.seams.objective import clipped, ratio_metrics, token_ratio
from anypo.seams.update import GradientSteps
from anypo.task import Prompt

if TYPE_CHECKING:
    from anypo.run import Run

__all__ = ["METHOD", "clip_bound", "clip_schedule", "denoise_advantage", "gae", "logp", "loss", "mean", "schedule"]


class Advantages(NamedTuple):
    adv: Float[Tensor, " T"]  # not normalized
    returns: Float[Tensor, " T"]


def gae(reward: Tensor, value: Tensor, done: Tensor, last_value: float, gamma: float, lam: float) -> Advantages:
    """Equation 5: advantages of one row of decisions [T]; `last_value` follows the last of them."""
    whole, never = torch.ones(1, len(reward), dtype=torch.bool), torch.zeros(1, len(reward))
    last = torch.as_tensor(last_value, dtype=value.dtype).view(1)
    found = generalized_advantages(reward[None], value[None], done[None], never, whole, gamma, lam, bootstrap_value=last)
    return Advantages(found.advantages[0], found.returns[0])


def denoise_advantage(adv: Float[Tensor, ...], K_ft: int, gamma_den: float) -> Float[Tensor, "... K"]:
    """Equation 6: the advantage of a decision for its K' trained steps, the noisiest first: gamma_den^(steps still to come) times it."""
    return adv[..., None] * gamma_den ** torch.arange(K_ft - 1, -1, -1, dtype=adv.dtype)


def clip_bound(progress: Tensor, eps: float, eps_base: float, rate: float) -> Tensor:
    """Equation 7: how far the ratio of a step may go, from `eps_base` at progress 0 exponentially to `eps` at progress 1."""
    return eps_base + (eps - eps_base) * torch.expm1(rate * progress) / math.expm1(rate)


def clip_schedule(K_ft: int, eps: float, eps_base: float, rate: float) -> Float[Tensor, " K"]:
    """Equation 7 for all K' trained steps, the noisiest first; a single one has `eps`."""
    progress = torch.linspace(0, 1, K_ft, dtype=torch.float64) if K_ft > 1 else torch.ones(1, dtype=torch.float64)
    return clip_bound(progress, eps, eps_base, rate)


def loss(
    logp: Float[Tensor, "N K"], old_logp: Float[Tensor, "N K"], adv: Float[Tensor, " N"], gamma_den: float, eps: float, eps_base: float, rate: float
) -> Tensor:  # fmt: skip
    """Equation 8, policy term: minus the mean clipped surrogate over decisions and their trained steps."""
    bound = clip_schedule(logp.shape[1], eps, eps_base, rate).to(logp.dtype)
    inside = torch.ones_like(logp, dtype=torch.bool)
    value = clipped(token_ratio(logp, old_logp, inside), denoise_advantage(adv, logp.shape[1], gamma_den), 1 - bound, 1 + bound)
    return -value.mean()


@dataclass
class DenoisingRollout:
    """Decisions collected by the task, handed on as their denoising steps."""

    needs = frozenset({"denoising_chain"})

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        batch = inner_actions(run.collect(prompts), run.policy.fine_tuned_steps)
        batch.logp = run.policy.observe(batch, {"logp"}).logp
        return batch


@dataclass
class DenoisingGAE:
    """Advantages of decisions from the critic of the environment's state, discounted for each denoising step (equations 5 and 6)."""

    gamma: float = 0.99  # discount of a decision, in [0,1]
    lam: float = 0.95  # trace decay, in [0,1]
    gamma_den: float = 0.99  # discount of a denoising step, in [0,1]
    normalize: bool = True  # whiten over the batch's decisions

    needs = frozenset({"old_value"})
    gives = frozenset({"returns"})

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        steps = int(batch.signal("denoising_step").max())
        values = (dense_reward(batch), batch.signal("old_value"), *per_action_ends(batch), batch.mask)
        reward, value, terminated, truncated, mask = (x[:, steps - 1 :: steps] for x in values)  # at the last step of each decision
        following = None if batch.next_value is None else batch.next_value[:, steps - 1 :: steps]
        found = generalized_advantages(reward, value, terminated, truncated, mask, self.gamma, self.lam, following)
        batch.signals["returns"] = found.returns.repeat_interleave(steps, dim=1)
        advantage = whiten(found.advantages, mask) if self.normalize else found.advantages
        return denoise_advantage(advantage, steps, self.gamma_den).flatten(1)


@dataclass
class DenoisingSurrogate:
    """The clipped surrogate over denoising steps, tighter at the noisy ones (equations 7 and 8)."""

    eps: float = 0.01  # the last step's ratio stays within 1 - eps to 1 + eps, > 0
    eps_base: float = 0.001  # the noisiest step's, > 0
    rate: float = 3.0  # of the exponential between them, > 0

    needs = frozenset({"logp"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        mask = batch.counted
        bound = clip_bound(batch.signal("denoising_progress"), self.eps, self.eps_base, self.rate)
        ratio = token_ratio(new.logp, batch.logp, mask)
        value = clipped(ratio, batch.advantage, 1 - bound, 1 + bound)
        return Loss(-masked_mean(value, mask), ratio_metrics(ratio, 1 - bound, 1 + bound, mask))


@dataclass
class DenoisingSteps(GradientSteps):
    """Epochs of minibatches over denoising steps, ended once the policy moved too far."""

    target_kl: float | None = 1.0  # nats; the batch is left after a step whose estimated KL exceeds it; None = never

    def enough(self, metrics: dict[str, float]) -> bool:
        return self.target_kl is not None and metrics.get("approx_kl", 0.0) > self.target_kl


METHOD = PPO.but(
    name="dppo",
    paper=Paper("Diffusion Policy Policy Optimization", "2409.00588", 2024),
    domain="diffusion",
    summary="PPO over the denoising steps of a cloned diffusion policy: exact step likelihoods, a critic of the state alone, clips that fit the noise",
    prepare=CloneDemonstrations(),
    rollout=DenoisingRollout(),
    credit=DenoisingGAE(),
    objective=DenoisingSurrogate(),
    update=DenoisingSteps(epochs=5, minibatches=8, learning_rate=3e-4, optimizer="adam", max_grad_norm=0.5),
    task="PointAvoid-v0",
)
