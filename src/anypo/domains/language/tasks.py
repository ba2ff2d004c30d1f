"""TextTask: single-turn problems in text, and `make_task`, which finds a task by its name.

A task joins a source of problems (`sources.py`) with reward functions (`rewards.py`). A completion without text (an end token at once, or no
room for any) is scored as the empty string. Multi-turn tasks are in `agents.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.language.problems import PROBLEMS
from anypo.domains.language.rewards import Rewards, as_function, as_functions
from anypo.domains.language.sources import (
    Generated,
    ReasoningGym,
    Rows,
    Source,
    called_rows,
    did_you_mean,
    given_rows,
    hub_rows,
    jsonl_rows,
)
from anypo.task import Prompt

if TYPE_CHECKING:
    from anypo.run import Run

EVALUATION_SEED = 20_240_229  # of the private random stream of evaluations
DEFAULT_TOKENS = 128  # of a completion, where the task does not say
LEAST_TOKENS = 16  # what a prompt must leave of the context when nobody asked for a completion length
FULL_MARKS = 1 - 1e-6  # a reward from here on is a right answer


@dataclass
class TextTask:
    """Problems of one turn. The fields are also the settings of `make_task`."""

    source: Source
    rewards: Rewards
    max_tokens: int = DEFAULT_TOKENS  # of a completion, > 0
    temperature: float | None = None  # > 0; None = the policy's own
    prompts_per_step: int = 16
    max_prompt_tokens: int | None = None  # keep only the last tokens of a longer prompt; None = a prompt that does not fit is an error
    least_tokens: int | None = None  # a completion may be cut to this many where the context ends; None = max_tokens must fit
    evaluation_prompts: int = 128  # held-out problems of an evaluation

    def __post_init__(self) -> None:
        check_settings(self.max_tokens, self.temperature, self.prompts_per_step)
        check = self.source.check or next(iter(self.rewards.functions.values()))
        self._correct = Rewards({"correct": check}, self.rewards.timeout, self.rewards.on_error)

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def objectives(self) -> tuple[str, ...]:
        return self.rewards.names if len(self.rewards.names) > 1 else ("reward",)

    def prompts(self, count: int, rng: np.random.Generator) -> list[Prompt]:
        """`count` training problems, drawn with `rng` alone."""
        return self.source.training(count, rng)

    def held_out(self, count: int | None = None) -> list[Prompt]:
        """Up to `count` held-out problems (default: as many as an evaluation uses), the same every time."""
        return self.source.held_out(self.evaluation_prompts if count is None else count)

    def demonstrations(self, count: int, rng: np.random.Generator) -> list[tuple[Any, str]]:
        """(prompt, right completion) pairs of training problems to imitate. Raises ValueError when the source knows no completions."""
        show = getattr(self.source, "demonstrations", None)
        if show is None:
            raise ValueError(f"the task '{self.name}' has no demonstrations to imitate; take a generated task or rows with an 'answer'")
        return show(count, rng)

    def collect(self, prompts: list[Prompt], run: Run) -> Batch:
        """Completions of every prompt under `run.policy`, drawn with `run.generator`; group = position of the prompt in the list.

        Signals: `prompt_id` [N], `prompt` (text or messages), `prompt_text`, `completion`, `columns` (lists of length N), `temperature` [N],
        and `old_entropy` [N,T] where the method looks at entropies. Raises ValueError for a prompt that leaves no room for a completion.
        """
        entropy = bool({"entropy", "old_entropy"} & run.method.needs())
        return self.attempt(run.policy, prompts, run.generator, version=run.version, entropy=entropy)

    def attempt(self, policy: Any, prompts: list[Prompt], generator: torch.Generator, *, version: int = 0, entropy: bool = False) -> Batch:
        """`collect` without a run: any policy, any generator."""
        wanted = [p.max_actions or self.max_tokens for p in prompts]
        encoded, limits = encode_prompts(policy, prompts, wanted, self.max_prompt_tokens, self.least_tokens)
        heats = [p.temperature or self.temperature or policy.temperature for p in prompts]
        out = policy.sample(
            encoded, [p.samples for p in prompts], max_tokens=limits, temperature=heats, generator=generator, want_entropy=entropy
        )
        rows = out.source.tolist()
        signals = row_signals([prompts[i] for i in rows], [heats[i] for i in rows])
        signals["limit"] = torch.tensor([limits[i] for i in rows], dtype=torch.int64)
        signals["completion"] = [policy.decode(tokens[valid]) for tokens, valid in zip(out.tokens, out.valid, strict=True)]
        if out.entropy is not None:
            signals["old_entropy"] = out.entropy
        return Batch(
            action=out.tokens,
            mask=out.valid,
            logp=out.logp,
            group=out.source,
            context=[encoded[i] for i in rows],
            valid=out.valid,
            terminated=out.finished,
            truncated=~out.finished,
            version=torch.full((len(rows),), version),
            signals=signals,
        )

    def continue_rows(self, batch: Batch, rows: Tensor, depth: Tensor, run: Run) -> Batch:
        """New endings of rows of a batch, row `rows[i]` after its first `depth[i]` tokens; see `anypo.task.Resumable`.

        The shared tokens keep the log-probs they were drawn with; equal beginnings are read once.
        """
        old, policy = batch[rows], cast(Any, run.policy)
        assert old.terminated is not None
        left = torch.where(old.terminated & (depth >= old.lengths), 0, old.signals["limit"] - depth)
        going = (left > 0).nonzero().flatten()
        begun, source, counts = torch.unique(torch.stack([rows, depth], 1)[going], dim=0, return_inverse=True, return_counts=True)
        starts = [torch.cat([batch.context[row], batch.action[row, :shared]]) for row, shared in begun.tolist()]
        out = policy.sample(
            starts, counts.tolist(), max_tokens=(batch.signals["limit"][begun[:, 0]] - begun[:, 1]).tolist(),
            temperature=batch.signals["temperature"][begun[:, 0]].tolist(), generator=run.generator, want_entropy="old_entropy" in batch.signals,
        )  # fmt: skip
        owner = going[source.argsort(stable=True)]  # whom each drawn ending belongs to
        signals = {n: old.signals[n] for n in ("prompt_id", "prompt", "prompt_text", "columns", "temperature", "limit")}
        lengths = depth.index_add(0, owner, out.valid.sum(1))
        action, logp = joined(old.action, depth, out.tokens, owner, lengths), joined(old.logp, depth, out.logp, owner, lengths)
        valid = torch.arange(action.shape[1]) < lengths[:, None]
        signals["completion"] = [policy.decode(tokens[kept]) for tokens, kept in zip(action, valid, strict=True)]
        if out.entropy is not None:
            signals["old_entropy"] = joined(old.signals["old_entropy"], depth, out.entropy, owner, lengths)
        finished = old.terminated & (left == 0)
        finished[owner] = out.finished
        return Batch(
            action=action, mask=valid, logp=logp, group=old.group, context=old.context, valid=valid, parent=rows, branch_at=depth,
            terminated=finished, truncated=~finished, version=torch.full((len(rows),), run.version), signals=signals,
        )  # fmt: skip

    def score(self, batch: Batch, run: Run | None = None) -> Tensor:
        """Rewards [N], or [N,K] with several functions. The signal `reward_applies` [N,K] says which are meant (see `RewardTable`)."""
        table = self.rewards(*_attempts(batch))
        batch.signals["reward_applies"] = table.applies
        return table.values if len(self.rewards.names) > 1 else table.values[:, 0]

    def correct(self, batch: Batch) -> Tensor:
        """[N] bool: full marks by the source's own check, or by the first reward function where the source has none."""
        return self._correct(*_attempts(batch)).values[:, 0] >= FULL_MARKS

    def evaluate(self, run: Run) -> dict[str, float]:
        """`pass@1`, the share of held-out problems answered right at the first attempt (sampled at the task's temperature, same random numbers
        every time), the mean `reward` and, of several, each `reward/<name>`, the mean `length` in tokens and the share `finished`."""
        batch = self._evaluation_batch(run, self.held_out())
        correct = self.correct(batch)
        rewards = self.score(batch)
        table = {"pass@1": _mean(correct), "reward": _mean(rewards if rewards.dim() == 1 else rewards.sum(dim=1))}
        if rewards.dim() == 2:
            table |= {f"reward/{name}": _mean(rewards[:, k]) for k, name in enumerate(self.rewards.names)}
        assert batch.terminated is not None
        return table | {"length": _mean(batch.lengths), "finished": _mean(batch.terminated)}

    def sample_completions(self, run: Run, count: int) -> list[dict[str, Any]]:
        """Attempts at the first `count` held-out problems, to be read: `prompt`, `completion`, `reward`."""
        batch = self._evaluation_batch(run, self.held_out(count))
        rewards = self.score(batch)
        totals = (rewards if rewards.dim() == 1 else rewards.sum(dim=1)).tolist()
        texts = zip(batch.signals["prompt_text"], batch.signals["completion"], totals, strict=True)
        return [{"prompt": prompt, "completion": completion, "reward": reward} for prompt, completion, reward in texts]

    def _evaluation_batch(self, run: Run, prompts: list[Prompt]) -> Batch:
        with torch.no_grad():
            return self.attempt(run.policy, prompts, torch.Generator().manual_seed(EVALUATION_SEED), version=run.version)


