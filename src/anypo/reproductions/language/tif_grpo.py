"""Claims of TIF-GRPO on toy_ct: four scans by 8 reports a step, 100 steps, from a policy that has imitated reports that leave out most abnormalities.

Measured on one report of each of 256 held-out scans, with the same random numbers every time: F1, recall and the share of false units over the findings,
and ROUGE-L to the true report. Means over seeds. The length factor begins at 280 characters, which no true report reaches. Margins are about a third of
the differences on other seeds. Claims about false units are measured where half of the organs are abnormal: elsewhere a third of the scans are normal,
and there false units are charged without the effort term too (equation 5; on another seed their share was 0.25 without it and 0.28 with it).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.language.toys.ct_policy import ReportPolicy
from anypo.domains.language.toys.toy_ct import ToyCT, make_toy_ct
from anypo.methods.language.lampo import rouge_l
from anypo.methods.language.tif_grpo import METHOD, section_reward
from anypo.reproductions.common import ShuffledCredit, train_on
from anypo.run import Run

SEEDS = range(2)
STEPS = 100


def _rouge(batch: Batch) -> list[float]:
    pairs = zip(batch.signals["completion"], batch.signals["columns"], strict=True)
    return [rouge_l(text.split(), known["report"].split()) for text, known in pairs]


@dataclass
class Rouge:
    """The lexical reward: ROUGE-L to the true report."""

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        return torch.tensor(_rouge(batch), dtype=torch.float64)


@dataclass
class Recall:
    """The share of the true units that are found, 1 where there are none."""

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        return torch.tensor([float(m.hit.double().mean()) if len(m.hit) else 1.0 for m in run.task.findings(batch)], dtype=torch.float64)


TIF = METHOD.set("reward.length_threshold", 280.0).set("reward.length_scale", 200.0)
METHODS = {
    "tif": TIF,
    "rouge": TIF.but(reward=Rouge()),
    "recall": TIF.but(reward=Recall()),
    "no effort": TIF.set("reward.gamma", 0.0),
    "no integral": TIF.set("reward.alpha", 0.0),
    "shuffled": TIF.but(credit=ShuffledCredit(TIF.credit)),
}


def _measured(policy: ReportPolicy, task: ToyCT) -> dict[str, float]:
    with torch.no_grad():
        batch = task.attempt(policy, task.held_out(), torch.Generator().manual_seed(0))
    return task.measure(policy) | {"rouge": fmean(_rouge(batch))}


@functools.cache
def _imitated() -> dict[str, float]:
    return _measured(*make_toy_ct())


@functools.cache
def _trained(name: str, seed: int, **world: float) -> dict[str, float]:
    policy, task = make_toy_ct(prompts_per_step=4, **world)
    train_on(METHODS[name], policy, task, steps=STEPS, seed=seed, watch=lambda run, batch: None)
    return _measured(policy, task)


def _mean(name: str, **world: float) -> dict[str, float]:
    """Means of all measures over the seeds; "imitated" is the policy at the start."""
    runs = [_imitated() if name == "imitated" else _trained(name, seed, **world) for seed in SEEDS]
    return {measure: round(fmean(run[measure] for run in runs), 3) for measure in runs[0]}


def _learned(name: str) -> Evidence:
    found = {n: _mean(n) for n in (name, "imitated")}
    mine, start = found[name], found["imitated"]
    return Evidence(
        found, "F1 and recall of the units 0.1 higher", mine["f1"] > start["f1"] + 0.1 and mine["recall"] > start["recall"] + 0.1
    )


@claim("reports trained on the integral reward find more of the abnormalities than those of the imitating policy", slow=True)
def learned() -> Evidence:
    return _learned("tif")


@ablation(learned, "advantages dealt to the wrong reports")
def shuffled() -> Evidence:
    return _learned("shuffled")


@claim("reports trained on the integral reward find more of the abnormalities than those of ROUGE-GRPO", slow=True, reproduced=False)
def clinical() -> Evidence:
    """On another seed F1 0.65 against 0.53; on these seeds no difference in its favour."""
    found = {n: _mean(n) for n in ("tif", "rouge")}
    mine, lexical = found["tif"], found["rouge"]
    holds = mine["f1"] > lexical["f1"] + 0.04 and mine["recall"] > lexical["recall"] + 0.04
    return Evidence(found, "F1 and recall of the units 0.04 higher", holds)


@claim("ROUGE-GRPO raises ROUGE-L while the F1 of the units stays where it was", slow=True, reproduced=False)
def divergence() -> Evidence:
    """Not so here: half of the tokens of a toy report belong to units, so that a right one raises ROUGE-L too."""
    found = {n: _mean(n) for n in ("rouge", "imitated")}
    lexical, start = found["rouge"], found["imitated"]
    return Evidence(
        found, "ROUGE-L 0.1 higher, F1 at most 0.02 higher", lexical["rouge"] > start["rouge"] + 0.1 and lexical["f1"] < start["f1"] + 0.02
    )


def _persistent(alpha: float) -> Evidence:
    early, late = torch.tensor([0, 0, 1, 1]), torch.tensor([1, 1, 0, 0])
    found = {
        "early": float(section_reward(early, early, early, 0, alpha=alpha)),
        "late": float(section_reward(late, late, late, 0, alpha=alpha)),
    }
    return Evidence(found, "early misses earn 0.3 less than late ones", found["early"] < found["late"] - 0.3)


@claim("an omission that persists costs more: with the same recall, early misses earn less than late ones")
def persistent() -> Evidence:
    return _persistent(1.0)


@ablation(persistent, "no integral")
def forgetful() -> Evidence:
    return _persistent(0.0)


def _false_units(name: str, other: str, margin: float) -> Evidence:
    found = {n: _mean(n, abnormal=0.5) for n in (name, other)}
    return Evidence(found, f"share of false units {margin} below", found[name]["false"] < found[other]["false"] - margin)


@claim("it reports a smaller share of false units than a reward of recall alone", slow=True)
def hallucination() -> Evidence:
    return _false_units("tif", "recall", 0.1)


@ablation(hallucination, "recall alone on both sides")
def recall_alone() -> Evidence:
    return _false_units("recall", "recall", 0.1)


@claim("without the effort term a larger share of the reported units is false", slow=True, reproduced=False)
def effort() -> Evidence:
    """0.17 against 0.22 on these two seeds, which is within what seeds differ by; with fewer abnormal organs it was the other way round."""
    return _false_units("tif", "no effort", 0.03)


@ablation(effort, "no effort term on both sides")
def effortless() -> Evidence:
    return _false_units("no effort", "no effort", 0.03)


@claim("without the integral fewer of the abnormalities are found", slow=True, reproduced=False)
def integral() -> Evidence:
    """On another seed 0.59 against 0.48; on these seeds none: the effort term too pays for reporting what is there. More of the hits are complete."""
    found = {n: _mean(n) for n in ("tif", "no integral")}
    return Evidence(found, "recall 0.04 higher with it", found["tif"]["recall"] > found["no integral"]["recall"] + 0.04)
