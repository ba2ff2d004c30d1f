"""SPO++: SPO's whitening for equal lengths, SPO's tracker for synchronous arrival, order of arrival, and the component in the loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anypo.batch import Batch
from anypo.methods.language import spo_single
from anypo.methods.language.spo_plus import EVIDENCE, METHOD, TokenMeasure, advantages, event_value, evidence, spo_residual
from anypo.methods.language.spo_single import TRACKER, UNKNOWN, init
from anypo.seams.groups import broadcast, masked_mean, masked_std
from anypo.seams.objective import ClippedSurrogate
from anypo.seams.select import UniformPrompts
from tests.helpers import assert_resumes, assert_trains, random_rows, trained


def ragged(seed: int, rows: int = 7, horizon: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards, values and a mask with holes (tool tokens) and perhaps empty rows."""
    g = torch.Generator().manual_seed(seed)
    reward = torch.randint(2, (rows,), generator=g).double()
    return (
        reward,
        torch.rand(rows, generator=g, dtype=torch.float64),
        torch.rand(rows, horizon, generator=g) < torch.rand(rows, 1, generator=g),
    )


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_the_token_mean_is_zero_and_the_token_square_one(seed: int) -> None:
    reward, value, mask = ragged(seed)
    found = advantages(reward, value, mask)
    by_token = broadcast(found.advantages, mask)
    assert abs(float(found.token_sum)) < 1e-6 and abs(float(by_token.sum())) < 1e-6
    if float(found.std) > 0:
        torch.testing.assert_close(float(masked_std(by_token, mask)), 1.0, atol=1e-6, rtol=0)
    assert not found.advantages[~mask.any(1)].any()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_spo_leaves_the_covariance_of_length_and_advantage(seed: int) -> None:
    reward, value, mask = ragged(seed)
    found, n = spo_residual(reward, value, mask), mask.sum(1).double()
    torch.testing.assert_close(found.token_mean, masked_mean(broadcast(found.advantages, mask), mask))
    covariance = ((n - n.mean()) * found.advantages).mean()
    torch.testing.assert_close(found.token_mean, covariance / n.mean(), atol=1e-9, rtol=1e-6)


def test_equal_lengths_are_spo() -> None:
    reward, value, _ = ragged(3)
    mask = torch.arange(9) < 4 * torch.ones(7, 1)
    alpha, beta = 3 * value, 3 * (1 - value)
    plain = spo_single.advantages(reward, alpha, beta, ddof=0).advantages
    torch.testing.assert_close(advantages(reward, value, mask).advantages, plain)
    torch.testing.assert_close(spo_residual(reward, value, mask).advantages, plain)


def test_no_spread_is_exactly_zero() -> None:
    one = torch.ones(1, dtype=torch.float64)
    assert advantages(one, 0.3 * one, torch.ones(1, 4)).advantages.tolist() == [0.0]
    reward, value, mask = torch.full((5,), 1 / 3).double(), torch.full((5,), 0.1).double(), torch.arange(5) < torch.arange(1, 6)[:, None]
    assert not advantages(reward, value, mask).advantages.any()
    nobody = advantages(reward, value, torch.zeros(5, 3))
    assert nobody.advantages.tolist() == [0.0] * 5 and float(nobody.token_sum) == 0


