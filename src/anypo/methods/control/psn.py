"""PSN: proximal state nudging for shared autonomy (arXiv:2605.20355).

An assistant shares control with a student and is to make the pair do well now and the student do well alone later. It steers towards states that look
most learnable for this student, neither mastered nor hopeless, and hands over there. Against PPO the policy is the assistant's, over how much to
assist given the state and what the student proposes, and the reward is the pair's plus a bonus for learnable next states minus a price of assistance;
`nudge` is its one-step greedy form for a known task value. The abstract fixes the aim - skill and performance, nudging, an estimate of learnability - and
not the formulas: all equations are [reconstructed]. Left out: the driving studies (CARLA), assistance between 0 and 1 for the learned assistant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.control.skill_grid import CELLS, SCALARS, view
from anypo.method import Paper
from anypo.methods.control.ppo import METHOD as PPO
from anypo.seams.groups import masked_mean

if TYPE_CHECKING:
    from anypo.run import Run

VETOED = -1e9  # the score of a candidate that must not be chosen
KINDS = ("zpd", "progress")


class Nudge(NamedTuple):
    score: Float[Tensor, "*B J"]
    index: Int[Tensor, "*B"]  # type: ignore[assignment]


def learnability(
    p: Float[Tensor, "*S"], p_old: Float[Tensor, "*S"] | None = None, kind: str = "zpd", delta: float = 0.05
) -> Float[Tensor, "*S"]:
    """Equation 3, in [0,1]: "zpd" = 4 p (1 - p), largest at a competence of 1/2; "progress" = the growth since `p_old`, in units of the largest one
    (or of `delta` > 0, if that is more). Raises ValueError for another kind, and for "progress" without `p_old`."""
    if kind == "zpd":
        return 4 * p * (1 - p)
    if kind not in KINDS or p_old is None:
        raise ValueError(
            f"learnability is {' or '.join(KINDS)} (which needs p_old), not '{kind}'" + (" without p_old" if kind in KINDS else "")
        )
    growth = (p - p_old).clamp(min=0)
    return growth / growth.max().clamp(min=delta)


def nudge(
    q: Float[Tensor, "*B J"], learn_next: Float[Tensor, "*B J"], b: Float[Tensor, "*B J"], q_expert: float | Tensor,
    w_task: float = 1.0, w_learn: float = 0.5, w_assist: float = 0.2, margin: float = 0.5,
) -> Nudge:  # fmt: skip
    """Equation 4: the score of each of J candidates with assistance b, and the best one's index; ties go to the least assistance.

    A candidate whose task value is more than `margin` below the expert's [*B] is vetoed; the expert's own (b = 1) never is."""
    expert = torch.as_tensor(q_expert, dtype=q.dtype).unsqueeze(-1)
    score = w_task * (q - q.amax(-1, keepdim=True)) + w_learn * learn_next - w_assist * b
    score = torch.where((q < expert - margin) & (b < 1), VETOED, score)
    tied = score == score.amax(-1, keepdim=True)
    return Nudge(score, torch.where(tied, b, torch.inf).argmin(-1))


def shared_reward(
    reward: Float[Tensor, "N T"], learn_next: Float[Tensor, "N T"], b: Float[Tensor, "N T"], w_learn: float = 0.5, w_assist: float = 0.2
) -> Float[Tensor, "N T"]:
    """Equation 5: r + w_learn L(s') - w_assist b."""
    return reward + w_learn * learn_next - w_assist * b


def guidance(w0: float, p_mean: float, p_goal: float = 0.9) -> float:
    """Equation 6: the weight of learning, which fades as the mean competence nears `p_goal` in (0,1]."""
    return w0 * max(0.0, 1 - p_mean / p_goal)


@dataclass
class Nudger:
    """The greedy assistant (equation 4) on observations [n,41] of the skill grid: 1 where it takes over, 0 where it hands over."""

    w_task: float = 1.0  # of the task value lost, >= 0
    w_learn: float = 0.5  # of the learnability of the next state, >= 0; 0 = value-based shared autonomy with a veto
    w_assist: float = 0.2  # price of taking over, >= 0
    margin: float = 0.5  # task value that a student may lose in a step, >= 0

    def __call__(self, observation: Float[Tensor, "n 41"]) -> Int[Tensor, " n"]:
        seen = view(torch.as_tensor(observation, dtype=torch.float64))
        q, after = torch.stack([seen.gap, torch.zeros_like(seen.gap)], -1), torch.stack([seen.after_user, seen.after_expert], -1)
        b = torch.tensor([0.0, 1.0], dtype=q.dtype).expand_as(q)
        return nudge(q, learnability(after), b, q[..., 1], self.w_task, self.w_learn, self.w_assist, self.margin).index


@dataclass
class SharedReward:
    """The pair's reward, the learnability of the state it leads to, and the price of assistance (equation 5)."""

    w_learn: float = 0.5  # >= 0
    w_assist: float = 0.2  # >= 0

    needs = frozenset({"batch_next_context"})

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        following = batch.signal("next_context")
        if following.shape[-1] != CELLS + len(SCALARS) or batch.action.dim() != 2:
            raise ValueError(
                "psn reads what an assistant sees of its student; take the environment SkillGrid-v0, or one with its observations"
            )
        weight = run.state.get("psn.w_learn", self.w_learn)
        return shared_reward(run.score_rewards(batch), learnability(view(following).here), batch.action.float(), weight, self.w_assist)


@dataclass
class FadingGuidance:
    """After each batch, the next one's weight of learning from the mean estimated competence in the visited states (equation 6)."""

    w0: float = 0.5  # weight at no competence, >= 0
    p_goal: float = 0.9  # mean competence at which guidance ends, in (0,1]

    def __call__(self, batch: Batch, run: Run) -> None:
        run.state["psn.w_learn"] = guidance(self.w0, float(masked_mean(view(batch.context).here, batch.mask)), self.p_goal)
        run.log(w_learn=run.state["psn.w_learn"])


METHOD = PPO.but(
    name="psn",
    paper=Paper("PSN: proximal state nudging for shared autonomy", "2605.20355", 2026),
    summary="an assistant that is paid for leading a student to learnable states as well as for the task, and pays for taking over",
    task="SkillGrid-v0",
    reward=SharedReward(),
)
VARIANTS = {"fading": METHOD.but(name="psn.fading", summary="guidance fades as the student's competence grows", control=FadingGuidance())}
