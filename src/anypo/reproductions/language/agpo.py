"""Claims of AGPO on token_bandit (P=16, V=4, T=2): the controllers' directions, their bounds over a run, and success at an equal number of generated
tokens, probes counted. GRPO has AGPO's ddof, four epochs and KL. SGD step 1 for each prompt, as for GRPO's own claims."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from statistics import fmean, pstdev

import torch

from anypo.claims import Evidence, ablation, claim
from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.loops.on_policy import train
from anypo.method import Method
from anypo.methods.language.agpo import METHOD as AGPO
from anypo.methods.language.agpo import ProbeRollout, clip, temperature
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.reproductions.common import BANDIT_STEP, ShuffledCredit, plain_sgd
from anypo.run import Run
from anypo.seams.credit import GroupRelative
from anypo.seams.select import UniformPrompts
from anypo.task import Prompt

ROLLOUTS = 16 * 16  # of a step of AGPO, probe and training; GRPO trains on all of them
FIXED = {"alpha": 0.0, "gamma": 0.0, "delta": 0.0, "zeta": 0.0}
CLIPS, HEATS = (0.05, 0.2, 0.4), (0.5, 1.0, 1.5)


def _strictly(values: list[float], rising: bool) -> bool:
    return all((b > a) == rising and a != b for a, b in itertools.pairwise(values))


def _directions(adapts: bool) -> Evidence:
    """Sweeps of each input inside the clip's bounds, and of the uncertainty around its average."""
    state = {"sigma": 0.2, "skew": 0.3, "entropy": 1.0, "entropy_ref": 1.0, "vote": 0.7, "kl": 0.1}
    gains = {"zeta": 0.2} if adapts else FIXED
    wanted = {"sigma": False, "kl": False, "skew": False, "vote": True, "entropy": True}
    right = {}
    for name, rising in wanted.items():
        sweep = [
            clip(**(state | {name: value if name != "entropy" else 0.6 + 0.8 * value}), **gains) for value in (0.0, 0.25, 0.5, 0.75, 1.0)
        ]
        right[name] = _strictly(sweep, rising)
    heats = temperature(torch.tensor([1.0, 1.3, 0.7, 2.0, 0.4]).double(), lam_temp=0.15 if adapts else 0.0).tau
    ema, sides = 1.0, []
    for u, tau in zip((1.3, 0.7, 2.0, 0.4), heats[1:].tolist(), strict=True):
        sides.append((tau > 1.0) == (u > ema) and tau != 1.0)
        ema = 0.1 * u + 0.9 * ema
    right["temperature"] = all(sides)
    return Evidence(right, "all monotone in the stated direction; hotter than the base exactly above the average", all(right.values()))


@claim(
    "the clip falls with dispersion, drift and skewness, rises with votes and entropy; the temperature exceeds its base iff u exceeds its average"
)
def directions() -> Evidence:
    return _directions(adapts=True)


@ablation(directions, "all gains 0: the clip does not react to dispersion, drift, skewness and votes, nor the temperature to uncertainty")
def no_directions() -> Evidence:
    return _directions(adapts=False)


def agpo(**rollout: float | bool) -> Method:
    return plain_sgd(AGPO.but(rollout=ProbeRollout(**rollout)), BANDIT_STEP, epochs=4)  # type: ignore[arg-type]


def _bounded(lam_temp: float, bound: bool) -> Evidence:
    """A run with strong gains, so that the bounds are reached; without `bound` they are far away."""
    limits = {} if bound else {"tau_min": 1e-3, "tau_max": 1e3, "eps_min": 1e-6, "eps_max": 1e6}
    task = TokenBandit(seed=0)
    run = train(Run(agpo(lam_temp=lam_temp, alpha=8.0, **limits), task.policy(), task, steps=60))
    low, high = (pick(r[f"temperature_{end}"] for r in run.history) for pick, end in ((min, "min"), (max, "max")))
    narrow, wide = (pick(r[f"clip_range_{end}"] for r in run.history) for pick, end in ((min, "min"), (max, "max")))
    saturation = fmean(r["clip_saturation"] for r in run.history)
    found = {"temperature": [low, high], "clip range": [narrow, wide], "mean clip saturation": round(saturation, 3)}
    inside = 0.5 <= low <= high <= 1.5 and 0.05 <= narrow <= wide <= 0.4
    logged = all(0 <= r["clip_saturation"] <= 1 for r in run.history)
    return Evidence(found, "temperature in [0.5,1.5], clip range in [0.05,0.4], saturation in [0,1] at every step", inside and logged)


@claim("over a whole run with strong gains both controllers stay inside their bounds, and the clip's saturation is logged in [0,1]")
def bounded() -> Evidence:
    return _bounded(1.0, bound=True)


