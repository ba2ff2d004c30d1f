"""VRPO: variance-reduced policy optimization with Q-boosting (arXiv:2605.19235).

Self-play in games with hidden cards ends in policies that mix, so the multi-step sums of GAE carry the noise of all later moves even when the critic is
exact. Q-boosting takes a central critic of action values, which sees every card and is used in training alone, and at each step the expectation over the
policy in place of the sampled move: an Expected SARSA(lambda) trace, whose errors hold no noise of moves. Against PPO it changes the credit, and the
critic's regression with it; clip, epochs and on-policy steps stay. Idea from the abstract; equations 2-4 agree in two independent implementations;
the sign for the mover is ours; hyper-parameters are [reconstructed]. Left out: the all-action form of the loss, a Polyak target critic, Dou Dizhu.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.control.ppo import METHOD as PPO
from anypo.policy import Loss, Signals
from anypo.seams.credit import dense_reward, gae, per_action_ends, whiten
from anypo.seams.groups import masked_mean
from anypo.seams.regularize import EntropyBonus
from anypo.seams.select import UniformPrompts
from anypo.seams.update import GradientSteps

if TYPE_CHECKING:
    from anypo.run import Run

PerMove = Float[Tensor, "N T"]
PerAction = Float[Tensor, "N T A"]


class QBoosted(NamedTuple):
    advantages: Tensor  # [N,T] for the player who moved
    targets: Tensor  # [N,T] regression targets of q at the move, player 0's view
    v: Tensor  # [N,T] expectation of q over the mover's policy


def expected_value(q: PerAction, policy: PerAction) -> PerMove:
    """Equation 1: sum over actions of pi q; actions of probability 0 do not count, whatever their q."""
    return torch.where(policy > 0, policy * q, torch.zeros_like(q)).sum(-1)


def advantages(
    reward: PerMove, terminated: PerMove, mask: PerMove, mover_sign: PerMove, q: PerAction, policy: PerAction, action: Int[Tensor, "N T"],
    bootstrap: Float[Tensor, " N"], gamma: float = 1.0, lam: float = 0.95,
) -> QBoosted:  # fmt: skip
    """Equations 1-4. `reward`, `q` and `bootstrap` (the value after the last step) are player 0's; `policy` is the mover's at collection."""
    inside, zero = mask.bool(), q.new_zeros(())
    v = torch.where(inside, expected_value(q, policy), zero)
    taken = torch.where(inside, q.gather(-1, action[..., None])[..., 0], zero)
    alive = 1 - terminated.to(q.dtype)
    last = _last(inside)
    following = torch.where(last, bootstrap[:, None], torch.cat([v[:, 1:], torch.zeros_like(v[:, :1])], dim=1))
    delta = torch.where(inside, reward + gamma * torch.where(alive > 0, following, zero) - taken, zero)
    trace, error = torch.zeros_like(v[:, 0]), torch.zeros_like(v)
    for t in range(v.shape[1] - 1, -1, -1):
        trace = torch.where(inside[:, t], delta[:, t] + gamma * lam * alive[:, t] * trace, zero)
        error[:, t] = trace
    targets = taken + error
    return QBoosted(mover_sign.to(q.dtype) * (targets - v) * inside, targets, v)


def gae_comparison(
    reward: PerMove, terminated: PerMove, mask: PerMove, mover_sign: PerMove, q: PerAction, policy: PerAction, action: Int[Tensor, "N T"],
    bootstrap: Float[Tensor, " N"], gamma: float = 1.0, lam: float = 0.95,
) -> PerMove:  # fmt: skip
    """Equation 6: GAE with V = the expectation of q, for the mover. `action` plays no part."""
    inside = mask.bool()
    v = torch.where(inside, expected_value(q, policy), q.new_zeros(()))
    following = torch.where(_last(inside), bootstrap[:, None], torch.cat([v[:, 1:], torch.zeros_like(v[:, :1])], dim=1))
    return mover_sign.to(q.dtype) * gae(reward, v, terminated, torch.zeros_like(terminated), mask, gamma, lam, following).advantages


def q_loss(q: PerAction, action: Int[Tensor, "N T"], targets: PerMove, mask: Tensor) -> Tensor:
    """Equation 5, critic: mean squared error of q at the moves made."""
    return masked_mean((q.gather(-1, action[..., None])[..., 0] - targets.detach()) ** 2, mask)


def kuhn_payoff(cards: Sequence[int] | Tensor, history: str) -> int:
    """What player 0 wins in Kuhn poker: cards [2], a finished history of "p" (pass) and "b" (bet). Raises ValueError for an unfinished one."""
    showdown = 1 if cards[0] > cards[1] else -1
    outcomes = {"pp": showdown, "bp": 1, "pbp": -1, "bb": 2 * showdown, "pbb": 2 * showdown}
    if history not in outcomes:
        raise ValueError(f"'{history}' is no finished game of Kuhn poker; those are {', '.join(outcomes)}")
    return outcomes[history]


def _last(inside: Tensor) -> Tensor:
    return inside & ~torch.cat([inside[:, 1:], torch.zeros_like(inside[:, :1])], dim=1)


@dataclass
class QBoosting:
    """Q-boosted advantages; leaves the critic's targets in `batch.signals["q_targets"]`. Games end, so nothing is bootstrapped."""

    gamma: float = 1.0  # discount, in [0,1]
    lam: float = 0.95  # trace decay, in [0,1]
    normalize: bool = True  # whiten over the batch

    needs = frozenset({"old_q", "old_logits", "batch_mover_sign"})
    gives = frozenset({"q_targets"})

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        q = batch.signal("old_q")
        found = advantages(
            dense_reward(batch).to(q.dtype), per_action_ends(batch)[0].to(q.dtype), batch.mask.to(q.dtype), batch.signal("mover_sign"), q,
            batch.signal("old_logits").softmax(-1), batch.action, q.new_zeros(len(batch)), self.gamma, self.lam,
        )  # fmt: skip
        batch.signals["q_targets"] = found.targets
        return whiten(found.advantages, batch.mask) if self.normalize else found.advantages


