"""Partner selection: policy-gradient dynamics with partner selection in social dilemmas (arXiv:2605.18185).

Self-interested policy-gradient learners play a one-shot dilemma again and again, with a partner they may leave. Leaving makes an agent's opponents
depend on its own cooperation, so its gradient has two parts: the ordinary one, which favours defection, and a covariance of payoff and match length
over the opponents, which is 0 in a population without spread. Finite sampling adds two independent Wiener processes, one of the agent's own actions
and one of which partner it meets. Against random matching every round (always_switch) only the distribution of opponents changes. The paper's
statements are known from its abstract; all equations are [reconstructed] as the simplest model with all its parts.
Left out: the proofs, rules that look further back than one round.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from anypo.domains.games.dilemma import keep, payoff, play, seat
from anypo.method import Paper, Study


class Landscape(NamedTuple):
    opponents: Tensor  # [...,n] long-run distribution of opponents
    opponent_mean: Tensor  # [...] their mean cooperation
    reward: Tensor
    direct: Tensor  # expected slope of the payoff
    selection: Tensor  # covariance of payoff and match length
    gradient: Tensor  # direct + selection
    logit_drift: Tensor  # x (1 - x) gradient
    promoting: Tensor  # 1 where cooperation pays


class Noise(NamedTuple):
    action_std: Tensor  # [...] from the agent's own actions
    selection_std: Tensor  # [...] from which partner it meets


class Stepped(NamedTuple):
    theta: Tensor  # [...,N]


class Course(NamedTuple):
    cooperation: Tensor  # [steps + 1,...] mean of the population
    theta: Tensor  # [...,N] at the end


def landscape(
    x: float | Float[Tensor, ...], pool: Float[Tensor, "... n"], weight: Float[Tensor, "... n"], rule: str = "out_for_tat",
    delta: float = 0.95, R: float = 3.0, S: float = 0.0, T: float = 5.0, P: float = 1.0,
) -> Landscape:  # fmt: skip
    """Equations 1-7 for agents of cooperation x [...] in (0,1) against opponents `pool` of shares `weight` >= 0 (0 leaves one out)."""
    own = torch.as_tensor(x, dtype=pool.dtype)[..., None]
    opponents = _opponents(own, pool, weight, rule, delta)
    u = payoff(own, pool, R, S, T, P)
    slope = pool * (R - T) + (1 - pool) * (S - P)
    longer = delta * pool / (1 - delta * own * pool) if rule == "out_for_tat" else torch.zeros_like(u)  # d log match length / dx
    reward, direct = (opponents * u).sum(-1), (opponents * slope).sum(-1)
    away = longer - (opponents * longer).sum(-1, keepdim=True)
    selection = (opponents * (u - reward[..., None]) * away).sum(-1)
    gradient = direct + selection
    drift = own[..., 0] * (1 - own[..., 0]) * gradient
    return Landscape(
        opponents, (opponents * pool).sum(-1), reward, direct, selection, gradient, drift, (selection > -direct).to(pool)
    )  # fmt: skip


def noise(
    x: float | Float[Tensor, ...], pool: Float[Tensor, "... n"], weight: Float[Tensor, "... n"], rule: str = "out_for_tat",
    delta: float = 0.95, R: float = 3.0, S: float = 0.0, T: float = 5.0, P: float = 1.0,
) -> Noise:  # fmt: skip
    """Equation 8: variance of the one-round score estimator (a - x) u(a, y), split into the part within and the part between opponents."""
    own = torch.as_tensor(x, dtype=pool.dtype)[..., None]
    opponents = _opponents(own, pool, weight, rule, delta)
    if_cooperating, if_defecting = pool * R + (1 - pool) * S, pool * T + (1 - pool) * P
    mean = own * (1 - own) * (if_cooperating - if_defecting)
    second = own * ((1 - own) * if_cooperating) ** 2 + (1 - own) * (own * if_defecting) ** 2
    between = (opponents * (mean - (opponents * mean).sum(-1, keepdim=True)) ** 2).sum(-1)
    return Noise((opponents * (second - mean**2)).sum(-1).clamp(min=0).sqrt(), between.sqrt())


def _opponents(own: Tensor, pool: Tensor, weight: Tensor, rule: str, delta: float) -> Tensor:
    """Equation 3: the pool's shares times the expected length of a match, normalized."""
    q = weight / (1 - keep(own, pool, rule, delta))
    return q / q.sum(-1, keepdim=True)


