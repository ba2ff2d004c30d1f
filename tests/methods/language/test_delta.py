"""DelTA: when it is DAPO, distances written out, odd batches, which state a token is predicted from, and the component in the loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.domains.language.toys.toy_arith import GruPolicy, ToyArith
from anypo.loops.on_policy import train
from anypo.methods.language.dapo import METHOD as DAPO
from anypo.methods.language.delta import (
    METHOD,
    DiscriminativeCredit,
    coefficients,
    discriminator,
    mean_vector,
    predicting,
    proxy,
    sides,
    token_advantages,
)
from anypo.policy import MissingSignal, Signals
from anypo.reproductions.common import CoinReward
from anypo.run import Run
from anypo.seams.credit import GroupRelative
from anypo.seams.groups import broadcast
from tests.helpers import assert_resumes, assert_trains, random_rows, trained


def problem(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states [8,5,3], log-probs, a ragged mask with an empty row, and advantages of which one is 0."""
    rows = random_rows(seed)
    g = torch.Generator().manual_seed(seed)
    rows.mask[2], rows.advantages[3] = False, 0.0
    return torch.randn(8, 5, 3, generator=g, dtype=torch.float64), rows.old_logp, rows.mask, rows.advantages


@pytest.mark.parametrize("bound", [0.7, 1.0, 3.0])
def test_equal_bounds_leave_the_advantages(bound: float) -> None:
    given = problem()
    torch.testing.assert_close(coefficients(*given, lam_min=bound, lam_max=bound), given[2].double())
    torch.testing.assert_close(token_advantages(*given, lam_min=bound, lam_max=bound), broadcast(given[3], given[2]))


def test_equal_bounds_train_as_dapo() -> None:
    off = METHOD.set("credit.lam_min", 1.0).set("credit.lam_max", 1.0)
    plain = DAPO.but(select=METHOD.select, objective=METHOD.objective)
    assert torch.equal(trained(off, 4).policy.logits, trained(plain, 4).policy.logits)
    assert not torch.equal(trained(METHOD, 4).policy.logits, trained(plain, 4).policy.logits)


def test_equal_vectors_have_coefficient_one() -> None:
    _, _, mask, advantage = problem()
    advantage = advantage + 0.1 * (advantage == 0)
    half = torch.full(mask.shape, 0.5, dtype=torch.float64).log()
    hidden = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64).expand(8, 5, 3)
    found = sides(hidden, half, mask, advantage)
    torch.testing.assert_close(found.chance[mask], torch.full_like(found.chance[mask], 0.5))
    torch.testing.assert_close(coefficients(hidden, half, mask, advantage), mask.double())


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1000), rounds=st.integers(0, 3))
def test_margins_are_differences_of_squared_distances(seed: int, rounds: int) -> None:
    hidden, logp, mask, advantage = problem(seed)
    found = sides(hidden, logp, mask, advantage, rounds)
    vector, weight = proxy(hidden, logp, mask), broadcast(advantage.abs(), mask)
    positive = broadcast((advantage > 0).double(), mask).bool()
    negative = broadcast((advantage < 0).double(), mask).bool()
    chance, scales = torch.ones_like(weight), None
    for k in range(rounds + 1):
        means = [mean_vector(vector, weight * chance * side) for side in (positive, negative)]
        to = [(vector - mu).square().sum(-1) for mu in means]
        margin = torch.where(positive, to[1] - to[0], to[0] - to[1])
        now = [margin[side].std(correction=0).clamp(min=1e-4) if side.any() else torch.ones(()).double() for side in (positive, negative)]
        scales = scales or now
        chance = torch.where(positive, torch.sigmoid(margin / scales[0]), torch.sigmoid(margin / scales[1]))
        scales = now if k else scales
    used = positive | negative
    torch.testing.assert_close(found.margin[used], margin[used])
    torch.testing.assert_close(found.chance[used], chance[used])
    torch.testing.assert_close(found.line.W, means[0] - means[1])


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), factor=st.floats(0.01, 100))
def test_coefficients_have_mean_one_keep_signs_and_ignore_the_advantages_size(seed: int, factor: float) -> None:
    hidden, logp, mask, advantage = problem(seed)
    found = coefficients(hidden, logp, mask, advantage)
    assert float(found[mask].mean()) == pytest.approx(1) and found[~mask].eq(0).all() and bool((found[mask] > 0).all())
    assert float(found[mask].max() / found[mask].min()) <= 1.5 + 1e-9
    torch.testing.assert_close(coefficients(hidden, logp, mask, factor * advantage), found)
    assert torch.equal(token_advantages(hidden, logp, mask, advantage).sign(), broadcast(advantage, mask).sign())


