"""Reward functions for text: calling the user's own safely, and a few ready ones.

The convention is TRL's: a reward function is called with keyword arguments, `f(prompts=[...], completions=[...], **columns)`, each a list of
one entry a completion, and returns a list of floats. Completions are strings, or lists with one assistant message when the prompt is a
list of messages. A function without `**kwargs` receives the arguments it names and no others; an `async` function is awaited. As in TRL, `None`
for a completion means "does not apply": it adds nothing to the sum of rewards and is marked in `RewardTable.applies`.

Left out: TRL's `trainer_state`, `log_extra` and `log_metric` arguments (there is no trainer here; functions that give them a default work),
and reward models (a callable that holds one is a reward function like any other).

How the time limit works, and what it cannot reach, is said in `limits.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import inspect
import logging
import math
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anypo.domains.language.limits import Hang, in_child, limited
from anypo.domains.language.sandbox import run_python

logger = logging.getLogger("anypo")
RewardFunction = Callable[..., Any]
RESERVED = ("prompts", "completions", "completion_ids")
MATH_SECONDS = 3.0  # a pair of expressions that takes longer to compare counts as different


class RewardError(ValueError):
    """A reward function failed; the message names it, says how, and what to do."""


class RewardTable(NamedTuple):
    """Rewards of N completions by K functions."""

    values: Tensor  # [N,K] float32, 0 where a function does not apply or failed
    applies: Tensor  # [N,K] bool, False where a function returned None or failed


@dataclass
class Rewards:
    """Named reward functions, called so that one bad function or row does not cost the batch.

    A function that hangs longer than `timeout` is called again row by row; only the rows that hang again (each gets four times its share
    of `timeout`, at least a second) count 0. A function that raises, returns the wrong number of rewards, NaN, an infinity or something
    that is no number stops the run with a RewardError (`on_error="stop"`), or is handled like one that hangs (`on_error="zero"`).
    """

    functions: dict[str, RewardFunction]
    timeout: float | None = 30.0  # seconds that one call may take, > 0; None = no limit
    on_error: str = "stop"  # "stop" or "zero"
    failures: dict[str, int] = field(default_factory=dict)  # rows that counted 0 because the function failed, by name

    def __post_init__(self) -> None:
        if not self.functions:
            raise ValueError("no reward function was given; pass at least one")
        if self.on_error not in ("stop", "zero"):
            raise ValueError(f"on_error is 'stop' or 'zero', not '{self.on_error}'")
        if self.timeout is not None and not self.timeout > 0:
            raise ValueError(f"the time limit of a reward function must be above 0 seconds, not {self.timeout}; use None for no limit")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.functions)

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[str],
        columns: Sequence[dict[str, Any]],
        completion_ids: Sequence[Any] | None = None,
    ) -> RewardTable:
        """Score N completions. `columns`: one dict a row; a key that some rows lack is None there."""
        prompts = list(prompts)
        known: dict[str, list[Any]] = {key: [row.get(key) for row in columns] for row in columns for key in row if key not in RESERVED}
        known |= {"prompts": prompts, "completions": [_as_messages(p, c) for p, c in zip(prompts, completions, strict=True)]}
        if completion_ids is not None:
            known["completion_ids"] = list(completion_ids)
        scored = [self._score(name, function, known, len(prompts)) for name, function in self.functions.items()]
        values = [[value if value is not None else 0.0 for value in row] for row in scored]
        applies = [[value is not None for value in row] for row in scored]
        shape = (len(self.functions), len(prompts))
        return RewardTable(torch.tensor(values).reshape(shape).T.contiguous(), torch.tensor(applies).reshape(shape).T.contiguous())

    def _score(self, name: str, function: RewardFunction, known: dict[str, list[Any]], count: int) -> list[float | None]:
        arguments = _accepted(name, function, known)
        try:
            return limited(partial(_call, name, function, arguments, count), self.timeout)
        except Hang:
            reason, isolate = f"took longer than {self.timeout:g} seconds", True
        except Exception as error:
            reason, isolate = _reason(error), False
            if self.on_error == "stop":
                raise RewardError(
                    f"the reward function '{name}' {reason}; correct it, or count 0 there with reward_errors='zero'"
                ) from error
        return self._rows(name, function, arguments, count, reason, isolate)

    def _rows(
        self, name: str, function: RewardFunction, arguments: dict[str, list[Any]], count: int, reason: str, isolate: bool
    ) -> list[float | None]:
        """One call a row, so that only the bad rows are lost. `isolate`: in killable children."""
        runner = in_child if isolate else limited
        seconds = None if self.timeout is None else max(min(1.0, self.timeout), 4 * self.timeout / count)
        values: list[float | None] = [None] * count
        failed = []
        for i in range(count):
            row = {key: value[i : i + 1] for key, value in arguments.items()}
            try:
                if count == 1:
                    raise RewardError(reason)  # the one row is the batch that has just failed
                values[i] = runner(partial(_call, name, function, row, 1), seconds)[0]
            except (Exception, Hang):
                failed.append(i)
        self.failures[name] = self.failures.get(name, 0) + len(failed)
        outcome = f"completion {failed[0]} is the first of {len(failed)} that count 0" if failed else "called row by row it failed nowhere"
        logger.warning("the reward function '%s' %s; of %d completions, %s; the other rewards are kept", name, reason, count, outcome)
        return values


def as_functions(rewards: Any) -> dict[str, RewardFunction]:
    """Reward functions by name, from a callable, a list of them, a dict, or `file.py:name` (several joined by commas).

    Raises ValueError for anything else.
    """
    if isinstance(rewards, dict):
        return {name: as_function(value) for name, value in rewards.items()}
    if isinstance(rewards, str):
        rewards = [part.strip() for part in rewards.split(",") if part.strip()]
    functions = [as_function(value) for value in (rewards if isinstance(rewards, list | tuple) else [rewards])]
    named: dict[str, RewardFunction] = {}
    for function in functions:
        base = getattr(function, "__name__", type(function).__name__).strip("<>")
        name, number = base, 2
        while name in named:
            name, number = f"{base}_{number}", number + 1
        named[name] = function
    return named


def as_function(value: Any) -> Callable[..., Any]:
    """A callable as it is; `file.py:name` and `package.module:name` are imported. Raises ValueError with the reason."""
    if callable(value):
        return value
    module_name, _, name = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    if not module_name or not name:
        raise ValueError(f"{value!r} is no function; pass a callable, or a text such as my_file.py:my_function")
    try:
        if module_name.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(module_name).stem, module_name)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(module_name)
        function = getattr(module, name)
    except Exception as error:
        raise ValueError(f"cannot load '{name}' from '{module_name}': {type(error).__name__}: {error}") from error
    if not callable(function):
        raise ValueError(f"'{name}' in '{module_name}' is no function but {type(function).__name__}")
    return function


# ---- calling a function that may fail


def _call(name: str, function: RewardFunction, arguments: dict[str, list[Any]], count: int) -> list[float | None]:
    result = function(**arguments)
    if inspect.isawaitable(result):
        result = asyncio.run(_awaited(result))
    return _numbers(result, count)


async def _awaited(result: Any) -> Any:
    return await result


def _numbers(result: Any, count: int) -> list[float | None]:
    """The rewards as `count` floats or None. Raises RewardError with a half-sentence about what else it is."""
    if hasattr(result, "tolist"):
        result = result.tolist()
    if not isinstance(result, list | tuple):
        raise RewardError(f"returned {_kind(result)} instead of a list with one number per completion")
    if len(result) != count:
        raise RewardError(f"returned {len(result)} rewards for {count} completions")
    return [_number(value, i) for i, value in enumerate(result)]


def _number(value: Any, row: int) -> float | None:
    if value is None:
        return None
    if hasattr(value, "item") and getattr(value, "size", 1) != 0:
        with contextlib.suppress(ValueError, RuntimeError):  # more than one element: no number, said below
            value = value.item()
    if not isinstance(value, int | float):
        raise RewardError(f"returned {_kind(value)} for completion {row}, which is no number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RewardError(f"returned {number} for completion {row}, and rewards must be finite (None means that it does not apply)")
    return number


def _kind(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:37] + '...'}"


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, RewardError) else f"raised {type(error).__name__}: {error}"


def _accepted(name: str, function: RewardFunction, known: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The arguments that the function takes. Raises RewardError when it wants a column that the task does not have."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return known
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for parameter in named:
        if parameter.default is parameter.empty and parameter.name not in known:
            have = ", ".join(key for key in known if key not in RESERVED) or "none"
            raise RewardError(f"the reward function '{name}' asks for the column '{parameter.name}'; the task has: {have}")
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return known
    return {p.name: known[p.name] for p in named if p.name in known}


def _as_messages(prompt: Any, completion: str) -> Any:
    return completion if isinstance(prompt, str) else [{"role": "assistant", "content": completion}]


# ---- ready rewards


def completion_text(completion: Any) -> str:
    """The text of a completion, whether it is a string or a list of messages."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def each(check: Callable[..., float], name: str) -> RewardFunction:
    """A reward function from one that looks at a single completion: `check(completion, **columns) -> float`."""

    def reward(completions: list[Any], **columns: Any) -> list[float]:
        rows = {key: value for key, value in columns.items() if key not in RESERVED}
        return [check(completion_text(c), **{key: value[i] for key, value in rows.items()}) for i, c in enumerate(completions)]

    reward.__name__ = name
    return reward


