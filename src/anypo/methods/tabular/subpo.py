"""SubPO: submodular reinforcement learning (arXiv:2307.13372).

Policy gradient where a path is worth a submodular function F of the states it visits, so that rewards depend on the whole past. Against REINFORCE
the reward changes: the marginal gain of each new state given the path so far, the present state included; an action earns the gain of the state
it leads to. Gains telescope, so that the return to go is an unbiased estimate; the baseline may depend on the past. Set functions and graphs are in
the tabular domain. Equations 1-3 are the paper's, the set functions and the modular baseline are known from the authors' code. Left out: scaling
returns by a constant (Adam's step does not depend on it) and the continuous environments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.tabular.set_functions import SetFunction, coverage, marginals, set_value
from anypo.method import Method, Paper
from anypo.policy import Loss, Signals
from anypo.seams.credit import dense_reward
from anypo.seams.groups import group_mean
from anypo.seams.regularize import EntropyBonus
from anypo.seams.rollout import OnPolicy
from anypo.seams.select import UniformPrompts
from anypo.seams.update import GradientSteps

if TYPE_CHECKING:
    from anypo.run import Run

__all__ = ["METHOD", "VARIANTS", "advantages", "exact_gradient", "marginals", "objective", "policy_loss", "set_value"]
BASELINES = ("mean", "none")


class PathLoss(NamedTuple):
    advantages: Tensor  # [N,T]
    loss: Tensor


def advantages(gains: Float[Tensor, "N T"], group: Int[Tensor, " N"], baseline: str = "mean") -> Float[Tensor, "N T"]:
    """Equation 4: the sum of gains from each action on, undiscounted, minus its mean over the group at that time ("none": minus nothing)."""
    if baseline not in BASELINES:
        raise ValueError(f"unknown baseline '{baseline}'; use {' or '.join(BASELINES)}")
    to_go = gains.flip(1).cumsum(1).flip(1)
    return to_go - group_mean(to_go, group) if baseline == "mean" else to_go


def score_loss(logp: Float[Tensor, "N T"], advantage: Float[Tensor, "N T"], mask: Tensor) -> Tensor:
    """Minus the sum over a path's actions of log-prob times (detached) advantage, mean over paths."""
    inside = mask.bool()
    zero = logp.new_zeros(())
    weighted = torch.where(inside, logp, zero) * torch.where(inside, advantage.detach(), advantage.new_zeros(()))
    return -weighted.sum() / max(len(logp), 1)


def policy_loss(gains: Float[Tensor, "N T"], logp: Float[Tensor, "N T"], baseline: str = "mean") -> PathLoss:
    """Equation 4 for paths from one start; `gains` [N,T] of the states that the actions lead to."""
    found = advantages(gains, torch.zeros(len(gains), dtype=torch.int64), baseline)
    return PathLoss(found, score_loss(logp, found, torch.ones_like(gains)))


def all_paths(next_state: Int[Tensor, "S A"], start: int, moves: int) -> tuple[Int[Tensor, "M H"], Int[Tensor, "M T"]]:
    """Every sequence of `moves` actions, and the states it visits: A^moves rows."""
    actions = torch.cartesian_prod(*[torch.arange(next_state.shape[1])] * moves).reshape(-1, moves)
    path = [torch.full((len(actions),), start)]
    for t in range(moves):
        path.append(next_state[path[-1], actions[:, t]])
    return torch.stack(path, dim=1), actions


def objective(theta: Float[Tensor, "T S A"], next_state: Int[Tensor, "S A"], start: int, function: SetFunction) -> Tensor:
    """Equation 1, exactly: expected F of the softmax policy's path, by enumeration."""
    states, actions = all_paths(next_state, start, len(theta))
    return (_log_probs(theta, states, actions).sum(1).exp() * function.value(states)).sum()


def exact_gradient(
    theta: Float[Tensor, "T S A"], next_state: Int[Tensor, "S A"], start: int, cover: Float[Tensor, "S C"], weight: Float[Tensor, " C"]
) -> Float[Tensor, "T S A"]:
    """Equation 3 for weighted coverage, its expectation by enumeration of all paths: gradient of J in the logits."""
    theta = theta.detach().requires_grad_()
    states, actions = all_paths(next_state, start, len(theta))
    logp = _log_probs(theta, states, actions)
    gains = coverage(states, cover.to(weight.dtype), weight).diff(dim=1)
    to_go = advantages(gains, torch.zeros(len(gains), dtype=torch.int64), "none")
    expected = (logp.detach().sum(1).exp()[:, None] * logp * to_go).sum()
    return torch.autograd.grad(expected, theta)[0]


def _log_probs(theta: Tensor, states: Tensor, actions: Tensor) -> Float[Tensor, "M T"]:
    return theta.log_softmax(-1)[torch.arange(len(theta))[None], states[:, :-1], actions]


@dataclass
class MarginalGains:
    """What each action's next state adds to F given the path before it, [N,T]. Needs a task with a `set_function`."""

    modular: bool = (
        False  # True: what the state would add to an empty path, so that every visit is paid in full (the baseline of the paper)
    )

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        function = getattr(run.task, "set_function", None)
        if function is None or "path" not in batch.signals:
            raise ValueError(
                f"{run.method.name} is rewarded by a set function of the visited states, which the task '{run.task.name}' does not have; use "
                "coverage_grid, items_grid, information_grid or sets_bandit"
            )
        path = batch.signal("path")
        run.log(set_value=float(function.value(path).mean()))
        return (function.modular() if self.modular else function).gains(path).gains


@dataclass
class GainsToGo:
    """Returns to go of the dense reward, undiscounted, against their mean over the group at the same time."""

    baseline: str = "mean"  # mean or none

    @property
    def compares_group(self) -> bool:
        return self.baseline == "mean"

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        inside = batch.mask.bool()
        reward = dense_reward(batch)
        found = advantages(torch.where(inside, reward, torch.zeros_like(reward)), batch.group, self.baseline)
        return torch.where(inside, found, torch.zeros_like(found))


@dataclass
class PathReinforce:
    """Equation 4 over the batch."""

    needs = frozenset({"logp"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        assert batch.advantage is not None
        return Loss(score_loss(new.logp, batch.advantage, batch.counted))


METHOD = Method(
    name="subpo",
    paper=Paper("Submodular Reinforcement Learning", "2307.13372", 2023),
    domain="tabular",
    summary="rewards with diminishing returns: the policy gradient of a submodular function of the visited states, by marginal gains",
    task="coverage_grid",
    select=UniformPrompts(group_size=200),
    rollout=OnPolicy(),
    reward=MarginalGains(),
    credit=GainsToGo(),
    objective=PathReinforce(),
    regularize=(EntropyBonus(0.0),),
    update=GradientSteps(learning_rate=1e-2, optimizer="adam", max_grad_norm=None),
)

VARIANTS = {
    "modular": METHOD.but(
        name="subpo.modular",
        summary="the paper's baseline: rewards add up, every visit counts in full",
        reward=MarginalGains(modular=True),
    ),
}