@dataclass
class QRegression:
    """The action-value critic's regression onto the targets that the credit left."""

    coefficient: float = 0.5  # >= 0

    needs = frozenset({"q"})
    wants = frozenset({"q_targets"})  # left in the batch by the credit

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        loss = q_loss(new.q, batch.action, batch.signal("q_targets"), batch.counted)
        return Loss(self.coefficient * loss, {"q_loss": float(loss.detach())})


@dataclass
class SelfPlayGAE:
    """The baseline's credit: GAE with a central critic of state values, which sees every card, turned to the player who moved."""

    gamma: float = 1.0  # discount, in [0,1]
    lam: float = 0.95  # trace decay, in [0,1]
    normalize: bool = True  # whiten over the batch

    needs = frozenset({"old_value", "batch_mover_sign"})
    gives = frozenset({"returns"})

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        terminated, truncated = per_action_ends(batch)
        found = gae(dense_reward(batch), batch.signal("old_value"), terminated, truncated, batch.mask, self.gamma, self.lam)
        batch.signals["returns"] = found.returns
        signed = batch.signal("mover_sign") * found.advantages
        return whiten(signed, batch.mask) if self.normalize else signed


@dataclass
class FadingEntropy:
    """An entropy bonus whose coefficient falls in proportion to what is left of the run, from `first` to `last`."""

    first: float = 0.01  # >= 0
    last: float = 0.001  # >= 0

    needs = frozenset({"entropy"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        return EntropyBonus(self.first + (self.last - self.first) * run.progress)(batch, new, run)


METHOD = PPO.but(
    name="vrpo",
    paper=Paper("GAE Falls Short in Imperfect-Information Self-Play Reinforcement Learning", "2605.19235", 2026),
    domain="games",
    summary="PPO in self-play with an Expected SARSA(lambda) trace over a central action-value critic, free of the noise of later moves",
    select=UniformPrompts(prompts=1, group_size=1024),
    credit=QBoosting(),
    regularize=(QRegression(), FadingEntropy()),
    update=GradientSteps(epochs=4, minibatches=1, learning_rate=3e-4, value_learning_rate=1e-3, optimizer="adam", max_grad_norm=0.5),
)
