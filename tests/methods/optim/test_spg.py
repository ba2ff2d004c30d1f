import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from anypo.methods.optim.spg import (
    STUDY,
    TARGETS,
    BlockReplicas,
    DropoutReplicas,
    Spg,
    advantages,
    hidden_replicas,
    loss,
    rates,
    replicas,
    retrain,
    run,
    select,
    trajectory,
)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def coins(*shape, seed=0):
    return torch.randint(2, shape, generator=torch.Generator().manual_seed(seed))


def problem(seed=0):
    torch.manual_seed(seed)
    body, head = nn.Sequential(nn.Linear(6, 8), nn.ReLU()), nn.Linear(8, 3)
    return body, head, torch.randn(20, 6), torch.arange(20) % 3


def weights(*modules):
    return torch.cat([p.detach().flatten() for module in modules for p in module.parameters()])


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(1, 7))
def test_trajectories_follow_the_recurrence_with_an_absorbing_pad(seed, rows, steps):
    correct = coins(rows, steps, seed=seed)
    found = trajectory(correct)
    for i in range(rows):
        o = 1
        for t in range(steps):
            c = int(correct[i, t])
            assert int(found.observed[i, t]) == o
            assert int(found.mask[i, t]) == (o == 1) and int(found.reward[i, t]) == (o == 1) * (1 if c else -1)
            o = o * (o + c) - 1 if o >= 0 else -1
    wrong = (correct == 0).any(1)
    assert torch.equal((found.reward == -1).sum(1), wrong.long())  # the failing step is in the mask, once


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.0, 1.0))
def test_advantages_are_returns_less_the_mean_of_the_running(seed, gamma):
    correct = coins(5, 4, seed=seed)
    mask, reward = trajectory(correct).mask, trajectory(correct).reward
    found = advantages(correct.double(), gamma)
    for t in range(4):
        returns = sum((gamma ** (k - t) * reward[:, k].double() for k in range(t, 4)), torch.zeros(5, dtype=torch.float64))
        running = mask[:, t] == 1
        baseline = returns[running].mean() if running.any() else 0.0
        torch.testing.assert_close(found[:, t], torch.where(running, returns - baseline, 0.0))


def test_without_replicas_or_policy_loss_it_is_cross_entropy():
    base, logp = normal(7).requires_grad_(), normal(7, 4, seed=1).requires_grad_()
    assert loss(logp[:, :0], coins(7, 0), base) == -base.mean()
    plain = loss(logp, coins(7, 4), base, lambda_pg=0.0)
    plain.backward()
    assert plain == -base.mean() and (logp.grad == 0).all()
    torch.testing.assert_close(base.grad, torch.full_like(base, -1 / 7))


@pytest.mark.parametrize(("cumulative", "lambda_pg"), [((), 0.1), (TARGETS, 0.0)])
def test_training_without_replicas_or_policy_loss_is_plain_training(cumulative, lambda_pg):
    body, head, x, label = problem()
    torch.manual_seed(1)
    list(retrain(body, head, DropoutReplicas(8, cumulative), x, label, Spg(lambda_pg=lambda_pg), 1, batch=20))
    mine = weights(body, head)
    body, head, x, label = problem()
    optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()], lr=1e-3)
    nn.functional.cross_entropy(head(body(x)), label).backward()
    optimizer.step()
    torch.testing.assert_close(mine, weights(body, head))


def test_one_replica_is_a_bandit_with_a_batch_baseline():
    correct, logp = coins(9, 1), normal(9, 1).requires_grad_()
    reward = 2.0 * correct[:, 0] - 1
    loss(logp, correct.double(), torch.zeros(9, dtype=torch.float64), lambda_pg=1.0).backward()
    torch.testing.assert_close(logp.grad[:, 0], -(reward - reward.mean()).double() / 9)


def test_when_all_are_right_nothing_is_learned_from_the_replicas():
    right = torch.ones(6, 4)
    assert (advantages(right, 0.9) == 0).all() and (trajectory(right).observed == 1).all()


def test_a_lone_example_and_steps_that_nobody_reaches_have_no_advantage():
    assert (advantages(torch.tensor([[1, 0, 1]])) == 0).all()
    found = advantages(torch.tensor([[0, 1], [0, 0]]))
    assert torch.isfinite(found).all() and (found == 0).all()


def test_what_stands_after_the_end_does_not_matter():
    correct, base = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 0]]), torch.zeros(2, dtype=torch.float64)
    clean = normal(2, 4).requires_grad_()
    bad = clean.detach().clone()
    bad[0, 2], bad[0, 3] = float("nan"), -torch.inf
    bad.requires_grad_()
    one, other = loss(clean, correct, base), loss(bad, correct, base)
    one.backward()
    other.backward()
    assert torch.equal(one, other) and torch.equal(clean.grad, bad.grad) and (bad.grad[0, 2:] == 0).all()


def test_no_gradient_goes_through_the_advantages():
    assert not advantages(normal(3, 4).requires_grad_() > 0).requires_grad
    assert not advantages(torch.ones(3, 4, requires_grad=True)).requires_grad


