"""FiberPO: reductions, gates, aggregates over rows that are there, APC-Obj and training."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.methods.language import gspo
from anypo.methods.language.fiberpo import FIBERPO_DOMAIN, METHOD, apc, clipgate, domain_ratio, gated_ratio, loss
from anypo.reproductions.common import train_on


def random_rows(seed: int = 0, lengths: tuple[int, ...] = (4, 2, 0, 1, 3)) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = len(lengths)
    old = -3 * torch.rand(rows, 4, generator=generator, dtype=torch.float64)
    logp = (old + 0.3 * torch.randn(rows, 4, generator=generator, dtype=torch.float64)).requires_grad_()
    mask = torch.arange(4)[None] < torch.tensor(lengths)[:, None]
    return logp, old, mask, torch.randn(rows, generator=generator, dtype=torch.float64)


def test_without_gates_it_is_the_plain_ratio() -> None:
    logp, old, mask, advantages = random_rows()
    plain = torch.where(mask, logp - old, 0.0).exp() * mask
    torch.testing.assert_close(gated_ratio(logp, old, mask, None, None).ratio, plain)
    group, domain = torch.tensor([0, 0, 1, 1, 2]), torch.tensor([0, 0, 0, 0, 1])
    torch.testing.assert_close(domain_ratio(logp, old, mask, group, domain, None, None, None, None).ratio, plain)
    torch.testing.assert_close(loss(logp, old, mask, advantages, None, None).loss, -(plain * advantages[:, None]).sum() / mask.sum())


def test_closed_fiber_is_the_sequence_ratio() -> None:
    logp, old, mask, _ = random_rows()
    found = gated_ratio(logp, old, mask, 0.0, 0.05)
    whole = gspo.ratio(logp, old, mask).clamp(0.95, 1.05)[:, None] * mask
    torch.testing.assert_close(found.ratio, whole)


def test_one_token_has_only_a_base() -> None:
    logp, old, mask, _ = random_rows(lengths=(1, 1, 1))
    found = gated_ratio(logp, old, mask, 1e-6, 0.05)
    assert (found.residual == 0).all()
    torch.testing.assert_close(found.ratio[:, 0], (logp - old)[:, 0].clamp(math.log(0.95), math.log(1.05)).exp())


def test_single_trajectory_has_only_a_domain() -> None:
    logp, old, mask, _ = random_rows(lengths=(4,))
    one = torch.zeros(1, dtype=torch.int64)
    found = domain_ratio(logp, old, mask, one, one, 0.02, 1e-9, 1e-9, 0.2)
    assert found.v_group.item() == 0 and found.v_traj.item() == 0
    torch.testing.assert_close(found.ratio, gated_ratio(logp, old, mask, 0.2, 0.02).ratio)


def test_on_policy_gradient() -> None:
    logp, _, mask, advantages = random_rows()
    value = loss(logp, logp.detach(), mask, advantages).loss
    found = torch.autograd.grad(value, logp)[0]
    torch.testing.assert_close(found, -(advantages[:, None] * mask) / mask.sum())
    torch.testing.assert_close(value.detach(), -(advantages[:, None] * mask).sum() / mask.sum())


def test_levels_sum_to_the_log_ratio_and_skip_empty_rows() -> None:
    logp, old, mask, _ = random_rows(lengths=(4, 2, 0, 1, 3, 0))
    group, domain = torch.tensor([7, 7, 7, 3, 5, 9]), torch.tensor([1, 1, 1, 1, 0, 0])
    found = domain_ratio(logp, old, mask, group, domain)
    mean = gated_ratio(logp, old, mask).aggregate
    present = mask.any(1)
    torch.testing.assert_close((found.v_domain + found.v_group + found.v_traj)[present], mean[present])
    without = domain_ratio(logp[present], old[present], mask[present], group[present], domain[present])
    torch.testing.assert_close(found.ratio[present], without.ratio)


def test_residuals_sum_to_zero() -> None:
    logp, old, mask, _ = random_rows()
    torch.testing.assert_close(gated_ratio(logp, old, mask).residual.sum(1), torch.zeros(5, dtype=torch.float64))


def test_pessimistic_pulls_back_from_outside() -> None:
    _, old, mask, _ = random_rows(lengths=(4, 4))
    far = (old + 1.0).requires_grad_()
    bad = torch.tensor([-1.0, -1.0], dtype=torch.float64)
    plain = torch.autograd.grad(loss(far, old, mask, bad).loss, far)[0]
    safe = torch.autograd.grad(loss(far, old, mask, bad, pessimistic=True).loss, far)[0]
    torch.testing.assert_close(plain.sum(1), torch.zeros(2, dtype=torch.float64))
    assert (safe > 0).all()


def test_padding_may_hold_anything() -> None:
    logp, old, mask, advantages = random_rows()
    filled = logp.detach().masked_fill(~mask, -math.inf).requires_grad_()
    value = loss(filled, old.masked_fill(~mask, math.nan), mask, advantages).loss
    found = torch.autograd.grad(value, filled)[0]
    torch.testing.assert_close(found, torch.autograd.grad(loss(logp, old, mask, advantages).loss, logp)[0])
    assert loss(filled, old, torch.zeros_like(mask), advantages).loss == 0


def test_gate_budget_is_checked() -> None:
    with pytest.raises(ValueError, match=r"budget must be in \[0,1\)"):
        clipgate(torch.zeros(1), 1.0)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 6), st.floats(0.01, 1.5))
def test_no_ratios_exceed_the_closed_form(seed: int, count: int, delta: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    advantages = torch.randn(count, generator=generator, dtype=torch.float64)
    ratio = 4 * torch.rand(count, generator=generator, dtype=torch.float64) ** 2
    found = apc(ratio, advantages, delta)
    assert found.objective <= found.optimum + 1e-12


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_one_sample_is_clipping_at_twice_the_budget(sign: float) -> None:
    advantage, delta = torch.tensor([sign * 0.7], dtype=torch.float64), 0.1
    best = apc(torch.tensor([1 + sign * 2 * delta], dtype=torch.float64), advantage, delta)
    torch.testing.assert_close(best.objective, best.optimum)


@pytest.mark.parametrize("method", [METHOD, FIBERPO_DOMAIN], ids=lambda m: m.name)
def test_trains(method: object) -> None:
    task = TokenBandit()
    curve = train_on(method.set("update.epochs", 3), task.policy(), task, steps=5)  # type: ignore[attr-defined]
    assert all(math.isfinite(x) for x in curve) and curve[-1] > 1 / 16
