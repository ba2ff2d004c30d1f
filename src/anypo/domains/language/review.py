"""A policy that is asked about its own response."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from anypo.batch import Batch

if TYPE_CHECKING:
    from anypo.run import Run

QUESTION = "Problem:\n{problem}\n\nSolution, by steps:\n{steps}\n\nThe solution is wrong. Number of the first wrong step: "
REPLY_TOKENS = 8


@dataclass
class AskPolicy:
    """The policy names the first wrong step of its own response, greedily and in a few tokens. -1 where it cannot be asked (no text, no room in
    the context) or names no number."""

    question: str = QUESTION

    def __call__(self, batch: Batch, rows: Tensor, steps: Tensor, run: Run) -> Tensor:
        found = torch.full_like(rows, -1)
        if "prompt_text" not in batch.signals or not hasattr(run.policy, "encode"):
            return found
        texts = [self.ask(batch, row, steps[row], run.policy) for row in rows.tolist()]
        encoded = [run.policy.encode(text) for text in texts]
        fits = [i for i, tokens in enumerate(encoded) if len(tokens) + REPLY_TOKENS <= run.policy.context_limit]
        if fits:
            replies = run.policy.sample([encoded[i] for i in fits], 1, max_tokens=REPLY_TOKENS, generator=run.generator, greedy=True)
            run.actions += int(replies.valid.sum())
            for i, tokens, valid in zip(fits, replies.tokens, replies.valid, strict=True):
                number = re.search(r"\d{1,9}", run.policy.decode(tokens[valid]))
                found[i] = int(number[0]) - 1 if number else -1
        return found

    def ask(self, batch: Batch, row: int, steps: Tensor, policy: object) -> str:
        """The question about one response, its steps numbered from 1."""
        parts = [policy.decode(batch.action[row][steps == k]).strip() for k in range(int(steps.max()) + 1)]  # type: ignore[attr-defined]
        written = "\n".join(f"{k + 1}. {text}" for k, text in enumerate(parts))
        return self.question.format(problem=batch.signals["prompt_text"][row], steps=written)
