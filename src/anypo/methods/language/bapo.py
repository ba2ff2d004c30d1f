"""BAPO: boundary-aware policy optimization for agentic search (arXiv:2601.11037).

Under GRPO on right and wrong answers "I don't know" (IDK) dies out, because abstaining never pays. BAPO pays it a bonus where no attempt in the
group was right: the boundary of what a policy knows is a property of the group. The bonus is off when it would be exploited: while the policy
still explores and IDK is frequent, and, once validation has stalled, for prompts whose wrong answers are still diverse. Groups that are all wrong
without any IDK are sampled again. Against GRPO it changes reward, rollout and control. Equations 2-6 from the authors' code; the reliability that
is logged is [reconstructed], the period of the validation the stand-in's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.seams.answers import answer_keys
from anypo.seams.groups import group_max, group_sum
from anypo.seams.reward import abstained, weighted_sum
from anypo.task import Prompt

if TYPE_CHECKING:
    from anypo.run import Run

BAD_FORMAT = -1.0  # the reward of a row that cannot be read
EARLY = "bapo.early"  # in the run's shared state: whether the exploration stage goes on


class Reliability(NamedTuple):
    precision: float  # accuracy over the rows that answer; 0 when none does
    accuracy: float  # over all rows
    abstained: float  # share of rows
    reliability: float  # precision, weighted by the share that answers, plus accuracy by the share that abstains


def distinct_answers(idk: Bool[Tensor, " N"], answer: Int[Tensor, " N"], group: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
    """Number of different answers among the members of each row's group that do not abstain."""
    attempted = (~idk).double()
    _, same = torch.unique(torch.stack([group, answer, idk.long()]), dim=1, return_inverse=True)
    return group_sum(attempted / group_sum(torch.ones_like(attempted), same), group).round()


def reward(
    reward: Float[Tensor, " N"], idk: Tensor, answer: Int[Tensor, " N"], group: Int[Tensor, " N"],
    early: bool = True, alpha: float = 0.05, bonus: float = 0.5, n_div: int = 3,
) -> Float[Tensor, " N"]:  # fmt: skip
    """Equations 2-4: correctness in [0,1] (BAD_FORMAT where unreadable, 0 for IDK) plus the bonus of readable IDK in groups without success.

    Early: nothing changes while the batch's share of IDK is `alpha` or more. Later: no bonus in groups with more than `n_div` different answers.
    """
    idk = idk.bool()
    if len(idk) == 0 or (early and float(idk.double().mean()) >= alpha):
        return reward
    failed, readable = group_max(reward, group) <= 0, idk & (reward != BAD_FORMAT)
    searching = torch.zeros_like(idk) if early else distinct_answers(idk, answer, group) > n_div
    changed = torch.where(readable & failed & ~searching, reward + bonus, reward)
    return torch.where(readable & ~failed, torch.zeros_like(reward), changed)


def stage(val: Float[Tensor, " M"], tolerance: int = 5) -> Bool[Tensor, " M"]:
    """Equation 5: whether it is still early after each validation: until more than `tolerance` of them, consecutive or not, were below the best."""
    return (val < val.cummax(0).values).cumsum(0) <= tolerance


def resample(reward: Float[Tensor, " N"], idk: Tensor, group: Int[Tensor, " N"]) -> list[int]:
    """Equation 6: the groups, ascending, in which nobody was right and nobody abstained."""
    hopeless = (reward <= 0) & ~idk.bool()
    return torch.unique(group)[~torch.isin(torch.unique(group), group[~hopeless])].tolist()


def reliability(reward: Float[Tensor, " N"], idk: Tensor) -> Reliability:
    """What answering and abstaining are worth together [reconstructed]; a reward of 0.5 and more is a right answer."""
    idk = idk.bool()
    right, share = ((reward >= 0.5) & ~idk).double(), float(idk.double().mean())
    accuracy = float(right.mean())
    precision = accuracy / (1 - share) if share < 1 else 0.0
    return Reliability(precision, accuracy, share, (1 - share) * precision + share * accuracy)


def correctness(batch: Batch, run: Run, weights: tuple[float, ...] | None = None) -> Float[Tensor, " N"]:
    """The task's reward as one number a row."""
    scored = run.score_rewards(batch)
    return weighted_sum(scored, weights if batch.objectives else None)


@dataclass
class BoundaryReward:
    """The task's reward, with a bonus for abstaining beyond the boundary, as the stage of the run allows it."""

    bonus: float = 0.5  # of IDK where the group fails, >= 0; below the worth of a right answer
    alpha: float = 0.05  # in [0,1]: share of IDK in the batch from which the exploration stage gives no bonus
    n_div: int = 3  # different answers of a group up to which the plateau stage gives the bonus, >= 0
    weights: tuple[float, ...] | None = None  # of the task's K rewards; None = all 1

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        right, idk = correctness(batch, run, self.weights), abstained(batch, "bapo")
        run.log(**reliability(right, idk)._asdict())
        return reward(right, idk, answer_keys(batch), batch.group, run.state.get(EARLY, True), self.alpha, self.bonus, self.n_div)


@dataclass
class BoundaryResampling:
    """Groups in which nobody was right and nobody abstained are sampled again, up to `attempts` times; the last sample counts."""

    attempts: int = 2  # >= 0
    weights: tuple[float, ...] | None = None  # of the task's K rewards; None = all 1

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        batch, again = run.collect(prompts), 0
        for _ in range(self.attempts):
            chosen = resample(correctness(batch, run, self.weights), abstained(batch, "bapo"), batch.group)
            if not chosen:
                break
            fresh = run.collect([prompts[g] for g in chosen])
            fresh.group = torch.tensor(chosen)[fresh.group]
            run.score_rewards(fresh)
            batch = Batch.concat([part for part in (batch[~torch.isin(batch.group, fresh.group)], fresh) if len(part)])
            again += len(chosen)
        run.log(resampled_groups=float(again))
        return batch


@dataclass
class StageSwitch:
    """Validates every `period` steps by the task's held-out headline number, and ends the exploration stage when that has stalled."""

    period: int = 20  # steps between two validations, >= 1
    tolerance: int = 5  # validations below the best that are put up with, >= 0
    best: float = field(default=-math.inf, init=False, repr=False)
    below: int = field(default=0, init=False, repr=False)

    def __call__(self, batch: Batch, run: Run) -> None:
        if run.state.get(EARLY, True) and (run.step + 1) % self.period == 0:
            score = next(iter(run.task.evaluate(run).values()))
            self.best, self.below = max(self.best, score), self.below + (score < self.best)
            run.state[EARLY] = self.below <= self.tolerance
            run.log(validation=score)
        run.log(exploring=float(run.state.get(EARLY, True)))

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "below": self.below}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.below = state["best"], state["below"]


METHOD = GRPO.but(
    name="bapo",
    paper=Paper("BAPO: Boundary-Aware Policy Optimization for Reliable Agentic Search", "2601.11037", 2026),
    summary='"I don\'t know" earns a bonus where the whole group fails, suspended while that would be a shortcut',
    rollout=BoundaryResampling(),
    reward=BoundaryReward(),
    regularize=(),
    control=(StageSwitch(),),
)
