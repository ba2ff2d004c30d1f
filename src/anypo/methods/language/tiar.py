"""TIAR: trajectory-informed advantage reweighting for abstention (arXiv:2605.25850).

Learning to say "I don't know" with a static ternary reward (right +1, wrong -1, abstained 0) under GRPO: the value of abstaining is too high on
questions the policy can answer and too low on those it cannot. TIAR reads the group as a confidence estimate, the success rate among the attempted
answers, and moves the advantage of the abstaining rows alone by lam * (1 - 2 confidence). Equations 1-2 from the abstract and a digest, 3-4 from a
third-party implementation; what happens in groups without an attempt and the confidence without labels are [reconstructed].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.seams.answers import answer_keys
from anypo.seams.groups import broadcast, group_max, group_sum, standardize
from anypo.seams.regularize import KLPenalty
from anypo.seams.reward import abstained, weighted_sum

if TYPE_CHECKING:
    from anypo.run import Run

Verdict = Int[Tensor, " N"]  # 1 correct, 0 abstained, -1 wrong


class AbstentionMetrics(NamedTuple):
    """Of abstaining where one should (precision, recall, F1), and accuracy over the answerable prompts; empty denominators give 0."""

    precision: float
    recall: float
    f1: float
    accuracy: float


def confidence(outcome: Verdict, group: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
    """Equation 3: the share of right answers among the attempts of each row's group; -1 where nobody attempted."""
    return _share((outcome == 1).double(), outcome != 0, group)


def majority_share(answer: Int[Tensor, " N"], outcome: Verdict, group: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
    """Equation 6 [reconstructed]: share of the group's attempts that agree with its commonest answer; needs no labels. -1 without an attempt."""
    attempted = (outcome != 0).double()
    _, same = torch.unique(torch.stack([group, answer, (outcome != 0).long()]), dim=1, return_inverse=True)
    count = group_max(group_sum(attempted, same) * attempted, group)
    tried = group_sum(attempted, group)
    return torch.where(tried > 0, count / tried.clamp(min=1), torch.full_like(tried, -1.0))


def abstention_bonus(outcome: Verdict, confidence: Float[Tensor, " N"], lam: float, all_abstain_bonus: float = 0.0) -> Float[Tensor, " N"]:
    """Equations 4-5: lam (1 - 2 confidence) for abstaining rows, `all_abstain_bonus` where the confidence is undefined (-1), 0 for the others."""
    bonus = torch.where(confidence < 0, torch.full_like(confidence, all_abstain_bonus), lam * (1 - 2 * confidence))
    return torch.where(outcome == 0, bonus, torch.zeros_like(bonus))


def advantages(outcome: Verdict, group: Int[Tensor, " N"], lam: float = 1.0, eps: float = 1e-6, ddof: int = 0) -> Float[Tensor, " N"]:
    """Equations 1-5 with the rewards +1, 0 and -1: GRPO's advantages, the bonus added after the normalization."""
    return standardize(outcome.double(), group, ddof, eps) + abstention_bonus(outcome, confidence(outcome, group), lam)


def metrics(outcome: Verdict, should_abstain: Tensor) -> AbstentionMetrics:
    """Abstention as a detector of the prompts that have no answer (or lie beyond what the policy knows); `should_abstain` [N] 0/1."""
    abstained, should = (outcome == 0).double(), should_abstain.double()
    hits = float((abstained * should).sum())
    precision = _ratio(hits, float(abstained.sum()))
    recall = _ratio(hits, float(should.sum()))
    right = float(((outcome == 1).double() * (1 - should)).sum())
    return AbstentionMetrics(
        precision, recall, _ratio(2 * precision * recall, precision + recall), _ratio(right, float((1 - should).sum()))
    )


def verdicts(batch: Batch, run: Run, trust_labels: bool = True) -> Verdict:
    """Verdict of every row: the task's reward tells right from wrong, the signal `abstained` [N] or the completion's words who abstained.

    Where the signal `answerable` [N] says that there is no answer, abstaining is right (equation 1), unless the labels are not trusted.
    Raises ValueError when nothing tells who abstained.
    """
    declined = abstained(batch, "tiar")
    right = weighted_sum(run.score_rewards(batch)) >= 0.5
    verdict = torch.where(declined, 0, torch.where(right, 1, -1))
    if trust_labels and "answerable" in batch.signals:
        verdict = torch.where(declined & ~batch.signals["answerable"], 1, verdict)
    return verdict


def _share(hit: Tensor, among: Tensor, group: Tensor) -> Tensor:
    count = group_sum(among.double(), group)
    return torch.where(count > 0, group_sum(hit, group) / count.clamp(min=1), torch.full_like(count, -1.0))


def _ratio(top: float, bottom: float) -> float:
    return top / bottom if bottom else 0.0


@dataclass
class TernaryReward:
    """The task's verdict as a number: right, abstained or wrong."""

    correct: float = 1.0
    abstain: float = 0.0
    wrong: float = -1.0
    trust_labels: bool = True  # abstaining from a prompt known to be unanswerable is right

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        batch.signals["verdict"] = verdict = verdicts(batch, run, self.trust_labels)
        run.log(abstained=float((verdict == 0).double().mean()))
        values = torch.tensor([self.wrong, self.abstain, self.correct], dtype=run.score_rewards(batch).dtype)
        return values[verdict + 1]


@dataclass
class TrajectoryInformed:
    """GRPO's advantages, those of abstaining rows moved by how sure the group's other attempts are."""

    lam: float = 1.0  # >= 0; 0 is the static reward, 1 runs over the full range from -1 to +1
    confidence: str = "success"  # success (rate among the attempts) or majority (agreement among them, without labels)
    all_abstain_bonus: float = 0.0  # added where nobody in the group attempted
    eps: float = 1e-6  # > 0, added to the standard deviation
    ddof: int = 0  # 0 population, 1 sample standard deviation

    compares_group = True

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        verdict = batch.signals["verdict"] if "verdict" in batch.signals else verdicts(batch, run)
        if self.confidence == "success":
            sure = confidence(verdict, batch.group)
        elif self.confidence == "majority":
            sure = majority_share(answer_keys(batch), verdict, batch.group)
        else:
            raise ValueError(f"unknown confidence '{self.confidence}'; use success or majority")
        relative = standardize(batch.outcome, batch.group, self.ddof, self.eps)
        return broadcast(relative + abstention_bonus(verdict, sure.to(relative), self.lam, self.all_abstain_bonus), batch.mask)


METHOD = GRPO.but(
    name="tiar",
    paper=Paper("TIAR: Trajectory-Informed Advantage Reweighting for LLM Abstention Learning", "2605.25850", 2026),
    summary="the group's success rate decides what abstaining is worth",
    reward=TernaryReward(),
    credit=TrajectoryInformed(),
    regularize=(KLPenalty(beta=1e-3),),
)