def _attempts(batch: Batch) -> tuple[list[Any], list[str], list[dict[str, Any]], list[list[int]]]:
    tokens = [action[mask].tolist() for action, mask in zip(batch.action, batch.mask, strict=True)]
    return batch.signal("prompt"), batch.signal("completion"), batch.signal("columns"), tokens


def joined(beginning: Tensor, depth: Tensor, ending: Tensor, owner: Tensor, lengths: Tensor) -> Tensor:
    """The first `depth[i]` entries of `beginning` [M,T] and then, where row i has one, the row of `ending` [n,t] that it owns; 0 from `lengths[i]`
    on. `owner` [n] names the row that each ending belongs to."""
    out = beginning.new_zeros((len(beginning), int(lengths.max()) if len(lengths) else 0))
    shared = torch.arange(out.shape[1]) < depth[:, None]
    width = min(out.shape[1], beginning.shape[1])
    out[:, :width] = torch.where(shared[:, :width], beginning[:, :width], out[:, :width])
    place = torch.arange(out.shape[1])[None] - depth[owner][:, None]
    written = (place >= 0) & (torch.arange(out.shape[1]) < lengths[owner][:, None])
    if ending.numel():
        out[owner] = torch.where(written, ending.gather(1, place.clamp(0, ending.shape[1] - 1)), out[owner])
    return out


