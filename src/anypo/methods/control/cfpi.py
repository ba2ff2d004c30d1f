"""CFPI: closed-form policy improvement operators (arXiv:2211.15956).

Offline learning from recorded steps without optimizing a policy. Near the recorded behaviour the critic is linear in the action, and the best action
whose log-density stays above a limit has a closed form: the mean of a Gaussian, shifted along covariance times gradient until the limit binds. For
a Gaussian mixture two surrogates of the density have such solutions, the largest component (LogSumExp's lower bound) and Jensen's inequality; of all
candidates the one with the highest Q is taken. A mixture density network and twin critics are fitted to the recording, and the operator acts.
Equations 2, 3 and 5 follow the paper; the algebra of 4 was derived again; the threshold, the least weight and the pessimistic Q follow its code.
Left out: quantile critics, squashed Gaussians and the IQL critic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.control.mixture import MixtureActorCritic
from anypo.method import Method, Paper
from anypo.methods.control.sac import SoftSteps, TwinCritics
from anypo.seams.replay import Replay
from anypo.seams.reward import TaskReward
from anypo.seams.select import UniformPrompts

if TYPE_CHECKING:
    from anypo.run import Run

Weights = Float[Tensor, "*B K"]
Vectors = Float[Tensor, "*B K d"]
Matrices = Float[Tensor, "*B K d d"]
LOG_TWO_PI = 1.8378770664093453


class Components(NamedTuple):
    mu: Vectors  # shifted means
    kappa: Weights  # length of the shift in standard deviations
    usable: Bool[Tensor, "*B K"]  # whether any action of the component meets the limit


class Pooled(NamedTuple):
    center: Float[Tensor, "*B d"]
    cov: Float[Tensor, "*B d d"]
    kappa: Float[Tensor, "*B"]
    mu: Float[Tensor, "*B d"]
    usable: Bool[Tensor, "*B"]  # whether any action meets the limit


def _log_det(cov: Float[Tensor, "*B d d"]) -> Float[Tensor, "*B"]:
    """log det(2 pi S)."""
    return torch.logdet(cov) + cov.shape[-1] * LOG_TWO_PI


def _shifted(mean: Float[Tensor, "*B d"], cov: Float[Tensor, "*B d d"], gradient: Float[Tensor, "*B d"], kappa: Tensor) -> Tensor:
    """mean + kappa S g / sqrt(g' S g): the maximizer of g . a within kappa standard deviations; the mean where g is 0."""
    direction = (cov @ gradient.unsqueeze(-1)).squeeze(-1)
    squared = (gradient * direction).sum(-1, keepdim=True)
    unit = torch.where(squared > 0, direction / squared.clamp(min=torch.finfo(squared.dtype).tiny).sqrt(), torch.zeros_like(direction))
    return mean + kappa.unsqueeze(-1) * unit


def single(mean: Float[Tensor, "*B d"], cov: Float[Tensor, "*B d d"], gradient: Float[Tensor, "*B d"], log_tau: float = 0.5) -> Tensor:
    """Equation 2: the best action whose density is at least 1 / tau of the peak's; `log_tau` >= 0."""
    return _shifted(mean, cov, gradient, torch.full_like(mean[..., 0], (2 * log_tau) ** 0.5))


def delta(weights: Weights, covs: Matrices, log_tau: float = 0.5) -> Float[Tensor, "*B"]:
    """Equation 6: the limit of the negative log-density, log tau above that of the highest weighted peak. Weights of 0 have no part in it."""
    return (_log_det(covs) / 2 - weights.log()).amin(-1) + log_tau


def lse_components(weights: Weights, means: Vectors, covs: Matrices, gradients: Vectors, delta: Float[Tensor, "*B"] | float) -> Components:
    """Equation 3: every component's own solution, with the gradient of Q at its own mean; those that are not usable stay at their means."""
    limit = torch.as_tensor(delta, dtype=means.dtype).unsqueeze(-1)
    radicand = 2 * (limit - (_log_det(covs) / 2 - weights.log()))  # in this order it is exactly 0 for the highest peak when tau is 1
    kappa = radicand.clamp(min=0).sqrt()
    return Components(_shifted(means, covs, gradients, kappa), kappa, radicand >= 0)


def jensen_center(weights: Weights, means: Vectors, covs: Matrices) -> tuple[Float[Tensor, "*B d"], Float[Tensor, "*B d d"]]:
    """Equation 4: center and covariance of the Gaussian-shaped constraint, by precisions."""
    precision = weights[..., None, None] * torch.linalg.inv(covs)
    cov = torch.linalg.inv(precision.sum(-3))
    return (cov @ (precision @ means.unsqueeze(-1)).sum(-3)).squeeze(-1), cov


def jensen(weights: Weights, means: Vectors, covs: Matrices, gradient: Float[Tensor, "*B d"], delta: Float[Tensor, "*B"] | float) -> Pooled:
    """Equation 4: the solution under Jensen's bound of the log-density; `gradient` is that of Q at `jensen_center`."""
    center, cov = jensen_center(weights, means, covs)
    away = means - center.unsqueeze(-2)  # w m' S^-1 m less center' Sb^-1 center, without their cancellation
    spread = (weights * (away.unsqueeze(-2) @ torch.linalg.solve(covs, away.unsqueeze(-1)))[..., 0, 0]).sum(-1)
    limit = torch.as_tensor(delta, dtype=means.dtype)
    radicand = 2 * limit - (weights * _log_det(covs)).sum(-1) - spread
    kappa = radicand.clamp(min=0).sqrt()
    return Pooled(center, cov, kappa, _shifted(center, cov, gradient, kappa), radicand >= 0)


def choose(candidates: Float[Tensor, "*B C d"], q: Float[Tensor, "*B C"], usable: Tensor) -> Tensor:
    """Equation 5: index [*B] of the usable candidate with the highest Q; 0 where none is usable."""
    return torch.where(usable.bool(), q, torch.full_like(q, float("-inf"))).argmax(-1)


def mixture_logpdf(weights: Weights, means: Vectors, covs: Matrices, action: Float[Tensor, "*B d"]) -> Float[Tensor, "*B"]:
    """Log-density [*B] of a Gaussian mixture."""
    away = action.unsqueeze(-2) - means
    squared = (away.unsqueeze(-2) @ torch.linalg.solve(covs, away.unsqueeze(-1)))[..., 0, 0]
    return (weights.log() - 0.5 * (_log_det(covs) + squared)).logsumexp(-1)


def lower_bound(q: Tensor, pessimism: float) -> Float[Tensor, "*B"]:
    """Mean minus `pessimism` standard deviations over an ensemble [E,*B]; 1 makes it the smaller of twins."""
    return q.mean(0) - pessimism * (q.var(0, correction=0) + 1e-12).sqrt()


Judge = Callable[[Tensor], tuple[Tensor, Tensor]]  # actions [*B,C,d] -> Q [*B,C] and its gradients [*B,C,d]


def improved(weights: Weights, means: Vectors, covs: Matrices, judge: Judge, log_tau: float = 0.5, least_weight: float = 0.03) -> Tensor:
    """The combined operator in the box [-1,1]: [*B,d]. Components below `least_weight` are never chosen and set no limit (the heaviest always may
    be). With `log_tau` >= 0 the highest peak is always usable. Raises ValueError for a negative `log_tau`."""
    if log_tau < 0:
        raise ValueError(f"log_tau must be at least 0, not {log_tau}")
    enough = weights >= weights.amax(-1, keepdim=True).clamp(max=least_weight)
    heavy = torch.where(enough, weights, torch.zeros_like(weights))
    limit = delta(heavy, covs, log_tau)
    components = lse_components(heavy, means, covs, judge(means)[1], limit)
    center, _ = jensen_center(weights, means, covs)
    pooled = jensen(weights, means, covs, judge(center.unsqueeze(-2))[1].squeeze(-2), limit)
    candidates = torch.cat([components.mu, pooled.mu.unsqueeze(-2)], dim=-2).clamp(-1, 1)
    usable = torch.cat([components.usable, pooled.usable.unsqueeze(-1)], dim=-1)
    index = choose(candidates, judge(candidates)[0], usable)
    return candidates.gather(-2, index[..., None, None].expand(*index.shape, 1, means.shape[-1])).squeeze(-2)


class ClosedFormPolicy(MixtureActorCritic):
    """The mixture and its critics; the likeliest action is the operator's. With noise it acts as the recording did."""

    log_tau: Tensor
    least_weight: Tensor
    pessimism: Tensor

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for name, value in (("log_tau", 0.5), ("least_weight", 0.03), ("pessimism", 1.0)):
            self.register_buffer(name, torch.tensor(value))  # saved with the weights; `Operator` sets them

    def judge(self, observation: Float[Tensor, "B O"], action: Float[Tensor, "B C D"]) -> tuple[Tensor, Tensor]:
        """The pessimistic Q [B,C] of actions at normalized observations, and its gradients [B,C,D]."""
        with torch.enable_grad():
            leaf = action.detach().requires_grad_()
            rows = torch.cat([observation.unsqueeze(1).expand(-1, action.shape[1], -1), leaf], dim=-1).flatten(0, 1)
            q = lower_bound(self.critic(rows, frozen=True), float(self.pessimism)).view(action.shape[:2])
            (gradient,) = torch.autograd.grad(q.sum(), leaf)
        return q.detach(), gradient

    @torch.no_grad()
    def likeliest(self, observation: Float[Tensor, "B O"]) -> Float[Tensor, "B D"]:
        found = self.mixture(observation)
        covs = torch.diag_embed((2 * found.log_std).exp())
        weights, tau, least = found.log_weights.exp(), float(self.log_tau), float(self.least_weight)
        return improved(weights, found.means, covs, lambda action: self.judge(observation, action), tau, least)


@dataclass
class Operator:
    """Before the first step: tells the policy how far it may leave the recorded behaviour."""

    log_tau: float = 0.5  # >= 0; 0.1 to 2 in the paper; 0 = no step away from a Gaussian's mean
    least_weight: float = 0.03  # of a component that may be chosen, in [0,1]
    pessimism: float = 1.0  # standard deviations over the critics that are taken off Q, >= 0

    needs = frozenset({"mixture_logp"})

    def __call__(self, run: Run) -> None:
        if self.log_tau < 0:
            raise ValueError(f"prepare.1.log_tau must be at least 0, not {self.log_tau}")
        for name in ("log_tau", "least_weight", "pessimism"):
            getattr(run.policy, name).fill_(getattr(self, name))


@dataclass
class FitMixture:
    """Before the first step: fits the mixture to the recorded actions by maximum likelihood."""

    steps: int = 10_000  # minibatches, >= 1
    batch_size: int = 256  # actions, >= 1
    learning_rate: float = 1e-3  # Adam, > 0

    needs = frozenset({"mixture_logp"})

    def __call__(self, run: Run) -> None:
        replay: Any = run.method.rollout
        replay.is_fixed(run)
        if replay.buffer is None:
            raise ValueError("cfpi learns from recorded steps: name a file with the option data (benchmarks/make_offline.py writes one)")
        policy, rows = run.policy, replay.buffer.take(torch.arange(len(replay.buffer)))
        observation, action = policy.normalize(rows["context"]), rows["action"]
        optimizer = torch.optim.Adam(policy.behaviour.parameters(), self.learning_rate, fused=True)
        for _ in range(self.steps):
            chosen = torch.randint(len(action), (self.batch_size,), generator=run.generator)
            optimizer.zero_grad()
            (-policy.mixture(observation[chosen]).logp(action[chosen]).mean()).backward()
            optimizer.step()


@dataclass
class RecordedPairs(Replay):
    """Recorded steps in their order, each with the action that followed; steps whose following action was not recorded are left out."""

    extra: tuple[str, ...] = ("next_action",)

    def remember(self, batch: Batch) -> None:
        assert batch.terminated is not None
        follows = torch.zeros(len(batch), dtype=torch.bool)
        follows[:-1] = (batch.signal("next_context")[:-1, 0] == batch.context[1:, 0]).flatten(1).all(1)
        batch.signals["next_action"] = batch.action.roll(-1, 0)
        batch.keep = batch.mask & (follows[:, None] | batch.terminated)
        super().remember(batch)


@dataclass
class RecordedTarget:
    """The critics' target: r + gamma (1 - d) times the mean of the target critics at the action that followed (SARSA), or, when `iterative`, at the
    operator's action."""

    gamma: float = 0.99  # discount, in [0,1)
    iterative: bool = False  # evaluate the operator instead of the recorded behaviour

    needs = frozenset({"next_q"})

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        assert batch.reward is not None and batch.terminated is not None
        if self.iterative:
            following = run.policy.normalize(batch.signal("next_context"))
            batch.signals["next_action"] = run.policy.likeliest(following.flatten(0, 1)).view(batch.action.shape)
        next_q = run.score(batch, self.needs).next_q.mean(-1)
        return batch.reward + self.gamma * (1 - batch.terminated.to(next_q.dtype)) * next_q


METHOD = Method(
    name="cfpi",
    paper=Paper("Offline Reinforcement Learning with Closed-Form Policy Improvement Operators", "2211.15956", 2022),
    domain="control",
    summary="no policy optimization: a mixture of the recorded actions is shifted along the critic's gradient in closed form",
    prepare=(FitMixture(), Operator()),
    select=UniformPrompts(group_size=1),
    rollout=RecordedPairs(),
    reward=TaskReward(),
    credit=RecordedTarget(),
    objective=TwinCritics(),
    update=SoftSteps(),
    loop="off_policy",
    task="Pendulum-v1",
)
VARIANTS = {
    "iterative": METHOD.but(
        name="cfpi.iterative",
        summary="the critics evaluate the operator's actions, not the recorded ones",
        credit=RecordedTarget(iterative=True),
    )
}
