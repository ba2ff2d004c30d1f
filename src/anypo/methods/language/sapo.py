"""SAPO: single-rollout autoregressive policy and value (arXiv:2608.19842).

PPO keeps a critic of its own, GRPO many rollouts a prompt. SAPO has one rollout a task and one backbone: values are read from the output layer at
causal boundaries, V where an observation ends and Q where the reply ends, as the bounded difference of the logits of two reserved entries that are
never sampled. The policy learns from GAE over turns, V from lambda-returns, Q from on-policy SARSA targets (it shapes the backbone, the policy's
advantage never uses it); advantages are standardized over the turns of the batch. The read-out, the estimator and the targets are from a detailed
note on the paper; the form of the invalid-action correction, of value clipping and the defaults are [reconstructed].

A policy provides the difference of the two reserved logits as its raw `value` (before each action) and `action_value` (after it). As only the
difference enters, its value head is one more row of the output layer. Turns are the batch's `segment`; without segments a row is one turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.control.ppo import METHOD as PPO
from anypo.policy import Loss, Signals
from anypo.seams.credit import gae
from anypo.seams.groups import masked_mean
from anypo.seams.objective import ClippedSurrogate, clipped, token_ratio
from anypo.seams.regularize import EntropyBonus, KLPenalty
from anypo.seams.regularize import value_loss as critic_loss
from anypo.seams.select import UniformPrompts
from anypo.seams.steps import StepGAE, Steps, standardized, step_rewards, steps_of
from anypo.seams.update import GradientSteps

if TYPE_CHECKING:
    from anypo.run import Run

PerTurn = Float[Tensor, " S"]


class Targets(NamedTuple):
    """[S] each, without gradient through the values of the policy that acted."""

    raw_advantage: Tensor  # generalized advantage over turns
    y_v: Tensor  # lambda-return
    y_q: Tensor  # one-step SARSA


def value_read(z_plus: Tensor, z_minus: Tensor, tau_v: float | Tensor = 10.0, R_max: float | Tensor = 1.0) -> Tensor:
    """Equations 1-2: R_max times (z+ - z-) / tau_v, clipped to [-1,1]; no gradient where it is clipped. `tau_v` > 0."""
    return R_max * ((z_plus - z_minus) / tau_v).clamp(-1, 1)


def targets(
    turn_reward: PerTurn, value: PerTurn, q_value: PerTurn, done: Tensor, traj: Int[Tensor, " S"], gamma: float = 0.99, lam: float = 0.95,
    bootstrap: PerTurn | None = None,
) -> Targets:  # fmt: skip
    """Equations 3-4. The turns of a trajectory come in order, trajectories may be mixed. `bootstrap` [S]: the value of the state after a
    trajectory's last turn where it was cut short, for V and Q alike [reconstructed]; None = 0."""
    _, row, count = torch.unique(traj, return_inverse=True, return_counts=True)
    order = row.argsort(stable=True)
    place = torch.empty_like(row)
    place[order] = torch.arange(len(row), device=row.device) - (count.cumsum(0) - count)[row[order]]
    inside = torch.arange(int(count.max()) if len(count) else 0, device=row.device) < count[:, None]

    def table(values: Tensor) -> Tensor:
        return value.new_zeros(inside.shape).index_put((row, place), values.to(value))

    def next_table(values: Tensor) -> Tensor:
        after = torch.cat([table(values)[:, 1:], value.new_zeros(len(count), 1)], dim=1)
        last = place == count[row] - 1
        return after if bootstrap is None else after.index_put((row[last], place[last]), bootstrap[last].to(value))

    ended, never = table(done), torch.zeros_like(inside)
    found = gae(table(turn_reward), table(value), ended, never, inside, gamma, lam, next_value=next_table(value))
    y_q = table(turn_reward) + gamma * (1 - ended) * next_table(q_value)
    return Targets(found.advantages[row, place], found.returns[row, place], y_q[row, place])


def advantages(
    turn_reward: PerTurn, value: PerTurn, q_value: PerTurn, done: Tensor, traj: Int[Tensor, " S"], invalid: Tensor, gamma: float = 0.99,
    lam: float = 0.95, c_inv: float = 0.1, bootstrap: PerTurn | None = None,
) -> PerTurn:  # fmt: skip
    """Equations 3, 5 and 6: minus c_inv for an invalid turn, then standardized over all turns (unbiased deviation); a lone turn has 0."""
    raw = targets(turn_reward, value, q_value, done, traj, gamma, lam, bootstrap).raw_advantage
    return standardized(raw - c_inv * invalid.to(raw))


def value_loss(value: PerTurn, value_old: PerTurn, target: PerTurn, clip: float | None = 0.2) -> Tensor:
    """Equation 7: half the mean over turns of the larger of the plain and the clipped squared error; 0 without turns."""
    return 0.5 * critic_loss(value, target, torch.ones_like(value, dtype=torch.bool), value_old, clip)


def policy_loss(
    logp: Float[Tensor, "N T"], old_logp: Float[Tensor, "N T"], mask: Tensor, turn_id: Int[Tensor, "N T"], advantage: PerTurn, clip: float = 0.2
) -> Tensor:  # fmt: skip
    """Equation 7: minus the token mean of the clipped surrogate; every token has the advantage of its turn (-1: in none)."""
    inside = mask.bool() & (turn_id >= 0)
    spread = torch.where(inside, advantage[turn_id.clamp(min=0)], advantage.new_zeros(()))
    return -masked_mean(clipped(token_ratio(logp, old_logp, inside), spread, 1 - clip, 1 + clip), inside)