def _mean(values: Tensor) -> float:
    return float(values.double().mean())


def check_settings(max_tokens: int, temperature: float | None, prompts_per_step: int) -> None:
    """Raise ValueError for settings of a task that are out of range."""
    for name, value in {"max_tokens": max_tokens, "prompts_per_step": prompts_per_step}.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    if temperature is not None and not temperature > 0:
        raise ValueError(f"the temperature must be above 0, not {temperature}")


def row_signals(prompts: list[Prompt], temperatures: list[float]) -> dict[str, Any]:
    """What a batch says about the problem of each row; both lists have one entry a row."""
    return {
        "prompt_id": torch.tensor([p.id for p in prompts], dtype=torch.int64),
        "prompt": [p.content for p in prompts],
        "prompt_text": [prompt_text(p.content) for p in prompts],
        "columns": [p.columns for p in prompts],
        "temperature": torch.tensor(temperatures),
    }


def prompt_text(content: Any) -> str:
    """A prompt to be read: the text, or the messages with their roles."""
    return "\n".join(f"{m['role']}: {m['content']}" for m in content) if isinstance(content, list) else str(content)


def encode_prompts(
    policy: Any, prompts: list[Prompt], wanted: list[int], max_prompt_tokens: int | None = None, least_tokens: int | None = None
) -> tuple[list[Tensor], list[int]]:
    """Tokens of every prompt, and how many its completions may have: `wanted`, or what the context leaves when that is `least_tokens` or more.

    Raises ValueError, naming the prompt, when the context leaves too little.
    """
    encoded, limits = [], []
    for prompt, most in zip(prompts, wanted, strict=True):
        tokens = policy.encode(prompt.content)
        tokens = tokens if max_prompt_tokens is None else tokens[-max_prompt_tokens:]
        least = most if least_tokens is None else min(least_tokens, most)
        room = policy.context_limit - len(tokens)
        if room < least:
            keep = policy.context_limit - least
            remedy = f"set max_prompt_tokens={keep} to keep only its last tokens" if keep > 0 else "set a smaller max_tokens"
            text = prompt_text(prompt.content)
            raise ValueError(
                f"prompt {prompt.id} ({text if len(text) <= 40 else text[:40] + '...'!r}) has {len(tokens)} tokens; with {least} for the completion "
                f"that is more than the model's context of {policy.context_limit}. Shorten it, or {remedy}"
            )
        encoded.append(tokens)
        limits.append(min(most, room))
    return encoded, limits


