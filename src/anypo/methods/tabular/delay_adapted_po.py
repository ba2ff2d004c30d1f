"""DAPO: delay-adapted policy optimization (arXiv:2305.07911).

What an episode cost is only revealed some episodes later, when another policy is at play. An importance-weighted estimate divides by the probability
under the policy that played and blows up on actions that have become likely since; here it is divided by the larger of the two probabilities, the
exploration bonus is adapted in the same way, and every state keeps its cheap multiplicative-weights update. Against the same update with plain
estimates only that denominator changes. The abstract states setting and results; equations 1-4 and 6 are recalled, the bonus's constants and the
center of the deep form's clip range are [reconstructed]. Left out: unknown transitions (an upper confidence occupancy in place of the exact one) and
linear Q functions. The deep form, DAPPO, is the objective `DelayAdaptedSurrogate`, to be put into any method whose trajectories arrive late.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.tabular import mdp
from anypo.domains.tabular.delayed import FLOOR, DelayedFeedback, MultiplicativeWeights, multiplicative_weights
from anypo.domains.tabular.policy import ExpectedAdvantage, at_states
from anypo.method import Method, Paper
from anypo.policy import Loss, Signals
from anypo.seams.credit import dense_reward
from anypo.seams.groups import masked_mean
from anypo.seams.objective import LOG_RATIO_LIMIT, clipped, ratio_metrics
from anypo.seams.reward import TaskReward
from anypo.seams.select import UniformPrompts

if TYPE_CHECKING:
    from anypo.run import Run

Table = Float[Tensor, "... H S A"]
PerState = Float[Tensor, "... H S"]


class Occupancy(NamedTuple):
    occupancy: Tensor  # [...,H,S]


class Estimate(NamedTuple):
    ratio: Tensor  # [...,H,S,A] in (0,1]
    q: Tensor  # [...,H,S,A]


class Bonus(NamedTuple):
    local: Tensor  # [...,H,S]
    bonus: Tensor  # [...,H,S,A]


class Updated(NamedTuple):
    policy: Tensor  # [...,A]


class Arrivals(NamedTuple):
    matrix: Tensor  # [K,K] int64


class DelayedLoss(NamedTuple):
    loss: Tensor
    ratio: Tensor  # [N,T]


def occupancy(transition: Float[Tensor, "... H S A S"], policy: Table, start: int = 0) -> Occupancy:
    """Probability of each state at each step, from the state `start`."""
    first = torch.zeros_like(policy[..., 0, :, 0])
    first[..., start] = 1
    return Occupancy(mdp.occupancy(transition, policy, first))


def adapted_ratio(play: Tensor, arrive: Tensor) -> Tensor:
    """Equation 2: the probability under the policy that played over the larger of it and that of the policy at arrival."""
    play = play.clamp(min=FLOOR)
    return play / torch.maximum(play, arrive)


def inverse_weight(ratio: Tensor, occupancy: Tensor, play: Tensor, explore: float) -> Tensor:
    """What a loss to go is multiplied by (equation 3); 0 where nothing can happen and explore is 0."""
    chance = occupancy * play.clamp(min=FLOOR) + explore
    return torch.where(chance > 0, ratio / chance.clamp(min=1e-300), torch.zeros_like(chance))


def q_estimate(
    states: Int[Tensor, "... H"], actions: Int[Tensor, "... H"], losses: Float[Tensor, "... H"], occupancy: PerState, policy_play: Table,
    policy_arrive: Table, explore: float = 0.02,
) -> Estimate:  # fmt: skip
    """Equations 1-3: the weighted loss to go at what was played, 0 elsewhere."""
    ratio = adapted_ratio(policy_play, policy_arrive)
    visited = torch.nn.functional.one_hot(states, policy_play.shape[-2])[..., None]
    played = visited * torch.nn.functional.one_hot(actions, policy_play.shape[-1])[..., None, :]
    to_go = losses.flip(-1).cumsum(-1).flip(-1)[..., None, None]
    return Estimate(ratio, played * to_go * inverse_weight(ratio, occupancy[..., None], policy_play, explore))


def bonus(
    transition: Float[Tensor, "... H S A S"], occupancy: PerState, policy_play: Table, policy_arrive: Table, explore: float, horizon: int
) -> Bonus:
    """Equation 4: a local bonus for what the estimate misses by `explore`, and its sum over the episode under the policy at arrival."""
    weight = inverse_weight(adapted_ratio(policy_play, policy_arrive), occupancy[..., None], policy_play, explore)
    local = 3 * explore * horizon * (weight * policy_arrive).sum(-1)
    return Bonus(local, mdp.evaluate(transition, policy_arrive, local[..., None].expand_as(policy_arrive)).q)


def update(policy: Table, q_list: Float[Tensor, "n H S A"] | list, bonus_list: Float[Tensor, "n H S A"] | list, eta: float) -> Updated:
    """Equation 5: one step with everything that arrived; the policy itself when nothing did."""
    if len(q_list) == 0:
        return Updated(policy)
    return Updated(multiplicative_weights(policy, torch.as_tensor(q_list).sum(0) - torch.as_tensor(bonus_list).sum(0), eta))


def arrivals(delays: Int[Tensor, " K"]) -> Arrivals:
    """[k,j] is 1 where the feedback of episode j arrives at the end of episode k; what would arrive later than the last one is lost."""
    episode = torch.arange(len(delays))
    return Arrivals((episode[:, None] == (episode + delays)[None]).long())


def dappo_loss(
    logp: Float[Tensor, "N T"], old_logp: Float[Tensor, "N T"], arrival_logp: Float[Tensor, "N T"], advantages: Float[Tensor, "N T"],
    mask: Tensor, clip: float = 0.2,
) -> DelayedLoss:  # fmt: skip
    """Equation 6: clipped surrogate, the ratio over the larger of the playing (`old`) and the arriving probability. Padding may hold anything."""
    ratio, center = _ratios(logp, old_logp, arrival_logp, mask)
    advantages = torch.where(mask.bool(), advantages, torch.zeros_like(advantages)).detach()
    return DelayedLoss(-masked_mean(clipped(ratio, advantages, center * (1 - clip), center * (1 + clip)), mask), ratio)


def _ratios(logp: Tensor, old_logp: Tensor, arrival_logp: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """New and arriving probability over the larger of the playing and the arriving one."""
    larger = torch.maximum(old_logp, arrival_logp).detach()
    differences = (logp - larger, arrival_logp.detach() - larger)
    new, center = (torch.where(mask.bool() | d.isfinite(), d, 0.0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp() for d in differences)
    return new, center


@dataclass
class DelayAdaptedLoss:
    """Minus the estimate of equation 3 at what was played."""

    explore: float = 0.02  # added to the chance of what was played, >= 0
    adapt: bool = True  # False = the plain estimate, divided by the probability under the policy that played

    needs = frozenset({"old_table"})

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        place = (torch.arange(len(batch))[:, None], torch.arange(batch.horizon), batch.context)
        here, play = batch.signal("occupancy")[place], batch.signal("play_table")[(*place, batch.action)]
        arrive = at_states(batch.signal("old_table"), batch).gather(-1, batch.action[..., None])[..., 0]
        weight = inverse_weight(adapted_ratio(play, arrive if self.adapt else play), here, play, self.explore)
        return dense_reward(batch).flip(1).cumsum(1).flip(1) * weight


@dataclass
class DelayAdaptedBonus:
    """Equation 4 for every episode that arrived, taken off the losses of all states and actions."""

    explore: float = 0.02  # that of the credit

    needs = frozenset({"table", "old_table"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        copy, came = batch.signal("prompt_id"), batch.counted.any(1)
        play, transition = batch.signal("play_table"), run.task.transition[copy]  # type: ignore[attr-defined]
        found = bonus(transition, batch.signal("occupancy"), play, batch.signal("old_table")[copy], self.explore, batch.horizon).bonus
        return Loss(-(found * new.table[copy])[came].sum(), {"bonus": float(found[came].sum() / max(found[came].numel(), 1))})


@dataclass
class DelayAdaptedSurrogate:
    """DAPPO: `dappo_loss` with the log-probs that the batch was written with, and those under the policy that receives it."""

    clip: float = 0.2  # half-width of the trust region relative to the policy at arrival, in [0,1]

    needs = frozenset({"logp", "old_logp"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        found = dappo_loss(new.logp, batch.logp, batch.signal("old_logp"), batch.advantage, batch.counted, self.clip)
        center = _ratios(new.logp, batch.logp, batch.signal("old_logp"), batch.counted)[1]
        return Loss(found.loss, ratio_metrics(found.ratio, center * (1 - self.clip), center * (1 + self.clip), batch.counted))


METHOD = Method(
    name="delay_adapted_po",
    paper=Paper(
        "Delay-Adapted Policy Optimization and Improved Regret for Adversarial MDP with Delayed Bandit Feedback", "2305.07911", 2023
    ),
    domain="tabular",
    summary="bandit feedback that arrives late: loss estimates divided by the larger of the playing and the arriving probability",
    select=UniformPrompts(group_size=1),
    rollout=DelayedFeedback(),
    reward=TaskReward(),
    credit=DelayAdaptedLoss(),
    objective=ExpectedAdvantage(),
    regularize=(DelayAdaptedBonus(),),
    update=MultiplicativeWeights(),
    loop="tabular",
)
