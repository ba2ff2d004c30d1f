"""On-policy family: REINFORCE, A2C, TRPO, PPO, V-MPO (arXiv:2401.13662).

Five algorithms as choices of one loop. REINFORCE takes Monte-Carlo returns of whole episodes and no critic; A2C n-step advantages, a critic
and an entropy bonus; TRPO and PPO are rows of their own; V-MPO fits the policy to the better half of the samples, weighted by exp(A / eta), with
a learned temperature eta and a learned multiplier alpha of a KL trust region. `METHOD` is V-MPO; `ALGORITHMS` holds all five. Equations of the
overview and, for V-MPO, of arXiv:1909.12238; the gradient of the temperature loss is [reconstructed] by differentiation. Left out: separate
multipliers for a Gaussian's mean and covariance inside the loop, where the exact KL has one (`gaussian_kl_parts` are the two KLs).
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
from anypo.methods.control.trpo import METHOD as TRPO
from anypo.policy import Loss, Signals
from anypo.seams.credit import dense_reward, gae, per_action_ends, whiten
from anypo.seams.groups import masked_mean
from anypo.seams.regularize import EntropyBonus, ValueLoss
from anypo.seams.select import UniformPrompts
from anypo.seams.update import GradientSteps

if TYPE_CHECKING:
    from anypo.run import MethodLoss, Run

PerAction = Float[Tensor, "N T"]
SMALLEST = 1e-8  # of the temperature and the multiplier


class Reinforce(NamedTuple):
    returns: Tensor  # [N,T]
    loss: Tensor


class VMPOTerms(NamedTuple):
    weights: Tensor  # [N,T] sum to 1 over the better half, 0 elsewhere
    policy: Tensor
    temperature: Tensor
    temperature_grad: Tensor  # d temperature / d eta
    trust: Tensor  # value alpha eps_alpha; its gradient moves alpha and the policy
    alpha_grad: Tensor  # d trust / d alpha


class GaussianKL(NamedTuple):
    mean: Tensor  # [B]
    cov: Tensor  # [B]


def discounted_returns(reward: PerAction, mask: Tensor, gamma: float, ended: Tensor | None = None) -> PerAction:
    """Equation 3: sum of gamma^(k-t) r_k over k >= t, not across `ended` [N,T]; 0 outside the mask."""
    nothing = torch.zeros_like(reward)
    return gae(reward, nothing, nothing if ended is None else ended, nothing, mask, gamma, 1.0).returns


def reinforce_loss(logp: PerAction, reward: PerAction, mask: Tensor, gamma: float = 0.99, baseline: str = "none") -> Reinforce:
    """Equation 3: minus the masked mean of logp (G - b), with b = 0 ("none") or the mean return of the batch's actions ("batch_mean")."""
    returns = discounted_returns(reward, mask, gamma)
    return Reinforce(returns, policy_gradient_loss(logp, _minus_baseline(returns, mask, baseline), mask))


def policy_gradient_loss(logp: PerAction, advantages: PerAction, mask: Tensor) -> Tensor:
    """Minus the masked mean of logp * advantage."""
    return -masked_mean(logp * advantages, mask)


def nstep_advantages(
    reward: PerAction, value: PerAction, bootstrap_value: Float[Tensor, " N"] | None, terminated: Tensor, gamma: float, n: int,
    truncated: Tensor | None = None, next_value: Tensor | None = None, mask: Tensor | None = None,
) -> PerAction:  # fmt: skip
    """Equation 4: the rewards of up to n actions, then the value of what follows, minus V. The window ends with the episode (a terminated one has no
    value after it) and with the rollout. What follows is `next_value` [N,T], else the values in `value` and then `bootstrap_value`."""
    if next_value is None:
        assert bootstrap_value is not None
        next_value = torch.cat([value[:, 1:], bootstrap_value[:, None]], dim=1)
    horizon = reward.shape[1]
    inside = torch.ones_like(reward) if mask is None else mask.to(reward.dtype)
    alive = 1 - terminated.to(reward.dtype)
    goes_on = alive if truncated is None else alive * (1 - truncated.to(reward.dtype))
    goes_on = goes_on * torch.cat([inside[:, 1:], torch.zeros_like(inside[:, :1])], dim=1)
    total = reward + gamma * alive * next_value  # windows of one action
    for _ in range(min(n, horizon) - 1):  # one action longer: the window of the next state takes the place of its value
        longer = torch.cat([total[:, 1:], torch.zeros_like(total[:, :1])], dim=1)
        total = reward + gamma * alive * torch.where(goes_on > 0, longer, next_value)
    return torch.where(inside > 0, total - value, torch.zeros_like(total))