# ---- tasks by name

AGENT_TASKS = ("calculator", "toolcalc", "grid", "gymnasium", "textarena", "textworld")  # built by agents.py
PREFIXES: dict[str, Callable[[str], Any]] = {"reasoning_gym": ReasoningGym, "jsonl": jsonl_rows, "hf": hub_rows}


def make_task(
    spec: Any,
    *,
    rewards: Any = None,
    max_tokens: int | None = None,
    reward_timeout: float | None = 30.0,
    reward_errors: str = "stop",
    **settings: Any,
) -> Any:
    """A task by its name.

    `spec`: a generated kind (`arithmetic`, `countdown`, ...), a multi-turn task of `agents.py` (`calculator`, `grid`, ...),
    `reasoning_gym:<data set>`, `jsonl:<file>`, `hf:<data set>[/configuration][:split]`, `<file>.py:<function>`, a function that returns a list
    of dicts, or such a list.
    `rewards`: one reward function, a list or a dict of them, or `<file>.py:<function>`; None = the source's own check. `reward_timeout` in
    seconds and `reward_errors` ("stop" or "zero") say what happens when one fails (see `Rewards`). `settings` are fields of the task. A task that
    is one already is returned as it is. Raises ValueError for whatever cannot be used.
    """
    if hasattr(spec, "collect"):
        return spec
    if isinstance(spec, str) and spec.partition(":")[0] in AGENT_TASKS:
        from anypo.domains.language import agents

        if rewards is not None:
            raise ValueError(f"the task '{spec}' is rewarded by its environment; leave out the reward functions")
        return agents.make_agent_task(spec, max_tokens=max_tokens, **settings)
    source = _source(spec)
    if rewards is None and source.check is None:
        lacking = source.lacking.id if isinstance(source, Rows) and source.lacking else "?"
        raise ValueError(
            f"problem {lacking} of {source.name} has no 'answer' to compare with; add one to every row, or pass reward functions"
        )
    functions = as_functions(rewards) if rewards is not None else as_functions({"correct": source.check})
    if max_tokens is None:
        generated = isinstance(source, Generated)
        max_tokens = source.kind.max_tokens if isinstance(source, Generated) else DEFAULT_TOKENS
        settings.setdefault("least_tokens", None if generated else LEAST_TOKENS)
    refuse_unknown(settings, TextTask)
    return TextTask(source, Rewards(functions, reward_timeout, reward_errors), max_tokens, **settings)


def refuse_unknown(settings: dict[str, Any], task: type) -> None:
    """Raise ValueError when a setting is no field of the task."""
    known = [f.name for f in fields(task) if f.name not in ("source", "rewards", "environment")]
    for name in settings:
        if name not in known:
            raise ValueError(f"{task.__name__} has no setting '{name}'{did_you_mean(name, known)}")


def _source(spec: Any) -> Source:
    if isinstance(spec, list | tuple):
        return given_rows("rows", spec)
    if callable(spec):
        return called_rows(spec, getattr(spec, "__name__", type(spec).__name__))
    if not isinstance(spec, str):
        raise ValueError(f"a task is a name, a function or a list of dicts, not {type(spec).__name__}")
    if spec in PROBLEMS:
        return Generated(PROBLEMS[spec])
    prefix, _, rest = spec.partition(":")
    if Path(spec.rpartition(":")[0]).suffix == ".py":
        return called_rows(as_function(spec), spec)
    if prefix not in PREFIXES:
        raise ValueError(f"unknown task '{spec}'{did_you_mean(prefix, [*PROBLEMS, *AGENT_TASKS, *PREFIXES])}")
    if not rest:
        raise ValueError(f"'{spec}' names nothing after the colon; write {prefix}:<name>")
    return PREFIXES[prefix](rest)
