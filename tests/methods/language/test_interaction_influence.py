import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anypo.domains.language.toys.gru_policy import GruPolicy
from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.domains.language.toys.toy_arith import ToyArith
from anypo.loops.on_policy import step, train
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.methods.language.interaction_influence import (
    STUDY,
    InfluencePrompts,
    greedy,
    group_influence,
    influence,
    logistic_fit,
    logistic_parts,
    pair_from_target_gradients,
    prompt_gradients,
    random_groups,
    shifts,
)
from anypo.run import Run


def problem(seed=0, n=12, parameters=4):
    g = torch.Generator().manual_seed(seed)
    grads, target = torch.randn(n, parameters, generator=g).double(), torch.randn(parameters, generator=g).double()
    root, bend = (torch.randn(parameters, parameters, generator=g).double() for _ in range(2))
    return grads, root @ root.T + torch.eye(parameters).double(), target, bend @ bend.T


def terms(seed=0):
    grads, hess, target, bend = problem(seed)
    return influence(shifts(grads, hess, 30), target, bend)


def test_a_linear_target_gives_the_standard_sum():
    grads, hess, target, _ = problem()
    first, pair = influence(shifts(grads, hess, 30), target, torch.zeros(4, 4).double())
    found = group_influence(first, pair, torch.tensor([1, 4, 7]))
    assert found.interaction == 0
    torch.testing.assert_close(found.total, first[[1, 4, 7]].sum())


def test_a_group_of_one_has_half_its_self_term():
    first, pair = terms()
    for i in range(12):
        torch.testing.assert_close(group_influence(first, pair, torch.tensor([i])).total, first[i] + pair[i, i] / 2)


@given(k=st.integers(1, 9), seed=st.integers(0, 50))
@settings(max_examples=25, deadline=None)
def test_copies(k, seed):
    grads, hess, target, bend = problem(seed)
    grads[:k] = grads[0].clone()
    first, pair = influence(shifts(grads, hess, 30), target, bend)
    torch.testing.assert_close(group_influence(first, pair, torch.arange(k)).total, k * first[0] + k**2 * pair[0, 0] / 2)


def test_a_diagonal_pairwise_term_adds_up():
    first, pair = terms()
    pair = torch.diag(pair.diagonal())
    members = torch.tensor([0, 2, 5])
    alone = sum(group_influence(first, pair, torch.tensor([int(i)])).total for i in members)
    torch.testing.assert_close(group_influence(first, pair, members).total, alone)


def test_the_total_is_exact_for_a_quadratic_target_at_the_summed_shift():
    grads, hess, target, bend = problem(3)
    delta = shifts(grads, hess, 30)
    moved = delta[[2, 6, 9]].sum(0)
    found = group_influence(*influence(delta, target, bend), torch.tensor([2, 6, 9]))
    torch.testing.assert_close(found.total, target @ moved + moved @ bend @ moved / 2)


def test_membership_of_many_groups_is_that_of_each():
    first, pair = terms()
    members = random_groups(torch.randn(12, 3, generator=torch.Generator().manual_seed(0)), 5, 10, torch.Generator().manual_seed(1))
    assert members.shape == (10, 12) and (members.sum(1) == 5).all()
    together = group_influence(first, pair, members)
    for i, row in enumerate(members):
        torch.testing.assert_close(together.total[i], group_influence(first, pair, row.nonzero().flatten()).total)
    empty = group_influence(first, pair, torch.zeros(12, dtype=torch.bool))
    assert empty.total == 0


def test_an_asymmetric_hessian_is_symmetrized_and_an_indefinite_one_refused():
    grads, hess, target, bend = problem()
    skew = torch.randn(4, 4, generator=torch.Generator().manual_seed(5)).double()
    torch.testing.assert_close(shifts(grads, hess + skew - skew.T, 30), shifts(grads, hess, 30))
    pair = influence(grads, target, bend + skew - skew.T).pair
    torch.testing.assert_close(pair, pair.T)
    with pytest.raises(ValueError, match="raise damping"):
        shifts(grads, hess - 100 * torch.eye(4), 30)
    assert torch.isfinite(shifts(grads, hess - 100 * torch.eye(4), 30, damping=101.0)).all()


