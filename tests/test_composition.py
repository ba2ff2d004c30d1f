"""Any credit with any objective: ten steps on token_bandit end with finite numbers, with one reward and with several.

Methods are found through the catalogue, so a new row joins by itself. All pairs of the baselines are run; a later row's credit is run with one
objective on token ratios and one on sequence ratios, its objective with one credit a row and one a token (`-m slow` runs every pair of all
rows). The method that brings the credit also brings its own rollout, reward and regularizers. A refusal counts only where the policy truly
lacks the signal that is asked for, and, for later rows, where the method says by its name what kind of task it needs.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from anypo import catalogue
from anypo.batch import Batch
from anypo.domains.language.toys.token_bandit import TabularTokens, TokenBandit
from anypo.loops.on_policy import train
from anypo.method import Method
from anypo.policy import MissingSignal
from anypo.run import Run

BASELINES = ("grpo", "dr_grpo", "dapo", "gspo", "gdpo", "cispo", "rloo", "reinforce_pp", "ppo")
STEPS = 10


@cache
def language_methods() -> dict[str, Method]:
    """Every one-stage method that runs in the on-policy loop on a language task."""
    found = {}
    for slug, module in catalogue.modules().items():
        if ".language." not in module and slug not in BASELINES:
            continue
        method = catalogue.get(slug, "language")
        if isinstance(method, Method) and method.loop == "on_policy" and not method.stages:
            found[slug] = method
    return found


def pairs(every: bool) -> list[tuple[str, str]]:
    """(credit, objective): the product of the baselines, and of later rows a few each (or all)."""
    slugs = list(language_methods())
    later = [s for s in slugs if s not in BASELINES]
    if every:
        return [(c, o) for c in slugs for o in slugs if c in later or o in later]
    few = [(c, o) for c in later for o in ("grpo", "gspo")] + [(c, o) for c in ("dapo", "ppo") for o in later]
    return [(c, o) for c in BASELINES for o in BASELINES] + few


def two_rewards(prompt: Tensor, action: Tensor, mask: Tensor) -> Tensor:
    """`correct` and `format`, on different scales."""
    return torch.stack([(action[:, 0] == prompt % 3).double(), 10.0 * (action[:, 1] == 1).double()], dim=1)


class Telling(TokenBandit):
    """token_bandit whose batches also carry what single rows read from a completion: whether it abstained, the worth of its steps, the
    blocks of the two rewards."""

    def continue_from(self, *start: Any, **options: Any) -> Batch:
        batch = super().continue_from(*start, **options)
        batch.signals["abstained"] = batch.action[:, 0] == 2
        batch.signals["process"] = (batch.action[:, 1] == 0).double()
        batch.signals["block"] = torch.arange(batch.horizon).clamp(max=1).expand(batch.mask.shape)
        return batch


def compose(credit: str, objective: str, several: bool) -> None:
    methods = language_methods()
    method = methods[credit].but(objective=methods[objective].objective)
    options = {"reward": two_rewards, "objectives": ("correct", "format")} if several else {}
    task = Telling(prompts=2, vocabulary=3, **options)  # type: ignore[arg-type]
    policy = task.policy(scale=0.3)
    start = policy.logits.detach().clone()
    try:
        run = Run(method, policy, task, steps=STEPS)
    except MissingSignal as refusal:
        wanted = {n.removeprefix("old_").removeprefix("ref_") for n in method.needs()}
        assert wanted - TabularTokens.provides, f"refused without need: {refusal}"
        pytest.skip(str(refusal))
    try:
        train(run)
    except ValueError as refusal:
        asker = next((m for m in (credit, objective) if m not in BASELINES and str(refusal).startswith(m)), None)
        single = getattr(methods[credit].select, "group_size", 1) == 1 and "compares several attempts" in str(refusal)
        if asker is None and not single:
            raise
        pytest.skip(str(refusal))
    assert torch.isfinite(policy.logits).all() and torch.isfinite(policy.values).all()
    assert not torch.equal(policy.logits, start), "nothing was learned from any of the ten batches"
    for record in run.history:
        bad = [name for name, value in record.items() if isinstance(value, float) and not math.isfinite(value)]
        assert not bad, f"step {record['step']}: {', '.join(bad)} not finite"


def test_all_baselines_are_there() -> None:
    assert set(BASELINES) <= language_methods().keys()


@pytest.mark.parametrize(("credit", "objective"), pairs(every=False))
def test_credit_with_objective(credit: str, objective: str) -> None:
    compose(credit, objective, several=False)


@pytest.mark.parametrize(("credit", "objective"), pairs(every=False))
def test_credit_with_objective_and_two_rewards(credit: str, objective: str) -> None:
    compose(credit, objective, several=True)


@pytest.mark.slow
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize(("credit", "objective"), pairs(every=True))
def test_every_pair_of_rows(credit: str, objective: str, several: bool) -> None:
    compose(credit, objective, several)
