"""ERPO: when it is GRPO, pivots and cells against plain loops, odd masks, and the component in the loop."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.loops.on_policy import step
from anypo.methods.language.erpo_entropy import METHOD, PivotShaping, advantages, pivots, progress_bucket
from anypo.methods.language.rloo import METHOD as RLOO
from anypo.run import Run
from anypo.seams.credit import GroupRelative, group_relative
from anypo.seams.groups import broadcast
from tests.helpers import Rows, assert_resumes, assert_trains, random_rows, trained


def rows_with_holes(seed: int, rows: int = 9, horizon: int = 12) -> tuple[Rows, Tensor]:
    """Rows whose mask may have gaps, and entropies that are NaN outside it; row 0 has nothing and row 1 one token."""
    found, g = random_rows(seed, rows, horizon), torch.Generator().manual_seed(seed)
    found.mask = torch.rand(rows, horizon, generator=g) < 0.7
    found.mask[0], found.mask[1] = False, torch.arange(horizon) == 4
    entropy = torch.rand(rows, horizon, generator=g, dtype=torch.float64)
    return found, torch.where(found.mask, entropy, torch.nan)


def loops(rows: Rows, entropy: Tensor, q: float, alpha: float, buckets: int) -> list[dict[int, tuple[bool, float, float]]]:
    """Equations 1-4 with plain Python loops: of every row, (pivot, gate, weight) by position."""
    kept = [[t for t, inside in enumerate(row) if inside] for row in rows.mask.tolist()]
    value, group = entropy.tolist(), rows.group.tolist()
    every = sorted(value[i][t] for i, places in enumerate(kept) for t in places)
    rank = q * (len(every) - 1)
    low = math.floor(rank)
    quantile = every[low] + (rank - low) * (every[min(low + 1, len(every) - 1)] - every[low])
    gates: list[dict[int, tuple[bool, float]]] = []
    cells: dict[tuple[int, int], list[float]] = {}
    for i, places in enumerate(kept):
        gates.append({})
        mean = sum(value[i][t] for t in places) / max(len(places), 1)
        std = math.sqrt(sum((value[i][t] - mean) ** 2 for t in places) / max(len(places), 1))
        for p, t in enumerate(places):
            pivot = value[i][t] >= quantile and (p == 0 or value[i][t] >= value[i][places[p - 1]])
            gate = 1 + alpha * pivot / (1 + math.exp(-(value[i][t] - mean) / (std + 1e-6)))
            gates[i][t] = (pivot, gate)
            cells.setdefault((group[i], buckets * p // len(places)), []).append(gate)
    return [
        {t: (*gates[i][t], gates[i][t][1] * len(c) / sum(c)) for p, t in enumerate(places) for c in [cells[group[i], buckets * p // len(places)]]}
        for i, places in enumerate(kept)
    ]  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), q=st.floats(0, 1), alpha=st.floats(0, 4), buckets=st.integers(1, 9))
def test_vectorized_is_the_loop_over_tokens(seed: int, q: float, alpha: float, buckets: int) -> None:
    rows, entropy = rows_with_holes(seed)
    found = advantages(rows.reward, rows.group, entropy, rows.mask, q, alpha, buckets)
    wanted = loops(rows, entropy, q, alpha, buckets)
    for k, values in enumerate((found.pivot, found.gate, found.weight)):
        table = torch.zeros(values.shape, dtype=torch.float64)
        for i, row in enumerate(wanted):
            for t, numbers in row.items():
                table[i, t] = numbers[k]
        torch.testing.assert_close(values.double(), table)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), buckets=st.integers(1, 9), lam=st.floats(0, 1))
def test_off_and_with_constant_entropy_it_is_grpo(seed: int, buckets: int, lam: float) -> None:
    rows, entropy = rows_with_holes(seed)
    plain = broadcast(group_relative(rows.reward, rows.group), rows.mask)
    assert torch.equal(advantages(rows.reward, rows.group, entropy, rows.mask, buckets=buckets, lam=0.0).advantages, plain)
    gateless = advantages(rows.reward, rows.group, entropy, rows.mask, alpha=0.0, buckets=buckets, lam=lam)
    torch.testing.assert_close(gateless.advantages, plain, atol=0, rtol=1e-12)
    flat = advantages(rows.reward, rows.group, torch.full_like(entropy, 0.7), rows.mask, buckets=buckets, lam=lam)
    assert torch.equal(flat.pivot, rows.mask)
    torch.testing.assert_close(flat.advantages, plain, atol=0, rtol=1e-9)  # rounding of the mean, over eps


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), q=st.floats(0, 1), alpha=st.floats(0, 4), lam=st.floats(0, 1))
def test_signs_stay_and_one_bucket_normalizes_by_prompt(seed: int, q: float, alpha: float, lam: float) -> None:
    rows, entropy = rows_with_holes(seed)
    found = advantages(rows.reward, rows.group, entropy, rows.mask, q, alpha, 1, lam)
    assert torch.equal(found.advantages.sign(), broadcast(group_relative(rows.reward, rows.group).sign(), rows.mask))
    for g in rows.group.unique():
        assert float(found.weight[rows.group == g].sum()) == pytest.approx(int(rows.mask[rows.group == g].sum()))


def test_one_bucket_a_token_of_equal_responses_cancels_a_shared_gate() -> None:
    entropy = torch.tensor([[0.1, 0.9, 0.2]], dtype=torch.float64).expand(4, 3)
    found = advantages(torch.tensor([1.0, 0, 0, 1]), torch.zeros(4, dtype=torch.int64), entropy, torch.ones(4, 3), buckets=3)
    assert found.pivot[:, 1].all() and found.pivot.sum() == 4
    torch.testing.assert_close(found.weight, torch.ones(4, 3, dtype=torch.float64))


def test_a_pivot_has_just_risen() -> None:
    entropy = torch.tensor([[0.9, 0.8, 0.1, 0.85, 0.9]])
    assert pivots(entropy, torch.ones(1, 5), q=0.25).tolist() == [[True, False, False, True, True]]
    gap = torch.tensor([[True, False, False, True, True]])
    assert pivots(entropy, gap, q=0.0).tolist() == [[True, False, False, False, True]]  # 0.85 follows 0.9


def test_buckets_count_the_policys_own_tokens() -> None:
    mask = torch.tensor([[0, 1, 1, 0, 1, 1], [1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]], dtype=torch.bool)
    found = progress_bucket(mask, 4)
    assert found[0][mask[0]].tolist() == [0, 1, 2, 3] and found[1][mask[1]].tolist() == [0, 2]
    assert int(found.max()) == 3 and int(found.min()) == 0


def test_empty_batches_equal_rewards_and_lone_members() -> None:
    reward, group = torch.tensor([1.0, 1.0, 0.5], dtype=torch.float64), torch.tensor([2, 2, 9])
    for mask in (torch.ones(3, 4), torch.zeros(3, 4)):
        entropy = torch.rand(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_(True)
        found = advantages(reward, group, entropy, mask)
        assert found.advantages.eq(0).all() and torch.isfinite(found.weight).all() and not found.weight.requires_grad
    assert found.weight.eq(0).all() and not found.pivot.any()


def test_off_it_trains_as_grpo_with_its_objective() -> None:
    plain = METHOD.but(credit=GroupRelative())
    task = {"horizon": 6, "partial": True}
    assert torch.equal(trained(METHOD.set("credit.lam", 0.0), 4, **task).policy.logits, trained(plain, 4, **task).policy.logits)
    shaped = METHOD.set("credit.buckets", 2)
    assert not torch.equal(trained(shaped, 4, **task).policy.logits, trained(plain, 4, **task).policy.logits)


def test_the_loop_trains_with_any_credit_and_reward() -> None:
    run = assert_trains(METHOD, horizon=6, partial=True)
    assert all(0 < record["pivot_share"] <= 1 for record in run.history)
    assert_trains(METHOD.but(credit=PivotShaping(buckets=2, inner=RLOO.credit)), horizon=6, partial=True)

    def two(prompt: Tensor, action: Tensor, mask: Tensor) -> Tensor:
        return torch.stack([(action[:, 0] == 1).double(), (action[:, 1] == 2).double()], dim=1)

    assert_trains(METHOD, reward=two, objectives=("a", "b"))


def test_single_responses_are_refused_by_credits_that_compare() -> None:
    task = TokenBandit(prompts=4)
    run = Run(METHOD.set("select.group_size", 1), task.policy(), task, steps=1)
    with pytest.raises(ValueError, match="group_size"):
        step(run)


def test_a_stopped_run_continues_identically(tmp_path: Path) -> None:
    assert_resumes(METHOD, tmp_path, horizon=6, partial=True)