@ablation(bounded, "bounds far away")
def unbounded() -> Evidence:
    return _bounded(1.0, bound=False)


class HeatedPrompts(UniformPrompts):
    """Uniform prompts at one temperature."""

    heat = 1.0

    def __call__(self, task: object, run: Run) -> list[Prompt]:
        return [p.but(temperature=self.heat) for p in super().__call__(task, run)]  # type: ignore[arg-type]


def grpo(clip_range: float, heat: float) -> Method:
    select = HeatedPrompts(group_size=16)
    select.heat = heat
    objective = replace(AGPO.objective, clip_low=clip_range, clip_high=clip_range)  # type: ignore[type-var]
    method = GRPO.but(select=select, credit=GroupRelative(ddof=1, eps=1e-8), objective=objective, regularize=AGPO.regularize)
    return plain_sgd(method, BANDIT_STEP, epochs=4)


def success(method: Method, steps: int) -> float:
    """Mean exact success of 3 seeds after `steps` of 256 generated responses each."""
    ends = []
    for seed in range(3):
        task = TokenBandit(seed=seed)
        run = train(Run(method, task.policy(), task, steps=steps, seed=seed))
        assert run.actions == steps * ROLLOUTS * 2
        ends.append(task.expected_success(run.policy))  # type: ignore[arg-type]
    return fmean(ends)


@cache
def grpo_success(clip_range: float, heat: float, steps: int) -> float:
    return success(grpo(clip_range, heat), steps)


@cache
def agpo_success(clip_range: float, heat: float, steps: int) -> float:
    return success(agpo(eps_base=clip_range, tau_base=heat), steps)


HALFWAY, CONVERGED = 30, 70  # steps: on the way, and where GRPO has learned the task


def _as_good(shuffled: bool) -> Evidence:
    method = agpo()
    mine = success(method.but(credit=ShuffledCredit(method.credit)), CONVERGED) if shuffled else agpo_success(0.2, 1.0, CONVERGED)
    found = {
        "AGPO": round(mine, 3), "GRPO": round(grpo_success(0.2, 1.0, CONVERGED), 3),
        f"after {HALFWAY} steps": [round(f(0.2, 1.0, HALFWAY), 3) for f in (agpo_success, grpo_success)],
    }  # fmt: skip
    return Evidence(found, "at least GRPO's less 0.03", mine >= grpo_success(0.2, 1.0, CONVERGED) - 0.03)


# On the way AGPO lags, by about 0.05 after 30 steps: half of its responses are probes that it does not train on.
@claim(
    "at an equal number of generated tokens, probes counted, AGPO ends within 0.03 of GRPO's success once GRPO has learned the task",
    slow=True,
)
def as_good() -> Evidence:
    return _as_good(shuffled=False)


@ablation(as_good, "advantages dealt to the wrong rows")
def not_without_credit() -> Evidence:
    return _as_good(shuffled=True)


# Not reproduced: the spreads are equal within noise (0.148 and 0.150 when measured); most of both comes from the narrow clip and the low temperature.
@claim(
    "over base clips of 0.05 to 0.4 and base temperatures of 0.5 to 1.5 AGPO's success spreads less than GRPO's",
    slow=True,
    reproduced=False,
)
def less_brittle() -> Evidence:
    curves = {"AGPO": agpo_success, "GRPO": grpo_success}
    grids = {name: [round(run(c, h, HALFWAY), 3) for c in CLIPS for h in HEATS] for name, run in curves.items()}
    mine, other = (pstdev(values) for values in grids.values())
    found = {"AGPO spread": round(mine, 4), "GRPO spread": round(other, 4)}
    return Evidence(found | grids, "standard deviation over the 9 settings at most 0.9 of GRPO's", mine <= 0.9 * other)


def _switches(clip_off: float, heat_off: float) -> Evidence:
    """Success after few steps with the clip controller alone, the temperature alone, both and none."""
    still = FIXED | {"follow_entropy": False}
    settings = {
        "both": {}, "clip only": {"lam_temp": heat_off}, "temperature only": still if clip_off == 0 else {}, "none": {"lam_temp": 0.0} | still,
    }  # fmt: skip
    found = {name: success(agpo(**options), 8) for name, options in settings.items()}  # type: ignore[arg-type]
    return Evidence(found, "four different results", len({round(value, 6) for value in found.values()}) == 4)


@claim("each controller can be switched off alone, and the runs differ from those with both and with none")
def switches() -> Evidence:
    return _switches(0.0, 0.0)


@ablation(switches, "the switches are left on")
def no_switches() -> Evidence:
    return _switches(1.0, 0.15)
