"""BlockTask: text problems answered by block-wise decoding, and `split_sum`, the small problem with many right answers.

The prompt of split_sum is a sum c in 0..98, units first ("73=" for 37), the answer two numbers a and b that make it up, two digits each, units first.
Every pair with a + b = c is right, so digits that are drawn independently of one another often belong to different pairs: writing many tokens a
pass costs accuracy, and learning to agree on one pair wins it back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.language.problems import is_held_out
from anypo.domains.language.rewards import RewardFunction, Rewards, each
from anypo.domains.language.sources import text_id
from anypo.domains.language.tasks import TextTask, encode_prompts, refuse_unknown, row_signals
from anypo.domains.masked.policy import MaskedPolicy, Samples
from anypo.task import Prompt

if TYPE_CHECKING:
    from anypo.run import Run

LARGEST = 49  # of the two numbers behind a sum
ANSWER = 4  # tokens


@dataclass
class BlockTask(TextTask):
    """A text task for masked models. `source`, `rewards` and the rest as in TextTask; `max_tokens` is a fixed length for models without an end token."""

    block: int = 2  # tokens, >= 1
    threshold: float = 0.0  # a token is kept once its largest probability is above; 0 = a block a pass, 1 = a token a pass
    evaluation_samples: int = 32  # answers to every held-out problem in an evaluation

    def held_out(self, count: int | None = None) -> list[Prompt]:
        """Held-out problems, each to be answered `evaluation_samples` times."""
        return [p.but(samples=self.evaluation_samples) for p in super().held_out(count)]

    def sample_completions(self, run: Run, count: int) -> list[dict[str, Any]]:
        """Attempts to be read, one at each of the first `count` held-out problems."""
        return super().sample_completions(run, count)[:: self.evaluation_samples]

    def attempt(self, policy: Any, prompts: list[Prompt], generator: torch.Generator, *, version: int = 0, entropy: bool = False) -> Batch:
        """Answers of any policy with any generator. `logp` and the signal `old_entropy` belong to the prefix-block states, whatever the threshold was.

        Signals beside those of TextTask: `reveal_pass`, `reveal_logp` [N,T] and `passes` [N] (see `decode.py`).
        """
        wanted = [p.max_actions or self.max_tokens for p in prompts]
        encoded, limits = encode_prompts(policy, prompts, wanted, self.max_prompt_tokens, self.least_tokens)
        heats = [p.temperature or self.temperature or policy.temperature for p in prompts]
        counts = [p.samples for p in prompts]
        out = policy.sample(
            encoded, counts, max_tokens=limits, temperature=heats, generator=generator, block=self.block, threshold=self.threshold
        )
        rows = out.source.tolist()
        signals = row_signals([prompts[i] for i in rows], [heats[i] for i in rows])
        signals["limit"] = torch.tensor([limits[i] for i in rows], dtype=torch.int64)
        signals["old_entropy"] = out.entropy
        return self._batch(policy, out, out.source, [encoded[i] for i in rows], signals, version)

    def continue_rows(self, batch: Batch, rows: Tensor, depth: Tensor, run: Run) -> Batch:
        """New endings of rows of a batch, row `rows[i]` after its first `depth[i]` tokens; see `anypo.task.Resumable`. What is left of a block that was
        begun is written first. Log-probs and entropies are those of the policy now, in the prefix-block states."""
        old, policy = batch[rows], cast(MaskedPolicy, run.policy)
        assert old.terminated is not None
        depth_known = torch.where(depth >= old.lengths, torch.where(old.terminated, old.signals["limit"], depth), depth)
        heats = old.signals["temperature"].tolist()
        out = policy.sample(
            old.context, [1] * len(rows), max_tokens=old.signals["limit"].tolist(), temperature=heats, generator=run.generator, block=self.block,
            threshold=self.threshold, begun=(old.action, depth_known),
        )  # fmt: skip
        signals = {n: old.signals[n] for n in ("prompt_id", "prompt", "prompt_text", "columns", "temperature", "limit")}
        found = self._batch(policy, out, old.group, old.context, signals, run.version)
        seen = policy.observe(found, {"logp", "entropy"})
        found.signals["old_entropy"] = seen.entropy
        return found.but(logp=seen.logp, parent=rows, branch_at=depth)

    def _batch(
        self, policy: MaskedPolicy, out: Samples, group: Tensor, context: list[Tensor], signals: dict[str, Any], version: int
    ) -> Batch:
        shape = out.tokens.shape
        signals["completion"] = [policy.decode(tokens[kept]) for tokens, kept in zip(out.tokens, out.valid, strict=True)]
        decoded = out.decoded
        signals |= {"reveal_pass": decoded.reveal_pass, "reveal_logp": decoded.reveal_logp, "passes": decoded.passes}
        return Batch(
            action=out.tokens, mask=out.valid, logp=out.logp, group=group, context=context, valid=decoded.valid,
            segment=(torch.arange(shape[1]) // self.block).expand(shape), terminated=out.finished, truncated=~out.finished,
            version=torch.full((shape[0],), version), signals=signals,
        )  # fmt: skip


# ---- split_sum


def digits(number: int) -> str:
    """Two digits, units first."""
    return f"{number % 10}{number // 10}"


def adds_up(completion: str, total: int, **columns: Any) -> float:
    """1 when the completion is two numbers of two digits, units first, that add up to the total."""
    if len(completion) != ANSWER or not (completion.isascii() and completion.isdigit()):
        return 0.0
    return float(int(completion[1::-1]) + int(completion[:1:-1]) == total)


class SplitSum:
    """The 99 prompts, drawn as often as two numbers up to 49 add up to them; about one in eight is held out by a hash of its text."""

    name = "split_sum"

    def __init__(self) -> None:
        self.check: RewardFunction | None = each(adds_up, "correct")
        problems = [Prompt(text_id(text), text, {"total": c}) for c in range(2 * LARGEST + 1) for text in [digits(c) + "="]]
        self.trained = [p for p in problems if not is_held_out(p.content)]
        self.kept = [p for p in problems if is_held_out(p.content)]
        pairs = np.array([LARGEST + 1 - abs(LARGEST - p.columns["total"]) for p in self.trained])
        self.chance = pairs / pairs.sum()

    def training(self, count: int, rng: np.random.Generator) -> list[Prompt]:
        chosen = rng.choice(len(self.trained), size=count, replace=count > len(self.trained), p=self.chance)
        return [self.trained[i] for i in chosen]

    def held_out(self, count: int) -> list[Prompt]:
        return self.kept[:count]

    def demonstrations(self, count: int, rng: np.random.Generator) -> list[tuple[Any, str]]:
        """Training problems with one right answer each, every pair equally likely."""
        return [(p.content, self.solve(p.columns["total"], rng)) for p in self.training(count, rng)]

    @staticmethod
    def solve(total: int, rng: np.random.Generator) -> str:
        """A right answer of two numbers up to 49, every pair equally likely."""
        first = int(rng.integers(max(0, total - LARGEST), min(LARGEST, total) + 1))
        return digits(first) + digits(total - first)


def make_split_sum(**settings: Any) -> BlockTask:
    """The task. `settings` are fields of BlockTask. Raises ValueError for one it does not have."""
    source = SplitSum()
    refuse_unknown(settings, BlockTask)
    assert source.check is not None
    return BlockTask(source, Rewards({"correct": source.check}), ANSWER, **settings)


def exact_accuracy(policy: MaskedPolicy, block: int, prompts: list[Prompt] | None = None, temperature: float = 1.0) -> float:
    """Mean over prompts of split_sum (None = all 99) of the exact probability that sampled decoding, one pass a block, gives a right answer: the sum
    over all right answers of the product of their tokens' probabilities in the prefix-block states."""
    source = SplitSum()
    chosen = [*source.trained, *source.kept] if prompts is None else prompts
    pairs = [(n, first, p.columns["total"] - first) for n, p in enumerate(chosen) for first in range(p.columns["total"] + 1)]
    owner = torch.tensor([n for n, _, _ in pairs])
    action = torch.stack([policy.encode(digits(a) + digits(b)) for _, a, b in pairs])
    encoded = [policy.encode(p.content) for p in chosen]
    batch = Batch(
        action=action, mask=torch.ones_like(action, dtype=torch.bool), logp=torch.zeros(action.shape), group=owner,
        context=[encoded[n] for n in owner.tolist()], segment=(torch.arange(ANSWER) // block).expand(action.shape),
        signals={"temperature": torch.full((len(owner),), temperature)},
    )  # fmt: skip
    each_answer: Float[Tensor, " S"] = policy.observe(batch, {"logp"}).logp.double().sum(1).exp()
    return float(torch.zeros(len(chosen), dtype=torch.float64).index_add(0, owner, each_answer).mean())
