"""PolicyFlow: PPO for flow policies with a Brownian regularizer (arXiv:2602.01156).

The likelihood ratio of a flow takes divergences along its path. PolicyFlow adds Gaussian noise to the flow's output and takes the ratio of that noise, the
shift of its mean being the change of the velocity field since the batch was collected at one random point of the straight line from the stored start
to the stored output: one velocity a sample and update. A pull of the field towards the noise that a point came from (Brownian motion's) spreads the
samples in the place of an entropy bonus. Against PPO it changes the policy, the objective, the clip of the critic, the rate, which follows the measured
KL, and adds the regularizer. Equations from the code; the schedule's factors are [reconstructed].

The policy lives in `domains.diffusion.noisy_flow`. Pure functions count time as the paper does, t = 0 at the noise; the library's level is 1 - t and its
velocity has the other sign. Left out: training along other paths than straight ones, an averaged old policy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.diffusion.denoise import gaussian_logp
from anypo.method import Paper
from anypo.methods.control.ppo import METHOD as PPO
from anypo.policy import Loss, Signals
from anypo.seams.groups import masked_mean
from anypo.seams.objective import LOG_RATIO_LIMIT, clipped, ratio_metrics
from anypo.seams.regularize import gaussian_kl
from anypo.seams.update import GradientSteps
from anypo.task import Prompt

if TYPE_CHECKING:
    from anypo.run import MethodLoss, Run

Vectors = Float[Tensor, "*N D"]
Numbers = Float[Tensor, "*N"]
ACTING = "acting"  # the named policy that collected the batch


class Ratio(NamedTuple):
    logp_old: Numbers
    logp_new: Numbers
    ratio: Numbers


def sample(x0: Vectors, A: Float[Tensor, "D D"], c: Float[Tensor, " D"], n: int) -> Vectors:
    """Equation 1 for the field v(x,t) = A x + t c: n steps of the midpoint rule from x0."""
    x, h = x0, 1 / n
    for k in range(n):
        middle = x + (h / 2) * (x @ A.T + k * h * c)
        x = x + h * (middle @ A.T + (k + 0.5) * h * c)
    return x


def ratio(delta: Vectors, dv: Vectors, std_old: Tensor, std_new: Tensor) -> Ratio:
    """Equation 4: densities of the noise `delta` under N(0, std_old^2) and under N(dv, std_new^2), and their ratio (its logarithm within +-20)."""
    old, new = gaussian_logp(delta, torch.zeros_like(dv), std_old).detach(), gaussian_logp(delta, dv, std_new)
    return Ratio(old, new, (new - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp())


def policy_loss(delta: Vectors, dv: Vectors, adv: Numbers, std_old: Tensor, std_new: Tensor, eps: float = 0.2) -> Tensor:
    """Equation 5: minus the mean clipped surrogate."""
    return -clipped(ratio(delta, dv, std_old, std_new).ratio, adv, 1 - eps, 1 + eps).mean()


def value_loss(v: Numbers, v_old: Numbers, ret: Numbers, value_clip: float) -> Tensor:
    """Equation 5 [code]: mean squared error of the value held within `value_clip` of the old one; no maximum with the plain error, as PPO has."""
    return ((v_old + (v - v_old).clamp(-value_clip, value_clip) - ret) ** 2).mean()


def kl(dv: Vectors, std_old: Tensor, std_new: Tensor) -> Numbers:
    """Equation 6: KL of N(dv, std_new^2) from N(0, std_old^2), summed over D."""
    return gaussian_kl(dv, std_new.log(), torch.zeros_like(dv), std_old.log())


def adapted_rate(rate: float, measured: float, target: float, lowest: float, highest: float) -> float:
    """Equation 6 [factors reconstructed]: the learning rate over 1.5 above twice the target KL, times 1.5 below half of it, within its limits."""
    factor = 1 / 1.5 if measured > 2 * target else 1.5 if measured < target / 2 else 1.0
    return min(max(rate * factor, lowest), highest)


def brownian(x0: Vectors, x1: Vectors, v: Vectors, v_old: Vectors, t: Numbers, b: float = 1.0, kind: str = "rectified") -> Tensor:
    """Equation 7: mean over N and D of ((1-t) v - b (x_t - t v_old))^2 at x_t = (1-t) x0 + t x1; "trig" (t in radians) has cos t for 1 - t and sin t
    for t, and cos t x_t in the place of x_t. No gradient for `v_old`. Raises ValueError for another kind.
    """
    t = t[..., None]
    if kind == "rectified":
        near, far, point = 1 - t, t, (1 - t) * x0 + t * x1
    elif kind == "trig":
        near, far = t.cos(), t.sin()
        point = near * (near * x0 + far * x1)
    else:
        raise ValueError(f"unknown path '{kind}'; use rectified or trig")
    return ((near * v - b * (point - far * v_old.detach())) ** 2).mean()


def goal_entropy(counts: Tensor) -> Tensor:
    """Entropy of the shares of K goals over log K, in [0,1]; 0 when none was reached."""
    share = counts.double() / counts.sum().clamp(min=1)
    return -torch.special.xlogy(share, share).sum() / math.log(len(counts))


def _draw_levels(batch: Batch, run: Run) -> None:
    """Levels [N,T] of the grid of the midpoint rule, both ends included (equation 2)."""
    points = 2 * run.policy.sampling_steps
    batch.signals["path_level"] = torch.randint(points + 1, batch.mask.shape, generator=run.generator) / points


@dataclass
class PathRollout:
    """Attempts collected by the task, and for every action a point of its path at which the field is compared."""

    needs = frozenset({"path_velocity"})

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        batch = run.collect(prompts)
        _draw_levels(batch, run)
        return batch


@dataclass
class VelocitySurrogate:
    """The clipped surrogate on the ratio of the noise (equations 3 to 5)."""

    eps: float = 0.2  # the ratio's band is 1 - eps to 1 + eps, > 0

    needs = frozenset({"path_velocity", "old_path_velocity", "log_std", "old_log_std"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        mask = batch.counted
        dv = (batch.signal("old_path_velocity") - new.path_velocity)[mask]  # the paper's field is minus ours
        noise, std_old, std_new = batch.action.chunk(3, dim=-1)[2][mask], batch.signal("old_log_std")[mask].exp(), new.log_std[mask].exp()
        loss = policy_loss(noise, dv, batch.advantage[mask], std_old, std_new, self.eps)
        with torch.no_grad():
            found, everywhere = ratio(noise, dv, std_old, std_new).ratio, torch.ones(len(dv), dtype=torch.bool)
            metrics = ratio_metrics(found, 1 - self.eps, 1 + self.eps, everywhere)
            metrics |= {"kl": float(masked_mean(kl(dv, std_old, std_new), everywhere)), "noise_std": float(std_new.mean())}
        return Loss(loss, metrics)


@dataclass
class BrownianRegularizer:
    """The field is drawn along the noise that its point came from (equation 7, straight paths)."""

    weight: float = 0.05  # w_B >= 0; 0 switches it off
    b: float = 1.0  # how far it is drawn, in lengths of the noise, >= 0
    fall: float = 0.0  # share of the weight that is gone at the end of the run, linearly, in [0,1]

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"path_velocity", "old_path_velocity"} if self.weight else ())

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        if not self.weight:
            return Loss(batch.logp.new_zeros(()))
        mask = batch.counted
        start, end, _ = (x[mask] for x in batch.action.chunk(3, dim=-1))
        loss = brownian(
            start, end, -new.path_velocity[mask], -batch.signal("old_path_velocity")[mask], 1 - batch.signal("path_level")[mask], self.b
        )
        return Loss(self.weight * (1 - self.fall * run.progress) * loss, {"brownian_loss": float(loss.detach())})


@dataclass
class HeldValue:
    """The critic's loss with values held near the old ones (equation 5)."""

    coefficient: float = 1.0  # >= 0
    clip: float = 0.1  # how far a value may move, in the scale of the batch's rewards, > 0

    needs = frozenset({"value", "old_value"})
    wants = frozenset({"returns"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        mask = batch.counted
        loss = value_loss(new.value[mask], batch.signal("old_value")[mask], batch.signal("returns")[mask], self.clip)
        return Loss(self.coefficient * loss, {"value_loss": float(loss.detach())})


@dataclass
class PathSteps(GradientSteps):
    """Epochs of minibatches, each with fresh points on the paths, and a rate that follows the KL of each minibatch (equations 2, 3 and 6)."""

    target_kl: float | None = 0.01  # nats an action; None = the rate stays
    lowest: float = 1e-6  # of the rate
    highest: float = 1e-2

    def __call__(self, batch: Batch, loss_fn: MethodLoss, run: Run) -> dict[str, float]:
        run.named_policy(ACTING).load_state_dict(run.policy.state_dict())
        return super().__call__(batch, loss_fn, run)

    def backward(self, part: Batch, loss_fn: MethodLoss, run: Run) -> Loss:
        _draw_levels(part, run)
        part.signals["old_path_velocity"] = run.score(part, {"path_velocity"}, ACTING).path_velocity
        return super().backward(part, loss_fn, run)

    def one_step(self, part: Batch, loss_fn: MethodLoss, optimizer: torch.optim.Optimizer, run: Run) -> dict[str, float]:
        metrics = super().one_step(part, loss_fn, optimizer, run)
        if self.target_kl is not None and "kl" in metrics:
            for group in optimizer.param_groups:
                group["lr"] = adapted_rate(group["lr"], metrics["kl"], self.target_kl, self.lowest, self.highest)
        return metrics | {"learning_rate": optimizer.param_groups[0]["lr"]}


METHOD = PPO.but(
    name="policyflow",
    paper=Paper("PolicyFlow: PPO for flow policies, Brownian regularizer", "2602.01156", 2026),
    domain="diffusion",
    summary="PPO for noisy flow policies: the ratio from the velocity's change at one point of the path, and Brownian spreading for an entropy bonus",
    rollout=PathRollout(),
    objective=VelocitySurrogate(),
    regularize=(HeldValue(), BrownianRegularizer()),
    update=PathSteps(epochs=5, minibatches=4, learning_rate=1e-4, optimizer="adamw", weight_decay=1e-5, max_grad_norm=1.0),
    task="MultiGoal-v0",
)
