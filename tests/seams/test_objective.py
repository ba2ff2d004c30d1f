"""Parts of the surrogates: ratios with wild padding, the branch rule at and beside the bounds, aggregations, KL estimates."""

from __future__ import annotations

import pytest
import torch

from anypo.seams.objective import aggregate, clipped, kl_estimate, log_ratio, outside, ratio_metrics, token_ratio
from tests.helpers import gradient, random_rows


def test_padding_of_any_kind_leaves_ratio_one_and_gradient_zero() -> None:
    logp = torch.tensor([[-1.0, float("-inf"), float("nan")]], requires_grad=True)
    old = torch.tensor([[-1.2, float("-inf"), 0.0]])
    mask = torch.tensor([[True, False, False]])
    ratio = token_ratio(logp, old, mask)
    torch.testing.assert_close(ratio.detach(), torch.tensor([[0.2, 0.0, 0.0]]).exp())
    (found,) = gradient(ratio.sum(), logp)
    assert torch.isfinite(found).all() and found[0, 1:].eq(0).all()


def test_log_ratios_stay_finite() -> None:
    mask = torch.ones(1, 2, dtype=torch.bool)
    assert log_ratio(torch.tensor([[0.0, -500.0]]), torch.tensor([[-900.0, 0.0]]), mask).tolist() == [[20.0, -20.0]]
    assert torch.isfinite(token_ratio(torch.tensor([[0.0, -500.0]]), torch.tensor([[-900.0, 0.0]]), mask)).all()


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize(
    ("ratio", "advantage", "active"),
    [(1.3, 1, 0), (1.3, -1, 1), (0.7, 1, 1), (0.7, -1, 0), (1.0, 1, 1), (1.2, 1, 1), (1.2, -1, 1), (0.8, -1, 1), (0.8, 1, 1), (1.1, 0, 1)],
)  # fmt: skip
def test_gradient_is_the_advantage_or_nothing(ratio: float, advantage: float, active: int, per_token: bool) -> None:
    """At exact ties the unclipped branch counts."""
    value = torch.tensor([[ratio]], dtype=torch.float64, requires_grad=True)
    scores = torch.tensor([[advantage]], dtype=torch.float64)
    low, high = 0.8, 1.2
    bounds = (torch.full((1, 1), low, dtype=torch.float64), torch.full((1, 1), high, dtype=torch.float64)) if per_token else (low, high)
    (found,) = gradient(clipped(value, scores, *bounds).sum(), value)
    assert found.item() == advantage * active
    if advantage:
        assert bool(outside(value, scores, *bounds)) == (not active)


def test_dual_clip_bounds_negative_advantages_only() -> None:
    ratio = torch.tensor([4.0, 2.0, 4.0], dtype=torch.float64, requires_grad=True)
    advantage = torch.tensor([-1.0, -1.0, 1.0], dtype=torch.float64)
    value = clipped(ratio, advantage, 0.8, 1.2, dual_clip=3.0)
    assert value.tolist() == [-3.0, -2.0, 1.2]
    assert gradient(value.sum(), ratio)[0].tolist() == [0.0, -1.0, 0.0]


def test_aggregations_by_hand() -> None:
    values = torch.tensor([[1.0, 2.0, 6.0], [4.0, float("nan"), float("inf")], [float("nan")] * 3])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])
    assert aggregate(values, mask, "token_mean").item() == pytest.approx(13 / 4)
    assert aggregate(values, mask, "seq_mean").item() == pytest.approx((3 + 4) / 2)
    assert aggregate(values, mask, "constant", 10).item() == pytest.approx(13 / 20)


@pytest.mark.parametrize("how", ["token_mean", "seq_mean", "constant"])
def test_nothing_counted_is_zero_with_zero_gradient(how: str) -> None:
    values = torch.full((2, 3), float("nan"), requires_grad=True)
    total = aggregate(values, torch.zeros(2, 3, dtype=torch.bool), how, 3)
    (found,) = gradient(total, values)
    assert total == 0 and found.eq(0).all()


def test_aggregations_coincide_for_full_rows() -> None:
    rows = random_rows(3, ragged=False)
    found = [aggregate(rows.logp, rows.mask, how, rows.mask.shape[1]) for how in ("token_mean", "seq_mean", "constant")]
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(found[0], found[2])


def test_bad_names_are_refused_with_what_would_do() -> None:
    rows = random_rows(0)
    with pytest.raises(ValueError, match="token_mean, seq_mean, constant"):
        aggregate(rows.logp, rows.mask, "mean")
    with pytest.raises(ValueError, match="max_len"):
        aggregate(rows.logp, rows.mask, "constant")
    with pytest.raises(ValueError, match="k1, k2 or k3"):
        kl_estimate(rows.logp, rows.ref_logp, rows.mask, "k4")


def test_kl_estimates() -> None:
    rows = random_rows(1)
    k1, k2, k3 = (kl_estimate(rows.logp, rows.ref_logp, rows.mask, kind) for kind in ("k1", "k2", "k3"))
    assert (k3 >= 0).all() and (k2 >= 0).all()
    torch.testing.assert_close(k2, k1**2 / 2)
    logp = rows.logp.clone().requires_grad_()
    (found,) = gradient(kl_estimate(logp, rows.ref_logp, rows.mask, "k3").sum(), logp)
    torch.testing.assert_close(found, (1 - (rows.ref_logp - rows.logp).exp()) * rows.mask)
    assert kl_estimate(rows.logp, rows.logp, rows.mask, "k3").eq(0).all()


def test_metrics_count_what_left_the_band() -> None:
    ratio = torch.tensor([[1.0, 1.3, 0.5, 9.0]])
    found = ratio_metrics(ratio, 0.8, 1.2, torch.tensor([[True, True, True, False]]))
    assert found["clip_fraction"] == pytest.approx(2 / 3)
    assert found["approx_kl"] > 0
