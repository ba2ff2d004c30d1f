import math

import pytest
import torch

from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.loops.on_policy import step, train
from anypo.method import Stage
from anypo.methods.language.g2d import METHOD, OFFLINE, WARM_UP, dpo, pairs
from anypo.run import Run


def run_for(method=METHOD, steps=8, seed=0):
    task = TokenBandit(6, 3, 2, targets=3, seed=seed)
    policy = task.policy()
    policy.learning_rate = 4.0
    return Run(method, policy, task, steps=steps, seed=seed)


def test_at_the_reference_the_loss_is_log_two_and_every_pair_pulls_alike():
    logp = torch.randn(4, 3).double()
    found = dpo(logp, logp, torch.ones(4, 3), torch.tensor([[0, 1], [2, 3]]), beta=0.3)
    assert float(found.loss) == pytest.approx(math.log(2))
    assert found.grad_weight.tolist() == pytest.approx([0.15, 0.15]) and float(found.accuracy) == 0


def test_no_filter_keeps_every_prompt_with_both_outcomes():
    reward, group = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 0, 1, 1]), torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 2, 2])
    assert pairs(reward, group, torch.zeros(10), 0.0, 1.0, "zip") == [[0, 1], [4, 7]]
    assert pairs(reward, group, torch.zeros(10), 0.3, 0.9, "zip") == [[4, 7]]
    with pytest.raises(ValueError, match="zip, all, hard"):
        pairs(reward, group, torch.zeros(10), rule="best")


def test_an_empty_third_stage_is_grpo():
    alone = train(run_for(WARM_UP))
    staged = train(run_for(METHOD.but(stages=(Stage(WARM_UP, 1.0),))))
    assert torch.equal(alone.policy.logits, staged.policy.logits)


def test_no_warm_up_is_offline_dpo_on_cold_rollouts():
    run = run_for(METHOD.but(stages=(Stage(OFFLINE, 1.0),)))
    cold = run.policy.logits.detach().clone()
    step(run)
    assert torch.equal(run.named_policy("reference").logits, cold)


def test_stages_follow_one_another_and_the_reference_is_the_warm_policy():
    run = run_for(steps=10)
    for _ in range(4):
        step(run)
    warm = run.policy.logits.detach().clone()
    assert run.method.name == "g2d_warm_up" or run.progress == 0.4
    batch = step(run)
    assert run.method.name == "g2d_offline" and "margin" in run.history[-1] and "pairs" in run.history[-1]
    assert torch.equal(run.named_policy("reference").logits, warm)
    half = len(batch) // 2
    assert (batch.reward[:half] == 1).all() and (batch.reward[half:] == 0).all()
    train(run)
    assert torch.equal(run.named_policy("reference").logits, warm) and run.step == 10
    actions = {r["actions"] for r in run.history[4:]}
    assert len(actions) == 1, "no rollouts after the static set"


def test_the_cold_reference_is_the_start():
    run = run_for(METHOD.set("stages.1.rollout.reference", "cold"))
    start = run.policy.logits.detach().clone()
    train(run)
    assert torch.equal(run.named_policy("reference").logits, start)


@pytest.mark.parametrize("stop", [2, 5, 7])
def test_a_checkpoint_in_any_stage_continues_to_the_same_numbers(stop):
    whole = train(run_for())
    part = run_for()
    while part.step < stop:
        step(part)
    resumed = run_for()
    resumed.load_state_dict(part.state_dict())
    train(resumed)
    assert torch.equal(resumed.policy.logits, whole.policy.logits)


def test_settings_reach_one_stage_or_all():
    assert METHOD.set("stages.0.select.group_size", 4).stages[0].method.select.group_size == 4
    both = METHOD.set("update.max_grad_norm", 0.5)
    assert [s.method.update.max_grad_norm for s in both.stages] == [0.5, 0.5]
    with pytest.raises(ValueError, match="write stages.<number>"):
        METHOD.set("stages.7.update.epochs", 1)
    with pytest.raises(ValueError, match="has no field 'clip'"):
        METHOD.set("objective.clip", 1)


def test_a_pool_without_contrast_is_an_error():
    task = TokenBandit(4, 8, 4)
    with pytest.raises(ValueError, match="none of 32 prompts has right and wrong rollouts"):
        train(Run(METHOD.but(stages=(Stage(OFFLINE, 1.0),)), task.policy(), task, steps=2))


def test_the_objective_refuses_groups_that_are_no_pairs():
    run = run_for(WARM_UP.but(objective=OFFLINE.objective))
    with pytest.raises(ValueError, match="groups of two"):
        train(run)
