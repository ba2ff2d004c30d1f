"""PPO scaling: PPO plateaus as stochastic optimization; co-scaling parallel environments (arXiv:2603.06009).

Seen from outside, PPO is stochastic optimization: a step goes from the policy that collects to the one that collects next, its size is set by the
inner loop's regularization, and its noise by how much was collected. So learning stops at a level proportional to step size times noise, and going on
takes smaller steps or more environments. More environments help when the inner loop stays as it was: the same size of a minibatch and learning rate,
and more minibatches. Against PPO it changes the number of environments (`select.factor`), the update (minibatches of a fixed size, an explicit outer
step, measurements of gradient noise) and the control (statistics of the outer step, a detector of plateaus). The variant `ewma` keeps an older proximal
policy (arXiv:2110.00641). The quadratic model, the estimators and the detector are [reconstructed]; the interpolation of weights is [ours].
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Method, Paper
from anypo.methods.control.ppo import METHOD as PPO
from anypo.policy import Loss, Signals
from anypo.seams.groups import masked_mean
from anypo.seams.objective import clipped, ratio_metrics, token_ratio
from anypo.seams.update import GradientSteps, minibatches

if TYPE_CHECKING:
    from anypo.run import MethodLoss, Run
    from anypo.task import Prompt, Task

PerAction = Float[Tensor, "N T"]
Vector = Float[Tensor, " P"]
VARIANTS_OF_SCALING = ("recipe", "w1", "w2", "w3")
# What the detector and the proximal policy keep in the run.
FACTOR, RATE, SINCE, WEIGHT = "ppo_scaling.factor", "ppo_scaling.rate", "ppo_scaling.since", "ppo_scaling.weight"


class Moments(NamedTuple):
    moments: Float[Tensor, " K+1"]
    limit: float
    plateau_loss: float


class Noise(NamedTuple):
    noise: float  # trace of the covariance of the mean gradient
    signal: float  # squared length of the true gradient, estimated, >= 0
    snr: float


def moment_recursion(eta: float, h: float, sigma: float, n: float, m0: float, steps: int) -> Moments:
    """Equations 2 and 3 [reconstructed]: E[(theta - theta*)^2] of quadratic SGD with step eta, curvature h and gradient noise sigma^2 / n, before and
    after each of `steps`; where it ends (0 < eta h < 2), and the excess loss there."""
    moments = [m0]
    for _ in range(steps):
        moments.append((1 - eta * h) ** 2 * moments[-1] + eta**2 * sigma**2 / n)
    limit = eta * sigma**2 / (n * h * (2 - eta * h))
    return Moments(torch.tensor(moments, dtype=torch.float64), limit, h * limit / 2)


def co_scale(config: dict[str, Any], factor: float, variant: str = "recipe") -> dict[str, Any]:
    """Equation 6: the configuration for `factor` times the environments. "recipe" adds minibatches; w1 enlarges them instead, w2 and w3 raise the learning
    rate besides, by sqrt(factor) and factor. A minibatch count that is no integer is rounded. Raises ValueError for another variant."""
    if variant not in VARIANTS_OF_SCALING:
        raise ValueError(f"unknown scaling '{variant}'; use one of {', '.join(VARIANTS_OF_SCALING)}")
    out = config | {"envs": round(factor * config["envs"])}
    if variant == "recipe":
        return out | {"minibatches": max(1, round(factor * config["minibatches"]))}
    rate = {"w1": 1.0, "w2": factor**0.5, "w3": factor}[variant]
    return out | {"minibatch_size": round(factor * config["minibatch_size"]), "lr": rate * config["lr"]}


def gradient_noise(chunk_gradients: Float[Tensor, "B P"]) -> Noise:
    """Equation 4 [reconstructed]: noise and signal of a batch gradient from those of its chunks. One chunk, or noise below 1e-12, has an SNR of 0."""
    count, mean = len(chunk_gradients), chunk_gradients.mean(0)
    noise = float((chunk_gradients - mean).square().sum(1).mean()) / (count - 1) if count > 1 else 0.0
    signal = max(float(mean.square().sum()) - noise, 0.0)
    return Noise(noise, signal, signal / noise if noise >= 1e-12 else 0.0)


def outer_step(theta: Vector, inner: Vector, eta_out: float) -> Vector:
    """Equation 5 [ours]: part of the way from theta to what the inner loop found."""
    return theta + eta_out * (inner - theta)


def ewma_step(proximal: Vector, theta: Vector, weight: float, beta: float) -> tuple[Vector, float]:
    """Equation 5: the proximal policy and its weight after one more policy."""
    weight = beta * weight + 1
    return proximal + (theta - proximal) / weight, weight


def ewma(thetas: Float[Tensor, "K P"], beta: float) -> Vector:
    """The bias-corrected exponentially weighted average of policies in order; with beta 0 the last one."""
    proximal, weight = thetas[0], 1.0
    for theta in thetas[1:]:
        proximal, weight = ewma_step(proximal, theta, weight, beta)
    return proximal


def decoupled_loss(
    logp: PerAction, prox_logp: PerAction, old_logp: PerAction, advantages: PerAction, mask: Tensor, eps: float = 0.2
) -> Tensor:
    """Equation 5 (arXiv:2110.00641): PPO's clip around the proximal policy, corrected for who collected."""
    surrogate = clipped(token_ratio(logp, prox_logp, mask), advantages, 1 - eps, 1 + eps)
    return -masked_mean(token_ratio(prox_logp, old_logp, mask).detach() * surrogate, mask)