def sde_step(
    theta: Float[Tensor, "... N"], normals: Float[Tensor, "... N 2"], rule: str = "out_for_tat", delta: float = 0.95, eta: float = 0.1,
    m: float = 1, dt: float = 0.5, R: float = 3.0, S: float = 0.0, T: float = 5.0, P: float = 1.0,
) -> Stepped:  # fmt: skip
    """Equation 9 without the clip, for all agents at once, each against the others. `eta`: learning rate, `m`: encounters per update, both > 0;
    `dt`: time = learning rate x updates; `normals`: standard normal draws, own action first."""
    x = theta.sigmoid()
    agents = x.shape[-1]
    pool = x[..., None, :].expand(*x.shape, agents)
    others = 1 - torch.eye(agents).to(x)
    rules = (rule, delta, R, S, T, P)
    drift = landscape(x, pool, others, *rules).logit_drift
    if not normals.any():
        return Stepped(theta + dt * drift)
    std = torch.stack(noise(x, pool, others, *rules), -1)
    return Stepped(theta + dt * drift + (eta * dt / m) ** 0.5 * (std * normals).sum(-1))


def simulate(
    theta: Float[Tensor, "... N"], generator: torch.Generator | None = None, steps: int = 200, rule: str = "out_for_tat",
    delta: float = 0.95, eta: float = 0.1, m: float = 1, dt: float = 0.5, clip: float = 4.0,
) -> Course:  # fmt: skip
    """Euler-Maruyama with logits clipped to [-clip, clip]; the deterministic flow without a generator. Leading dimensions are independent runs."""
    course = [theta.sigmoid().mean(-1)]
    still = torch.zeros(*theta.shape, 2, dtype=theta.dtype)
    for _ in range(steps):
        normals = still if generator is None else torch.randn(still.shape, generator=generator, dtype=theta.dtype)
        theta = sde_step(theta, normals, rule, delta, eta, m, dt).theta.clamp(-clip, clip)
        course.append(theta.sigmoid().mean(-1))
    return Course(torch.stack(course), theta)


def score_gradient(x: Float[Tensor, "B N"], action: Float[Tensor, "L B N"], reward: Float[Tensor, "L B N"], discount: float) -> Tensor:
    """REINFORCE on the logits [B,N]: mean over rounds of (a - x) times the discounted return to go of reward minus its mean.

    With `discount` 0 it is blind to what an action does to the next partners."""
    rounds = torch.arange(len(reward), dtype=x.dtype)
    ahead = rounds - rounds[:, None]
    to_go = torch.where(ahead >= 0, discount ** ahead.clamp(min=0), torch.zeros_like(ahead))
    returns = torch.einsum("tk,kbn->tbn", to_go, reward - reward.mean(0))
    return ((action - x) * returns).mean(0)


def agents(
    theta: Float[Tensor, "B N"], generator: torch.Generator, updates: int, rule: str = "out_for_tat", delta: float = 0.95,
    eta: float = 0.1, rounds: int = 50, discount: float = 0.9, clip: float = 4.0,
) -> Course:  # fmt: skip
    """The dynamics as a game: agents play `rounds` rounds, keep or leave their partners, and step along `score_gradient`; N even."""
    order = seat(theta.shape[0], theta.shape[1], generator)
    course = [theta.sigmoid().mean(-1)]
    for _ in range(updates):
        x = theta.sigmoid()
        action, reward, order = play(x, order, rounds, rule, delta, generator)
        theta = (theta + eta * score_gradient(x, action, reward, discount)).clamp(-clip, clip)
        course.append(theta.sigmoid().mean(-1))
    return Course(torch.stack(course), theta)


def run(
    seed: int = 0, population: int = 60, steps: int = 200, spread: float = 0.05, eta: float = 2.0, delta: float = 0.95
) -> dict[str, Any]:
    """Mean cooperation over the last quarter with partner selection and with random matching, from logits ~ N(0, spread^2)."""
    found = {}
    for rule in ("out_for_tat", "always_switch"):
        generator = torch.Generator().manual_seed(seed)
        theta = spread * torch.randn(population, generator=generator, dtype=torch.float64)
        course = simulate(theta, generator, steps, rule, delta, eta).cooperation
        found[rule] = float(course[-max(steps // 4, 1) :].mean())
    return found


STUDY = Study(
    name="partner_selection",
    paper=Paper("The Dynamics of Policy Gradient in Social Dilemmas with Partner Selection", "2605.18185", 2026),
    domain="games",
    run=run,
    kind="theory",
    summary="why leaving defectors lets policy-gradient learners cooperate: the gradient gains a covariance over opponents, which needs spread",
)
