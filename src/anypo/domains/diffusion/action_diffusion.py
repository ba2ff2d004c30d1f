"""A diffusion policy for environments: an action is the end of a chain of Gaussian denoising steps (arXiv:2303.04137), of which the last ones can be
fine-tuned by policy gradients (arXiv:2409.00588).

`chain` actions: what is stored of a decision is [a^K', ..., a^0], the K' fine-tuned steps, so that every one of them can be scored again.
`inner_actions` makes of a batch of decisions the batch of their denoising steps. The steps before are taken by the frozen copy of the pretrained
network. Left out: short DDIM chains, learned noise, images.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.control.envs import Spaces
from anypo.domains.control.perceptron import Moments, Network
from anypo.domains.control.policy import HALF_LOG_TWO_PI, EnvironmentPolicy
from anypo.domains.diffusion.action_network import ActionNetwork, finite_range
from anypo.policy import Signals

LOGP_BOUNDS = (-5.0, 2.0)  # of a single number's log-density
EVALUATION_STREAM = 20240901  # seed of the noise of actions that are to be drawn without one


class DiffusionSchedule(NamedTuple):
    """Entry k-1 belongs to denoising step k = 1..K, step K being the noisiest."""

    beta: Float[Tensor, " K"]
    abar: Float[Tensor, " K"]  # share of the variance that is the action's
    std: Float[Tensor, " K"]  # of the posterior; 0 for the last step


class Posterior(NamedTuple):
    x0: Tensor  # the clean action that the predicted noise points to, in [-1,1]
    mu: Tensor  # mean of the step


def schedule(K: int) -> DiffusionSchedule:
    """Equation 1: the cosine schedule of K steps, in double precision. Raises ValueError for less than one step."""
    if K < 1:
        raise ValueError(f"a diffusion needs at least 1 denoising step, not {K}")
    f = torch.cos((torch.arange(K + 1, dtype=torch.float64) / K + 0.008) / 1.008 * torch.pi / 2) ** 2
    beta = (1 - f[1:] / f[:-1]).clamp(max=0.999)
    abar = (1 - beta).cumprod(0)
    before = torch.cat([abar.new_ones(1), abar[:-1]])
    return DiffusionSchedule(beta, abar, (beta * (1 - before) / (1 - abar)).sqrt())


def mean(a_k: Tensor, eps_pred: Tensor, abar_k: float | Tensor, abar_prev: float | Tensor, beta_k: float | Tensor) -> Posterior:
    """Equation 2: mean of step k from the noisier action and the predicted noise, [...,D] each; the coefficients broadcast against them."""
    x0 = ((a_k - (1 - abar_k) ** 0.5 * eps_pred) / abar_k**0.5).clamp(-1, 1)
    mu = beta_k * abar_prev**0.5 / (1 - abar_k) * x0 + (1 - abar_prev) * (1 - beta_k) ** 0.5 / (1 - abar_k) * a_k
    return Posterior(x0, mu)


def logp(
    a_prev: Float[Tensor, "... D"], mu: Float[Tensor, "... D"], std: float | Tensor, s_prob: float, lo: float = -5.0, hi: float = 2.0
) -> Float[Tensor, ...]:
    """Equations 3 and 4: mean over D of the Gaussian log-density with deviation max(std, s_prob), each number's kept in [lo, hi]."""
    deviation = torch.as_tensor(std, dtype=mu.dtype).clamp(min=s_prob)
    return (-0.5 * ((a_prev - mu) / deviation) ** 2 - deviation.log() - HALF_LOG_TWO_PI).clamp(lo, hi).mean(-1)


