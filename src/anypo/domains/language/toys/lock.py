"""lock: codes that must be right as a whole, and an environment that says which symbols of a failed attempt were.

Every class has a code of a few symbols. A prompt is "07:", the answer "acbde"; after a failed attempt the prompt may go on with the attempt and a mark
for each symbol, "07:a+c+d-b-e+:". The table policy has logits for each class and place and two weights for how far it follows the marks; a GRU reads the
same text. Success is exact. A step of the table takes a few milliseconds. Left out: feedback on more than one attempt.
"""

from __future__ import annotations

import functools
import math
import string
from collections.abc import Sequence, Set
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from anypo.batch import Batch
from anypo.domains.language.toys.gru_policy import GruPolicy, Samples, imitate
from anypo.policy import Policy, Signals
from anypo.run import Run
from anypo.task import Prompt, Task

RIGHT, WRONG, NONE = "+", "-", -1
TRUST_RATE = (
    0.2 / 8
)  # how far a step moves the two weights of the marks, relative to the logits: 0.1 to 1 with 8 classes a step, of a loss halved
START = 0.45  # probability of a right symbol at the start, before the noise
NOISE = 0.8
TRUST = 0.5  # weights of the marks at the start: they are hardly used


@functools.lru_cache(maxsize=65536)
def read(text: str, length: int) -> tuple[int, ...]:
    """What a prompt says: class, the symbols of the attempt, and 1 or 0 for right or wrong; -1 where there is no attempt. Raises ValueError."""
    name, _, rest = text.partition(":")
    attempt, marks = rest[:-1:2], rest[1::2].rstrip(":")
    if not name.isdigit() or len(attempt) not in (0, length):
        raise ValueError(f"{text[:40]!r} is no prompt of lock; take the prompts of its task")
    seen = [string.ascii_lowercase.index(c) for c in attempt] + [int(m == RIGHT) for m in marks]
    return (int(name), *(seen or [NONE] * 2 * length))


