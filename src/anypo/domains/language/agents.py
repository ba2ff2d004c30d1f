"""AgentTask: problems of several turns, in which the policy and an environment write in turn.

A row of the batch is one conversation: reply, observation, reply, ... Observation tokens are `valid` (the policy reads them) and never in
`mask` (it is not trained on them); `segment` counts the turns, and an observation carries the number of the turn that brought it about. A
conversation that the environment ends is terminated; one that runs out of turns, tokens or context is truncated, and its last observation,
which nobody reads, is left out.

An environment is anything with `reset(problem) -> observation` and `step(text) -> (observation, reward, done)`; `worlds.py` holds those that
ship, and adapts other packages. Left out: chat templates around observations (they are tokenized as plain text),
and environments that wait for one another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.language.problems import PROBLEMS
from anypo.domains.language.sources import Generated, Source
from anypo.domains.language.tasks import EVALUATION_SEED, FULL_MARKS, check_settings, encode_prompts, refuse_unknown, row_signals
from anypo.domains.language.worlds import CALCULATIONS, WORLDS, CalculatorEnvironment, GridEnvironment, Seeds
from anypo.task import Prompt

if TYPE_CHECKING:
    from anypo.run import Run


class Environment(Protocol):
    """The other side of a conversation. Where it has `stop`, a tuple of texts, a reply ends behind the first of them."""

    def reset(self, problem: Prompt) -> str:
        """Begin with a problem; what the policy reads first."""
        ...

    def step(self, text: str) -> tuple[str, float, bool]:
        """Take the policy's reply (without special tokens): the next observation, the reward of the turn, whether the conversation ended."""
        ...


class Restorable(Environment, Protocol):
    """An environment that can return to a visited state; what `AgentTask.branch` needs."""

    def save(self) -> Any: ...

    def restore(self, state: Any) -> None: ...


@dataclass
class Conversation:
    """One row while it grows. All lists but the last two have one entry a token."""

    problem: Prompt
    group: int
    heat: float
    environment: Any
    context: Tensor  # tokens of the first observation
    tokens: list[int] = field(default_factory=list)
    written: list[bool] = field(default_factory=list)  # by the policy
    logp: list[float] = field(default_factory=list)
    entropy: list[float] = field(default_factory=list)
    segment: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)  # one a turn
    states: list[Any] = field(default_factory=list)  # the environment's before each turn, where it can be saved
    done: bool = False  # the environment ended it
    closed: bool = False  # a limit ended it

    @property
    def turn(self) -> int:
        return len(self.rewards)

    def append(self, tokens: list[int], written: bool, logp: list[float] | None = None, entropy: list[float] | None = None) -> None:
        """More tokens of the current turn."""
        count = len(tokens)
        self.tokens += tokens
        self.written += [written] * count
        self.logp += logp or [0.0] * count
        self.entropy += entropy or [0.0] * count
        self.segment += [self.turn] * count

    def prefix(self) -> Tensor:
        return torch.cat([self.context, torch.tensor(self.tokens, dtype=torch.int64)])


