"""Claims of PSN on the skill grid, 300 episodes with each of 40 students: skill grows nearly as by practice alone while the pair does nearly as well as
the expert; the bonus for learnable states steers; an autopilot lets skill decay. The greedy assistant, and one trained by PPO. Blending is the
expert's action with probability 1/2, b = 1/2 throughout. The veto alone (w_learn = 0) gives the first two as well; the third is the nudge's own."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from anypo.claims import Evidence, ablation, claim
from anypo.domains.control.setup import build
from anypo.domains.control.skill_grid import CELLS, SCALARS, Lessons, lessons
from anypo.loops import on_policy
from anypo.method import Method
from anypo.methods.control.psn import METHOD, Nudger
from anypo.run import Run

FINAL_SEED = 0
GREEDY = {
    "psn": Nudger(), "value only": Nudger(w_learn=0.0), "strong": Nudger(w_learn=2.0), "indifferent": Nudger(0.0, 0.0, margin=1e9),
}  # fmt: skip
FIXED = {"practice": 0.0, "blending": 0.5, "autopilot": 1.0}


@functools.cache
def course(kind: str, rho: float = 0.01, seed: int = FINAL_SEED) -> Lessons:
    """Lessons with an assistant by name. "uninformed" is "strong" with a competence of 1/2 everywhere."""

    def assist(observation: np.ndarray) -> Any:
        if kind in FIXED:
            return np.full(len(observation), FIXED[kind])
        if kind == "uninformed":
            observation = observation.copy()
            observation[:, CELLS + SCALARS.index("after_user") :] = 0.5
        return GREEDY["strong" if kind == "uninformed" else kind](observation)

    return lessons(assist, seed=seed, rho=rho)


def _mean(kind: str, what: str, **options: Any) -> float:
    return round(float(getattr(course(kind, **options), what).mean()), 3)


def _grows_and_performs(gain: float, shared: float) -> Evidence:
    blending, autopilot, practice = _mean("blending", "gain"), _mean("autopilot", "gain"), _mean("practice", "shared")
    measured = {"gain": gain, "gain by blending": blending, "by the autopilot": autopilot, "shared return": shared, "of practice": practice}
    holds = gain >= 2 * blending and gain > autopilot and shared > practice
    return Evidence(measured, "gain at least twice blending's and above the autopilot's, shared return above practice's", holds)


@claim(
    "PSN's students gain at least twice as much unassisted return as by blending, more than by an autopilot, and the pair earns more than practice"
)
def skill_and_performance() -> Evidence:
    return _grows_and_performs(_mean("psn", "gain"), _mean("psn", "shared"))


@ablation(skill_and_performance, "neither task value nor veto, so that the assistant never helps")
def without_help() -> Evidence:
    return _grows_and_performs(_mean("indifferent", "gain"), _mean("indifferent", "shared"))


@ablation(skill_and_performance, "blending in its place")
def blending_in_its_place() -> Evidence:
    return _grows_and_performs(_mean("blending", "gain"), _mean("blending", "shared"))


def _fewer_pits(kind: str) -> Evidence:
    pits, alone = _mean(kind, "pits"), _mean("practice", "pits")
    return Evidence({"pits an episode": pits, "in practice": alone}, "at most 70%", pits <= 0.7 * alone)


@claim("With PSN a student falls into at least 30% fewer pits than in unassisted practice")
def pits_are_avoided() -> Evidence:
    return _fewer_pits("psn")


@ablation(pits_are_avoided, "neither task value nor veto")
def pits_without_help() -> Evidence:
    return _fewer_pits("indifferent")


def _steers(kind: str) -> Evidence:
    zone, plain = _mean(kind, "zone"), _mean("value only", "zone")
    shared, before = _mean(kind, "shared"), _mean("value only", "shared")
    measured = {"share of steps in the zone": [zone, plain], "shared return": [shared, before]}
    return Evidence(
        measured, "at least 1.1 times the share without the bonus, shared return not lower", zone >= 1.1 * plain and shared >= before
    )


@claim("A bonus of 2 for learnable next states raises the share of steps where 4k(1-k) > 1/2 by at least 10%, at no cost in shared return")
def nudging_steers() -> Evidence:
    return _steers("strong")


@ablation(nudging_steers, "the estimated competence is 1/2 everywhere")
def nudging_without_an_estimate() -> Evidence:
    return _steers("uninformed")


def _decays(rho: float) -> Evidence:
    gain = course("autopilot", rho=rho).gain
    return Evidence(round(float(gain.max()), 5), "below 0 for every student", bool((gain < 0).all()))


@claim("Under an autopilot unassisted return falls")
def autopilot_lets_skill_decay() -> Evidence:
    return _decays(0.01)


@ablation(autopilot_lets_skill_decay, "skill does not decay under assistance (rho = 0)")
def skill_that_does_not_decay() -> Evidence:
    return _decays(0.0)


@functools.cache
def learned(steps: int, w_learn: float = 0.5, w_assist: float = 0.2, seed: int = FINAL_SEED) -> Lessons:
    """Lessons with an assistant trained by PPO for `steps` of 1024 actions with 8 students; it acts by its likeliest action."""
    torch.set_num_threads(1)
    method: Method = METHOD.set("reward.w_learn", w_learn).set("reward.w_assist", w_assist)
    for path, value in {"update.epochs": 4, "update.minibatches": 8, "update.learning_rate": 1e-3}.items():
        method = method.set(path, value)
    policy, task = build("SkillGrid-v0", None, seed=seed, envs=8, horizon=128)
    run = Run(method, policy, task, steps=max(steps, 1), seed=seed)
    if steps:
        on_policy.train(run)
    act = policy.actor()
    return lessons(lambda observation: act(observation, None), seed=seed, students=20)


def _learns_to_assist(found: Lessons) -> Evidence:
    return _grows_and_performs(round(float(found.gain.mean()), 3), round(float(found.shared.mean()), 3))


@claim("An assistant trained by PPO on the shared reward for 40000 steps does the same, with students it never met", slow=True)
def assistant_is_learned() -> Evidence:
    return _learns_to_assist(learned(40))


@ablation(assistant_is_learned, "paid for the task alone, neither for learnable states nor against assistance")
def assistant_paid_for_the_task() -> Evidence:
    return _learns_to_assist(learned(40, w_learn=0.0, w_assist=0.0))
