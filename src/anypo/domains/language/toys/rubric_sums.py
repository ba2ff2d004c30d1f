"""rubric_sums: sums below 20 that are judged by three items, by a policy that makes good use of a critique.

A problem is "3+4=" and the perfect answer "+07": a plus sign (item `format`), two digits (`length`), the right sum (`answer`); each item is judged
by itself. A critique names failed items by their first letters behind the problem ("3+4=fa"), and the policy, the GRU of `toy_arith` after a short
imitation of mixed demonstrations, usually gets right what is named. It stands in for a model that corrects itself when told what is wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Set
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.language.toys.gru_policy import ALPHABET, GruPolicy, imitate
from anypo.domains.language.toys.toy_arith import ToyArith, forced_batch
from anypo.policy import Policy
from anypo.run import Run
from anypo.task import Prompt, Task

ITEMS = ("format", "length", "answer")
LETTERS = "".join(item[0] for item in ITEMS)
RIGHT = (0.3, 0.4, 0.5)  # how often a demonstration gets each item right when nothing is named
RIGHT_WHEN_NAMED = 0.95
NAMED_SHARE = 0.4  # of the demonstrations follow a critique
WARM_STEPS = 300  # of imitation
JUDGED_SEED, JUDGED = 77, 4  # completions a problem over which items are measured


class RubricSums(ToyArith):
    """The task. Rewards [N,3] of 0 and 1, named as in ITEMS; `columns` hold the perfect answer alone as valid."""

    name = "rubric_sums"
    objectives = ITEMS

    def __init__(self, *, held_out: float = 0.0, seed: int = 0) -> None:
        super().__init__(small=True, held_out=held_out, forms=("+{:02}",), seed=seed)

    def critique(self, prompt: Prompt, failed: tuple[str, ...]) -> Prompt:
        """The problem with the failed items named behind it."""
        return prompt.but(content=prompt.columns["prompt"] + "".join(item[0] for item in failed))

    def score(self, batch: Batch, run: Run | None = None) -> Tensor:
        assert batch.terminated is not None
        rows = zip(batch.signal("completion"), batch.signal("columns"), strict=True)
        found = torch.tensor([judged(text, columns["a"] + columns["b"]) for text, columns in rows], dtype=torch.float32)
        return found * batch.terminated[:, None]

    def demonstrations(self, count: int, rng: np.random.Generator, noise: float = 0.0) -> list[tuple[str, str]]:
        """(prompt, completion) pairs; `noise` is not used, the shares of right items are those above."""
        pairs = []
        for problem in self.prompts(count, rng):
            named = rng.random(len(ITEMS)) < 0.5 if rng.random() < NAMED_SHARE else np.zeros(len(ITEMS), dtype=bool)
            good = rng.random(len(ITEMS)) < np.where(named, RIGHT_WHEN_NAMED, RIGHT)
            asked = self.critique(problem, tuple(item for item, chosen in zip(ITEMS, named, strict=True) if chosen))
            pairs.append((asked.content, self._answer(problem.columns["a"] + problem.columns["b"], good, rng)))
        return pairs

    def _answer(self, total: int, good: Any, rng: np.random.Generator) -> str:
        plus, two, right = good
        value = total if right else int(rng.integers(19))
        return f"{'+' if plus else ''}{value:0{2 if two else 1 if value < 10 and rng.random() < 0.5 else 3}}"

    @torch.no_grad()
    def items(self, policy: GruPolicy) -> Float[Tensor, "P K"]:
        """How often every problem's completions meet each item: JUDGED samples a problem, the same random numbers every time."""
        contexts = [policy.encode(p.content) for p in self.problems]
        generator = torch.Generator().manual_seed(JUDGED_SEED)
        out = policy.sample(
            contexts, [JUDGED] * len(contexts), max_tokens=self.max_actions, temperature=1.0, generator=generator, want_entropy=False
        )
        problems = [self.problems[i].columns for i in out.source.tolist()]
        rows = zip(out.tokens, problems, strict=True)
        found = torch.tensor([judged(policy.decode(tokens), columns["a"] + columns["b"]) for tokens, columns in rows], dtype=torch.float64)
        return (found * out.finished[:, None]).view(len(contexts), JUDGED, len(ITEMS)).mean(1)

    def evaluate(self, run: Run) -> dict[str, float]:
        policy: Any = run.policy
        found = self.items(policy).mean(0).tolist()
        return super().evaluate(run) | dict(zip(ITEMS, found, strict=True))


def judged(text: str, total: int) -> tuple[float, float, float]:
    """Format, length and answer of a completion, 1 or 0 each."""
    digits = text.removeprefix("+")
    number = digits.isdecimal()
    return float(text[:1] == "+"), float(number and len(digits) == 2), float(number and int(digits) == total)


@functools.lru_cache(maxsize=8)
def _warm(seed: int, steps: int) -> dict[str, Tensor]:
    policy, task, rng = GruPolicy(alphabet=ALPHABET + LETTERS, seed=seed), RubricSums(), np.random.default_rng(seed)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    for _ in range(steps):
        imitate(policy, forced_batch(policy, task.demonstrations(64, rng)), optimizer)
    return {name: value.clone() for name, value in policy.state_dict().items()}


def make_rubric_sums(*, seed: int = 0, warm_steps: int = WARM_STEPS, **options: Any) -> tuple[GruPolicy, RubricSums]:
    """A policy that has imitated `warm_steps` batches of demonstrations, and the task."""
    policy = GruPolicy(alphabet=ALPHABET + LETTERS, seed=seed)
    policy.load_state_dict(_warm(seed, warm_steps))
    return policy, RubricSums(seed=seed, **options)


def build(needs: Set[str], seed: int = 0, **options: Any) -> tuple[Policy, Task]:
    """Policy and task by name, for runs from the command line."""
    return make_rubric_sums(seed=seed, **options)
