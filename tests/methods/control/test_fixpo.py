"""FixPO: limits of its loss and coefficient, the guarantee of the fixup and of its safety net, and the method in the loop."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from anypo.domains.control.setup import build
from anypo.loops.on_policy import step, train
from anypo.method import Method
from anypo.methods.control.fixpo import METHOD, beta_step, fixup_mask, interpolation, primary_loss
from anypo.methods.control.ppo import kl_penalty_loss
from anypo.run import Run
from tests.helpers import gradient, random_rows

SMALL = METHOD.set("update.epochs", 2).set("update.minibatches", 4).set("update.learning_rate", 3e-3)


def small_run(method: Method, steps: int = 3, out: Path | None = None, env: str = "CartPole-v1") -> Run:
    policy, task = build(env, None, seed=0, envs=4, horizon=32, hidden=(16, 16))
    run = Run(method, policy, task, steps=steps, seed=0, out=out, checkpoint_every=2)
    if out is not None:
        run.resume()
    return run


def weights(run: Run) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in run.policy.parameters()])


def test_the_loss_is_ppos_fixed_kl_variant_and_without_beta_the_policy_gradient() -> None:
    rows = random_rows(0, spread=0.6)
    a, kl = torch.randn_like(rows.logp), torch.rand_like(rows.logp)
    for beta in (0.0, 0.7):
        logp, other = rows.logp.clone().requires_grad_(), rows.logp.clone().requires_grad_()
        mine, theirs = (
            primary_loss(logp, rows.old_logp, a, kl, rows.mask, beta),
            kl_penalty_loss(other, rows.old_logp, a, kl, rows.mask, beta),
        )
        torch.testing.assert_close(mine.loss, theirs)
        torch.testing.assert_close(gradient(mine, logp), gradient(theirs, other))


def test_masked_states_and_numbers_that_are_none() -> None:
    nan, kl, mask = math.nan, torch.tensor([[0.1, math.nan]]), torch.tensor([[True, False]])
    assert beta_step(kl, mask, 1.0, 0.2, 2.0, 0.1).d_max == pytest.approx(0.1)
    assert fixup_mask(kl, mask, 0.2).done and fixup_mask(kl, mask, 0.2).loss.tolist() == [0.0]
    assert not fixup_mask(torch.tensor([[0.1, nan]]), torch.ones(1, 2, dtype=torch.bool), 0.2).done
    assert beta_step(torch.tensor([[nan]]), torch.tensor([[True]]), 1.0, 0.2, 2.0, 0.1).beta > 1
    nothing = torch.zeros(1, 2, dtype=torch.bool)
    assert beta_step(kl, nothing, 1.0, 0.2, 2.0, 0.1).d_max == 0 and fixup_mask(kl, nothing, 0.2).done


def test_an_infinite_region_lets_beta_fall_to_zero_and_no_slack_too() -> None:
    assert beta_step(torch.tensor([[5.0]]), torch.tensor([[True]]), 1.0, math.inf, 2.0, 0.01).beta == 0
    run = small_run(SMALL.set("update.eps", math.inf).set("update.lr_beta", 0.2))
    train(run)
    assert run.state["fixpo"]["beta"] == 0 and all(r["fixup_steps"] == 0 for r in run.history)
    beta = 1.0
    for _ in range(6):
        beta, before = beta_step(torch.tensor([[5.0]]), torch.tensor([[True]]), beta, 0.2, 0.0, 1.0).beta, beta
        assert beta == pytest.approx(max(0.0, before - 0.2))


def test_without_violations_it_is_the_penalty_method() -> None:
    with_fixup, without = (small_run(SMALL.set("update.eps", 50.0).set("update.fixup", how)) for how in ("epoch", "off"))
    train(with_fixup), train(without)
    assert torch.equal(weights(with_fixup), weights(without))


def test_interpolation_takes_the_first_point_inside() -> None:
    assert interpolation([[1.0, 0.5], [0.5, 0.3]], 0.1) == 0
    assert interpolation([[1.0, math.nan], [0.5, 0.05]], 0.1) == 0.5


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
@pytest.mark.parametrize("passes", [50, 1])
def test_no_state_leaves_the_region(env: str, passes: int) -> None:
    """With one pass the safety net has to end what the fixup cannot."""
    run = small_run(SMALL.set("update.learning_rate", 2e-2).set("update.eps", 0.02).set("update.max_fix", passes), env=env)
    for _ in range(3):
        batch = step(run)
        assert run.policy.observe(batch, {"kl_old"}).kl_old.max() <= 0.02 * (1 + 1e-6)
    assert sum(r["fixup_steps"] for r in run.history) > 0
    assert any(r["interpolation"] < 1 for r in run.history) or passes > 1


def test_the_fixup_leaves_the_critic_alone() -> None:
    run = small_run(SMALL.set("update.learning_rate", 2e-2))
    batch = step(run)
    before = [p.clone() for p in run.policy.critic_network.parameters()]
    run.method.update.eps = 1e-6
    assert run.method.update.fix(batch, run.optimizer(run.method.update.build), run) > 0
    assert all(torch.equal(a, b) for a, b in zip(before, run.policy.critic_network.parameters(), strict=True))


def test_a_stopped_run_continues_identically(tmp_path: Path) -> None:
    whole = train(small_run(SMALL, 4, tmp_path / "whole"))
    train(small_run(SMALL, 2, tmp_path / "halves"))
    halves = train(small_run(SMALL, 4, tmp_path / "halves"))
    assert torch.equal(weights(whole), weights(halves)) and whole.state == halves.state


def test_an_unknown_place_for_the_fixup_is_refused() -> None:
    with pytest.raises(ValueError, match="epoch, last or off"):
        train(small_run(SMALL.set("update.fixup", "never")))
