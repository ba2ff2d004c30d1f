import pytest
import torch

from anypo.methods.language.agpo import (
    CLIP,
    METHOD,
    STATE,
    AdaptiveClip,
    ProbeRollout,
    advantages,
    by_group,
    clip,
    dispersion,
    skewness,
    temperature,
    vote_entropy,
)
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.methods.language.grpo import advantages as grpo_advantages
from anypo.policy import Signals
from anypo.run import Run
from anypo.seams.credit import GroupRelative
from tests.helpers import assert_resumes, assert_trains, random_rows, trained

OFF = {"alpha": 0.0, "gamma": 0.0, "delta": 0.0, "zeta": 0.0}


def test_no_coefficients_leave_the_base_clip():
    assert clip(0.7, 2.0, 1.3, 1.3, 0.9, 0.4, 0.17, **OFF) == pytest.approx(0.17, abs=1e-7)
    assert clip(0.7, 2.0, 1.3, 0.0, 0.9, 0.4, 0.17, **OFF) == pytest.approx(0.17, abs=1e-7)


def test_no_temperature_gain_leaves_the_base_temperature():
    assert temperature(torch.rand(9), 0.8, 0.0).tau.tolist() == pytest.approx([0.8] * 9)


def test_advantages_are_grpo_s_with_ddof_1():
    rows = random_rows()
    table, row, column = by_group(rows.reward, rows.group, torch.nan)
    torch.testing.assert_close(advantages(table)[row, column], grpo_advantages(rows.reward, rows.group, ddof=1, eps=0.0))


def test_with_both_controllers_off_a_run_is_grpo_after_a_probe():
    off = METHOD.but(rollout=ProbeRollout(lam_temp=0.0, follow_entropy=False, **OFF))

    class Probed:  # the same prompts and the same random numbers, and no controller
        def __call__(self, prompts, run):
            run.collect([p.but(temperature=1.0) for p in prompts])
            return run.collect([p.but(temperature=1.0) for p in prompts])

    grpo = GRPO.but(rollout=Probed(), credit=GroupRelative(ddof=1, eps=1e-30), regularize=METHOD.regularize, update=METHOD.update)
    mine, theirs = trained(off, 4), trained(grpo, 4)
    torch.testing.assert_close(mine.policy.logits, theirs.policy.logits)
    assert mine.actions == theirs.actions


def test_padded_groups_equal_each_group_alone():
    rows = random_rows()
    table, _, _ = by_group(rows.reward, rows.group, torch.nan)
    for q, group in enumerate(rows.group.unique()):
        own = rows.reward[rows.group == group]
        for mode in ("std", "mad", "iqr"):
            torch.testing.assert_close(dispersion(table, mode)[q], dispersion(own, mode))
        torch.testing.assert_close(skewness(table)[q], skewness(own))
    keys = torch.arange(8) % 2
    padded, _, _ = by_group(keys, rows.group, -1)
    for q, group in enumerate(rows.group.unique()):
        torch.testing.assert_close(vote_entropy(padded)[q], vote_entropy(keys[rows.group == group]))


def test_single_samples_and_unanimity():
    one = torch.tensor([0.4]).double()
    assert skewness(one) == 0 and dispersion(one) == 0 and not advantages(one).any()
    assert vote_entropy(torch.tensor([3, 3, 3])) == 0
    assert not advantages(torch.full((5,), 0.1).double()).any()
    assert skewness(torch.tensor([0.0] * 400 + [1.0]).double()) == 10


def test_the_average_from_before_is_the_centre():
    found = temperature(torch.tensor([1.0, 2.0]).double(), ema_init=0.0, lam_temp=0.1)
    assert found.tau.tolist() == pytest.approx([1.0, 1.1]) and float(found.ema) == pytest.approx(1.1)


def test_unknown_dispersion_is_refused():
    with pytest.raises(ValueError, match="std, mad, iqr"):
        dispersion(torch.ones(3), "var")


def test_objective_without_a_range_is_the_plain_one():
    run = Run(METHOD, trained(METHOD, 1).policy, trained(METHOD, 1).task, steps=1)
    batch = METHOD.rollout(METHOD.select(run.task, run), run)
    batch.advantage = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(0)).double()
    new = Signals(logp=batch.logp + 0.5 * batch.advantage)
    fixed = AdaptiveClip(0.1, 0.1)
    batch.signals[CLIP] = torch.full((len(batch),), 0.1)
    adaptive = fixed(batch, new, run)
    del batch.signals[CLIP]
    torch.testing.assert_close(adaptive.value, fixed(batch, new, run).value)


def test_state_moves_and_stays_in_bounds():
    run = trained(METHOD, 4)
    assert all(value > 0 for value in run.state[STATE].values())
    for record in run.history:
        assert 0.5 <= record["temperature_min"] <= record["temperature_max"] <= 1.5
        assert 0.05 <= record["clip_range_min"] <= record["clip_range_max"] <= 0.4
        assert 0 <= record["clip_saturation"] <= 1


def test_trains_and_resumes(tmp_path):
    assert_trains(METHOD)
    assert_resumes(METHOD, tmp_path)
