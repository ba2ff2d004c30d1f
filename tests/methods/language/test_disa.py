"""DISA: the estimate's exact cases, reductions of the loss, what carries a gradient, freezing, the regressor, and the component in the loop."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anypo.domains.language.toys.gru_policy import GruPolicy
from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.domains.language.toys.toy_arith import ToyArith
from anypo.loops.on_policy import step, train
from anypo.methods.language.dapo import METHOD as DAPO
from anypo.methods.language.disa import (
    FROZEN,
    HEAD,
    METHOD,
    AnchoredPrompts,
    OfflinePartition,
    PartitionAdvantage,
    TrajectoryBalance,
    log_z,
    loss,
    regressor,
    residual,
    ridge,
    staleness,
)
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.run import Run
from anypo.seams.regression import AdvantageRegression
from tests.helpers import assert_resumes, assert_trains, random_rows, trained

TOY = METHOD.but(objective=TrajectoryBalance(length_norm=False), prepare=(OfflinePartition(samples=16),))


def target(seed: int = 0, beta: float = 3.0) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of a reference over 7 responses, their rewards, and log pi* of the same."""
    g = torch.Generator().manual_seed(seed)
    reference = torch.randn(7, generator=g, dtype=torch.float64).log_softmax(0)
    reward = torch.rand(7, generator=g, dtype=torch.float64)
    return reference, reward, (reference + beta * reward).log_softmax(0)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), beta=st.floats(0, 20))
def test_exact_cases_of_the_estimate(seed: int, beta: float) -> None:
    reference, reward, best = target(seed, beta)
    exact = (reference + beta * reward).logsumexp(0)
    perfect = log_z(reference, best, reward, beta)  # the target as the proposal: every weight is Z
    torch.testing.assert_close(perfect.log_z, exact, atol=1e-9, rtol=0)
    torch.testing.assert_close(perfect.ess, torch.tensor(7.0, dtype=torch.float64))
    uniform = log_z(reference, torch.full_like(reference, -math.log(7)), reward, beta)  # each response once
    torch.testing.assert_close(uniform.log_z, exact, atol=1e-9, rtol=0)
    assert 1 - 1e-9 <= float(uniform.ess) <= 7 + 1e-9
    assert abs(float(log_z(reference, reference, reward, 0.0).log_z)) < 1e-12
    assert log_z(reference, reference - 9, reward, beta, truncate=0.0).log_z == log_z(reference, reference, reward, beta).log_z


def test_prompts_are_estimated_side_by_side() -> None:
    r = random_rows(0, rows=4)
    both = log_z(r.logp, r.ref_logp, r.old_logp, 2.0)
    for i in range(4):
        alone = log_z(r.logp[i], r.ref_logp[i], r.old_logp[i], 2.0)
        torch.testing.assert_close((both.log_z[i], both.ess[i]), (alone.log_z, alone.ess))


def test_ridge_recovers_a_linear_log_z() -> None:
    g = torch.Generator().manual_seed(0)
    features, slope = torch.randn(20, 3, generator=g), torch.tensor([0.5, -2.0, 1.0], dtype=torch.float64)
    z, weights = features.double() @ slope, torch.rand(20, generator=g)
    torch.testing.assert_close(ridge(features, z, weights, 1e-9), slope, atol=1e-6, rtol=0)
    torch.testing.assert_close(regressor(features, z, torch.zeros(20)), torch.zeros(20, dtype=torch.float64))


def test_loss_is_zero_at_the_target_and_only_there() -> None:
    reference, reward, best = target()
    mask, exact = torch.ones(7, 1), (reference + 3 * reward).logsumexp(0).expand(7)
    for length_norm in (True, False):
        at_target = loss(best[:, None], reference[:, None], best[:, None], mask, reward, exact, 3.0, length_norm=length_norm).loss
        assert at_target < 1e-24
    assert loss(reference[:, None], reference[:, None], reference[:, None], mask, reward, exact, 3.0).loss > 1e-2


def test_padding_may_hold_anything_and_log_z_carries_no_gradient() -> None:
    r = random_rows(1)
    z = torch.zeros(8, dtype=torch.float64, requires_grad=True)
    filled = r.logp.masked_fill(~r.mask, -math.inf).requires_grad_()
    value = loss(filled, r.ref_logp.masked_fill(~r.mask, math.nan), r.old_logp, r.mask, r.reward, z, length_norm=True).loss
    found, none = torch.autograd.grad(value, [filled, z], allow_unused=True)
    assert none is None and found[~r.mask].eq(0).all() and torch.isfinite(found).all()
    d = residual(r.logp, r.ref_logp, r.mask, 5.0 * r.reward, True)
    weight = staleness(r.logp, r.old_logp, r.mask, 0.2)
    expected = (2 * weight * d / r.mask.sum(1) / 8)[:, None] * r.mask
    torch.testing.assert_close(found, expected)