def turn_ends(steps: Steps) -> Bool[Tensor, "N T"]:
    """The last token of each turn, where its Q is read."""
    inside = steps.number >= 0
    number = steps.number[inside]
    last = torch.ones_like(number, dtype=torch.bool)
    last[:-1] = number[1:] != number[:-1]
    return torch.zeros_like(inside).masked_scatter(inside, last)


def invalid_turns(batch: Batch, steps: Steps) -> Tensor:
    """[S] bool from the signal `invalid_turn` [N,turns], which a task with invalid actions gives; all valid without it."""
    if "invalid_turn" not in batch.signals:
        return torch.zeros_like(steps.traj, dtype=torch.bool)
    return batch.signals["invalid_turn"].bool()[steps.traj, steps.segment]


@dataclass
class SharedValueGAE(StepGAE):
    """Standardized advantages of turns from the values read at their boundaries. Leaves in the batch the targets, each at the token of its boundary,
    and the scale of the read-out. A truncated row takes the value after it from `batch.next_value` where there is one."""

    lam: float = 0.95  # trace decay a turn, in [0,1]
    tau_v: float = 10.0  # > 0, logit difference that means the largest return; large enough that values are rarely clipped
    R_max: float = 1.0  # > 0, the largest return
    c_inv: float = 0.1  # >= 0, what an invalid action costs its turn

    needs = frozenset({"old_value", "old_action_value"})
    gives = frozenset({"returns", "action_returns", "value_scale"})

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        steps = steps_of(batch, batch.mask)
        start, end = steps.start, turn_ends(steps)
        value, q_value = (self.read(batch.signal(name)[at]) for name, at in (("old_value", start), ("old_action_value", end)))
        after = self.after(batch, steps)
        after = None if after is None else self.read(after)  # 0 where a row ended, which makes a flag needless
        given = (step_rewards(batch, steps), value, q_value, torch.zeros_like(value), steps.traj)
        found = targets(*given, self.gamma, self.lam, after)
        corrected = found.raw_advantage - self.c_inv * invalid_turns(batch, steps).to(value)
        batch.signals["returns"] = torch.zeros_like(batch.logp, dtype=value.dtype).masked_scatter(start, found.y_v)
        batch.signals["action_returns"] = torch.zeros_like(batch.logp, dtype=value.dtype).masked_scatter(end, found.y_q)
        batch.signals["value_scale"] = value.new_tensor([self.tau_v, self.R_max]).repeat(len(batch), 1)
        advantage = standardized(corrected) if self.normalize else corrected
        spread = torch.zeros_like(batch.logp, dtype=value.dtype)
        spread[batch.mask] = advantage[steps.number[batch.mask]]
        return spread

    def read(self, difference: Tensor) -> Tensor:
        return value_read(difference, torch.zeros_like(difference), self.tau_v, self.R_max)


@dataclass
class BoundaryValueLoss:
    """Clipped regression of V where turns begin and of Q where they end, onto the targets that the credit left; one mean over turns each."""

    coefficient: float = 0.5  # c_V, >= 0
    action_coefficient: float = 0.25  # c_Q, >= 0; 0 leaves Q out
    clip: float | None = 0.2  # c_v, > 0, in units of the return; None = no clipping

    wants = frozenset({"returns", "action_returns", "value_scale"})

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"value", "action_value"} if self.action_coefficient else {"value"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        steps = steps_of(batch, batch.mask)  # boundaries belong to the reply, whichever of its tokens count
        loss = self.part(batch, new.value, "value", "returns", steps.start)
        metrics = {"value_loss": float(loss.detach())}
        total = self.coefficient * loss
        if self.action_coefficient:
            loss = self.part(batch, new.action_value, "action_value", "action_returns", turn_ends(steps))
            metrics["action_value_loss"] = float(loss.detach())
            total = total + self.action_coefficient * loss
        return Loss(total, metrics)

    def part(self, batch: Batch, difference: Tensor, name: str, target: str, at: Tensor) -> Tensor:
        tau_v, largest = batch.signal("value_scale")[at.nonzero()[:, 0]].unbind(1)
        now, old = (value_read(z[at], torch.zeros_like(z[at]), tau_v, largest) for z in (difference, batch.signal(f"old_{name}")))
        return value_loss(now, old, batch.signal(target)[at], self.clip)


METHOD = PPO.but(
    name="sapo",
    paper=Paper("SAPO: single-rollout autoregressive policy and value", "2608.19842", 2026),
    domain="language",
    summary="one rollout a task; V and Q are read from the policy's own output layer where turns begin and end, GAE over turns",
    select=UniformPrompts(group_size=1),
    credit=SharedValueGAE(),
    objective=ClippedSurrogate(clip_low=0.2, clip_high=0.2, aggregation="token_mean"),
    regularize=(BoundaryValueLoss(), KLPenalty(beta=0.01, aggregation="token_mean"), EntropyBonus(coefficient=0.001)),
    update=GradientSteps(epochs=2, minibatches=2),
)
