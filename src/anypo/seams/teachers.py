"""Who says how likely a batch's actions ought to be: what distillation learns from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from anypo.batch import Batch
from anypo.seams.reward import REFERENCES

if TYPE_CHECKING:
    from anypo.run import Run


class Teacher(Protocol):
    """Log-probs [N,T] of a batch's own actions."""

    def __call__(self, batch: Batch, run: Run) -> Tensor: ...


class Demonstrated(Protocol):
    """Logits [M,T,V] of the rows' own actions for one who has seen the rows `demo` [M]."""

    def __call__(self, batch: Batch, rows: Tensor, demo: Tensor, run: Run) -> Tensor: ...

    def can_show(self, batch: Batch, rows: Tensor, demo: Tensor, run: Run) -> Tensor: ...  # [M] bool


def divergence(first: Float[Tensor, "N T V"], second: Float[Tensor, "N T V"]) -> Float[Tensor, "N T"]:
    """KL(first || second) of distributions given by their log-probs."""
    return (first.exp() * (first - second)).sum(-1)


@dataclass
class SiblingInContext:
    """A copy of the policy, or the policy as it is now, reads the prompt with the correct response, then the prompt again, and goes along the sampled
    response."""

    policy: str | None = "teacher"  # name of the copy in the run; None = the current policy

    def can_show(self, batch: Batch, rows: Tensor, demo: Tensor, run: Run) -> Tensor:
        """Whether the longer context leaves room for the response. Raises ValueError for a policy that reads no text."""
        if not isinstance(batch.context, list):
            raise ValueError(
                f"{run.method.name} shows a correct response in the prompt, which {type(run.policy).__name__} cannot read; take a language model"
            )
        limit = getattr(run.policy, "context_limit", None)
        length = [len(c) + batch.horizon for c in self.contexts(batch, rows, demo)]
        return torch.tensor([limit is None or n <= limit for n in length], dtype=torch.bool)

    def contexts(self, batch: Batch, rows: Tensor, demo: Tensor) -> list[Tensor]:
        """Prompt, correct response, prompt."""
        pairs = zip(rows.tolist(), demo.tolist(), strict=True)
        return [torch.cat([batch.context[right], batch.action[right][batch.attended[right]], batch.context[row]]) for row, right in pairs]

    def __call__(self, batch: Batch, rows: Tensor, demo: Tensor, run: Run) -> Tensor:
        return run.score(
            batch[rows].but(context=self.contexts(batch, rows, demo)), {"logits"}, *(() if self.policy is None else (self.policy,))
        ).logits


@dataclass
class AnswerShown:
    """Prompts with the problems' own answers in them."""

    template: str = "{prompt}{answer};{prompt}"  # what is read; of a chat, in place of its last message

    def contexts(self, batch: Batch, run: Run) -> list[Tensor]:
        """Tokens of the prompts with their answers; where that leaves the response no room, of the prompt alone. Raises ValueError for a task that
        has no text prompts with known answers."""
        columns, limit = batch.signals.get("columns"), getattr(run.policy, "context_limit", None)
        if columns is None or not isinstance(batch.context, list):
            raise ValueError(
                f"{run.method.name} shows the policy the answer, but '{run.task.name}' gives no text prompts with known answers"
            )
        prompts = batch.signals["prompt"] if "prompt" in batch.signals else [row.get("prompt") for row in columns]
        read: dict[str, Tensor] = {}
        found = []
        for prompt, row, own in zip(prompts, columns, batch.context, strict=True):
            answer = next((row[name] for name in reversed(REFERENCES) if row.get(name) is not None), None)
            if answer is None or prompt is None:
                raise ValueError(f"{run.method.name} needs the answer of every problem; give the rows a column 'answer' (or 'solution')")
            told = self.told(prompt, answer)
            key = repr(told)
            if key not in read:
                read[key] = run.policy.encode(told)
            found.append(read[key] if limit is None or len(read[key]) + batch.horizon <= limit else own)
        return found

    def told(self, prompt: Any, answer: Any) -> Any:
        """The prompt, text or messages, with its answer."""
        if isinstance(prompt, str):
            return self.template.format(prompt=prompt, answer=answer)
        last = prompt[-1]
        return [*prompt[:-1], {**last, "content": self.template.format(prompt=last["content"], answer=answer)}]