class LockPolicy(Policy):
    """Logits [C,L,V], plus trust[0] at an attempt's symbol that was right, minus trust[1] at one that was wrong. Tokens are the symbols' numbers."""

    provides = frozenset({"logp", "entropy", "logits"})
    optimizer = "sgd"
    context_limit = 1 << 20

    def __init__(self, codes: Int[Tensor, "C L"], symbols: int, seed: int = 0) -> None:
        super().__init__()
        self.length, self.symbols = codes.shape[1], symbols
        noise = torch.randn(*codes.shape, symbols, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        lead = math.log(START * (symbols - 1) / (1 - START))
        self.table = nn.Parameter(lead * nn.functional.one_hot(codes, symbols) + NOISE * noise)
        self.scaled_trust = nn.Parameter(torch.full((2,), TRUST / math.sqrt(TRUST_RATE), dtype=torch.float64))

    @property
    def trust(self) -> Float[Tensor, " 2"]:
        return math.sqrt(TRUST_RATE) * self.scaled_trust

    def encode(self, text: str) -> Int[Tensor, " M"]:
        """A prompt as the numbers of `read`, a code as its symbols."""
        return torch.tensor(read(text, self.length) if ":" in text else [string.ascii_lowercase.index(c) for c in text])

    def decode(self, tokens: Tensor) -> str:
        return "".join(string.ascii_lowercase[t] for t in tokens.tolist())

    def action_logits(self, context: Sequence[Tensor]) -> Float[Tensor, "N L V"]:
        """Symbols do not depend on one another."""
        name, attempt, mark = torch.stack(list(context)).split([1, self.length, self.length], dim=1)
        said = (attempt[..., None] == torch.arange(self.symbols)).double()
        trust = self.trust
        return self.table[name[:, 0]] + said * torch.where(mark == 1, trust[0], -trust[1])[..., None]

    def evaluate(self, batch: Batch, needs: Set[str]) -> Signals:
        logits = self.action_logits(batch.context)
        log_probs = logits.log_softmax(-1)
        found = {"logits": logits, "logp": log_probs.gather(-1, batch.action[..., None])[..., 0]}
        if "entropy" in needs:
            found["entropy"] = -(log_probs.exp() * log_probs).sum(-1)
        return Signals({name: found[name] for name in needs})

    @torch.no_grad()
    def sample(self, prompts: Sequence[Tensor], samples: Sequence[int], *, generator: torch.Generator, **_: Any) -> Samples:
        """`samples[i]` codes after `prompts[i]`, always of full length and at temperature 1."""
        source = torch.repeat_interleave(torch.arange(len(prompts)), torch.tensor(samples))
        log_probs = self.action_logits(prompts).log_softmax(-1)[source]
        tokens = torch.multinomial(log_probs.exp().flatten(0, 1), 1, generator=generator).view(len(source), self.length)
        every = torch.ones_like(tokens, dtype=torch.bool)
        logp = log_probs.gather(-1, tokens[..., None])[..., 0]
        return Samples(tokens, every, logp, -(log_probs.exp() * log_probs).sum(-1), every[:, 0], source)


class Lock:
    """The task: reward 1 for the whole code. It is `commented`: the environment marks the symbols of a failed attempt."""

    name = "lock"
    objectives = ("reward",)

    def __init__(self, classes: int = 32, length: int = 6, symbols: int = 5, prompts_per_step: int = 8, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed + 1000)
        self.count, self.length, self.symbols = classes, length, symbols
        self.prompts_per_step = min(prompts_per_step, classes)
        self.codes = torch.randint(symbols, (classes, length), generator=generator)
        self.spelled = ["".join(string.ascii_lowercase[s] for s in code) for code in self.codes.tolist()]

    def policy(self, seed: int = 0) -> LockPolicy:
        policy = LockPolicy(self.codes, self.symbols, seed)
        policy.learning_rate = float(self.prompts_per_step * self.length)  # of a mean over classes and symbols: 1 for each class's sums
        return policy

    def prompts(self, count: int, rng: np.random.Generator) -> list[Prompt]:
        """Different classes, as far as there are so many."""
        chosen = rng.choice(self.count, size=count, replace=count > self.count)
        return [Prompt(int(c), f"{c:02d}:", {"answer": self.spelled[c]}) for c in chosen]

    def collect(self, prompts: list[Prompt], run: Run) -> Batch:
        contexts = [run.policy.encode(p.content) for p in prompts]
        counts = [p.samples for p in prompts]
        out = run.policy.sample(contexts, counts, max_tokens=self.length, temperature=1.0, generator=run.generator)
        rows = [prompts[i] for i in out.source.tolist()]
        signals = {
            "prompt_id": torch.tensor([p.id for p in rows]), "columns": [p.columns for p in rows], "old_entropy": out.entropy,
            "completion": [run.policy.decode(tokens) for tokens in out.tokens],
        }  # fmt: skip
        return Batch(
            action=out.tokens, mask=out.valid, logp=out.logp, group=out.source, context=[contexts[i] for i in out.source.tolist()],
            terminated=torch.ones(len(rows), dtype=torch.bool), truncated=torch.zeros(len(rows), dtype=torch.bool),
            version=torch.full((len(rows),), run.version), signals=signals,
        )  # fmt: skip

    def commented(self, prompt: Prompt, batch: Batch, row: int) -> Prompt:
        """The attempt and, for each symbol, whether it was right. What a shorter attempt lacks is shown as a wrong first symbol."""
        attempt = batch.signals["completion"][row]
        marks = [RIGHT if a == b else WRONG for a, b in zip(attempt, prompt.columns["answer"], strict=False)]
        shown = "".join(a + m for a, m in zip(attempt, marks, strict=True)) + ("a" + WRONG) * (self.length - len(attempt))
        return prompt.but(content=f"{prompt.content}{shown}:")

    def score(self, batch: Batch, run: Run | None = None) -> Tensor:
        right = [c == row["answer"] for c, row in zip(batch.signal("completion"), batch.signal("columns"), strict=True)]
        return torch.tensor(right, dtype=batch.logp.dtype)

    def expected_success(self, policy: Any) -> float:
        """Exact, on plain prompts, mean over classes."""
        action = torch.stack([policy.encode(code) for code in self.spelled])
        mask = torch.ones_like(action, dtype=torch.bool)
        context = [policy.encode(f"{c:02d}:") for c in range(self.count)]
        batch = Batch(action=action, mask=mask, logp=torch.zeros(mask.shape), group=torch.arange(self.count), context=context)
        return float(policy.observe(batch, {"logp"}).logp.double().sum(1).exp().mean())

    def evaluate(self, run: Run) -> dict[str, float]:
        return {"pass@1": self.expected_success(run.policy)}


_WARM: dict[tuple[Any, ...], dict[str, Tensor]] = {}  # weights of warm-started GRUs by settings, for the life of the process


def make_lock(seed: int = 0, neural: int = 0, warm_steps: int = 300, **options: Any) -> tuple[Policy, Lock]:
    """The task with its table, or with a GRU of width `neural` that has imitated the table's attempts for `warm_steps`, half of them after feedback."""
    task = Lock(seed=seed, **options)
    table = task.policy(seed)
    if not neural:
        return table, task
    policy = GruPolicy(hidden=neural, alphabet=string.ascii_lowercase[: task.symbols] + string.digits + RIGHT + WRONG + ":", seed=seed)
    key = (seed, neural, warm_steps, *sorted(options.items()))
    if key not in _WARM:
        _imitate(policy, table, task, warm_steps, seed)
        _WARM[key] = {name: value.clone() for name, value in policy.state_dict().items()}
    policy.load_state_dict(_WARM[key])
    return policy, task


def _imitate(policy: GruPolicy, table: LockPolicy, task: Lock, steps: int, seed: int) -> None:
    optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    for _ in range(steps):
        prompts = task.prompts(32, rng)
        tries = _written(table, prompts, generator)
        marked = [task.commented(p, _texts(tries), i) for i, p in enumerate(prompts)]
        texts = tries + _written(table, marked, generator)
        action = torch.stack([policy.encode(t) for t in texts])
        mask = torch.ones_like(action, dtype=torch.bool)
        context = [policy.encode(p.content) for p in prompts + marked]
        imitate(
            policy,
            Batch(action=action, mask=mask, logp=torch.zeros(mask.shape), group=torch.arange(len(texts)), context=context),
            optimizer,
        )


def _written(table: LockPolicy, prompts: list[Prompt], generator: torch.Generator) -> list[str]:
    out = table.sample([table.encode(p.content) for p in prompts], [1] * len(prompts), generator=generator)
    return [table.decode(tokens) for tokens in out.tokens]


def _texts(completions: list[str]) -> Batch:
    """Completions as all that is known of a batch."""
    none = torch.zeros(len(completions), 0)
    return Batch(action=none.long(), mask=none.bool(), logp=none, group=torch.arange(len(completions)), signals={"completion": completions})


def build(needs: Set[str], seed: int = 0, **options: Any) -> tuple[Policy, Task]:
    """Policy and task by name, for runs from the command line."""
    return make_lock(seed=seed, **options)
