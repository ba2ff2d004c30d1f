import math

import pytest
import torch

from anypo import api
from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.domains.tabular.tasks import EpisodicLosses
from anypo.loops.tabular import step, train
from anypo.methods.tabular.bobw_po import (
    METHOD,
    AdaptRates,
    barrier_increment,
    dilated_bonus,
    ftrl,
    local_bonus,
    loss_to_go,
    q_estimate,
    rates,
    with_regularizer,
)
from anypo.run import Run

REGULARIZERS = ("tsallis", "shannon", "logbarrier")


def run_of(method, steps, out=None, seed=0, **task):
    problem = EpisodicLosses(seed=seed, **task)
    run = Run(method, problem.policy(), problem, steps=steps, seed=seed, out=out, checkpoint_every=2)
    if out is not None:
        run.resume()
    return train(run)


@pytest.mark.parametrize("regularizer", REGULARIZERS)
def test_equal_losses_give_the_uniform_policy(regularizer):
    torch.testing.assert_close(ftrl(torch.full((2, 5), 3.0).double(), 0.3, regularizer).policy, torch.full((2, 5), 0.2).double())


@pytest.mark.parametrize("regularizer", REGULARIZERS)
def test_the_leader_minimizes_its_objective(regularizer):
    generator = torch.Generator().manual_seed(0)
    loss, eta = torch.randn(6, 4, generator=generator).double() * 3, torch.rand(6, generator=generator).double() + 0.1
    psi = {
        "tsallis": lambda p: -2 * p.sqrt().sum(-1),
        "shannon": lambda p: (p * p.log()).sum(-1),
        "logbarrier": lambda p: -p.log().sum(-1),
    }[regularizer]
    best = ftrl(loss, eta, regularizer).policy
    objective = (best * loss).sum(-1) + psi(best) / eta
    for _ in range(50):
        other = 0.9 * best + 0.1 * torch.rand(6, 4, generator=generator).double().softmax(-1)
        assert ((other * loss).sum(-1) + psi(other) / eta >= objective - 1e-12).all()


@pytest.mark.parametrize("regularizer", REGULARIZERS)
def test_losses_of_any_size_stay_finite(regularizer):
    policy = ftrl(torch.tensor([[0.0, 1e12, 5.0], [-1e9, 0.0, 1e9]]).double(), 50.0, regularizer).policy
    assert torch.isfinite(policy).all()
    torch.testing.assert_close(policy.sum(-1), torch.ones(2).double())


def test_one_state_is_the_tsallis_inf_bandit():
    run = run_of(METHOD, 5, horizon=1, states=1, copies=2)
    problem = EpisodicLosses(horizon=1, states=1, copies=2)
    policy = problem.policy()
    other = Run(METHOD.but(regularize=()), policy, problem, steps=5)
    cumulative = torch.zeros(2, 3).double()
    for t in range(1, 6):
        batch = step(other)
        table = ftrl(cumulative, 1.0 if t == 1 else 1 / (2 + math.sqrt(t - 1)), "tsallis").policy
        chosen = batch.action[:, 0]
        cumulative[torch.arange(2), chosen] += batch.signals["loss"][:, 0] / table[torch.arange(2), chosen]
        torch.testing.assert_close(policy.table[:, 0, 0], ftrl(cumulative, 1 / (2 + math.sqrt(t)), "tsallis").policy)
    assert torch.isfinite(run.policy.logits).all()


def test_shannon_with_a_fixed_rate_is_exp3():
    problem = EpisodicLosses(horizon=1, states=1, copies=2)
    policy = problem.policy()
    run = Run(with_regularizer("shannon", "fixed", c0=10.0), policy, problem, steps=6)
    cumulative = torch.zeros(2, 3).double()
    for _ in range(6):
        before = policy.table[:, 0, 0]
        batch = step(run)
        chosen = batch.action[:, 0]
        cumulative[torch.arange(2), chosen] += batch.signals["loss"][:, 0] / before[torch.arange(2), chosen]
        torch.testing.assert_close(policy.table[:, 0, 0], (-0.1 * cumulative).softmax(-1))


def test_a_state_with_full_occupancy_has_the_bandits_rate():
    eta = rates(torch.ones(9).double(), torch.full((9, 3), 1 / 3).double(), "tsallis", 1, 2.0, 1.0).eta
    torch.testing.assert_close(1 / eta, 2 + torch.arange(1, 10).double().sqrt())


def test_no_weight_no_bonus_and_a_fixed_rate_pays_none():
    policy = torch.full((3,), 1 / 3).double()
    assert local_bonus(policy, 0.5, 0.4, "tsallis", cb=0.0).bonus == 0
    assert local_bonus(policy, 0.5, 0.5, "shannon").bonus == 0
    assert local_bonus(policy, 0.5, 0.4, "shannon").bonus > 0
    assert local_bonus(torch.eye(3)[0].double(), 0.5, 0.4, "shannon").bonus == 0
    problem = EpisodicLosses()
    assert (dilated_bonus(problem.transition, problem.policy().table, torch.zeros(8, 2, 2).double(), 2).bonus == 0).all()


