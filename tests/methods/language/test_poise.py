import pytest
import torch

from anypo.domains.language.toys.toy_arith import GruPolicy, ToyArith
from anypo.loops.on_policy import train
from anypo.methods.language.dapo import METHOD as DAPO
from anypo.methods.language.grpo import advantages as grpo_advantages
from anypo.methods.language.poise import METHOD, STATE, advantages, features, other_prompts_mean, probe
from anypo.run import Run
from anypo.seams.groups import group_mean
from anypo.seams.select import UniformPrompts
from tests.helpers import assert_resumes, assert_trains, random_rows, trained


def test_constant_probe_is_a_constant_baseline():
    rows = random_rows()
    found = advantages(torch.full((8,), 0.3).double(), rows.reward, rows.group, "none")
    torch.testing.assert_close(found.advantages, rows.reward - 0.3)


def test_group_mean_predictions_are_grpo_without_std():
    rows = random_rows()
    found = advantages(group_mean(rows.reward, rows.group), rows.reward, rows.group, "none")
    torch.testing.assert_close(found.advantages, grpo_advantages(rows.reward, rows.group, std=False))


def test_identical_features_are_a_prompt_value():
    rows = random_rows()
    value = torch.tensor([0.2, 0.5, 0.9]).double()[rows.group]
    torch.testing.assert_close(advantages(value, rows.reward, rows.group, "none").baseline, value)


def test_the_own_rollout_never_enters_its_baseline():
    rows = random_rows()
    prediction = torch.rand(8, dtype=torch.float64)
    base = advantages(prediction, rows.reward, rows.group).baseline
    for i in range(8):
        changed = prediction.clone()
        changed[i] += 5
        assert advantages(changed, rows.reward, rows.group).baseline[i] == pytest.approx(float(base[i]))


def test_both_systems_give_the_same_ridge_solution():
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(6, 6, generator=g).double(), torch.rand(6, generator=g).double()
    wide = torch.cat([x, torch.zeros(6, 1).double()], 1)  # one more feature than samples, always 0
    narrow = probe(x, y, x, 0.7)
    dual = probe(wide, y, wide, 0.7)
    torch.testing.assert_close(dual.weight[:6], narrow.weight)
    torch.testing.assert_close(dual.prediction, narrow.prediction)


def test_features_ignore_padding_and_carry_no_gradient():
    rows = random_rows()
    mask = rows.mask.clone()
    mask[2] = False
    hidden = torch.randn(8, 3, requires_grad=True, dtype=torch.float64)
    found = features(hidden, hidden, torch.where(mask, rows.old_logp.abs(), torch.nan), mask)
    assert torch.isfinite(found).all() and not found.requires_grad
    assert found[2, 6:].tolist() == [0, 0, 0] and found[1, 7] == 0


def test_lone_members_and_equal_advantages():
    one = torch.ones(3).double()
    lone = advantages(0.2 * one, one, torch.arange(3))
    assert not lone.advantages.any()
    alike = advantages(0.25 * one, one, torch.zeros(3, dtype=torch.int64))
    assert alike.advantages.tolist() == [0.75] * 3
    with pytest.raises(ValueError, match="none or batch"):
        advantages(one, one, torch.arange(3), "rms")


def test_warm_up_baseline_is_the_mean_of_the_other_prompts():
    reward, group = torch.tensor([1.0, 0, 1, 1]).double(), torch.tensor([0, 0, 1, 1])
    assert other_prompts_mean(reward, group).tolist() == [1, 1, 0.5, 0.5]
    assert other_prompts_mean(reward[:2], group[:2]).tolist() == [0, 1]


def test_the_loss_is_dapo_s():
    assert METHOD.objective == DAPO.objective and METHOD.regularize == DAPO.regularize


def test_refuses_single_rollouts():
    with pytest.raises(ValueError, match="group_size"):
        trained(METHOD.but(select=UniformPrompts(group_size=1)), 1)


def test_probe_on_a_policy_with_prompt_states():
    task, policy = ToyArith(small=True), GruPolicy(hidden=8)
    run = train(Run(METHOD.set("credit.warmup", 32), policy, task, steps=3))
    assert run.state[STATE]["feature"].shape == (3 * 64, 2 * 8 + 3)
    assert torch.isfinite(run.state[STATE]["weight"]).all()


def test_the_window_slides():
    run = trained(METHOD.set("control.0.memory", 10), 3)
    assert len(run.state[STATE]["reward"]) == 10


def test_trains_and_resumes(tmp_path):
    method = METHOD.set("credit.warmup", 8)
    assert_trains(method)
    assert_resumes(method, tmp_path)
