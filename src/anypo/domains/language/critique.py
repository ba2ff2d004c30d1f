"""Critique and revision: answers that fail some item are written again with the failed items named in the prompt.

The revision is handed over as an answer to the plain prompt, the one that is to be learned from; how likely it was under the prompt with the critique is
the signal `gen_logp`. Left out: critics that are models (the critique is the names of the failed rewards).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from anypo.batch import Batch
from anypo.seams.reward import objectives
from anypo.task import Prompt

if TYPE_CHECKING:
    from anypo.run import Run


@dataclass
class CritiqueAndRevise:
    """A rollout: first answers, and a revision for every answer that fails one of the task's rewards. Signals: `origin` [N], 0 for first answers and 1
    for revisions, and `gen_logp` [N,T].

    A task may say how a prompt with a critique reads (`critique(prompt, failed) -> Prompt`); other texts and messages get a sentence at their end.
    Prompts that are neither are not revised.
    """

    revise: bool = True  # False: first answers alone
    pass_mark: float = 1.0  # an item below this has failed, in (0,1]
    sentence: str = "\nAn earlier answer failed on: {failed}.\n"

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        first = run.collect(prompts)
        if not self.revise:
            return first
        first.signals["origin"], first.signals["gen_logp"] = torch.zeros_like(first.group), first.logp
        first.reward = run.score_rewards(first)
        items = objectives(first)
        names = first.objectives or ("reward",)
        wanted: dict[int, Prompt] = {}
        for row in (items < self.pass_mark).any(1).nonzero().flatten().tolist():
            failed = tuple(name for name, value in zip(names, items[row].tolist(), strict=True) if value < self.pass_mark)
            asked = self.critiqued(prompts[int(first.group[row])].but(samples=1), failed, run)
            if asked is not None:
                wanted[row] = asked
        first.reward = None
        if not wanted:
            return first
        return Batch.concat([first, self.revisions(first, wanted, run)])

    def critiqued(self, prompt: Prompt, failed: tuple[str, ...], run: Run) -> Prompt | None:
        """The prompt with the critique; None where it is no text."""
        task: Any = run.task
        if hasattr(task, "critique"):
            return task.critique(prompt, failed)
        sentence = self.sentence.format(failed=", ".join(failed))
        if isinstance(prompt.content, str):
            return prompt.but(content=prompt.content + sentence)
        if isinstance(prompt.content, list):
            return prompt.but(content=[*prompt.content, {"role": "user", "content": sentence.strip()}])
        return None

    def revisions(self, first: Batch, wanted: dict[int, Prompt], run: Run) -> Batch:
        """One new answer for each row of `wanted`, as an answer to the row's plain prompt: its log-probs are those under that prompt."""
        batch = run.collect(list(wanted.values()))
        rows = torch.tensor(list(wanted))[batch.group]
        batch.signals["origin"], batch.signals["gen_logp"] = torch.ones_like(rows), batch.logp
        run.score_rewards(batch)
        plain = first[rows]
        batch.group, batch.context = plain.group, plain.context
        batch.signals |= {name: plain.signals[name] for name in ("prompt", "prompt_text") if name in plain.signals}
        seen = run.score(batch, {"logp"} | ({"entropy"} if "old_entropy" in batch.signals else set()))
        batch.logp = seen.logp
        if "old_entropy" in batch.signals:
            batch.signals["old_entropy"] = seen.entropy * batch.mask
        return batch
