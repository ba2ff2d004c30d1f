"""Claims of PIBR: what programs that read one another reach where actions alone do not, what feedback saves, and foraging together.

Payoffs are exact. Programs are the 14 of the small language, fuel 4, unless a claim says otherwise. In foraging, reading the other's source is not what
decides: lists without that option reach as much, while those without going for joint food stay below two thirds.
"""

from __future__ import annotations

from functools import cache
from statistics import median

import numpy as np
import torch

from anypo.claims import Evidence, ablation, claim
from anypo.domains.games import foraging
from anypo.domains.games.programs import CLIQUE, GAMES, Program, candidates
from anypo.domains.games.synthesizers import Enumerative, Feedback, Mutation, play, transposed
from anypo.methods.games.pibr import best_response, collected, evaluations_until, forage, improve, joint_best_response, pibr

CONSTANT: list[Program] = [["act", 0], ["act", 1]]
DEFECT: Program = ["act", 1]
LEVELS = torch.tensor([1, 2])
NEAREST = (foraging.FEASIBLE, foraging.ADJACENT)


def _dilemma(among: list[Program]) -> Evidence:
    payoff = GAMES["prisoners"]
    to_cooperator = among[best_response(["act", 0], payoff, among).index]
    to_clique = among[best_response(CLIQUE, payoff, among).index]
    course = pibr(payoff, transposed(payoff), DEFECT, CLIQUE, among, rounds=10).history
    return Evidence(
        {
            "to a cooperator": to_cooperator,
            "to a clique program": to_clique,
            "half-rounds of cooperation": int((course[:, 1:3] == 0).all(1).sum()),
        },
        "defect against the constant cooperator, copy the clique program, and cooperate in all ten half-rounds",
        to_cooperator == DEFECT and to_clique == CLIQUE and bool((course[:, 1:3] == 0).all()),
    )


@claim(
    "in the one-shot dilemma best responses exploit a cooperator, but copy a program that cooperates with its own kind, and cooperation stays"
)
def clique_is_an_equilibrium() -> Evidence:
    return _dilemma(candidates())


@ablation(clique_is_an_equilibrium, "programs that read the other's source: constants alone")
def constants_defect() -> Evidence:
    return _dilemma(CONSTANT)


def _stuck(other_start: Program) -> Evidence:
    found = {}
    for game in ("coordination", "stag_hunt"):
        courses = [
            pibr(GAMES[game], transposed(GAMES[game]), DEFECT, other_start, candidates(), rounds=8, social=social).history
            for social in (0.0, 0.25, 0.5, 0.75, 1.0)
        ]
        found[game] = [course[-1, 1:3].int().tolist() for course in courses]
    stuck = all(actions == [1, 1] for ends in found.values() for actions in ends)
    return Evidence(found, "actions 1 and 1 at the end, in both games, at social weights 0, 0.25, 0.5, 0.75 and 1", stuck)


@claim("from the worse of two equilibria of constants, best responses of one side at a time do not get away at any social weight")
def one_sided_responses_stay() -> Evidence:
    return _stuck(DEFECT)


@ablation(one_sided_responses_stay, "the constant opponent: one side starts as a clique program")
def a_clique_program_moves_them() -> Evidence:
    return _stuck(CLIQUE)


def _best_welfare(game: str) -> int:
    payoff = GAMES[game]
    return max(payoff[a][b] + payoff[b][a] for a in range(2) for b in range(2))


@cache
def _reinforce(game: str, pairs: int = 20, updates: int = 500, samples: int = 64, seed: int = 0) -> float:
    """Share of the best welfare that independent REINFORCE learners with a mean baseline reach from uniform policies: mean over pairs, exactly."""
    generator, payoff = torch.Generator().manual_seed(seed), torch.tensor(GAMES[game]).double()
    theta = torch.zeros(pairs, 2, dtype=torch.float64)  # logit of action 1
    for _ in range(updates):
        p = theta.sigmoid()
        action = (torch.rand(samples, pairs, 2, generator=generator, dtype=torch.float64) < p).long()
        earned = torch.stack([payoff[action[..., 0], action[..., 1]], payoff[action[..., 1], action[..., 0]]], -1)
        theta = theta + 0.5 * ((earned - earned.mean(0)) * (action - p)).mean(0)
    chances = torch.stack([1 - theta.sigmoid(), theta.sigmoid()], -1)
    expected = torch.einsum("na,nb,ab->n", chances[:, 0], chances[:, 1], payoff + payoff.T)
    return float(expected.mean()) / _best_welfare(game)


