"""The landscape of a dilemma with partners that can be left: reductions, gradients, noise, the flow, and the game it stands for."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anypo.domains.games.dilemma import RULES, keep, payoff, play, seat
from anypo.methods.games.partner_selection import STUDY, agents, landscape, noise, score_gradient, sde_step, simulate


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def population(seed=0, count=6):
    pool, weight = torch.rand(2, count, generator=generator(seed), dtype=torch.float64)
    return pool, weight / weight.sum()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(RULES), st.floats(0.02, 0.98), st.floats(0, 0.99))
def test_the_two_parts_are_the_derivative_of_the_average_reward(seed, rule, x, delta):
    pool, weight = population(seed)
    at = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    if rule == "one_sided":  # its opponents do not depend on x
        assert landscape(x, pool, weight, rule, delta).selection == 0
    found = landscape(at, pool, weight, rule, delta)
    torch.testing.assert_close(torch.autograd.grad(found.reward, at)[0], found.gradient.detach())
    torch.testing.assert_close(found.gradient, found.direct + found.selection)
    assert bool(found.promoting) == bool(found.gradient > 0)


@pytest.mark.parametrize(("rule", "delta"), [("out_for_tat", 0.0), ("always_switch", 0.95), ("always_stay", 0.95), ("one_sided", 0.0)])
def test_without_selection_the_opponents_are_the_pool(rule, delta):
    pool, weight = population(1)
    found = landscape(0.4, pool, weight, rule, delta)
    torch.testing.assert_close(found.opponents, weight)
    torch.testing.assert_close(found.gradient, (weight * (pool * (3.0 - 5.0) + (1 - pool) * (0.0 - 1.0))).sum())
    assert found.gradient < 0 and found.promoting == 0


@settings(max_examples=30, deadline=None)
@given(st.floats(0.01, 0.99), st.floats(0.01, 0.99), st.floats(0, 0.999))
def test_among_identical_opponents_nothing_is_selected(x, y, delta):
    found = landscape(x, torch.full((7,), y, dtype=torch.float64), torch.ones(7, dtype=torch.float64), "out_for_tat", delta)
    assert abs(float(found.selection)) < 1e-10 and found.gradient < 0


def test_opponents_of_no_weight_do_not_count():
    pool, weight = population(2)
    more = torch.cat([pool, torch.tensor([0.99]).double()]), torch.cat([weight, torch.zeros(1).double()])
    for name in ("reward", "direct", "selection", "logit_drift"):
        torch.testing.assert_close(getattr(landscape(0.6, *more), name), getattr(landscape(0.6, pool, weight), name))
    torch.testing.assert_close(noise(0.6, *more).action_std, noise(0.6, pool, weight).action_std)


def test_the_two_noises_add_up_to_the_variance_of_the_estimator():
    pool, weight = population(3)
    x, q = 0.35, landscape(0.35, pool, weight).opponents
    values = torch.stack([(a - x) * payoff(torch.tensor(float(a)), pool) for a in (0, 1)])  # [2,n]
    chance = torch.tensor([1 - x, x]).double()[:, None] * q
    variance = (chance * values**2).sum() - (chance * values).sum() ** 2
    found = noise(x, pool, weight)
    torch.testing.assert_close(found.action_std**2 + found.selection_std**2, variance)


def test_no_noise_from_partners_when_defecting_gains_the_same_against_all():
    pool, weight = population(4)
    found = noise(0.4, pool, weight, R=3.0, S=0.0, T=4.0, P=1.0)
    assert found.selection_std < 1e-7 and found.action_std > 0.1


def test_a_step_without_noise_is_the_flow_and_leaves_the_focal_agent_out():
    theta = torch.randn(2, 5, generator=generator(5), dtype=torch.float64)
    x = theta.sigmoid()
    drift = torch.stack(
        [torch.stack([landscape(r[i], torch.cat([r[:i], r[i + 1 :]]), torch.ones(4).double()).logit_drift for i in range(5)]) for r in x]
    )
    still = torch.zeros(2, 5, 2, dtype=torch.float64)
    torch.testing.assert_close(sde_step(theta, still).theta, theta + 0.5 * drift)
    draws = torch.randn(2, 5, 2, generator=generator(6), dtype=torch.float64)
    torch.testing.assert_close(sde_step(theta, draws, eta=1e-20).theta, theta + 0.5 * drift)
    wide, narrow = (sde_step(theta, draws, eta=0.4, m=m).theta - theta - 0.5 * drift for m in (1, 4))
    torch.testing.assert_close(wide, 2 * narrow)


def test_logits_stay_in_their_bounds_and_runs_are_independent():
    theta = 2.5 * torch.randn(3, 8, generator=generator(7), dtype=torch.float64)
    found = simulate(theta, generator(8), steps=20, eta=5.0)
    assert found.theta.abs().max() <= 4 and found.cooperation.shape == (21, 3)
    torch.testing.assert_close(simulate(theta, steps=5).theta[1], simulate(theta[1], steps=5).theta)


def test_what_cannot_be_played_is_refused():
    pool, weight = population()
    with pytest.raises(ValueError, match="below 1"):
        landscape(0.5, pool, weight, delta=1.0)
    with pytest.raises(ValueError, match="unknown rule 'tit_for_tat'"):
        keep(pool, pool, "tit_for_tat", 0.5)
    with pytest.raises(ValueError, match="even number"):
        seat(1, 5, generator())
    with pytest.raises(ValueError, match="one_sided says nothing"):
        play(torch.ones(1, 2), seat(1, 2, generator()), 1, "one_sided", 0.5, generator())


def test_pairs_stay_only_when_both_cooperated():
    """With delta near 1, cooperators keep their partners; with a defector among four the other pair of cooperators stays whole."""
    x = torch.ones(4, 20, dtype=torch.float64)
    order = seat(4, 20, generator())
    stayed = play(x, order, 10, "out_for_tat", 1 - 1e-12, generator(1))
    assert torch.equal(stayed.order, order) and (stayed.reward == 3).all()
    assert torch.equal(play(0 * x, order, 1, "always_stay", 1 - 1e-12, generator(1)).order, order)
    left = play(0 * x, order, 1, "out_for_tat", 1 - 1e-12, generator(1))
    assert not torch.equal(left.order, order) and (left.reward == 1).all()
    assert torch.equal(left.order.sort(-1).values, torch.arange(20).expand(4, 20))
    mixed = x.clone()
    mixed[:, 0] = 0
    found = play(mixed, torch.arange(20).expand(4, 20), 1, "out_for_tat", 1 - 1e-12, generator(1))
    assert torch.equal(found.reward[0, :, :4], torch.tensor([5.0, 0.0, 3.0, 3.0]).double().expand(4, 4))
    assert torch.equal(found.order[:, :18], torch.arange(2, 20).expand(4, 18))


@pytest.mark.parametrize(("rule", "low", "high"), [("out_for_tat", 0.6, 1.0), ("always_switch", 0.47, 0.51)])
def test_who_is_met_follows_the_length_of_matches(rule, low, high):
    """Half the pool cooperates; with out-for-tat a cooperator meets cooperators in most rounds, since those matches last."""
    x = torch.full((50, 40), 0.1, dtype=torch.float64)
    x[:, ::2] = 0.9
    order, met = seat(50, 40, generator()), []
    for k in range(100):
        order = play(x, order, 1, rule, 0.95, generator(k)).order
        partner = order.view(50, -1, 2).flip(-1).reshape(50, 40)
        if k >= 50:
            met.append(float((partner % 2 == 0)[order % 2 == 0].double().mean()))
    assert low < sum(met) / len(met) < high


def test_returns_to_go_see_what_comes_after_and_immediate_rewards_do_not():
    x = torch.full((1, 1), 0.5, dtype=torch.float64)
    action = torch.tensor([1.0, 0.0, 1.0]).double().view(3, 1, 1)
    reward = torch.tensor([0.0, 3.0, 0.0]).double().view(3, 1, 1)
    centred = [-1.0, 2.0, -1.0]
    immediate = sum(a * r for a, r in zip((0.5, -0.5, 0.5), centred, strict=True)) / 3
    assert float(score_gradient(x, action, reward, 0.0)) == pytest.approx(immediate)
    to_go = [-1 + 0.5 * 2 - 0.25, 2 - 0.5, -1.0]
    assert float(score_gradient(x, action, reward, 0.5)) == pytest.approx(
        sum(a * r for a, r in zip((0.5, -0.5, 0.5), to_go, strict=True)) / 3
    )


def test_agents_learn_with_finite_bounded_logits_and_the_study_repeats_itself():
    theta = torch.randn(2, 10, generator=generator(9), dtype=torch.float64)
    found = agents(theta, generator(10), updates=5, rounds=10)
    assert torch.isfinite(found.theta).all() and found.theta.abs().max() <= 4 and not torch.equal(found.theta, theta)
    assert STUDY.run(seed=1, population=10, steps=12) == STUDY.run(seed=1, population=10, steps=12)
    assert STUDY.kind == "theory"
