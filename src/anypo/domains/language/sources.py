"""Where text problems come from: generated kinds, rows of a file or data set, reasoning-gym.

A source gives training and held-out problems that do not overlap, as `Prompt` objects, and knows the reward that checks an answer. Rows need
a `prompt` (or `question`, or `messages`): text, or a list of chat messages whose last one, when it is the assistant's, is left out. `answer`
is what the default reward compares with; every other field is a column that reward functions receive.

Left out: streaming, shuffling files that do not fit in memory, images.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from anypo.domains.language.problems import Problem, ProblemKind, held_out_problems, training_problems
from anypo.domains.language.rewards import RewardFunction, answer_match, each
from anypo.task import Prompt

logger = logging.getLogger("anypo")
HELD_OUT_EVERY = 10  # rows: the last of every ten is held out
REASONING_POOL = 10_000  # training problems of a reasoning-gym data set; some refuse to be larger
REASONING_HELD_OUT_SEED = 10**9  # a problem's seed is that of the set plus its index, so the splits share none


class Source(Protocol):
    """Problems in two splits that share none."""

    name: str
    check: RewardFunction | None  # the reward for a right answer, None when the source does not know

    def training(self, count: int, rng: np.random.Generator) -> list[Prompt]:
        """`count` training problems, drawn with `rng` alone."""
        ...

    def held_out(self, count: int) -> list[Prompt]:
        """Up to `count` held-out problems, the same every time."""
        ...


class Generated:
    """A kind of `problems.py`; a problem's identity is a hash of its text."""

    def __init__(self, kind: ProblemKind) -> None:
        self.kind, self.name = kind, kind.name
        self.check: RewardFunction | None = each(kind.check, "correct")

    def training(self, count: int, rng: np.random.Generator) -> list[Prompt]:
        return [_generated(p) for p in training_problems(self.kind, count, rng)]

    def held_out(self, count: int) -> list[Prompt]:
        return [_generated(p) for p in held_out_problems(self.kind, count)]

    def demonstrations(self, count: int, rng: np.random.Generator) -> list[tuple[Any, str]]:
        """Training problems with one right completion each."""
        return [(p.prompt, self.kind.solve(p)) for p in training_problems(self.kind, count, rng)]


def _generated(problem: Problem) -> Prompt:
    return Prompt(text_id(problem.prompt), problem.prompt, problem.columns)


