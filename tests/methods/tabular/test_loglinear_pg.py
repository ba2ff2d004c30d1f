import math

import pytest
import torch

from anypo.domains.tabular.linear_mdp import LinearMDP, action_line, full_span, random_linear_mdp, stacked, without_structure
from anypo.methods.tabular.loglinear_pg import STUDY, complement_of_ones, flow, flow_objective, gradient, pl_terms, soft_optimum, values

GAMMA, TAU = 0.9, 0.3


def theta_of(size, seed=0, spread=1.0):
    return spread * torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def objective(theta, problem, gamma=GAMMA, tau=TAU):
    return values(theta, *problem, gamma, tau).objective


@pytest.mark.parametrize("make", [random_linear_mdp, action_line, lambda seed: full_span(random_linear_mdp(seed))])
@pytest.mark.parametrize("tau", [0.0, 0.3])
def test_the_gradient_is_that_of_the_objective(make, tau):
    problem = make(1)
    theta = theta_of(problem.features.shape[-1]).requires_grad_()
    wanted = torch.autograd.grad(objective(theta, problem, tau=tau), theta)[0]
    torch.testing.assert_close(gradient(theta.detach(), *problem, GAMMA, tau).gradient, wanted)


def test_one_hot_features_give_the_tabular_gradient():
    problem = random_linear_mdp(2, states=3, actions=2)
    problem = problem._replace(features=torch.eye(6, dtype=torch.int64).reshape(3, 2, 6))
    theta = theta_of(6)
    v = values(theta, *problem, GAMMA, TAU)
    expected = (v.occupancy[:, None] * v.policy * v.advantage / (1 - GAMMA)).flatten()
    torch.testing.assert_close(gradient(theta, *problem, GAMMA, TAU).gradient, expected)


def test_simplex_features_do_not_see_the_ones_direction():
    problem, theta = random_linear_mdp(3), theta_of(4)
    torch.testing.assert_close(objective(theta + 2.5, problem), objective(theta, problem), rtol=1e-14, atol=0)
    assert gradient(theta, *problem, GAMMA, TAU).gradient.sum().abs() < 1e-12


def test_dropping_a_coordinate_keeps_the_policy():
    problem, theta = random_linear_mdp(4), theta_of(4)
    mine, reduced = values(theta, *problem, GAMMA, TAU), values(theta[:-1] - theta[-1], *full_span(problem), GAMMA, TAU)
    torch.testing.assert_close(mine.policy, reduced.policy)
    assert pl_terms(theta[:-1] - theta[-1], *full_span(problem), GAMMA, TAU).lambda_min_fisher > 1e-4


def test_no_regularization_is_the_ordinary_value():
    problem, theta = random_linear_mdp(5), theta_of(4)
    plain, nearly = values(theta, *problem, GAMMA, 0.0), values(theta, *problem, GAMMA, 1e-9)
    torch.testing.assert_close(plain.objective, nearly.objective, rtol=1e-7, atol=0)
    torch.testing.assert_close(plain.advantage, plain.q - plain.value[:, None])


def test_a_bandit_has_its_closed_form_optimum():
    problem = random_linear_mdp(6, states=1)
    weights = problem.mu * (problem.reward_table / TAU).exp()
    torch.testing.assert_close(soft_optimum(*problem[1:], 0.0, TAU), TAU * weights.sum().log())
    end = flow(theta_of(4), *problem, 0.0, TAU, 2.0, 2000)[-1]
    torch.testing.assert_close(values(end, *problem, 0.0, TAU).policy, weights / weights.sum(), rtol=1e-3, atol=1e-3)


def test_advantages_have_mean_zero_and_occupancy_sums_to_one():
    problem = random_linear_mdp(7)
    v = values(theta_of(4, spread=3), *problem, GAMMA, TAU)
    torch.testing.assert_close((v.policy * v.advantage).sum(-1), torch.zeros(6).double(), rtol=0, atol=1e-12)
    torch.testing.assert_close(v.occupancy.sum(), torch.ones(()).double())


def test_the_kl_grows_along_rays_to_the_surprise_of_the_best_action():
    problem, direction = full_span(random_linear_mdp(8)), theta_of(3)
    scaled = direction * torch.tensor([[0.0], [1.0], [4.0], [16.0], [5000.0]]).double()
    kl = pl_terms(scaled, *problem, GAMMA, TAU).kl
    assert (kl.diff() > 0).all() and kl[0].abs() < 1e-12
    assert kl[-1] == pytest.approx(math.log(5) / (1 - GAMMA), rel=1e-6)
    simplex = random_linear_mdp(8)
    along_ones = pl_terms(torch.ones(4).double() * 50, *simplex, GAMMA, TAU).kl
    assert along_ones.abs() < 1e-10


def test_extreme_parameters_stay_finite():
    terms = pl_terms(torch.tensor([5000.0, -5000.0, 0.0, 1.0]).double(), *random_linear_mdp(9), GAMMA, TAU)
    assert all(torch.isfinite(t).all() for t in terms)


def test_problems_and_starts_go_together():
    problems = [random_linear_mdp(seed) for seed in (0, 1)]
    theta = theta_of((2, 3, 4))
    together = pl_terms(theta, *stacked(problems), GAMMA, TAU)
    for i, problem in enumerate(problems):
        alone = pl_terms(theta[i, 2], *problem, GAMMA, TAU)
        torch.testing.assert_close(together.pl_lower_bound[i, 2], alone.pl_lower_bound, rtol=1e-8, atol=1e-12)
    path = flow_objective(theta, *stacked(problems), GAMMA, TAU, 0.5, 3).objective
    torch.testing.assert_close(path[:, 1, 0], flow_objective(theta[1, 0], *problems[1], GAMMA, TAU, 0.5, 3).objective)
    assert (path.diff(dim=0) > 0).all()


def test_linear_problems_are_linear_and_the_control_is_not():
    def residual(problem: LinearMDP) -> float:
        found = gradient(theta_of(4), *problem, GAMMA, TAU)
        return float((found.gradient - found.fisher_form).abs().max())

    problem = random_linear_mdp(10)
    assert residual(problem) < 1e-12 and residual(without_structure(problem)) > 1e-3
    for p in (problem, action_line(1), without_structure(problem)):
        torch.testing.assert_close(p.transition.sum(-1), torch.ones_like(p.reward_table))
        torch.testing.assert_close(p.mu.sum(-1), torch.ones_like(p.rho))


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="gamma lies in"):
        values(theta_of(4), *random_linear_mdp(0), 1.0, TAU)
    with pytest.raises(ValueError, match="tau is not negative"):
        values(theta_of(4), *random_linear_mdp(0), GAMMA, -1.0)
    with pytest.raises(ValueError, match="at least two features"):
        complement_of_ones(1)


def test_the_study_runs():
    found = STUDY.run(seed=1, steps=100)
    assert found["suboptimality_end"] < found["suboptimality_start"] and found["pl_constant_end"] > 0
