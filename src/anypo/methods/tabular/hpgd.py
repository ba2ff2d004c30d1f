"""HPGD: hyper policy gradient descent (arXiv:2406.01575).

Two levels: a leader's parameters x, together with a random context, decide the Markov decision process of a follower, who plays its
entropy-regularized best response softmax(Q*/reg). The leader's gradient goes through that response: its log-probability changes by dA*/reg, and the
follower's advantage gradient dA* can be had from its trajectories, whatever algorithm trained it. Against a policy gradient the parameters are
those of the rewards and the moves are the follower's. Equation numbers are the specification's; 2 and 7 are recalled from the publication, 3 is
derived, 4 and 6 agree with the authors' code; here the leader maximizes. [reconstructed]: dA* comes from discounted sums along the batch's own
trajectories, not from extra ones of geometric length, and the leader evaluates its own reward exactly. Left out: dynamics that depend on x, leaders that
are no sums over steps (equation 5).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.tabular.leader import IncentiveRooms, LeaderPolicy, chain, discounted_values, soft_response
from anypo.method import Method, Paper
from anypo.policy import Loss, Signals
from anypo.seams.reward import TaskReward
from anypo.seams.rollout import OnPolicy
from anypo.seams.select import UniformPrompts
from anypo.seams.update import GradientSteps, clip_parameters

if TYPE_CHECKING:
    from anypo.run import MethodLoss, Run

Transition = Float[Tensor, "... S A S"]
Table = Float[Tensor, "... S A"]
Slopes = Float[Tensor, "... S A k"]


class Hypergradient(NamedTuple):
    objective: Tensor  # [...] F of the context
    policy: Tensor  # [...,S,A] the follower's
    follower_value: Tensor  # [...,S] soft value
    advantage_gradient: Tensor  # [...,S,A,k] dA*
    direct: Tensor  # [...,k]
    indirect: Tensor  # [...,k] through the best response
    total: Tensor  # [...,k]


class Total(NamedTuple):
    total: Tensor  # [k]


class Gradient(NamedTuple):
    gradient: Tensor  # [k]


class Truncated(NamedTuple):
    gradient: Tensor  # [d]
    expectation: Tensor  # [d]


def advantage_gradient(transition: Transition, policy: Table, reward_gradient: Slopes, gamma: float) -> Slopes:
    """Equation 3: dA = dQ - dV of a follower whose reward changes by `reward_gradient`; its mean under the policy is 0. Linear in it."""
    own = torch.einsum("...sa,...sak->...sk", policy, reward_gradient)
    value = torch.linalg.solve(chain(transition, policy, gamma), own)
    return reward_gradient + gamma * torch.einsum("...sat,...tk->...sak", transition, value) - value[..., None, :]


def visits(transition: Transition, policy: Table, start: Float[Tensor, "... S"], discount: float) -> Float[Tensor, "... S"]:
    """Discounted visits of each state, not normalized."""
    leave = chain(transition, policy, discount)
    return torch.linalg.solve(leave.mT, start.expand(leave.shape[:-1]))


def hypergradient(
    transition: Transition, reward: Table, reward_gradient: Slopes, leader_reward: Table, leader_reward_gradient: Slopes,
    start: Float[Tensor, "... S"], gamma: float, gamma_leader: float, reg: float,
) -> Hypergradient:  # fmt: skip
    """Equations 1-4, exactly, for the follower's best response. `reg` > 0, discounts in [0,1)."""
    policy, value = soft_response(transition, reward, gamma, reg)
    change = advantage_gradient(transition, policy, reward_gradient, gamma)
    leader_q, leader_value = discounted_values(transition, policy, leader_reward, gamma_leader)
    weight = visits(transition, policy, start, gamma_leader)[..., None] * policy
    direct = torch.einsum("...sa,...sak->...k", weight, leader_reward_gradient)
    centred = leader_q - leader_value[..., None]
    indirect = torch.einsum("...sa,...sak->...k", weight * centred / reg, change)
    return Hypergradient((start * leader_value).sum(-1), policy, value, change, direct, indirect, direct + indirect)


