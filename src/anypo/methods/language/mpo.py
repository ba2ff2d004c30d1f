"""MPO: multiscale policy optimization, by turn and by token.

The critic of an agent changes its mind mainly between turns. MPO runs GAE over turns, and then shares each turn's advantage among its tokens by an
in-turn estimate from the token values, which leaves the turn's mean where it was; the ratio is one a turn. Against PPO it changes the credit and the
objective. The turn as anchor of advantage and ratio is from the abstract; the exact form of both estimates, the geometric mean in the ratio and the
critic's targets are [reconstructed]. Turns are the batch's `segment`; without segments a row is one turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.control.ppo import METHOD as PPO
from anypo.policy import Loss, Signals
from anypo.seams.credit import dense_reward, gae, last_action
from anypo.seams.groups import masked_mean
from anypo.seams.objective import clipped, log_ratio, ratio_metrics
from anypo.seams.regularize import ValueLoss
from anypo.seams.select import UniformPrompts
from anypo.seams.steps import Steps, returns_and_advantages, steps_of, sum_by_step
from anypo.seams.update import GradientSteps

if TYPE_CHECKING:
    from anypo.run import Run

EPS = 1e-8
PerToken = Float[Tensor, "N T"]


class Multiscale(NamedTuple):
    advantage: Tensor  # [N,T], 0 outside the mask
    turn_advantage: Tensor  # [N,K] by segment, whitened too when asked for, 0 where there is no such turn
    in_turn: Tensor  # [N,T] in-turn GAE a_t, never whitened
    returns: Tensor  # [N,T] value targets, never whitened


class TurnLoss(NamedTuple):
    ratio: Tensor  # [N,T] the turn's ratio at each of its tokens, 1 outside the mask
    loss: Tensor  # scalar, differentiable in logp


def turns_of(mask: Tensor, segment: Int[Tensor, "N T"]) -> Steps:
    """The turns of which the policy wrote at least one token."""
    inside = mask.bool()
    return steps_of(Batch(action=segment, mask=inside, logp=inside.double(), group=torch.arange(len(inside)), segment=segment), inside)


def advantages(
    reward: PerToken, value: PerToken, mask: Tensor, segment: Int[Tensor, "N T"], gamma: float = 0.99, lam_turn: float = 0.95,
    lam_tok: float = 1.0, eta: float = 0.5, whiten: bool = True, last_value: Float[Tensor, " N"] | None = None,
) -> Multiscale:  # fmt: skip
    """Equations 1-6 and 8. `last_value` [N]: the value after each row's last token (default 0, where the trajectory ended)."""
    turns, inside = turns_of(mask, segment), mask.bool()
    count = len(turns.traj)
    zero = torch.zeros_like(value)
    if not count:
        return Multiscale(zero, value.new_zeros(len(value), 0), zero, zero)
    reward, value = torch.where(inside, reward.to(value), zero), torch.where(inside, value, zero)
    last = value.new_zeros(len(value)) if last_value is None else last_value.to(value)
    turn_reward = sum_by_step(reward, turns.number, count)
    found = returns_and_advantages(
        turn_reward, value[turns.start], turns.traj, turns.order, gamma, lam_turn, whiten=False, bootstrap=last[turns.traj]
    )
    in_turn = in_turn_gae(reward, value, turns.number, gamma, lam_tok, last)
    to_come = _following(found.advantage, turns)
    whole = in_turn if lam_tok == 1 else in_turn_gae(reward, value, turns.number, gamma, 1.0, last)
    at = turns.number.clamp(min=0)
    returns = torch.where(inside, whole + value + gamma * lam_turn * to_come[at], zero)
    size = sum_by_step(torch.ones_like(value), turns.number, count)
    centre = sum_by_step(in_turn, turns.number, count) / size
    advantage, by_turn = found.advantage[at] + eta * (in_turn - centre[at]), found.advantage
    if whiten:
        shift, scale = _measure(by_turn)
        advantage, by_turn = (advantage - shift) * scale, (by_turn - shift) * scale
    table = value.new_zeros(len(value), int(turns.segment.max()) + 1)
    table[turns.traj, turns.segment] = by_turn
    return Multiscale(torch.where(inside, advantage, zero), table, in_turn, returns)


def in_turn_gae(
    reward: PerToken, value: PerToken, turn: Int[Tensor, "N T"], gamma: float, lam_tok: float, last_value: Float[Tensor, " N"]
) -> PerToken:
    """Equations 3-4: undiscounted TD errors inside a turn, gamma at its border, traces that end there. `turn`: number of the turn, -1 = none.

    Observations between turns are skipped: the value after a token is that of the row's next token with a turn.
    """
    order = (turn < 0).long().argsort(dim=1, stable=True)  # each row's tokens moved together, to the left
    turn, reward, value = (x.gather(1, order) for x in (turn, reward, value))
    inside = turn >= 0
    after = torch.cat([turn[:, 1:], torch.full_like(turn[:, :1], -1)], dim=1)
    border = inside & (after != turn)
    following = torch.cat([value[:, 1:], torch.zeros_like(value[:, :1])], dim=1)
    following = torch.where(last_action(inside), last_value[:, None], following)
    following = torch.where(border, gamma * following, following)
    found = gae(reward, value, torch.zeros_like(inside), border, inside, 1.0, lam_tok, next_value=following).advantages
    return torch.zeros_like(found).scatter(1, order, found)


