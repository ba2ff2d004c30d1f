import math

import pytest
import torch

from anypo import api
from anypo.domains.tabular.linear_mdp import dirichlet
from anypo.domains.tabular.mdp import evaluate
from anypo.domains.tabular.robust_mdp import FailState, regularized_value, robust_dp, robust_evaluation, tv_worst
from anypo.domains.tabular.tasks import EpisodicLosses
from anypo.loops.on_policy import step, train
from anypo.methods.tabular.dr_rpo import METHOD, bonus, gram_inverse, optimistic_backup, policy_update, robust_estimate
from anypo.run import Run


def simplex(*shape, seed=0):
    return dirichlet(torch.ones(shape[-1]).double(), shape[:-1], torch.Generator().manual_seed(seed))


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def linear_problem(seed=0, states=4, actions=3, size=3, horizon=3):
    """features, reward weights, factors, reference"""
    tables = (
        normal(horizon, size, seed=seed).abs(),
        simplex(horizon, size, states, seed=seed + 1),
        simplex(horizon, states, actions, seed=seed + 2),
    )
    return simplex(states, actions, size, seed=seed + 3), *tables


def test_the_worst_case_is_a_distribution_within_the_ball():
    p, v = simplex(50, 6), normal(50, 6, seed=1)
    worst = tv_worst(p, v, 0.25).worst
    torch.testing.assert_close(worst.sum(-1), torch.ones(50).double())
    assert (worst >= 0).all() and ((worst - p).abs().sum(-1) / 2 <= 0.25 + 1e-12).all()


def test_full_radius_is_the_smallest_value_and_radius_zero_the_mean():
    p, v = simplex(20, 4), normal(20, 4, seed=1)
    torch.testing.assert_close(tv_worst(p, v, 1.0).value, v.amin(-1))
    torch.testing.assert_close(tv_worst(p, v, 0.0).value, (p * v).sum(-1))
    with pytest.raises(ValueError, match="in \\[0,1\\]"):
        tv_worst(p, v, 1.5)


def test_radius_zero_is_the_regularized_linear_problem():
    features, weights, factors, reference = problem = linear_problem()
    plan = robust_dp(*problem, 0.0, 0.3)
    transition = torch.einsum("sad,hdt->hsat", features, factors)
    surprise = plan.policy.log() - reference.log()
    values = evaluate(transition, plan.policy, torch.einsum("sad,hd->hsa", features, weights) - 0.3 * surprise)
    torch.testing.assert_close(values.v, plan.value)


def test_one_hot_features_perturb_each_pair_on_its_own():
    states, actions, horizon = 3, 2, 2
    features = torch.eye(states * actions).double().reshape(states, actions, -1)
    reward, transition = normal(horizon, states, actions), simplex(horizon, states, actions, states)
    reference = simplex(horizon, states, actions, seed=4)
    plan = robust_dp(features, reward.flatten(1), transition.flatten(1, 2), reference, 0.2, 0.5)
    expected = reward[0] + tv_worst(transition[0], plan.value[1].expand(states, actions, states), 0.2).value
    torch.testing.assert_close(plan.q[0], expected)


def test_the_plan_is_worth_what_it_says_and_no_policy_more():
    problem = linear_problem(5)
    plan = robust_dp(*problem, 0.2, 0.5)
    torch.testing.assert_close(robust_evaluation(*problem, plan.policy, 0.2, 0.5).value, plan.value)
    others = simplex(30, 3, 4, 3, seed=9)
    assert (robust_evaluation(*problem, others, 0.2, 0.5).value <= plan.value + 1e-12).all()


def test_a_full_step_forgets_the_old_policy_and_its_value_is_the_soft_one():
    policy, other, reference = simplex(4, 3), simplex(4, 3, seed=1), simplex(4, 3, seed=2)
    q = normal(4, 3)
    new = policy_update(policy, reference, q, 2.0, 0.5).policy
    torch.testing.assert_close(new, policy_update(other, reference, q, 2.0, 0.5).policy)
    torch.testing.assert_close(new, (reference.log() + q / 0.5).softmax(-1))
    value = regularized_value(new, reference, q, 0.5)
    torch.testing.assert_close(value.value, value.optimum)
    with pytest.raises(ValueError, match="1/beta"):
        policy_update(policy, reference, q, 2.1, 0.5)


def test_zero_probabilities_stay_finite():
    certain = torch.tensor([[1.0, 0.0]]).double()
    found = policy_update(certain, torch.full((1, 2), 0.5).double(), torch.tensor([[0.0, 1.0]]).double(), 1.0, 0.5).policy
    assert torch.isfinite(found).all() and torch.isfinite(regularized_value(certain, certain, torch.zeros(1, 2).double(), 0.5).value).all()


