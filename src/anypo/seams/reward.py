"""What is good."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from anypo.batch import Batch

if TYPE_CHECKING:
    from anypo.run import Run

REFERENCES = ("solution", "completion", "answer")  # columns of a problem that may hold a worked solution, the fullest first
ABSTAINING = r"\b(i (do not|don't|dont) know|i am not sure|i'm not sure|cannot be (answered|determined)|(unanswerable|not answerable))\b"
CONTENT = re.compile(r"[^\W\d_]+|\d|[^\w\s]")  # words, single digits and signs


@dataclass
class TaskReward:
    """The task's own reward: [N], [N,K] with several named rewards, or [N,T] when it is dense."""

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        return run.score_rewards(batch)


def weighted_sum(reward: Tensor, weights: tuple[float, ...] | None = None) -> Tensor:
    """[N,K] objectives as one number a row [N]; a reward [N] passes unchanged. Raises ValueError when the number of weights is not K."""
    if reward.dim() == 1:
        return reward
    if weights is None:
        return reward.sum(dim=1)
    if len(weights) != reward.shape[1]:
        raise ValueError(f"{len(weights)} weights for {reward.shape[1]} rewards; give one weight for each reward")
    return reward @ reward.new_tensor(weights)


def row_reward(batch: Batch, weights: tuple[float, ...] | None = None) -> Float[Tensor, " N"]:
    """One number a row: the outcome of dense rewards, otherwise the weighted sum of the row's objectives."""
    assert batch.reward is not None
    return batch.outcome if batch.reward_is_dense else weighted_sum(batch.reward, weights)


def content_tokens(text: str) -> list[str]:
    """The words, single digits and signs of a text, in lower case; white space and padding are dropped."""
    return CONTENT.findall(text.lower())


def reference_agreement(batch: Batch, measure: Callable[[list[str], list[str]], float]) -> Float[Tensor, " N"]:
    """`measure(response, reference)` of the content tokens of every row's text and of its problem's reference solution, the first of the columns
    `solution`, `completion` and `answer` that it has; 0 for rows without one and for tasks whose responses are no text."""
    found = batch.logp.new_zeros(len(batch))
    texts, columns = batch.signals.get("completion"), batch.signals.get("columns")
    if texts is None or columns is None:
        return found
    for i, (text, known) in enumerate(zip(texts, columns, strict=True)):
        reference = next((known[name] for name in REFERENCES if known.get(name) is not None), None)
        if reference is not None:
            found[i] = measure(content_tokens(text), content_tokens(str(reference)))
    return found


def with_agreement(
    batch: Batch, run: Run, measure: Callable[[list[str], list[str]], float], eta: float, weights: tuple[float, ...] | None = None
) -> Float[Tensor, " N"]:
    """The task's reward as one number a row (`weights` of the K rewards; dense values added up), plus `eta` times its `reference_agreement`, whose
    mean goes to the log. `eta` 0: the reward alone."""
    scored = run.score_rewards(batch)
    outcome = weighted_sum(scored, weights if batch.objectives else None)
    if not eta:
        return outcome
    agreement = reference_agreement(batch, measure).to(outcome)
    run.log(reference_agreement=float(agreement.double().mean()))
    return outcome + eta * agreement


def abstained(batch: Batch, who: str) -> Bool[Tensor, " N"]:
    """Which rows decline to answer: the signal `abstained` [N] where the task gives it, else by the words of the signal `completion`.

    Raises ValueError, on behalf of the method `who`, when nothing tells.
    """
    if "abstained" in batch.signals:
        return batch.signals["abstained"]
    if "completion" in batch.signals:
        return torch.tensor([bool(re.search(ABSTAINING, text.lower())) for text in batch.signals["completion"]], dtype=torch.bool)
    raise ValueError(f"{who} cannot tell who abstained on this task; let its batches carry the signal 'abstained' or 'completion'")


def objectives(batch: Batch) -> Float[Tensor, "N K"]:
    """The batch's reward as [N,K]; a single or dense reward is one objective."""
    assert batch.reward is not None
    return batch.reward if batch.objectives else batch.outcome[:, None]