def test_an_empty_row_changes_nothing() -> None:
    reward, value, mask = ragged(4)
    mask[2] = False
    rest = torch.arange(7) != 2
    torch.testing.assert_close(
        advantages(reward, value, mask).advantages[rest], advantages(reward[rest], value[rest], mask[rest]).advantages
    )


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), lam=st.floats(0.05, 1.0))
def test_one_result_a_version_in_order_is_spos_tracker(seed: int, lam: float) -> None:
    reward = torch.rand(12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = event_value(torch.arange(12), reward, torch.arange(13), lam=lam)
    alpha, beta = torch.tensor([0.5]).double(), torch.tensor([0.5]).double()
    for u in range(12):
        torch.testing.assert_close(found.value[u], (alpha / (alpha + beta))[0])
        alpha, beta, value = spo_single.update(reward[u : u + 1], alpha, beta, torch.tensor([lam], dtype=torch.float64))
    torch.testing.assert_close([found.alpha[12:], found.beta[12:], found.value[12:]], [alpha, beta, value])


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_the_order_of_arrival_and_later_events_do_not_matter(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    version, reward, query = torch.randint(6, (15,), generator=g), torch.rand(15, generator=g, dtype=torch.float64), torch.arange(7)
    order = torch.randperm(15, generator=g)
    plain, shuffled = event_value(version, reward, query), event_value(version[order], reward[order], query)
    torch.testing.assert_close(list(plain), list(shuffled), atol=1e-12, rtol=0)
    known = version < 3  # a trajectory of version 3 sees neither its own version nor later ones
    torch.testing.assert_close(plain.value[3], event_value(version[known], reward[known], query).value[3])


def test_nothing_known_is_the_prior_and_ancient_evidence_stays_finite() -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    found = event_value(empty, empty.double(), torch.tensor([0, 5, 1_000_000]), alpha0=1.0, beta0=3.0)
    torch.testing.assert_close(found.value, torch.full((3,), 0.25, dtype=torch.float64))
    old = event_value(torch.tensor([0, 0]), torch.ones(2).double(), torch.tensor([1_000_000]))
    torch.testing.assert_close(old.value, event_value(torch.tensor([0, 0]), torch.ones(2).double(), torch.tensor([1])).value)
    with_prior = evidence(
        empty, empty, torch.zeros(0, 2).double(), torch.tensor([2]), torch.tensor([[1.0, 1]]).double(), torch.tensor([9]), 0.9
    )
    assert with_prior.value.tolist() == [0.5]  # asked before the prior was made: undiscounted


class Setting:
    """What the credit touches of a run."""

    def __init__(self, version: int) -> None:
        self.version, self.state = version, {}

    def log(self, **metrics: float) -> None:
        self.logged = metrics


def arrivals(ids: list[int], version: list[int], reward: list[float]) -> Batch:
    mask = torch.arange(4) < (torch.arange(len(ids)) % 4 + 1)[:, None]
    return Batch(action=mask.long(), mask=mask, logp=torch.zeros(mask.shape).double(), group=torch.tensor(ids), reward=torch.tensor(reward),
                 version=torch.tensor(version), signals={"prompt_id": torch.tensor(ids)})  # fmt: skip


def test_late_results_join_their_own_version() -> None:
    log = [arrivals([0, 1], [0, 0], [1.0, 0.0]), arrivals([0, 1], [2, 1], [0.0, 1.0]), arrivals([1, 0], [2, 1], [1.0, 1.0])]
    values = []
    for batches in (log, log[::-1]):
        run, credit = Setting(version=3), TokenMeasure()
        for batch in batches:
            credit(batch, run)
        values.append(credit.tracked([0, 1, 0], torch.tensor([3, 3, 1]), run).value)
        assert run.state[EVIDENCE][0]["counts"] == {0: [1.0, 0.0], 1: [1.0, 0.0], 2: [0.0, 1.0]}
    expected = [event_value(*map(torch.tensor, part)).value for part in (([0, 1, 2], [1.0, 1, 0], [3, 1]), ([0, 1, 2], [0.0, 1, 1], [3]))]
    torch.testing.assert_close(values[0], torch.stack([expected[0][0], expected[1][0], expected[0][1]]))
    assert torch.equal(values[0], values[1])


def test_samples_of_one_version_do_not_see_one_another() -> None:
    run, credit = Setting(version=0), TokenMeasure()
    batch = arrivals([0, 0, 1, 1], [0] * 4, [1.0, 0.0, 1.0, 1.0])
    torch.testing.assert_close(
        credit(batch, run), broadcast(advantages(batch.reward.double(), torch.full((4,), 0.5).double(), batch.mask)[2], batch.mask)
    )
    assert run.logged["tracked_value"] == 0.5 and torch.isfinite(torch.tensor(run.logged["trajectory_residual"]))


def test_a_profile_is_the_prior_and_the_sampler_follows() -> None:
    run = trained(METHOD, 1)
    for prompt, record in run.state[EVIDENCE].items():
        assert record["base"] == 0 and record["prior"] in [
            torch.stack(init(torch.tensor([k]).double(), 8)[:2], 1)[0].tolist() for k in range(9)
        ]
        (successes, failures), prior = record["counts"][0], record["prior"]
        assert successes + failures == 1
        expected = [0.9 * prior[0] + successes, 0.9 * prior[1] + failures]
        assert run.state[TRACKER][prompt] == pytest.approx(expected)
    plain = trained(METHOD.but(select=UniformPrompts(group_size=2)), 1)
    assert all(record["prior"] == UNKNOWN and sum(record["counts"][0]) == 2 for record in plain.state[EVIDENCE].values())


def test_it_trains_with_any_objective_and_resumes(tmp_path: Path) -> None:
    assert "trajectory_residual" in assert_trains(METHOD, eos=0).history[-1]
    assert_trains(METHOD.but(objective=ClippedSurrogate(aggregation="seq_mean")).set("update.epochs", 2))
    assert_resumes(METHOD, tmp_path)


def test_padding_may_hold_anything() -> None:
    rows = random_rows()
    mask = rows.mask
    assert torch.equal(
        advantages(rows.reward, rows.advantages, mask).advantages, advantages(rows.reward, rows.advantages, mask.long()).advantages
    )


def test_the_measure_is_named() -> None:
    batch = arrivals([0, 1, 2, 3], [0] * 4, [1.0, 0.0, 1.0, 0.0])
    found = TokenMeasure(measure="trajectory")(batch, Setting(version=0))
    plain = spo_residual(batch.reward.double(), torch.full((4,), 0.5).double(), batch.mask).advantages
    torch.testing.assert_close(found, broadcast(plain, batch.mask))
    with pytest.raises(ValueError, match="token or trajectory"):
        TokenMeasure(measure="row")(batch, Setting(version=0))
