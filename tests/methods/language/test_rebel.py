"""REBEL: reductions, pairs, lone members, preferences and training."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anypo.batch import Batch
from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.loops.on_policy import train
from anypo.methods.language.rebel import (
    METHOD,
    PairwisePreference,
    RelativeRewardRegression,
    group_pairs,
    mirror_step,
    pair_loss,
    preference_loss,
    preference_margin,
    residual,
)
from anypo.methods.language.rloo import rloo, rloo_loss
from anypo.methods.language.spo_single import METHOD as SPO_SINGLE
from anypo.policy import Signals
from anypo.reproductions.common import train_on
from anypo.run import Run


def random_rows(seed: int = 0, rows: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(rows, 4, generator=generator, dtype=torch.float64)
    logp = (old + 0.4 * torch.randn(rows, 4, generator=generator, dtype=torch.float64)).requires_grad_()
    mask = torch.arange(4)[None] < torch.tensor([4, 2, 0, 1, 3, 4])[:rows, None]
    return logp, old, mask, torch.rand(rows, generator=generator, dtype=torch.float64)


def gradient(value: torch.Tensor, logp: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(value, logp)[0]


def test_on_policy_pairs_are_leave_one_out() -> None:
    logp, _, mask, reward = random_rows()
    group, eta = torch.tensor([0, 0, 1, 1, 2, 2]), 1.7
    value = pair_loss(logp, logp.detach(), mask, reward, group, eta).loss
    torch.testing.assert_close(value.detach(), ((reward[::2] - reward[1::2]) ** 2).mean())
    advantages = rloo(reward, group)
    # rloo_loss averages over the 5 rows that have tokens; per pair the paper's estimate takes half the sum over its two rows
    per_pair = gradient(rloo_loss(logp, mask, advantages), logp) * mask.any(1).sum() / 2 / 3
    torch.testing.assert_close(gradient(pair_loss(logp, logp.detach(), mask, reward, group, eta).loss, logp), 4 / eta * per_pair)


def test_equal_rewards_pull_back_to_the_old_policy() -> None:
    logp, old, mask, _ = random_rows()
    group = torch.tensor([0, 0, 1, 1, 2, 2])
    found = gradient(pair_loss(logp, old, mask, torch.ones(6, dtype=torch.float64), group).loss, logp)
    total = torch.where(mask, logp.detach() - old, 0.0).sum(1)
    gap = (total - total[[1, 0, 3, 2, 5, 4]])[:, None] * mask
    torch.testing.assert_close(found, 2 * gap / 3)


def test_infinite_eta_has_no_pull() -> None:
    logp, old, mask, reward = random_rows()
    found = gradient(pair_loss(logp, old, mask, reward, torch.tensor([0, 0, 1, 1, 2, 2]), 1e12).loss, logp)
    assert found.abs().max() < 1e-11


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.lists(st.integers(0, 3), min_size=6, max_size=6))
def test_variance_form_is_the_mean_over_pairs(seed: int, groups: list[int]) -> None:
    logp, old, mask, reward = random_rows(seed)
    group = torch.tensor(groups)
    first, second = group_pairs(group)
    total = torch.where(mask, logp.detach() - old, 0.0).sum(1)
    errors = residual(total[first], total[second], reward[first] - reward[second], 1.3) ** 2
    means = [errors[group[first] == g].mean() for g in set(group[first].tolist())]
    expected = torch.stack(means).mean() if means else torch.zeros((), dtype=torch.float64)
    torch.testing.assert_close(pair_loss(logp.detach(), old, mask, reward, group, 1.3).loss, expected)
    same = preference_loss(logp.detach(), old, mask, reward, group, reward[first] - reward[second], 1.3).loss
    torch.testing.assert_close(same, expected)


def test_pairs_come_by_first_appearance() -> None:
    first, second = group_pairs(torch.tensor([9, 2, 9, 2, 9, 5]))
    assert list(zip(first.tolist(), second.tolist(), strict=True)) == [(0, 2), (0, 4), (2, 4), (1, 3)]


def test_lone_members_count_in_no_mean() -> None:
    logp, old, mask, reward = random_rows()
    with_lone = pair_loss(logp, old, mask, reward, torch.tensor([0, 0, 1, 1, 2, 3])).loss
    torch.testing.assert_close(with_lone, pair_loss(logp[:4], old[:4], mask[:4], reward[:4], torch.tensor([0, 0, 1, 1])).loss)
    assert pair_loss(logp, old, mask, reward, torch.arange(6)).loss == 0
    none = torch.zeros(0, dtype=torch.float64)
    assert preference_loss(logp, old, mask, reward, torch.arange(6), none).loss == 0


def test_intransitive_preference_and_its_margin_have_one_gradient() -> None:
    logp, old, mask, _ = random_rows()
    group = torch.tensor([0, 0, 0, 1, 1, 1])
    target = torch.tensor([1.0, -1.0, 1.0, 0.3, 0.2, -0.9], dtype=torch.float64)  # pairs (0,1), (0,2), (1,2): a cycle
    exact = gradient(preference_loss(logp, old, mask, torch.zeros(6), group, target).loss, logp)
    by_margin = gradient(pair_loss(logp, old, mask, preference_margin(target, group), group).loss, logp)
    torch.testing.assert_close(exact, by_margin)
    assert preference_margin(target, group)[:3].abs().max() < 1e-12


def test_mirror_step_by_hand() -> None:
    found = mirror_step(torch.tensor([[0.25, 0.75]], dtype=torch.float64), torch.tensor([[1.0, 0.0]], dtype=torch.float64), 2.0)
    up = 0.25 * math.exp(2)
    torch.testing.assert_close(found, torch.tensor([[up, 0.75]], dtype=torch.float64) / (up + 0.75))


def test_padding_may_hold_anything_and_rewards_carry_no_gradient() -> None:
    logp, old, mask, reward = random_rows()
    group = torch.tensor([0, 0, 1, 1, 2, 2])
    filled = logp.detach().masked_fill(~mask, -math.inf).requires_grad_()
    value = pair_loss(filled, old.masked_fill(~mask, math.nan), mask, reward.requires_grad_(), group).loss
    found, none = torch.autograd.grad(value, [filled, reward], allow_unused=True)
    assert none is None and (found[~mask] == 0).all()
    torch.testing.assert_close(found, gradient(pair_loss(logp, old, mask, reward, group).loss, logp))


def test_component_takes_the_advantages_of_any_credit() -> None:
    logp, old, mask, reward = random_rows()
    mask = mask | (torch.arange(4) == 0)  # a row without actions has no advantage to carry its reward
    group = torch.tensor([0, 0, 0, 1, 1, 1])
    batch = Batch(torch.zeros(6, 4, dtype=torch.int64), mask, old, group, advantage=reward[:, None] * mask)
    ours = RelativeRewardRegression(eta=1.3)(batch, Signals(logp=logp), None).value  # type: ignore[arg-type]
    torch.testing.assert_close(ours, pair_loss(logp, old, mask, reward, group, 1.3).loss)


def test_pairs_need_groups() -> None:
    """Also when the credit itself compares nobody."""
    task = TokenBandit(prompts=2, vocabulary=3)
    method = METHOD.but(credit=SPO_SINGLE.credit).set("select.group_size", 1)
    with pytest.raises(ValueError, match="every group has one member"):
        train(Run(method, task.policy(), task, steps=1))


@pytest.mark.parametrize("group_size", [2, 5])
def test_trains(group_size: int) -> None:
    task = TokenBandit()
    curve = train_on(METHOD.set("select.group_size", group_size), task.policy(), task, steps=5)
    assert all(math.isfinite(x) for x in curve) and curve[-1] > 1 / 16


def test_trains_on_preferences() -> None:
    task = TokenBandit()

    def larger_first_token(batch: Batch, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return (batch.action[first, 0] - batch.action[second, 0]).sign().double()

    policy = task.policy()
    train_on(METHOD.but(credit=PairwisePreference(larger_first_token)).set("select.group_size", 8), policy, task, steps=5)
    assert (policy.logits[:, 0, 3] > policy.logits[:, 0, 0]).all()
