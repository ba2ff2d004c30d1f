"""GCPO: when it is GRPO, the measures against their definitions, degenerate groups and embeddings, and the component in the loop."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anypo.method import Method
from anypo.methods.language.gcpo import (
    METHOD,
    VARIANTS,
    CalibratedDisagreement,
    advantages,
    bag_of_tokens,
    clusters,
    measures,
    unit,
    weights,
)
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.methods.language.grpo import advantages as grpo
from anypo.methods.language.rloo import METHOD as RLOO
from tests.helpers import assert_resumes, assert_trains, trained

Responses = tuple[Tensor, Tensor, Tensor, Tensor]


def responses(seed: int, rows: int = 20, groups: int = 4, binary: bool = True) -> Responses:
    """Random embeddings [N,3], clusters, groups in no order, rewards."""
    g = torch.Generator().manual_seed(seed)
    embeddings = torch.randn(rows, 3, generator=g, dtype=torch.float64)
    reward = torch.rand(rows, generator=g, dtype=torch.float64)
    return (
        embeddings,
        torch.randint(0, 3, (rows,), generator=g),
        torch.randperm(rows, generator=g) % groups,
        reward.round() if binary else reward,
    )


def by_definition(z: Tensor, cluster: Tensor) -> tuple[float, float, float]:
    """SE, CD and BoT of one group, written as the sums they are."""
    size = len(z)
    pairs = [(1 - float(z[i] @ z[j])) / 2 for i in range(size) for j in range(size) if i != j]
    shares = {k: float((cluster == k).double().mean()) for k in cluster.tolist()}
    barycentre = sum(p * z[cluster == k].mean(0) for k, p in shares.items())
    transport = sum(p * float((z[cluster == k].mean(0) - barycentre).square().sum()) for k, p in shares.items())
    return -sum(p * math.log(p) for p in shares.values()) / math.log(size), sum(pairs) / len(pairs), min(1.0, transport)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000))
def test_the_measures_are_their_definitions(seed: int) -> None:
    embeddings, cluster, group, reward = responses(seed)
    found = measures(embeddings, cluster, group, reward)
    for g in group.unique():
        rows = group == g
        expected = by_definition(unit(embeddings)[rows], cluster[rows])
        assert [float(m[rows][0]) for m in found[:3]] == pytest.approx(expected)
        assert all(len(m[rows].unique()) == 1 for m in found)
    assert all(bool(((m >= 0) & (m <= 1 + 1e-12)).all()) for m in found)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), measure=st.sampled_from(["cd", "bot", "mean", "se"]))
def test_strength_zero_is_grpo(seed: int, measure: str) -> None:
    embeddings, cluster, group, reward = responses(seed)
    torch.testing.assert_close(advantages(embeddings, cluster, group, reward, a=0.0, measure=measure), grpo(reward, group))


def test_full_reward_dispersion_and_identical_responses_are_grpo() -> None:
    embeddings, cluster, _, _ = responses(1, rows=16)
    group, reward = torch.arange(16) // 4, torch.tensor([0.0, 1, 1, 0] * 4, dtype=torch.float64)
    torch.testing.assert_close(advantages(embeddings, cluster, group, reward), grpo(reward, group))
    same, one = embeddings[:1].expand(16, 3), torch.zeros(16, dtype=torch.int64)
    lopsided = torch.tensor([0.0, 1, 1, 1] * 4, dtype=torch.float64)
    torch.testing.assert_close(advantages(same, one, group, lopsided), grpo(lopsided, group))


def test_renormalized_equal_weights_are_grpo_and_unequal_ones_keep_their_mean() -> None:
    embeddings, cluster, _, _ = responses(2, rows=4)
    group, reward = torch.arange(12) // 4, torch.tensor([0.0, 0, 0, 1] * 3, dtype=torch.float64)
    alike = (embeddings.repeat(3, 1), cluster.repeat(3), group, reward)
    assert weights(*alike, renorm=False).max() < 1
    torch.testing.assert_close(advantages(*alike), grpo(reward, group))
    embeddings, cluster, group, reward = responses(3, rows=30, groups=6)
    group[group == 5] = 4  # groups of different sizes, each of which counts once
    found, active = weights(embeddings, cluster, group, reward), measures(embeddings, cluster, group, reward).rd > 0
    assert active.any() and len(found.unique()) > 2
    once = [float(found[(group == g) & active][0]) for g in group[active].unique()]
    assert sum(once) / len(once) == pytest.approx(1)


def test_no_group_with_contrast_weighs_one() -> None:
    embeddings, cluster, group, _ = responses(4)
    assert weights(embeddings, cluster, group, torch.ones(20)).eq(1).all()


def test_weights_stay_above_their_floor_and_rewards_outside_the_range_count_as_full_dispersion() -> None:
    embeddings, cluster, group, reward = responses(5, binary=False)
    found = weights(embeddings, cluster, group, reward, a=50.0, w_min=0.2, renorm=False)
    assert float(found.min()) == pytest.approx(0.2)
    assert measures(embeddings, cluster, group, 100 * reward).rd.eq(1).all()
    assert weights(embeddings, cluster, group, 100 * reward, renorm=False).eq(1).all()


def test_lone_responses_zero_vectors_and_float_input_stay_finite() -> None:
    embeddings = torch.zeros(5, 3)
    embeddings[2] = torch.tensor([1.0, 2, 2])
    group, reward = torch.tensor([0, 0, 1, 2, 2]), torch.tensor([0.0, 1, 1, 0, 0])
    found = measures(embeddings, torch.zeros(5, dtype=torch.int64), group, reward)
    assert all(torch.isfinite(m).all() for m in found)
    assert [float(m[2]) for m in found] == [0, 0, 0, 0]
    assert found.cd[0] == 0.5  # zero vectors have similarity 0
    result = advantages(embeddings, torch.zeros(5, dtype=torch.int64), group, reward)
    assert result.dtype == reward.dtype and torch.isfinite(result).all() and result[2:].eq(0).all()


def test_weights_are_constants() -> None:
    embeddings, cluster, group, reward = responses(6)
    assert not weights(embeddings.requires_grad_(True), cluster, group, reward.requires_grad_(True)).requires_grad


def test_wrong_settings_are_refused() -> None:
    rows = responses(0)
    with pytest.raises(ValueError, match="unknown measure"):
        weights(*rows, measure="entropy")
    with pytest.raises(ValueError, match="r_hi"):
        weights(*rows, r_lo=1.0, r_hi=1.0)
    with pytest.raises(ValueError, match="unknown embedding"):
        trained(METHOD.set("credit.embedding", "sentence"), 1)


def test_clusters_chain_inside_groups_alone() -> None:
    angle = torch.tensor([0.0, 0.3, 0.6, 2.0, 0.0, 2.1])
    embeddings = torch.stack([angle.cos(), angle.sin()], 1)
    assert clusters(embeddings, torch.tensor([0, 0, 0, 0, 1, 1])).tolist() == [0, 0, 0, 3, 4, 5]
    assert clusters(torch.zeros(2, 2), torch.zeros(2, dtype=torch.int64)).tolist() == [0, 1]


def test_bags_count_the_mask_alone() -> None:
    action, mask = torch.tensor([[7, 7, 3], [3, 7, 7]]), torch.tensor([[1, 1, 0], [1, 0, 0]], dtype=torch.bool)
    assert bag_of_tokens(action, mask).tolist() == [[0, 2], [1, 0]]


def test_off_it_trains_as_its_inner_credit() -> None:
    token_mean = GRPO.but(objective=METHOD.objective, regularize=METHOD.regularize)
    torch.testing.assert_close(trained(METHOD.set("credit.a", 0.0), 4).policy.logits, trained(token_mean, 4).policy.logits)
    off = METHOD.but(credit=CalibratedDisagreement(inner=RLOO.credit, a=0.0))
    torch.testing.assert_close(trained(off, 4).policy.logits, trained(METHOD.but(credit=RLOO.credit), 4).policy.logits)
    assert not torch.equal(trained(METHOD, 4).policy.logits, trained(token_mean, 4).policy.logits)


@pytest.mark.parametrize(
    "method", [METHOD, *VARIANTS.values(), METHOD.set("credit.embedding", "hidden"), METHOD.but(credit=CalibratedDisagreement(inner=RLOO.credit))],
    ids=["gcpo", "entropy", "hidden", "around rloo"],
)  # fmt: skip
def test_the_loop_trains(method: Method) -> None:
    run = assert_trains(method, eos=0, horizon=4, partial=True)
    assert all(0 <= record["disagreement"] <= 1 for record in run.history)


def test_hidden_states_are_asked_for_only_where_used() -> None:
    assert "old_hidden" not in METHOD.needs() and "old_hidden" in METHOD.set("credit.embedding", "hidden").needs()


def test_it_trains_with_several_rewards() -> None:
    def two(prompt: Tensor, action: Tensor, mask: Tensor) -> Tensor:
        return torch.stack([(action[:, 0] == 1).double(), (action[:, 1] == 2).double()], dim=1)

    assert_trains(METHOD.set("credit.r_hi", 2.0), reward=two, objectives=("correct", "format"))


def test_a_stopped_run_continues_identically(tmp_path: Path) -> None:
    assert_resumes(METHOD, tmp_path, partial=True)
