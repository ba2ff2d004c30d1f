"""copy_or_compute: short calculations modulo 7 whose expert solutions may be read off the prompt.

A question has a type, a start value and three operands. Step d applies to the value so far and the d-th operand the operation that belongs to
(type, d). The policy chooses each operation and then writes its result, from two tables of logits; where the prompt shows an operation or a result,
that choice is favoured. The reward looks at the last result alone, so a prompt that shows results is paid for copying. Expected success is exact.
A training step takes a few milliseconds. Left out: text that is written, not only read.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Set
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from anypo.batch import Batch
from anypo.policy import Policy, Signals
from anypo.run import Run
from anypo.task import Prompt, Task

MODULUS, TYPES, STEPS = 7, 8, 3
OPERATIONS = ("multiply", "add twice", "triple and subtract", "square and add")
JUDGED = 512  # questions over which expected success is averaged
PLAN_RATE = 0.3  # how far a step moves the logits of operations, relative to those of results
FAVOUR = 4.0  # added to the logit of a choice that the prompt shows
NEVER = -1e9  # logit of results that are no operation


def results() -> Int[Tensor, "4 7 7"]:
    """The right result of every operation on (value, operand)."""
    x, y = torch.arange(MODULUS)[:, None], torch.arange(MODULUS)[None]
    return torch.stack([x * y, x + 2 * y, 3 * x - y, x * x + y]) % MODULUS


RIGHT: list[list[list[int]]] = results().tolist()


@functools.lru_cache(maxsize=4096)
def read(text: str) -> tuple[int, ...]:
    """What a prompt says: type, start, three operands, then the operation and the result of each step where they are shown (else -1).

    Raises ValueError for text that is no question of this task.
    """
    found = re.match(r"Type (\d) from (\d) with (\d) (\d) (\d)\.", text)
    if found is None:
        raise ValueError(f"{text[:40]!r} is no question of copy_or_compute; take the prompts of its task")
    steps = {int(d): (OPERATIONS.index(name), int(value) if value.isdigit() else -1)
             for d, name, value in re.findall(rf"Step (\d): ({'|'.join(OPERATIONS)}) to get (\d|\[NUMBER\])", text)}  # fmt: skip
    shown = [steps.get(d + 1, (-1, -1)) for d in range(STEPS)]
    return (*map(int, found.groups()), *(op for op, _ in shown), *(value for _, value in shown))


class CopyPolicy(Policy):
    """Logits of operations [type, step, 4] and of results [operation, value, operand, 7]. Actions alternate between the two."""

    provides = frozenset({"logp", "entropy", "logits"})
    optimizer = "sgd"
    learning_rate = 16.0 * 2 * STEPS  # of a loss averaged over 16 questions and a row's actions: 1 for their sums

    def __init__(self, plan: Int[Tensor, "8 3"], seed: int = 0) -> None:
        """At the start the right operation has probability 0.4 and the right result a logit 1.2 above noise of deviation 0.3."""
        super().__init__()
        noise = torch.randn(len(OPERATIONS), MODULUS, MODULUS, MODULUS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        self.results = nn.Parameter(0.3 * noise + 1.2 * nn.functional.one_hot(results(), MODULUS))
        self.plans = nn.Parameter(math.log(2) / math.sqrt(PLAN_RATE) * nn.functional.one_hot(plan, len(OPERATIONS)).double())

    def encode(self, text: str) -> Int[Tensor, " 11"]:
        """What the text says, as numbers (see `read`)."""
        return torch.tensor(read(text))

    def action_logits(self, context: Int[Tensor, "N 11"], action: Int[Tensor, "N 6"]) -> Float[Tensor, "N 6 7"]:
        """Logits of every action given those before it; numbers from 4 on are never operations."""
        kind, start, operand, operation, value = context.split([1, 1, STEPS, STEPS, STEPS], dim=1)
        chosen, written = action[:, 0::2].clamp(max=len(OPERATIONS) - 1), action[:, 1::2]
        before = torch.cat([start, written[:, :-1]], dim=1)
        plan = math.sqrt(PLAN_RATE) * self.plans[kind[:, 0]] + FAVOUR * (operation[..., None] == torch.arange(len(OPERATIONS)))
        plan = nn.functional.pad(plan, (0, MODULUS - len(OPERATIONS)), value=NEVER)
        result = self.results[chosen, before, operand] + FAVOUR * (value[..., None] == torch.arange(MODULUS))
        return torch.stack([plan, result], dim=2).flatten(1, 2)

    def evaluate(self, batch: Batch, needs: Set[str]) -> Signals:
        logits = self.action_logits(batch.context, batch.action)
        log_probs = logits.log_softmax(-1)
        signals = Signals()
        if "logp" in needs:
            signals["logp"] = log_probs.gather(-1, batch.action[..., None])[..., 0]
        if "entropy" in needs:
            signals["entropy"] = -(log_probs.exp() * log_probs).sum(-1)
        if "logits" in needs:
            signals["logits"] = logits
        return signals

    @torch.no_grad()
    def sample(self, context: Int[Tensor, "N 11"], generator: torch.Generator) -> Int[Tensor, "N 6"]:
        """Three pairs of operation and result for every row. Operations depend on no result, so they are drawn first."""
        rows = len(context)
        action = torch.zeros(rows, 2 * STEPS, dtype=torch.int64)
        plan = self.action_logits(context, action)[:, 0::2].softmax(-1)
        action[:, 0::2] = torch.multinomial(plan.flatten(0, 1), 1, generator=generator).view(rows, STEPS)
        before = context[:, 1]
        for d in range(STEPS):
            favoured = FAVOUR * (context[:, 2 + 2 * STEPS + d, None] == torch.arange(MODULUS))
            chance = (self.results[action[:, 2 * d], before, context[:, 2 + d]] + favoured).softmax(-1)
            before = torch.multinomial(chance, 1, generator=generator)[:, 0]
            action[:, 2 * d + 1] = before
        return action


class CopyOrCompute:
    """The task. `seed` decides which operation belongs to each (type, step). Problems carry the columns `trace`, the expert's solution, and `answer`."""

    name = "copy_or_compute"
    objectives = ("reward",)
    prompts_per_step = 16

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed + 1000)
        self.plan = torch.randint(len(OPERATIONS), (TYPES, STEPS), generator=generator)
        self.judged = torch.cat([torch.randint(TYPES, (JUDGED, 1), generator=generator),
                                 torch.randint(MODULUS, (JUDGED, 1 + STEPS), generator=generator)], dim=1)  # fmt: skip

    def policy(self, seed: int = 0) -> CopyPolicy:
        return CopyPolicy(self.plan, seed)

    def prompts(self, count: int, rng: np.random.Generator) -> list[Prompt]:
        """Questions drawn uniformly."""
        return [self.problem(int(kind), *rng.integers(MODULUS, size=1 + STEPS).tolist()) for kind in rng.integers(TYPES, size=count)]

    def problem(self, kind: int, start: int, *operands: int) -> Prompt:
        """One question with its solution."""
        lines, value = [], start
        for d, y in enumerate(operands):
            operation = int(self.plan[kind, d])
            value = RIGHT[operation][value][y]
            lines.append(f"Step {d + 1}: {OPERATIONS[operation]} to get {value}.\n")
        number = functools.reduce(lambda code, digit: MODULUS * code + digit, (start, *operands), kind)
        text = f"Type {kind} from {start} with {' '.join(map(str, operands))}."
        return Prompt(number, text, {"trace": f"{''.join(lines)}So the result is {value}.\n", "answer": str(value)})

    def collect(self, prompts: list[Prompt], run: Run) -> Batch:
        group = torch.repeat_interleave(torch.arange(len(prompts)), torch.tensor([p.samples for p in prompts]))
        context = torch.stack([run.policy.encode(p.content) for p in prompts])[group]
        action = run.policy.sample(context, run.generator)
        rows = len(group)
        batch = Batch(
            action=action, mask=torch.ones_like(action, dtype=torch.bool), logp=torch.zeros(action.shape, dtype=torch.float64), group=group,
            context=context, terminated=torch.ones(rows, dtype=torch.bool), truncated=torch.zeros(rows, dtype=torch.bool),
            version=torch.full((rows,), run.version), segment=(torch.arange(2 * STEPS) // 2).expand(rows, -1).clone(),
            signals={"prompt_id": torch.tensor([p.id for p in prompts])[group], "answer": torch.tensor([int(p.columns["answer"]) for p in prompts])[group]},
        )  # fmt: skip
        seen = run.policy.observe(batch, {"logp", "entropy"})
        batch.logp, batch.signals["old_entropy"] = seen.logp, seen.entropy
        return batch

    def score(self, batch: Batch, run: Run) -> Tensor:
        """1 where the last result is right, [N]."""
        return (batch.action[:, -1] == batch.signals["answer"]).double()

    @torch.no_grad()
    def expected_success(self, policy: CopyPolicy, plan_given: bool = False) -> float:
        """Exact success on prompts without a solution, mean over fixed questions; `plan_given`: with the right operations chosen."""
        kind, reached, right = self.judged[:, 0], self.judged[:, 1], self.judged[:, 1]
        chance = nn.functional.one_hot(reached, MODULUS).double()
        table, written = results(), policy.results.softmax(-1)
        for d in range(STEPS):
            y, operation = self.judged[:, 2 + d], self.plan[kind, d]
            choice = (
                nn.functional.one_hot(operation, len(OPERATIONS)).double()
                if plan_given
                else (math.sqrt(PLAN_RATE) * policy.plans[kind, d]).softmax(-1)
            )
            chance = torch.einsum("qx,qo,oxqv->qv", chance, choice, written[:, :, y])
            right = table[operation, right, y]
        return float(chance.gather(1, right[:, None]).mean())

    def evaluate(self, run: Run) -> dict[str, float]:
        return {"pass@1": self.expected_success(run.policy), "pass@1/plan": self.expected_success(run.policy, plan_given=True)}  # type: ignore[arg-type]


def build(needs: Set[str], seed: int = 0, **options: Any) -> tuple[Policy, Task]:
    """Policy and task by name, for runs from the command line."""
    questions = CopyOrCompute(seed=seed, **options)
    return questions.policy(seed), questions
