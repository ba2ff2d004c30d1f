"""BandPO: reductions, bounds, masks and training."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anypo.batch import Batch
from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.methods.language import dapo
from anypo.methods.language.bandpo import METHOD, Band, BandClip, band, divergence, loss
from anypo.policy import Signals
from anypo.reproductions.common import train_on
from anypo.run import Run
from anypo.seams.objective import ClippedSurrogate

P = torch.tensor([1e-5, 1e-3, 0.05, 0.3, 0.7, 0.99], dtype=torch.float64)


def random_rows(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(5, 4, generator=generator, dtype=torch.float64)
    logp = old + 0.4 * torch.randn(5, 4, generator=generator, dtype=torch.float64)
    mask = torch.arange(4)[None] < torch.tensor([4, 2, 0, 1, 3])[:, None]
    return logp, old, torch.randn(5, generator=generator, dtype=torch.float64), mask


@pytest.mark.parametrize("kind", ["kl", "tv", "chi2"])
def test_no_radius_leaves_no_room(kind: str) -> None:
    bounds = band(P[1:].log(), kind, 0.0)
    ones = torch.ones_like(P[1:])  # the divergence is flat at 1: its rounding of 1e-16 is 1e-6 in the ratio
    torch.testing.assert_close(bounds, Band(ones, ones), atol=2e-6, rtol=0)


def test_certain_token_cannot_rise() -> None:
    assert band(torch.zeros(1, dtype=torch.float64)).upper.item() == 1.0


def test_chi_square_radius_gives_symmetric_bounds() -> None:
    p, eps = 0.3, 0.15
    bounds = band(torch.tensor([math.log(p)], dtype=torch.float64), "chi2", eps**2 * p / (1 - p))
    torch.testing.assert_close(torch.stack(bounds)[:, 0], torch.tensor([1 - eps, 1 + eps], dtype=torch.float64))


def test_relaxed_without_radius_is_clip_higher() -> None:
    logp, old, advantages, mask = random_rows()
    ours = loss(logp, old, advantages, mask, delta=0.0, relax=True).loss
    batch = Batch(torch.zeros(5, 4, dtype=torch.int64), mask, old, torch.arange(5), advantage=advantages[:, None] * mask)
    theirs = ClippedSurrogate(0.2, 0.28, "token_mean")(batch, Signals(logp=logp), None)  # type: ignore[arg-type]
    torch.testing.assert_close(ours, theirs.value, atol=1e-6, rtol=0)
    assert dapo.METHOD.objective == ClippedSurrogate(0.2, 0.28, "token_mean")


@settings(max_examples=50, deadline=None)
@given(p=st.floats(1e-5, 1 - 1e-5), delta=st.floats(1e-4, 0.5), kind=st.sampled_from(["kl", "tv", "chi2"]))
def test_bounds_hold_the_radius_and_the_simplex(p: float, delta: float, kind: str) -> None:
    logp = torch.tensor([p], dtype=torch.float64).log()
    lower, upper = band(logp, kind, delta)
    assert 0 <= lower <= 1 <= upper <= 100 and upper * p <= 1 + 1e-9
    for ratio in (lower, upper):
        assert divergence(logp, ratio, kind) <= delta * (1 + 1e-6) + 1e-9


def test_upper_bound_falls_with_probability() -> None:
    assert (band(P.log()).upper.diff() <= 0).all()


def test_bounds_carry_no_gradient_and_keep_the_type() -> None:
    old = P.float().log().requires_grad_()
    bounds = band(old)
    assert not bounds.upper.requires_grad and bounds.upper.dtype == torch.float32


def test_padding_may_hold_anything() -> None:
    logp, old, advantages, mask = random_rows()
    logp, old = logp.masked_fill(~mask, -math.inf).requires_grad_(), old.masked_fill(~mask, math.nan)
    value = loss(logp, old, advantages, mask).loss
    value.backward()
    assert torch.isfinite(value) and torch.isfinite(logp.grad[mask]).all() and (logp.grad[~mask] == 0).all()
    assert loss(logp, old, advantages, torch.zeros_like(mask)).loss == 0


def test_unknown_divergence_is_named() -> None:
    for call in (lambda: band(P.log(), "renyi"), lambda: divergence(P.log(), torch.ones(6), "renyi")):
        with pytest.raises(ValueError, match="unknown divergence 'renyi'"):
            call()


def test_bounds_are_solved_once_a_batch() -> None:
    task = TokenBandit()
    run = Run(METHOD.set("update.epochs", 3), task.policy(), task, steps=1)
    batch = run.collect(METHOD.select(task, run))
    batch.advantage = torch.ones(batch.mask.shape, dtype=torch.float64)
    objective = BandClip()
    objective(batch, Signals(logp=batch.logp), run)
    first = batch.signals["band_upper"]
    objective(batch, Signals(logp=batch.logp - 1), run)
    assert batch.signals["band_upper"] is first and first.shape == batch.mask.shape


def test_trains() -> None:
    task = TokenBandit()
    curve = train_on(METHOD.set("update.epochs", 2).set("update.minibatches", 2), task.policy(), task, steps=5)
    assert all(math.isfinite(x) for x in curve) and curve[-1] > 1 / 16