def test_counted_rows_are_repeated_rows():
    rows, values, counts = simplex(5, 3), normal(5).abs(), torch.tensor([2, 0, 1, 3, 0])
    once = robust_estimate(rows.repeat_interleave(counts, 0), values.repeat_interleave(counts), 1.0, 0.2)
    counted = robust_estimate(rows, values, 1.0, 0.2, counts=counts.double())
    torch.testing.assert_close(counted.weights, once.weights)
    torch.testing.assert_close(counted.inverse, once.inverse)


def test_with_much_data_the_estimate_is_the_worst_case():
    """One-hot rows in the proportions of three distributions; the smallest value is that of the fail state, 0."""
    p, values = simplex(3, 4), torch.tensor([0.0, 0.7, 0.3, 1.2]).double()
    rows = torch.eye(3).double().repeat_interleave(4, 0)
    found = robust_estimate(rows, values.repeat(3), 1e-9, 0.2, counts=1e6 * p.flatten()).weights
    torch.testing.assert_close(found, tv_worst(p, values.expand(3, 4), 0.2).value, rtol=1e-6, atol=1e-6)


def test_no_data_is_nothing_known_and_full_doubt():
    rows, none = simplex(6, 3), torch.zeros(6).double()
    found = robust_estimate(rows, normal(6).abs(), 4.0, 0.3, counts=none)
    assert (found.weights == 0).all()
    torch.testing.assert_close(gram_inverse(rows, none, 4.0), torch.eye(3).double() / 4)
    torch.testing.assert_close(bonus(simplex(2, 2, 3), found.inverse, 3.0).bonus, torch.full((2, 2), 1.5).double())


def test_the_fail_state_is_worth_nothing_and_values_keep_to_their_range():
    task = FailState(copies=2)
    uniform = torch.full(task.shape, 0.5).double()
    counts = torch.zeros(*task.shape, 4).double()
    found = optimistic_backup(
        task.features, task.reward_table, counts, uniform, uniform, task.fail, radius=0.3, scale=50.0, reg=1.0, eta=20.0, beta=0.05
    )
    assert (found.q[..., task.fail, :] == 0).all() and (found.value[..., task.fail] == 0).all()
    limit = torch.tensor([3.0, 2.0, 1.0]).double()[:, None, None].expand(3, 3, 2)
    assert torch.equal(found.q[0, :, :3], limit)


@pytest.mark.parametrize("rate", [None, 1.0])
def test_the_step_of_the_two_losses_is_the_mirror_step(rate):
    task = FailState(copies=2)
    run = Run(METHOD.set("update.rate", rate), task.policy(), task, steps=3)
    step(run)
    before = run.policy.table
    batch = step(run)
    expected = policy_update(before, batch.signals["ref_table"], batch.signals["optimistic_q"], rate or 20.0, 0.05).policy
    torch.testing.assert_close(run.policy.table, expected)
    assert not batch.advantage.requires_grad


def test_copies_learn_on_their_own():
    task = FailState(copies=2)
    run = train(Run(METHOD, task.policy(), task, steps=4))
    counts = run.method.credit.counts
    torch.testing.assert_close(counts.sum((2, 3, 4)), torch.full((2, 3), 4.0).double())
    alone = optimistic_backup(
        task.features, task.reward_table, counts[1], run.policy.table[1], torch.full((3, 4, 2), 0.5).double(), task.fail, radius=0.3, scale=2.0,
        reg=1.0, eta=20.0, beta=0.05,
    )  # fmt: skip
    torch.testing.assert_close(alone.policy, run.policy.table[1])


def test_it_resumes_to_the_same_numbers(tmp_path):
    def run_of(steps, out):
        task = FailState(copies=2)
        run = Run(METHOD.set("update.rate", 5.0), task.policy(), task, steps=steps, out=out)
        run.resume()
        return train(run)

    whole = run_of(4, tmp_path / "whole")
    run_of(2, tmp_path / "halves")
    halves = run_of(4, tmp_path / "halves")
    assert torch.equal(whole.policy.logits, halves.policy.logits)
    assert all(math.isfinite(r["loss"]) and math.isfinite(r["kl"]) for r in whole.history)
    assert (whole.policy.table - 0.5).abs().max() > 1e-3


def test_what_it_cannot_learn_from_is_refused():
    task = FailState()
    for path, value, words in (("update.rate", 30.0, "update.rate lies in"), ("regularize.0.coefficient", 0.0, "coefficient above 0")):
        with pytest.raises(ValueError, match=words):
            train(Run(METHOD.set(path, value), task.policy(), task, steps=1))
    losses = EpisodicLosses(copies=2)
    with pytest.raises(ValueError, match="use fail_state"):
        train(Run(METHOD, losses.policy(), losses, steps=1))
    with pytest.raises(ValueError, match="radius in"):
        FailState(radius=2.0)


def test_it_trains_by_name(tmp_path):
    result = api.train("dr_rpo", steps=2, out=tmp_path / "run", copies=3)
    assert result.after["worst_return"] <= result.after["return"]
    found = api.evaluate(str(tmp_path / "run"), copies=3)
    assert found["return"]["value"] == pytest.approx(result.after["return"])
