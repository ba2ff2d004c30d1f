import pytest
import torch

from anypo import api
from anypo.domains.games.smooth import (
    SmoothTask,
    iterated_dilemma,
    matrix_values,
    quadratic_game,
    quadratic_values,
    stag_hunt,
)
from anypo.loops.on_policy import step, train
from anypo.methods.games.meta_mapg import (
    METHOD,
    VARIANTS,
    Annealing,
    LearningAwareGradient,
    corrections,
    ipd_value,
    jacobian,
    learn,
    own_slopes,
    schedule,
)
from anypo.policy import MissingSignal
from anypo.run import Run
from tests.helpers import assert_continues

GAMES = {"stag_hunt": stag_hunt(), "iterated_dilemma": iterated_dilemma()}


def random_joint(game, rows=4, seed=0):
    return torch.randn(rows, game.players, game.size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def small_run(method=METHOD, rows=3, steps=4, out=None, game="stag_hunt"):
    task = SmoothTask(GAMES[game], random_joint(GAMES[game], rows))
    return Run(method, task.policy(), task, steps=steps, out=out, checkpoint_every=2)


@pytest.mark.parametrize("game", GAMES.values(), ids=GAMES)
@pytest.mark.parametrize("steps", [{"alpha": 0.0, "unroll": 3}, {"alpha": 1.0, "unroll": 0}])
def test_without_learning_steps_it_is_the_ordinary_policy_gradient(game, steps):
    theta = random_joint(game)
    found = corrections(game.values, theta, **steps)
    ordinary = own_slopes(game.values, theta.clone().requires_grad_()).detach()
    assert (found.own == 0).all() and (found.peer == 0).all()
    assert torch.equal(found.total, ordinary) and torch.equal(found.pg, ordinary) and torch.equal(found.final, theta)


@pytest.mark.parametrize("game", GAMES.values(), ids=GAMES)
@pytest.mark.parametrize("unroll", [1, 3])
def test_the_three_terms_sum_to_the_finite_difference_and_follow_from_the_jacobian(game, unroll):
    theta, alpha, h = random_joint(game), 0.7, 1e-5
    found = corrections(game.values, theta, alpha, unroll)
    torch.testing.assert_close(found.pg + found.own + found.peer, found.total)
    after = lambda x: game.values(learn(game.values, x.clone().requires_grad_(), alpha, unroll)).detach()  # noqa: E731
    for i in range(game.players):
        for k in range(game.size):
            move = torch.zeros_like(theta)
            move[:, i, k] = h
            difference = (after(theta + move)[:, i] - after(theta - move)[:, i]) / (2 * h)
            torch.testing.assert_close(found.total[:, i, k], difference, rtol=1e-6, atol=1e-8)
    J = jacobian(game.values, theta, alpha, unroll).unflatten(1, (2, game.size)).unflatten(3, (2, game.size))
    own = torch.stack([torch.einsum("bkl,bk->bl", J[:, i, :, i], found.pg[:, i]) for i in range(2)], 1) - found.pg
    torch.testing.assert_close(found.own, own)
    assert found.peer.abs().max() > 1e-4


def test_one_learning_step_makes_the_peer_term_of_opponent_aware_learning():
    """alpha (d2 V_j / d theta_i d theta_j) dV_i / d theta_j, written out for a quadratic game, where the mixed derivative is -Q_j[j,i]."""
    g = torch.Generator().manual_seed(1)
    Q = torch.randn(2, 2, 2, generator=g, dtype=torch.float64)
    Q, c = Q + Q.mT + 4 * torch.eye(2), torch.randn(2, 2, generator=g, dtype=torch.float64)
    theta, alpha = random_joint(GAMES["stag_hunt"], 5), 0.3
    found = corrections(lambda z: quadratic_values(z, Q, c), theta, alpha, 1)
    z = found.final[..., 0]
    for i, j in ((0, 1), (1, 0)):
        cross = -z @ Q[i, j] + c[i, j]
        torch.testing.assert_close(found.peer[:, i, 0], -alpha * Q[j, j, i] * cross)


def test_a_lone_player_has_no_peer_term():
    values = lambda theta: -((theta - 1) ** 2).sum(-1).cosh()  # noqa: E731
    theta = 0.1 * torch.randn(3, 1, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = corrections(values, theta, 0.1, 2)
    assert (found.peer == 0).all() and found.own.abs().max() > 1e-3


def test_starts_do_not_see_one_another_and_players_learn_at_the_same_time():
    game = GAMES["iterated_dilemma"]
    theta = random_joint(game)
    together = corrections(game.values, theta, 3.0, 2)
    alone = corrections(game.values, theta[2:3], 3.0, 2)
    torch.testing.assert_close(together.total[2:3], alone.total)
    turned = corrections(game.values, theta.flip(1), 3.0, 2)  # a symmetric game: the second player is nobody special
    torch.testing.assert_close(turned.total, together.total.flip(1))


def test_the_second_player_sees_the_states_from_its_own_side():
    """Win-stay, lose-shift against a strategy that defects once at the start: both are back at cooperation in the third round."""
    shift = torch.tensor([40.0, 40.0, -40.0, -40.0, 40.0]).double()
    once = torch.tensor([-40.0, 40.0, -40.0, -40.0, 40.0]).double()
    gamma, best = 0.5, -1.0
    first = (1 - gamma) * (-3.0 + gamma * -2.0) + gamma**2 * best
    second = (1 - gamma) * (0.0 + gamma * -2.0) + gamma**2 * best
    found = ipd_value(torch.stack([shift, once]), gamma, best, -3.0, 0.0, -2.0)["value"]
    torch.testing.assert_close(found, torch.tensor([first, second]).double())


def test_entry_needs_patience_and_every_start_has_its_own_schedule():
    distance = torch.tensor([[0.0, 1.0], [0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]).double()
    found = schedule(distance, 2.0, 0.5, 0.1, 2)
    assert found.entry_step.tolist() == [1, 2]
    assert found.weight[:, 0].tolist() == [2.0, 1.0, 0.5, 0.25, 0.125] and found.weight[:, 1].tolist() == [2.0, 2.0, 1.0, 0.5, 0.25]
    annealing = Annealing(2.0, 0.5, 0.1, 2)
    assert torch.equal(torch.stack([annealing(d, torch.arange(2), 2) for d in distance]), found.weight)


def test_a_step_goes_along_the_three_weighted_terms_and_stays_in_its_bounds():
    credit = LearningAwareGradient(alpha=2.0, own=0.5, peer=Annealing(3.0))
    run = small_run(METHOD.but(credit=credit))
    before = run.policy.theta.detach().clone()
    batch = step(run)
    found = corrections(run.task.game.values, before, 2.0, 1)
    moved = before + 0.5 * (found.pg + 0.5 * found.own + 3.0 * found.peer)
    torch.testing.assert_close(run.policy.theta.detach(), moved)
    assert batch.reward.shape == (3, 2) and batch.segment.tolist() == [[0, 1]] * 3
    bounded = train(small_run(METHOD.set("update.bound", 0.25)))
    assert bounded.policy.theta.abs().max() <= 0.25


@pytest.mark.parametrize("method", [METHOD, *VARIANTS.values()], ids=["all", *VARIANTS])
@pytest.mark.parametrize("game", GAMES)
def test_it_trains_with_finite_numbers(method, game):
    run = small_run(method, game=game)
    before = run.policy.theta.detach().clone()
    train(run)
    assert torch.isfinite(run.policy.theta).all() and not torch.equal(run.policy.theta, before)
    assert set(run.task.evaluate(run)) == {"basin", "value"}


def test_a_stopped_run_goes_on_to_the_same_numbers(tmp_path):
    def run_to(out, upto):
        run = small_run(METHOD.set("credit.peer.patience", 1).set("credit.peer.radius", 0.9), out=out)
        run.resume()
        while run.step < upto:
            step(run)
        return run

    assert_continues(run_to, tmp_path, "loss")


def test_the_target_of_a_quadratic_game_is_where_own_slopes_vanish():
    Q = torch.tensor([[[2.0, -0.5], [-0.5, 0.0]], [[0.0, -0.5], [-0.5, 2.0]]]).double()
    c = torch.tensor([[1.0, 0.7], [0.4, 1.0]]).double()
    game = quadratic_game(Q, c)
    nash = torch.full((1, 2, 1), 2 / 3, dtype=torch.float64)
    assert game.distance(nash) < 1e-12 and own_slopes(game.values, nash.requires_grad_()).abs().max() < 1e-12


def test_payoffs_are_met_at_pure_strategies():
    payoffs = torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]])
    pure = torch.tensor([[[40.0], [-40.0]], [[-40.0], [40.0]]]).double()
    torch.testing.assert_close(matrix_values(pure, payoffs), torch.tensor([[2.0, 6.0], [3.0, 7.0]]).double())


def test_what_does_not_fit_is_refused():
    with pytest.raises(MissingSignal, match="'logp', which JointPolicy does not provide"):
        api.build("ppo", task=SmoothTask(GAMES["stag_hunt"], random_joint(GAMES["stag_hunt"]))) and small_run(api.get_method("ppo"))
    with pytest.raises(ValueError, match=r"starts of stag_hunt have the shape \[B,2,1\]"):
        SmoothTask(GAMES["stag_hunt"], torch.zeros(3, 2))
    with pytest.raises(ValueError, match="knows no option 'hidden'; there are gamma, starts"):
        api.build(METHOD, task="iterated_dilemma", hidden=8)
    run = small_run(METHOD)
    run.task = object.__new__(type("Other", (), {"name": "elsewhere"}))
    with pytest.raises(ValueError, match="takes a differentiable game and not 'elsewhere'"):
        METHOD.credit(None, run)
