"""Flow-GRPO and DDPO: what they reduce to, their pitfalls, and that they train, resume and refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from anypo.domains.diffusion import builtin
from anypo.domains.diffusion.tasks import Digits, Gaussians
from anypo.loops.on_policy import step, train
from anypo.methods.diffusion import flow_grpo
from anypo.methods.diffusion.flow_grpo import DDPO, METHOD, DenoisingRollout, PromptStandardized, StepClip, StepKL, advantages, loss
from anypo.methods.language import grpo
from anypo.run import Run
from anypo.seams.regularize import KLPenalty
from tests.helpers import random_rows

QUICK = {"evaluation_steps": 4, "evaluation_samples": 20}
NO_KL = METHOD.set("regularize.0.beta", 0.0)


def digits(method: Any = METHOD, steps: int = 3, **options: Any) -> Run:
    return Run(method, builtin.flow("digits"), Digits("ink", **QUICK), steps=steps, seed=0, **options)


def test_one_group_without_kl_is_grpo_with_t_actions() -> None:
    rows = random_rows(0)
    group = torch.zeros(len(rows.reward), dtype=torch.int64)
    found = advantages(rows.reward, group, adv_clip=1e9, eps=1e-6)
    torch.testing.assert_close(found, grpo.advantages(rows.reward, group))
    theirs = grpo.loss(rows.logp, rows.old_logp, rows.ref_logp, rows.mask, found, beta=0.0, agg="token_mean").loss
    torch.testing.assert_close(loss(rows.logp, rows.old_logp, rows.mask, found, 0.2), theirs)


def test_at_the_old_weights_the_loss_is_minus_the_mean_advantage_and_the_gradient_the_policy_gradient() -> None:
    rows = random_rows(1, ragged=False)
    logp = rows.old_logp.clone().requires_grad_()
    value = loss(logp, rows.old_logp, rows.mask, rows.advantages, 0.2)
    torch.testing.assert_close(value, -rows.advantages.mean())
    (gradient,) = torch.autograd.grad(value, logp)
    torch.testing.assert_close(gradient, (-rows.advantages[:, None] / rows.mask.numel()).expand_as(logp))
    whole = advantages(rows.reward, rows.group, eps=0.0)
    torch.testing.assert_close(
        loss(rows.old_logp, rows.old_logp, rows.mask, whole, 0.2), torch.zeros((), dtype=torch.float64), atol=1e-12, rtol=0
    )


def test_the_score_function_form_has_the_same_first_gradient() -> None:
    rows = random_rows(2)
    first, second = (rows.old_logp.clone().requires_grad_() for _ in range(2))
    (a,) = torch.autograd.grad(loss(first, rows.old_logp, rows.mask, rows.advantages, 1e-4), first)
    (b,) = torch.autograd.grad(flow_grpo.score_function_loss(second, rows.mask, rows.advantages), second)
    torch.testing.assert_close(a, b)


def test_advantages_of_constant_groups_and_lone_members_are_zero() -> None:
    reward = torch.tensor([2.0, 2.0, 5.0, 1.0, 3.0])
    group = torch.tensor([0, 0, 1, 2, 2])
    for std in ("group", "batch"):
        found = advantages(reward, group, std=std)
        assert found[:3].tolist() == [0, 0, 0] and bool(found.isfinite().all())
    assert bool((advantages(100 * reward, group, adv_clip=0.5).abs() <= 0.5).all())
    with pytest.raises(ValueError, match="'group' or 'batch'"):
        advantages(reward, group, std="all")


def test_padding_may_hold_anything() -> None:
    rows = random_rows(3)
    expected = loss(rows.logp, rows.old_logp, rows.mask, rows.advantages, 0.2)
    logp = torch.where(rows.mask, rows.logp, torch.nan).requires_grad_()
    found = loss(logp, torch.where(rows.mask, rows.old_logp, -torch.inf), rows.mask, rows.advantages, 0.2)
    torch.testing.assert_close(found, expected)
    assert bool(torch.autograd.grad(found, logp)[0].isfinite().all())
    nothing = torch.zeros_like(rows.mask)
    assert float(loss(rows.logp, rows.old_logp, nothing, rows.advantages, 0.2)) == 0


def test_the_general_kl_is_the_papers_when_the_deviations_are_equal() -> None:
    g = torch.Generator().manual_seed(0)
    mean, ref, log_std = (torch.randn(4, 5, 3, generator=g, dtype=torch.float64) for _ in range(3))
    torch.testing.assert_close(flow_grpo.gaussian_kl(mean, log_std, ref, log_std), ((mean - ref) ** 2 / (2 * (2 * log_std).exp())).sum(-1))
    torch.testing.assert_close(
        flow_grpo.gaussian_kl(mean, log_std, ref, 0.5 * log_std),
        torch.distributions.kl_divergence(
            torch.distributions.Normal(mean, log_std.exp()), torch.distributions.Normal(ref, (0.5 * log_std).exp())
        ).sum(-1),
    )


def test_the_estimated_kl_agrees_with_the_closed_form_on_average() -> None:
    """Many samples of one step near the reference: the mean of the k3 estimate is the exact KL."""
    run = Run(METHOD, builtin.flow("gaussians"), Gaussians(0, **QUICK), steps=1)
    run.named_policy("reference")
    with torch.no_grad():
        run.policy.network.layers[-1].bias.add_(0.05)
    batch = METHOD.fresh().rollout([p.but(samples=1000) for p in run.task.prompts(2, run.rng)], run)
    run.prepare_signals(batch, {"ref_mean", "ref_log_std", "ref_logp"})
    new = run.policy.observe(batch, {"mean", "log_std", "logp"})
    batch.advantage = torch.zeros_like(batch.logp)
    exact = float(StepKL(1.0)(batch, new, run).value)
    assert exact > 1e-4
    assert abs(float(KLPenalty(1.0, aggregation="token_mean")(batch, new, run).value) / exact - 1) < 0.1


def test_mean_and_sum_differ_by_the_dimension_alone() -> None:
    run = digits()
    batch = step(run)
    new = run.policy.observe(batch, {"logp", "mean", "log_std"})
    run.prepare_signals(batch, {"ref_mean", "ref_log_std"})
    divided = new | {"logp": batch.logp + (new.logp - batch.logp) / 64}
    first = StepClip(clip=0.01, reduce="mean")(batch, new, run).value
    torch.testing.assert_close(first, StepClip(clip=0.01, reduce="sum")(batch, type(new)(divided), run).value, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(StepKL(1.0, "mean")(batch, new, run).value * 64, StepKL(1.0, "sum")(batch, new, run).value)
    with pytest.raises(ValueError, match="use sum or mean"):
        StepClip(reduce="max")(batch, new, run)


def test_no_gradient_flows_through_the_next_point_or_the_advantage() -> None:
    run = digits()
    batch = run.method.rollout([p.but(samples=2) for p in run.task.prompts(2, run.rng)], run)
    batch.action.requires_grad_()
    run.policy.evaluate(batch, {"logp"}).logp.sum().backward()
    assert batch.action.grad is None
    batch.reward = torch.rand(4, requires_grad=True)
    assert not METHOD.credit(batch.but(reward=batch.reward.detach()), run).requires_grad


def test_it_trains_on_digits() -> None:
    run = digits(steps=4)
    train(run)
    assert run.history[-1]["reward"] > run.history[0]["reward"] + 0.05
    assert all(torch.isfinite(torch.tensor([r["loss"], r["kl"], r["grad_norm"]])).all() for r in run.history)


@pytest.mark.parametrize(
    "method",
    [
        DDPO,
        DDPO.but(objective=flow_grpo.ScoreFunction()).set("update.epochs", 1),
        METHOD.set("credit.std", "batch").set("objective.reduce", "mean").set("objective.clip", 1e-3),
        METHOD.set("rollout.trained", 0.5).set("update.minibatches", 2),
    ],
    ids=["ddpo", "ddpo score function", "mean reduction", "half of the steps"],
)
def test_variants_train(method: Any) -> None:
    run = digits(method, steps=4)
    train(run)
    assert run.history[-1]["reward"] > run.history[0]["reward"] - 0.005
    assert all(torch.isfinite(torch.tensor(r["loss"])) for r in run.history)


def test_a_share_of_the_steps_is_trained() -> None:
    run = digits(METHOD.set("rollout.trained", 0.3))
    batch = run.method.rollout([p.but(samples=4) for p in run.task.prompts(5, run.rng)], run)
    assert batch.keep is not None and batch.keep.sum(1).tolist() == [3] * 20
    assert len({tuple(row) for row in batch.keep.tolist()}) > 5


def test_rewards_are_standardized_by_prompt_once_there_are_enough() -> None:
    credit = PromptStandardized(size=4, min_count=3)
    run = digits(DDPO)
    batch = run.method.rollout([p.but(samples=2) for p in run.task.prompts(2, run.rng)], run)
    batch.signals["prompt_id"] = torch.tensor([0, 0, 1, 1])
    batch.reward = torch.tensor([1.0, 2.0, 10.0, 30.0])
    first = credit(batch, run)[:, 0]
    torch.testing.assert_close(first, ((batch.reward - batch.reward.mean()) / batch.reward.std(correction=0)))
    batch.reward = torch.tensor([3.0, 4.0, 20.0, 20.0])
    second = credit(batch, run)[:, 0]
    for rows, seen in ((slice(0, 2), [1.0, 2, 3, 4]), (slice(2, 4), [10.0, 30, 20, 20])):
        values = torch.tensor(seen)
        torch.testing.assert_close(second[rows], (batch.reward[rows] - values.mean()) / values.std(correction=0))
    again = PromptStandardized(size=4, min_count=3)
    again.load_state_dict(credit.state_dict())
    torch.testing.assert_close(again(batch, run), credit(batch, run), rtol=0, atol=0)


@pytest.mark.parametrize("method", [METHOD, DDPO], ids=["flow_grpo", "ddpo"])
def test_a_resumed_run_goes_on_as_if_never_stopped(method: Any, tmp_path: Path) -> None:
    straight = digits(method, steps=4)
    train(straight)
    stopped = digits(method, steps=4, out=tmp_path, checkpoint_every=2)
    for _ in range(2):
        step(stopped)
    resumed = digits(method, steps=4, out=tmp_path, checkpoint_every=2)
    assert resumed.resume() and resumed.step == 2
    train(resumed)
    assert [r["reward"] for r in resumed.history] == [r["reward"] for r in straight.history]
    for a, b in zip(resumed.policy.parameters(), straight.policy.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_bad_settings_are_refused() -> None:
    run = digits()
    with pytest.raises(ValueError, match="sde or ddim"):
        DenoisingRollout(sampler="euler")(run.task.prompts(1, run.rng), run)
    with pytest.raises(ValueError, match="above 0"):
        DenoisingRollout(noise=0.0)(run.task.prompts(1, run.rng), run)
    with pytest.raises(ValueError, match="several attempts"):
        step(digits(METHOD.set("select.group_size", 1)))


def test_a_task_without_denoising_steps_is_refused() -> None:
    from anypo.domains.language.toys.token_bandit import TokenBandit

    task = TokenBandit(seed=0)
    with pytest.raises(ValueError, match="trains denoising steps"):
        step(Run(NO_KL, task.policy(), task, steps=1))