def test_no_hessian_and_unit_damping_is_gradient_descent():
    grads = problem()[0]
    torch.testing.assert_close(shifts(grads, torch.zeros(4, 4).double(), 30, damping=1.0), grads / 30)


def test_target_gradients_stand_in_for_the_curvature():
    grads, hess, target, _ = problem()
    delta, rows = shifts(grads, hess, 30), torch.randn(9, 4, generator=torch.Generator().manual_seed(2)).double()
    torch.testing.assert_close(pair_from_target_gradients(delta, rows), influence(delta, target, rows.T @ rows / 9).pair)


def value_of(chosen, first, pair):
    inside = torch.zeros_like(first)
    inside[chosen] = 1
    return -inside @ first + inside @ pair @ inside / 2


def test_greedy_takes_the_best_addition_each_time():
    first, pair = terms(4)
    first, pair = 30 * first, 900 * pair
    order, marginal = greedy(first, pair, 6)
    for i in range(6):
        before = order[:i].tolist()
        options = {j: value_of([*before, j], first, pair) for j in range(12) if j not in before}
        assert min(options, key=options.get) == order[i]
        torch.testing.assert_close(marginal[i], options[int(order[i])] - value_of(before, first, pair))


def test_greedy_without_interactions_takes_the_largest_influences():
    first, pair = terms(5)
    assert greedy(first, torch.zeros_like(pair), 5).order.tolist() == first.topk(5).indices.tolist()


def test_greedy_avoids_a_copy_and_stops_when_told():
    first = torch.tensor([1.0, 1.0, 0.6]).double()
    pair = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]).double()
    assert greedy(first, pair, 2).order.tolist() == [0, 2]
    assert greedy(first, pair, 3).order.tolist() == [0, 2, 1]
    assert greedy(first, pair, 3, stop_early=True).order.tolist() == [0, 2]
    nothing = greedy(-first, pair, 3, stop_early=True)
    assert nothing.order.numel() == 0 and nothing.marginal.numel() == 0
    for k in (0, 4):
        with pytest.raises(ValueError, match="between 1 and the 3 candidates"):
            greedy(first, pair, k)


def data(seed=0, n=80):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 3, generator=g).double(), torch.randint(2, (n,), generator=g)


def test_logistic_parts_are_the_derivatives_at_the_fit():
    (x, y), (x_target, y_target) = data(0), data(1)
    parts = logistic_parts(x, y, x_target, y_target, 0.05)

    def loss(w, x, y, lam=0.0):
        return torch.nn.functional.binary_cross_entropy_with_logits(x @ w, y.double()) + lam / 2 * w @ w

    derivative = torch.autograd.functional.jacobian
    assert derivative(lambda w: loss(w, x, y, 0.05), parts.w).abs().max() < 1e-10
    torch.testing.assert_close(parts.hess, torch.autograd.functional.hessian(lambda w: loss(w, x, y, 0.05), parts.w))
    torch.testing.assert_close(parts.grads[7], derivative(lambda w: loss(w, x[7:8], y[7:8]), parts.w))
    torch.testing.assert_close(parts.tgrad, derivative(lambda w: loss(w, x_target, y_target), parts.w))
    torch.testing.assert_close(parts.thess, torch.autograd.functional.hessian(lambda w: loss(w, x_target, y_target), parts.w))


def test_the_fit_is_that_of_scikit_learn():
    linear_model = pytest.importorskip("sklearn.linear_model")
    x, y = data()
    reference = linear_model.LogisticRegression(C=1 / (0.05 * len(x)), fit_intercept=False, tol=1e-10, max_iter=1000).fit(
        x.numpy(), y.numpy()
    )
    torch.testing.assert_close(logistic_fit(x, y, 0.05), torch.tensor(reference.coef_[0]), rtol=1e-4, atol=1e-5)