def _following(by_turn: Float[Tensor, " S"], turns: Steps) -> Float[Tensor, " S"]:
    """The value of each turn's successor in the same row, 0 for the last."""
    out = torch.zeros_like(by_turn)
    out[:-1] = torch.where(turns.traj[1:] == turns.traj[:-1], by_turn[1:], out[:-1])
    return out


def _measure(by_turn: Float[Tensor, " S"]) -> tuple[Tensor, Tensor]:
    """Equation 6: the mean over turns, and one over their deviation (ddof 1). Without spread the scale is 0: there is nothing to anchor to."""
    if len(by_turn) < 2 or bool(by_turn.amax() == by_turn.amin()):
        return by_turn.mean(), by_turn.new_zeros(())
    return by_turn.mean(), 1 / (by_turn.std() + EPS)


def loss(logp: PerToken, old_logp: PerToken, advantage: PerToken, mask: Tensor, segment: Int[Tensor, "N T"], clip: float = 0.2) -> TurnLoss:
    """Equation 7: a token mean of the clipped surrogate, every token with the geometric mean ratio of its turn."""
    return turn_surrogate(logp, old_logp, advantage, turns_of(mask, segment), clip, clip)


def turn_surrogate(logp: PerToken, old_logp: PerToken, advantage: PerToken, turns: Steps, clip_low: float, clip_high: float) -> TurnLoss:
    """Equation 7 in token form: the ratio has the turn's value and each token's own gradient."""
    inside, count = turns.number >= 0, len(turns.traj)
    if not count:
        return TurnLoss(torch.ones_like(advantage), torch.where(inside, logp, torch.zeros_like(logp)).sum())
    size = sum_by_step(inside.to(logp.dtype), turns.number, count)
    mean = sum_by_step(log_ratio(logp, old_logp, inside).detach(), turns.number, count) / size
    by_token = torch.where(inside, mean[turns.number.clamp(min=0)], torch.zeros_like(advantage).to(mean)).exp()
    ratio = by_token * log_ratio(logp, logp.detach(), inside).exp()
    advantage = torch.where(inside, advantage.detach(), torch.zeros_like(advantage)).to(ratio)
    return TurnLoss(by_token, -masked_mean(clipped(ratio, advantage, 1 - clip_low, 1 + clip_high), inside))


@dataclass
class MultiscaleGAE:
    """GAE over turns, shared among the tokens of each turn; leaves value targets in `batch.signals["returns"]`.

    A task's own reward of each turn counts at the turn's last token. A truncated row goes on with `batch.next_value` where there is one.
    """

    gamma: float = 0.99  # discount a turn, in [0,1]
    lam_turn: float = 0.95  # trace decay a turn, in [0,1]
    lam_tok: float = 1.0  # trace decay a token inside a turn, in [0,1]
    eta: float = 0.5  # >= 0, weight of the in-turn differences; 0 = one advantage a turn
    normalize: bool = True  # whiten over the turns of the batch

    needs = frozenset({"old_value"})
    gives = frozenset({"returns"})

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        segment = batch.segment if batch.segment is not None else torch.zeros_like(batch.mask, dtype=torch.int64)
        found = advantages(
            token_rewards(batch, segment), batch.signal("old_value"), batch.mask, segment, self.gamma, self.lam_turn, self.lam_tok, self.eta,
            self.normalize, value_after(batch),
        )  # fmt: skip
        batch.signals["returns"] = found.returns
        return found.advantage.to(batch.logp)


def token_rewards(batch: Batch, segment: Int[Tensor, "N T"]) -> PerToken:
    """Dense rewards; those that the task gives by turn stand at the last token of the turn."""
    if "turn_reward" not in batch.signals:
        return dense_reward(batch)
    given, turns = batch.signals["turn_reward"], turns_of(batch.mask, segment)
    row, place = (turns.number >= 0).nonzero(as_tuple=True)
    end = torch.zeros_like(turns.traj).scatter_reduce(0, turns.number[row, place], place, "amax")
    reward = given.new_zeros(batch.mask.shape)
    reward[turns.traj, end] = given[turns.traj, turns.segment]
    return reward


def value_after(batch: Batch) -> Float[Tensor, " N"] | None:
    """The value after the last token of rows that were cut short; None when nothing was, or nobody knows it."""
    if batch.truncated is None or batch.next_value is None:
        return None
    cut = batch.truncated if batch.truncated.dim() == 1 else (batch.truncated & batch.mask).any(1)
    value = torch.where(last_action(batch.mask), batch.next_value, batch.next_value.new_zeros(())).sum(1)
    return torch.where(cut, value, torch.zeros_like(value))


@dataclass
class TurnClip:
    """Clipped surrogate of the turn's geometric mean ratio, a mean over tokens."""

    clip_low: float = 0.2  # the ratio may fall to 1 - clip_low, in [0,1]
    clip_high: float = 0.2  # and rise to 1 + clip_high, >= 0

    needs = frozenset({"logp"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        turns = steps_of(batch, batch.counted)
        found = turn_surrogate(new.logp, batch.logp, batch.advantage, turns, self.clip_low, self.clip_high)
        return Loss(found.loss, ratio_metrics(found.ratio, 1 - self.clip_low, 1 + self.clip_high, batch.counted))


METHOD = PPO.but(
    name="mpo",
    paper=Paper("MPO: multiscale (turn and token) policy optimization"),
    domain="language",
    summary="GAE and ratios by turn, each turn's advantage shared among its tokens without moving its mean",
    select=UniformPrompts(group_size=8),
    credit=MultiscaleGAE(),
    objective=TurnClip(),
    regularize=(ValueLoss(coefficient=0.5),),
    update=GradientSteps(epochs=2, minibatches=2),
)
