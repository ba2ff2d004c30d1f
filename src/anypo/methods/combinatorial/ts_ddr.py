"""TS-DDR: two-stage deep decision rules trained by Lagrangian duality (arXiv:2405.14973).

For problems whose every decision has hard constraints. The policy names target states (reservoir levels), not decisions; a deterministic program follows
them as closely as the constraints allow, and pays for the rest. So what is executed is feasible whatever the policy says, and the slope of the
program's optimal cost in a target is the multiplier of that target's constraint: no score function, and no gradient through the solver.
The algorithm, the penalty's phases and the score-function correction are from the paper's abstract and the authors' documentation; the equal
lengths of the phases and the sizes of the dispatch problem are [reconstructed]. The programs (equations 2 and 6) are the domain's, in
domains/combinatorial/hydro.py. Left out: AC power flow, multiple shooting, integer decisions (the correction for them is there: `objective.alpha`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.combinatorial import hydro
from anypo.domains.combinatorial.hydro_tasks import PENALTY_MULTIPLIER
from anypo.method import Method, Paper
from anypo.policy import Loss, Signals
from anypo.seams.credit import NoCredit
from anypo.seams.groups import group_mean
from anypo.seams.reward import TaskReward
from anypo.seams.select import UniformPrompts
from anypo.seams.update import GradientSteps
from anypo.task import Prompt

if TYPE_CHECKING:
    from anypo.run import Run

PHASES = (0.1, 1.0, 10.0, 30.0)  # of the penalty, one after another


class StageResult(NamedTuple):
    x: float  # the level that is left
    cost: float  # of generation and of distance from the target
    dual: float  # derivative of the cost in the target


class Rolled(NamedTuple):
    x: Tensor  # [T]
    cost: float


class Duals(NamedTuple):
    cost: float
    dual: Tensor  # [T]


class AffineGradient(NamedTuple):
    a: Tensor  # [T]
    b: Tensor  # [T]


class ScoreFunction(NamedTuple):
    loss: Tensor
    gradient: Tensor  # [T], in the target


def _setting(D: float, u_max: float, x_max: float, c1: float, g1: float, c2: float, C_d: float, months: int = 1) -> hydro.HydroSetting:
    return hydro.HydroSetting("given", 1, months, D, u_max, x_max, 0.0, c1, g1, c2, C_d)


def stage(
    state: float, inflow: float, target: float, D: float, u_max: float, x_max: float, c1: float, g1: float, c2: float, C_d: float
) -> StageResult:
    """Equation 6: one month of one reservoir."""
    level, water, wanted = (torch.tensor(float(x), dtype=torch.float64).reshape(1, 1, 1).numpy() for x in (state, inflow, target))
    done = hydro.solve(_setting(D, u_max, x_max, c1, g1, c2, C_d), level[0], water, wanted, C_d)
    return StageResult(float(done.level.item()), float(done.cost.item()), float(done.dual.item()))


def rollout(
    x0: float, inflow: Float[Tensor, " T"], target: Float[Tensor, " T"], D: float, u_max: float, x_max: float, c1: float, g1: float,
    c2: float, C_d: float,
) -> Rolled:  # fmt: skip
    """Equation 6: month by month, each from the level that was really left; the cost includes the penalties."""
    setting = _setting(D, u_max, x_max, c1, g1, c2, C_d, len(inflow))
    start = torch.full((1, 1), x0, dtype=torch.float64).numpy()
    done = hydro.roll_out(setting, inflow.double().numpy()[None, :, None], target.double().numpy()[None, :, None], start)
    return Rolled(torch.from_numpy(done.level[0, :, 0]), float(done.cost[0]))


def feasible_dual(
    x0: float, inflow: Float[Tensor, " T"], target: Float[Tensor, " T"], D: float, u_max: float, x_max: float, c1: float, g1: float,
    c2: float, C_d: float,
) -> Duals:  # fmt: skip
    """Equation 5: cost and multipliers in closed form where the targets can be met and missing them is dearer than any generation.

    One unit more to keep in month t costs a unit of generation in t and saves one in t + 1; none where water is spilled or turbines are full.
    """
    release = torch.cat([torch.tensor([x0], dtype=target.dtype), target[:-1]]) + inflow - target
    limit = min(u_max, D)
    need = D - release.clamp(max=limit)
    cost = c1 * need.clamp(max=g1) + c2 * (need - g1).clamp(min=0)
    price = torch.where(release < limit, torch.where(need > g1, c2, c1), 0.0).to(target.dtype)
    return Duals(float(cost.sum()), price - torch.cat([price[1:], price.new_zeros(1)]))


def dual_loss(dual: Float[Tensor, "N T R"], target: Float[Tensor, "N T R"]) -> Tensor:
    """Equation 4: a scalar whose gradient in the targets is the multipliers', mean over paths; the multipliers carry none."""
    return (dual.detach() * target).flatten(1).sum(1).mean()


