"""Claims of StepPO on spell_grid: moves spelled with one to six letters, goal reward 1, twelve moves, a small GRU policy and a critic.

Both methods: 32 walks a batch, four epochs of two minibatches, Adam 3e-3, gamma 0.95 and lambda 1, counted in tokens by PPO and in steps by StepPO.
Success and word length are exact. They are judged after 20 updates, when both have learned to walk: from then on advantages are whitened noise, and
StepPO's word length, which nothing holds, wanders in either direction.
"""

from __future__ import annotations

import functools
from statistics import fmean
from typing import cast

import torch

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.language.toys.spell_grid import SpellGrid, SpellPolicy
from anypo.method import Credit, Method
from anypo.methods.control.ppo import METHOD as PPO
from anypo.methods.language.steppo import METHOD as STEPPO
from anypo.methods.language.steppo import StepGAE
from anypo.reproductions.common import train_on
from anypo.run import Run
from anypo.seams.credit import GAE
from anypo.seams.select import UniformPrompts
from anypo.seams.update import GradientSteps

SEEDS = range(5)
UPDATES = 20


def _walks(lengths: list[int], generator: torch.Generator) -> Batch:
    """One walk with words of the given lengths; the critic says the same at the start of every word, and anything inside one."""
    segment = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]
    start = torch.cat([torch.ones(1, 1, dtype=torch.bool), segment[:, 1:] != segment[:, :-1]], dim=1)
    value = torch.rand(1, segment.shape[1], generator=generator, dtype=torch.float64)
    value[start] = torch.linspace(0.2, 0.9, len(lengths), dtype=torch.float64)
    mask = torch.ones_like(segment, dtype=torch.bool)
    return Batch(action=segment, mask=mask, logp=torch.zeros(mask.shape), group=torch.zeros(1, dtype=torch.int64), segment=segment,
                 reward=torch.ones(1).double(), signals={"old_value": value, "start": start})  # fmt: skip


def _invariance(credit: Credit) -> Evidence:
    """The largest change of any word's advantage when one word gets up to five more letters."""
    changes, generator, nobody = [], torch.Generator().manual_seed(0), cast(Run, None)  # neither credit looks at the run
    for _ in range(50):
        lengths = torch.randint(1, 7, (6,), generator=generator).tolist()
        longer = list(lengths)
        longer[int(torch.randint(6, (1,), generator=generator))] += int(torch.randint(1, 6, (1,), generator=generator))
        batches = [_walks(lengths, generator), _walks(longer, generator)]
        found = [credit(batch, nobody)[batch.signals["start"]] for batch in batches]
        changes.append(float((found[0] - found[1]).abs().max()))
    return Evidence({"largest change": max(changes), "smallest": min(changes)}, "exactly 0", max(changes) == 0)


@claim("longer words change no advantage")
def invariance() -> Evidence:
    return _invariance(StepGAE(gamma=0.95, lam=0.95, normalize=False))


@ablation(invariance, "GAE over tokens")
def token_gae_varies() -> Evidence:
    return _invariance(GAE(gamma=0.95, lam=0.95, normalize=False))


@functools.cache
def _trained(name: str, seed: int) -> tuple[float, float, float]:
    """(success, mean word length minus that at the start, explained variance of the last three batches)."""
    method: Method = {"ppo": PPO, "steppo": STEPPO, "steppo, critic off": STEPPO.set("regularize.0.coefficient", 0.0)}[name]
    method = method.but(select=UniformPrompts(prompts=32, group_size=1), update=GradientSteps(epochs=4, minibatches=2))
    policy, task = SpellPolicy(seed=seed), SpellGrid()
    start = task.mean_word(policy)
    run_log: list[float] = []

    def watch(run: Run, batch: Batch) -> float:
        run_log.append(run.history[-1]["explained_variance"])
        return task.expected_success(policy)

    success = train_on(method.set("credit.gamma", 0.95).set("credit.lam", 1.0), policy, task, steps=UPDATES, seed=seed, watch=watch)
    return success[-1], task.mean_word(policy) - start, fmean(run_log[-3:])


def _mean(name: str, column: int) -> float:
    return fmean(_trained(name, seed)[column] for seed in SEEDS)


def _keeps_words(name: str) -> Evidence:
    shifts = {"ppo": _mean("ppo", 1), name: _mean(name, 1)}
    success = {"ppo": _mean("ppo", 0), name: _mean(name, 0)}
    holds = abs(shifts[name]) < abs(shifts["ppo"]) / 2 and shifts["ppo"] < -0.5 and success[name] >= success["ppo"] - 0.01
    found = {
        "shift of word length": {k: round(v, 3) for k, v in shifts.items()},
        "by seed": [round(_trained(name, seed)[1], 2) for seed in SEEDS],
        "success": {k: round(v, 4) for k, v in success.items()},
    }
    return Evidence(found, "shift under half of token PPO's, success at most 0.01 below it", holds)


@claim(
    "with gamma 0.95 token-level PPO learns to prefer short words; StepPO's mean word length moves less than half as far, with equal success",
    slow=True,
)
def keeps_words() -> Evidence:
    return _keeps_words("steppo")


@ablation(keeps_words, "tokens as actions: PPO in StepPO's place")
def shortens_words() -> Evidence:
    return _keeps_words("ppo")


def _explains(name: str) -> Evidence:
    found = [_trained(name, seed)[2] for seed in SEEDS]
    return Evidence([round(v, 3) for v in found], "above 0.5 in every seed", min(found) > 0.5)


@claim("the critic comes to explain more than half of the variance of the returns at the starts of steps", slow=True)
def explains() -> Evidence:
    return _explains("steppo")


@ablation(explains, "the critic is not trained")
def explains_nothing() -> Evidence:
    return _explains("steppo, critic off")