class DiffusionActionPolicy(EnvironmentPolicy):
    """Stored actions are chains [N,T,(K'+1)*D]. `evaluate` provides for a batch of decisions [N,T] `logp` (the sum over a chain's steps),
    [N,T,K'+1,D] `denoising_chain` and [N,T] `value` of a critic that sees the observation alone; for the batch of their denoising steps that
    `inner_actions` makes, the `logp` of each step and the same `value`.

    Acting without noise is the plain sampler (no floor under its deviations, none in the last step), from a random stream that is always the same.
    """

    learning_rate = 3e-4
    optimizer = "adam"
    provides = frozenset({"logp", "denoising_chain", "value"})

    def __init__(
        self, spaces: Spaces, *, hidden: tuple[int, ...] = (64, 64), normalize_observations: bool = True, denoising_steps: int = 20,
        fine_tuned_steps: int = 10, exploration_noise: float = 0.1, likelihood_noise: float = 0.1, seed: int = 0,
    ) -> None:  # fmt: skip
        """`denoising_steps`: K. `fine_tuned_steps`: K', the last ones. `exploration_noise`, `likelihood_noise` > 0: the smallest standard deviation
        of a step in sampling and in its likelihood (actions lie in [-1,1]). Weights depend on `seed` alone.

        Raises ValueError for spaces without continuous, bounded actions and for numbers out of range.
        """
        super().__init__()
        if not 1 <= fine_tuned_steps <= denoising_steps:
            raise ValueError(f"fine_tuned_steps is between 1 and denoising_steps ({denoising_steps}), not {fine_tuned_steps}")
        if min(exploration_noise, likelihood_noise) <= 0:
            raise ValueError("exploration_noise and likelihood_noise must be above 0: the last step of a diffusion has no noise of its own")
        self.centre, self.reach = finite_range(spaces)
        self.spaces, self.hidden_sizes = spaces, tuple(hidden)
        self.denoising_steps, self.fine_tuned_steps = denoising_steps, fine_tuned_steps
        self.exploration_noise, self.likelihood_noise = exploration_noise, likelihood_noise
        self.schedule = schedule(denoising_steps)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.actor_network = ActionNetwork(spaces.action_size, spaces.observation_size, self.hidden_sizes)
            self.critic_network = Network((spaces.observation_size, *hidden, 1), scale=1.0)
            self.pretrained_network = ActionNetwork(spaces.action_size, spaces.observation_size, self.hidden_sizes).requires_grad_(False)
        self.pretrained_network.load_state_dict(self.actor_network.state_dict())
        self.moments = Moments(spaces.observation_size) if normalize_observations else None
        self.register_buffer("pretrained", torch.zeros((), dtype=torch.bool))

    @property
    def configuration(self) -> dict[str, Any]:
        names = ("denoising_steps", "fine_tuned_steps", "exploration_noise", "likelihood_noise")
        return {"hidden": list(self.hidden_sizes), "normalize_observations": self.moments is not None} | {
            n: getattr(self, n) for n in names
        }

    def parameter_groups(self) -> list[dict[str, Any]]:
        return [
            {"params": list(self.actor_network.parameters()), "role": "policy"},
            {"params": list(self.critic_network.parameters()), "role": "value"},
        ]

    def end_collection(self, observations: NDArray) -> None:
        """A pretrained network keeps seeing observations in the scale of its demonstrations."""
        if not self.pretrained:
            super().end_collection(observations)

    # -- cloning ---------------------------------------------------------------------------------------------------------------------------

    def clone(
        self, observation: Float[Tensor, "M O"], action: Float[Tensor, "M D"], generator: torch.Generator, *, steps: int, batch_size: int = 256,
        learning_rate: float = 3e-3,
    ) -> float:  # fmt: skip
        """Imitate actions in [-1,1] by noise prediction (Adam, a rate that falls to 0 along a cosine) and freeze a copy; returns the mean squared error
        over the last tenth of the steps."""
        if self.moments is not None:
            self.moments.note(observation.numpy())
            self.moments.absorb()
        seen, losses = self.normalize(observation), []
        optimizer = torch.optim.Adam(self.actor_network.parameters(), learning_rate, fused=True)
        falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        abar = self.schedule.abar.to(action.dtype)
        for _ in range(steps):
            rows = torch.randint(len(action), (batch_size,), generator=generator)
            k = torch.randint(self.denoising_steps, (batch_size,), generator=generator)
            noise = torch.randn(batch_size, action.shape[1], generator=generator)
            noisy = abar[k, None].sqrt() * action[rows] + (1 - abar[k, None]).sqrt() * noise
            loss = ((self.actor_network.predict(noisy, self._level(k + 1), seen[rows]) - noise) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            falling.step()
            losses.append(float(loss.detach()))
        self.pretrained_network.load_state_dict(self.actor_network.state_dict())
        self.pretrained.fill_(True)  # type: ignore[operator]
        tail = losses[-max(1, steps // 10) :]
        return sum(tail) / len(tail)

    def _level(self, k: Tensor) -> Tensor:
        """Denoising steps 1..K as levels in (0,1]."""
        return k.to(torch.float32) / self.denoising_steps

    # -- signals ---------------------------------------------------------------------------------------------------------------------------

    def evaluate(self, batch: Batch, needs: Set[str]) -> Signals:
        signals = Signals()
        observation = self.normalize(batch.context)
        if "logp" in needs:
            if "denoising_step" in batch.signals:
                found = logp(batch.action, *self._step(batch, observation), self.likelihood_noise, *LOGP_BOUNDS)
                signals["logp"] = found * batch.mask
            else:
                inner = inner_actions(batch, self.fine_tuned_steps)
                signals["logp"] = self.evaluate(inner, {"logp"}).logp.unflatten(1, (batch.horizon, -1)).sum(-1)
        if "denoising_chain" in needs:
            signals["denoising_chain"] = batch.action.unflatten(-1, (self.fine_tuned_steps + 1, -1))
        if "value" in needs:
            signals["value"] = self.critic_network(observation).squeeze(-1)
        return signals

    def step_distribution(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Mean [N,T*K',D] and standard deviation [N,T*K',1], without a floor, of the denoising steps that `inner_actions` made."""
        return self._step(batch, self.normalize(batch.context))

    def _step(self, batch: Batch, observation: Tensor) -> tuple[Tensor, Tensor]:
        k, noisy = batch.signal("denoising_step"), batch.signal("noisy_action")
        predicted = self.actor_network.predict(noisy, self._level(k), observation)
        beta, abar, before, std = (x.to(noisy.dtype)[k - 1, None] for x in self._tables())
        return mean(noisy, predicted, abar, before, beta).mu, std

    def _tables(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """beta, abar, the abar of the less noisy neighbour, and std, [K] each."""
        beta, abar, std = self.schedule
        return beta, abar, torch.cat([abar.new_ones(1), abar[:-1]]), std

    def values(self, observation: Tensor) -> Tensor:
        """The critic at raw observations [...,O] -> [...]."""
        return self.critic_network(self.normalize(observation)).squeeze(-1)

    # -- acting ----------------------------------------------------------------------------------------------------------------------------

    def noise(self, rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """The first point of each chain and the noise of its K steps."""
        return rng.standard_normal((*shape, (self.denoising_steps + 1) * self.spaces.action_size), dtype=np.float32)

    def actor(self) -> Callable[[NDArray, NDArray | None], NDArray]:
        normalize, count, kept, size = self._normalizer(), self.denoising_steps, self.fine_tuned_steps, self.spaces.action_size
        levels = self._level(torch.arange(1, count + 1))
        networks = [network.at_levels(levels) for network in (self.actor_network, self.pretrained_network)]
        beta, abar, before, std = (x.numpy().astype(np.float32) for x in self._tables())
        explored = np.maximum(std, np.float32(self.exploration_noise))
        by_x0, by_noisy = beta * np.sqrt(before) / (1 - abar), (1 - before) * np.sqrt(1 - beta) / (1 - abar)
        own_stream = np.random.default_rng(EVALUATION_STREAM)

        def act(observation: NDArray, noise: NDArray | None) -> NDArray:
            deviation = std if noise is None else explored
            drawn = (self.noise(own_stream, (len(observation),)) if noise is None else noise).reshape(len(observation), count + 1, size)
            seen = normalize(observation)
            tuned, frozen = (network(seen) for network in networks)
            x, chain = drawn[:, 0], []
            for k in range(count, 0, -1):
                if k <= kept:
                    chain.append(x)
                i = k - 1
                predicted = (tuned if k <= kept else frozen)(i, x)
                x0 = ((x - np.sqrt(1 - abar[i]) * predicted) / np.sqrt(abar[i])).clip(-1, 1)
                x = by_x0[i] * x0 + by_noisy[i] * x + deviation[i] * drawn[:, count + 1 - k]
            return np.concatenate([*chain, x], axis=1)

        return act

    def for_environment(self, action: NDArray) -> NDArray:
        """The end of each chain (or an action without one), clipped and scaled to the bounds."""
        return self.centre + self.reach * action[..., -self.spaces.action_size :].clip(-1, 1)

    def from_environment(self, action: NDArray) -> NDArray:
        return ((action - self.centre) / self.reach).clip(-1, 1).astype(np.float32)


def inner_actions(batch: Batch, steps: int) -> Batch:
    """Decisions [N,T] as their denoising steps [N,T*K'], the noisiest of each decision first: the inner problem nested in the environment's.

    A step's action is the less noisy point it led to, its context the decision's observation; the signals `noisy_action` [N,T*K',D],
    `denoising_step` (K'..1) and `denoising_progress` (0 to 1, 1 at the last) say where it started. Rewards, costs and ends belong to the last step of
    a decision; the value after any other is the decision's own. `segment` numbers the decisions; log-probs are left to who needs them.
    """
    horizon = batch.horizon
    chain = batch.action.unflatten(-1, (steps + 1, -1))
    k = torch.arange(steps, 0, -1).repeat(horizon).expand(len(batch), -1)
    last = k == 1
    progress = (steps - k) / (steps - 1) if steps > 1 else torch.ones(k.shape)

    def spread(value: Any) -> Any:
        per_decision = isinstance(value, Tensor) and value.dim() >= 2 and value.shape[1] == horizon
        return value.repeat_interleave(steps, dim=1) if per_decision else value

    signals = {name: spread(value) for name, value in batch.signals.items()}
    for name in ("raw_reward", "cost"):
        if name in signals:
            signals[name] = signals[name] * last
    signals |= {"noisy_action": chain[:, :, :-1].flatten(1, 2), "denoising_step": k, "denoising_progress": progress}
    following = spread(batch.next_value)
    if following is not None:
        following = torch.where(last, following, signals["old_value"])
    ends = {name: None if getattr(batch, name) is None else spread(getattr(batch, name)) & last for name in ("terminated", "truncated")}
    mask = spread(batch.mask)
    return batch.but(
        action=chain[:, :, 1:].flatten(1, 2), mask=mask, logp=torch.zeros(mask.shape), context=spread(batch.context), next_value=following,
        segment=torch.arange(horizon).repeat_interleave(steps).expand(len(batch), -1), signals=signals, **ends,
    )  # fmt: skip
