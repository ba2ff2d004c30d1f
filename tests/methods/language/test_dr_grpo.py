"""Dr. GRPO: its advantages and loss against GRPO's, and the constant it divides by."""

from __future__ import annotations

from pathlib import Path

import torch

from anypo.batch import Batch
from anypo.methods.language.dr_grpo import METHOD
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.methods.language.grpo import advantages, loss
from anypo.methods.language.rloo import rloo
from anypo.policy import Signals
from tests.helpers import assert_resumes, assert_trains, gradient, random_rows


def test_it_is_grpo_without_two_divisions() -> None:
    changed = {path for path, _, _ in METHOD.diff()}
    assert {"credit.std", "objective.aggregation"} <= changed
    assert changed <= {"credit.std", "objective.aggregation", "regularize.0"}


def test_advantages_are_rloo_times_the_share_of_the_others() -> None:
    reward = torch.randn(12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    group = torch.arange(12) % 3
    torch.testing.assert_close(advantages(reward, group, std=False), rloo(reward, group) * 3 / 4)


def test_every_token_weighs_the_same_whatever_its_row() -> None:
    rows = random_rows(0)
    logp = rows.old_logp.clone().requires_grad_()
    ones = torch.ones(len(rows.reward), dtype=torch.float64)
    (found,) = gradient(loss(logp, rows.old_logp, rows.ref_logp, rows.mask, ones, beta=0.0, max_len=9, agg="constant"), logp)
    torch.testing.assert_close(found, -rows.mask.double() / (len(ones) * 9))


def test_the_constant_is_the_tasks_limit_where_the_batch_has_one() -> None:
    rows = random_rows(1)
    batch = Batch(action=torch.zeros(rows.mask.shape, dtype=torch.int64), mask=rows.mask, logp=rows.old_logp, group=rows.group,
                  advantage=rows.advantages[:, None] * rows.mask)  # fmt: skip
    new = Signals(logp=rows.logp)
    short = METHOD.objective(batch, new, None).value  # type: ignore[arg-type]
    batch.signals["limit"] = torch.full((len(batch),), 50)
    long = METHOD.objective(batch, new, None).value  # type: ignore[arg-type]
    torch.testing.assert_close(short * batch.horizon, long * 50)


def test_the_loop_trains_without_a_reference() -> None:
    run = assert_trains(METHOD, eos=0, horizon=3)
    assert not run.policies and GRPO.needs() > METHOD.needs()


def test_a_stopped_run_continues_identically(tmp_path: Path) -> None:
    assert_resumes(METHOD, tmp_path)
