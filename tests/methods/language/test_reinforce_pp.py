"""REINFORCE++: when it is batch standardization or GRPO, the KL still to come, and both variants in the loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from anypo.methods.language import grpo
from anypo.methods.language.reinforce_pp import BASELINE, METHOD, rpp, rpp_baseline
from anypo.methods.language.rloo import rloo
from tests.helpers import assert_resumes, assert_trains, random_rows, trained


def test_without_kl_and_for_equal_lengths_it_standardizes_the_rewards() -> None:
    rows = random_rows(0, ragged=False)
    found = rpp(rows.reward, rows.old_logp, rows.ref_logp, rows.mask, beta=0.0, eps=0.0)
    wanted = (rows.reward - rows.reward.mean()) / rows.reward.std(correction=0)
    torch.testing.assert_close(found, wanted[:, None].expand(found.shape))


def test_one_group_is_grpo() -> None:
    rows = random_rows(1, ragged=False)
    one = torch.zeros(len(rows.reward), dtype=torch.int64)
    wanted = grpo.advantages(rows.reward, one, eps=0.0)[:, None].expand(rows.mask.shape)
    torch.testing.assert_close(rpp(rows.reward, rows.old_logp, rows.ref_logp, rows.mask, 0.0, 0.0), wanted)
    torch.testing.assert_close(rpp_baseline(rows.reward, one, rows.mask, 0.0), wanted)


def test_the_penalty_is_the_kl_still_to_come() -> None:
    rows = random_rows(2)
    found = rpp(rows.reward, rows.old_logp, rows.ref_logp, rows.mask, beta=0.5, eps=0.0)
    to_go = torch.zeros_like(found)
    for n in range(found.shape[0]):
        for t in range(found.shape[1]):
            to_go[n, t] = rows.reward[n] - 0.5 * sum(
                float(rows.old_logp[n, s] - rows.ref_logp[n, s]) for s in range(t, found.shape[1]) if rows.mask[n, s]
            )
    inside = to_go[rows.mask]
    torch.testing.assert_close(found[rows.mask], (inside - inside.mean()) / inside.std(correction=0))
    assert found[~rows.mask].eq(0).all()


def test_wild_padding_and_empty_rows_change_nothing() -> None:
    rows = random_rows(3)
    mask = rows.mask.clone()
    mask[2] = False
    wild = [torch.where(mask, x, float("nan")) for x in (rows.old_logp, rows.ref_logp)]
    found = rpp(rows.reward, *wild, mask, beta=0.1)
    torch.testing.assert_close(found, rpp(rows.reward, rows.old_logp, rows.ref_logp, mask, beta=0.1))
    assert found[2].eq(0).all()
    assert rpp(rows.reward, *wild, torch.zeros_like(mask), beta=0.1).eq(0).all()


@pytest.mark.parametrize("value", [0.0, 0.1, 1.0])
def test_equal_rewards_have_no_advantage(value: float) -> None:
    rows = random_rows(4)
    reward = torch.full_like(rows.reward, value)
    assert rpp(reward, rows.old_logp, rows.old_logp, rows.mask, beta=0.1).abs().max() < 1e-6
    assert rpp_baseline(reward, rows.group, rows.mask).abs().max() < 1e-6


def test_an_all_right_group_is_rewarded_unlike_in_rloo() -> None:
    reward, group = torch.tensor([1.0, 1, 1, 0, 0, 1]).double(), torch.tensor([0, 0, 0, 1, 1, 1])
    mask = torch.ones(6, 2, dtype=torch.bool)
    logp = torch.zeros(6, 2, dtype=torch.float64)
    assert (rpp(reward, logp, logp, mask, 0.1)[:3] > 0).all()
    assert rloo(reward, group)[:3].eq(0).all() and rpp_baseline(reward, group, mask)[:3].abs().max() < 1e-12


def test_both_variants_train_in_the_loop() -> None:
    assert METHOD.select.group_size == 1  # type: ignore[attr-defined]
    assert_trains(METHOD, steps=6, prompts=16)
    assert "kl" in assert_trains(BASELINE).history[-1]


def test_only_the_baseline_variant_compares_groups() -> None:
    with pytest.raises(ValueError, match="group_size to 2 or more"):
        trained(BASELINE.set("select.group_size", 1), 1)


@pytest.mark.parametrize("method", [METHOD, BASELINE], ids=lambda m: m.name)
def test_a_stopped_run_continues_identically(method, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    assert_resumes(method, tmp_path)
