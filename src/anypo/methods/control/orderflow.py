"""Order flow: order-flow limit-order-book trading with PPO, GRPO and GSPO (arXiv:2605.25527).

A trader sees the order flow at the best quotes and chooses to be short, flat or long. Profits count in spreads, and losses more than gains. Several
attempts at the same market window are compared with one another, so that no critic has to learn what the market itself does; the variant `gspo` clips one
length-normalized ratio for the window, the variant `ppo` has a critic. Against PPO it changes the reward, the credit and the ratio. The baseline is tabular
Q-learning on binned flow. Equations 5 to 9 are here, 1 to 4 with the market in `domains/control/order_book.py`; the paper says that features are order
flow, rewards in spreads, groups normalized and losses weighted, the forms are [reconstructed]. Left out: the real data (a loader is there).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.control.collect import Actor, Trajectories, episodes
from anypo.domains.control.order_book import SEEN
from anypo.method import Paper
from anypo.methods.control.ppo import METHOD as PPO
from anypo.policy import Loss, Signals
from anypo.seams.credit import GAE, GroupRelative, group_relative
from anypo.seams.groups import broadcast
from anypo.seams.objective import ClippedSurrogate, aggregate, clipped, log_ratio, ratio_metrics, token_ratio
from anypo.seams.regularize import EntropyBonus, ValueLoss
from anypo.seams.select import UniformPrompts
from anypo.seams.update import GradientSteps

if TYPE_CHECKING:
    from anypo.domains.control.tasks import GymTask
    from anypo.run import Run

PerAction = Float[Tensor, "N T"]
FLOW, POSITION = SEEN.index("flow of 20"), SEEN.index("position")


def shaped(reward: PerAction, kappa: float) -> PerAction:
    """Equation 5: losses count 1 + kappa times."""
    return reward - kappa * (-reward).clamp(min=0)


def shaped_advantages(reward: PerAction, mask: Tensor, group: Int[Tensor, " N"], kappa: float, eps: float = 1e-6) -> PerAction:
    """Equation 6: shaped returns in deviations from those of the same window; 0 for lone rows and for groups without spread."""
    total = torch.where(mask.bool(), shaped(reward, kappa), torch.zeros_like(reward)).sum(1)
    return broadcast(group_relative(total, group, ddof=0, eps=eps), mask)


def window_ratio(logp: PerAction, old_logp: PerAction, mask: Tensor) -> Float[Tensor, " N"]:
    """Equation 7: exp of the mean log-ratio of a row's actions."""
    return (log_ratio(logp, old_logp, mask).sum(1) / mask.sum(1).clamp(min=1)).exp()


class Losses(NamedTuple):
    """Scalars, differentiable in logp."""

    grpo: Tensor
    gspo: Tensor


def window_loss(logp: PerAction, old_logp: PerAction, advantage: PerAction, mask: Tensor, clip: float) -> Tensor:
    """Equation 7, GSPO: every action has the window's ratio in value, its own gradient and its own advantage, which is the window's ratio times the
    advantage where all of a row's advantages are one."""
    ratio = window_ratio(logp, old_logp, mask).detach()[:, None] * log_ratio(logp, logp.detach(), mask).exp()
    return aggregate(-clipped(ratio, advantage, 1 - clip, 1 + clip), mask, "seq_mean")


def losses(logp: PerAction, old_logp: PerAction, advantage: Float[Tensor, " N"], mask: Tensor, clip: float) -> Losses:
    """Equation 7: with a ratio an action (GRPO), and with one for the window (GSPO)."""
    spread = broadcast(advantage, mask)
    by_action = aggregate(-clipped(token_ratio(logp, old_logp, mask), spread, 1 - clip, 1 + clip), mask, "seq_mean")
    return Losses(by_action, window_loss(logp, old_logp, spread, mask, clip))


class Metrics(NamedTuple):
    net_pnl: Tensor  # [N]
    profitability: Tensor  # share of episodes that ended above 0
    max_drawdown: Tensor  # [N], >= 0


def metrics(reward: PerAction) -> Metrics:
    """Equation 9 of profits that were not shaped; equity starts at 0."""
    equity = reward.cumsum(1)
    peak = equity.cummax(1).values.clamp(min=0)
    return Metrics(equity[:, -1], (equity[:, -1] > 0).to(equity.dtype).mean(), (peak - equity).amax(1))