def context_hypergradient(
    transition: Transition, rewards: Float[Tensor, "X S A"], reward_gradient: Slopes, leader_reward: Table, leader_reward_gradient: Slopes,
    start: Float[Tensor, " S"], context_prob: Float[Tensor, " X"], gamma: float, gamma_leader: float, reg: float,
) -> Total:  # fmt: skip
    """The mean over contexts that differ in the follower's reward."""
    each = hypergradient(transition, rewards, reward_gradient, leader_reward, leader_reward_gradient, start, gamma, gamma_leader, reg)
    return Total(context_prob @ each.total.expand(len(rewards), -1))


def trajectory(
    advantage_gradient: Float[Tensor, "N T k"], leader_q: Float[Tensor, "N T"], leader_reward_gradient: Float[Tensor, "N T k"],
    mask: Bool[Tensor, "N T"], gamma_leader: float, reg: float,
) -> Gradient:  # fmt: skip
    """Equation 4 along trajectories: mean over rows of the discounted sums of what is in its brackets."""
    each = leader_reward_gradient + advantage_gradient * leader_q[..., None] / reg
    each = torch.where(mask[..., None].bool(), each, torch.zeros_like(each))
    return Gradient((discounts(mask, gamma_leader)[..., None] * each).sum(1).mean(0))


def discounts(mask: Bool[Tensor, "N T"], discount: float) -> Float[Tensor, "N T"]:
    """discount^t where something happens, 0 elsewhere."""
    return mask * torch.full(mask.shape[1:], discount, dtype=torch.float64) ** torch.arange(mask.shape[1])


def return_to_go(reward: Float[Tensor, "N T"], discount: float) -> Float[Tensor, "N T"]:
    """Discounted sum from each step on."""
    t = torch.arange(reward.shape[1])
    later = (t[:, None] - t).clamp(min=0)
    return reward @ (torch.tensor(discount).to(reward) ** later).tril()


def truncated(first: Tensor, coarse: Tensor, fine: Tensor, probability: float | Tensor) -> Tensor:
    """Equation 7 from its three levels: g_0 + (g_k - g_{k-1}) / p_k."""
    return first + (fine - coarse) / probability


def rt_estimator(levels: Float[Tensor, "K1 d"], probability: Float[Tensor, " K"], k: int) -> Truncated:
    """Equation 7 for the drawn k in 1..K; its expectation over k is the finest level, if the probabilities sum to 1."""
    each = truncated(levels[:1], levels[:-1], levels[1:], probability[:, None])
    return Truncated(each[k - 1], probability @ each)


def level_chances(levels: int) -> Float[Tensor, " K"]:
    """p_k in proportion to 2^-k for k = 1..K."""
    raw = 0.5 ** torch.arange(1, levels + 1, dtype=torch.float64)
    return raw / raw.sum()


def game_of(run: Run) -> IncentiveRooms:
    """The run's task. Raises ValueError when it has no leader."""
    if not isinstance(run.task, IncentiveRooms):
        raise ValueError(
            f"{run.method.name} trains a leader, which the task '{run.task.name}' does not have; use incentive_rooms or four_rooms"
        )
    return run.task


@dataclass
class LeaderAdvantage:
    """The leader's Q - V of the follower's moves: Q alone has the same expectation and more variance."""

    needs = frozenset({"old_leader_advantage"})

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        found = batch.signal("old_leader_advantage")
        return torch.where(batch.mask, found, torch.zeros_like(found))


