"""OAPL: reductions, the lagged generator, checkpoints and training."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.loops.on_policy import step, train
from anypo.methods.language.oapl import METHOD, loss, optimal_policy, v_star
from anypo.reproductions.common import train_on
from anypo.run import Run
from anypo.seams.rollout import BEHAVIOUR, LaggedRollout

GROUP = torch.tensor([0, 0, 1, 1, 1])


def random_rows(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(5, 4, generator=generator, dtype=torch.float64)
    logp = (old + 0.4 * torch.randn(5, 4, generator=generator, dtype=torch.float64)).requires_grad_()
    mask = torch.arange(4)[None] < torch.tensor([4, 2, 0, 1, 3])[:, None]
    return logp, old, mask, torch.rand(5, generator=generator, dtype=torch.float64)


def gradient(value: torch.Tensor, logp: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(value, logp)[0]


def test_temperature_goes_from_maximum_to_mean() -> None:
    reward = torch.tensor([0.0, 1.0, 0.2, 0.4, 0.9], dtype=torch.float64)
    mean = torch.tensor([0.5, 0.5, 0.5, 0.5, 0.5], dtype=torch.float64)
    torch.testing.assert_close(v_star(reward, GROUP, float("inf")), mean)
    torch.testing.assert_close(v_star(reward, GROUP, 1e7), mean, atol=1e-6, rtol=0)
    top = torch.tensor([1.0, 1.0, 0.9, 0.9, 0.9], dtype=torch.float64)
    torch.testing.assert_close(v_star(reward, GROUP, 0.0), top)
    torch.testing.assert_close(v_star(reward, GROUP, 1e-6), top, atol=1e-5, rtol=0)


def test_at_the_generator_it_is_a_policy_gradient_with_baseline() -> None:
    logp, _, mask, reward = random_rows()
    found = gradient(loss(logp, logp.detach(), mask, reward, GROUP, 0.5, 0.2).loss, logp)
    advantage = reward - v_star(reward, GROUP, 0.5)
    weight = torch.tensor([1 / 4, 1 / 4, 1 / 6, 1 / 6, 1 / 6], dtype=torch.float64)  # mean over 2 groups of the mean over members
    torch.testing.assert_close(found, -2 * 0.2 * (weight * advantage)[:, None] * mask)


def test_equal_rewards_only_pull_back() -> None:
    logp, old, mask, _ = random_rows()
    value = loss(logp, old, mask, torch.full((5,), 0.7, dtype=torch.float64), torch.zeros(5, dtype=torch.int64), 0.5, 0.2).loss
    total = torch.where(mask, logp - old, 0.0).sum(1)
    torch.testing.assert_close(value, (0.2 * total).pow(2).mean())


def test_lone_members_only_pull_back() -> None:
    logp, old, mask, reward = random_rows()
    value = loss(logp, old, mask, reward, torch.arange(5), 0.5, 0.2).loss
    torch.testing.assert_close(value, (0.2 * torch.where(mask, logp - old, 0.0).sum(1)).pow(2).mean())


def test_optimum_has_no_loss_for_any_data() -> None:
    generator = torch.Generator().manual_seed(0)
    mu = torch.full((1, 5), 0.2, dtype=torch.float64)
    reward = torch.rand(1, 5, generator=generator, dtype=torch.float64)
    best = optimal_policy(mu, reward, 0.3)
    value = loss(best.log().T, mu.log().T, torch.ones(5, 1), reward[0], torch.zeros(5, dtype=torch.int64), 0.3, 0.3).loss
    assert value < 1e-24


def test_padding_may_hold_anything_and_rewards_carry_no_gradient() -> None:
    logp, old, mask, reward = random_rows()
    filled = logp.detach().masked_fill(~mask, -math.inf).requires_grad_()
    value = loss(filled, old.masked_fill(~mask, math.nan), mask, reward.requires_grad_(), GROUP).loss
    found, none = torch.autograd.grad(value, [filled, reward], allow_unused=True)
    assert none is None and (found[~mask] == 0).all()
    torch.testing.assert_close(found, gradient(loss(logp, old, mask, reward, GROUP).loss, logp))


def test_generator_is_renewed_every_lag_steps() -> None:
    task = TokenBandit()
    policy = task.policy()
    run = Run(METHOD.set("rollout.lag", 3).set("update.learning_rate", 50.0), policy, task, steps=8)
    held = []
    for i in range(8):
        before = policy.logits.detach().clone()
        batch = step(run)
        behaviour = run.named_policy(BEHAVIOUR).logits
        held.append(int(batch.version[0]))
        assert "sampled_elsewhere" in batch.signals
        recorded = behaviour[batch.context].log_softmax(-1).gather(-1, batch.action[..., None])[..., 0]
        torch.testing.assert_close(batch.logp, recorded)
        assert torch.equal(behaviour, before) == (i % 3 == 0)
    assert held == [0, 0, 0, 3, 3, 3, 6, 6]
    assert [record["lag"] for record in run.history] == [0, 1, 2, 0, 1, 2, 0, 1]


def test_lag_counts_optimizer_steps() -> None:
    task = TokenBandit()
    run = Run(METHOD.set("rollout.lag", 4).set("update.epochs", 2), task.policy(), task, steps=4)
    assert [int(step(run).version[0]) for _ in range(4)] == [0, 0, 4, 4]


def test_lag_must_be_positive() -> None:
    task = TokenBandit()
    with pytest.raises(ValueError, match="at least 1 optimizer step"):
        train_on(METHOD.but(rollout=LaggedRollout(lag=0)), task.policy(), task, steps=1)


def test_resume_continues_identically(tmp_path: Path) -> None:
    def fresh(steps: int, out: Path | None) -> Run:
        task = TokenBandit()
        method = METHOD.set("update.learning_rate", 50.0).set("rollout.lag", 3)
        return Run(method, task.policy(), task, steps=steps, seed=3, out=out, checkpoint_every=2)

    whole = train(fresh(4, None))
    train(fresh(2, tmp_path))
    continued = fresh(4, tmp_path)
    assert continued.resume()
    train(continued)
    torch.testing.assert_close(continued.policy.logits, whole.policy.logits, rtol=0, atol=0)
    torch.testing.assert_close(continued.named_policy(BEHAVIOUR).logits, whole.named_policy(BEHAVIOUR).logits, rtol=0, atol=0)


def test_trains() -> None:
    task = TokenBandit()
    method = METHOD.set("update.learning_rate", 40.0).set("update.max_grad_norm", None).set("rollout.lag", 2)
    curve = train_on(method, task.policy(), task, steps=5)
    assert all(math.isfinite(x) for x in curve) and curve[-1] > 1 / 16