def exact_match(completions: list[Any], answer: list[Any], **columns: Any) -> list[float]:
    """1 when the completion is the answer; white space around either is ignored."""
    return [float(completion_text(c).strip() == str(a).strip()) for c, a in zip(completions, answer, strict=True)]


def math_equal(completions: list[Any], answer: list[Any], **columns: Any) -> list[float]:
    """1 when the last mathematical expression of the completion equals the answer (math-verify; plain numbers need no package)."""
    return [float(same_mathematics(str(a), completion_text(c))) for c, a in zip(completions, answer, strict=True)]


def answer_match(completions: list[Any], answer: list[Any], **columns: Any) -> list[float]:
    """`math_equal` for answers that look like a number or LaTeX, `exact_match` for the others."""
    pairs = [(completion_text(c), final_answer(str(a))) for c, a in zip(completions, answer, strict=True)]
    return [float(same_mathematics(a, c) if looks_mathematical(a) else c.strip() == a) for c, a in pairs]


def final_answer(answer: str) -> str:
    """What follows the last `####`, by which data sets of worked solutions mark the answer; otherwise the whole text. Stripped."""
    return answer.rpartition("####")[2].strip()


def looks_mathematical(answer: str) -> bool:
    """Whether an answer is a number, a fraction or LaTeX."""
    return _plain_number(answer) is not None or "\\" in answer or "$" in answer


