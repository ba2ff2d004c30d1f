"""DEVIS-GRPO: what it reduces to, its pitfalls, and that its chains of camera moves train, save and resume."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anypo.domains.diffusion.sample import final
from anypo.domains.diffusion.setup import build, load
from anypo.domains.diffusion.views import Views, camera_angle, look, random_videos, view_levels, visible
from anypo.loops.on_policy import step, train
from anypo.methods.diffusion.devis_grpo import (
    METHOD,
    AccumulativeRollout,
    JumpDistillation,
    level_reward,
    select,
    selected_advantages,
    split,
)
from anypo.methods.diffusion.flow_grpo import METHOD as FLOW_GRPO
from anypo.methods.diffusion.flow_grpo import advantages
from anypo.run import Run
from tests.helpers import assert_continues

GROUP = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2])


def views_run(method=METHOD, steps: int = 4, out: Path | None = None, low: float = 60.0, high: float = 90.0) -> Run:
    policy, task = build("views", None, evaluation_steps=2, denoising_steps=3, low=low, high=high)
    if hasattr(method.rollout, "steps"):
        method = method.set("rollout.steps", 3)
    return Run(method.set("select.prompts", 2), policy, task, steps=steps, seed=0, out=out, checkpoint_every=2)


def test_one_stage_is_flow_grpo() -> None:
    """Moves that the model is trusted with, all samples kept, no jump: the same chains and the same update as Flow-GRPO, bit for bit."""
    ours = METHOD.but(regularize=METHOD.regularize[:1]).set("credit.n_keep", 8).set("rollout.tau", 0.0)
    plain = ours.but(rollout=FLOW_GRPO.rollout, credit=FLOW_GRPO.credit).set("credit.adv_clip", 1e9)
    mine, theirs = (views_run(m, low=10.0, high=20.0) for m in (ours, plain))
    torch.randn(16, 1, generator=theirs.generator)  # what an even split draws in vain
    first, second = step(mine), step(theirs)
    assert torch.equal(first.action, second.action) and torch.equal(first.logp, second.logp)
    torch.testing.assert_close(first.advantage, second.advantage)
    for a, b in zip(mine.policy.parameters(), theirs.policy.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_keeping_all_is_the_plain_group_advantage() -> None:
    reward = torch.randn(8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    keep = select(reward, GROUP, 4)
    assert torch.equal(keep, torch.ones(8, dtype=torch.float64))
    torch.testing.assert_close(selected_advantages(reward, GROUP, keep), advantages(reward, GROUP, adv_clip=1e9))


def test_without_unevenness_splits_are_even_and_as_few_as_possible() -> None:
    delta = AccumulativeRollout(tau=0.0).increments(torch.tensor([60.0, 61.0, 80.0]), torch.Generator().manual_seed(0))
    torch.testing.assert_close(delta, torch.tensor([[20.0, 20.0, 20.0, 0.0], [15.25] * 4, [20.0] * 4]))


@given(st.integers(0, 10_000), st.floats(0, 5), st.floats(1, 140))
def test_splits_add_up_and_respect_the_cap(seed: int, tau: float, angle: float) -> None:
    stages = max(1, math.ceil(angle / 20)) + seed % 3
    delta = split(torch.randn(5, stages, generator=torch.Generator().manual_seed(seed), dtype=torch.float64), angle, tau, 20.0)
    torch.testing.assert_close(delta.sum(1), torch.full((5,), angle, dtype=torch.float64))
    assert float(delta.max()) <= 20 + 1e-9 and float(delta.min()) >= 0


def test_too_few_increments_are_refused() -> None:
    with pytest.raises(ValueError, match="do not reach"):
        split(torch.zeros(1, 3), 61.0, 0.7, 20.0)


def test_ties_keep_the_lower_index_and_groups_may_come_in_any_order() -> None:
    assert select(torch.zeros(4), torch.zeros(4, dtype=torch.int64), 3).tolist() == [1, 1, 0, 1]
    reward = torch.randn(8, generator=torch.Generator().manual_seed(1))
    order = torch.randperm(8, generator=torch.Generator().manual_seed(2))
    assert torch.equal(select(reward[order], GROUP[order], 2), select(reward, GROUP, 2)[order])
    assert select(reward, GROUP, 2)[-1] == 1  # a lone member is its group
    assert selected_advantages(reward, GROUP, select(reward, GROUP, 2))[-1] == 0


def test_constant_levels_count_for_nothing_and_bad_views_are_gated() -> None:
    levels = torch.tensor([[1.0, 5.0, 0.1], [2.0, 5.0, 0.9], [3.0, 5.0, 0.9]])
    group = torch.zeros(3, dtype=torch.int64)
    free = level_reward(levels, group, (0.0, 1.0, 0.0), 0.0, 2, 3.0)
    assert torch.equal(free, torch.zeros(3))
    gated = level_reward(levels, group, (0.0, 0.0, 1.0), 0.5, 2, 3.0)
    assert float(gated[0]) == -3.0 and float(gated[1]) == pytest.approx(0.7071, abs=1e-3)


def test_the_exact_view_has_the_best_levels_all_around_the_circle() -> None:
    video = random_videos(16, torch.Generator().manual_seed(0))
    for degrees in (10.0, 90.0, 170.0):
        angle = torch.full((16,), degrees)
        exact = look(video, angle)
        levels = view_levels(exact, video, angle)
        torch.testing.assert_close(levels[:, [0, 2, 3]], torch.tensor([0.0, 1.0, 0.0]).expand(16, 3), atol=2e-3, rtol=0)
        torch.testing.assert_close(camera_angle(exact, video), angle, atol=1e-2, rtol=0)
        noisy = exact + 0.3 * torch.randn(exact.shape, generator=torch.Generator().manual_seed(1))
        assert (view_levels(noisy, video, angle)[:, [0, 2]] < levels[:, [0, 2]]).all()
    wrapped = view_levels(look(video, torch.full((16,), -170.0)), video, torch.full((16,), 170.0))[:, 3]
    torch.testing.assert_close(wrapped, torch.full((16,), -20 / 170), atol=1e-3, rtol=0)


def test_a_point_behind_another_is_hidden() -> None:
    points = torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(0)) * 5
    points[:, 1] = points[:, 0] + torch.tensor([0.1, 0.0, 1.0])
    assert visible(points.reshape(1, -1))[0, :, :2].tolist() == [[True, False]] * 4


def test_stages_follow_one_another_and_short_rows_stay_where_they_are() -> None:
    run = views_run()
    batch = METHOD.set("rollout.steps", 3).rollout(METHOD.set("select.prompts", 4).select(run.task, run), run)
    stages, segment = batch.horizon // 3, batch.segment
    assert segment is not None and segment[0].tolist() == [m for m in range(stages) for _ in range(3)]
    for m in range(1, stages):  # what a stage starts from is what the one before ended in
        torch.testing.assert_close(batch.signal("condition")[:, 3 * m, :-1], batch.action[:, 3 * m - 1])
    unused = ~batch.mask[:, -1]
    assert bool(unused.any()) and not bool(unused.all())
    last = batch.mask[unused].sum(1)
    torch.testing.assert_close(final(batch)[unused], batch.action[unused, last - 1])
    torch.testing.assert_close(run.score(batch, {"logp"}).logp, batch.logp)
    total = batch.signal("condition")[:, ::3, -1].sum(1) * 20
    torch.testing.assert_close(total, run.task.asked(batch.signal("prompt_id"))[1], atol=1e-3, rtol=0)
    assert run.actions == int(batch.mask.sum())


def test_only_the_picked_samples_and_the_best_count() -> None:
    run = views_run(METHOD.set("credit.n_keep", 2))
    batch = step(run)
    assert batch.keep is not None and batch.advantage is not None
    kept = batch.keep.any(1)
    assert [int(kept[batch.group == g].sum()) for g in (0, 1)] == [2, 2]
    assert not bool(batch.advantage[~kept].any()) and bool((batch.advantage[kept].abs().sum(1) > 0).all())
    best = batch.signal("best")
    assert all(float(batch.reward[batch.group == g].max()) == float(batch.reward[best & (batch.group == g)]) for g in (0, 1))


def test_without_weight_the_jump_draws_nothing() -> None:
    run = views_run()
    batch = step(run)
    before = run.generator.get_state()
    assert float(JumpDistillation(weight=0.0)(batch, None, run).value) == 0  # type: ignore[arg-type]
    assert torch.equal(run.generator.get_state(), before)


def test_it_trains_and_a_resumed_run_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    def run_to(out: Path, upto: int) -> Run:
        run = views_run(steps=upto, out=out)
        run.resume()
        return train(run)

    assert_continues(run_to, tmp_path)
    run = train(views_run())
    assert all(np.isfinite([r["loss"], r["reward"], r["jump_loss"], r["level/view"]]).all() for r in run.history)


def test_a_saved_policy_comes_back(tmp_path: Path) -> None:
    policy, task = build("views", None)
    policy.save_pretrained(tmp_path)
    prompt = torch.arange(4)
    assert torch.equal(task.samples(policy, prompt), task.samples(load(tmp_path), prompt))  # type: ignore[attr-defined, arg-type]


def test_bad_tasks_and_settings_are_refused() -> None:
    policy, task = build("gaussians:0", None)
    with pytest.raises(ValueError, match="take --task views"):
        step(Run(METHOD, policy, task, steps=1))
    with pytest.raises(ValueError, match="rollout.noise"):
        step(views_run(METHOD.set("rollout.noise", 0.0)))
    with pytest.raises(ValueError, match="reward.lam"):
        step(views_run(METHOD.set("reward.lam", (1.0, 1.0, 1.0))))
    with pytest.raises(ValueError, match="between 0 and 180"):
        Views(low=90.0, high=60.0)
