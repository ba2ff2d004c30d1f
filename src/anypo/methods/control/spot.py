"""SPOT: supported policy optimization with VAE density (arXiv:2202.06239).

Offline learning from recorded steps: the policy's actions have to stay where the behaviour policy has density. The density is estimated once by a
conditional variational autoencoder; minus its logarithm at the policy's action is a penalty on top of an off-policy learner, here TD3 (twin critics,
smoothed targets, a delayed deterministic actor). Recorded steps come from the task's option `data`; `FINE_TUNING` goes on in the environment with
a cooled penalty. Density and losses follow the paper and its code. The critic and actor losses are one sum with one optimizer step, as in SAC. [ours]
Left out: dropout in the actor.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from anypo.batch import Batch
from anypo.domains.control.policy import HALF_LOG_TWO_PI, Network
from anypo.method import Method, Paper
from anypo.methods.control.sac import TwinCritics
from anypo.policy import Loss, Signals
from anypo.seams.replay import Replay
from anypo.seams.reward import TaskReward
from anypo.seams.select import UniformPrompts
from anypo.seams.update import GradientSteps

if TYPE_CHECKING:
    from anypo.run import MethodLoss, Run

PerRow = Float[Tensor, " B"]
Latent = Float[Tensor, "B Z"]
LOG_STD_BOUNDS = (-4.0, 15.0)  # of the encoder


def _divergence(mean: Latent, log_std: Latent) -> Latent:
    """KL of the encoder's Gaussian from the standard normal, by dimension."""
    return -0.5 * (1 + 2 * log_std - mean**2 - (2 * log_std).exp())


def _decoder_logp(decoded: Float[Tensor, "B L D"], action: Float[Tensor, "B D"], beta: float) -> Float[Tensor, "B L"]:
    """Log-density of the actions under the decoder's Gaussian with variance beta / 4."""
    variance = beta / 4
    return -(0.5 * (action[:, None] - decoded) ** 2 / variance + 0.5 * math.log(variance) + HALF_LOG_TWO_PI).sum(-1)


def elbo(mean: Latent, log_std: Latent, decoded: Float[Tensor, "B L D"], action: Float[Tensor, "B D"], beta: float = 0.5) -> PerRow:
    """Equation 3: a lower bound of log pi_beta(a|s) from L decoded samples."""
    return _decoder_logp(decoded, action, beta).mean(1) - _divergence(mean, log_std).sum(1)


def importance_loglik(
    mean: Latent,
    log_std: Latent,
    eps: Float[Tensor, "B L Z"],
    decoded: Float[Tensor, "B L D"],
    action: Float[Tensor, "B D"],
    beta: float = 0.5,
) -> PerRow:
    """Equation 4: the importance-weighted bound; `decoded` belongs to the samples mean + std * eps."""
    z = mean[:, None] + log_std.exp()[:, None] * eps
    prior = -(0.5 * z**2 + HALF_LOG_TWO_PI).sum(-1)
    encoder = -(0.5 * eps**2 + log_std[:, None] + HALF_LOG_TWO_PI).sum(-1)
    weights = _decoder_logp(decoded, action, beta) + prior - encoder
    return weights.logsumexp(1) - math.log(eps.shape[1])


def vae_loss(mean: Latent, log_std: Latent, decoded: Float[Tensor, "B D"], action: Float[Tensor, "B D"], beta: float = 0.5) -> PerRow:
    """Equation 2: squared error (mean over dimensions) plus beta times the mean divergence."""
    return ((decoded - action) ** 2).mean(1) + beta * _divergence(mean, log_std).mean(1)


def actor_loss(q: PerRow, neg_log_density: PerRow, lam: float, normalize: bool = True) -> Tensor:
    """Equation 5: minus the mean Q, in units of its mean size, plus lambda times minus the mean log-density."""
    scale = q.detach().abs().mean().clamp(min=1e-6) if normalize else 1.0
    return -q.mean() / scale + lam * neg_log_density.mean()


def lambda_schedule(lam: float, lam_end: float, cool_steps: float, steps: Sequence[float] | Tensor) -> list[float]:
    """Equation 7: lambda falls linearly with the online steps, to the share `lam_end` of itself."""
    return [lam * max(lam_end, 1 - float(t) / cool_steps) for t in steps]


def td3_target(reward: PerRow, terminated: Tensor, next_q: Float[Tensor, "2 B"], gamma: float = 0.99) -> PerRow:
    """Equation 6: r + gamma (1 - d) min of the target critics, without a gradient."""
    return (reward + gamma * (1 - terminated.to(reward.dtype)) * next_q.min(dim=0).values).detach()