def same_mathematics(answer: str, text: str) -> bool:
    """Whether the text gives the answer. False when comparing takes longer than MATH_SECONDS.

    Raises ValueError when math-verify is needed and not installed.
    """
    answer, text = answer.strip(), text.strip()
    if not text or answer == text:
        return answer == text
    left, right = _plain_number(answer), _plain_number(text)
    if left is not None and right is not None:
        return left == right
    try:
        import math_verify
    except ImportError as error:
        raise ValueError("comparing mathematical answers needs math-verify; install it with: pip install 'anypo[math]'") from error

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of its own time limit being off; `limited` takes its place

    def compare() -> bool:
        gold = math_verify.parse(answer if "$" in answer or "\\boxed" in answer else f"${answer}$", parsing_timeout=None)
        return bool(gold) and math_verify.verify(gold, math_verify.parse(text, parsing_timeout=None), timeout_seconds=None)

    try:
        return limited(compare, MATH_SECONDS)
    except Hang:
        return False


def _plain_number(text: str) -> Fraction | None:
    digits = text.strip().replace(",", "")
    if len(digits) > 100 or not re.fullmatch(r"[+-]?(\d+(\.\d*)?|\.\d+)(/\d+)?", digits):
        return None
    top, _, bottom = digits.partition("/")
    return Fraction(top) / Fraction(bottom or "1") if Fraction(bottom or "1") else None


def format_reward(pattern: str) -> RewardFunction:
    """A reward of 1 when the whole completion matches the regular expression (`.` matches line ends too). Raises ValueError for a bad one."""
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"'{pattern}' is no regular expression: {error}") from error

    def format_match(completions: list[Any], **columns: Any) -> list[float]:
        return [float(compiled.fullmatch(completion_text(c)) is not None) for c in completions]

    return format_match


def length_penalty(limit: int) -> RewardFunction:
    """0 up to `limit` characters (> 0), then falling in a straight line to -1 at twice the limit and beyond."""
    if limit <= 0:
        raise ValueError(f"the length limit must be above 0 characters, not {limit}")

    def length(completions: list[Any], **columns: Any) -> list[float]:
        return [-min(max(len(completion_text(c)) / limit - 1.0, 0.0), 1.0) for c in completions]

    return length


def python_tests(completions: list[Any], tests: list[str], **columns: Any) -> list[float]:
    """1 when the completion's Python code, followed by the row's `tests`, runs to its end in the sandbox.

    The code is the last fenced block, or the whole completion. A random mark printed after the tests shows that the end was reached: code
    that leaves early earns nothing. It still shares one interpreter with its tests, and could tamper with them.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(_passes, map(completion_text, completions), tests))


def _passes(text: str, tests: str) -> float:
    blocks = re.findall(r"```(?:python|py)?[ \t]*\n(.*?)```", text, re.DOTALL)
    mark = os.urandom(16).hex()
    result = run_python(f"{blocks[-1] if blocks else text}\n{tests}\nprint('{mark}')\n")
    return float(result.status == "ok" and result.stdout.rstrip().endswith(mark))