@dataclass
class AgentTask:
    """Problems of several turns. The fields after `environment` are also the settings of `make_task`."""

    name: str
    source: Source
    environment: Callable[[], Any]  # makes an Environment; one for each conversation
    max_turns: int = 4  # >= 1
    max_tokens: int = 32  # of one reply, >= 1; `Prompt.max_actions` limits all replies together
    temperature: float | None = None  # > 0; None = the policy's own
    prompts_per_step: int = 16
    evaluation_prompts: int = 64
    objectives: tuple[str, ...] = ("reward",)

    def __post_init__(self) -> None:
        check_settings(self.max_tokens, self.temperature, self.prompts_per_step)
        if self.max_turns < 1:
            raise ValueError(f"max_turns must be at least 1, not {self.max_turns}")

    def prompts(self, count: int, rng: np.random.Generator) -> list[Prompt]:
        """`count` training problems, drawn with `rng` alone."""
        return self.source.training(count, rng)

    def held_out(self, count: int | None = None) -> list[Prompt]:
        """Up to `count` held-out problems (default: as many as an evaluation uses), the same every time."""
        return self.source.held_out(self.evaluation_prompts if count is None else count)

    def collect(self, prompts: list[Prompt], run: Run) -> Batch:
        """Conversations about every prompt under `run.policy`; group = position of the prompt in the list.

        Signals beside those of `TextTask.collect`: `turn_reward` [N,max_turns], `turns` [N], `problem` (the Prompts) and `turn_state` (lists of
        length N; a row's states before each turn, empty where the environment cannot be saved). `completion` is the conversation's text.
        Raises ValueError when a first observation leaves no room for a reply.
        """
        entropy = bool({"entropy", "old_entropy"} & run.method.needs())
        return self.attempt(run.policy, prompts, run.generator, version=run.version, entropy=entropy)

    def attempt(self, policy: Any, prompts: list[Prompt], generator: torch.Generator, *, version: int = 0, entropy: bool = False) -> Batch:
        """`collect` without a run: any policy, any generator."""
        rows = [self._begin(policy, prompt, group) for group, prompt in enumerate(prompts) for _ in range(prompt.samples)]
        return self._finish(policy, rows, generator, version, entropy)

    def branch(self, batch: Batch, rows: Sequence[int], turns: Sequence[int], run: Run) -> Batch:
        """New endings: conversation `rows[i]` again from the state before its turn `turns[i]`, under `run.policy`.

        `parent` and `branch_at` say what is shared; the shared tokens keep their log-probs and their place in `mask`, so a method that does not
        want to train them twice sets `keep`. Raises ValueError when the environment cannot be restored or the row has no such turn.
        """
        begun, shared = [], []
        for row, turn in zip(rows, turns, strict=True):
            states = batch.signal("turn_state")[row]
            if turn >= len(states):
                raise ValueError(f"conversation {row} cannot be continued from turn {turn}: {len(states)} of its states were saved")
            begun.append(self._again(batch, row, turn))
            shared.append(len(begun[-1].tokens))
        entropy = "old_entropy" in batch.signals
        out = self._finish(run.policy, begun, run.generator, run.version, entropy)
        return out.but(parent=torch.tensor(list(rows), dtype=torch.int64), branch_at=torch.tensor(shared, dtype=torch.int64))

    def continue_rows(self, batch: Batch, rows: Tensor, depth: Tensor, run: Run) -> Batch:
        """`branch` where the turn is named by its first token `depth[i]`; see `anypo.task.Resumable`. Raises ValueError when no turn begins there."""
        assert batch.segment is not None
        turns = []
        for row, shared in zip(rows.tolist(), depth.tolist(), strict=True):
            segment = batch.segment[row][batch.attended[row]]
            turns.append(int(segment[shared]) if shared < len(segment) else -1)
            if int((segment < turns[-1]).sum()) != shared:
                raise ValueError(f"conversation {row} can be continued from the beginning of a turn, and none begins at token {shared}")
        return self.branch(batch, rows.tolist(), turns, run)

    def score(self, batch: Batch, run: Run | None = None) -> Tensor:
        """[N]: the sum of each conversation's turn rewards."""
        return batch.signal("turn_reward").sum(dim=1)

    def correct(self, batch: Batch) -> Tensor:
        """[N] bool: a total reward of 1 or more."""
        return self.score(batch) >= FULL_MARKS

    def evaluate(self, run: Run) -> dict[str, float]:
        """`pass@1` (share of held-out problems with a total reward of 1 or more), mean `reward`, `turns` and `length` in written tokens; the
        same random numbers every time, none of them the run's."""
        batch = self._evaluation_batch(run, self.held_out())
        values = {"pass@1": self.correct(batch), "reward": self.score(batch), "turns": batch.signals["turns"], "length": batch.lengths}
        return {name: float(value.double().mean()) for name, value in values.items()}

    def sample_completions(self, run: Run, count: int) -> list[dict[str, Any]]:
        """Conversations about the first `count` held-out problems, to be read: `prompt`, `completion`, `reward`."""
        batch = self._evaluation_batch(run, self.held_out(count))
        texts = zip(batch.signals["prompt_text"], batch.signals["completion"], self.score(batch).tolist(), strict=True)
        return [{"prompt": prompt, "completion": completion, "reward": reward} for prompt, completion, reward in texts]

    def _evaluation_batch(self, run: Run, prompts: list[Prompt]) -> Batch:
        with torch.no_grad():
            return self.attempt(run.policy, prompts, torch.Generator().manual_seed(EVALUATION_SEED), version=run.version)

    def _begin(self, policy: Any, problem: Prompt, group: int) -> Conversation:
        environment = self.environment()
        seen = problem.but(content=environment.reset(problem))
        (context,), _ = encode_prompts(policy, [seen], [min(self.max_tokens, problem.max_actions or self.max_tokens)])
        return Conversation(seen, group, problem.temperature or self.temperature or policy.temperature, environment, context)

    def _again(self, batch: Batch, row: int, turn: int) -> Conversation:
        """The beginning of a conversation up to a turn, in an environment of its own."""
        problem, environment = batch.signals["problem"][row], self.environment()
        environment.reset(problem)
        environment.restore(batch.signals["turn_state"][row][turn])
        assert batch.segment is not None
        kept = int((batch.attended[row] & (batch.segment[row] < turn)).sum())
        entropy = batch.signals.get("old_entropy", torch.zeros_like(batch.logp))
        return Conversation(
            problem, int(batch.group[row]), float(batch.signals["temperature"][row]), environment, batch.context[row],
            batch.action[row, :kept].tolist(), batch.mask[row, :kept].tolist(), batch.logp[row, :kept].tolist(), entropy[row, :kept].tolist(),
            batch.segment[row, :kept].tolist(), batch.signals["turn_reward"][row, :turn].tolist(), batch.signals["turn_state"][row][:turn],
        )  # fmt: skip

    def _finish(self, policy: Any, rows: list[Conversation], generator: torch.Generator, version: int, entropy: bool) -> Batch:
        """Let every conversation run to its end, one turn of all at a time."""
        while True:
            live = [row for row in rows if not row.done and not row.closed]
            if not live:
                break
            self._turn(policy, live, generator, entropy)
        for row in rows:
            close = getattr(row.environment, "close", None)
            if close is not None:
                close()
        return self._batch(policy, rows, version, entropy)

    def _room(self, policy: Any, row: Conversation, observed: int = 0) -> int:
        """Tokens that the next reply may have, after an observation of so many."""
        left = row.problem.max_actions - sum(row.written) if row.problem.max_actions is not None else self.max_tokens
        return min(self.max_tokens, left, policy.context_limit - len(row.context) - len(row.tokens) - observed)

    def _turn(self, policy: Any, live: list[Conversation], generator: torch.Generator, entropy: bool) -> None:
        for row in live:
            if hasattr(row.environment, "save"):
                row.states.append(row.environment.save())
        out = policy.sample(
            [row.prefix() for row in live],
            [1] * len(live),
            max_tokens=[self._room(policy, row) for row in live],
            temperature=[row.heat for row in live],
            generator=generator,
            stop=_stopper(policy, [tuple(getattr(row.environment, "stop", ())) for row in live]),
            want_entropy=entropy,
        )
        for i, row in enumerate(live):
            valid = out.valid[i]
            reply = out.tokens[i][valid]
            row.append(
                reply.tolist(), True, out.logp[i][valid].tolist(), out.entropy[i][valid].tolist() if out.entropy is not None else None
            )
            observation, reward, row.done = row.environment.step(policy.decode(reply))
            seen = [] if row.done else plain_tokens(policy, observation)
            row.closed = not row.done and (row.turn + 1 == self.max_turns or self._room(policy, row, len(seen)) < 1)
            if not row.closed:
                row.append(seen, False)
            row.rewards.append(float(reward))

    def _batch(self, policy: Any, rows: list[Conversation], version: int, entropy: bool) -> Batch:
        horizon = max((len(row.tokens) for row in rows), default=0)

        def table(lists: list[list[Any]], kind: torch.dtype, width: int = horizon) -> Tensor:
            out = torch.zeros((len(rows), width), dtype=kind)
            for i, values in enumerate(lists):
                out[i, : len(values)] = torch.tensor(values, dtype=kind)
            return out

        done = torch.tensor([row.done for row in rows])
        signals = row_signals([row.problem for row in rows], [row.heat for row in rows]) | {
            "completion": [policy.decode(torch.tensor(row.tokens, dtype=torch.int64)) for row in rows],
            "turn_reward": table([row.rewards for row in rows], torch.float32, self.max_turns),
            "turns": torch.tensor([row.turn for row in rows]),
            "problem": [row.problem for row in rows],
            "turn_state": [row.states for row in rows],
        }
        if entropy:
            signals["old_entropy"] = table([row.entropy for row in rows], torch.float32)
        return Batch(
            action=table([row.tokens for row in rows], torch.int64),
            mask=table([row.written for row in rows], torch.bool),
            logp=table([row.logp for row in rows], torch.float32),
            group=torch.tensor([row.group for row in rows]),
            context=[row.context for row in rows],
            valid=torch.arange(horizon) < torch.tensor([len(row.tokens) for row in rows])[:, None],
            segment=table([row.segment for row in rows], torch.int64),
            terminated=done,
            truncated=~done,
            version=torch.full((len(rows),), version),
            signals=signals,
        )