def test_changing_sides_turns_the_discriminator_round() -> None:
    hidden, logp, mask, advantage = problem()
    one, other = discriminator(hidden, logp, mask, advantage), discriminator(hidden, logp, mask, -advantage)
    torch.testing.assert_close(one.W, -other.W)
    torch.testing.assert_close(one.b, -other.b)
    torch.testing.assert_close(coefficients(hidden, logp, mask, advantage), coefficients(hidden, logp, mask, -advantage))


def test_one_sided_silent_and_empty_batches_are_finite() -> None:
    hidden, logp, mask, advantage = problem()
    assert torch.isfinite(coefficients(hidden, logp, mask, advantage.abs())).all()
    torch.testing.assert_close(coefficients(hidden, logp, mask, 0 * advantage), mask.double())
    assert token_advantages(hidden, logp, torch.zeros_like(mask), advantage).eq(0).all()
    assert coefficients(hidden[:0], logp[:0], mask[:0], advantage[:0]).shape == (0, 5)


def test_padding_may_hold_anything_and_nothing_carries_a_gradient() -> None:
    hidden, logp, mask, advantage = problem()
    dirty = torch.where(mask[..., None], hidden, torch.nan).requires_grad_(True)
    low = torch.where(mask, logp, -torch.inf).requires_grad_(True)
    found = token_advantages(dirty, low, mask, advantage.requires_grad_(True))
    assert not found.requires_grad
    assert torch.equal(found, token_advantages(hidden, logp, mask, advantage))


def test_half_precision_states_are_summed_in_float32() -> None:
    hidden, logp, mask, advantage = problem()
    found = coefficients(hidden.bfloat16(), logp.float(), mask, advantage.float())
    torch.testing.assert_close(found.double(), coefficients(hidden, logp, mask, advantage), atol=5e-3, rtol=0)
    assert found.dtype == torch.float32


def test_advantages_a_token_are_taken_as_they_are() -> None:
    hidden, logp, mask, advantage = problem()
    assert torch.equal(coefficients(hidden, logp, mask, broadcast(advantage, mask)), coefficients(hidden, logp, mask, advantage))


def test_coefficients_of_zero_are_refused() -> None:
    with pytest.raises(ValueError, match="lam_min and lam_max"):
        coefficients(*problem(), lam_min=0.0)


def test_a_token_is_predicted_from_the_state_before_it() -> None:
    task, policy = ToyArith(small=True), GruPolicy(hidden=16)
    run = Run(METHOD, policy, task, steps=1)
    batch = task.collect([p.but(samples=3) for p in task.prompts(4, run.rng)], run)
    run.prepare_signals(batch, METHOD.needs())
    logits = policy.output(predicting(batch)).log_softmax(-1)
    logp = logits.gather(-1, batch.action[..., None])[..., 0]
    torch.testing.assert_close(logp[batch.mask], batch.logp[batch.mask])
    bandit = TokenBandit(4)
    table = bandit.policy(scale=0.3)
    run = Run(METHOD, table, bandit, steps=1)
    batch = bandit.collect(bandit.prompts(4, run.rng), run)
    run.prepare_signals(batch, METHOD.needs())
    torch.testing.assert_close(predicting(batch).log_softmax(-1).gather(-1, batch.action[..., None])[..., 0], batch.logp)


def test_a_policy_without_states_is_refused() -> None:
    class Blind(GruPolicy):
        def __init__(self) -> None:
            super().__init__(hidden=8)
            self.provides = frozenset({"logp", "entropy"})

        def evaluate(self, batch: Batch, needs) -> Signals:
            return super().evaluate(batch, needs)

    with pytest.raises(MissingSignal, match="delta needs the signal 'hidden'"):
        Run(METHOD, Blind(), ToyArith(small=True), steps=1)


def test_the_loop_trains_and_reports() -> None:
    run = assert_trains(METHOD, eos=0, horizon=4, partial=True)
    assert all(0 < record["discriminator_accuracy"] <= 1 for record in run.history)
    assert run.history[0]["largest_coefficient"] > 1
    assert_trains(METHOD.but(credit=DiscriminativeCredit(inner=GroupRelative(std=False), rounds=0)))


def test_it_trains_shared_parameters() -> None:
    task, policy = ToyArith(small=True), GruPolicy(hidden=16)
    before = policy.output.weight.detach().clone()
    train(Run(METHOD.but(reward=CoinReward(0.5)).set("select.prompts", 4), policy, task, steps=2))
    assert all(torch.isfinite(p).all() for p in policy.parameters()) and not torch.equal(before, policy.output.weight)


def test_a_stopped_run_continues_identically(tmp_path: Path) -> None:
    assert_resumes(METHOD, tmp_path)