def _welfare(among: list[Program]) -> Evidence:
    shares = {}
    for game, payoff in GAMES.items():
        other = transposed(payoff)
        last = improve(payoff, other, (DEFECT, CLIQUE), (Enumerative(among), Enumerative(among))).outcomes[-1]
        i, j = joint_best_response(payoff, other, among)
        together = play(among[i], among[j], payoff, other)
        shares[game] = [(x.utility1 + x.utility2) / _best_welfare(game) for x in (last, together)]
    gradient = (_reinforce("stag_hunt") + _reinforce("prisoners")) / 2
    return Evidence(
        {"clique start, joint proposals": shares, "independent REINFORCE": round(gradient, 3)},
        "at least 0.95 of the best welfare in all four games both ways; REINFORCE below 0.75 on average over stag hunt and dilemma",
        min(min(both) for both in shares.values()) >= 0.95 and gradient < 0.75,
    )


@claim("with a clique program at the start, or joint proposals, all four games end efficiently, where independent policy gradients do not")
def games_end_efficiently() -> Evidence:
    return _welfare(candidates())


@ablation(games_end_efficiently, "programs that read the other's source: constants alone")
def constants_are_inefficient() -> Evidence:
    return _welfare(CONSTANT)


class _Deaf(Mutation):
    """The same editor, told that all is well."""

    def __call__(self, feedback: Feedback, count: int) -> list[Program]:
        return super().__call__(feedback._replace(utility=feedback.best_possible, failed_tests=[]), count)


def _evaluations(reader: type[Mutation]) -> Evidence:
    payoff = GAMES["prisoners"]
    told = [evaluations_until(reader(seed), CLIQUE, DEFECT, payoff) for seed in range(20)]
    blind = [evaluations_until(Mutation(1000 + seed, reads_feedback=False), CLIQUE, DEFECT, payoff) for seed in range(20)]
    return Evidence(
        {"median with feedback": median(told), "median without": median(blind)},
        "median of 20 seeds with feedback at most half of that without",
        median(told) <= median(blind) / 2,
    )


@claim("edits that are guided by textual feedback find the cooperative program equilibrium after fewer evaluations than blind mutations")
def feedback_saves_evaluations() -> Evidence:
    return _evaluations(Mutation)


@ablation(feedback_saves_evaluations, "what the feedback says: utility and failed tests")
def nothing_to_read() -> Evidence:
    return _evaluations(_Deaf)


def _foraged(rounds: int) -> Evidence:
    """Ten layouts to respond on, twenty others to measure."""
    rng = np.random.default_rng(0)
    practice, others = foraging.layouts(10, rng), foraging.layouts(20, rng)
    found = forage(LEVELS, practice, [NEAREST, NEAREST], rounds)
    share, lone = (float(collected(x, LEVELS, others).mean()) for x in (found, [NEAREST, NEAREST]))
    return Evidence(
        {"collected": round(share, 3), "going to the nearest feasible food": round(lone, 3),
         "programs": [", ".join(foraging.OPTIONS[o] for o in p) for p in found]},
        "mean share of food value on 20 new layouts above 0.9, and below 0.5 for going to the nearest feasible food",
        share > 0.9 and lone < 0.5,
    )  # fmt: skip


@claim(
    "in level-based foraging the programs that iterated best response finds take nearly all food, also what neither agent can lift alone"
)
def foraging_together() -> Evidence:
    return _foraged(3)


@ablation(foraging_together, "iterated best response")
def foraging_apart() -> Evidence:
    return _foraged(0)
