"""Claims of PAIR on lookup_chain: what the probes see on clean and on contaminated prefixes, the internal reward against the outcome, softening.

The policy is the library's 2-layer transformer; seeds decide data and rollouts. Settings and margins were looked at on seeds 100 and 101. Two of the
spec's estimates do not come out here: attention tells little about contamination in so small a network, so that the second probe adds 0.02 and not
0.05, and the momentum (alpha = 5) costs more than the dense reward brings; without it the dense reward wins
at one prompt a step; at 8 prompts a step (seed 100) the outcome reward stayed ahead: 0.91 against 0.86, and 0.59 with momentum.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean

import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.language.toys.lookup_chain import LookupChain, make_lookup_chain
from anypo.method import Method
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.methods.language.pair import METHOD as PAIR
from anypo.methods.language.pair import auroc, fit_probes, logistic_regression, probed, turn_features
from anypo.reproductions.common import train_on
from anypo.run import Run

SEEDS = (0, 1, 2)
FITTED, TESTED = 4000, 6000  # trajectories
UPDATES = 100


@lru_cache
def _areas(blind: bool) -> dict[str, float]:
    """AUROC for grounded correctness of the hidden probe, of attention alone and of both stacked; on trajectories without a replaced turn, and on the
    turns behind one. `blind`: the hidden states are those of other turns."""
    found: dict[str, list[float]] = {}
    for seed in SEEDS:
        policy, task = make_lookup_chain()
        generator = torch.Generator().manual_seed(seed)
        (_, label, replaced, hidden, attn), test = (_seen(policy, task, n, generator, blind) for n in (FITTED, TESTED))
        used = ~replaced
        probes = fit_probes(hidden[used], attn[used], label[used], 0.01, 2.0, 0.05)
        mean, std = attn[used].double().mean(0), attn[used].double().std(0).clamp(min=1e-8)
        weight, _ = logistic_regression((attn[used].double() - mean) / std, label[used])
        _, label, replaced, hidden, attn = test
        both = probed(probes, hidden.flatten(0, 1), attn.flatten(0, 1), 2.0, 0.05)
        scores = {
            "hidden": both.s_bc.view(label.shape), "attention": (attn.double() - mean) / std @ weight, "pair": both.s_final.view(label.shape)
        }  # fmt: skip
        behind = (replaced.cumsum(1) > 0) & ~replaced
        for where, chosen in {"clean": ~replaced.any(1, keepdim=True).expand(label.shape), "contaminated": behind}.items():
            for name, score in scores.items():
                found.setdefault(f"{name} {where}", []).append(float(auroc(score[chosen], label[chosen])))
    return {name: round(fmean(values), 3) for name, values in found.items()}


def _seen(
    policy: torch.nn.Module, task: LookupChain, count: int, generator: torch.Generator, blind: bool
) -> tuple[Batch, Tensor, Tensor, Tensor, Tensor]:
    batch, label, replaced = task.labelled(count, generator)
    seen = policy.observe(batch, {"hidden", "attention_maps"})  # type: ignore[operator]
    features = turn_features(batch, seen.hidden, seen.attention_maps)
    hidden = features.hidden[torch.randperm(count, generator=generator)] if blind else features.hidden
    return batch, label, replaced, hidden, features.attn


def _consistency(blind: bool) -> Evidence:
    found = _areas(blind)
    holds = found["hidden clean"] > 0.85 and found["hidden contaminated"] < found["hidden clean"] - 0.15
    return Evidence(found, "hidden clean above 0.85, contaminated 0.15 below that", holds)


@claim("a probe on hidden states knows right turns after clean prefixes and far less behind a contaminated turn")
def belief_consistency() -> Evidence:
    return _consistency(False)


@ablation(belief_consistency, "hidden states of other rows")
def nothing_known_from_other_rows() -> Evidence:
    return _consistency(True)


def _stacked(blind: bool) -> Evidence:
    found = _areas(blind)
    holds = found["pair clean"] > found["attention clean"] + 0.05 and found["pair contaminated"] > found["attention contaminated"] + 0.02
    return Evidence(found, "pair 0.05 above attention on clean prefixes, 0.02 on contaminated ones", holds)


@claim("both probes stacked are better than attention alone, on clean and on contaminated prefixes")
def better_than_attention() -> Evidence:
    return _stacked(False)


@ablation(better_than_attention, "hidden states of other rows")
def not_without_hidden_states() -> Evidence:
    return _stacked(True)


@claim("behind a contaminated turn the stacked probes are 0.05 better than the hidden probe", reproduced=False)
def better_than_hidden() -> Evidence:
    found = _areas(False)
    return Evidence(
        found, "pair contaminated 0.05 above hidden contaminated", found["pair contaminated"] >= found["hidden contaminated"] + 0.05
    )


class Mislabelled(LookupChain):
    """An ablation: the labels belong to other rows, so that the probes know nothing."""

    def labelled_turns(self, count: int, run: Run) -> tuple[Batch, Tensor]:
        batch, label = super().labelled_turns(count, run)
        return batch, label[torch.randperm(count, generator=run.generator)]


@dataclass(frozen=True)
class Trained:
    success: float  # exact probability of the whole chain
    entropy: float  # of the last batches' s_final
    saturated: float  # share of them below 0.02 or above 0.98


RAW: Method = PAIR
for _path, _value in {"reward.temp": 1.0, "reward.clip": 0.0, "prepare.0.temp": 1.0, "prepare.0.clip": 0.0}.items():
    RAW = RAW.set(_path, _value)
METHODS: dict[str, Method] = {
    "grpo": GRPO.but(regularize=()).set("select.group_size", 4),
    "pair": PAIR,
    "raw": RAW,
    "no momentum": PAIR.set("reward.alpha", 0.0),
}


@lru_cache
def _trained(name: str, seed: int, blind: bool = False) -> Trained:
    """One prompt a step, as in the paper."""
    policy, task = make_lookup_chain()
    task = Mislabelled() if blind else task

    def scores(run: Run, batch: Batch) -> Tensor:
        return batch.signals.get("turn_score", torch.zeros(0)).double().flatten()

    s = torch.cat(train_on(METHODS[name].set("select.prompts", 1), policy, task, steps=UPDATES, seed=seed, watch=scores)[-20:])
    p = s.clamp(1e-9, 1 - 1e-9)
    entropy = -(p * p.log() + (1 - p) * (1 - p).log())
    return Trained(task.expected_success(policy), float(entropy.mean()), float(((s < 0.02) | (s > 0.98)).double().mean()))


def _success(name: str, blind: bool = False) -> float:
    return round(fmean(_trained(name, seed, blind).success for seed in SEEDS), 3)


@claim("after 100 updates from a success below 5%, PAIR's chains are right more often than those of GRPO on the outcome", reproduced=False)
def dense_reward() -> Evidence:
    policy, task = make_lookup_chain()
    start, mine, outcome = round(task.expected_success(policy), 3), _success("pair"), _success("grpo")
    return Evidence(
        {"start": start, "pair": mine, "outcome": outcome}, "start below 0.05, pair above outcome", start < 0.05 and mine > outcome
    )


def _without_momentum(blind: bool) -> Evidence:
    policy, task = make_lookup_chain()
    start, mine, outcome = round(task.expected_success(policy), 3), _success("no momentum", blind), _success("grpo")
    holds = start < 0.05 and mine > outcome + 0.05
    return Evidence({"start": start, "internal": mine, "outcome": outcome}, "start below 0.05, internal 0.05 above outcome", holds)


@claim(
    "without momentum the internal reward of turns beats the outcome reward after 100 updates, from a success below 5%", reproduced=False
)
def dense_reward_without_momentum() -> Evidence:
    """0.66 against 0.26, but only at one prompt a step, a setting taken after the outcome reward had stayed ahead at eight."""
    return _without_momentum(False)


@ablation(dense_reward_without_momentum, "probes fitted to the labels of other rows")
def not_with_blind_probes() -> Evidence:
    return _without_momentum(True)


def _softening(name: str) -> Evidence:
    mine, raw = ([_trained(n, seed) for seed in SEEDS] for n in (name, "raw"))
    entropy, raw_entropy = (round(fmean(r.entropy for r in part), 3) for part in (mine, raw))
    saturated = round(fmean(r.saturated for r in raw), 3)
    return Evidence(
        {"softened": entropy, "raw": raw_entropy, "raw saturated": saturated},
        "softened entropy 0.05 above raw",
        entropy > raw_entropy + 0.05,
    )


@claim("softening keeps the rewards of turns less certain at the end of training")
def softening() -> Evidence:
    return _softening("pair")


@ablation(softening, "temperature 1, no clip")
def certain_without_softening() -> Evidence:
    return _softening("raw")
