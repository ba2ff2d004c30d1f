"""AVSPO: when it is GRPO, the signs in collapsed groups, the moving threshold, and its state in the loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anypo.methods.language import grpo
from anypo.methods.language.avspo import METHOD, acr, advantages, threshold, virtual
from anypo.methods.language.grpo import METHOD as GRPO
from tests.helpers import assert_resumes, assert_trains, trained


def rows(seed: int, chance: float = 0.5, groups: int = 6, size: int = 4) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    count = groups * size
    return torch.bernoulli(torch.full((count,), chance, dtype=torch.float64), generator=g), torch.randperm(count, generator=g) % groups


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), chance=st.floats(0, 1))
def test_a_threshold_of_one_that_stays_there_is_grpo(seed: int, chance: float) -> None:
    reward, group = rows(seed, chance)
    found = advantages(reward, group, tau=1.0, prev_J=0.2, eta=0.0)
    assert torch.equal(found.advantages, grpo.advantages(reward, group, eps=1e-8)) and not found.triggered


def test_without_collapse_it_is_grpo() -> None:
    reward, group = torch.tensor([0.0, 1, 1, 0, 1, 0], dtype=torch.float64), torch.tensor([0, 0, 0, 1, 1, 1])
    found = advantages(reward, group, tau=0.0, prev_J=None)
    assert torch.equal(found.advantages, grpo.advantages(reward, group, eps=1e-8))


def test_one_virtual_sample_of_an_all_right_group() -> None:
    size = 4
    reward = torch.ones(size + 3 * size, dtype=torch.float64)  # one collapsed group of four: rate 1/4, alpha large gives one virtual sample
    reward[size:] = torch.tensor([0.0, 1, 1, 1] * 3, dtype=torch.float64)
    group = torch.arange(4).repeat_interleave(size)
    found = advantages(reward, group, tau=0.1, prev_J=None, alpha=2.0)
    statistics = torch.tensor([1.0] * size + [0.5], dtype=torch.float64)
    expected = (1 - statistics.mean()) / statistics.std(correction=0)
    torch.testing.assert_close(found.advantages[:size], expected.expand(size))
    assert found.triggered and torch.equal(found.advantages[size:], grpo.advantages(reward, group, eps=1e-8)[size:])


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10_000), chance=st.floats(0, 1), alpha=st.floats(0.1, 3))
def test_signs_in_collapsed_groups(seed: int, chance: float, alpha: float) -> None:
    reward, group = rows(seed, chance)
    rate = acr(reward, group)
    found = advantages(reward, group, tau=-1.0, prev_J=None, alpha=alpha)
    assert torch.isfinite(found.advantages).all() and len(found.advantages) == len(reward)
    for g in range(6):
        own = reward[group == g]
        if own.min() == own.max():
            wanted = found.advantages[group == g]
            assert (wanted > 0).all() if own[0] > 0 else (wanted < 0).all()
            assert 1 <= len(virtual(own, rate, alpha)) <= len(own)


def test_constant_rewards_below_the_maximum_count_as_right() -> None:
    values = virtual(torch.full((4,), 0.5, dtype=torch.float64), acr=1.0)
    assert values.tolist() == pytest.approx([0.4, 0.3, 0.2, 0.1])


def test_the_rate_counts_groups_not_rows() -> None:
    reward, group = torch.tensor([1.0, 1, 1, 1, 0, 1]), torch.tensor([0, 0, 0, 0, 1, 1])
    assert acr(reward, group) == 0.5
    assert acr(torch.tensor([0.7]), torch.tensor([3])) == 1.0


def test_groups_of_several_sizes_in_any_order() -> None:
    reward = torch.tensor([1.0, 0, 1, 0, 1, 0], dtype=torch.float64)
    group = torch.tensor([0, 1, 0, 1, 0, 1])
    mixed = advantages(torch.cat([reward, reward[:2]]), torch.cat([group, torch.tensor([2, 3])]), tau=0.0, prev_J=None).advantages
    alone = advantages(reward, group, tau=0.0, prev_J=None).advantages
    torch.testing.assert_close(mixed[:6], alone)  # the rate is 1 in both


def test_the_threshold_follows_progress() -> None:
    assert threshold(0.5, 0.9, 0.3, None) == 0.5
    assert threshold(0.5, 0.9, 0.3, 0.3) == 0.5
    assert threshold(0.5, 0.9, 0.4, 0.3, eta=0.1) == pytest.approx(0.54)
    assert threshold(0.5, 0.9, 0.2, 0.3, eta=0.1) == pytest.approx(0.46)


def test_off_it_trains_as_grpo() -> None:
    off = METHOD.set("credit.tau", 1.0).set("credit.eta", 0.0).set("credit.eps", 1e-6)
    assert torch.equal(trained(off, 4).policy.logits, trained(GRPO, 4).policy.logits)


def test_the_loop_trains_and_logs_the_rate() -> None:
    run = assert_trains(METHOD)
    assert {"acr", "acr_threshold", "virtual_samples"} <= run.history[-1].keys()


def test_wrong_answers_that_cost_something_are_shifted_to_zero() -> None:
    def signed(prompt: Tensor, action: Tensor, mask: Tensor) -> Tensor:
        return 2 * (action == 1).all(1).double() - 1

    def plain(prompt: Tensor, action: Tensor, mask: Tensor) -> Tensor:
        return 2 * (action == 1).all(1).double()

    shifted = trained(METHOD.set("credit.wrong", -1.0), 3, reward=signed)
    torch.testing.assert_close(shifted.policy.logits, trained(METHOD, 3, reward=plain).policy.logits)


def test_a_stopped_run_continues_identically(tmp_path: Path) -> None:
    assert_resumes(METHOD, tmp_path)
    assert trained(METHOD, 2).state_dict()["components"]["0.credit"].keys() == {"tau", "mean_reward"}