def text_id(text: str) -> int:
    """A number in [0, 2^63) that identifies a text, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


class Rows:
    """Problems given as rows. Without rows of their own for it, every tenth row is held out; fewer than ten rows serve for both."""

    def __init__(self, name: str, rows: list[Prompt], held_out: list[Prompt] | None = None) -> None:
        if not rows:
            raise ValueError(f"{name} holds no problems; give at least one row with a 'prompt'")
        self.name = name
        self.lacking = next((p for p in [*rows, *(held_out or [])] if p.columns.get("answer") is None), None)
        self.check: RewardFunction | None = answer_match if self.lacking is None else None
        if held_out is None:
            held_out = rows[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
            rows = [p for i, p in enumerate(rows) if i % HELD_OUT_EVERY != HELD_OUT_EVERY - 1]
        if not held_out:
            logger.warning("%s has fewer than %d rows, so none is held out: evaluation uses the training problems", name, HELD_OUT_EVERY)
        self.rows, self.kept = rows, held_out or rows

    def training(self, count: int, rng: np.random.Generator) -> list[Prompt]:
        chosen = rng.choice(len(self.rows), size=count, replace=count > len(self.rows))
        return [self.rows[i] for i in chosen]

    def held_out(self, count: int) -> list[Prompt]:
        return self.kept[:count]

    def demonstrations(self, count: int, rng: np.random.Generator) -> list[tuple[Any, str]]:
        """Training problems with their `completion`, or else their `answer`. Raises ValueError for rows that have neither."""
        chosen = self.training(count, rng)
        shown = [p.columns.get("completion", p.columns.get("answer")) for p in chosen]
        if None in shown:
            raise ValueError(f"{self.name} has a row with neither 'completion' nor 'answer', so it cannot be imitated; add one of them")
        return [(p.content, str(text)) for p, text in zip(chosen, shown, strict=True)]


class ReasoningGym:
    """A data set of the package reasoning-gym, checked by its own `score_answer`.

    An answer inside `<answer>` tags is taken out of them first. Raises ValueError for an unknown name or when the package is missing.
    """

    def __init__(self, dataset: str) -> None:
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
            from reasoning_gym.utils import extract_answer
        except ImportError as error:
            raise ValueError("this task needs reasoning-gym; install it with: pip install 'anypo[reasoning]'") from error
        if dataset not in DATASETS:
            raise ValueError(f"reasoning-gym has no data set '{dataset}'{did_you_mean(dataset, DATASETS)}")
        self.name = f"reasoning_gym:{dataset}"
        self.data = reasoning_gym.create_dataset(dataset, size=REASONING_POOL, seed=0)
        self.kept = reasoning_gym.create_dataset(dataset, size=REASONING_POOL, seed=REASONING_HELD_OUT_SEED)

        def score(completion: str, **entry: Any) -> float:
            answer = extract_answer(completion)
            return float(self.data.score_answer(completion.strip() if answer is None else answer, entry))

        self.check: RewardFunction | None = each(score, "score")

    def training(self, count: int, rng: np.random.Generator) -> list[Prompt]:
        return [self._prompt(self.data, int(i), 0) for i in rng.integers(len(self.data), size=count)]

    def held_out(self, count: int) -> list[Prompt]:
        return [self._prompt(self.kept, i, REASONING_HELD_OUT_SEED) for i in range(min(count, len(self.kept)))]

    @staticmethod
    def _prompt(data: Any, index: int, seed: int) -> Prompt:
        entry = data[index]
        return Prompt(seed + index, entry["question"], dict(entry))


# ---- rows of files, data sets and functions


def jsonl_rows(path: str) -> Rows:
    """Rows of a JSON-lines file; `name.heldout.jsonl` beside `name.jsonl` holds the held-out ones where it exists.

    Raises ValueError with the line number for a line that is not JSON, is no object or has no prompt.
    """
    file = Path(path)
    beside = file.with_name(f"{file.stem}.heldout{file.suffix}")
    rows = _read_jsonl(file)
    return Rows(f"jsonl:{path}", rows, _read_jsonl(beside, first_id=len(rows)) if beside.exists() else None)


def _read_jsonl(file: Path, first_id: int = 0) -> list[Prompt]:
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text (byte {error.start}); a task file holds one JSON object a line") from error
    rows: list[Prompt] = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"line {number} of {file} is not JSON: {error.msg} at column {error.colno}") from error
            rows.append(row_prompt(row, first_id + len(rows), f"line {number} of {file}"))
    return rows


def given_rows(name: str, rows: Iterable[Any]) -> Rows:
    """Rows from a list of dicts. Raises ValueError with the row number for one without a prompt."""
    return Rows(name, [row_prompt(row, i, f"row {i} of {name}") for i, row in enumerate(rows)])


def called_rows(function: Callable[[], Any], name: str) -> Rows:
    """Rows from a function without arguments that returns a list of dicts."""
    try:
        rows = function()
    except Exception as error:  # the user's code may raise anything
        raise ValueError(f"the task function '{name}' raised {type(error).__name__}: {error}") from error
    if not isinstance(rows, list | tuple):
        raise ValueError(f"the task function '{name}' returned {type(rows).__name__}; it must return a list of dicts with a 'prompt' each")
    return given_rows(name, rows)


def hub_rows(spec: str) -> Rows:
    """Rows of a Hugging Face data set or of a local folder that `datasets` reads: `owner/name[/configuration][:split]`, split `train` by default."""
    try:
        import datasets
    except ImportError as error:
        raise ValueError("this task needs the package datasets; install it with: pip install 'anypo[hub]'") from error
    name, _, split = spec.partition(":")
    configuration = None
    if not Path(name).exists() and name.count("/") == 2:
        name, _, configuration = name.rpartition("/")
    try:
        data = datasets.load_dataset(name, configuration, split=split or "train")
    except Exception as error:  # the package raises a dozen unrelated types for a wrong name, split or connection
        raise ValueError(f"cannot load the data set '{spec}': {error}") from error
    return given_rows(f"hf:{spec}", data)


def row_prompt(row: Any, number: int, where: str) -> Prompt:
    """One row as a Prompt. Raises ValueError that begins with `where`."""
    if not isinstance(row, dict):
        raise ValueError(f"{where} is {type(row).__name__}; each row is an object with a 'prompt'")
    key = next((k for k in ("prompt", "question", "messages") if row.get(k)), None)
    if key is None:
        raise ValueError(f"{where} has no 'prompt' (its fields: {', '.join(map(str, row)) or 'none'}); add one, text or a list of messages")
    content = row[key]
    if isinstance(content, list):
        if not all(isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in content):
            raise ValueError(f"{where} has a '{key}' that is a list but not of messages with 'role' and 'content'")
        content = content[:-1] if content[-1]["role"] == "assistant" else content
    if not isinstance(content, str | list) or not content:
        raise ValueError(f"{where} has a '{key}' that is neither text nor a list of messages")
    return Prompt(number, content, {k: v for k, v in row.items() if k != key})


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ "; did you mean x?" when something known is close to the name, else the known names."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=2)
    if close:
        return f"; did you mean {' or '.join(close)}?"
    return f"; known: {', '.join(names[:12])}{', ...' if len(names) > 12 else ''}"