@dataclass
class TrajectoryHypergradient:
    """Equation 4 from trajectories of the follower, for any per-move advantages. Its value is minus the leader's return and that weighted one."""

    needs = frozenset({"follower_reward", "leader_reward"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        game = game_of(run)
        ahead_of = return_to_go(torch.where(batch.mask, new.follower_reward, torch.zeros_like(new.follower_reward)), game.gamma)
        gained = new.leader_reward + batch.advantage.detach() * ahead_of / game.reg
        return Loss(-(discounts(batch.counted, game.gamma_leader) * gained).sum(1).mean())


@dataclass
class ExactHypergradient:
    """Equation 4 in expectation over all contexts, moves and cells; its value is minus F, with the hypergradient as its derivative."""

    needs = frozenset({"follower_policy", "reward_table", "leader_table"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        game, policy = game_of(run), new.follower_policy.detach()
        change = advantage_gradient(game.transition, policy, new.reward_table[..., None], game.gamma)[..., 0]
        leader_q, leader_value = discounted_values(game.transition, policy, new.leader_table.detach(), game.gamma_leader)
        weight = visits(game.transition, policy, game.start, game.gamma_leader)[..., None] * policy
        through_response = (leader_q - leader_value[..., None]) * (change - change.detach()) / game.reg
        return Loss(-(weight * (new.leader_table + through_response)).sum((-2, -1)).mean())


@dataclass
class TruncatedSteps(GradientSteps):
    """Equation 7: each step is made of the gradients at three lengths of the follower's training, n, n 2^(k-1) and n 2^k iterations, for a random k."""

    levels: int = 4  # K, >= 1
    first: int = 16  # n, iterations of the shortest training, >= 1

    def one_step(self, part: Batch, loss_fn: MethodLoss, optimizer: torch.optim.Optimizer, run: Run) -> dict[str, float]:
        if not isinstance(run.policy, LeaderPolicy):
            raise ValueError(
                f"{run.method.name} decides how long the follower trains, which needs a leader's task; use incentive_rooms or four_rooms"
            )
        chances = level_chances(self.levels)
        k = int(torch.multinomial(chances, 1, generator=run.generator)) + 1
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        found: dict[int, list[Tensor]] = {}
        for level in sorted({0, k - 1, k}):  # the follower goes on from the shorter training
            run.policy.limit(self.first * 2**level)
            for parameter in parameters:
                parameter.grad = None
            loss = run.backward(part, loss_fn)
            found[level] = [p.grad.clone() if p.grad is not None else torch.zeros_like(p) for p in parameters]
        run.policy.limit(None)
        for parameter, first, coarse, fine in zip(parameters, found[0], found[k - 1], found[k], strict=True):
            parameter.grad = truncated(first, coarse, fine, chances[k - 1])
        norm = float(clip_parameters(parameters, self.max_grad_norm))
        optimizer.step()
        run.advance_version()
        return {"loss": float(loss.value), **loss.metrics, "grad_norm": norm, "level": float(k)}


METHOD = Method(
    name="hpgd",
    paper=Paper("Contextual Bilevel Reinforcement Learning for Incentive Alignment", "2406.01575", 2024),
    domain="tabular",
    summary="a leader's gradient through the follower's entropy-regularized best response, from the follower's trajectories alone",
    task="incentive_rooms",
    select=UniformPrompts(group_size=4),
    rollout=OnPolicy(),
    reward=TaskReward(),
    credit=LeaderAdvantage(),
    objective=TrajectoryHypergradient(),
    update=GradientSteps(learning_rate=0.5, optimizer="sgd", max_grad_norm=1.0),
)

_EXACT: Any = METHOD.but(
    name="hpgd.exact",
    summary="the expectation over contexts and trajectories in place of samples",
    select=UniformPrompts(prompts=1, group_size=1),
    objective=ExactHypergradient(),
    update=GradientSteps(learning_rate=1.0, optimizer="sgd", max_grad_norm=1.0),
)

VARIANTS = {
    "exact": _EXACT,
    "truncated": _EXACT.but(
        name="hpgd.truncated",
        summary="the follower trains for a random number of iterations, and the gradient stays unbiased for the longest",
        update=TruncatedSteps(learning_rate=1.0, optimizer="sgd", max_grad_norm=1.0),
    ),
}
