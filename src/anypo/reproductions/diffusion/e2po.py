"""Claims of E2PO on directions of a plane: 16 prompts times 8 samples, 150 updates; held-out rewards are those of the clean prompt under the ODE."""

from __future__ import annotations

from functools import cache
from statistics import fmean
from typing import NamedTuple

import torch

from anypo.claims import Evidence, ablation, claim
from anypo.domains.diffusion.setup import build
from anypo.loops.on_policy import step
from anypo.method import Method
from anypo.methods.diffusion.e2po import METHOD, RadiusControl, directions, perturb, radius
from anypo.methods.diffusion.flow_grpo import METHOD as FLOW_GRPO
from anypo.run import Run
from anypo.seams.select import UniformPrompts

SEEDS = (0, 1, 2, 3, 4)
PLAIN = FLOW_GRPO.but(
    select=UniformPrompts(group_size=8), regularize=METHOD.regularize, control=(RadiusControl(),)
)  # the control only logs
FIXED = METHOD.set("control.1.eta", 0.0)  # the radius stays 0.2, as in the setting whose numbers the paper's digest was tried in
FORMS = {
    "flow_grpo": PLAIN,
    "e2po": FIXED,
    "constant": FIXED.set("rollout.gamma", 0.0),
    "not learned": FIXED.set("control.0.rate", 0.0),
}


class Found(NamedTuple):
    spread: float  # mean reward deviation inside groups, last ten updates
    clean: float  # reward of the ODE's samples of clean prompts, mean of ten policies of the last twenty updates


def run_form(method: Method, seed: int) -> Found:
    policy, task = build("ring", None)
    run = Run(method, policy, task, steps=150, seed=seed)
    clean = []
    while not run.finished:
        step(run)
        if run.step > 130 and run.step % 2 == 0:
            clean.append(task.evaluate(run)["reward"])
    return Found(fmean(record["reward_std"] for record in run.history[-10:]), fmean(clean))


@cache
def _found(form: str, seed: int) -> Found:
    return run_form(FORMS[form], seed)


def _mean(form: str, seeds: tuple[int, ...] = SEEDS) -> Found:
    found = [_found(form, seed) for seed in seeds]
    return Found(fmean(f.spread for f in found), fmean(f.clean for f in found))


def _spread(form: str, seeds: tuple[int, ...] = SEEDS) -> Evidence:
    """1.2: half of the gain measured on other seeds (100 to 104: 1.39)."""
    mine, plain = _mean(form, seeds), _mean("flow_grpo", seeds)
    found = {form: round(mine.spread, 4), "flow_grpo": round(plain.spread, 4), "ratio": round(mine.spread / plain.spread, 3)}
    return Evidence(found, f"at least 1.2 times Flow-GRPO's, means of {len(seeds)} seeds", mine.spread >= 1.2 * plain.spread)


@claim("after 150 updates the rewards inside a group still differ more than under Flow-GRPO", slow=True)
def keeps_spread() -> Evidence:
    return _spread("e2po")


@ablation(keeps_spread, "random directions, never learned: the network hardly heeds them")
def random_directions() -> Evidence:
    return _spread("not learned", SEEDS[:3])


def _clean(form: str, seeds: tuple[int, ...] = SEEDS) -> Evidence:
    mine, plain = _mean(form, seeds), _mean("flow_grpo", seeds)
    found = {form: round(mine.clean, 4), "flow_grpo": round(plain.clean, 4)}
    return Evidence(found, f"not below Flow-GRPO's by more than 0.01, means of {len(seeds)} seeds", mine.clean >= plain.clean - 0.01)


@claim("the perturbations cost clean prompts nothing: their reward is that of Flow-GRPO or better", slow=True)
def costs_nothing() -> Evidence:
    return _clean("e2po")


@ablation(costs_nothing, "a perturbation that does not fade with the noise")
def costs_without_schedule() -> Evidence:
    return _clean("constant", SEEDS[:3])


def _schedule(form: str) -> Evidence:
    other, mine = _mean(form, SEEDS[:3]), _mean("e2po", SEEDS[:3])
    found = {name: [round(f.spread, 3), round(f.clean, 3)] for name, f in ((form, other), ("e2po", mine))}
    holds = other.spread >= 3 * mine.spread and other.clean <= mine.clean - 0.05
    return Evidence(found, "at least 3 times the spread, and clean reward at least 0.05 worse, means of 3 seeds", holds)


@claim("the schedule matters: constant perturbations keep the groups far more different, and the clean reward is worse for it", slow=True)
def schedule_matters() -> Evidence:
    return _schedule("constant")


@ablation(schedule_matters, "the schedule left as it is in both")
def same_schedule() -> Evidence:
    return _schedule("e2po")


def _structure(made: bool) -> Evidence:
    """Largest |mean| of the perturbations of six members, and distance of Q Q' from the identity, over 20 random U [2,8]."""
    centre, angle = 0.0, 0.0
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        U, e = torch.randn(2, 8, generator=generator, dtype=torch.float64), torch.randn(8, generator=generator, dtype=torch.float64)
        Q = directions(U) if made else U
        centre = max(centre, float(perturb(e, Q, 8, 2, 0.2).mean(0).abs().max()))
        angle = max(angle, float((Q @ Q.T - torch.eye(2)).abs().max()))
    return Evidence({"mean": centre, "from orthonormal": angle}, "at most 1e-6 both", max(centre, angle) <= 1e-6)


@claim("the perturbations of a group cancel, along orthonormal directions")
def structure() -> Evidence:
    return _structure(made=True)


@ablation(structure, "the raw directions")
def raw_directions() -> Evidence:
    return _structure(made=False)


def _radius(eta: float) -> Evidence:
    below = radius([0.2] * 5, 0.2, eta, 0.5, 0.9, 0.01, 0.5)
    above = radius([0.8] * 5, 0.2, eta, 0.5, 0.9, 0.01, 0.5)
    found = {"below": [round(v, 4) for v in below.tolist()], "above": [round(v, 4) for v in above.tolist()]}
    holds = bool((below.diff() > 0).all() and (above.diff() < 0).all())
    return Evidence(found, "the radius grows at every update below the floor and shrinks above it", holds)


@claim("the radius grows while the rewards' deviation is under its floor, and shrinks above it")
def radius_reacts() -> Evidence:
    return _radius(0.1)


@ablation(radius_reacts, "no control")
def radius_stays() -> Evidence:
    return _radius(0.0)
