"""Exploration rules, off-policy estimates, drift numbers, the payment world, and the chain of generations."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anypo.domains.tabular.payments import fit, payments, predict, transactions, uniform_log_loss
from anypo.methods.tabular.regression_oracle import KINDS, STUDY, drift, generations, learn, ope, oscillation, probabilities, take


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def rows(seed=0, count=50, actions=5):
    prediction, luck = torch.rand(2, count, actions, generator=generator(seed), dtype=torch.float64)
    return prediction, (luck < 0.6) | (luck == luck.amin(-1, keepdim=True))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(KINDS), st.floats(0, 1))
def test_a_distribution_over_what_is_available(seed, kind, gamma):
    prediction, available = rows(seed)
    if kind in ("squarecb", "fastcb"):
        gamma *= 1000
    prediction = torch.where(available, prediction, float("nan"))  # what cannot be taken plays no part
    p = probabilities(prediction, available, kind, gamma).probability
    torch.testing.assert_close(p.sum(-1), torch.ones(len(p), dtype=torch.float64))
    assert (p[~available] == 0).all() and (p >= 0).all()


@pytest.mark.parametrize("kind", ["squarecb", "softmax"])
def test_without_gamma_it_is_uniform(kind):
    prediction, available = rows()
    torch.testing.assert_close(
        probabilities(prediction, available, kind, 0.0).probability, probabilities(prediction, available, "uniform").probability
    )


@pytest.mark.parametrize("kind", ["squarecb", "fastcb"])
def test_a_large_gamma_is_greedy_and_shares_exact_ties(kind):
    prediction = torch.tensor([[0.2, 0.7, 0.4], [0.6, 0.6, 0.1], [0.9, 0.3, 0.5]], dtype=torch.float64)
    available = torch.tensor([[1, 1, 1], [1, 1, 1], [0, 1, 0]], dtype=torch.bool)
    wanted = torch.tensor([[0, 1, 0], [0, 0, 0], [0, 1, 0]], dtype=torch.float64)
    found = probabilities(prediction, available, kind, 1e12).probability
    torch.testing.assert_close(found[[0, 2]], wanted[[0, 2]])
    assert found[1, 1] == pytest.approx(1 / 3) and found[1, 0] == pytest.approx(2 / 3) and found[1, 2] < 1e-9
    assert found[2, 1] == 1


def test_fastcb_with_equal_losses_is_uniform_and_with_a_sure_action_certain():
    available = torch.ones(2, 4, dtype=torch.bool)
    equal = torch.tensor([[0.3] * 4, [1.0] * 4], dtype=torch.float64)
    torch.testing.assert_close(probabilities(equal, available, "fastcb", 50.0).probability, torch.full((2, 4), 0.25).double())
    sure = torch.tensor([[1.0, 0.5, 0.2, 0.1]], dtype=torch.float64)
    assert probabilities(sure, available[:1], "fastcb", 50.0).probability.tolist() == [[1.0, 0.0, 0.0, 0.0]]


def test_what_cannot_be_explored_is_refused():
    prediction, available = rows()
    with pytest.raises(ValueError, match="unknown exploration 'ucb'"):
        probabilities(prediction, available, "ucb")
    with pytest.raises(ValueError, match="needs an available action"):
        probabilities(prediction, torch.zeros_like(available))


def test_estimates_of_the_logging_policy_are_the_mean_reward():
    prediction, available = rows(1)
    target = probabilities(prediction, available, gamma=10.0).probability
    action = torch.multinomial(target, 1, generator=generator(2))
    reward = (torch.rand(len(target), generator=generator(3)) < 0.5).double()
    found = ope(reward, action[:, 0], target.gather(1, action)[:, 0], target, prediction, math.inf)
    for name in ("ips", "snips"):
        torch.testing.assert_close(getattr(found, name), reward.mean())
    torch.testing.assert_close(found.ess, torch.tensor(float(len(target)), dtype=torch.float64))
    torch.testing.assert_close(
        ope(reward, action[:, 0], target.gather(1, action)[:, 0], target, 0 * prediction, math.inf).dr, reward.mean()
    )  # a model of zeros turns the doubly robust estimate into the weighted one


def test_auc_counts_pairs_with_ties_half():
    reward = (torch.rand(40, generator=generator(), dtype=torch.float64) < 0.4).double()
    score = torch.rand(40, generator=generator(1), dtype=torch.float64).mul(5).round() / 5
    won, lost = score[reward == 1, None], score[None, reward == 0]
    wanted = float(((won > lost).double() + 0.5 * (won == lost)).mean())
    assert drift(reward, torch.zeros(40, dtype=torch.int64), score, 3).auc == pytest.approx(wanted, rel=1e-12)


def test_log_loss_of_certain_mistakes_is_finite_and_one_action_has_no_coverage():
    found = drift(torch.tensor([1.0, 0.0]).double(), torch.tensor([2, 2]), torch.tensor([0.0, 1.0]).double(), 3)
    assert math.isfinite(found.log_loss) and found.log_loss > 20 and found.coverage == 0


def test_a_straight_line_does_not_oscillate():
    assert oscillation(torch.arange(8, dtype=torch.float64) * 0.3 + 2) == (0.0, 0)
    wave = torch.tensor([0.0, 1.0] * 6, dtype=torch.float64) + torch.arange(12) * 0.05
    assert oscillation(wave).lag1 < -0.8 and oscillation(wave).sign_changes == 10


def test_the_oracle_is_at_the_minimum_and_keeps_the_prior_where_it_saw_nothing():
    world = payments(generator(4))
    data = transactions(world, 400, generator(5))
    action = torch.randint(5, (400,), generator=generator(6))  # action 5 is never taken
    reward = (data.approval[torch.arange(400), action] > 0.5).double()
    weight = torch.rand(400, generator=generator(7), dtype=torch.float64)
    found = fit(data.context, action, reward, 6, weight).requires_grad_()
    p = predict(found, data.context)[torch.arange(400), action]
    loss = torch.nn.functional.binary_cross_entropy(p, reward, weight, reduction="sum") + (found**2).sum() / 2
    assert torch.autograd.grad(loss, found)[0].abs().max() < 1e-6
    assert (predict(found, data.context)[:, 5] == 0.5).all()
    torch.testing.assert_close(fit(data.context, action, reward, 6), fit(data.context, action, reward, 6, torch.ones(400).double()))


def test_one_class_and_few_rows_do_not_explode():
    context = 3 * torch.randn(5, 6, generator=generator(), dtype=torch.float64)
    found = fit(context, torch.zeros(5, dtype=torch.int64), torch.ones(5, dtype=torch.float64), 2)
    assert torch.isfinite(found).all() and found.abs().max() < 5


def test_every_transaction_has_an_action_and_the_true_model_has_the_least_loss():
    rows = transactions(payments(generator()), 5000, generator(1))
    assert rows.available.any(-1).all() and abs(float(rows.available.double().mean()) - 0.7) < 0.02
    true, off = (uniform_log_loss(p, rows.approval, rows.available) for p in (rows.approval, rows.approval * 0.9))
    assert true < off


def test_propensities_are_those_of_the_decision():
    data = transactions(payments(generator()), 300, generator(1))
    guess = torch.rand(300, 6, generator=generator(2), dtype=torch.float64)
    chance = probabilities(guess, data.available, gamma=30.0).probability
    log = take(data, chance, guess, generator(3))
    assert data.available[torch.arange(300), log.action].all()
    assert torch.equal(log.propensity, chance[torch.arange(300), log.action]) and torch.equal(
        log.prediction, guess[torch.arange(300), log.action]
    )


def test_importance_weights_of_uniform_logs_change_nothing():
    data = transactions(payments(generator()), 300, generator(1))
    guess = torch.full((300, 6), 0.5, dtype=torch.float64)
    log = take(data, probabilities(guess, data.available, "uniform").probability, guess, generator(3))
    torch.testing.assert_close(learn([log], 6, cap=10.0), learn([log], 6))


def test_delay_and_prior():
    """A batch that comes two generations late leaves three generations uniform; the first two have no model at all."""
    late = generations(0, count=5, size=300, delay=2)
    uniform = generations(0, "uniform", count=5, size=300, delay=2)
    assert late[:3] == uniform[:3] and late[3] != uniform[3]
    assert late[0].test_log_loss == late[2].test_log_loss == pytest.approx(math.log(2)) and late[3].test_log_loss < math.log(2)


def test_a_memory_longer_than_the_run_keeps_everything():
    assert generations(1, count=4, size=200, window=4) == generations(1, count=4, size=200, window=50)
    assert generations(1, count=4, size=200, window=1) != generations(1, count=4, size=200, window=2)


def test_the_study_repeats_itself():
    first, again = (STUDY.run(seed=3, count=6, size=300) for _ in range(2))
    assert first == again and all(math.isfinite(v) for v in first.values())
    assert first["last_regret"] < STUDY.run(seed=3, count=6, size=300, kind="uniform")["last_regret"]
