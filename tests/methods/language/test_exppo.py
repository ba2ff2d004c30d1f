"""ExPPO: when it is GRPO, mass and signs, rows without tokens, no gradient through the surprisal, and the component in the loop."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anypo.methods.language.dapo import OverlongShaping
from anypo.methods.language.exppo import METHOD, ExplorationPreserving, advantages, factors, surprisal
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.methods.language.grpo import advantages as grpo_advantages
from anypo.seams.groups import broadcast, group_sum
from anypo.seams.objective import ClippedSurrogate
from tests.helpers import Rows, assert_resumes, assert_trains, random_rows, trained


def rows(seed: int, count: int = 24) -> Rows:
    """Random rows with rewards 0 and 1."""
    found = random_rows(seed, rows=count)
    found.reward = (found.reward > 0).double()
    return found


def plain(r: Rows) -> Tensor:
    return broadcast(grpo_advantages(r.reward, r.group, ddof=1), r.mask)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000))
def test_strength_zero_is_grpo(seed: int) -> None:
    r = rows(seed)
    torch.testing.assert_close(advantages(r.reward, r.group, r.mask, r.old_logp, lam=0.0), plain(r), rtol=0, atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), logp=st.floats(-9, -0.1))
def test_equal_surprisal_is_grpo(seed: int, logp: float) -> None:
    r = rows(seed)
    found = advantages(r.reward, r.group, r.mask, torch.full_like(r.old_logp, -0.5 * round(-2 * logp)), lam=0.9)
    torch.testing.assert_close(found, plain(r), rtol=0, atol=1e-12)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10_000), lam=st.floats(0, 0.999), shaped=st.booleans())
def test_mass_and_signs(seed: int, lam: float, shaped: bool) -> None:
    r = random_rows(seed, rows=24) if shaped else rows(seed)
    clipped = advantages(r.reward, r.group, r.mask, r.old_logp, lam)
    exact = advantages(r.reward, r.group, r.mask, r.old_logp, lam, c_min=0.0, c_max=math.inf)
    assert torch.equal(clipped.sign(), plain(r).sign()) and torch.equal(exact.sign(), plain(r).sign())
    mass = [group_sum(a[:, 0].abs(), r.group) for a in (exact, plain(r))]
    torch.testing.assert_close(*mass, rtol=0, atol=1e-9)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_groups_that_all_earn_the_same_have_no_advantage(value: float) -> None:
    r = rows(0)
    assert advantages(torch.full_like(r.reward, value), r.group, r.mask, r.old_logp).eq(0).all()


def test_a_lone_response_keeps_its_reward() -> None:
    r = rows(1, count=4)
    found = advantages(r.reward, torch.arange(4), r.mask, r.old_logp, lam=0.9)
    assert torch.equal(found, broadcast(r.reward, r.mask))


def test_surprising_right_answers_earn_more_and_surprising_wrong_ones_cost_less() -> None:
    z = torch.tensor([1.0, -1.0, 1.0, -1.0])
    found = factors(torch.tensor([1.0, 1.0, -1.0, -1.0]), z, torch.full((4,), 0.5), lam=0.5)
    assert found[0] > 1 > found[1] and found[2] < 1 < found[3]
    assert factors(torch.tensor([1.0, -1.0]), z[:2], torch.tensor([0.0, 1.0]), lam=0.9).tolist() == [1.0, 1.0]
    assert factors(torch.zeros(2), z[:2], torch.ones(2), lam=0.9).tolist() == [1.0, 1.0]


def test_rows_without_tokens_count_in_no_statistic() -> None:
    r = rows(2)
    found = surprisal(r.old_logp, r.mask, r.group)
    longer = torch.cat([r.mask, torch.zeros(2, r.mask.shape[1], dtype=torch.bool)])
    with_empty = surprisal(
        torch.cat([r.old_logp, torch.full((2, r.mask.shape[1]), -7.0)]), longer, torch.cat([r.group, torch.tensor([0, 1])])
    )
    torch.testing.assert_close(with_empty.z[:-2], found.z)
    assert with_empty.u[-2:].eq(0).all() and with_empty.z[-2:].eq(0).all()


def test_the_surprisal_does_not_grow_with_length() -> None:
    mask = torch.tensor([[1, 0, 0], [1, 1, 1]], dtype=torch.bool)
    assert surprisal(torch.full((2, 3), -1.5), mask, torch.tensor([0, 0])).u.tolist() == [1.5, 1.5]


@pytest.mark.parametrize("junk", [float("nan"), -math.inf])
def test_padding_may_hold_anything(junk: float) -> None:
    r = rows(3)
    dirty = torch.where(r.mask, r.old_logp, torch.full_like(r.old_logp, junk))
    torch.testing.assert_close(
        advantages(r.reward, r.group, r.mask, dirty), advantages(r.reward, r.group, r.mask, r.old_logp), rtol=0, atol=0
    )


def test_no_gradient_reaches_the_log_probs() -> None:
    r = rows(4)
    assert not advantages(r.reward, r.group, r.mask, r.old_logp.requires_grad_(True)).requires_grad


def test_the_pass_rate_is_the_verifiers() -> None:
    r = rows(5)
    shaped = 0.4 * r.reward  # no reward above 0.5
    told = advantages(shaped, r.group, r.mask, r.old_logp, right=r.reward > 0.5)
    assert not torch.allclose(told, advantages(shaped, r.group, r.mask, r.old_logp))
    torch.testing.assert_close(told, advantages(r.reward, r.group, r.mask, r.old_logp), rtol=1e-4, atol=1e-4)  # eps is all that differs


def test_strength_zero_trains_as_grpo_with_the_sample_deviation() -> None:
    mine = trained(METHOD.set("credit.lam", 0.0), 4).policy.logits
    torch.testing.assert_close(mine, trained(GRPO.set("credit.ddof", 1), 4).policy.logits, rtol=0, atol=1e-12)


def test_the_strength_is_bounded() -> None:
    with pytest.raises(ValueError, match="keep their signs"):
        ExplorationPreserving(lam=1.0)


def test_the_loop_trains_with_shaped_rewards_and_another_objective() -> None:
    assert_trains(METHOD)
    assert_trains(METHOD.but(reward=OverlongShaping(), objective=ClippedSurrogate(aggregation="constant")), eos=0, horizon=4)


def test_the_loop_trains_with_several_rewards() -> None:
    def two(prompt: Tensor, action: Tensor, mask: Tensor) -> Tensor:
        return torch.stack([(action[:, 0] == 1).double(), (action[:, 1] == 2).double()], dim=1)

    assert_trains(METHOD.but(credit=ExplorationPreserving(weights=(1.0, 0.0))), reward=two, objectives=("correct", "format"))


def test_a_stopped_run_continues_identically(tmp_path: Path) -> None:
    assert_resumes(METHOD, tmp_path)
