"""TP-Schedule: when it is GRPO, the schedules, what is kept of odd rows, and the component in the loop."""

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
from anypo.method import Method
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.methods.language.rloo import METHOD as RLOO
from anypo.methods.language.temporal_credit import (
    METHOD,
    VARIANTS,
    ScheduledCredit,
    advantages_entropy,
    keep_forking,
    keep_percentile,
    magnitude,
)
from anypo.run import Run
from anypo.seams.groups import broadcast
from tests.helpers import assert_continues, assert_trains, trained

LONG = {"horizon": 6, "partial": True}


def rows(seed: int, count: int = 12, horizon: int = 7) -> tuple[Tensor, Tensor]:
    """A mask with holes, of which row 0 is empty and row 1 has one token, and entropies."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(count, horizon, generator=g) < 0.7
    mask[0], mask[1] = False, torch.arange(horizon) == 3
    return mask, torch.rand(count, horizon, generator=g, dtype=torch.float64)


@pytest.mark.parametrize("mode", ["linear", "sigmoid", "gamma"])
def test_schedules_fall_from_their_start_to_zero(mode: str) -> None:
    found = magnitude(torch.arange(201), 200, 0.9, 0.1, 0.7, mode)
    assert float(found[0]) == pytest.approx(0.81 if mode == "gamma" else 0.9)
    assert found[:21].eq(found[0]).all() and found[140:].eq(0).all()
    assert bool((found[20:141].diff() < 0).all())


def test_the_gamma_schedule_with_exponent_one_is_linear_and_sigmoid_meets_it_half_way() -> None:
    step = torch.arange(101)
    torch.testing.assert_close(magnitude(step, 100, mode="gamma", gamma=1.0), magnitude(step, 100))
    assert float(magnitude(step, 100, mode="sigmoid")[40]) == pytest.approx(float(magnitude(step, 100)[40]))


def test_wrong_schedules_are_refused() -> None:
    with pytest.raises(ValueError, match="r_max"):
        magnitude(torch.tensor([1]), 10, r_min=0.5, r_max=0.5)
    with pytest.raises(ValueError, match="unknown schedule"):
        magnitude(torch.tensor([1]), 10, mode="cosine")
    with pytest.raises(ValueError, match="unknown criterion"):
        trained(METHOD.set("credit.criterion", "length"), 1)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1000), m=st.floats(0, 0.999))
def test_the_percentile_keeps_the_last_tokens_of_the_mask(seed: int, m: float) -> None:
    mask, _ = rows(seed)
    kept = keep_percentile(mask, m)
    for i in range(len(mask)):
        places = mask[i].nonzero().flatten().tolist()
        skipped = min(math.floor(m * len(places)), len(places) - 1)
        assert kept[i].nonzero().flatten().tolist() == places[max(skipped, 0) :]


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1000), m=st.floats(0, 1))
def test_forking_keeps_the_most_uncertain_tokens(seed: int, m: float) -> None:
    mask, entropy = rows(seed)
    entropy = (4 * entropy).round()  # ties
    kept = keep_forking(mask, entropy, m)
    for i in range(len(mask)):
        places = sorted(mask[i].nonzero().flatten().tolist(), key=lambda t: (-float(entropy[i, t]), t))
        assert sorted(places[: math.ceil((1 - m) * len(places))]) == kept[i].nonzero().flatten().tolist()


def test_magnitude_zero_keeps_the_mask_and_the_advantages() -> None:
    mask, entropy = rows(0)
    advantage = torch.randn(len(mask), dtype=torch.float64)
    assert torch.equal(keep_percentile(mask, 0.0), mask) and torch.equal(keep_forking(mask, entropy, 0.0), mask)
    assert torch.equal(advantages_entropy(advantage, entropy, mask, 0.0), broadcast(advantage, mask))


def test_lone_tokens_stay_and_empty_rows_stay_empty() -> None:
    mask, entropy = rows(1)
    for m in (0.0, 0.5, 0.99, 1.0):
        kept = keep_percentile(mask, m)
        assert not kept[0].any() and torch.equal(kept[1], mask[1]) and bool((kept.any(1) == mask.any(1)).all())
    assert not keep_forking(mask, entropy, 1.0).any() and torch.equal(keep_forking(mask, entropy, 0.99)[1], mask[1])


def test_padding_may_hold_anything_and_entropy_has_no_gradient() -> None:
    mask, entropy = rows(2)
    dirty = torch.where(mask, entropy, torch.nan).requires_grad_(True)
    assert torch.equal(keep_forking(mask, dirty, 0.6), keep_forking(mask, entropy, 0.6))
    advantage = torch.randn(len(mask), dtype=torch.float64)
    found = advantages_entropy(advantage, dirty, mask, 0.5)
    assert not found.requires_grad and torch.isfinite(found).all() and found[~mask].eq(0).all()
    assert torch.equal(found, advantages_entropy(broadcast(advantage, mask), entropy, mask, 0.5))


def test_the_bonus_is_bounded_and_zero_advantages_stay() -> None:
    mask, entropy = torch.ones(3, 2, dtype=torch.bool), torch.full((3, 2), 100.0)
    assert advantages_entropy(torch.tensor([1.0, -1.0, 0.0]), entropy, mask, 1.0).tolist() == [[1.5, 1.5], [-0.5, -0.5], [0, 0]]


@pytest.mark.parametrize("criterion", ["percentile", "forking", "entropy"])
def test_off_it_trains_as_grpo(criterion: str) -> None:
    off = METHOD.set("credit.criterion", criterion).set("credit.initial", 0.0)
    plain = trained(GRPO, 4, **LONG).policy.logits
    assert torch.equal(trained(off, 4, **LONG).policy.logits, plain)
    assert not torch.equal(trained(METHOD.set("credit.criterion", criterion), 4, **LONG).policy.logits, plain)


def test_a_constant_forking_magnitude_is_the_fixed_top_fifth() -> None:
    class TopFifth:
        needs = frozenset({"old_entropy"})

        def __call__(self, batch, run):
            order = batch.signals["old_entropy"].argsort(dim=1, descending=True, stable=True)
            batch.keep = torch.zeros_like(batch.mask).scatter(1, order[:, : math.ceil(0.2 * batch.horizon)], True)
            return GRPO.credit(batch, run)

    fixed = METHOD.but(credit=ScheduledCredit(criterion="forking", initial=0.8, r_min=1.0, r_max=2.0))
    # six tokens: two are kept
    assert torch.equal(trained(fixed, 4, **LONG).policy.logits, trained(METHOD.but(credit=TopFifth()), 4, **LONG).policy.logits)


def test_tokens_outside_the_window_do_not_move() -> None:
    static = METHOD.but(credit=ScheduledCredit(initial=0.5, r_min=1.0, r_max=2.0), regularize=())
    start, end = trained(static, 0, **LONG).policy.logits, trained(static, 3, **LONG).policy.logits
    assert torch.equal(start[:, :3], end[:, :3]) and not torch.equal(start[:, 3:], end[:, 3:])


def test_an_inner_choice_of_tokens_is_narrowed_further() -> None:
    class EvenPositions:
        def __call__(self, batch, run):
            batch.keep = batch.mask & (torch.arange(batch.horizon) % 2 == 0)
            return GRPO.credit(batch, run)

    method = METHOD.but(credit=ScheduledCredit(inner=EvenPositions(), initial=0.5, r_min=1.0, r_max=2.0), regularize=())
    run = trained(method, 2, **LONG)
    assert [record["kept_share"] for record in run.history] == pytest.approx([2 / 6, 2 / 6])  # the last two of positions 0, 2 and 4


@pytest.mark.parametrize(
    "method", [METHOD, *VARIANTS.values(), METHOD.but(credit=ScheduledCredit(inner=RLOO.credit))], ids=["percentile", "forking", "entropy", "rloo"]
)  # fmt: skip
def test_the_loop_trains_and_relaxes(method: Method) -> None:
    run = assert_trains(method, steps=10, eos=0, **LONG)
    shares = [record["kept_share"] for record in run.history]
    assert shares[8:] == [1.0, 1.0] and (method.credit.criterion == "entropy" or shares[0] < 0.5)
    assert [record["magnitude"] for record in run.history[8:]] == [0.0, 0.0]


def test_entropies_are_asked_for_only_where_used() -> None:
    assert "old_entropy" not in METHOD.needs() and all("old_entropy" in m.needs() for m in VARIANTS.values())


@pytest.mark.parametrize("method", [METHOD, *VARIANTS.values()], ids=lambda m: m.name)
def test_a_stopped_run_continues_identically(method: Method, tmp_path: Path) -> None:
    def run_to(out: Path, upto: int) -> Run:
        task = TokenBandit(4, **LONG)
        run = Run(method, task.policy(scale=0.1), task, steps=4, out=out, checkpoint_every=2)
        run.resume()
        while run.step < upto:
            step(run)
        return run

    assert_continues(run_to, tmp_path)
