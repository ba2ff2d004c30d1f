"""PAPO: process-aware policy optimization, with decoupled advantage normalization (arXiv:2603.26535).

GRPO on the outcome treats all right answers alike and has no signal once a group is all right; a process score used as the reward is hacked. PAPO
adds two advantages that are normalized apart: the outcome's over all responses, and the process score's among the right ones alone. Correctness
stays the anchor, quality ranks the right answers, and a wrong answer gains nothing from a high process score. Equations 1-3 from the abstract's
ideas; the factor `lam`, the deviations, eps and the sizes are [reconstructed]. Not to be confused with other methods called PAPO.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.seams.groups import broadcast, standardize
from anypo.seams.objective import ClippedSurrogate

if TYPE_CHECKING:
    from anypo.run import Run

RIGHT = 0.5  # an outcome above this is a right answer
EQUATION = r"(-?\d{1,18})\s*([-+*])\s*(-?\d{1,18})\s*=\s*(-?\d{1,36})"
Rubric = Callable[[str], tuple[float, ...]]  # completion -> a score in [0,1] for each item


class Parts(NamedTuple):
    """The two normalized parts and their sum, [N] each."""

    outcome: Tensor
    process: Tensor
    advantages: Tensor


def advantages(reward: Float[Tensor, "N 2"], group: Int[Tensor, " N"], lam: float = 1.0, ddof: int = 0, eps: float = 1e-6) -> Parts:
    """Equations 1-3. Columns of `reward`: outcome in {0,1} and process score. The process part is 0 for wrong answers and for a lone right one."""
    right = reward[:, 0] > RIGHT
    _, index = torch.unique(group, return_inverse=True)
    outcome = standardize(reward[:, 0], group, ddof, eps)
    among_right = standardize(reward[:, 1], 2 * index + right.long(), ddof, eps)
    process = torch.where(right, among_right, torch.zeros_like(among_right))
    return Parts(outcome, process, outcome + lam * process)


def rubric_score(items: Float[Tensor, "N M"]) -> Float[Tensor, " N"]:
    """Equation 4: the mean over the rubric's items, each in [0,1]."""
    return items.mean(dim=1)


def arithmetic_rubric(completion: str) -> tuple[float, float, float]:
    """Scores of written equations "a+b=c": the share that is true, the share whose result is used by a later one (the last counts as used), the
    share that repeats none before it. All 0 where no equation is written."""
    steps = [(int(a), operator, int(b), int(c)) for a, operator, b, c in re.findall(EQUATION, completion)]
    if not steps:
        return 0.0, 0.0, 0.0
    operations = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
    valid = sum(operations[operator](a, b) == c for a, operator, b, c in steps)
    used = 1 + sum(any(c in (later[0], later[2]) for later in steps[i + 1 :]) for i, (*_, c) in enumerate(steps[:-1]))
    return valid / len(steps), used / len(steps), len(set(steps)) / len(steps)


@dataclass
class OutcomeAndProcess:
    """Outcome and process score as two objectives [N,2].

    A task with two rewards gives both, in this order. Otherwise the outcome is the task's reward, and the process score is its signal `process` [N]
    where it has one, else the mean of the rubric's items, asked for right answers alone (no other score is ever used).
    """

    rubric: Rubric = arithmetic_rubric

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        reward = run.score_rewards(batch)
        if reward.dim() == 2 and reward.shape[1] == 2 and batch.objectives:
            return reward
        if reward.dim() == 2:
            raise ValueError(
                "papo_process needs one outcome reward, or two rewards: outcome and process; this task gives another number of them"
            )
        batch.objectives = ("outcome", "process")
        return torch.stack([reward, self.process(batch, reward)], dim=1)

    def process(self, batch: Batch, outcome: Tensor) -> Tensor:
        """Process scores [N], 0 for wrong answers when the rubric gives them."""
        if "process" in batch.signals:
            return batch.signals["process"].to(outcome)
        if "completion" not in batch.signals:
            raise ValueError(
                "papo_process finds no process score on this task; let its batches carry the signal 'process' [N] or 'completion'"
            )
        scores = torch.zeros_like(outcome)
        for i in (outcome > RIGHT).nonzero().flatten().tolist():
            scores[i] = rubric_score(torch.tensor([self.rubric(batch.signals["completion"][i])]).to(outcome))[0]
        return scores


@dataclass
class DecoupledProcess:
    """The outcome's advantage over all responses plus the process score's among the right ones."""

    lam: float = 1.0  # >= 0, weight of the process part; large values give right answers of low quality a negative advantage
    ddof: int = 0  # 0 population, 1 sample standard deviation
    eps: float = 1e-6  # > 0, added to the standard deviations

    compares_group = True

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        assert batch.reward is not None
        if len(batch.objectives) != 2:
            raise ValueError("papo_process's credit needs two rewards, outcome and process; use its reward seam, or a task that gives both")
        parts = advantages(batch.reward, batch.group, self.lam, self.ddof, self.eps)
        run.log(process_signal=float((parts.process != 0).double().mean()))
        return broadcast(parts.advantages, batch.mask)


METHOD = GRPO.but(
    name="papo_process",
    paper=Paper("Stabilizing Rubric Integration Training via Decoupled Advantage Normalization", "2603.26535", 2026),
    summary="outcome normalized over all responses plus process quality normalized among the right ones",
    reward=OutcomeAndProcess(),
    credit=DecoupledProcess(),
    objective=ClippedSurrogate(clip_low=0.2, clip_high=0.28, aggregation="seq_mean"),
    regularize=(),
)