def q_learning(table: Float[Tensor, "S A"], transitions: Float[Tensor, "M 4"], alpha: float = 0.1, gamma: float = 0.95) -> Tensor:
    """Equation 8: the table after transitions (state, action, reward, next state), one after another. `alpha` in (0,1], `gamma` in [0,1]."""
    values = table.tolist()
    for s, a, r, following in transitions.tolist():
        row, move = values[int(s)], int(a)
        row[move] += alpha * (r + gamma * max(values[int(following)]) - row[move])
    return table.new_tensor(values)


class QTable:
    """The baseline: five quantile bins of the flow over 20 events times three positions."""

    def __init__(self, flow: ArrayLike, alpha: float = 0.1, gamma: float = 0.95) -> None:
        """`flow`: values of the training windows, whose quantiles are the edges of the bins."""
        self.edges = np.quantile(np.asarray(flow), [0.2, 0.4, 0.6, 0.8])
        self.table, self.alpha, self.gamma = torch.zeros(15, 3, dtype=torch.float64), alpha, gamma

    def index(self, seen: NDArray) -> NDArray[np.int64]:
        """Rows of the table for observations [...,6]."""
        return np.searchsorted(self.edges, seen[..., FLOW]) * 3 + np.rint(seen[..., POSITION]).astype(np.int64) + 1

    def actor(self, rng: np.random.Generator | None = None, epsilon: float = 0.1) -> Actor:
        """The best known action; with `rng` another one, of all alike, in a share `epsilon` of the cases."""
        best = self.table.argmax(1).numpy()

        def act(seen: NDArray, noise: NDArray | None) -> NDArray:
            chosen = best[self.index(seen)]
            if rng is None:
                return chosen
            return np.where(rng.random(len(chosen)) < epsilon, rng.integers(3, size=len(chosen)), chosen)

        return act

    def learn(self, seen: Trajectories) -> None:
        """From whole episodes, one after another."""
        columns = [self.index(seen.observation), seen.action, seen.reward, self.index(seen.following)]
        rows = np.stack([np.asarray(x, dtype=np.float64)[seen.mask] for x in columns], axis=1)
        self.table = q_learning(self.table, torch.from_numpy(rows), self.alpha, self.gamma)


def trade(task: GymTask, act: Actor, seeds: ArrayLike, noise: Callable[[int], NDArray] | None = None) -> Trajectories:
    """Whole windows of these seeds, traded by a policy's `actor()`, which samples with `noise`, or by a `QTable`'s."""
    starts = np.asarray(seeds).tolist()
    return episodes(task.environments(len(starts)), starts, act, lambda action: action, noise)


@dataclass
class DownsideReward:
    """The task's profits with losses weighted more (equation 5)."""

    kappa: float = 1.0  # >= 0; 0 = as they are

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        return shaped(run.score_rewards(batch), self.kappa)


@dataclass
class WindowSurrogate:
    """Clipped surrogate of one length-normalized ratio for a whole window."""

    clip: float = 0.02  # the ratio stays within 1 - clip and 1 + clip, in (0,1)

    needs = frozenset({"logp"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        mask = batch.counted
        ratio = window_ratio(new.logp, batch.logp, mask)
        value = window_loss(new.logp, batch.logp, batch.advantage, mask, self.clip)
        return Loss(value, ratio_metrics(ratio, 1 - self.clip, 1 + self.clip, mask.any(1)))


METHOD = PPO.but(
    name="orderflow",
    paper=Paper("Order-flow limit-order-book trading with PPO, GRPO and GSPO", "2605.25527", 2026),
    kind="system",
    summary="trading on order flow: attempts at the same market window compared, losses weighted more than gains",
    task="OrderFlow-v0",
    select=UniformPrompts(prompts=16, group_size=8),
    reward=DownsideReward(),
    credit=GroupRelative(eps=1e-6),
    objective=ClippedSurrogate(clip_low=0.2, clip_high=0.2, aggregation="seq_mean"),
    regularize=(EntropyBonus(coefficient=0.01),),
    update=GradientSteps(epochs=4, minibatches=1, learning_rate=3e-3, optimizer="adam", max_grad_norm=0.5),
)

VARIANTS = {
    "gspo": METHOD.but(name="orderflow.gspo", summary="the same with one length-normalized ratio a window", objective=WindowSurrogate()),
    "ppo": METHOD.but(
        name="orderflow.ppo",
        summary="the same rewards with a critic instead of groups, and an average over all actions",
        select=UniformPrompts(group_size=1),
        credit=GAE(gamma=0.99, lam=0.95),
        objective=ClippedSurrogate(clip_low=0.2, clip_high=0.2, aggregation="token_mean"),
        regularize=(ValueLoss(coefficient=0.5), EntropyBonus(coefficient=0.01)),
    ),
}
