import math

import pytest
import torch

from anypo import api
from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.domains.tabular.leader import discounted_values, four_rooms, incentive_rooms, soft_response
from anypo.loops.on_policy import step, train
from anypo.methods.tabular.hpgd import (
    METHOD,
    VARIANTS,
    context_hypergradient,
    hypergradient,
    level_chances,
    return_to_go,
    rt_estimator,
    trajectory,
)
from anypo.policy import MissingSignal
from anypo.run import Run
from anypo.seams.objective import ClippedSurrogate

GAMMAS = {"gamma": 0.9, "gamma_leader": 0.8}


def problem(seed=0, states=4, actions=3, size=2):
    """transition, reward, reward_gradient, leader_reward, leader_reward_gradient, start"""
    g = torch.Generator().manual_seed(seed)
    transition = torch.rand(states, actions, states, generator=g, dtype=torch.float64)
    tables = [torch.randn(states, actions, *extra, generator=g, dtype=torch.float64) for extra in ((), (size,), (), (size,))]
    return transition / transition.sum(-1, keepdim=True), *tables, torch.full((states,), 1 / states).double()


def test_it_is_the_derivative_through_soft_value_iteration():
    transition, reward, slopes, leader, leader_slopes, start = problem()
    x = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    policy = soft_response(transition, reward + slopes @ x, 0.9, 0.4, iterations=400).policy
    objective = discounted_values(transition, policy, leader + leader_slopes @ x, 0.8)[1] @ start
    found = hypergradient(transition, reward, slopes, leader, leader_slopes, start, **GAMMAS, reg=0.4)
    torch.testing.assert_close(found.total, torch.autograd.grad(objective, x)[0])
    torch.testing.assert_close(found.objective, objective.detach())


def test_a_follower_that_ignores_the_leader_leaves_the_direct_part():
    transition, reward, slopes, *rest = problem(1)
    found = hypergradient(transition, reward, torch.zeros_like(slopes), *rest, **GAMMAS, reg=0.4)
    assert (found.indirect == 0).all() and torch.equal(found.total, found.direct)


def test_potential_based_incentives_change_nothing():
    transition, reward, _, leader, leader_slopes, start = problem(2)
    potential = torch.randn(4, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    shaping = potential[:, None] - 0.9 * torch.einsum("sat,tk->sak", transition, potential)
    found = hypergradient(transition, reward, shaping, leader, torch.zeros_like(leader_slopes), start, **GAMMAS, reg=0.4)
    torch.testing.assert_close(found.total, torch.zeros(2).double(), rtol=0, atol=1e-10)


def test_much_regularization_leaves_a_uniform_follower_and_the_direct_part():
    found = hypergradient(*problem(3), **GAMMAS, reg=1e6)
    torch.testing.assert_close(found.policy, torch.full((4, 3), 1 / 3).double(), rtol=1e-4, atol=0)
    torch.testing.assert_close(found.total, found.direct, rtol=1e-4, atol=1e-4)


def test_advantage_gradients_have_mean_zero():
    found = hypergradient(*problem(4), **GAMMAS, reg=0.4)
    torch.testing.assert_close((found.policy[..., None] * found.advantage_gradient).sum(1), torch.zeros(4, 2).double(), rtol=0, atol=1e-12)


def test_one_context_is_plain_bilevel():
    transition, reward, *rest = problem(5)
    one = context_hypergradient(transition, reward[None], *rest, torch.ones(1).double(), **GAMMAS, reg=0.4).total
    torch.testing.assert_close(one, hypergradient(transition, reward, *rest, **GAMMAS, reg=0.4).total)


def test_a_wholly_masked_row_counts_as_nothing():
    g = torch.Generator().manual_seed(0)
    change, leader = torch.randn(3, 5, 2, generator=g).double(), torch.randn(3, 5, 2, generator=g).double()
    q, mask = torch.randn(3, 5, generator=g).double(), torch.ones(3, 5, dtype=torch.bool)
    mask[2], mask[1, 3:] = False, False
    change[2], q[1, 3:] = math.nan, math.inf
    found = trajectory(change, q, leader, mask, 0.8, 0.5).gradient
    torch.testing.assert_close(found, trajectory(change[:2], q[:2], leader[:2], mask[:2], 0.8, 0.5).gradient * 2 / 3)


def test_returns_to_go():
    reward = torch.randn(2, 6, generator=torch.Generator().manual_seed(0)).double()
    expected = [[sum(0.7**k * row[t + k] for k in range(6 - t)) for t in range(6)] for row in reward.tolist()]
    torch.testing.assert_close(return_to_go(reward, 0.7), torch.tensor(expected).double())


def test_truncation_is_unbiased():
    levels = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).double()
    torch.testing.assert_close(rt_estimator(levels, level_chances(4), 2).expectation, levels[-1])


def test_a_long_training_is_the_best_response():
    transition, reward, *_ = problem(6)
    found, best = soft_response(transition, reward, 0.9, 0.1, 400), soft_response(transition, reward, 0.9, 0.1)
    torch.testing.assert_close(found.policy, best.policy)
    torch.testing.assert_close(best.policy.log() * 0.1, reward + 0.9 * transition @ best.value - best.value[:, None])


