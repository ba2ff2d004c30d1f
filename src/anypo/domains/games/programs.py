"""Programs that play matrix games of two actions and may read each other's source: a small language of nested lists, interpreted and never executed.

    ["act", k]               plays k
    ["if_same", p, q]        p if both sources are identical, else q
    ["if_opp_const", k, p, q]  p if the opponent's source is exactly ["act", k], else q
    ["if_opp_plays", k, p, q]  p if the opponent, simulated against me with one fuel less, plays k, else q
    ["mirror"]               plays what the opponent, simulated against me with one fuel less, plays
    ["other", p]             the other action than p

A program without fuel plays 0, so that mutual simulation ends. Nested parts see the same two whole programs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Program = list[Any]
ACTIONS = 2
SHAPES = {
    "act": "k",
    "if_same": "pp",
    "if_opp_const": "kpp",
    "if_opp_plays": "kpp",
    "mirror": "",
    "other": "p",
}  # k: an action, p: a program
LARGEST, DEEPEST = 64, 16  # programs beyond are refused

GAMES: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {  # payoffs [own action][opponent's action], 0 cooperates
    "prisoners": ((3, 0), (5, 1)),
    "stag_hunt": ((4, 0), (3, 3)),
    "coordination": ((2, 0), (0, 1)),
    "chicken": ((3, 1), (4, 0)),
}
CLIQUE: Program = ["if_same", ["act", 0], ["act", 1]]  # cooperates with its own kind alone


def action(me: Program, opponent: Program, fuel: int) -> int:
    """What a program plays against another one; both as `refusal` accepts them."""
    return _play(me, me, opponent, fuel)


def _play(node: Program, me: Program, opponent: Program, fuel: int) -> int:
    if fuel <= 0:
        return 0
    kind = node[0]
    if kind == "act":
        return int(node[1])
    if kind == "mirror":
        return _play(opponent, opponent, me, fuel - 1)
    if kind == "other":
        return 1 - _play(node[1], me, opponent, fuel)
    if kind == "if_same":
        holds = me == opponent
    elif kind == "if_opp_const":
        holds = opponent == ["act", node[1]]
    else:
        holds = _play(opponent, opponent, me, fuel - 1) == node[1]
    return _play(node[-2] if holds else node[-1], me, opponent, fuel)


def size(program: Program) -> int:
    """Number of nested lists, itself included."""
    return 1 + sum(size(part) for part in program if isinstance(part, list))


def refusal(program: Any, depth: int = 1) -> str:
    """Why something is no program, in one sentence; empty when it is one."""
    if not isinstance(program, list) or not program or not isinstance(program[0], str) or program[0] not in SHAPES:
        return f"{program!r:.80} is no program; one is a list that begins with {', '.join(SHAPES)}"
    shape = SHAPES[program[0]]
    if len(program) != len(shape) + 1:
        return f"{program[0]} takes {len(shape)} arguments, not {len(program) - 1}"
    if depth > DEEPEST:
        return f"the program is nested deeper than {DEEPEST}"
    for kind, part in zip(shape, program[1:], strict=True):
        if kind == "k" and not (type(part) is int and 0 <= part < ACTIONS):
            return f"{program[0]} takes an action, 0 or 1, not {part!r:.80}"
        found = refusal(part, depth + 1) if kind == "p" else ""
        if found:
            return found
    return f"the program has more than {LARGEST} parts" if depth == 1 and size(program) > LARGEST else ""


def candidates() -> list[Program]:
    """The 14 programs without nested conditions: constants, mirrors, and every condition with both pairs of constants."""
    simple: list[Program] = [["act", 0], ["act", 1], ["mirror"], ["other", ["mirror"]]]
    for pair in ([["act", 0], ["act", 1]], [["act", 1], ["act", 0]]):
        simple += [["if_same", *pair]]
        simple += [[kind, k, *pair] for k in range(ACTIONS) for kind in ("if_opp_plays", "if_opp_const")]
    return simple


def random_program(rng: np.random.Generator, depth: int = 2) -> Program:
    """Any of the six kinds at the root, constants and mirrors at depth 1; `depth` >= 1."""
    kinds = [kind for kind, shape in SHAPES.items() if depth > 1 or "p" not in shape]
    kind = kinds[rng.integers(len(kinds))]
    return [kind, *(int(rng.integers(ACTIONS)) if part == "k" else random_program(rng, depth - 1) for part in SHAPES[kind])]


def mutated(program: Program, rng: np.random.Generator) -> Program:
    """The program with one of its parts, drawn uniformly and perhaps the whole, replaced by a random program."""
    return _replaced(program, int(rng.integers(size(program))), random_program(rng))


def _replaced(program: Program, index: int, part: Program) -> Program:
    """Part number `index`, counted from the root in reading order, replaced."""
    if index == 0:
        return part
    result, passed = [], 1
    for item in program:
        if isinstance(item, list):
            count = size(item)
            if passed <= index < passed + count:
                item = _replaced(item, index - passed, part)
            passed += count
        result.append(item)
    return result
