"""A*-PO: reductions, stage 1, prompts without a value, checkpoints and training."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.loops.on_policy import train
from anypo.methods.language.a_star_po import KEEP, METHOD, VALUES, ReferenceValues, loss, optimal_policy, v_star
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.reproductions.common import train_on
from anypo.run import Run


def random_rows(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    reference = -3 * torch.rand(5, 4, generator=generator, dtype=torch.float64)
    logp = (reference + 0.4 * torch.randn(5, 4, generator=generator, dtype=torch.float64)).requires_grad_()
    mask = torch.arange(4)[None] < torch.tensor([4, 2, 0, 1, 3])[:, None]
    return logp, reference, mask, torch.rand(5, generator=generator, dtype=torch.float64)


def test_temperature_goes_from_maximum_to_mean() -> None:
    reward = torch.rand(7, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(v_star(reward, 1e-5).v_star, reward.max(1).values, atol=1e-4, rtol=0)
    torch.testing.assert_close(v_star(reward, 1e7).v_star, reward.mean(1), atol=1e-6, rtol=0)
    torch.testing.assert_close(v_star(reward, 0.0).v_star, reward.mean(1))


@settings(max_examples=40, deadline=None)
@given(st.floats(-50, 50), st.integers(1, 9), st.floats(0.01, 100))
def test_equal_rewards_are_their_own_value(reward: float, samples: int, beta1: float) -> None:
    found = v_star(torch.full((2, samples), reward, dtype=torch.float64), beta1).v_star
    torch.testing.assert_close(found, torch.full((2,), reward, dtype=torch.float64))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.01, 10))
def test_value_is_between_mean_and_maximum(seed: int, beta1: float) -> None:
    reward = torch.randn(3, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = v_star(reward, beta1).v_star
    assert (found >= reward.mean(1) - 1e-12).all() and (found <= reward.max(1).values + 1e-12).all()


def test_one_sample_is_its_own_value() -> None:
    reward = torch.tensor([[0.3], [-2.0]], dtype=torch.float64)
    torch.testing.assert_close(v_star(reward, 0.5).v_star, reward[:, 0])


def test_at_the_reference_it_is_a_policy_gradient() -> None:
    logp, _, mask, reward = random_rows()
    values = torch.full((5,), 0.4, dtype=torch.float64)
    found = loss(logp, logp.detach(), mask, reward, values, 0.05)
    torch.testing.assert_close(found.loss.detach(), ((reward - values) ** 2).mean())
    gradient = torch.autograd.grad(found.loss, logp)[0]
    torch.testing.assert_close(gradient, -2 * 0.05 * (reward - values)[:, None] * mask / 5)


def test_loss_is_zero_at_the_optimum_and_only_there() -> None:
    generator = torch.Generator().manual_seed(0)
    reference = torch.rand(6, generator=generator, dtype=torch.float64).softmax(0)
    reward, beta = torch.rand(6, generator=generator, dtype=torch.float64), 0.3
    best = optimal_policy(reference, reward, beta)
    mask, values = torch.ones(6, 1), best.v_star.expand(6)
    at_optimum = loss(best.prob.log()[:, None], reference.log()[:, None], mask, reward, values, beta).loss
    assert at_optimum < 1e-24
    assert loss(reference.log()[:, None], reference.log()[:, None], mask, reward, values, beta).loss > 1e-3
    torch.testing.assert_close(best.objective, best.v_star)


def test_padding_may_hold_anything_and_advantages_carry_no_gradient() -> None:
    logp, reference, mask, reward = random_rows()
    values = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    filled = logp.detach().masked_fill(~mask, -math.inf).requires_grad_()
    value = loss(filled, reference.masked_fill(~mask, math.nan), mask, reward, values, 0.5).loss
    found, none = torch.autograd.grad(value, [filled, values], allow_unused=True)
    assert none is None and (found[~mask] == 0).all() and torch.isfinite(found).all() and torch.isfinite(value)


def test_stage_one_runs_once_before_training_under_the_reference() -> None:
    task = TokenBandit()
    policy = task.policy()
    run = Run(METHOD.set("prepare.0.samples", 5), policy, task, steps=3)
    before = policy.logits.detach().clone()
    method = run.begin_step()
    assert len(run.state[VALUES]) == 16 and run.actions == 16 * 5 * 2 and run.version == 0
    torch.testing.assert_close(run.named_policy("reference").logits, before)
    first = dict(run.state[VALUES])
    train(run)
    assert run.state[VALUES] == first and method.name == "a_star_po"
    assert run.actions == 16 * 5 * 2 + 3 * 16 * 2 and not torch.equal(policy.logits, before)


def test_new_prompts_are_valued_when_they_appear() -> None:
    task = TokenBandit(prompts_per_step=4)
    run = Run(METHOD, task.policy(), task, steps=6)
    train(run)
    assert 4 < len(run.state[VALUES]) <= 16 and run.state[KEEP].keys() == run.state[VALUES].keys()


def test_unsolved_prompts_can_be_dropped() -> None:
    task = TokenBandit()
    run = Run(METHOD.set("select.drop_unsolved", True), task.policy(), task, steps=1)
    method = run.begin_step()
    kept = {p.id for p in method.select(task, run)}
    assert kept == {p for p, keep in run.state[KEEP].items() if keep} and 0 < len(kept) < 16


def test_values_are_asked_for_clearly() -> None:
    task = TokenBandit()
    with pytest.raises(ValueError, match="keep ReferenceValues"):
        train_on(METHOD.but(prepare=()), task.policy(), task, steps=1)
    with pytest.raises(ValueError, match="no optimal value is known for prompt 0"):
        train_on(GRPO.but(credit=METHOD.credit), task.policy(), task, steps=1)


def test_resume_continues_identically(tmp_path: Path) -> None:
    def fresh(steps: int, out: Path | None) -> Run:
        task = TokenBandit(prompts_per_step=4)
        return Run(METHOD.set("update.learning_rate", 50.0), task.policy(), task, steps=steps, seed=3, out=out, checkpoint_every=2)

    whole = train(fresh(4, None))
    train(fresh(2, tmp_path))
    continued = fresh(4, tmp_path)
    assert continued.resume()
    train(continued)
    torch.testing.assert_close(continued.policy.logits, whole.policy.logits, rtol=0, atol=0)
    assert continued.state[VALUES] == whole.state[VALUES]


def test_trains() -> None:
    task = TokenBandit()
    method = METHOD.set("objective.beta", 0.05).set("update.learning_rate", 160.0).set("update.max_grad_norm", None)
    curve = train_on(method, task.policy(), task, steps=5)
    assert all(math.isfinite(x) for x in curve) and curve[-1] > 1 / 16


def test_samples_and_temperature_are_the_prepare_component_s() -> None:
    assert METHOD.set("prepare.0.samples", 32).prepare[0] == ReferenceValues(samples=32)
