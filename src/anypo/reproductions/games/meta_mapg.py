"""Claims of Meta-MAPG basin entry: which term chooses the equilibrium, that it moves the points where updates vanish, and that annealing undoes this.

Step size 0.5, look-ahead 1, one learning step, unless a claim says otherwise. Values are exact, so the only chance is in the starts.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from anypo.claims import Evidence, ablation, claim
from anypo.domains.games.smooth import SmoothTask, iterated_dilemma, quadratic_game, stag_hunt
from anypo.loops.on_policy import train
from anypo.method import Method
from anypo.methods.games.meta_mapg import INDEPENDENT, METHOD, Annealing, LearningAwareGradient, corrections, learn
from anypo.run import Run

STARTS, STEPS = 1000, 400


def _end(method: Method, task: SmoothTask, steps: int) -> Tensor:
    """[B,n,d]: where all starts of the task arrive."""
    return train(Run(method, task.policy(), task, steps=steps)).policy.theta.detach()


def _with(**credit: object) -> Method:
    return METHOD.but(credit=LearningAwareGradient(**credit))  # type: ignore[arg-type]


@cache
def _stag_hunters(own: float, peer: float, unroll: int = 1, seed: int = 0) -> float:
    """Share of starts from which both hunt the stag with probability above 0.9 in the end."""
    generator = torch.Generator().manual_seed(seed)
    game = stag_hunt()
    starts = 6 * torch.rand(STARTS, 2, 1, generator=generator, dtype=torch.float64) - 3
    end = _end(_with(unroll=unroll, own=own, peer=Annealing(peer)), SmoothTask(game, starts), STEPS)
    return float((game.distance(end) < 0.1).double().mean())


def _entered(once: float, thrice: float) -> Evidence:
    """The peer term at two weights against independent policy gradients from the same starts."""
    plain, some, more = _stag_hunters(0.0, 0.0, 0), _stag_hunters(1.0, once), _stag_hunters(1.0, thrice)
    return Evidence(
        {"independent": round(plain, 3), "weight 1": round(some, 3), "weight 3": round(more, 3)},
        "share of 1000 starts that end with both hunting the stag: at least 0.05 more with weight 1 and 0.12 more with weight 3",
        some - plain >= 0.05 and more - plain >= 0.12,
    )


@claim(
    "in the stag hunt the peer-learning term brings more starts into the basin of the payoff-dominant equilibrium, the more the larger its weight"
)
def peers_choose_the_equilibrium() -> Evidence:
    return _entered(1.0, 3.0)


@ablation(peers_choose_the_equilibrium, "the peer term; the own-learning term stays")
def own_term_alone() -> Evidence:
    return _entered(0.0, 0.0)


def _same_as_independent(own: float, peer: float) -> Evidence:
    plain, found = _stag_hunters(0.0, 0.0, 0), _stag_hunters(own, peer)
    return Evidence(
        {"independent": round(plain, 3), "corrected": round(found, 3)}, "shares within 0.03 of one another", abs(found - plain) <= 0.03
    )


@claim("the own-learning term does not change which equilibrium is reached")
def own_learning_chooses_nothing() -> Evidence:
    return _same_as_independent(1.0, 0.0)


@ablation(own_learning_chooses_nothing, "the peer term in its place")
def peer_learning_does() -> Evidence:
    return _same_as_independent(0.0, 1.0)


def _shift(peer: Annealing, seed: int = 0) -> tuple[float, float]:
    """Smallest and largest distance from the Nash point of 8 starts after 400 steps. Look-ahead 0.3, as own curvatures of 2 make 1 overshoot."""
    Q = torch.tensor([[[2.0, -0.5], [-0.5, 0.0]], [[0.0, -0.5], [-0.5, 2.0]]], dtype=torch.float64)
    game = quadratic_game(Q, torch.tensor([[1.0, 0.7], [0.4, 1.0]], dtype=torch.float64))
    task = SmoothTask(game, torch.randn(8, 2, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))
    distance = game.distance(_end(_with(alpha=0.3, peer=peer), task, STEPS))
    return float(distance.min()), float(distance.max())


def _elsewhere(weight: float) -> Evidence:
    low, high = _shift(Annealing(weight, kappa=1.0))
    return Evidence(
        {"nearest": low, "farthest": high}, "8 starts end together (within 1e-9), farther than 1e-2 from the Nash point",
        low > 1e-2 and high - low < 1e-9,
    )  # fmt: skip


@claim("a peer-learning term that stays moves the point where updates vanish away from the Nash point")
def persistent_correction_shifts() -> Evidence:
    return _elsewhere(1.0)


@ablation(persistent_correction_shifts, "the peer term")
def nothing_shifts() -> Evidence:
    return _elsewhere(0.0)


def _back(kappa: float) -> Evidence:
    """Every distance counts as near, so that the weight falls from step 50 on."""
    _, high = _shift(Annealing(1.0, kappa, radius=float("inf"), patience=51))
    return Evidence({"farthest": high}, "all of 8 starts within 1e-6 of the Nash point", high < 1e-6)


@claim("annealing the peer-learning term brings the dynamics to the Nash point")
def annealing_recovers() -> Evidence:
    return _back(0.9)


@ablation(annealing_recovers, "annealing: the weight stays 1")
def constant_weight() -> Evidence:
    return _back(1.0)


def _dilemma(method: Method, seeds: range = range(5), starts: int = 20) -> list[float]:
    """Mean value of both players after 150 steps of size 2, for each seed, from standard normal logits."""
    game = iterated_dilemma()
    drawn = [torch.randn(starts, 2, 5, generator=torch.Generator().manual_seed(s), dtype=torch.float64) for s in seeds]
    steady = method.set("update.learning_rate", 2.0).set("update.bound", 8.0)
    values = game.values(_end(steady, SmoothTask(game, torch.cat(drawn)), 150))
    return [round(float(v.mean()), 3) for v in values.split(starts)]


def _cooperation(peer: float) -> Evidence:
    plain, aware = _dilemma(INDEPENDENT), _dilemma(_with(alpha=10.0, peer=Annealing(peer)))
    gains = [a - p for a, p in zip(aware, plain, strict=True)]
    return Evidence(
        {"independent": plain, "with look-ahead 10": aware},
        "mean value more than 0.2 higher in each of 5 draws of 20 starts",
        min(gains) > 0.2,
    )


@claim("in the iterated prisoner's dilemma independent learners end in defection, and learners who see how they teach each other do not")
def teaching_cooperation() -> Evidence:
    return _cooperation(1.0)


@ablation(teaching_cooperation, "the peer term; the own-learning term stays")
def blind_to_peers() -> Evidence:
    return _cooperation(0.0)


def _error(with_peer: bool) -> Evidence:
    """The largest difference between the sum of the terms and central differences of the final value, over both games and up to three steps."""
    worst, h = 0.0, 1e-5
    for game in (stag_hunt(), iterated_dilemma()):
        theta = torch.randn(10, 2, game.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        for unroll in (1, 3):
            found = corrections(game.values, theta, 1.0, unroll)
            total = found.pg + found.own + (found.peer if with_peer else 0.0)
            for i in range(2):
                for k in range(game.size):
                    sides = []
                    for sign in (1, -1):
                        moved = theta.clone()
                        moved[:, i, k] += sign * h
                        sides.append(game.values(learn(game.values, moved.requires_grad_(), 1.0, unroll)).detach()[:, i])
                    worst = max(worst, float((total[:, i, k] - (sides[0] - sides[1]) / (2 * h)).abs().max()))
    return Evidence({"largest error": worst}, "below 1e-6", worst < 1e-6)


@claim("the gradient through the players' learning is the policy gradient, an own-learning and a peer-learning term, and nothing else")
def three_terms_are_all() -> Evidence:
    return _error(True)


@ablation(three_terms_are_all, "the peer term")
def two_terms_are_not() -> Evidence:
    return _error(False)
