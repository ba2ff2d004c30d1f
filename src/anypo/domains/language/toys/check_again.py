"""check_again: calculations modulo 11 written step by step, by a policy that may check its last step again, and may be wrong when it does.

A problem "7+3*5=" is worked from left to right; a completion such as ">a?a>6#6" goes on (">"), checks the last operation again ("?") and answers
("#"), each followed by a value (a is ten). The policy's state is a sum of learned vectors of what the next token depends on (the calculation, the
mark before it, operations left, checks made), and its logits are linear in it. It has imitated solutions of which half check again, some of them
wrongly: a stand-in for a model that overthinks. It provides hidden states and samples from any prefix by the protocol of language models. Left out:
attention, wrong formats.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence, Set
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from anypo.batch import Batch
from anypo.domains.language.toys.gru_policy import Samples, imitate
from anypo.domains.language.toys.toy_arith import forced_batch
from anypo.policy import Policy, Signals
from anypo.run import Run
from anypo.task import Prompt, Task

MODULUS, MOST_STEPS, MOST_CHECKS = 11, 5, 4
VALUES, OPERATIONS, MARKS = "0123456789a", "+-*", ">?#"
ALPHABET = VALUES + OPERATIONS + MARKS + "="  # token 0 is the end token, so a character's token is its place + 1
FIRST_MARK = ALPHABET.index(">") + 1
MOST_ACTIONS = 2 * (MOST_STEPS + MOST_CHECKS + 1) + 1
COPIED = len(OPERATIONS) * MODULUS**2
SIZES = (
    COPIED + MODULUS + 1,
    6,
    MOST_STEPS + 2,
    MOST_CHECKS + 2,
)  # calculation or value to copy, mark, operations left, checks made; the last is "nothing"
MINOR = 0.3  # size of all but the calculation in a state, at the start
NEVER = -1e9  # logit of a token that cannot follow
JUDGED, JUDGED_SEED = 500, 77
WARM_STEPS = 100  # of imitation


def work(operation: str, x: int, y: int) -> int:
    """The right value of a step."""
    return {"+": x + y, "-": x - y, "*": x * y}[operation] % MODULUS


class _Walk:
    """Where N completions are: operations done, the value before the last one, the present value, checks made, and what stands before the next token
    (0 a value, 1-3 a mark, 4 the answer)."""

    def __init__(self, starts: Sequence[tuple[Any, ...]]) -> None:
        self.rows = torch.arange(len(starts))
        self.operation = torch.tensor([s[0] for s in starts])
        self.operand = torch.tensor([s[1] for s in starts])
        self.count, self.done, self.before, self.value, self.checks, self.mark = torch.tensor([s[2:] for s in starts]).unbind(1)

    def features(self) -> Int[Tensor, "N 4"]:
        decides, works, checks = self.mark == 0, self.mark == 1, self.mark == 2
        place = (self.done - checks.long()).clamp(0, MOST_STEPS)
        x = torch.where(checks, self.before, self.value)
        computed = (self.operation[self.rows, place] * MODULUS + x) * MODULUS + self.operand[self.rows, place]
        return torch.stack([
            torch.where(works | checks, computed, torch.where(self.mark == 3, COPIED + x, SIZES[0] - 1)),
            self.mark,
            torch.where(decides, self.count - self.done, SIZES[2] - 1),
            torch.where(decides, self.checks, SIZES[3] - 1),
        ], dim=1)  # fmt: skip

    def allowed(self) -> Tensor:
        """[N,V] bool: which tokens can follow."""
        found = torch.zeros(len(self.rows), len(ALPHABET) + 1, dtype=torch.bool)
        decides = self.mark == 0
        found[:, 1 : MODULUS + 1] = ((self.mark > 0) & (self.mark < 4))[:, None]
        found[:, FIRST_MARK] = decides & (self.done < self.count)
        found[:, FIRST_MARK + 1] = decides & (self.done > 0) & (self.checks < MOST_CHECKS)
        found[:, FIRST_MARK + 2] = decides
        found[:, 0] = self.mark == 4
        return found

    def advance(self, token: Int[Tensor, " N"]) -> None:
        works, checks = self.mark == 1, self.mark == 2
        self.before = torch.where(works, self.value, self.before)
        self.value = torch.where(works | checks, (token - 1).clamp(0, MODULUS - 1), self.value)
        self.done, self.checks = self.done + works.long(), self.checks + checks.long()
        after = torch.where(self.mark == 0, token - FIRST_MARK + 1, torch.zeros_like(token))
        self.mark = torch.where(self.mark >= 3, 4, after).clamp(0, 4)


@functools.lru_cache(maxsize=65536)
def _start(tokens: tuple[int, ...]) -> tuple[Any, ...]:
    """The start of a `_Walk` after a problem and the beginning of a completion. Raises ValueError for tokens that are no problem."""
    text = "".join(ALPHABET[t - 1] for t in tokens)
    problem, equals, written = text.partition("=")
    count = len(problem) // 2
    if not equals or len(problem) % 2 == 0 or not 1 <= count <= MOST_STEPS:
        raise ValueError(f"{text[:40]!r} is no problem of check_again; take the prompts of its task")
    pad = [0] * (MOST_STEPS + 1 - count)
    operations, operands = [OPERATIONS.index(c) for c in problem[1::2]] + pad, [VALUES.index(c) for c in problem[2::2]] + pad
    start = (operations, operands, count, 0, 0, VALUES.index(problem[0]), 0, 0)
    if not written:
        return start
    walk = _Walk([start])
    for c in written:
        walk.advance(torch.tensor([ALPHABET.index(c) + 1]))
    return (operations, operands, count, *(int(x) for x in (walk.done, walk.before, walk.value, walk.checks, walk.mark)))


class CheckPolicy(Policy):
    """Vectors of what the next token depends on, summed, and a linear read-out. `hidden` [N,T,D] is the sum before each action."""

    provides = frozenset({"logp", "entropy", "logits", "hidden"})
    learning_rate = 2e-3
    context_limit = 64
    eos = 0

    def __init__(self, *, width: int = 64, seed: int = 0) -> None:
        super().__init__()
        self.vocabulary = len(ALPHABET) + 1
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.tables = nn.ModuleList(nn.Embedding(size, width, padding_idx=size - 1) for size in SIZES)
            self.output = nn.Linear(width, self.vocabulary)
        with torch.no_grad():
            for table in list(self.tables)[1:]:
                table.weight.mul_(MINOR)  # type: ignore[operator]

    def encode(self, text: str) -> Int[Tensor, " L"]:
        return torch.tensor([ALPHABET.index(c) + 1 for c in text], dtype=torch.int64)

    def decode(self, tokens: Tensor) -> str:
        """The text before the first end token."""
        kept = tokens.tolist()
        return "".join(ALPHABET[t - 1] for t in (kept[: kept.index(0)] if 0 in kept else kept))

    def states(self, features: Int[Tensor, "*N 4"]) -> Float[Tensor, "*N D"]:
        return torch.stack([table(features[..., i]) for i, table in enumerate(self.tables)]).sum(0)

    def evaluate(self, batch: Batch, needs: Set[str]) -> Signals:
        walk = _Walk([_start(tuple(c.tolist())) for c in batch.context])
        features, allowed = [], []
        for t in range(batch.horizon):
            features.append(walk.features())
            allowed.append(walk.allowed())
            walk.advance(batch.action[:, t])
        hidden = self.states(torch.stack(features, 1))
        logits = self.output(hidden).masked_fill(~torch.stack(allowed, 1), NEVER)
        temperature = batch.signals.get("temperature")
        logits = logits if temperature is None else logits / temperature.to(logits)[:, None, None]
        log_probs = logits.log_softmax(-1)
        signals = Signals()
        if "logp" in needs:
            logp = log_probs.gather(-1, batch.action[..., None])[..., 0]
            signals["logp"] = torch.where(batch.mask, logp, torch.zeros_like(logp))
        if "entropy" in needs:
            signals["entropy"] = -(log_probs.exp() * log_probs).sum(-1)
        if "logits" in needs:
            signals["logits"] = logits
        if "hidden" in needs:
            signals["hidden"] = hidden
        return signals

    @torch.no_grad()
    def sample(
        self, prompts: Sequence[Tensor], samples: Sequence[int], *, max_tokens: int = MOST_ACTIONS, temperature: float = 1.0,
        generator: torch.Generator, greedy: bool = False,
    ) -> Samples:  # fmt: skip
        """`samples[i]` continuations of `prompts[i]`, which may end in the beginning of a completion."""
        source = torch.repeat_interleave(torch.arange(len(prompts)), torch.tensor(samples))
        starts = [_start(tuple(p.tolist())) for p in prompts]
        walk = _Walk([starts[i] for i in source.tolist()])
        rows = len(source)
        tokens, logp = torch.zeros(rows, max_tokens, dtype=torch.int64), torch.zeros(rows, max_tokens)
        valid, finished = torch.zeros(rows, max_tokens, dtype=torch.bool), torch.zeros(rows, dtype=torch.bool)
        for t in range(max_tokens):
            if finished.all():
                break
            logits = self.output(self.states(walk.features())).masked_fill(~walk.allowed(), NEVER) / temperature
            log_probs = logits.log_softmax(-1)
            chosen = log_probs.argmax(-1) if greedy else torch.multinomial(log_probs.exp(), 1, generator=generator)[:, 0]
            tokens[:, t], valid[:, t] = torch.where(finished, 0, chosen), ~finished
            logp[:, t] = torch.where(finished, 0.0, log_probs.gather(-1, chosen[:, None])[:, 0])
            walk.advance(chosen)
            finished = finished | (chosen == self.eos)
        return Samples(tokens, valid, logp, None, finished, source)


class CheckAgain:
    """The task: reward 1 for a right answer, however many steps it took. Batches carry `segment`, the steps; the answer is the last one."""

    name = "check_again"
    objectives = ("reward",)
    prompts_per_step = 32
    answer_prompt = "#"  # what asks for the answer

    def __init__(self, levels: Sequence[int] = range(1, MOST_STEPS + 1), wrong_check: float = 0.3) -> None:
        """`levels`: numbers of operations that problems have, in 1..5. `wrong_check`: share of the checks in demonstrations that end with a value drawn
        at random, in [0,1]."""
        self.levels, self.wrong_check = list(levels), wrong_check
        rng = np.random.default_rng(JUDGED_SEED)
        self.judged = self.prompts(JUDGED, rng)

    def prompts(self, count: int, rng: np.random.Generator) -> list[Prompt]:
        """Problems with levels drawn uniformly."""
        return [self._problem(rng) for _ in range(count)]

    def _problem(self, rng: np.random.Generator) -> Prompt:
        level, value = self.levels[rng.integers(len(self.levels))], int(rng.integers(MODULUS))
        text, number = VALUES[value], value
        for operation, y in zip(
            rng.integers(len(OPERATIONS), size=level).tolist(), rng.integers(1, MODULUS, size=level).tolist(), strict=True
        ):
            value = work(OPERATIONS[operation], value, y)
            text += OPERATIONS[operation] + VALUES[y]
            number = number * len(OPERATIONS) * MODULUS + operation * MODULUS + y
        return Prompt(number * (MOST_STEPS + 1) + level, f"{text}=", {"answer": VALUES[value], "level": level})

    def demonstrations(self, count: int, rng: np.random.Generator) -> list[tuple[str, str]]:
        """(prompt, completion) pairs: half of the completions check their last step up to four times, and some checks go wrong."""
        return [(p.content, self._written(p.content, rng)) for p in self.prompts(count, rng)]

    def _written(self, text: str, rng: np.random.Generator) -> str:
        value, out = VALUES.index(text[0]), ""
        for operation, y in zip(text[1:-1:2], text[2:-1:2], strict=True):
            value = work(operation, value, VALUES.index(y))
            out += f">{VALUES[value]}"
        final = value
        for _ in range(int(rng.integers(MOST_CHECKS + 1)) if rng.random() < 0.5 else 0):
            final = int(rng.integers(MODULUS)) if rng.random() < self.wrong_check else value
            out += f"?{VALUES[final]}"
        return f"{out}#{VALUES[final]}"

    def collect(self, prompts: list[Prompt], run: Run) -> Batch:
        return self.attempt(run.policy, prompts, run.generator, run.version)

    def attempt(self, policy: Any, prompts: list[Prompt], generator: torch.Generator, version: int = 0) -> Batch:
        """`collect` without a run."""
        contexts = [policy.encode(p.content) for p in prompts]
        out = policy.sample(contexts, [p.samples for p in prompts], generator=generator)
        rows = [prompts[i] for i in out.source.tolist()]
        marks = (out.tokens >= FIRST_MARK) & out.valid
        texts = [policy.decode(tokens[kept]) for tokens, kept in zip(out.tokens, out.valid, strict=True)]
        signals = {"prompt_id": torch.tensor([p.id for p in rows]), "completion": texts, "columns": [p.columns for p in rows]}
        return Batch(
            action=out.tokens, mask=out.valid, logp=out.logp, group=out.source, context=[contexts[i] for i in out.source.tolist()],
            segment=(marks.cumsum(1) - 1).clamp(min=0), terminated=out.finished, truncated=~out.finished,
            version=torch.full((len(rows),), version), signals=signals,
        )  # fmt: skip

    def score(self, batch: Batch, run: Run | None = None) -> Tensor:
        """1 for a right answer, [N]."""
        pairs = zip(batch.signal("completion"), batch.signal("columns"), strict=True)
        return torch.tensor([float(text[-2:] == f"#{columns['answer']}") for text, columns in pairs])

    def measure(self, policy: Any) -> dict[str, float]:
        """Success, and steps before the answer, of one sampled completion of each of the same 500 problems."""
        with torch.no_grad():
            batch = self.attempt(policy, self.judged, torch.Generator().manual_seed(JUDGED_SEED))
        assert batch.segment is not None
        return {"pass@1": float(self.score(batch).mean()), "steps": float(batch.segment.amax(1).double().mean())}

    def evaluate(self, run: Run) -> dict[str, float]:
        return self.measure(run.policy)


@functools.lru_cache(maxsize=8)
def _warm(seed: int, steps: int, wrong_check: float) -> dict[str, Tensor]:
    policy, task, rng = CheckPolicy(seed=seed), CheckAgain(wrong_check=wrong_check), np.random.default_rng(seed)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    for _ in range(steps):
        imitate(policy, forced_batch(policy, task.demonstrations(128, rng)), optimizer)  # type: ignore[arg-type]
    return {name: value.clone() for name, value in policy.state_dict().items()}


def make_check_again(
    *, seed: int = 0, warm_steps: int = WARM_STEPS, wrong_check: float = 0.3, **options: Any
) -> tuple[CheckPolicy, CheckAgain]:
    """A policy that has imitated `warm_steps` batches of demonstrations of all levels, and the task."""
    policy = CheckPolicy(seed=seed)
    policy.load_state_dict(_warm(seed, warm_steps, wrong_check))
    return policy, CheckAgain(wrong_check=wrong_check, **options)


def build(needs: Set[str], seed: int = 0, **options: Any) -> tuple[Policy, Task]:
    """Policy and task by name, for runs from the command line."""
    return make_check_again(seed=seed, **options)
