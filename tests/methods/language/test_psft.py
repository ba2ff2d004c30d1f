import pytest
import torch

from anypo.domains.language.tasks import make_task
from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.domains.language.toys.toy_arith import make_toy_arith
from anypo.loops.on_policy import train
from anypo.methods.control.ppo import policy_loss
from anypo.methods.language.psft import METHOD, SFT, Demonstrations, loss, sft
from anypo.run import Run
from tests.helpers import gradient, random_rows


def test_ratio_one_has_the_gradient_of_supervised_fine_tuning():
    rows = random_rows()
    logp = rows.old_logp.clone().requires_grad_(True)
    mine, plain = gradient(loss(logp, rows.old_logp, rows.mask), logp), gradient(sft(logp, rows.mask), logp)
    torch.testing.assert_close(mine, plain)


def test_without_a_bound_it_is_importance_weighted_likelihood():
    rows = random_rows()
    ratio = (rows.logp - rows.old_logp).exp()[rows.mask]
    torch.testing.assert_close(loss(rows.logp, rows.old_logp, rows.mask, clip_high=1e9).loss, -ratio.mean())


def test_it_is_ppo_with_advantage_one():
    rows = random_rows()
    ppo = policy_loss(rows.logp, rows.old_logp, torch.ones_like(rows.logp), rows.mask, eps=0.28)
    torch.testing.assert_close(loss(rows.logp, rows.old_logp, rows.mask, 0.28, 0.28).loss, ppo.loss)
    torch.testing.assert_close(loss(rows.logp, rows.old_logp, rows.mask, 0.0, 0.28).loss, ppo.loss)  # the lower bound is never active


def test_padding_may_hold_anything_and_an_empty_batch_has_loss_zero():
    rows = random_rows()
    plain = loss(rows.logp, rows.old_logp, rows.mask)
    padded = torch.where(rows.mask, rows.logp, -torch.inf)
    torch.testing.assert_close(loss(padded, padded.where(rows.mask, rows.old_logp).where(~rows.mask, rows.old_logp), rows.mask), plain)
    assert float(loss(rows.logp, rows.old_logp, torch.zeros_like(rows.mask)).loss) == 0


def trained(method, steps, folder=None):
    policy, task = make_toy_arith(small=True)
    run = Run(method.set("rollout.count", 16).set("update.minibatches", 2), policy, task, steps=steps, out=folder, checkpoint_every=2)
    if folder is not None:
        run.resume()
    return train(run)


@pytest.mark.parametrize("method", [METHOD, SFT])
def test_it_trains_through_the_loop(method):
    run = trained(method, 3)
    assert all(torch.isfinite(torch.tensor(r["loss"])) and r["reward"] == 1 for r in run.history)
    assert run.actions == 0  # demonstrations are not generated


def test_a_budget_of_actions_is_charged_with_what_was_learned_from():
    policy, task = make_toy_arith(small=True)
    run = train(Run(METHOD.set("rollout.count", 16), policy, task, steps=1000, max_actions=100))
    assert run.finished and 100 <= run.actions < 300 and run.step < 100


def test_the_trust_region_is_around_the_start_of_each_batch():
    policy, task = make_toy_arith(small=True)
    run = Run(METHOD, policy, task, steps=2)
    for _ in range(2):
        batch = Demonstrations(count=8)([], run)
        torch.testing.assert_close(batch.logp, policy.observe(batch, {"logp"}).logp)
        assert bool(batch.terminated.all()) and policy.decode(batch.action[0]) == batch.signals["completion"][0]
        with torch.no_grad():
            policy.output.bias += 0.1 * torch.arange(len(policy.output.bias))


def test_four_steps_equal_two_and_two_more(tmp_path):
    whole = trained(METHOD, 4, tmp_path / "whole")
    trained(METHOD, 2, tmp_path / "halves")
    halves = trained(METHOD, 4, tmp_path / "halves")
    for mine, other in zip(whole.policy.parameters(), halves.policy.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_tasks_without_solutions_are_refused_in_a_sentence():
    task = TokenBandit(4, 3, 2)
    with pytest.raises(ValueError, match="psft imitates demonstrations, which the task 'token_bandit' does not provide"):
        train(Run(METHOD, task.policy(), task, steps=1))


def test_generated_tasks_show_right_completions():
    import numpy as np

    task = make_task("countdown")
    pairs = task.demonstrations(8, np.random.default_rng(0))
    assert len(pairs) == 8 and all(isinstance(text, str) and text for pair in pairs for text in pair)