def policy_gradient(dual: Float[Tensor, "S T"], inflow: Float[Tensor, "S T"]) -> AffineGradient:
    """Equation 4 for the rule a_t + b_t w_t."""
    return AffineGradient(dual.mean(0), (dual * inflow).mean(0))


def score_function(cost: Float[Tensor, " M"], noise: Float[Tensor, "M T"], target: Float[Tensor, " T"], sigma: float) -> ScoreFunction:
    """Equation 7: score-function loss of M noisy copies of one path's targets, with the mean cost as baseline."""
    advantage = cost - cost.mean()
    gradient = (advantage[:, None] * noise / sigma**2).mean(0)
    return ScoreFunction(gradient.detach() @ target, gradient)


def penalty(step: int, total: int) -> float:
    """Equation 7: what the penalty is multiplied by in step `step` of `total`: four phases of equal length [reconstructed]."""
    return PHASES[min(len(PHASES) * step // max(total, 1), len(PHASES) - 1)]


@dataclass
class PenaltyPhases:
    """Trajectories whose distance from the targets is cheap at first and dear at the end. The last phase has the task's own penalty."""

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        run.state[PENALTY_MULTIPLIER] = penalty(run.step, run.total_steps or 1) / PHASES[-1]
        return run.collect(prompts)


@dataclass
class DualObjective:
    """Equation 4, mixed with the score function of several noisy copies of a path where alpha < 1."""

    alpha: float = 1.0  # weight of the multipliers, in [0,1]

    needs = frozenset({"target"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        loss = self.alpha * dual_loss(batch.signal("dual"), new.target) if self.alpha > 0 else new.target.sum() * 0
        if self.alpha < 1:
            loss = loss + (1 - self.alpha) * self._score(batch, new.target, run)
        return Loss(loss)

    def _score(self, batch: Batch, target: Tensor, run: Run) -> Tensor:
        sigma = getattr(run.policy, "sigma", 0.0)
        if not sigma or len(torch.unique(batch.group)) == len(batch):
            raise ValueError(
                "objective.alpha below 1 needs noisy targets and several samples a path; give the policy sigma > 0 and set select.group_size"
            )
        cost = batch.signal("cost")
        advantage = cost - group_mean(cost, batch.group)
        return ((advantage[:, None] * (batch.signal("noise") * target).flatten(1)).sum(1) / sigma**2).mean()


METHOD = Method(
    name="ts_ddr",
    paper=Paper("TS-DDR: two-stage deep decision rules by duality", "2405.14973", 2024),
    domain="combinatorial",
    kind="system",
    task="hydro:one_reservoir",
    summary="targets for a feasible program, trained by the multipliers of their own constraints",
    select=UniformPrompts(group_size=1),
    rollout=PenaltyPhases(),
    reward=TaskReward(),
    credit=NoCredit(),
    objective=DualObjective(),
    update=GradientSteps(epochs=1, minibatches=1, learning_rate=1e-2, optimizer="adam", max_grad_norm=None),
)
