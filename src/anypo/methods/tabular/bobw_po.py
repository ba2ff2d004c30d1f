"""BOBW-PO: best-of-both-worlds policy optimization (arXiv:2302.09408).

Policy optimization in finite-horizon problems where only the losses of the played episode are seen. Every state runs follow-the-regularized-leader on
importance-weighted losses to go. Against exponential weights with one fixed rate and a dilated bonus, three parts change: the regularizer (Tsallis or
Shannon entropy; log-barrier), a learning rate of each state's own that shrinks as its visits' inverse probabilities add up, and a bonus paid for every
decrease of that rate. One algorithm then has regret of order sqrt(T) against any losses and polylog(T) against stochastic ones; with the log-barrier and a
rate that follows the data, regret follows the loss of the best policy. The abstract states the results; equations 1, 2 and 6 and the shape of the
rates are recalled, equation 3 is derived, the constants of rates and bonus are [reconstructed]; with the log-barrier there is no bonus
[reconstructed]. Left out: unknown transitions (an upper confidence occupancy in place of the exact one).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.tabular.mdp import expected_next
from anypo.domains.tabular.policy import ExpectedAdvantage, at_states
from anypo.method import Method, Paper
from anypo.policy import Loss, Signals
from anypo.seams.credit import dense_reward
from anypo.seams.reward import TaskReward
from anypo.seams.rollout import OnPolicy
from anypo.seams.select import UniformPrompts

if TYPE_CHECKING:
    from anypo.run import MethodLoss, Run

REGULARIZERS = ("tsallis", "shannon", "logbarrier")
KINDS = ("tsallis", "shannon", "data", "fixed")
Table = Float[Tensor, "... H S A"]
PerState = Float[Tensor, "... H S"]


class Leader(NamedTuple):
    policy: Tensor  # [...,A]


class Rates(NamedTuple):
    eta: Tensor  # [T] rate after each episode


class Bonus(NamedTuple):
    bonus: Tensor  # [...] local, or [...,H,S,A] dilated


class Estimate(NamedTuple):
    q: Tensor  # [...,H,S,A]


def loss_to_go(losses: Float[Tensor, "... H"]) -> Float[Tensor, "... H"]:
    """L_h: the sum of the losses from step h on."""
    return losses.flip(-1).cumsum(-1).flip(-1)


def q_estimate(
    states: Int[Tensor, "... H"], actions: Int[Tensor, "... H"], losses: Float[Tensor, "... H"], occupancy: PerState, policy: Table, explore: float = 0.0
) -> Estimate:  # fmt: skip
    """Equation 1: the loss to go over the probability of being at (h, s) and taking a, at what was played; 0 elsewhere. Unbiased with explore 0."""
    played = (
        torch.nn.functional.one_hot(states, policy.shape[-2])[..., None]
        * torch.nn.functional.one_hot(actions, policy.shape[-1])[..., None, :]
    )
    weight = (occupancy[..., None] + explore) * policy
    return Estimate(torch.where(played.bool(), loss_to_go(losses)[..., None, None] / weight, torch.zeros_like(policy)))


def ftrl(cumulative_loss: Float[Tensor, "... A"], eta: float | Tensor, regularizer: str = "tsallis") -> Leader:
    """Equations 2-3: argmin of <p, C> + psi(p) / eta over the simplex. `eta` > 0, a number or [...]. Raises ValueError for another regularizer.

    For Tsallis (power 2) and log-barrier (power 1), p_a = (eta (C_a - min C) + w)^-power with the one w >= 1 at which they sum to 1. Newton's method
    on sum^(-1/power), which is concave and increasing in w, approaches that root from below without overshooting.
    """
    _check(regularizer, REGULARIZERS)
    rate = eta[..., None] if isinstance(eta, Tensor) else eta
    gap = rate * (cumulative_loss - cumulative_loss.amin(-1, keepdim=True))
    if regularizer == "shannon":
        return Leader((-gap).softmax(-1))
    power = 2 if regularizer == "tsallis" else 1
    w = torch.ones_like(gap[..., :1])
    for _ in range(100):
        inverse = 1 / (gap + w)
        total = (inverse**power).sum(-1, keepdim=True)
        move = (1 - total ** (-1 / power)) * total ** (1 + 1 / power) / (inverse ** (power + 1)).sum(-1, keepdim=True)
        w = w + move
        if float(move.abs().max()) < 1e-13:
            break
    p = (gap + w) ** -power
    return Leader(p / p.sum(-1, keepdim=True))


def entropy(policy: Float[Tensor, "... A"]) -> Float[Tensor, ...]:
    """Shannon entropy in nats; 0 log 0 = 0."""
    return -torch.xlogy(policy, policy).sum(-1)


def tsallis_inverse_rate(inverse_occupancy: Tensor, horizon: float, c0: float, c1: float) -> Tensor:
    """Equation 4, Tsallis: 1/eta from the sum so far of 1/mu. The log-barrier's has the same form in the sum of another quantity."""
    return c0 + c1 * horizon * inverse_occupancy.sqrt()


