"""E2PO: embedding-perturbed exploration preference optimization (arXiv:2605.15803).

The samples of a group become alike as a policy improves, and with their reward's spread goes the signal. Other start noises or larger groups do not
mend that. Here the members of a group are sampled under different small perturbations of the prompt's embedding: orthogonal, in antithetic pairs,
strong at high noise levels, with some members left clean as anchors. Log-probabilities, old and new, are those under the clean embedding, so that
the clean prompt is trained and ratios begin at 1. Against Flow-GRPO it changes `rollout` (whose batches carry `anchor` [N]), the centre of `credit`,
and adds two controls: of the directions and of their size. Equations: embedding perturbation inside groups from the paper; directions, schedule,
clean likelihoods, anchored centre, learning of the directions and control of the radius [reconstructed].
Left out: the variant on forward-process updates; prompts as texts (a task's condition must be numbers).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.diffusion.denoise import predicted_data, sde_schedule
from anypo.domains.diffusion.sample import as_batch, sample
from anypo.method import Paper
from anypo.methods.diffusion.flow_grpo import METHOD as FLOW_GRPO
from anypo.methods.diffusion.flow_grpo import StepKL, loss
from anypo.seams.groups import broadcast, group_mean, group_std, group_sum, has_spread
from anypo.seams.reward import row_reward
from anypo.seams.select import UniformPrompts

if TYPE_CHECKING:
    from anypo.run import Run
    from anypo.task import Prompt

__all__ = ["METHOD", "advantages", "anchored_loss", "directions", "perturb", "radius", "schedule", "spread_loss"]

DIRECTIONS, RADIUS = "e2po.directions", "e2po.radius"  # in run.state: U [K,H], and log rho


def directions(U: Float[Tensor, "K H"]) -> Float[Tensor, "K H"]:
    """Equation 1: the rows of U made orthonormal one after another, each keeping its side (QR with a positive diagonal of R)."""
    q, r = torch.linalg.qr(U.T)
    return (q * torch.where(r.diagonal() < 0, -1.0, 1.0).to(q)).T


def perturb(e: Float[Tensor, "*N H"], Q: Float[Tensor, "K H"], G: int, n_anchor: int, rho: float) -> Float[Tensor, "*N G H"]:
    """Equation 2: rho times the embedding's length along the directions in turn, each forth and back; 0 for the first `n_anchor` members."""
    j = torch.arange(max(G - n_anchor, 0))
    moved = Q[j // 2 % len(Q)] * (1 - 2 * (j % 2))[:, None]
    unit = torch.cat([Q.new_zeros(min(n_anchor, G), Q.shape[1]), moved])
    return rho * e.norm(dim=-1)[..., None, None] * unit


def schedule(s: Float[Tensor, "*T"], s_lo: float, gamma: float) -> Float[Tensor, "*T"]:
    """Equation 3: the share of the perturbation at level s, 1 at pure noise and 0 below s_lo; 1 everywhere for gamma = 0 and s_lo = 0."""
    return ((s - s_lo) / (1 - s_lo)).clamp(0, 1) ** gamma


def advantages(reward: Float[Tensor, " N"], group: Int[Tensor, " N"], anchor: Tensor, mix: float, eps: float = 1e-4) -> Float[Tensor, " N"]:
    """Equation 5: the centre is `mix` times the mean of the anchors plus the rest times that of all, the deviation (ddof 0) that of all.

    0 for groups without spread; a group without anchors is centred by its own mean.
    """
    chosen = anchor.to(reward)
    count, mean = group_sum(chosen, group), group_mean(reward, group)
    anchored = torch.where(count > 0, group_sum(chosen * reward, group) / count.clamp(min=1), mean)
    centred = reward - mix * anchored - (1 - mix) * mean
    return torch.where(has_spread(reward, group), centred / (group_std(reward, group, ddof=0) + eps), torch.zeros_like(reward))


def anchored_loss(
    logp_clean: Float[Tensor, "N T"], old_clean: Float[Tensor, "N T"], mask: Tensor, adv: Float[Tensor, " N"], eps: float
) -> Tensor:
    """Equation 6: Flow-GRPO's clipped surrogate, of log-probabilities under the clean embedding."""
    return loss(logp_clean, old_clean, mask, adv, eps)


def radius(
    stds: Sequence[float] | Tensor, rho0: float, eta: float, sigma_min: float, decay: float, rho_min: float, rho_max: float
) -> Float[Tensor, " M"]:
    """Equation 8: rho after each of the measured standard deviations; it grows while their moving average is below `sigma_min`."""
    values, found, rho = torch.as_tensor(stds, dtype=torch.float64).tolist(), [], rho0
    average = values[0] if values else 0.0
    for value in values:
        average = decay * average + (1 - decay) * value
        rho = min(max(rho * math.exp(eta * (sigma_min - average) / sigma_min), rho_min), rho_max)
        found.append(rho)
    return torch.tensor(found, dtype=torch.float64)


def spread_loss(data: Float[Tensor, "N G D"], e: Float[Tensor, "N H"], delta: Float[Tensor, "N G H"], mu: float, d_max: float) -> Tensor:
    """Equation 7: minus the mean squared distance (per number) of a group's predicted samples, plus mu for cosine distances above `d_max`."""
    size = data.shape[1]
    pairs = torch.triu_indices(size, size, 1)
    distance = ((data[:, pairs[0]] - data[:, pairs[1]]) ** 2).mean(-1)
    drift = 1 - torch.cosine_similarity(e[:, None], e[:, None] + delta, dim=-1)
    return -distance.mean() + mu * (drift - d_max).relu().mean()


@dataclass
class PerturbedRollout:
    """Chains of few noisy steps, the members of a group under perturbed embeddings of their prompt; scored under the clean embedding."""

    steps: int = 10  # denoising steps of a training sample, >= 1
    noise: float = 0.7  # a of the SDE, > 0
    rho: float = 0.2  # length of a perturbation relative to the embedding's at the start, >= 0; 0 = Flow-GRPO
    n_anchor: int = 2  # members of a group that are not perturbed, >= 0
    count: int = 2  # K directions, >= 1 and at most the embedding's length
    s_lo: float = 0.0  # level below which nothing is perturbed, in [0,1)
    gamma: float = 1.0  # >= 0, how fast the perturbation fades with the level; 0 = constant
    own: bool = False  # score every member under its own perturbed embedding instead

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        task: Any = run.task
        if not hasattr(task, "levels"):
            raise ValueError(f"{run.method.name} trains denoising steps, and the task '{task.name}' has none; take one such as ring")
        if not self.noise > 0:
            raise ValueError(f"rollout.noise must be above 0, not {self.noise}: a sampler without noise has no action probabilities")
        return run.collect(prompts, by=self.collect)

    def collect(self, prompts: list[Prompt], run: Run) -> Batch:
        policy: Any = run.policy
        task: Any = run.task
        group = torch.tensor([g for g, p in enumerate(prompts) for _ in range(p.samples)])
        member = torch.tensor([j for p in prompts for j in range(p.samples)])
        prompt_id = torch.tensor([p.id for p in prompts for _ in range(p.samples)])
        clean = task.condition(prompt_id)
        if not isinstance(clean, Tensor):
            raise ValueError(f"{run.method.name} perturbs embeddings, and the prompts of '{task.name}' are none; take a task such as ring")
        steps, start = sde_schedule(task.levels(self.steps), self.noise), torch.randn(len(group), task.size, generator=run.generator)
        delta = self.deltas(clean[:, 0], int(member.max()) + 1, run)[torch.arange(len(member)), member]
        shown = clean + schedule(steps.level[:-1], self.s_lo, self.gamma)[None, :, None].to(clean) * delta[:, None]
        x = sample(policy, start, shown, steps, run.generator)
        batch = as_batch(policy, x, shown if self.own else clean, steps, group, prompt_id)
        batch.signals["anchor"] = member < self.n_anchor
        return batch

    def deltas(self, e: Float[Tensor, "N H"], size: int, run: Run) -> Float[Tensor, "N G H"]:
        """The full-strength perturbations of a group of `size`; the directions are drawn at first use. Raises ValueError for more than H of them."""
        if DIRECTIONS not in run.state:
            if not 1 <= self.count <= e.shape[1]:
                raise ValueError(f"rollout.count must be between 1 and the embedding's length {e.shape[1]}, not {self.count}")
            drawn = torch.randn(self.count, e.shape[1], generator=torch.Generator().manual_seed(run.seed))
            run.state[DIRECTIONS] = directions(drawn)
            run.state[RADIUS] = self.rho
        return perturb(e, directions(run.state[DIRECTIONS].to(e)), size, self.n_anchor, run.state[RADIUS])


@dataclass
class AnchoredGroupRelative:
    """Reward relative to a centre between the anchors' mean and the group's; without anchors the group's mean."""

    mix: float = 0.5  # weight of the anchors in the centre, in [0,1]
    eps: float = 1e-4  # > 0, added to the standard deviation
    weights: tuple[float, ...] | None = None  # of the K rewards; None = all 1

    compares_group = True

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        anchor = batch.signals.get("anchor", torch.ones(len(batch), dtype=torch.bool))
        return broadcast(advantages(row_reward(batch, self.weights), batch.group, anchor, self.mix, self.eps), batch.mask)


@dataclass
class LearnDirections:
    """One step of the directions after every update, of a fixed length along the gradient of equation 7."""

    rate: float = 0.02  # length of a step; the directions have length 1. 0 keeps them
    level: float = 0.9  # noise level at which samples are predicted, in (0,1]
    mu: float = 1.0  # >= 0, weight of the drift limit
    d_max: float = 0.05  # cosine distance from the clean embedding that costs nothing, >= 0

    def __call__(self, batch: Batch, run: Run) -> None:
        rollout: Any = run.method.rollout
        if DIRECTIONS not in run.state or not self.rate:
            return
        index = torch.unique(batch.group, return_inverse=True)[1]
        rows = torch.zeros(int(index.max()) + 1, dtype=torch.int64).scatter_(0, index, torch.arange(len(batch)))  # one row a group
        e = run.task.condition(batch.signal("prompt_id")[rows])[:, 0]  # type: ignore[attr-defined]
        x = (1 - self.level) * batch.action[rows, -1] + self.level * torch.randn(len(rows), batch.action.shape[-1], generator=run.generator)
        with torch.enable_grad():
            U = run.state[DIRECTIONS].clone().requires_grad_()
            members = max(int(torch.bincount(index).max()), 2)
            delta = perturb(e, directions(U), members, rollout.n_anchor, run.state[RADIUS])
            level = torch.full(delta.shape[:2], self.level)
            velocity = run.policy.velocity(x[:, None].expand(-1, members, -1), level, e[:, None] + delta)
            value = spread_loss(predicted_data(x[:, None], velocity, self.level), e, delta, self.mu, self.d_max)
            (slope,) = torch.autograd.grad(value, U)
        norm = float(slope.norm())
        if norm > 0:
            run.state[DIRECTIONS] = directions(U.detach() - self.rate / norm * slope)
        run.log(spread_loss=float(value.detach()))


@dataclass
class RadiusControl:
    """The radius grows while the rewards inside groups are too much alike."""

    eta: float = 0.1  # >= 0; 0 keeps the radius
    floor: float = 0.5  # sigma_min, as a share of the first standard deviation, > 0
    decay: float = 0.9  # of the moving average, in [0,1)
    rho_min: float = 0.01  # > 0
    rho_max: float = 0.5

    def __post_init__(self) -> None:
        self.first, self.average = 0.0, 0.0

    def __call__(self, batch: Batch, run: Run) -> None:
        now = float(group_std(row_reward(batch), batch.group, ddof=0).mean())
        self.first = self.first or now
        self.average = self.decay * (self.average or now) + (1 - self.decay) * now
        rho = run.state.get(RADIUS, 0.0)
        run.log(reward_std=now, rho=rho)
        if rho > 0 and self.first > 0:
            run.state[RADIUS] = float(radius([self.average], rho, self.eta, self.floor * self.first, 0.0, self.rho_min, self.rho_max)[0])

    def state_dict(self) -> dict[str, float]:
        return {"first": self.first, "average": self.average}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.first, self.average = state["first"], state["average"]


METHOD = FLOW_GRPO.but(
    name="e2po",
    paper=Paper("E2PO: Embedding-perturbed Exploration Preference Optimization", "2605.15803", 2026),
    summary="the members of a group are sampled under perturbed embeddings of their prompt and scored under the clean one, so that they stay different",
    task="ring",
    select=UniformPrompts(group_size=8),
    rollout=PerturbedRollout(),
    credit=AnchoredGroupRelative(),
    regularize=(StepKL(beta=0.0),),
    control=(LearnDirections(), RadiusControl()),
)
