"""Flash-GRPO: what it reduces to, its pitfalls, and that it trains, resumes and refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from anypo.domains.diffusion import builtin
from anypo.domains.diffusion.denoise import ode_schedule, sde_schedule, uniform_levels
from anypo.domains.diffusion.tasks import Digits, Gaussians
from anypo.loops.on_policy import step, train
from anypo.methods.diffusion import flow_grpo
from anypo.methods.diffusion.flash_grpo import (
    METHOD,
    RectifiedStepClip,
    advantages,
    loss,
    one_noisy_step,
    rectification,
    rectify,
    scales,
)
from anypo.run import Run
from tests.helpers import assert_continues

QUICK = {"evaluation_steps": 4, "evaluation_samples": 20}


def gaussians(method: Any = METHOD, steps: int = 3, **options: Any) -> Run:
    return Run(method.set("select.prompts", 4), builtin.flow("gaussians"), Gaussians(0, **QUICK), steps=steps, seed=0, **options)


def rolled(method: Any = METHOD) -> Any:
    run = gaussians(method)
    return run, run.method.rollout(run.method.select(run.task, run), run)


def test_one_step_is_flow_grpo_with_one_step() -> None:
    level = uniform_levels(1)
    k = torch.zeros(3, dtype=torch.int64)
    mine, theirs = one_noisy_step(level, scales(level, "flow_grpo"), k), sde_schedule(level, 0.7)
    for a, b in zip(mine[1:], theirs[1:], strict=True):
        torch.testing.assert_close(a, b.expand(3, 1))
    torch.testing.assert_close(rectify(k, level, "flow_grpo").lamhat, torch.ones(3, dtype=torch.float64))


def test_rectification_cancels_when_all_share_the_step() -> None:
    generator, level = torch.Generator().manual_seed(0), uniform_levels(20)
    logp, old, adv = (torch.randn(6, generator=generator, dtype=torch.float64) * 0.2 for _ in range(3))
    lamhat = rectify(torch.full((6,), 4), level).lamhat
    mask = torch.ones(6, 1, dtype=torch.bool)
    torch.testing.assert_close(loss(logp, old, adv, lamhat, 0.05), flow_grpo.loss(logp[:, None], old[:, None], mask, adv, 0.05))


def test_the_factor_of_stored_steps_is_that_of_the_grid() -> None:
    level, k = uniform_levels(20), torch.tensor([0, 3, 9, 3])
    for noise in ("linear", "flow_grpo"):
        schedule = one_noisy_step(level, scales(level, noise), k)
        constants = torch.stack(schedule[1:], dim=-1)
        found = rectification(constants, constants[..., 2] > 0)
        torch.testing.assert_close(found.gather(1, k[:, None])[:, 0], rectify(k, level, noise).lamhat)
        assert int((found > 0).sum()) == 4
        assert bool((rectification(constants, torch.zeros_like(found, dtype=torch.bool)) == 0).all())


def test_without_rectification_it_is_the_plain_clipped_step() -> None:
    run, batch = rolled(METHOD.set("rollout.shared", False))
    batch.advantage = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(1)) * batch.mask
    new = type(run.policy.observe(batch, {"logp"}))({"logp": batch.logp + 0.01 * batch.mask})
    plain = flow_grpo.StepClip(clip=1e-3, reduce="mean")(batch, new, run).value
    torch.testing.assert_close(RectifiedStepClip(rectify=False)(batch, new, run).value, plain)
    assert float((RectifiedStepClip()(batch, new, run).value - plain).abs()) > 1e-4


def test_a_chain_follows_the_ode_but_for_one_step_that_its_group_shares() -> None:
    run, batch = rolled()
    assert batch.mask.sum(1).tolist() == [1] * 64 and bool((batch.mask.float().argmax(1) < 10).all())
    for group in range(4):
        rows = batch.group == group
        assert len(batch.mask[rows].unique(dim=0)) == 1
        assert len(batch.context[rows, 0].unique(dim=0)) == 1 and len(batch.action[rows, -1].unique(dim=0)) == 16
    plain = ode_schedule(uniform_levels(20))
    velocity = run.policy.observe(batch, {"velocity"})["velocity"]
    following = batch.context + velocity * plain.pull.float()[None, :, None]
    torch.testing.assert_close(batch.action[~batch.mask], following[~batch.mask])
    apart = rolled(METHOD.set("rollout.shared", False).set("rollout.shared_start", False))[1]
    assert len(apart.mask[:16].unique(dim=0)) > 1 and len(apart.context[:16, 0].unique(dim=0)) == 16


def test_groups_without_spread_and_lone_members_are_dropped() -> None:
    reward, group = torch.tensor([2.0, 2.0, 5.0, 1.0, 3.0]), torch.tensor([0, 0, 1, 2, 2])
    for global_std in (True, False):
        found = advantages(reward, group, global_std)
        assert found.keep.tolist() == [False] * 3 + [True] * 2 and bool(found.adv.isfinite().all())


def test_equal_rewards_leave_the_policy_alone() -> None:
    run = gaussians()
    run.task.reward = lambda x, prompt: torch.ones(len(x))
    before = [p.clone() for p in run.policy.parameters()]
    step(run)
    assert run.history[-1]["kept"] == 0
    assert all(torch.equal(a, b) for a, b in zip(before, run.policy.parameters(), strict=True))


def test_no_gradient_flows_through_advantage_or_factor() -> None:
    logp = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    lamhat = rectify(torch.tensor([0, 1, 2]), uniform_levels(20)).lamhat
    (gradient,) = torch.autograd.grad(loss(logp, logp.detach(), torch.tensor([1.0, -2.0, 3.0]), lamhat, 0.2), logp)
    torch.testing.assert_close(gradient, -lamhat * torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64) / 3)


def test_it_trains_on_digits() -> None:
    run = Run(METHOD.set("update.epochs", 4), builtin.flow("digits"), Digits("ink", **QUICK), steps=8, seed=0)
    train(run)
    assert run.history[-1]["reward"] > run.history[0]["reward"] + 0.01
    assert all(torch.isfinite(torch.tensor([r["loss"], r["grad_norm"], r["kept"]])).all() for r in run.history)


def test_a_resumed_run_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    def run_to(out: Path, upto: int) -> Run:
        run = gaussians(METHOD.set("update.minibatches", 2), steps=4, out=out, checkpoint_every=2)
        run.resume()
        while run.step < upto:
            step(run)
        return run

    assert_continues(run_to, tmp_path)


def test_bad_settings_are_refused() -> None:
    for path, value, message in (
        ("rollout.noise", "pink", "linear or flow_grpo"),
        ("rollout.trainable", 0.0, "share of the steps"),
        ("rollout.steps", 1, "without noise"),
    ):
        with pytest.raises(ValueError, match=message):
            rolled(METHOD.set(path, value))
    with pytest.raises(ValueError, match="several attempts"):
        step(gaussians(METHOD.set("select.group_size", 1)))