def plain_tokens(policy: Any, text: str) -> list[int]:
    """Tokens of a text in the middle of a conversation: no opening token, no template. A policy without a tokenizer encodes it itself."""
    if not hasattr(policy, "tokenizer"):
        return policy.encode(text).tolist()
    return list(policy.tokenizer(text, add_special_tokens=False).input_ids)


def _stopper(policy: Any, stops: list[tuple[str, ...]]) -> Callable[[Tensor, Tensor], Tensor] | None:
    """The sampler's `stop` for rows that end behind certain texts. A token has a character or more, so the last few tokens are enough."""
    width = max((len(text) for texts in stops for text in texts), default=0)
    if width == 0:
        return None

    def stop(tokens: Tensor, source: Tensor) -> Tensor:
        endings = zip((policy.decode(row[-width:]) for row in tokens), source.tolist(), strict=True)
        return torch.tensor([bool(stops[i]) and ending.endswith(stops[i]) for ending, i in endings])

    return stop


def make_agent_task(spec: str, *, max_tokens: int | None = None, **settings: Any) -> AgentTask:
    """A multi-turn task by its name: `calculator`, `grid`, or `gymnasium:<id>`, `textarena:<id>`, `textworld:<file>`. Raises ValueError."""
    refuse_unknown(settings, AgentTask)
    kind, _, rest = spec.partition(":")
    if kind in WORLDS:
        if not rest:
            raise ValueError(f"'{spec}' names nothing after the colon; write {kind}:<name>")
        return AgentTask(spec, Seeds(spec), lambda: WORLDS[kind](rest), **settings, max_tokens=max_tokens or 32)
    if kind == "grid":
        return AgentTask(
            "grid", Generated(PROBLEMS["walk"]), GridEnvironment, **settings, max_tokens=max_tokens or PROBLEMS["walk"].max_tokens
        )
    return AgentTask("calculator", Generated(CALCULATIONS), CalculatorEnvironment, **settings, max_tokens=max_tokens or 40)
