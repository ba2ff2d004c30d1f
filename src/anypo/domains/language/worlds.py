"""Environments of `agents.py`: a calculator, a board to walk over, and adapters for Gymnasium (text spaces), TextArena and TextWorld.

The first two can be restored to a visited state. An adapter takes a name or a world made elsewhere, and imports its package when it has to
make one. Left out: games of several players, and going back in other packages' worlds, which they do not offer alike.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from anypo.domains.language.problems import BOARD, MOVES, OPERATIONS, Problem, ProblemKind, check_exact
from anypo.domains.language.rewards import RewardFunction
from anypo.task import Prompt

FIRST_TRAINING_SEED = 1 << 20  # held-out problems are the seeds below


# ---- a calculator


class CalculatorEnvironment:
    """One problem with a calculator at hand: `<calc>12*(3+4)</calc>` is answered with `=84;`, any other reply is the final answer.

    The reward is 1 for the right answer, white space aside, else 0. What the calculator cannot read is answered with `=error;`.
    """

    stop = ("</calc>",)

    def __init__(self) -> None:
        self.answer = ""

    def reset(self, problem: Prompt) -> str:
        self.answer = str(problem.columns["answer"])
        return problem.content

    def step(self, text: str) -> tuple[str, float, bool]:
        asked = re.search(r"<calc>(.*?)</calc>", text, re.DOTALL)
        if asked:
            return f"={calculate(asked[1])};", 0.0, False
        return "", check_exact(text, self.answer), True

    def save(self) -> str:
        return self.answer

    def restore(self, state: str) -> None:
        self.answer = state


def calculate(text: str) -> str:
    """The value of an expression in numbers, + - * / and parentheses, or "error". The text is parsed and walked, never executed."""
    if len(text) > 64 or not re.fullmatch(r"[0-9+\-*/(). ]+", text):
        return "error"
    try:
        value = _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, MemoryError):
        return "error"
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.6g}"


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(str(node.value))
    raise ValueError("not a number or one of + - * /")


def _generate_calculation(rng: np.random.Generator) -> Problem:
    a, b, c, d = (int(x) for x in rng.integers((2, 10, 10, 10), (100, 100, 100, 100)))
    text = f"{a}*({b}+{c})-{d}"
    return Problem(f"{text}=", calculate(text), {"answer": calculate(text)})


CALCULATIONS = ProblemKind("calculator", _generate_calculation, check_exact, 8, lambda problem: problem.answer)


# ---- a board to walk over


class GridEnvironment:
    """The boards of the `walk` problems, with as many replies as it takes: moves u, d, l and r; walls and edges stop a move.

    The observation is where the moves have led, as in `at b3:`. The reward is 1 at the goal, which ends the conversation at once; other
    characters are passed over.
    """

    def __init__(self) -> None:
        self.square = self.goal = (0, 0)
        self.walls: set[tuple[int, int]] = set()

    def reset(self, problem: Prompt) -> str:
        self.square, self.goal = _square(problem.columns["start"]), _square(problem.columns["goal"])
        self.walls = set(map(_square, problem.columns["walls"]))
        return problem.content

    def step(self, text: str) -> tuple[str, float, bool]:
        for character in text:
            right, up = MOVES.get(character, (0, 0))
            to = (self.square[0] + right, self.square[1] + up)
            if to not in self.walls and 0 <= to[0] < BOARD and 0 <= to[1] < BOARD:
                self.square = to
            if self.square == self.goal:
                return "", 1.0, True
        return f"at {'abcdefgh'[self.square[0]]}{self.square[1] + 1}:", 0.0, False

    def save(self) -> tuple[int, int]:
        return self.square

    def restore(self, state: tuple[int, int]) -> None:
        self.square = state


def _square(name: str) -> tuple[int, int]:
    return ord(name[0]) - ord("a"), int(name[1:]) - 1


# ---- worlds of other packages


class Seeds:
    """Problems that are seeds of a world."""

    check: RewardFunction | None = None

    def __init__(self, name: str) -> None:
        self.name = name

    def training(self, count: int, rng: np.random.Generator) -> list[Prompt]:
        return [Prompt(int(seed), "", {"seed": int(seed)}) for seed in rng.integers(FIRST_TRAINING_SEED, 1 << 31, size=count)]

    def held_out(self, count: int) -> list[Prompt]:
        return [Prompt(seed, "", {"seed": seed}) for seed in range(count)]


class GymnasiumText:
    """A Gymnasium environment whose observations and actions are texts. Raises ValueError when they are not."""

    def __init__(self, world: Any) -> None:
        self.world = package("gymnasium").make(world) if isinstance(world, str) else world
        space = getattr(self.world, "action_space", None)
        if type(space).__name__ != "Text":
            raise ValueError(f"the actions of {world} are {space}, not text; use --env for it")

    def reset(self, problem: Prompt) -> str:
        return str(self.world.reset(seed=problem.columns.get("seed"))[0])

    def step(self, text: str) -> tuple[str, float, bool]:
        observation, reward, terminated, truncated, _ = self.world.step(text)
        return str(observation), float(reward), bool(terminated or truncated)

    def close(self) -> None:
        self.world.close()


class TextArena:
    """A game of TextArena for one player, rewarded at its end."""

    def __init__(self, world: Any) -> None:
        self.world = package("textarena").make(env_id=world) if isinstance(world, str) else world

    def reset(self, problem: Prompt) -> str:
        self.world.reset(num_players=1, seed=problem.columns.get("seed"))
        return str(self.world.get_observation()[1])

    def step(self, text: str) -> tuple[str, float, bool]:
        done, _ = self.world.step(action=text)
        if not done:
            return str(self.world.get_observation()[1]), 0.0, False
        closed = self.world.close()
        rewards = closed[0] if isinstance(closed, tuple) else closed  # newer versions add information about the game
        return "", float(rewards[0]), True


class TextWorld:
    """A game file of TextWorld; the reward of a turn is what it adds to the score."""

    def __init__(self, world: Any) -> None:
        self.world = package("textworld").start(world) if isinstance(world, str) else world
        self.score = 0.0

    def reset(self, problem: Prompt) -> str:
        self.score = 0.0
        self.world.seed(problem.columns.get("seed"))
        return str(self.world.reset().feedback)

    def step(self, text: str) -> tuple[str, float, bool]:
        state, score, done = self.world.step(text)
        gained, self.score = float(score) - self.score, float(score)
        return str(state.feedback), gained, bool(done)

    def close(self) -> None:
        self.world.close()


def package(name: str) -> Any:
    """An imported package. Raises ValueError when it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"this task needs the package {name}; install it with: pip install {name}") from error


WORLDS: dict[str, Callable[[Any], Any]] = {"gymnasium": GymnasiumText, "textarena": TextArena, "textworld": TextWorld}
