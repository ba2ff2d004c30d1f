"""Value gradient: costates, sampled gradients and the headroom criterion of critic-free RL (arXiv:2605.21654).

Three statements. Back-propagation through a differentiable rollout carries costates whose conditional mean is the gradient of the value, so the
pathwise actor gradient and the score-function one agree in expectation. For discrete tokens, differentiation through attention alone gives empirical
costates near those of the relaxed rollout when the policy is nearly deterministic. And RL gains most from the checkpoint with the largest product of
signal and reachable headroom. Equations 1-4 are derived for a scalar linear-quadratic rollout; the relaxation of 5-6 and the estimators of signal
and headroom in 7-8 are [reconstructed], their product is the paper's. `ImpactMeter` logs the criterion in any run. Left out: the bound's constants.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper, Study
from anypo.seams.groups import group_mean

if TYPE_CHECKING:
    from anypo.run import Run

States = Float[Tensor, "... T+1"]


class Costates(NamedTuple):
    s: Tensor  # [...,T+1]
    u: Tensor  # [...,T]
    lam: Tensor  # [...,T+1] dR/ds_t along the path, the policy's reaction included


class Gradients(NamedTuple):
    pathwise: Tensor  # [...] dR/dk of every path
    score: Tensor  # [...] score times (return-to-go - V_t(s_t))


class Impact(NamedTuple):
    headroom: Tensor  # [C]
    signal: Tensor  # [C]
    impact: Tensor  # [C]
    best: Tensor  # index of the checkpoint to start from


class TokenCostates(NamedTuple):
    costate: Tensor  # [n,T,d] dR/dx_t
    gap: Tensor  # [n,T-1] distance of the sampled embedding from the mean one
    entropy: Tensor  # [n,T-1] nats


def costates(noise: Float[Tensor, "... T"], s0: float | Tensor, a: float, b: float, k: float, sigma: float, q: float, c: float) -> Costates:
    """Equation 1: s' = a s + b u with u = -k s + sigma noise, cost q s^2 + c u^2, and the costates of the return, backwards."""
    s, u = [torch.as_tensor(s0, dtype=noise.dtype, device=noise.device).expand(noise.shape[:-1])], []
    for xi in noise.unbind(-1):
        u.append(-k * s[-1] + sigma * xi)
        s.append(a * s[-1] + b * u[-1])
    lam = [-2 * q * s[-1]]
    for state, action in zip(reversed(s[:-1]), reversed(u), strict=True):
        lam.append(-2 * q * state + 2 * c * k * action + (a - b * k) * lam[-1])
    return Costates(torch.stack(s, -1), torch.stack(u, -1), torch.stack(lam[::-1], -1))


def riccati(a: float, b: float, k: float, sigma: float, q: float, c: float, T: int) -> tuple[Float[Tensor, " T+1"], Float[Tensor, " T+1"]]:
    """Equation 2: P and z of the value V_t(s) = -P_t s^2 - z_t."""
    p, z = [q], [0.0]
    for _ in range(T):
        z.append(z[-1] + sigma**2 * (c + b**2 * p[-1]))
        p.append(q + c * k**2 + (a - b * k) ** 2 * p[-1])
    return torch.tensor(p[::-1], dtype=torch.float64), torch.tensor(z[::-1], dtype=torch.float64)


def value_gradient(s: States, a: float, b: float, k: float, sigma: float, q: float, c: float, T: int) -> States:
    """Equations 2-3: grad V_t(s_t) = -2 P_t s_t for t = 0..T."""
    return -2 * riccati(a, b, k, sigma, q, c, T)[0].to(s) * s


def objective(s0: float, a: float, b: float, k: float, sigma: float, q: float, c: float, T: int) -> float:
    """J = V_0(s0), in closed form."""
    p, z = riccati(a, b, k, sigma, q, c, T)
    return -float(p[0] * s0**2 + z[0])


def gradients(
    noise: Float[Tensor, "... T"], s0: float | Tensor, a: float, b: float, k: float, sigma: float, q: float, c: float
) -> Gradients:
    """Equation 4: both estimates of dJ/dk, one of each a path. Raises ValueError for sigma = 0, where no score exists."""
    if sigma <= 0:
        raise ValueError("the score-function gradient needs noise in the actions; give a sigma above 0")
    s, u, lam = costates(noise, s0, a, b, k, sigma, q, c)
    before = s[..., :-1]
    cost = torch.cat([q * before**2 + c * u**2, q * s[..., -1:] ** 2], -1)
    to_go = -cost.flip(-1).cumsum(-1).flip(-1)[..., :-1]
    p, z = (x[:-1].to(s) for x in riccati(a, b, k, sigma, q, c, noise.shape[-1]))
    pathwise = -before * (b * lam[..., 1:] - 2 * c * u)
    score = -before * noise / sigma * (to_go + p * before**2 + z)
    return Gradients(pathwise.sum(-1), score.sum(-1))


