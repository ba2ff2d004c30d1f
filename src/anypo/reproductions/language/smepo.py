"""Claims of SMEPO on copy_or_compute, at the spec's sizes: 16 questions x 8 rollouts a step, SGD 1 on results and 0.3 on operations for the sum over
questions and actions (the spec does not say how its loss is averaged). "Closed" is exact success without a solution, "plan" with the operations given.
"""

from __future__ import annotations

import re
from functools import lru_cache
from statistics import fmean

import numpy as np

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.language.toys.copy_or_compute import CopyOrCompute
from anypo.methods.language.smepo import LABEL, METHOD, UNGUIDED, VARIANTS, mask_math
from anypo.reproductions.common import train_on
from anypo.run import Run

SEEDS = (0, 1, 2)
HALF, STEPS, FIRST = 200, 400, 50
METHODS = {"smepo": METHOD, "grpo": UNGUIDED, **VARIANTS}


@lru_cache
def _curves(name: str, steps: int = STEPS) -> dict[str, float]:
    """Means over seeds: `closed` and `plan` after `HALF` and after all steps, and the reward of the first 50 steps."""
    method, found = METHODS[name].set("update.max_grad_norm", None), []
    for seed in SEEDS:
        task = CopyOrCompute(seed)
        policy = task.policy(seed)

        def watch(run: Run, batch: Batch, task: CopyOrCompute = task) -> dict[str, float]:
            at = {f"/{run.step}": True} if run.step in (HALF, STEPS) else {}
            exact = {
                key + when: task.expected_success(run.policy, plan)  # type: ignore[arg-type]
                for when in at for key, plan in (("closed", False), ("plan", True))
            }  # fmt: skip
            return {"reward": float(batch.outcome.mean()), **exact}

        curve = train_on(method, policy, task, steps=steps, seed=seed, watch=watch)
        last = {key: value for record in curve for key, value in record.items() if "/" in key}
        found.append({"reward": fmean(record["reward"] for record in curve[:FIRST]), **last})
    return {key: round(fmean(run[key] for run in found), 3) for key in found[0]}


def _copying(shown: str, guided: str) -> Evidence:
    full, mine = _curves(shown), _curves(guided)
    lead = mine["closed/400"] - full["closed/400"]
    return Evidence(
        {"reward shown all": full["reward"], "closed shown all": full["closed/400"], "closed masked": mine["closed/400"]},
        "shown all: reward > 0.9 from the start, closed < 0.3 after 400 steps; masked: closed more than 0.3 higher",
        full["reward"] > 0.9 and full["closed/400"] < 0.3 and lead > 0.3,
    )


@claim("a policy that is shown whole solutions is paid for copying and hardly learns to compute; with numbers hidden it learns")
def copying_is_not_learning() -> Evidence:
    return _copying("full", "smepo")


@ablation(copying_is_not_learning, "the numbers are not hidden")
def copying_by_both() -> Evidence:
    return _copying("full", "full")


@ablation(copying_is_not_learning, "no solution is shown, so there is nothing to copy")
def nothing_to_copy() -> Evidence:
    return _copying("grpo", "smepo")


def _sooner(guided: str) -> Evidence:
    mine, grpo = _curves(guided), _curves("grpo")
    lead = mine["closed/200"] - grpo["closed/200"]
    # The spec's estimate of the lead is 0.2, with a GRPO that learns more slowly than ours; seeds that chose the setting (100-102) gave 0.17.
    return Evidence(
        {"closed": mine["closed/200"], "plan": mine["plan/200"], "closed grpo": grpo["closed/200"], "plan grpo": grpo["plan/200"]},
        "after 200 steps closed more than 0.1 above GRPO and plan above 0.85", lead > 0.1 and mine["plan/200"] > 0.85,
    )  # fmt: skip


@claim("after 200 steps masked solutions have taught more than GRPO without them, and nearly all results of given operations")
def masked_solutions_teach_sooner() -> Evidence:
    return _sooner("smepo")


@ablation(masked_solutions_teach_sooner, "no solution is shown: GRPO")
def no_sooner_unguided() -> Evidence:
    return _sooner("grpo")


@ablation(masked_solutions_teach_sooner, "the numbers are not hidden")
def no_sooner_by_copying() -> Evidence:
    return _sooner("full")


def _then(guided: str) -> Evidence:
    mine, grpo = _curves(guided)["closed/400"], _curves("grpo")["closed/400"]
    return Evidence({"with": mine, "grpo": grpo}, "closed more than 0.15 above GRPO after 400 steps", mine > grpo + 0.15)


@claim("masked solutions for 200 steps and then GRPO for 200 end above 400 steps of GRPO")
def then_without() -> Evidence:
    return _then("then_grpo")


@ablation(then_without, "no solution in the first half either")
def never_with() -> Evidence:
    return _then("grpo")


def _hidden(masked: bool) -> Evidence:
    """Digits outside labels and lost lines in the solutions of 2000 questions, and how often the answer is still in the text."""
    digits = lines = answers = 0
    for prompt in CopyOrCompute(0).prompts(2000, np.random.default_rng(0)):
        trace = prompt.columns["trace"]
        text = mask_math(trace) if masked else trace
        rest = re.sub(LABEL, "", text, flags=re.IGNORECASE)
        digits += sum(c.isdigit() for c in rest)
        lines += text.count("\n") != trace.count("\n") or not all(f"Step {d}:" in text for d in (1, 2, 3))
        answers += prompt.columns["answer"] in rest
    return Evidence({"digits": digits, "texts with lost lines": lines, "answers": answers}, "none of any", digits == lines == answers == 0)


@claim("a masked solution has no digit outside labels such as Step 3, and loses no line")
def nothing_to_copy_is_left() -> Evidence:
    return _hidden(True)


@ablation(nothing_to_copy_is_left, "no mask")
def unmasked() -> Evidence:
    return _hidden(False)