def better_half(advantages: PerAction, mask: Tensor) -> Tensor:
    """Equation 6a: [N,T] bool, the ceil(count / 2) largest advantages inside the mask; ties go by order."""
    inside = mask.bool().flatten()
    order = torch.where(inside, advantages.flatten(), float("-inf")).argsort(descending=True, stable=True)
    chosen = torch.zeros_like(inside)
    chosen[order[: (int(inside.sum()) + 1) // 2]] = True
    return chosen.view(mask.shape)


def vmpo(
    logp: PerAction, advantages: PerAction, mask: Tensor, kl: PerAction, eta: float | Tensor = 1.0, eps_eta: float = 0.01,
    alpha: float | Tensor = 5.0, eps_alpha: float = 0.01,
) -> VMPOTerms:  # fmt: skip
    """Equations 6 and 7. Differentiable in logp (policy), kl (trust) and the duals (their own terms); the weights are constants.

    All zero without a counted action."""
    half = better_half(advantages, mask)
    zero = advantages.new_zeros(())
    if not half.any():
        empty = torch.zeros_like(advantages)
        return VMPOTerms(empty, (logp * 0)[mask.bool()].sum(), zero, zero, zero, zero)
    scaled = torch.where(half, advantages.detach() / eta, float("-inf"))
    total = torch.logsumexp(scaled.flatten(), 0)
    weights = (scaled - total).exp()
    log_mean = total - half.sum().to(total.dtype).log()
    policy = -torch.where(half, weights * logp, torch.zeros_like(logp)).sum()
    spent = torch.where(half, weights * scaled, zero).sum()  # sum psi A / eta
    measured = masked_mean(kl, mask)
    constant = alpha.detach() if isinstance(alpha, Tensor) else alpha
    trust = alpha * (eps_alpha - measured.detach()) + constant * measured
    return VMPOTerms(weights, policy, eta * (eps_eta + log_mean), eps_eta + log_mean - spent, trust, eps_alpha - measured.detach())


def gaussian_kl_parts(
    mean_old: Float[Tensor, "B d"], std_old: Float[Tensor, "B d"], mean: Float[Tensor, "B d"], std: Float[Tensor, "B d"]
) -> GaussianKL:
    """Equation 6e for diagonal Gaussians: the KL of a moved mean under the old covariance, and that of the covariance alone."""
    ratio = (std_old / std) ** 2
    return GaussianKL(0.5 * (((mean - mean_old) / std_old) ** 2).sum(-1), 0.5 * (ratio - 1 - ratio.log()).sum(-1))


def _minus_baseline(returns: Tensor, mask: Tensor, baseline: str) -> Tensor:
    if baseline not in ("none", "batch_mean"):
        raise ValueError(f"unknown baseline '{baseline}'; use none or batch_mean")
    return returns if baseline == "none" else torch.where(mask.bool(), returns - masked_mean(returns, mask), torch.zeros_like(returns))


@dataclass
class MonteCarlo:
    """Discounted return from each action on (REINFORCE), over whole episodes."""

    gamma: float = 0.99  # discount, in [0,1]
    baseline: str = "batch_mean"  # none or batch_mean

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        terminated, truncated = per_action_ends(batch)
        returns = discounted_returns(dense_reward(batch), batch.mask, self.gamma, terminated | truncated)
        return _minus_baseline(returns, batch.mask, self.baseline)


@dataclass
class NStep:
    """n-step advantages from the critic (A2C); leaves the value targets in `batch.signals["returns"]`."""

    gamma: float = 0.99  # discount, in [0,1]
    n: int = 32  # actions before the critic is asked, >= 1
    normalize: bool = True  # whiten over the batch

    needs = frozenset({"old_value"})
    gives = frozenset({"returns"})

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        value, (terminated, truncated) = batch.signal("old_value"), per_action_ends(batch)
        after = batch.next_value
        bootstrap = value.new_zeros(len(batch)) if after is None else None
        found = nstep_advantages(dense_reward(batch), value, bootstrap, terminated, self.gamma, self.n, truncated, after, batch.mask)
        batch.signals["returns"] = torch.where(batch.mask, found + value, torch.zeros_like(found))
        return whiten(found, batch.mask) if self.normalize else found


@dataclass
class PolicyGradient:
    """Log-probability times advantage, without a ratio and without a trust region (REINFORCE, A2C)."""

    needs = frozenset({"logp"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        return Loss(policy_gradient_loss(new.logp, batch.advantage, batch.counted))


@dataclass
class VMPO:
    """The weighted likelihood of the better half and the KL trust region; `DualSteps`, its update, moves eta and alpha."""

    eta: float = 1.0  # first temperature, in units of the advantage, > 0
    eps_eta: float = 0.01  # KL of the weights from uniform that the temperature aims at, nats, > 0
    alpha: float = 5.0  # first multiplier of the trust region, > 0
    eps_alpha: float = 0.01  # mean KL of the policy that the multiplier aims at, nats, > 0

    needs = frozenset({"logp", "kl_old"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        eta, alpha = run.state.get("vmpo.duals", (self.eta, self.alpha))
        terms = vmpo(new.logp, batch.advantage, batch.counted, new.kl_old, eta, self.eps_eta, alpha, self.eps_alpha)
        numbers = {"eta": eta, "alpha": alpha, "eta_grad": float(terms.temperature_grad), "alpha_grad": float(terms.alpha_grad)}
        return Loss(terms.policy + terms.trust, numbers | {"approx_kl": self.eps_alpha - float(terms.alpha_grad)})


@dataclass
class DualSteps(GradientSteps):
    """Gradient steps of the policy, each followed by an Adam step of the temperature and the multiplier, which stay positive (equation 6f)."""

    dual_learning_rate: float = 0.02  # > 0; Adam moves each dual by about so much a step
    duals: Tensor | None = field(default=None, init=False, repr=False)  # [2] eta, alpha
    dual_optimizer: Any = field(default=None, init=False, repr=False)

    def one_step(self, part: Batch, loss_fn: MethodLoss, optimizer: torch.optim.Optimizer, run: Run) -> dict[str, float]:
        metrics = super().one_step(part, loss_fn, optimizer, run)
        if "eta_grad" in metrics:
            if self.duals is None:
                self.start(torch.tensor([metrics["eta"], metrics["alpha"]], dtype=torch.float64))
            assert self.duals is not None
            self.duals.grad = torch.tensor([metrics["eta_grad"], metrics["alpha_grad"]], dtype=torch.float64)
            self.dual_optimizer.step()
            with torch.no_grad():
                self.duals.clamp_(min=SMALLEST)
            run.state["vmpo.duals"] = self.duals.tolist()
        return metrics

    def start(self, duals: Tensor) -> None:
        self.duals = duals.clone().requires_grad_()
        self.dual_optimizer = torch.optim.Adam([self.duals], lr=self.dual_learning_rate)

    def state_dict(self) -> dict[str, Any]:
        if self.duals is None:
            return {"duals": None}
        return {"duals": self.duals.detach().clone(), "optimizer": self.dual_optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.duals = self.dual_optimizer = None
        if state["duals"] is not None:
            self.start(state["duals"])
            self.dual_optimizer.load_state_dict(state["optimizer"])


PAPER = Paper(
    "The Definitive Guide to Policy Gradients in Deep Reinforcement Learning: Theory, Algorithms and Implementations", "2401.13662", 2024
)

REINFORCE: Method = PPO.but(
    name="reinforce",
    paper=PAPER,
    summary="Monte-Carlo returns of whole episodes, no critic, one epoch",
    select=UniformPrompts(group_size=2),  # several attempts at a start are whole episodes
    credit=MonteCarlo(),
    objective=PolicyGradient(),
    regularize=(),
    update=GradientSteps(epochs=1, minibatches=32, learning_rate=3e-4, optimizer="adam", max_grad_norm=0.5),
)

A2C: Method = PPO.but(
    name="a2c",
    paper=PAPER,
    summary="n-step advantages from a critic, an entropy bonus, one epoch",
    credit=NStep(),
    objective=PolicyGradient(),
    regularize=(ValueLoss(coefficient=0.5), EntropyBonus(0.01)),
    update=GradientSteps(epochs=1, minibatches=32, learning_rate=3e-4, optimizer="adam", max_grad_norm=0.5),
)

METHOD = PPO.but(
    name="on_policy_overview",
    paper=PAPER,
    summary="V-MPO: the better half of the samples, weighted with a learned temperature, inside a learned KL trust region",
    objective=VMPO(),
    update=DualSteps(epochs=10, minibatches=32, learning_rate=3e-4, optimizer="adam", max_grad_norm=0.5),
)

ALGORITHMS: dict[str, Method] = {"reinforce": REINFORCE, "a2c": A2C, "trpo": TRPO, "ppo": PPO, "vmpo": METHOD}
