"""PIBR: programmatic iterated best response (arXiv:2512.21024).

A policy is a short program whose source the other agents can read, so that it may depend on the opponent's policy and not only on its actions: "cooperate
with who is written as I am" makes cooperation an equilibrium of the one-shot dilemma. Learning is iterated best response among programs: a synthesizer,
in the paper a language model, sees both sources, the game's outcomes and failed unit tests as structured text, and proposes new programs. The principle is
the abstract's; the small language, the rule for ties, the two synthesizers that stand in for the model, and the foraging options are [reconstructed]. A
language model is any callable with the signature of `domains.games.synthesizers.Synthesizer`. Left out: prompts for one, programs of general languages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.domains.games import foraging
from anypo.domains.games.foraging import Layouts, lbf_step
from anypo.domains.games.programs import CLIQUE, GAMES, Program, action, refusal, size
from anypo.domains.games.synthesizers import (
    Enumerative,
    Payoff,
    Play,
    Synthesizer,
    UnitTest,
    constant_tests,
    feedback,
    pass_rate,
    play,
    transposed,
)
from anypo.method import Paper, Study

__all__ = ["STUDY", "lbf_step", "play"]  # two of this paper's quantities live with the games
TEST_WORTH = 1e-3  # of passing all unit tests, in units of utility


class BestResponse(NamedTuple):
    index: int  # type: ignore[assignment]  # of the candidate; the name hides a method of tuples
    utility: Tensor  # [C] of every candidate


class History(NamedTuple):
    history: Tensor  # [rounds,5] chosen candidate, both actions, both utilities


class Course(NamedTuple):
    programs: tuple[Program, Program]
    outcomes: list[Play]  # after each half-round
    settled: bool  # whether a full round changed nothing: an equilibrium among what was proposed
    evaluations: int  # of programs


def select(score: Float[Tensor, " C"], sizes: Sequence[int]) -> int:
    """Equation 3: the largest score; of equal ones the smallest program, then the first."""
    rounded = [round(float(s), 9) for s in score]
    return min(range(len(sizes)), key=lambda i: (-rounded[i], sizes[i], i))


def best_response(
    opponent: Program, payoff: Payoff, candidates: Sequence[Program], fuel: int = 4, other_payoff: Payoff | None = None, social: float = 0.0,
    tests: Sequence[UnitTest] = (),
) -> BestResponse:  # fmt: skip
    """Equation 3; payoffs [own][opponent's], the other's needed where `social`, the weight of its utility, is not 0."""
    actions = [(action(p, opponent, fuel), action(opponent, p, fuel)) for p in candidates]
    utility = torch.tensor([float(payoff[a][b]) for a, b in actions], dtype=torch.float64)
    score = utility + TEST_WORTH * torch.tensor([pass_rate(p, tests, fuel) for p in candidates])
    if social:
        if other_payoff is None:
            raise ValueError("a social weight needs the other player's payoff; pass other_payoff")
        score = score + social * torch.tensor([float(other_payoff[a][b]) for a, b in actions])
    return BestResponse(select(score, [size(p) for p in candidates]), utility)


def pibr(
    payoff1: Payoff, payoff2: Payoff, start1: Program, start2: Program, candidates: Sequence[Program], rounds: int, fuel: int = 4, social: float = 0.0
) -> History:  # fmt: skip
    """Equation 5 over fixed candidates without tests or early end; `rounds` half-rounds, player 1 first."""
    current, rows = [start1, start2], []
    views = [(payoff1, payoff2), (transposed(payoff2), transposed(payoff1))]
    for t in range(rounds):
        i = t % 2
        index = best_response(current[1 - i], views[i][0], candidates, fuel, views[i][1], social).index
        current[i] = candidates[index]
        rows.append([index, *play(current[0], current[1], payoff1, payoff2, fuel)])
    return History(torch.tensor(rows, dtype=torch.float64))


def joint_best_response(payoff1: Payoff, payoff2: Payoff, candidates: Sequence[Program], fuel: int = 4) -> tuple[int, int]:
    """Joint proposals: of all pairs that are best responses to one another the one with the largest sum of utilities, then the smallest. Raises
    ValueError where there is none."""
    table = [[play(p, q, payoff1, payoff2, fuel) for q in candidates] for p in candidates]
    first, second = (torch.tensor([[getattr(x, name) for x in row] for row in table]) for name in ("utility1", "utility2"))
    mutual = ((first == first.amax(0)) & (second == second.amax(1, keepdim=True))).nonzero().tolist()
    if not mutual:
        raise ValueError("no two candidates are best responses to one another; propose more programs")
    return min(
        ((i, j) for i, j in mutual), key=lambda p: (-float(first[p] + second[p]), size(candidates[p[0]]) + size(candidates[p[1]]), p)
    )


def improve(
    payoff1: Payoff, payoff2: Payoff, starts: tuple[Program, Program], synthesizers: tuple[Synthesizer, Synthesizer], rounds: int = 10,
    proposals: int = 20, fuel: int = 4, social: float = 0.0,
) -> Course:  # fmt: skip
    """Equation 5 with synthesizers: `rounds` full rounds at most, player 1 first; what is unusable is dropped and named in the next feedback."""
    current, outcomes, unchanged, evaluations, errors = list(starts), [], 0, 0, ["", ""]
    views = [(payoff1, payoff2), (transposed(payoff2), transposed(payoff1))]
    for t in range(2 * rounds):
        i = t % 2
        own, opponent, tests = current[i], current[1 - i], constant_tests(views[i][0])
        told = feedback(own, opponent, views[i][0], fuel, tests, errors[i])
        proposed = synthesizers[i](told, proposals)
        refused = [text for p in proposed if (text := refusal(p))]
        errors[i] = refused[0] if refused else ""
        among = [own, *(p for p in proposed if not refusal(p))]
        found = best_response(opponent, views[i][0], among, fuel, views[i][1], social, tests)
        current[i], evaluations = among[found.index], evaluations + len(among)
        outcomes.append(play(current[0], current[1], payoff1, payoff2, fuel))
        unchanged = unchanged + 1 if current[i] == own else 0
        if unchanged == 2:
            break
    return Course((current[0], current[1]), outcomes, unchanged >= 2, evaluations)


def evaluations_until(
    synthesizer: Synthesizer, goal: Program, start: Program, payoff: Payoff, proposals: int = 20, limit: int = 10_000
) -> int:
    """How many programs are evaluated before `goal` is, when best responding to `goal` itself from `start`; `limit` where it is not found."""
    own, tests, seen = start, constant_tests(payoff), 0
    while seen < limit:
        proposed = synthesizer(feedback(own, goal, payoff, tests=tests), proposals)
        for p in proposed:
            seen += 1
            if p == goal:
                return seen
        among = [own, *(p for p in proposed if not refusal(p))]
        own = among[best_response(goal, payoff, among, tests=tests).index]
    return limit


def forage(
    levels: Int[Tensor, " A"], start: Layouts, starts: Sequence[tuple[int, ...]], rounds: int = 6, social: float = 0.1,
    candidates: Sequence[tuple[int, ...]] | None = None, grid: int = 5,
) -> list[tuple[int, ...]]:  # fmt: skip
    """Equations 5 and 7: agents in turn replace their programs by the best of the candidates (all 200), by mean return over the layouts; `rounds` full
    rounds at most, or until one changes nothing."""
    among, current, unchanged = list(candidates or foraging.candidates()), list(starts), 0
    table, layouts = foraging.encode(among), len(start.agents)
    repeated = Layouts(*(x.repeat(len(among), *[1] * (x.dim() - 1)) for x in start))
    for t in range(rounds * len(current)):
        i = t % len(current)
        joint = foraging.encode(current).expand(len(among), -1, -1).clone()
        joint[:, i] = table
        returns = foraging.episodes(joint.repeat_interleave(layouts, 0), repeated, levels, grid).unflatten(0, (len(among), layouts)).mean(1)
        others = returns.sum(1) - returns[:, i]
        chosen = among[select(returns[:, i] + social * others, [len(p) for p in among])]
        unchanged = unchanged + 1 if chosen == current[i] else 0
        current[i] = chosen
        if unchanged == len(current):
            break
    return current


def collected(programs_: Sequence[tuple[int, ...]], levels: Int[Tensor, " A"], start: Layouts, grid: int = 5) -> Float[Tensor, " B"]:
    """Share of the food value that the programs take in each layout."""
    return foraging.episodes(foraging.encode(list(programs_)).expand(len(start.agents), -1, -1), start, levels, grid).sum(1)


def run(seed: int = 0, rounds: int = 10, episodes: int = 10) -> dict[str, Any]:
    """Both players' utilities where iterated best response ends in each matrix game when one starts as a clique program; and foraging on `episodes`
    layouts: the programs found, and the share of food value they take on 20 others."""
    found: dict[str, Any] = {}
    for name, payoff in GAMES.items():
        course = improve(payoff, transposed(payoff), (["act", 1], CLIQUE), (Enumerative(), Enumerative()), rounds)
        found[name] = [course.outcomes[-1].utility1, course.outcomes[-1].utility2]
    rng, levels = np.random.default_rng(seed), torch.tensor([1, 2])
    start = (foraging.FEASIBLE, foraging.ADJACENT)
    programs_ = forage(levels, foraging.layouts(episodes, rng), [start, start], rounds)
    found["foraging_programs"] = [[foraging.OPTIONS[o] for o in p] for p in programs_]
    found["foraging_collected"] = float(collected(programs_, levels, foraging.layouts(20, rng)).mean())
    return found


STUDY = Study(
    name="pibr",
    paper=Paper("PIBR: programmatic iterated best response", "2512.21024", 2025),
    domain="games",
    run=run,
    kind="system",
    summary="policies as programs that read one another's source, improved in turn by a synthesizer that is told outcomes and failed tests",
)