class ActionDensity(nn.Module):
    """A conditional variational autoencoder of actions in [-1,1] given observations; the latent has twice the action's dimensions."""

    def __init__(self, observation_size: int, action_size: int, hidden: int, beta: float) -> None:
        super().__init__()
        self.beta, self.latent = beta, 2 * action_size
        self.encoder = Network((observation_size + action_size, hidden, hidden, 2 * self.latent), scale=0.1, activation="relu")
        self.decoder = Network((observation_size + self.latent, hidden, hidden, action_size), scale=0.1, activation="relu")

    def encode(self, observation: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.encoder(torch.cat([observation, action], dim=-1)).chunk(2, dim=-1)
        return mean, log_std.clamp(*LOG_STD_BOUNDS)

    def decode(self, observation: Float[Tensor, "B O"], z: Float[Tensor, "B L Z"]) -> Float[Tensor, "B L D"]:
        return torch.tanh(self.decoder(torch.cat([observation[:, None].expand(-1, z.shape[1], -1), z], dim=-1)))

    def loss(self, observation: Tensor, action: Tensor, noise: Latent) -> PerRow:
        """The training loss, which is minus the one-sample bound in other units; also the penalty's "minus log-density"."""
        mean, log_std = self.encode(observation, action)
        decoded = self.decode(observation, (mean + log_std.exp() * noise)[:, None])[:, 0]
        return vae_loss(mean, log_std, decoded, action, self.beta)

    def log_density(self, observation: Tensor, action: Tensor, noise: Float[Tensor, "B L Z"], importance: bool = True) -> PerRow:
        """Equation 4, or 3 without `importance`, from L samples."""
        mean, log_std = self.encode(observation, action)
        decoded = self.decode(observation, mean[:, None] + log_std.exp()[:, None] * noise)
        if importance:
            return importance_loglik(mean, log_std, noise, decoded, action, self.beta)
        return elbo(mean, log_std, decoded, action, self.beta)


def density_of(run: Run) -> ActionDensity:
    """The run's density with the weights kept in `run.state`, frozen. Raises ValueError before `FitDensity` has run."""
    kept = run.state.get("spot.density")
    if kept is None:
        raise ValueError("the support penalty needs the density of the recorded actions; put FitDensity into `prepare`")
    density = ActionDensity(**kept["sizes"])
    density.load_state_dict(kept["weights"])
    return density.requires_grad_(False).eval()


@dataclass
class FitDensity:
    """Before the first step: fits the density to the recorded actions."""

    beta: float = 0.5  # weight of the divergence, > 0; the decoder's variance is a quarter of it
    steps: int = 10_000  # minibatches, >= 1; the paper takes 100,000
    batch_size: int = 256  # actions, >= 1
    hidden: int = 64  # units of each layer, >= 1; the paper takes 750
    learning_rate: float = 1e-3  # Adam, > 0

    def __call__(self, run: Run) -> None:
        if "spot.density" in run.state:  # of an earlier stage or run
            return
        replay: Any = run.method.rollout
        replay.is_fixed(run)
        if replay.buffer is None:
            raise ValueError("spot learns from recorded steps: name a file with the option data (benchmarks/make_offline.py writes one)")
        rows = replay.buffer.take(torch.arange(len(replay.buffer)))
        with torch.no_grad():
            observation, action = run.policy.normalize(rows["context"]), rows["action"]  # type: ignore[operator]
        sizes: dict[str, Any] = {
            "observation_size": observation.shape[1],
            "action_size": action.shape[1],
            "hidden": self.hidden,
            "beta": self.beta,
        }
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(run.seed)
            density = ActionDensity(**sizes)
        optimizer = torch.optim.Adam(density.parameters(), self.learning_rate, fused=True)
        for _ in range(self.steps):
            chosen = torch.randint(len(action), (self.batch_size,), generator=run.generator)
            noise = torch.randn(self.batch_size, density.latent, generator=run.generator)
            optimizer.zero_grad()
            density.loss(observation[chosen], action[chosen], noise).mean().backward()
            optimizer.step()
        run.state["spot.density"] = {"sizes": sizes, "weights": dict(density.state_dict())}


@dataclass
class SmoothedTarget:
    """The critics' target at the target actor's action plus clipped noise (equation 6)."""

    gamma: float = 0.99  # discount, in [0,1)
    noise: float = 0.2  # standard deviation, in units of [-1,1]
    noise_limit: float = 0.5  # largest noise

    needs = frozenset({"next_q"})

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        assert batch.reward is not None and batch.terminated is not None
        noise = self.noise * torch.randn(batch.action.shape, generator=run.generator)
        batch.signals["next_noise"] = noise.clamp(-self.noise_limit, self.noise_limit)
        next_q = run.score(batch, self.needs).next_q.flatten(0, 1).T
        return td3_target(batch.reward.flatten(), batch.terminated.flatten(), next_q, self.gamma).view(batch.mask.shape)


@dataclass
class SupportedActor:
    """The actor's loss: Q in units of its size, minus lambda times the log-density of the actor's action under the behaviour policy (equation 5)."""

    lam: float = 0.2  # weight of the support, >= 0; the paper takes 0.05 to 1. 0 = TD3
    normalize: bool = True  # Q in units of its mean size
    samples: int = 0  # L of the importance-weighted density, >= 1; 0 = the training loss in its place, as in the authors' code
    lam_end: float = 0.2  # share of lambda that is left in the end, in [0,1]
    cool_steps: int | None = None  # online steps until lambda would be 0, >= 1; None = no cooling
    density: ActionDensity | None = field(default=None, init=False, repr=False)  # built from the weights in the run's state

    needs = frozenset({"q_actor", "action_new", "observation"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        lam = lambda_schedule(self.lam, self.lam_end, self.cool_steps, [run.actions])[0] if self.cool_steps else self.lam
        penalty = self.minus_log_density(new, run) if lam else torch.zeros_like(new.q_actor.flatten())
        loss = actor_loss(new.q_actor.flatten(), penalty, lam, self.normalize)
        return Loss(loss, {"actor_loss": float(loss.detach()), "support_penalty": float(penalty.detach().mean()), "lambda": lam})

    def minus_log_density(self, new: Signals, run: Run) -> PerRow:
        if self.density is None:
            self.density = density_of(run)
        observation, action = new.observation.flatten(0, 1), new.action_new.flatten(0, 1)
        noise = torch.randn(len(action), max(self.samples, 1), self.density.latent, generator=run.generator)
        if self.samples:
            return -self.density.log_density(observation, action, noise)
        return self.density.loss(observation, action, noise[:, 0])


@dataclass
class DelayedActorSteps(GradientSteps):
    """An optimizer step on the critics for every minibatch; the actor joins, and the targets follow, at every `delay`-th."""

    learning_rate: float | None = 3e-4
    optimizer: str | None = "adam"
    max_grad_norm: float | None = None
    tau: float = 0.005  # share of the networks in their targets, in (0,1]
    delay: int = 2  # critic steps for each step of the actor, >= 1

    def __call__(self, batch: Batch, loss_fn: MethodLoss, run: Run) -> dict[str, float]:
        with_actor = run.version % self.delay == 0
        if not with_actor:
            loss_fn = copy.copy(loss_fn)
            loss_fn.parts = tuple(p for p in loss_fn.parts if "q_actor" not in getattr(p, "needs", ()))
            loss_fn.needs = frozenset(n for p in loss_fn.parts for n in getattr(p, "needs", ()))
        metrics = self.one_step(batch, loss_fn, run.optimizer(self.build), run)
        if with_actor:
            run.policy.move_targets(self.tau)  # type: ignore[operator]
        return metrics


@dataclass
class ContinuedReplay(Replay):
    """Replay that begins with the task's recorded steps and goes on with steps of its own."""

    def is_fixed(self, run: Run) -> bool:
        if self.buffer is None:
            super().is_fixed(run)
        return False


METHOD = Method(
    name="spot",
    paper=Paper("Supported Policy Optimization for Offline Reinforcement Learning", "2202.06239", 2022),
    domain="control",
    summary="offline TD3 whose actor is kept where a VAE of the recorded actions has density",
    prepare=(FitDensity(),),
    select=UniformPrompts(group_size=1),
    rollout=Replay(),
    reward=TaskReward(),
    credit=SmoothedTarget(),
    objective=SupportedActor(),
    regularize=(TwinCritics(),),
    update=DelayedActorSteps(),
    loop="off_policy",
    task="Pendulum-v1",
)
FINE_TUNING = METHOD.but(
    name="spot.online", summary="goes on in the environment after the recording, with ever less weight on its support",
    rollout=ContinuedReplay(), objective=SupportedActor(cool_steps=1_000_000),
)  # fmt: skip
VARIANTS = {"online": FINE_TUNING}