def ddr(samples: float, kl: float) -> float:
    """Equation 5b [reconstructed]: data collected per unit of divergence; 1e9 for a policy that did not move."""
    return samples / kl if kl > 0 else 1e9


def flat(values: list[Tensor]) -> Vector:
    return torch.cat([v.detach().flatten() for v in values])


@dataclass
class ScaledPrompts:
    """`factor` times as many environments as the task has by default."""

    factor: float = 1.0  # > 0

    def __call__(self, task: Task, run: Run) -> list[Prompt]:
        return task.prompts(max(1, round(task.prompts_per_step * self.factor * run.state.get(FACTOR, 1.0))), run.rng)


@dataclass
class OuterLoop(GradientSteps):
    """PPO's inner loop over minibatches of a fixed size, as one outer step of a given rate; before it, the gradient's noise is measured, and after it a
    proximal policy follows."""

    minibatch_size: int = 64  # actions, >= 1; their number is rounded
    outer_rate: float = 1.0  # share of the way to the inner loop's result that is gone, in [0,1]
    proximal_decay: float | None = None  # beta of the proximal policy, in [0,1); None = there is none
    noise_chunks: int = 8  # parts of the batch, whole rows, for the noise; 1 or less = not measured
    minibatches: int = field(default=0, init=False, repr=False)  # follows from the size

    def __call__(self, batch: Batch, loss_fn: MethodLoss, run: Run) -> dict[str, float]:
        if self.noise_chunks > 1:
            found = gradient_noise(self.chunk_gradients(batch, loss_fn, run))
            run.log(gradient_noise=found.noise, gradient_signal=found.signal, snr=found.snr)
        if self.proximal_decay is not None:
            run.named_policy("proximal").after_collection(run.policy)  # reads observations as the policy that acted does
            batch.signals["prox_logp"] = run.score(batch, {"logp"}, "proximal").logp
        parameters = [p for p in run.policy.parameters() if p.requires_grad]
        before = [p.detach().clone() for p in parameters]
        self.minibatches = max(1, round(int(batch.counted.sum()) / self.minibatch_size))
        metrics = super().__call__(batch, loss_fn, run)
        rate = self.outer_rate * run.state.get(RATE, 1.0)
        if rate != 1:
            with torch.no_grad():
                for parameter, start in zip(parameters, before, strict=True):
                    parameter.copy_(outer_step(start, parameter, rate))
            run.advance_version()
        if self.proximal_decay is not None:
            weight = self.proximal_decay * run.state.get(WEIGHT, 1.0) + 1
            run.move_policy("proximal", 1 - 1 / weight)
            run.state[WEIGHT] = weight
        return metrics

    def chunk_gradients(self, batch: Batch, loss_fn: MethodLoss, run: Run) -> Float[Tensor, "B P"]:
        """Gradients of the loss in the actor's parameters, of equal parts of the batch; the critic's are another problem's."""
        chosen = [p for g in run.policy.parameter_groups() if g["role"] == "policy" for p in g["params"]]
        rows = []
        for part in minibatches(batch, min(self.noise_chunks, len(batch)), "row", torch.Generator().manual_seed(run.step)):
            run.policy.zero_grad(set_to_none=True)
            run.backward(part, loss_fn)
            rows.append(flat([torch.zeros_like(p) if p.grad is None else p.grad for p in chosen]))
        run.policy.zero_grad(set_to_none=True)
        return torch.stack(rows)