def test_rates_are_those_of_dropouts_in_a_row():
    cumulative = torch.tensor(TARGETS, dtype=torch.float64)
    torch.testing.assert_close(1 - (1 - rates(cumulative)).cumprod(0), cumulative)
    assert rates(cumulative[:0]).shape == (0,)
    for bad in ([0.2, 0.1], [-0.1, 0.2], [0.5, 1.0]):
        with pytest.raises(ValueError, match="must not fall"):
            rates(torch.tensor(bad))


def test_replicas_without_dropout_and_with_zero_maps_are_the_base():
    hidden, head = normal(5, 4), normal(4, 3, seed=1)
    found = replicas(hidden, torch.ones(3, 5, 4, dtype=torch.float64), torch.zeros(3), torch.zeros(3, 4, 4, dtype=torch.float64), head)
    torch.testing.assert_close(found, (hidden @ head).softmax(-1)[:, None].expand(5, 3, 3))


def test_dropout_is_cumulative():
    torch.manual_seed(0)
    states = DropoutReplicas(40)(torch.ones(500, 40)).detach()
    for t, rate in enumerate(TARGETS):
        assert (states[:, t] == 0).float().mean() == pytest.approx(rate, abs=0.015)
        assert states[:, t][states[:, t] != 0].mean() == pytest.approx(1 / (1 - rate), rel=1e-5)
    assert ((states[:, :-1] == 0) <= (states[:, 1:] == 0)).all()  # dropped stays dropped


def test_hidden_replicas_work_on_the_output_of_the_one_before():
    hidden, keep, p, linear = normal(2, 3), coins(2, 2, 3).double(), torch.tensor([0.5, 0.2], dtype=torch.float64), normal(2, 3, 3, seed=1)
    first = hidden * keep[0] * 2
    first = first + first @ linear[0]
    second = first * keep[1] / 0.8
    torch.testing.assert_close(hidden_replicas(hidden, keep, p, linear), torch.stack([first, second + second @ linear[1]], 1))


@pytest.mark.parametrize("temporary", [DropoutReplicas(8), BlockReplicas(8)])
def test_in_eval_mode_fresh_replicas_are_the_base_and_all_of_them_learn(temporary):
    body, head, x, label = problem()
    with torch.no_grad():
        temporary.eval()
        assert torch.equal(temporary(body(x)), body(x)[:, None].expand(20, 5, 8))
    temporary.train()
    before = [p.detach().clone() for p in temporary.parameters()]
    losses = list(retrain(body, head, temporary, x, label, Spg(action="sample"), 40, batch=10))
    assert len(losses) == 80 and torch.isfinite(torch.tensor(losses)).all()
    assert all(not torch.equal(a, b) for a, b in zip(before, temporary.parameters(), strict=True))


def test_by_argmax_fresh_blocks_predict_alike_and_only_the_first_learns():
    body, head, x, label = problem()
    temporary = BlockReplicas(8)
    Spg()(body, head, temporary, x, label).backward()
    assert (temporary.outer.grad[0] != 0).any() and (temporary.outer.grad[1:].abs() < 1e-8).all()


def test_an_action_is_sampled_from_the_replica():
    torch.manual_seed(0)
    head = nn.Linear(1, 3)
    seen = []

    class Recorded(Spg):
        def correct(self, action, label):
            seen.append(action)
            return super().correct(action, label)

    x = torch.ones(20_000, 1)
    Recorded(action="sample")(nn.Identity(), head, DropoutReplicas(1, (0.0,)), x, torch.zeros(20_000, dtype=torch.long))
    expected = head(x[0]).softmax(-1)
    torch.testing.assert_close(seen[0].flatten().bincount(minlength=3) / 20_000, expected.detach(), atol=0.015, rtol=0)


def test_the_body_runs_once_a_batch():
    body, head, x, label = problem()
    calls = []
    body.register_forward_hook(lambda *_: calls.append(1))
    list(retrain(body, head, DropoutReplicas(8), x, label, Spg(action="sample"), 2, batch=10))
    assert len(calls) == 4


def test_the_module_computes_the_pure_loss():
    body, head, x, label = problem()
    temporary = DropoutReplicas(8).eval()
    logits = head(body(x))
    correct = (logits.argmax(1) == label)[:, None].expand(20, 5)
    chosen = logits.log_softmax(1).max(1).values[:, None].expand(20, 5)
    expected = loss(chosen, correct, logits.log_softmax(1)[torch.arange(20), label], 0.9, 0.3)
    torch.testing.assert_close(Spg(0.9, 0.3)(body, head, temporary, x, label), expected)


def test_the_best_replica_is_selected_and_ties_go_to_the_mildest():
    assert select(torch.tensor([0.5, 0.7, 0.7]), torch.tensor([0.125, 0.25, 0.5])) == 0.25


def test_bad_input_gets_a_sentence():
    with pytest.raises(ValueError, match="use action argmax or sample"):
        Spg(action="best")
    with pytest.raises(ValueError, match="gamma in"):
        Spg(gamma=1.5)


def test_the_study_runs_and_repeats():
    found = run(epochs=2, examples=60)
    assert found == STUDY.run(epochs=2, examples=60) and set(found) == {"plain", "spg"}
