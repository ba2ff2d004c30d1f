"""Claims of REINFORCE++ on token_bandit (P=16, V=4, T=2)."""

from __future__ import annotations

import torch

from anypo.claims import Evidence, ablation, claim
from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.method import Credit
from anypo.methods.language.reinforce_pp import METHOD as REINFORCE_PP
from anypo.methods.language.reinforce_pp import BatchNormalizedReturn
from anypo.methods.language.rloo import LeaveOneOut
from anypo.reproductions.common import success_on_bandit
from anypo.run import Run
from anypo.task import Prompt


def _learns(shuffled: bool) -> Evidence:
    worst, slowest = success_on_bandit(REINFORCE_PP, shuffled=shuffled)
    return Evidence({"success": round(worst, 3), "steps": slowest}, "success above 0.9 within 300 steps, worst of 3 seeds", worst > 0.9)


@claim("REINFORCE++ with one sample a prompt raises the expected success of token_bandit from below 0.1 to above 0.9 within 300 steps")
def learns() -> Evidence:
    return _learns(shuffled=False)


@ablation(learns, "advantages dealt to the wrong rows")
def learns_without_credit() -> Evidence:
    return _learns(shuffled=True)


def _all_right_group(credit: Credit) -> Evidence:
    """Least advantage in a group of 8 right responses, beside a group of 8 with 2 right ones."""
    task = TokenBandit(prompts=2)
    run = Run(REINFORCE_PP, task.policy(scale=0.5), task, steps=1)
    batch = run.collect([Prompt(id=p, content=p, samples=8) for p in range(2)])
    run.prepare_signals(batch, {"ref_logp"})
    batch.reward = torch.tensor([1.0] * 8 + [1.0] * 2 + [0.0] * 6, dtype=torch.float64)
    advantage = credit(batch, run)
    found = {"all right": round(float(advantage[:8].min()), 4), "rloo": round(float(LeaveOneOut(beta=0.0)(batch, run)[:8].abs().max()), 4)}
    return Evidence(found, "positive, where RLOO gives 0", found["all right"] > 0.1 and found["rloo"] == 0.0)


@claim("every response of a group that is all right gets a positive advantage from REINFORCE++, and none from RLOO")
def all_right_group_is_rewarded() -> Evidence:
    return _all_right_group(BatchNormalizedReturn())


@ablation(all_right_group_is_rewarded, "the group's mean is subtracted first (the baseline variant)")
def all_right_group_with_baseline() -> Evidence:
    return _all_right_group(BatchNormalizedReturn(baseline=True))