def test_the_estimate_is_unbiased():
    generator = torch.Generator().manual_seed(1)
    policy = torch.rand(1, 2, 3, generator=generator).double()
    policy /= policy.sum(-1, keepdim=True)
    start, loss = torch.tensor([0.3, 0.7]).double(), torch.rand(2, 3, generator=generator).double()
    total = torch.zeros(1, 2, 3).double()
    for s in range(2):
        for a in range(3):
            found = q_estimate(torch.tensor([s]), torch.tensor([a]), loss[s, a][None], start[None], policy).q
            total += start[s] * policy[0, s, a] * found
    torch.testing.assert_close(total[0], loss)
    assert loss_to_go(torch.tensor([1.0, 0.0, 2.0])).tolist() == [3.0, 2.0, 2.0]


def test_credit_and_objective_together_are_the_estimate():
    problem = EpisodicLosses()
    policy = problem.policy()
    run = Run(METHOD.but(regularize=()), policy, problem, steps=3)
    step(run)
    before, table = run.method.update.cumulative, policy.table
    batch = step(run)
    estimate = q_estimate(batch.context, batch.action, batch.signals["loss"], batch.signals["occupancy"], table).q
    torch.testing.assert_close(run.method.update.cumulative - before, estimate)


def test_unreachable_states_change_nothing():
    problem = EpisodicLosses(copies=2)
    problem.start = torch.tensor([[1.0, 0.0], [1.0, 0.0]]).double()
    run = Run(METHOD, problem.policy(), problem, steps=3)
    train(run)
    assert torch.isfinite(run.policy.logits).all()
    assert (run.method.control[0].inverse[:, 0, 1] == 2.0).all()
    torch.testing.assert_close(run.policy.table[:, 0, 1].sum(-1), torch.ones(2).double())


def test_the_rate_that_follows_the_data_ignores_states_without_loss():
    policy = torch.full((1, 2, 2), 0.5).double()
    inverse = torch.full((1, 2), 2.0).double()
    assert (barrier_increment(torch.tensor([0]), torch.tensor([1]), torch.zeros(1).double(), inverse, policy) == 0).all()
    found = barrier_increment(torch.tensor([1]), torch.tensor([1]), torch.ones(1).double(), inverse, policy)
    assert found.tolist() == [[0.0, 1.0]]


@pytest.mark.parametrize("regularizer", REGULARIZERS)
def test_it_trains_and_resumes_to_the_same_numbers(regularizer, tmp_path):
    method = with_regularizer(regularizer)
    whole = run_of(method, 4, tmp_path / "whole")
    run_of(method.but(), 2, tmp_path / "halves")
    halves = run_of(method, 4, tmp_path / "halves")
    if regularizer != "shannon":  # its rate knows the length of the run
        assert torch.equal(whole.policy.logits, halves.policy.logits)
        assert [r["regret"] for r in whole.history] == [r["regret"] for r in halves.history]
    assert (whole.policy.table - 1 / 3).abs().max() > 1e-3
    assert all(math.isfinite(r["regret"]) and math.isfinite(r["loss"]) for r in whole.history)


def test_the_rates_state_survives():
    rate = AdaptRates()
    rate.load_state_dict({"total": torch.ones(1, 1, 1), "inverse": torch.ones(1, 1, 1)})
    assert torch.equal(rate.state_dict()["inverse"], torch.ones(1, 1, 1))


def test_what_it_cannot_learn_from_is_refused():
    with pytest.raises(ValueError, match="one of|use tsallis"):
        ftrl(torch.zeros(2).double(), 1.0, "l2")
    problem = EpisodicLosses(copies=2)
    with pytest.raises(ValueError, match="group_size=1"):
        train(Run(METHOD.set("select.group_size", 2), problem.policy(), problem, steps=1))
    bandit = TokenBandit(2, 3, 2)
    with pytest.raises(ValueError, match="table"):
        train(Run(METHOD, bandit.policy(), bandit, steps=1))


def test_it_trains_by_name(tmp_path):
    result = api.train("bobw_po", task="episodic_losses_adversarial", steps=3, out=tmp_path / "run", settings={"regularize.0.cb": 0.5})
    assert set(result.after) == {"return", "best_return", "regret"}
    assert result.after["return"] <= result.after["best_return"]
    found = api.evaluate(str(tmp_path / "run"))
    assert found["return"]["value"] == pytest.approx(result.after["return"])
    resumed = api.train("bobw_po", task="episodic_losses_adversarial", steps=5, resume=tmp_path / "run", settings={"regularize.0.cb": 0.5})
    assert resumed.steps == 5
    with pytest.raises(ValueError, match="no option 'rows'"):
        api.train("bobw_po", steps=1, rows=3)