def test_stale_weights_are_bounded_and_1_on_policy() -> None:
    r = random_rows(2, spread=2.0)
    weight = staleness(r.logp.requires_grad_(), r.old_logp, r.mask, 0.2)
    assert weight.min() >= 0.8 and weight.max() <= 1.2 and weight.std() > 0 and not weight.requires_grad
    assert staleness(r.old_logp, r.old_logp, r.mask, 0.2).eq(1).all()
    empty = torch.zeros_like(r.mask)
    assert staleness(r.logp, r.old_logp, empty, 0.2).eq(1).all() and residual(r.logp, r.ref_logp, empty, r.reward, True).eq(-r.reward).all()


def test_on_policy_without_length_normalization_it_is_advantage_regression() -> None:
    regression = TOY.but(objective=AdvantageRegression(beta=1.0, anchor="ref"))
    torch.testing.assert_close(trained(TOY, 4).policy.logits, trained(regression, 4).policy.logits, rtol=0, atol=1e-12)


def test_the_estimate_is_frozen_and_made_under_the_reference() -> None:
    task = TokenBandit(prompts=4)
    policy = task.policy(scale=0.1)
    run = Run(TOY, policy, task, steps=5)
    step(run)
    first = dict(run.state[FROZEN])
    assert set(first) == {0, 1, 2, 3} and run.actions == 4 * (16 + 8) * 2
    train(run)
    assert run.state[FROZEN] == first
    torch.testing.assert_close(run.named_policy("reference").logits, task.policy(scale=0.1).logits)
    assert {"partition_ess", "partition_error", "offline_actions"} <= run.history[0].keys()


@pytest.mark.parametrize("temperatures", [(1.0,), (1.0, 1e6), (2.0,)])
def test_any_proposal_estimates_the_same_log_z(temperatures: tuple[float, ...]) -> None:
    task = TokenBandit(prompts=3)
    run = Run(TOY.but(prepare=OfflinePartition(beta=2.0, samples=4000, temperatures=temperatures)), task.policy(scale=1.0), task, steps=1)
    run.begin_step()
    policy = run.named_policy("reference")
    for p in range(3):
        hit = float(policy.string_logp(p, task.targets[p]).exp())
        assert abs(run.state[FROZEN][p] - math.log(1 - hit + hit * math.exp(2))) < 0.1


def test_new_prompts_are_estimated_when_they_appear() -> None:
    task = TokenBandit(prompts_per_step=4)
    run = train(Run(TOY, task.policy(), task, steps=6))
    assert 4 < len(run.state[FROZEN]) <= 16


def test_a_regressor_predicts_prompts_never_sampled() -> None:
    method = TOY.but(prepare=OfflinePartition(samples=8, table=False, prompts=6))
    task = ToyArith(small=True)
    run = Run(method.set("select.prompts", 5), GruPolicy(hidden=8, seed=1), task, steps=3)
    train(run)
    assert run.state[HEAD].shape == (9,) and len(run.state[FROZEN]) > 6
    assert all(math.isfinite(z) for z in run.state[FROZEN].values())
    offline = run.history[0]["offline_actions"]
    assert offline > 0 and all("offline_actions" not in record for record in run.history[1:])
    assert_trains(TOY.but(prepare=OfflinePartition(samples=8, table=False)))


def test_it_says_what_it_lacks() -> None:
    with pytest.raises(ValueError, match="keep OfflinePartition"):
        trained(METHOD.but(prepare=()), 1)
    with pytest.raises(ValueError, match="keep OfflinePartition"):
        trained(GRPO.but(credit=PartitionAdvantage()), 1)
    with pytest.raises(ValueError, match="multiple of the number of temperatures"):
        trained(METHOD.but(prepare=OfflinePartition(samples=9, temperatures=(1.0, 2.0))), 1)
    with pytest.raises(ValueError, match="keep disa's select"):
        trained(METHOD.but(select=GRPO.select, prepare=OfflinePartition(prompts=1)), 1, prompts=5, prompts_per_step=4)


def test_it_trains_alone_with_stale_rows_and_with_others() -> None:
    assert_trains(METHOD)
    assert_trains(TOY.set("update.epochs", 2).set("update.minibatches", 2), eos=0, horizon=4)
    assert_trains(DAPO.but(objective=TrajectoryBalance()))
    assert_trains(DAPO.but(select=AnchoredPrompts(), prepare=OfflinePartition(), credit=PartitionAdvantage()))


def test_several_rewards_are_weighted() -> None:
    def two(prompt: Tensor, action: Tensor, mask: Tensor) -> Tensor:
        return torch.stack([(action[:, 0] == 1).double(), (action[:, 1] == 2).double()], dim=1)

    weights = (1.0, 0.0)
    method = TOY.but(prepare=OfflinePartition(samples=8, weights=weights), credit=PartitionAdvantage(weights))
    assert_trains(method, reward=two, objectives=("correct", "format"))


def test_a_stopped_run_continues_identically(tmp_path: Path) -> None:
    assert_resumes(TOY, tmp_path, prompts_per_step=2)
    assert_resumes(TOY.but(prepare=OfflinePartition(samples=8, table=False)), tmp_path / "head", prompts_per_step=2)
