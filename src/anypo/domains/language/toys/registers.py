"""registers: add or subtract four numbers that the policy cannot see, by code that a machine runs for it, at a price for every run.

A problem "-:" asks for a - b - c - d - e, "+:" for the sum; the numbers lie in the machine, too large to guess. The policy writes blocks such as "-c;"
(subtract c from the register, which holds a at first). Delayed: blocks wait until "!" runs all of them in one namespace; else each is run as soon as it
is written. A run costs 0.05 and is answered with "=", or "?" where its last block cannot be read; "#" answers with the value after the last run, for a
reward of 1 if it is right. A "!" with nothing to run, and a reply with neither, end the conversation. The policy is a GRU that imitates conversations
in which nearly every block is run at once. Stands in for reasoning with a Python tool; left out: text between the blocks, and the values themselves.
"""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.language.agents import AgentTask
from anypo.domains.language.rewards import RewardFunction
from anypo.domains.language.toys.event_video import demonstrated
from anypo.domains.language.toys.gru_policy import GruPolicy, imitate
from anypo.policy import Policy
from anypo.task import Prompt, Task

SLOTS, OPERATIONS = "bcde", "+-"
BLOCK, EXECUTE, ANSWER = ";", "!", "#"
OBSERVED = ":=?"  # what the policy reads and never writes
ALPHABET = SLOTS + OPERATIONS + BLOCK + EXECUTE + ANSWER + OBSERVED
REPLY = 20  # tokens of the longest reply
WARM_STEPS, WARM_ROWS = 120, 32


def work(value: int, operation: str, operand: int) -> int:
    """The register after one operation."""
    return value + operand if operation == "+" else value - operand


@dataclass
class Registers:
    """One conversation. Columns of a problem: start, operands, operation, answer and, where a method says so, delayed."""

    delayed: bool = True  # what holds for problems that do not say
    cost: float = 0.05  # of a run, >= 0

    def reset(self, problem: Prompt) -> str:
        self.columns = problem.columns
        self.value, self.pending = int(self.columns["start"]), list[str]()
        self.result: int | None = None
        self.waits = bool(self.columns.get("delayed", self.delayed))
        self.stop = (EXECUTE if self.waits else BLOCK, ANSWER)
        return f"{self.columns['operation']}:"

    def step(self, text: str) -> tuple[str, float, bool]:
        *blocks, rest = text.split(BLOCK)
        self.pending += blocks
        if rest == ANSWER:
            return "", float(self.result == self.columns["answer"]), True
        if not self.pending or rest != (EXECUTE if self.waits else ""):
            return "", 0.0, True
        for block in self.pending:
            self.result = self._run(block)
        self.pending = []
        return "?" if self.result is None else "=", -self.cost, False

    def _run(self, block: str) -> int | None:
        """The register after a block; None, and no change, where it cannot be read."""
        if not re.fullmatch(f"[{OPERATIONS}][{SLOTS}]", block):
            return None
        self.value = work(self.value, block[0], self.columns["operands"][SLOTS.index(block[1])])
        return self.value

    def save(self) -> tuple[Any, ...]:
        return self.columns, self.value, self.result, tuple(self.pending), self.waits, self.stop

    def restore(self, state: tuple[Any, ...]) -> None:
        self.columns, self.value, self.result, pending, self.waits, self.stop = state
        self.pending = list(pending)


class Calculations:
    """Random problems; every intermediate value is above 50."""

    name = "registers"
    check: RewardFunction | None = None

    def training(self, count: int, rng: np.random.Generator) -> list[Prompt]:
        drawn = []
        for _ in range(count):
            start, operands = int(rng.integers(500, 1000)), [int(x) for x in rng.integers(10, 100, size=len(SLOTS))]
            operation = OPERATIONS[rng.integers(len(OPERATIONS))]
            answer, number = start, start * len(OPERATIONS) + OPERATIONS.index(operation)
            for operand in operands:
                answer, number = work(answer, operation, operand), number * 100 + operand
            drawn.append(Prompt(number, "", {"start": start, "operands": operands, "operation": operation, "answer": answer}))
        return drawn

    def held_out(self, count: int) -> list[Prompt]:
        return self.training(count, np.random.default_rng(1 << 20))


class RegisterPolicy(GruPolicy):
    """The character-level policy; characters that are only observed, and the end token, have probability 0."""

    temperature = 1.0
    learning_rate = 2e-3

    def __init__(self, hidden: int = 48, seed: int = 0) -> None:
        super().__init__(hidden=hidden, alphabet=ALPHABET, seed=seed)
        with torch.no_grad():
            self.output.bias[-len(OBSERVED) :] = -1e9
            self.output.bias[self.eos] = -1e9


class RegisterTask(AgentTask):
    """Conversations with the machine."""

    block_token, execute_token = ALPHABET.index(BLOCK) + 1, ALPHABET.index(EXECUTE) + 1

    def correct(self, batch: Batch) -> Tensor:
        """[N] bool: a right answer, whatever it cost."""
        return batch.signal("turn_reward").amax(1) >= 1

    def expected_success(self, policy: RegisterPolicy) -> float:
        """Share of the held-out problems that are answered right, one conversation each with the same random numbers every time."""
        with torch.no_grad():
            batch = self.attempt(policy, self.held_out(), torch.Generator().manual_seed(0))
        return float(self.correct(batch).double().mean())


def demonstration(environment: Registers, problem: Prompt, rng: np.random.Generator, wait: float) -> tuple[str, list[tuple[str, bool]]]:
    """A right conversation: the prompt, and texts with whether the policy wrote them. With probability `wait` a block waits for the next one."""
    prompt, turns, reply = environment.reset(problem), list[tuple[str, bool]](), ""
    for slot in SLOTS:
        reply += f"{problem.columns['operation']}{slot}{BLOCK}"
        if environment.waits and slot != SLOTS[-1] and rng.random() < wait:
            continue
        reply += EXECUTE if environment.waits else ""
        turns += [(reply, True), (environment.step(reply)[0], False)]
        reply = ""
    return prompt, [*turns, (ANSWER, True)]


_WARM: dict[tuple[Any, ...], dict[str, Tensor]] = {}  # warm-started weights by settings, for the life of the process


def make_registers(
    *, delayed: bool = True, wait: float = 0.05, cost: float = 0.05, max_turns: int = 5, prompts_per_step: int = 8
) -> tuple[RegisterPolicy, RegisterTask]:
    """A policy that has imitated conversations, and its task, both new. `wait`: share of the blocks that wait in them, where they can. Raises ValueError
    for `wait` outside [0,1]."""
    if not 0 <= wait <= 1:
        raise ValueError(f"wait is a share of blocks in [0,1], not {wait}")
    policy, key = RegisterPolicy(), (delayed, wait)
    if key not in _WARM:
        rng, source, environment = np.random.default_rng(0), Calculations(), Registers(delayed)
        optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
        for _ in range(WARM_STEPS):
            shown: Sequence[Any] = [demonstration(environment, p, rng, wait) for p in source.training(WARM_ROWS, rng)]
            imitate(policy, demonstrated(policy, shown, ended=False), optimizer)
        _WARM[key] = {name: value.clone() for name, value in policy.state_dict().items()}
    policy.load_state_dict(_WARM[key])
    task = RegisterTask("registers", Calculations(), lambda: Registers(delayed, cost), max_turns=max_turns, max_tokens=REPLY,
                        prompts_per_step=prompts_per_step)  # fmt: skip
    return policy, task


def build(needs: Set[str], seed: int = 0, **options: Any) -> tuple[Policy, Task]:
    """Policy and task by name, for runs from the command line."""
    return make_registers(**options)
