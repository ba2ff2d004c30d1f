"""SDPO (stepwise): what it reduces to, its pitfalls, and that it trains, resumes and refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from anypo.domains.diffusion import builtin
from anypo.domains.diffusion.tasks import Digits, Gaussians
from anypo.loops.on_policy import step, train
from anypo.methods.diffusion.flow_grpo import DDPO
from anypo.methods.diffusion.sdpo_stepwise import (
    METHOD,
    PairRegression,
    StepwiseStandardized,
    advantages,
    anchor_step,
    at_step,
    clean_states,
    dense_reward,
    pair_loss,
    pairs,
    returns,
)
from anypo.policy import Signals
from anypo.run import Run
from anypo.seams.reward import TaskReward
from tests.helpers import assert_continues

QUICK = {"evaluation_steps": 4, "evaluation_samples": 20}


def digits(method: Any = METHOD, steps: int = 3, **options: Any) -> Run:
    return Run(method.set("select.prompts", 10), builtin.flow("digits"), Digits("ink", **QUICK), steps=steps, seed=0, **options)


def rolled(method: Any = METHOD) -> Any:
    run = digits(method)
    return run, run.method.rollout(run.method.select(run.task, run), run)


def numbers(count: int, *shape: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [scale * torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(count)]


def test_one_step_is_a_regression_on_the_reward_difference() -> None:
    lp1, old1, lp2, old2 = numbers(4, 6, 1, scale=0.003)
    x0, reward, other = numbers(3, 6, 1, 5)[0], *numbers(2, 6)
    for r in (reward, other):
        torch.testing.assert_close(dense_reward(x0, r, r, r).reward, r[:, None])
        torch.testing.assert_close(returns(r[:, None], 0.99), r[:, None])
    found = pair_loss(lp1, old1, lp2, old2, reward[:, None], other[:, None], lam=0.5, scale=0.1, eps=1.0, adv_clip=1e9)
    expected = ((((lp1 - old1) - (lp2 - old2))[:, 0] / 0.1 - (reward - other)) ** 2).mean()
    torch.testing.assert_close(found, expected)
    run, batch = rolled(METHOD.set("rollout.steps", 1))
    assert batch.mask.shape == (20, 1) and bool(batch.mask.all())
    torch.testing.assert_close(run.method.reward(batch, run)[:, 0], run.task.score(batch, run))


def test_without_discount_and_with_equal_weights_the_steps_are_independent() -> None:
    lp1, old1, lp2, old2, adv1, adv2 = numbers(6, 6, 4, scale=0.1)
    whole = pair_loss(lp1, old1, lp2, old2, adv1, adv2, lam=1.0, scale=1.0, eps=0.05, adv_clip=5.0)
    alone = [pair_loss(*(v[:, k : k + 1] for v in (lp1, old1, lp2, old2, adv1, adv2)), 1.0, 1.0, 0.05, 5.0) for k in range(4)]
    torch.testing.assert_close(whole, torch.stack(alone).mean())
    torch.testing.assert_close(returns(adv1, 0.0), adv1)


def test_an_identical_pair_has_no_loss_and_no_gradient() -> None:
    logp, old, adv = numbers(3, 6, 4)
    logp.requires_grad_()
    value = pair_loss(logp, old, logp, old, adv, adv, 0.99, 1.0, 1e-4, 5.0)
    assert float(value.detach()) == 0 and bool((torch.autograd.grad(value, logp)[0] == 0).all())


def test_two_steps_need_no_interpolation() -> None:
    (x0,), (first, last) = numbers(1, 6, 2, 3), numbers(2, 6)
    anchor = anchor_step(x0)
    torch.testing.assert_close(dense_reward(x0, first, torch.where(anchor == 0, first, last), last).reward, torch.stack([first, last], 1))


def test_opposite_and_zero_states_are_interpolated_linearly() -> None:
    x0 = torch.zeros(2, 5, 3, dtype=torch.float64)
    x0[0, :, 0] = torch.tensor([1.0, 0.0, -1.0, 0.0, 1.0])  # like the ends at no step but its own; the anchor is the opposite
    ones = torch.ones(2, dtype=torch.float64)
    found = dense_reward(x0, 0 * ones, 2 * ones, 4 * ones)
    assert found.anchor.tolist() == [2, 0]
    torch.testing.assert_close(found.reward[0], torch.tensor([0.0, 1, 2, 3, 4], dtype=torch.float64))
    assert bool(found.reward.isfinite().all())


def test_returns_are_standardized_by_step_and_prompt() -> None:
    ret, history = numbers(1, 4, 3)[0], [numbers(1, 5, 3)[0], []]
    found = advantages(ret, torch.tensor([0, 0, 1, 1]), history, min_count=6, buffer=6)
    seen = torch.cat([history[0][1:], ret[:2]])
    torch.testing.assert_close(found[:2], (ret[:2] - seen.mean(0)) / (seen.std(0, correction=0) + 1e-6))
    torch.testing.assert_close(found[2:], (ret[2:] - ret.mean(0)) / (ret.std(0, correction=0) + 1e-6))
    assert bool((advantages(torch.ones(4, 3), torch.zeros(4, dtype=torch.int64), [[]]) == 0).all())


def test_pairs_are_of_one_group() -> None:
    first, second = pairs(torch.tensor([3, 1, 3, 1, 3, 2, 1, 1]))
    assert sorted(zip(first.tolist(), second.tolist(), strict=True)) == [(0, 2), (1, 3), (6, 7)]
    assert len(pairs(torch.arange(4))[0]) == 0


def test_pairs_start_together_and_their_clean_states_end_in_the_sample() -> None:
    run, batch = rolled()
    i, j = pairs(batch.group)
    assert torch.equal(batch.context[i, 0], batch.context[j, 0]) and not torch.equal(batch.action[i, -1], batch.action[j, -1])
    clean, velocity = clean_states(batch), run.policy.observe(batch, {"velocity"})["velocity"]
    expected = batch.context - batch.signal("level")[..., None] * velocity
    torch.testing.assert_close(clean[:, :-1], expected[:, :-1], rtol=1e-4, atol=1e-4)
    plain = rolled(METHOD.set("rollout.last_std", 0.0))[1]
    assert not plain.mask[:, -1].any() and bool(plain.mask[:, :-1].all())
    last = plain.context - plain.signal("level")[..., None] * run.policy.observe(plain, {"velocity"})["velocity"]
    torch.testing.assert_close(clean_states(plain)[:, -1], last[:, -1], rtol=1e-4, atol=1e-4)


def test_three_clean_states_are_scored_a_chain() -> None:
    run, batch = rolled(METHOD.set("rollout.steps", 8))
    scored, reward = [], run.task.reward
    run.task.reward = lambda x, prompt: scored.append(len(x)) or reward(x, prompt)
    assert run.method.reward(batch, run).shape == (20, 8) and sum(scored) == 3 * 20


def test_the_loss_of_columns_is_that_of_whole_chains() -> None:
    run, batch = rolled()
    batch.advantage = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(0))
    logp, (i, j) = batch.logp + torch.randn(batch.logp.shape, generator=torch.Generator().manual_seed(1)), pairs(batch.group)
    objective = PairRegression(lam=0.7)
    whole = objective(batch, Signals(logp=logp), run).value
    mean = (logp / 64, batch.logp / 64)
    expected = pair_loss(mean[0][i], mean[1][i], mean[0][j], mean[1][j], batch.advantage[i], batch.advantage[j], 0.7, 1.0, 1e-2, 5.0)
    torch.testing.assert_close(whole, expected)
    columns = [objective(at_step(batch, torch.full((20,), k)), Signals(logp=logp[:, k : k + 1]), run).value for k in range(batch.horizon)]
    torch.testing.assert_close(torch.stack(columns).mean(), whole)


def test_masked_steps_may_hold_anything() -> None:
    run, batch = rolled()
    batch.advantage = torch.ones_like(batch.logp)
    batch.mask[:, -1] = False
    expected = PairRegression()(batch, Signals(logp=batch.logp + 0.1), run).value
    logp = (batch.logp + 0.1).index_fill(1, torch.tensor([3]), torch.nan).requires_grad_()
    found = PairRegression()(batch, Signals(logp=logp), run).value
    torch.testing.assert_close(found, expected)
    assert bool(torch.autograd.grad(found, logp)[0].isfinite().all())


def test_a_sparse_reward_is_that_of_the_last_step() -> None:
    run, batch = rolled()
    batch.reward = torch.arange(20.0)
    found = StepwiseStandardized(gamma=0.5, min_count=100)(batch, run)
    dense = batch.but(reward=torch.nn.functional.pad(batch.reward[:, None], (3, 0)))
    torch.testing.assert_close(found, StepwiseStandardized(gamma=0.5, min_count=100)(dense, run))


def test_it_trains_on_digits() -> None:
    run = digits(METHOD.set("select.prompts", 40), steps=6)
    train(run)
    assert run.history[-1]["final_reward"] > run.history[0]["final_reward"] + 0.02
    assert all(torch.isfinite(torch.tensor([r["loss"], r["grad_norm"], r["log_ratio"]])).all() for r in run.history)


@pytest.mark.parametrize(
    "method",
    [METHOD.but(reward=TaskReward()), METHOD.but(credit=DDPO.credit), METHOD.set("rollout.steps", 1), METHOD.set("update.minibatches", 3)],
    ids=["final reward", "credit of DDPO", "one step", "minibatches"],
)
def test_other_parts_fit(method: Any) -> None:
    run = digits(method)
    train(run)
    assert all(torch.isfinite(torch.tensor(r["loss"])) for r in run.history)


def test_it_trains_on_the_plane() -> None:
    run = Run(METHOD.set("select.prompts", 10), builtin.flow("gaussians"), Gaussians(0, **QUICK), steps=2, seed=0)
    train(run)
    assert all(torch.isfinite(torch.tensor(r["loss"])) for r in run.history)


def test_a_resumed_run_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    def run_to(out: Path, upto: int) -> Run:
        run = digits(METHOD.set("credit.min_count", 3), steps=4, out=out, checkpoint_every=2)
        run.resume()
        while run.step < upto:
            step(run)
        return run

    assert_continues(run_to, tmp_path)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="no noise to train"):
        rolled(METHOD.set("rollout.eta", 0.0))
    with pytest.raises(ValueError, match="no noise to train"):
        rolled(METHOD.set("rollout.steps", 1).set("rollout.last_std", 0.0))
    with pytest.raises(ValueError, match="several attempts"):
        step(digits(METHOD.set("select.group_size", 1)))