@dataclass
class DecoupledSurrogate:
    """The clipped surrogate around the proximal policy that `OuterLoop` keeps."""

    eps: float = 0.2  # > 0

    needs = frozenset({"logp"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        mask, proximal = batch.counted, batch.signals.get("prox_logp", batch.logp)  # at first, the proximal policy is the one that acted
        loss = decoupled_loss(new.logp, proximal, batch.logp, batch.advantage, mask, self.eps)
        return Loss(loss, ratio_metrics(token_ratio(new.logp, proximal, mask), 1 - self.eps, 1 + self.eps, mask))


@dataclass
class OuterStatistics:
    """How far the outer step went: KL from the policy that acted to the next one (exact where the policy can), mean |ratio - 1|, data per divergence."""

    def __call__(self, batch: Batch, run: Run) -> None:
        new = run.score(batch, {"logp", "kl_old"} & run.policy.provides)
        ratio = token_ratio(new.logp, batch.logp, batch.counted)
        kl = float(masked_mean(new["kl_old"] if "kl_old" in new else ratio - 1 - ratio.log(), batch.counted))
        moved = float(masked_mean((ratio - 1).abs(), batch.counted))
        run.log(outer_kl=kl, outer_ratio=moved, ddr=ddr(float(batch.counted.sum()), kl))


def on_plateau(values: Float[Tensor, " W"], snr: float, tol: float = 0.1, snr_min: float = 0.1) -> bool:
    """Equation 7 [reconstructed]: a least-squares slope, per evaluation, below tol times the values' standard deviation, and too little signal."""
    if len(values) < 2:
        return False
    time = torch.arange(len(values), dtype=values.dtype)
    time = time - time.mean()
    slope = float((time * values).sum() / time.square().sum())
    return slope < tol * float(values.std(correction=0)) and snr < snr_min


@dataclass
class PlateauDetector:
    """Watches the returns of the last evaluations in the run's history; on a plateau it says so, and may act: twice the environments, or half the outer
    step, and a fresh window."""

    window: int = 10  # evaluations (steps in which an episode ended), >= 2
    tol: float = 0.1  # of their standard deviation
    snr_min: float = 0.1
    act: str = "advise"  # advise, environments or step

    def __call__(self, batch: Batch, run: Run) -> None:
        if self.act not in ("advise", "environments", "step"):
            raise ValueError(f"control.act is advise, environments or step, not '{self.act}'")
        seen = [r for r in run.history if "episode_return" in r and r["step"] >= run.state.get(SINCE, 0)][-self.window :]
        returns = torch.tensor([r["episode_return"] for r in seen], dtype=torch.float64)
        stuck = len(seen) == self.window and on_plateau(returns, seen[-1].get("snr", 0.0), self.tol, self.snr_min)
        run.log(plateau=float(stuck))
        if stuck and self.act != "advise":
            key, change = (FACTOR, 2.0) if self.act == "environments" else (RATE, 0.5)
            run.state[key] = run.state.get(key, 1.0) * change
            run.state[SINCE] = run.step + 1


METHOD = PPO.but(
    name="ppo_scaling",
    paper=Paper("PPO plateaus as stochastic optimization; co-scaling parallel environments", "2603.06009", 2026),
    summary="PPO with more environments and more minibatches of the same size, and a look at step size and noise of the outer loop",
    task="NoisyPoint-v0",
    select=ScaledPrompts(),
    update=OuterLoop(epochs=4, learning_rate=3e-4, optimizer="adam", max_grad_norm=0.5),
    control=(OuterStatistics(), PlateauDetector()),
)

VARIANTS = {
    "ewma": METHOD.but(
        name="ppo_scaling.ewma",
        summary="with a clip around an older, averaged policy, which makes the outer step smaller",
        objective=DecoupledSurrogate(eps=0.2),
        update=OuterLoop(epochs=4, learning_rate=3e-4, optimizer="adam", max_grad_norm=0.5, proximal_decay=0.9),
    )
}


def scaled(method: Method, factor: float, variant: str = "recipe") -> Method:
    """A method with an `OuterLoop`, for `factor` times the environments by one of the ways of `co_scale`."""
    update = method.update
    rate = update.learning_rate or 3e-4  # type: ignore[attr-defined]
    config = co_scale({"envs": 1, "minibatches": 1, "minibatch_size": update.minibatch_size, "lr": rate}, factor, variant)  # type: ignore[attr-defined]
    wider = method.set("select.factor", float(method.select.factor * factor))  # type: ignore[attr-defined]
    return wider.set("update.minibatch_size", config["minibatch_size"]).set("update.learning_rate", config["lr"])