def shannon_increment(inverse_mu: Tensor, entropy_sum: Tensor, episodes: int, horizon: float, c1: float) -> Tensor:
    """Equation 4, Shannon: what an episode adds to 1/eta; `entropy_sum` is the sum of entropy / mu with this episode in it."""
    return c1 * horizon * inverse_mu / ((1 + entropy_sum).sqrt() * math.sqrt(math.log(max(episodes, 2))))


def barrier_increment(
    states: Int[Tensor, "... H"], actions: Int[Tensor, "... H"], losses: Float[Tensor, "... H"], inverse_mu: PerState, policy: Table
) -> PerState:
    """Equation 4, log-barrier: what an episode adds to the sum, (L/mu)^2 (1 - pi(a))^2 at the visited states and 0 elsewhere."""
    visited = torch.nn.functional.one_hot(states, policy.shape[-2])
    chance = policy.gather(-1, actions[..., None, None].expand(*policy.shape[:-1], 1))[..., 0]
    return visited * (loss_to_go(losses)[..., None] * inverse_mu * (1 - chance)) ** 2


def rates(
    occupancy: Float[Tensor, " T"],
    policies: Float[Tensor, "T A"],
    kind: str = "tsallis",
    horizon: float = 1,
    c0: float = 2.0,
    c1: float = 1.0,
) -> Rates:
    """Equation 4 for one state over T episodes: the rate after each, from its occupancy and its policy in each."""
    _check(kind, ("tsallis", "shannon"))
    if kind == "tsallis":
        return Rates(1 / tsallis_inverse_rate((1 / occupancy).cumsum(0), horizon, c0, c1))
    entropies = (entropy(policies) / occupancy).cumsum(0)
    return Rates(1 / (c0 + shannon_increment(1 / occupancy, entropies, len(occupancy), horizon, c1).cumsum(0)))


def local_bonus(
    policy: Float[Tensor, "... A"], eta_prev: float | Tensor, eta: float | Tensor, regularizer: str = "tsallis", cb: float = 1.0
) -> Bonus:
    """Equation 5: cb (1/eta - 1/eta_prev) times the size of the regularizer at the policy, >= 0; 0 where the policy is certain, and for the log-barrier."""
    _check(regularizer, REGULARIZERS)
    if regularizer == "tsallis":
        size = 2 * policy.sqrt().sum(-1) - 2
    else:
        size = entropy(policy) if regularizer == "shannon" else torch.zeros_like(policy[..., 0])
    return Bonus(cb * (1 / eta - 1 / eta_prev) * size.clamp(min=0))


def dilated_bonus(transition: Float[Tensor, "... H S A S"], policy: Table, local: PerState, horizon: int) -> Bonus:
    """Equation 6: the local bonus plus (1 + 1/H) times the expected dilated bonus of the next step."""
    rows: list[Tensor] = []
    for h in range(policy.shape[-3] - 1, -1, -1):
        here = local[..., h, :, None].expand_as(policy[..., h, :, :])
        if rows:
            following = (policy[..., h + 1, :, :] * rows[-1]).sum(-1)
            here = here + (1 + 1 / horizon) * expected_next(transition[..., h, :, :, :], following)
        rows.append(here)
    return Bonus(torch.stack(rows[::-1], dim=-3))


