"""Synthesizers: who writes programs, and what they are told about the last one (after arXiv:2512.21024).

A language model is any callable with the signature of `Synthesizer`; here are two that need none, one that proposes everything and one that edits.
As the best possible utility the feedback names the largest of all outcomes: by the best reply to what the opponent played just now, mutual defection
would be perfect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from jaxtyping import Float
from torch import Tensor

from anypo.domains.games import programs
from anypo.domains.games.programs import ACTIONS, Program, action, mutated

Payoff = Sequence[Sequence[float]] | Float[Tensor, "A A"]  # [action of 1][action of 2], of a best response [own][opponent's]
UnitTest = tuple[Program, int | None]  # an opponent and the action required against it; None: any


class Play(NamedTuple):
    action1: int
    action2: int
    utility1: float
    utility2: float


class Feedback(NamedTuple):
    """What a synthesizer is told: equation 6, the textual gradient."""

    own_source: Program
    opponent_source: Program
    utility: float
    best_possible: float
    outcomes: list[tuple[int, int, float]]  # own action, opponent's action, utility
    failed_tests: list[tuple[Program, int, int]]  # opponent, expected action, actual action
    error: str = ""  # why the last round's first unusable proposal was unusable


class Synthesizer(Protocol):
    def __call__(self, feedback: Feedback, count: int) -> list[Program]: ...


def play(program1: Program, program2: Program, payoff1: Payoff, payoff2: Payoff, fuel: int = 4) -> Play:
    """Equation 1."""
    a, b = action(program1, program2, fuel), action(program2, program1, fuel)
    return Play(a, b, float(payoff1[a][b]), float(payoff2[a][b]))


def pass_rate(program: Program, tests: Sequence[UnitTest], fuel: int = 4) -> float:
    """Equation 4: share of tests passed. That a program ends, repeats itself and plays a valid action holds for all that `refusal` accepts."""
    if not tests:
        return 0.0
    return sum(wanted is None or action(program, opponent, fuel) == wanted for opponent, wanted in tests) / len(tests)


def constant_tests(payoff: Payoff) -> list[UnitTest]:
    """The best reply to each constant program, [own][opponent's]."""
    return [(["act", k], max(range(ACTIONS), key=lambda a: float(payoff[a][k]))) for k in range(ACTIONS)]


def transposed(payoff: Payoff) -> list[list[float]]:
    """From [action of 1][action of 2] to the second player's own view."""
    return [[float(payoff[a][b]) for a in range(len(payoff))] for b in range(len(payoff[0]))]


def feedback(own: Program, opponent: Program, payoff: Payoff, fuel: int = 4, tests: Sequence[UnitTest] = (), error: str = "") -> Feedback:
    """Equation 6, payoff [own][opponent's]."""
    outcomes = [(a, b, float(payoff[a][b])) for a in range(ACTIONS) for b in range(ACTIONS)]
    failed = [(q, wanted, got) for q, wanted in tests if wanted is not None and (got := action(own, q, fuel)) != wanted]
    utility = float(payoff[action(own, opponent, fuel)][action(opponent, own, fuel)])
    return Feedback(own, opponent, utility, max(u for _, _, u in outcomes), outcomes, failed, error)


@dataclass
class Enumerative:
    """Proposes all candidates, whatever it is told."""

    candidates: list[Program] = field(default_factory=programs.candidates)

    def __call__(self, feedback: Feedback, count: int) -> list[Program]:
        return self.candidates


class Mutation:
    """Edits of the own program. With `reads_feedback`, falling short against a conditional opponent makes it try conditions on the opponent first, in
    random order, then a branch for each failed test; the rest, and everything without it, are random mutations."""

    def __init__(self, seed: int = 0, reads_feedback: bool = True) -> None:
        self.rng, self.reads_feedback = np.random.default_rng(seed), reads_feedback

    def __call__(self, feedback: Feedback, count: int) -> list[Program]:
        own, edits = feedback.own_source, list[Program]()
        if self.reads_feedback:
            if feedback.utility < feedback.best_possible and feedback.opponent_source[0] != "act":
                pairs = [pair for a in range(ACTIONS) for pair in ([["act", a], own], [own, ["act", a]])]
                edits = [["if_same", *pair] for pair in pairs] + [["if_opp_plays", k, *pair] for k in range(ACTIONS) for pair in pairs]
                edits = [edits[i] for i in self.rng.permutation(len(edits))]
            edits += [
                ["if_opp_const", opponent[1], ["act", wanted], own] for opponent, wanted, _ in feedback.failed_tests if opponent[0] == "act"
            ]
        return (edits + [mutated(own, self.rng) for _ in range(max(0, count - len(edits)))])[:count]