@dataclass
class AttentionPolicy:
    """One causal attention layer with a residual, a softmax head, and as reward minus the squared distance of the mean feature to a target."""

    embedding: Tensor  # [V,d]
    query: Tensor  # [d,d]
    key: Tensor  # [d,d]
    value: Tensor  # [d,d]
    head: Tensor  # [d,V]
    start: Tensor  # [d] the first input
    target: Tensor  # [d]
    favourite: Tensor  # [T] token whose logit `beta` raises, by position

    @classmethod
    def random(cls, seed: int, vocabulary: int = 12, width: int = 16, horizon: int = 8) -> AttentionPolicy:
        """Normal weights of variance 1/d; a head of variance 1."""
        g = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, dtype=torch.float64) / width**0.5

        embedding, (query, key, value) = normal(vocabulary, width), (normal(width, width) for _ in range(3))
        head = normal(width, vocabulary) * width**0.5
        return cls(embedding, query, key, value, head, normal(width), normal(width), torch.randint(vocabulary, (horizon,), generator=g))

    def feature(self, inputs: Float[Tensor, "n t d"], through_attention: bool = True) -> Float[Tensor, "n d"]:
        """Feature of the last position; without `through_attention` only its residual path is differentiable."""
        last = inputs[:, -1]
        scores = torch.einsum("nd,ntd->nt", last @ self.query, inputs @ self.key) / last.shape[-1] ** 0.5
        attended = torch.einsum("nt,ntd->nd", scores.softmax(-1), inputs @ self.value)
        return last + (attended if through_attention else attended.detach())

    def costates(
        self, samples: int, generator: torch.Generator | None, beta: float = 0.0, temperature: float = 1.0, through_attention: bool = True
    ) -> TokenCostates:
        """Equations 5-6. Without a generator: the relaxed rollout, fed with mean embeddings. With one: sampled embeddings, held fixed."""
        inputs, features, gaps, entropies = [self.start.repeat(samples, 1).requires_grad_()], [], [], []
        for position, favourite in enumerate(self.favourite.tolist()):
            features.append(self.feature(torch.stack(inputs, 1), through_attention))
            if position == len(self.favourite) - 1:
                break
            logits = features[-1] @ self.head / temperature + beta * (torch.arange(self.head.shape[1]) == favourite)
            p = logits.softmax(-1)
            mean = p @ self.embedding
            entropies.append(-(p * p.log()).sum(-1).detach())
            following = mean
            if generator is not None:
                following = self.embedding[torch.multinomial(p.detach(), 1, generator=generator)[:, 0]].requires_grad_()
            gaps.append((following - mean).norm(dim=-1).detach())
            inputs.append(following)
        reward = -((torch.stack(features, 1).mean(1) - self.target) ** 2).sum(-1)
        found = torch.stack(torch.autograd.grad(reward.sum(), inputs), 1)
        return TokenCostates(found, torch.stack(gaps, 1), torch.stack(entropies, 1))


def impact(p: Float[Tensor, "C X"], K: int = 16, signal: Float[Tensor, " C"] | None = None) -> Impact:
    """Equations 7-9: success rates of C checkpoints on X prompts; `K` rollouts a prompt are affordable. `signal` replaces the estimate of
    equation 8, e.g. with measured gradient norms. Raises ValueError for rates outside [0,1] or K below 1."""
    if K < 1 or p.min() < 0 or p.max() > 1:
        raise ValueError("success rates lie in [0,1] and K is at least 1")
    p = p.to(torch.float64)
    headroom = (1 - (1 - p) ** K - p).mean(-1)
    measured = (p * (1 - p)).sqrt().mean(-1) if signal is None else signal
    return Impact(headroom, measured, measured * headroom, (measured * headroom).argmax(-1))


@dataclass
class ImpactMeter:
    """A control for any method: logs signal, headroom and predicted impact of the policy on the step's prompts (rewards in [0,1])."""

    rollouts: int = 16  # K, >= 1

    def __call__(self, batch: Batch, run: Run) -> None:
        assert batch.reward is not None
        reward = batch.reward.double()
        if reward.dim() > 1:
            raise ValueError("the impact needs one success rate a response; several rewards or rewards of tokens have none")
        rates = group_mean(reward, batch.group)[None]  # every response counts, so a prompt counts by its responses
        found = impact(rates, self.rollouts)
        run.log(signal=float(found.signal), headroom=float(found.headroom), impact=float(found.impact))


def relative_error(policy: AttentionPolicy, samples: int, seed: int, **settings: Any) -> tuple[float, float, float]:
    """Mean over samples and positions of |empirical - relaxed| / |relaxed| costate, mean sampling gap, mean entropy."""
    cut = {name: settings.pop(name) for name in ("through_attention",) if name in settings}
    relaxed = policy.costates(1, None, **settings)
    sampled = policy.costates(samples, torch.Generator().manual_seed(seed), **settings, **cut)
    error = (sampled.costate - relaxed.costate).norm(dim=-1) / relaxed.costate.norm(dim=-1)
    return float(error.mean()), float(sampled.gap.mean()), float(sampled.entropy.mean())


def run(seed: int = 0, paths: int = 20000, T: int = 8) -> dict[str, Any]:
    """Both gradients of the default linear-quadratic rollout against the closed form, their standard deviations, and costate errors by beta."""
    problem = {"a": 1.0, "b": 0.5, "k": 0.6, "sigma": 0.3, "q": 1.0, "c": 0.1}
    noise = torch.randn(paths, T, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    both, step = gradients(noise, 1.0, **problem), 1e-5
    up, down = (objective(1.0, **(problem | {"k": 0.6 + h}), T=T) for h in (step, -step))
    found = {"exact": (up - down) / (2 * step)}
    for name, values in both._asdict().items():
        found |= {name: float(values.mean()), f"{name}_std": float(values.std())}
    policy = AttentionPolicy.random(seed, horizon=T)
    return found | {f"costate_error_beta_{beta}": relative_error(policy, 256, seed, beta=beta)[0] for beta in (2, 4, 8)}


STUDY = Study(
    name="value_gradient",
    paper=Paper("Value-Gradient Hypothesis of RL for LLMs", "2605.21654", 2026),
    domain="language",
    run=run,
    kind="theory",
    summary="why critic-free gradients carry the value's gradient, and when RL pays most: signal times reachable headroom of a checkpoint",
)