def test_fitting_the_kept_rows_is_fitting_without_the_others():
    x, y = data()
    keep = torch.ones(2, 80, dtype=torch.bool)
    keep[1, :30] = False
    found = logistic_fit(x, y, 0.01, keep)
    torch.testing.assert_close(found[0], logistic_fit(x, y, 0.01))
    torch.testing.assert_close(found[1], logistic_fit(x[30:], y[30:], 0.01))


def test_the_shift_of_one_example_is_the_first_step_of_retraining_without_it():
    x, y = data(n=2000)
    parts = logistic_parts(x, y, x, y, 0.01)
    keep = torch.ones(1, 2000, dtype=torch.bool)
    keep[0, 3] = False
    actual = logistic_fit(x, y, 0.01, keep)[0] - parts.w
    torch.testing.assert_close(shifts(parts.grads, parts.hess, 2000)[3], actual, rtol=0.03, atol=2e-6)


def test_the_study_runs():
    found = STUDY.run(seed=1, sizes=(10,), groups=20)
    assert set(found) == {"correlation_first_10", "error_first_10", "correlation_10", "error_10"}
    assert found["correlation_10"] > 0.5 and found["error_10"] < found["error_first_10"]


def half_solved(**options):
    """A run on token_bandit whose first 8 of 16 prompts are solved for good."""
    task = TokenBandit(seed=0)
    policy = task.policy()
    with torch.no_grad():
        for prompt in range(8):
            policy.logits[prompt].scatter_(1, task.targets[prompt, 0][:, None], 40.0)
    return Run(GRPO.but(select=InfluencePrompts(**options)), policy, task, steps=4, seed=0)


def test_prompts_without_a_signal_are_left_out():
    run = half_solved(prompts=4, group_size=8, pool=4, held_out=16, attempts=64)
    batch = step(run)
    assert len(batch) == 32 and len(torch.unique(batch.context)) == 4 and batch.context.min() >= 8
    assert run.history[-1]["foreseen"] < 0
    assert run.actions == 2 * (32 + 2 * 16 * 64)  # the attempts that only measure count too


def test_prompt_gradients_average_to_the_gradient_of_the_batch():
    run = half_solved(prompts=4)
    batch = run.collect([p.but(samples=32) for p in run.task.prompts(16, run.rng)])
    batch.reward = run.task.score(batch, run)
    rows = prompt_gradients(batch, run)
    advantage = batch.reward - batch.reward.view(16, 32).mean(1).repeat_interleave(32)
    loss = -(run.policy.evaluate(batch, {"logp"})["logp"] * advantage[:, None]).sum(1).mean()
    wanted = torch.autograd.grad(loss, run.policy.logits)[0].flatten()
    torch.testing.assert_close(rows.mean(0)[: wanted.numel()], wanted)
    assert rows.shape[0] == 16 and not rows[:8].abs().gt(1e-12).any() and not rows[:, wanted.numel() :].any()


def test_a_network_trains_on_chosen_prompts_and_resumes():
    def fresh():
        method = GRPO.but(select=InfluencePrompts(prompts=2, group_size=4, pool=2, held_out=2, attempts=2))
        return Run(method, GruPolicy(hidden=16, seed=0), ToyArith(small=True), steps=4, seed=0)

    whole, first, second = fresh(), fresh(), fresh()
    train(whole)
    for _ in range(2):
        step(first)
    second.load_state_dict(first.state_dict())
    train(second)
    for mine, other in zip(whole.policy.parameters(), second.policy.parameters(), strict=True):
        assert torch.isfinite(mine).all() and torch.equal(mine, other)


@pytest.mark.parametrize("options", [{"pool": 0}, {"held_out": 0}, {"attempts": 1}])
def test_a_selection_that_cannot_measure_is_refused(options):
    with pytest.raises(ValueError, match="select.attempts at least 2"):
        step(half_solved(**options))