@pytest.mark.parametrize("make", [incentive_rooms, four_rooms])
def test_goals_pay_no_incentive_and_end_the_walk(make):
    game = make()
    follower, leader = game.policy().rewards()
    assert torch.equal(follower[game.is_goal], torch.ones(len(game.base), 4).double()) and (leader[game.is_goal] < 0).all()
    torch.testing.assert_close(game.transition.sum(-1), (~game.is_goal)[..., None].expand_as(follower).double())
    budget = -(follower - game.base[..., None])[0, :, 0].sum()
    assert 0 < budget < game.budget


def test_log_probs_of_the_follower_are_differentiable_in_the_incentives():
    game = incentive_rooms(horizon=30)
    policy = game.policy()
    run = Run(METHOD.set("select.group_size", 2), policy, game, steps=2)
    batch = run.method.rollout(run.method.select(game, run), run)
    logp = policy.evaluate(batch, {"logp"}).logp[0, 3]
    torch.testing.assert_close(logp.detach(), batch.logp[0, 3])
    slope = torch.autograd.grad(logp, policy.weights)[0]
    place = (0, batch.context[0, 3], batch.action[0, 3])
    for i in (0, 10):
        moved = []
        for sign in (1, -1):
            with torch.no_grad():
                policy.weights[i] += sign * 1e-5
                moved.append(policy.response()[place].log())
                policy.weights[i] -= sign * 1e-5
        torch.testing.assert_close(slope[i], (moved[0] - moved[1]) / 2e-5, rtol=1e-5, atol=1e-8)


def test_advantages_carry_no_gradient_and_end_with_the_walk():
    game = incentive_rooms(horizon=40)
    run = Run(METHOD, game.policy(), game, steps=1)
    batch = step(run)
    assert not batch.advantage.requires_grad and (batch.advantage[~batch.mask] == 0).all() and (batch.reward[~batch.mask] == 0).all()
    assert batch.mask[:, 0].all() and not batch.mask.all()


@pytest.mark.parametrize("follower", ["exact", "q_learning"])
@pytest.mark.parametrize("variant", [None, "exact", "truncated"])
def test_it_trains_and_resumes_to_the_same_numbers(variant, follower, tmp_path):
    method = METHOD if variant is None else VARIANTS[variant]

    def run_of(steps, out):
        game = incentive_rooms(horizon=20, follower=follower)
        run = Run(method, game.policy(), game, steps=steps, out=out)
        run.resume()
        return train(run)

    whole = run_of(4, tmp_path / "whole")
    run_of(2, tmp_path / "halves")
    halves = run_of(4, tmp_path / "halves")
    assert torch.equal(whole.policy.weights, halves.policy.weights) and torch.equal(whole.policy.q, halves.policy.q)
    assert all(math.isfinite(r["loss"]) and math.isfinite(r["grad_norm"]) for r in whole.history)
    assert not torch.equal(whole.policy.weights, incentive_rooms().policy().weights)


def test_a_longer_training_goes_on_from_a_shorter_one():
    policy, other = incentive_rooms().policy(), incentive_rooms().policy()
    for iterations in (4, 5, 5, 32, 16):
        policy.limit(iterations)
        found = policy.response()
        other.limit(None)
        other.limit(iterations)
        torch.testing.assert_close(found, other.response())
    policy.limit(None)
    torch.testing.assert_close(policy.response(), policy.response(exact=True))


def test_other_objectives_train_the_leader_too():
    game = incentive_rooms(horizon=20)
    run = train(Run(METHOD.but(objective=ClippedSurrogate()), game.policy(), game, steps=2))
    assert all(math.isfinite(r["loss"]) and r["grad_norm"] > 0 for r in run.history)


def test_a_few_exact_steps_help_the_leader():
    game = incentive_rooms(horizon=1)
    run = Run(VARIANTS["exact"], game.policy(), game, steps=20)
    before = game.evaluate(run)["leader_objective"]
    assert game.evaluate(train(run))["leader_objective"] > before + 0.1


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="exact or q_learning"):
        incentive_rooms(follower="oracle")
    with pytest.raises(ValueError, match="reg and horizon above 0"):
        incentive_rooms(reg=0.0)
    bandit = TokenBandit(2, 3, 2)
    with pytest.raises(MissingSignal):
        Run(METHOD, bandit.policy(), bandit, steps=1)


def test_it_trains_by_name(tmp_path):
    result = api.train("hpgd", steps=2, out=tmp_path / "run")
    assert set(result.after) == {"leader_objective", "follower_return"}
    found = api.evaluate(str(tmp_path / "run"))
    assert found["leader_objective"]["value"] == pytest.approx(result.after["leader_objective"])
    assert math.isfinite(found["leader_objective"]["low"])
    assert math.isfinite(api.train("hpgd", task="four_rooms", steps=1, out=tmp_path / "four").after["leader_objective"])