def _check(name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        raise ValueError(f"unknown choice '{name}'; use {', '.join(known)}")


@dataclass
class ImportanceWeightedLoss:
    """Minus equation 1 at what was played. Asks for one episode of every copy of the problem a step: the regret is counted by episodes."""

    explore: float = 0.0  # added to the occupancy, >= 0
    floor: float = 1e-3  # smallest occupancy divided by, > 0

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        if "occupancy" not in batch.signals or not torch.equal(
            batch.signals["prompt_id"], torch.arange(batch.signals["occupancy"].shape[0])
        ):
            raise ValueError(
                f"{run.method.name} plays one episode of every copy of a finite problem a step; use select.group_size=1 and a tabular task"
            )
        chance = at_states(batch.signals["occupancy"], batch).clamp(min=self.floor) + self.explore
        return -loss_to_go(-dense_reward(batch)) / (chance * batch.logp.exp())


@dataclass
class AdaptRates:
    """Equation 4 for every state: `inverse_rate` and `inverse_rate_before` [B,H,S] (1/eta) as signals of the batch."""

    kind: str = "tsallis"  # tsallis, shannon, data (for the log-barrier), fixed (always 1/c0)
    c0: float = 2.0  # 1/eta at the start, > 0; the theory's is 10 H
    c1: float = 1.0  # growth, > 0; the theory's is 4 H
    floor: float = 1e-3  # smallest occupancy divided by, > 0
    total: Tensor | None = field(default=None, init=False, repr=False)  # [B,H,S] the sum that the kind adds up
    inverse: Tensor | None = field(default=None, init=False, repr=False)  # [B,H,S] 1/eta

    def __call__(self, batch: Batch, run: Run) -> None:
        _check(self.kind, KINDS)
        policy: Tensor = run.policy.table  # type: ignore[assignment]
        mu = batch.signals["occupancy"]
        inverse_mu = torch.where(
            mu > 0, 1 / mu.clamp(min=self.floor), torch.zeros_like(mu)
        )  # a state that cannot be reached keeps its rate
        if self.total is None or self.inverse is None:
            self.total, self.inverse = torch.zeros_like(mu), torch.full_like(mu, self.c0)
        before = self.inverse
        if self.kind == "shannon":
            self.total = self.total + entropy(policy) * inverse_mu
            self.inverse = before + shannon_increment(inverse_mu, self.total, run.total_steps, 1, self.c1)
        elif self.kind != "fixed":
            add = (
                inverse_mu
                if self.kind == "tsallis"
                else barrier_increment(batch.context, batch.action, -dense_reward(batch), inverse_mu, policy)
            )
            self.total = self.total + add
            self.inverse = tsallis_inverse_rate(self.total, 1, self.c0, self.c1)
        batch.signals["inverse_rate"], batch.signals["inverse_rate_before"] = self.inverse, before

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "inverse": self.inverse}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total, self.inverse = state["total"], state["inverse"]


@dataclass
class DilatedBonus:
    """Equations 5-6: the bonus is a loss taken off, at every state and action."""

    regularizer: str = "tsallis"  # tsallis, shannon, logbarrier
    cb: float = 1.0  # weight, >= 0; 0 = no bonus

    needs = frozenset({"table"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        policy, transition = new.table.detach(), run.task.transition  # type: ignore[attr-defined]
        before, after = batch.signal("inverse_rate_before"), batch.signal("inverse_rate")
        local = local_bonus(policy, 1 / before, 1 / after, self.regularizer, self.cb).bonus
        bonus = dilated_bonus(transition, policy, local, policy.shape[-3]).bonus
        return Loss(-(bonus * new.table).sum(), {"bonus": float(bonus.mean())})


@dataclass
class FollowTheLeader:
    """The next table: the regularized leader of all slopes of the loss so far."""

    regularizer: str = "tsallis"  # tsallis, shannon, logbarrier
    cumulative: Tensor | None = field(default=None, init=False, repr=False)  # [B,H,S,A]

    def __call__(self, batch: Batch, loss_fn: MethodLoss, run: Run) -> dict[str, float]:
        if loss_fn.needs - {"table"}:
            raise ValueError(
                f"{run.method.name} follows losses that are functions of the signal 'table', not of {', '.join(sorted(loss_fn.needs))}"
            )
        table = run.policy.table.requires_grad_()  # type: ignore[operator,union-attr]
        loss = loss_fn(batch, Signals(table=table))
        slope = torch.autograd.grad(loss.value, table)[0]
        self.cumulative = slope if self.cumulative is None else self.cumulative + slope
        run.policy.assign(ftrl(self.cumulative, 1 / batch.signal("inverse_rate"), self.regularizer).policy)  # type: ignore[operator]
        run.advance_version()
        return {"loss": float(loss.value.detach()), **loss.metrics}

    def state_dict(self) -> dict[str, Any]:
        return {"cumulative": self.cumulative}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.cumulative = state["cumulative"]


METHOD = Method(
    name="bobw_po",
    paper=Paper("Best of Both Worlds Policy Optimization", "2302.09408", 2023),
    domain="tabular",
    summary="regularized leaders with a rate for each state and a bonus for its decrease: sqrt(T) regret always, polylog(T) when losses are stochastic",
    select=UniformPrompts(group_size=1),
    rollout=OnPolicy(),
    reward=TaskReward(),
    credit=ImportanceWeightedLoss(),
    objective=ExpectedAdvantage(),
    regularize=(DilatedBonus(),),
    control=(AdaptRates(),),
    update=FollowTheLeader(),
    loop="tabular",
)


def with_regularizer(regularizer: str, kind: str | None = None, cb: float = 1.0, c0: float = 2.0) -> Method:
    """The method with another regularizer and, unless `kind` says otherwise, the rates that belong to it. Raises ValueError for an unknown one."""
    _check(regularizer, REGULARIZERS)
    rate = kind or ("data" if regularizer == "logbarrier" else regularizer)
    return METHOD.but(
        regularize=(DilatedBonus(regularizer, cb),) if regularizer != "logbarrier" else (),
        control=(AdaptRates(rate, c0),),
        update=FollowTheLeader(regularizer),
    )
