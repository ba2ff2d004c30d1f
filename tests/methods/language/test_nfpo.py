"""NFPO: reductions, the trace's edges, masks and training."""

from __future__ import annotations

import math

import pytest
import torch

from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.methods.language.nfpo import METHOD, loss, trace
from anypo.reproductions.common import train_on
from anypo.seams.objective import aggregate, clipped, token_ratio


def random_rows(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(5, 4, generator=generator, dtype=torch.float64)
    logp = (old + 0.4 * torch.randn(5, 4, generator=generator, dtype=torch.float64)).requires_grad_()
    mask = torch.arange(4)[None] < torch.tensor([4, 2, 0, 1, 3])[:, None]
    return logp, old, mask, torch.randn(5, generator=generator, dtype=torch.float64)


def gradient(value: torch.Tensor, logp: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(value, logp)[0]


@pytest.mark.parametrize("seed", range(5))
def test_one_step_is_the_clipped_surrogate(seed: int) -> None:
    logp, old, mask, advantages = random_rows(seed)
    value = clipped(token_ratio(logp, old, mask), advantages[:, None] * mask, 0.8, 1.28)
    theirs = gradient(aggregate(-value, mask, "token_mean"), logp)
    torch.testing.assert_close(gradient(loss(logp, old, mask, advantages, N=1).loss, logp), theirs)


@pytest.mark.parametrize("N", [1, 2, 7])
def test_on_policy_is_reinforce(N: int) -> None:
    logp, _, mask, advantages = random_rows()
    ours = gradient(loss(logp, logp.detach(), mask, advantages, N=N, prefix=True).loss, logp)
    torch.testing.assert_close(ours, -(advantages[:, None] * mask) / mask.sum())


def test_whole_trace_with_prefix_is_the_sequence_ratio() -> None:
    logp, old, mask, advantages = random_rows()
    ours = gradient(loss(logp, old, mask, advantages, N=4, c_F=None, eps_low=1e9, eps_high=1e9, prefix=True).loss, logp)
    whole = torch.where(mask, logp.detach() - old, 0.0).sum(1).exp()
    torch.testing.assert_close(ours, -(whole * advantages)[:, None] * mask / mask.sum())


def test_trace_by_hand() -> None:
    logp = torch.tensor([[0.1, 0.2, -0.3, 9.0]], dtype=torch.float64)
    old, mask = torch.zeros_like(logp), torch.tensor([[True, True, True, False]])
    expected = torch.tensor([[math.exp(0.2), math.exp(-0.3), 1.0, 1.0]], dtype=torch.float64)
    torch.testing.assert_close(trace(logp, old, mask, N=2), expected)
    torch.testing.assert_close(trace(logp, old, mask, N=99)[0, 0], torch.tensor(math.exp(-0.1), dtype=torch.float64))
    assert trace(logp * 10, old, mask, N=2, c_F=1.5)[0, 0] == 1.5


def test_no_gradient_through_trace_or_advantages() -> None:
    logp, old, mask, advantages = random_rows()
    assert not trace(logp, old, mask, 3).requires_grad
    value = loss(logp, old, mask, advantages, N=3)
    assert not value.surrogate.requires_grad


def test_extreme_ratios_stay_finite() -> None:
    logp = torch.full((2, 40), 50.0, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(2, 40, dtype=torch.bool)
    value = loss(logp, torch.zeros_like(logp), mask, torch.tensor([1.0, -1.0], dtype=torch.float64), N=40, c_F=None, prefix=True)
    assert torch.isfinite(value.loss) and torch.isfinite(gradient(value.loss, logp)).all()


def test_padding_may_hold_anything() -> None:
    logp, old, mask, advantages = random_rows()
    filled = logp.detach().masked_fill(~mask, -math.inf).requires_grad_()
    value = loss(filled, old.masked_fill(~mask, math.nan), mask, advantages, N=3)
    found = gradient(value.loss, filled)
    torch.testing.assert_close(found, gradient(loss(logp, old, mask, advantages, N=3).loss, logp))
    assert loss(filled, old, torch.zeros_like(mask), advantages).loss == 0


def test_mask_trace_drops_tokens_outside_the_bounds() -> None:
    logp, old, mask, advantages = random_rows()
    found = gradient(loss(logp, old, mask, advantages, N=3, c_F=1.05, eps_low=1e9, eps_high=1e9, mask_trace=True).loss, logp)
    raw = trace(logp, old, mask, 3, None)
    left = (raw > 1.05) | (raw < 1 / 1.05)
    assert (left & mask).any() and (found[left] == 0).all() and (found[mask & ~left] != 0).all()


def test_bad_parameters_are_named() -> None:
    logp, old, mask, _ = random_rows()
    with pytest.raises(ValueError, match="N >= 1"):
        trace(logp, old, mask, 0)
    with pytest.raises(ValueError, match="at least 1"):
        trace(logp, old, mask, 2, 0.5)


def test_trains() -> None:
    task = TokenBandit()
    curve = train_on(METHOD.set("update.epochs", 3), task.policy(autoregressive=True), task, steps=5)
    assert all(math.isfinite(x) for x in curve) and curve[-1] > 1 / 16
