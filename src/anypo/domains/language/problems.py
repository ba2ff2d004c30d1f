"""Small generated text problems whose answers a program can verify.

Five kinds, each a `ProblemKind` in `PROBLEMS`: `arithmetic` (one sum), `sorting` (five digits), `chain` (running totals), `countdown`
(an expression from given numbers; many answers are right) and `walk` (a shortest way around walls; many answers are right). Everything
is a pure function of its arguments and of the random generator handed in; nothing here imports torch.

A prompt belongs to the training or to the held-out split by a hash of its text alone, so the split is the same in every run, on every
machine and in pre-training. The split is by text: `47+38=` may be held out while `38+47=` is trained on.

Left out: partial credit. Every check returns 0 or 1, because a graded reward on problems this small rewards guessing.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import operator
import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

HELD_OUT_ONE_IN = 8  # one prompt in eight is never trained on
HELD_OUT_SEED = 20240229  # the held-out problems are the same everywhere
TRIES = 200  # draws allowed for each problem asked for, before the space counts as exhausted


@dataclass(frozen=True)
class Problem:
    """One problem: what the model reads, the result it is judged by, and what the check needs beside the completion (always with `answer`).

    `answer` is a correct completion of every kind but countdown, where it is the target; `ProblemKind.solve` gives one for every kind.
    """

    prompt: str
    answer: str
    columns: dict[str, Any]


@dataclass(frozen=True)
class ProblemKind:
    """A family of problems.

    `check` gets the text after the prompt, up to but without the end-of-sequence token; a completion that was cut off at `max_tokens` is
    checked as it stands. It never raises on any text.
    """

    name: str
    generate: Callable[[np.random.Generator], Problem]
    check: Callable[..., float]  # check(completion, **columns) -> reward in [0, 1]
    max_tokens: int  # enough characters for every correct answer and the end-of-sequence token
    solve: Callable[[Problem], str]  # one correct completion


def is_held_out(prompt: str) -> bool:
    """Whether a prompt belongs to the held-out split (about one in eight does)."""
    digest = hashlib.blake2b(prompt.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0


def training_problems(kind: ProblemKind | str, count: int, rng: np.random.Generator) -> list[Problem]:
    """`count` problems of the training split with distinct prompts, drawn with `rng` alone.

    Raises ValueError when the kind is unknown or has too few distinct problems.
    """
    return _distinct(problem_kind(kind), count, rng, held_out=False)


def held_out_problems(kind: ProblemKind | str, count: int) -> list[Problem]:
    """The first `count` held-out problems, distinct and always the same; a longer list begins with the shorter one.

    Raises ValueError when the kind is unknown or has too few distinct problems.
    """
    return _distinct(problem_kind(kind), count, np.random.default_rng(HELD_OUT_SEED), held_out=True)


def problem_kind(kind: ProblemKind | str) -> ProblemKind:
    """The kind of that name, or the kind itself. Raises ValueError with the known names."""
    if isinstance(kind, ProblemKind):
        return kind
    if kind not in PROBLEMS:
        raise ValueError(f"unknown problem kind '{kind}'; the kinds are {', '.join(PROBLEMS)}")
    return PROBLEMS[kind]


def _distinct(kind: ProblemKind, count: int, rng: np.random.Generator, held_out: bool) -> list[Problem]:
    if count < 0:
        raise ValueError(f"the number of problems must be 0 or more, not {count}")
    found: dict[str, Problem] = {}
    for _ in range(count * TRIES):
        if len(found) == count:
            break
        problem = kind.generate(rng)
        if is_held_out(problem.prompt) is held_out:
            found.setdefault(problem.prompt, problem)
    if len(found) < count:
        split = "held-out" if held_out else "training"
        raise ValueError(
            f"'{kind.name}' gave only {len(found)} distinct {split} problems in {count * TRIES} draws; "
            f"ask for at most {len(found)}, not {count}"
        )
    return list(found.values())


def _digits(rng: np.random.Generator, low: int, high: int, count: int) -> list[int]:
    """`count` integers between low and high, both included."""
    return [int(value) for value in rng.integers(low, high + 1, size=count)]


# ---- arithmetic: one sum or difference of two-digit numbers, never below zero


def _generate_arithmetic(rng: np.random.Generator) -> Problem:
    a, b = _digits(rng, 10, 99, 2)
    minus = bool(rng.integers(2))
    if minus:
        a, b = max(a, b), min(a, b)
    answer = str(a - b if minus else a + b)
    return Problem(f"{a}{'-' if minus else '+'}{b}=", answer, {"answer": answer})


def check_exact(completion: str, answer: str, **columns: Any) -> float:
    """1 when the completion is the answer and nothing else; white space around it is ignored."""
    return float(completion.strip() == answer)


# ---- sorting: five digits in ascending order


def _generate_sorting(rng: np.random.Generator) -> Problem:
    digits = _digits(rng, 0, 9, 5)
    answer = " ".join(map(str, sorted(digits)))
    return Problem(f"sort {' '.join(map(str, digits))}:", answer, {"answer": answer})


# ---- chain: the running totals of a sum with three operations


def _generate_chain(rng: np.random.Generator) -> Problem:
    total, *terms = _digits(rng, 1, 20, 4)
    text, totals = str(total), []
    for term, minus in zip(terms, _digits(rng, 0, 1, 3), strict=True):
        sign = "-" if minus and total >= term else "+"  # no total is below zero
        total = total - term if sign == "-" else total + term
        text += f"{sign}{term}"
        totals.append(str(total))
    answer = ",".join(totals)
    return Problem(f"steps {text}:", answer, {"answer": answer})


# ---- countdown: reach the target with every given number used once

OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def _expressions(numbers: list[int]) -> Iterator[tuple[str, int]]:
    """Every expression without parentheses over the numbers in every order, simplest operations first, with its value."""
    for signs in itertools.product("+-*", repeat=len(numbers) - 1):
        for order in itertools.permutations(numbers):
            total, product, sign = 0, order[0], 1
            for operation, number in zip(signs, order[1:], strict=True):
                if operation == "*":
                    product *= number
                else:
                    total, product, sign = total + sign * product, number, 1 if operation == "+" else -1
            text = str(order[0]) + "".join(f"{s}{n}" for s, n in zip(signs, order[1:], strict=True))
            yield text, total + sign * product


def _generate_countdown(rng: np.random.Generator) -> Problem:
    numbers = _digits(rng, 1, 9, 3)
    reachable = sorted({value for _, value in _expressions(numbers) if 1 <= value <= 99})
    target = str(reachable[int(rng.integers(len(reachable)))])
    return Problem(f"make {target} from {' '.join(map(str, numbers))}:", target, {"answer": target, "numbers": numbers})


def check_countdown(completion: str, answer: str, numbers: list[int], **columns: Any) -> float:
    """1 when the completion is an expression in + - * / and parentheses that uses each number exactly once and equals the answer.

    The text is parsed and walked, never executed; division is exact.
    """
    text = completion.strip()
    if len(text) > 64 or not re.fullmatch(r"[0-9+\-*/() ]+", text):
        return 0.0
    used: list[int] = []
    try:
        value = _value(ast.parse(text, mode="eval").body, used)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return 0.0
    return float(sorted(used) == sorted(numbers) and value == int(answer))


def _value(node: ast.expr, used: list[int]) -> Fraction:
    """The value of a parsed expression; its numbers are appended to `used`. Raises ValueError for anything but the four operations."""
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](_value(node.left, used), _value(node.right, used))
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    raise ValueError("not a number or one of + - * /")


def _solve_countdown(problem: Problem) -> str:
    target = int(problem.answer)
    return next(text for text, value in _expressions(problem.columns["numbers"]) if value == target)


# ---- walk: a shortest way over a five by five board, around two walls

BOARD = 5
MOVES = {"u": (0, 1), "r": (1, 0), "d": (0, -1), "l": (-1, 0)}
Square = tuple[int, int]


def _square(name: str) -> Square:
    return ord(name[0]) - ord("a"), int(name[1]) - 1


def _name(square: Square) -> str:
    return f"{'abcdefgh'[square[0]]}{square[1] + 1}"


def _step(square: Square, move: str, walls: list[Square]) -> Square | None:
    """The square that a move leads to, or None when a wall or the edge is there."""
    to = (square[0] + MOVES[move][0], square[1] + MOVES[move][1])
    return to if to not in walls and 0 <= to[0] < BOARD and 0 <= to[1] < BOARD else None


def _shortest(start: Square, goal: Square, walls: list[Square]) -> str | None:
    """The first shortest way in the order of MOVES, or None when the walls cut the goal off."""
    ways, queue = {start: ""}, deque([start])
    while queue and goal not in ways:
        square = queue.popleft()
        for move in MOVES:
            to = _step(square, move, walls)
            if to is not None and to not in ways:
                ways[to] = ways[square] + move
                queue.append(to)
    return ways.get(goal)


def _generate_walk(rng: np.random.Generator) -> Problem:
    while True:
        start, goal, *walls = [(int(i) // BOARD, int(i) % BOARD) for i in rng.permutation(BOARD * BOARD)[:4]]
        way = _shortest(start, goal, walls)
        if way is not None and len(way) > 1:
            prompt = f"walk {_name(start)} to {_name(goal)} not {' '.join(map(_name, walls))}:"
            columns = {"answer": way, "start": _name(start), "goal": _name(goal), "walls": [_name(wall) for wall in walls]}
            return Problem(prompt, way, columns)


def check_walk(completion: str, answer: str, start: str, goal: str, walls: list[str], **columns: Any) -> float:
    """1 when the moves (u, r, d, l) lead from start to goal, over no wall and no edge, in as few moves as the answer."""
    moves, blocked = completion.strip(), [_square(wall) for wall in walls]
    square: Square | None = _square(start)
    if len(moves) != len(answer) or not set(moves) <= set(MOVES):
        return 0.0
    for move in moves:
        square = _step(square, move, blocked) if square is not None else None
    return float(square == _square(goal))


def _solve_answer(problem: Problem) -> str:
    return problem.answer


PROBLEMS: dict[str, ProblemKind] = {
    kind.name: kind
    for kind in (
        ProblemKind("arithmetic", _generate_arithmetic, check_exact, 8, _solve_answer),
        ProblemKind("sorting", _generate_sorting, check_exact, 12, _solve_answer),
        ProblemKind("chain", _generate_chain, check_exact, 12, _solve_answer),
        ProblemKind("countdown", _generate_countdown, check_countdown, 8, _solve_countdown),
        ProblemKind("walk", _generate_walk, check_walk, 12, _solve_answer),
    )
}
