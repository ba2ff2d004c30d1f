from itertools import islice, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from anypo import api
from anypo.domains.optim.forest import colour_blocks, forest, message_passing
from anypo.domains.optim.linear import label_propagation, least_squares, logistic, softmax
from anypo.methods.optim.greedy_bcd import (
    STUDY,
    GreedyBlocks,
    block_step,
    descend,
    forest_block,
    forest_solve,
    greedy_quadratic_block,
    lasso_run,
    newton_on_support,
    prox_descend,
    prox_step,
    residual,
    run,
    select,
    select_block,
    two_metric,
    variable_block,
)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def quadratic(seed=0, rows=30, columns=12):
    return least_squares(normal(rows, columns, seed=seed), normal(rows, seed=seed + 1))


SEED = st.integers(0, 1000)


@settings(max_examples=30, deadline=None)
@given(SEED)
def test_blocks_of_one_are_coordinates(seed):
    model, g = quadratic(seed), normal(12, seed=seed + 2)
    L, ones = model.lipschitz, [[i] for i in range(12)]
    for rule, coordinate in (("gs", "gs"), ("gsl", "gsl"), ("gsd", "gsl"), ("gsq", "gsl")):
        assert select_block(g, model.hessian, ones, rule).index == select(g, L, coordinate)
    assert variable_block(g, L, "gsd", 1).tolist() == greedy_quadratic_block(g, model.hessian, 1).tolist() == [select(g, L, "gsl")]
    assert variable_block(g, L, "gs", 1).tolist() == [select(g, L, "gs")]
    x = normal(12, seed=seed + 3)
    for update in ("matrix", "gradient", "forest"):
        torch.testing.assert_close(block_step(x, g, model.hessian, [3], update).x[3], x[3] - g[3] / L[3])


@settings(max_examples=30, deadline=None)
@given(SEED)
def test_without_l1_and_bounds_the_proximal_step_is_gsl(seed):
    model, g, x = quadratic(seed), normal(12, seed=seed + 2), normal(12, seed=seed + 3)
    found, i = prox_step(x, g, model.lipschitz), select(g, model.lipschitz, "gsl")
    assert found.index == i
    torch.testing.assert_close(found.model_decrease, g.square() / (2 * model.lipschitz))
    torch.testing.assert_close(found.x, block_step(x, g, model.hessian, [i]).x)


def test_with_equal_constants_gsl_is_gs_and_ties_go_to_the_first():
    g, L = normal(20), torch.full((20,), 3.0, dtype=torch.float64)
    assert select(g, L, "gsl") == select(g, L, "gs")
    tie = torch.tensor([1.0, -2.0, 2.0, 2.0])
    assert select(tie, torch.ones(4), "gs") == 1 and variable_block(tie, torch.ones(4), "gs", 2).tolist() == [1, 2]
    assert select_block(tie, torch.eye(4), [[0], [2], [1]], "gsq").index == 1


def test_blocks_of_one_size_and_of_many_have_the_same_scores():
    model, g = quadratic(), normal(12)
    same, ragged = [[0, 1], [2, 3], [4, 5]], [[0, 1], [2, 3], [4, 5], [6]]
    for rule in ("gs", "gsl", "gsd", "gsq"):
        torch.testing.assert_close(
            select_block(g, model.hessian, same, rule).scores, select_block(g, model.hessian, ragged, rule).scores[:3]
        )


def test_all_variables_at_once_solve_a_quadratic_in_one_step():
    model = quadratic()
    x = normal(12)
    found = block_step(x, model.gradient(model.matrix @ x), model.hessian, range(12))
    assert model.gradient(model.matrix @ found.x).abs().max() < 1e-10
    assert float(model.loss(model.matrix @ x) - model.loss(model.matrix @ found.x)) == pytest.approx(found.progress)


def test_a_diagonal_hessian_makes_the_matrix_step_coordinate_wise():
    x, g, diagonal = normal(6), normal(6, seed=1), normal(6, seed=2).abs() + 1
    found = block_step(x, g, diagonal.diag(), [0, 2, 5]).x
    expected = x.clone()
    expected[[0, 2, 5]] -= (g / diagonal)[[0, 2, 5]]
    torch.testing.assert_close(found, expected)


@settings(max_examples=20, deadline=None)
@given(SEED, st.sampled_from(["least_squares", "logistic", "softmax"]), st.sampled_from(["matrix", "gradient"]))
def test_progress_is_at_least_what_was_guaranteed(seed, kind, update):
    a, classes = normal(40, 6, seed=seed), torch.arange(40) % 3
    model = {
        "least_squares": lambda: least_squares(a, normal(40, seed=seed + 1)),
        "logistic": lambda: logistic(a, (classes > 0).double() * 2 - 1),
        "softmax": lambda: softmax(a, classes, 3),
    }[kind]()
    n = model.matrix.shape[1]
    points = list(islice(descend(model, lambda g: variable_block(g, model.lipschitz, "gsd", 3), update, normal(n, seed=seed)), 12))
    for before, after in pairwise(points):
        assert before.value - after.value >= after.progress - 1e-9 * abs(before.value) and after.progress >= 0


def test_gradients_are_those_of_the_losses_and_the_hessian_bounds_theirs():
    a, classes = normal(15, 4), torch.arange(15) % 3
    for model in (least_squares(a, normal(15, seed=1)), logistic(a, (classes > 0).double() * 2 - 1), softmax(a, classes, 3)):
        x = normal(model.matrix.shape[1], seed=2)
        torch.testing.assert_close(
            torch.autograd.functional.jacobian(lambda v, m=model: m.loss(m.matrix @ v), x), model.gradient(model.matrix @ x)
        )
        exact = torch.autograd.functional.hessian(lambda v, m=model: m.loss(m.matrix @ v), x)
        assert torch.linalg.eigvalsh(model.hessian - exact)[0] > -1e-9
        torch.testing.assert_close(model.lipschitz, model.hessian.diagonal())


def test_the_greedy_quadratic_block_takes_the_largest_gain_each_time():
    model, g = quadratic(), normal(12)
    chosen = []
    for _ in range(4):
        rest = [i for i in range(12) if i not in chosen]
        chosen.append(max(rest, key=lambda i: float(select_block(g, model.hessian, [[*chosen, i]], "gsq").scores[0])))
    assert greedy_quadratic_block(g, model.hessian, 4).tolist() == sorted(chosen)


def test_dependent_and_empty_columns_are_left_out():
    a = normal(10, 4)
    a = torch.cat([a, a[:, :1], torch.zeros(10, 1, dtype=torch.float64)], 1)
    model = least_squares(a, normal(10, seed=1))
    g = model.gradient(torch.zeros(10, dtype=torch.float64))
    assert len(greedy_quadratic_block(g, model.hessian, 6)) == 4
    found = prox_step(torch.zeros(6, dtype=torch.float64), g, model.lipschitz, 0.1)
    assert torch.isfinite(found.model_decrease).all() and found.model_decrease[5] == 0 and found.index != 5
    assert select(torch.tensor([0.0, 1e-3, 5.0]), torch.tensor([1.0, 1.0, 0.0]), "gsl") == 1


@settings(max_examples=30, deadline=None)
@given(SEED, st.integers(1, 25))
def test_forests_are_solved_exactly(seed, size):
    generator = torch.Generator().manual_seed(seed)
    H = torch.eye(size, dtype=torch.float64) * 10
    for i in range(1, size):
        if i % 4:
            j = int(torch.randint(i, (1,), generator=generator))
            H[i, j] = H[j, i] = float(torch.randn((), generator=generator))
    H = H + H.abs().sum(1).diag()
    g, block = normal(size, seed=seed), torch.randperm(size, generator=generator)
    torch.testing.assert_close(forest_solve(H, g, block), torch.linalg.solve(H[block][:, block], -g[block]))
    torch.testing.assert_close(block_step(g, g, H, block, "forest").x, block_step(g, g, H, block).x)


def test_a_cycle_is_refused_but_only_inside_the_block():
    ring = 4 * torch.eye(5, dtype=torch.float64)
    for i in range(5):
        ring[i, (i + 1) % 5] = ring[(i + 1) % 5, i] = 1.0
    with pytest.raises(ValueError, match="has a cycle"):
        forest_solve(ring, normal(5), range(5))
    assert forest_solve(ring, normal(5), [0, 1, 2, 4]).shape == (4,)
    assert message_passing([], [], []) == []


@settings(max_examples=30, deadline=None)
@given(SEED)
def test_chosen_forests_are_forests_and_as_large_as_can_be(seed):
    adjacent = torch.rand(15, 15, generator=torch.Generator().manual_seed(seed)) < 0.2
    adjacent = adjacent | adjacent.T
    adjacent.fill_diagonal_(True)
    H = adjacent.double() + 20 * torch.eye(15, dtype=torch.float64)
    chosen = forest_block(normal(15, seed=seed), H, 15).tolist()
    forest_solve(H, normal(15), chosen)  # refuses a cycle
    for i in set(range(15)) - set(chosen):
        with pytest.raises(ValueError, match="has a cycle"):
            forest_solve(H, normal(15), [*chosen, i])
    assert len(forest(range(15), adjacent, 3)) == 3
    for block in colour_blocks(adjacent):
        assert adjacent[block][:, block].sum() == len(block)


def test_label_propagation_averages_neighbours():
    edges, weights = torch.tensor([[0, 1], [1, 2], [2, 3]]), torch.ones(3, dtype=torch.float64)
    model, unknown = label_propagation(edges, weights, {0: 0.0, 3: 3.0}, 4)
    x = block_step(
        torch.zeros(2, dtype=torch.float64), model.gradient(torch.zeros(3, dtype=torch.float64)), model.hessian, [0, 1], "forest"
    ).x
    assert unknown == [1, 2]
    torch.testing.assert_close(x, torch.tensor([1.0, 2.0], dtype=torch.float64))


def lasso(seed=0):
    a = normal(30, 12, seed=seed)
    a = a / a.norm(dim=0)
    return least_squares(a, 2 * a[:, 0] - a[:, 1] + 0.3 * normal(30, seed=seed + 1)), 0.2


@settings(max_examples=15, deadline=None)
@given(SEED, st.floats(0.01, 1.0))
def test_near_the_solution_zeros_are_found_by_one_step_of_each(seed, share):
    model, lam = lasso(seed)
    solution, _ = two_metric(model, lam)
    g = model.gradient(model.matrix @ solution)
    zeros = solution == 0
    delta = float((lam - g.abs())[zeros].min())
    largest = float(torch.linalg.eigvalsh(model.hessian)[-1])
    away = normal(12, seed=seed)
    x = solution + away / away.norm() * share * delta / (2 * largest)
    slope = model.gradient(model.matrix @ x)
    goal = x - slope / model.lipschitz
    assert (goal.abs() <= lam / model.lipschitz + 1e-12)[zeros].all()
    i = int(zeros.nonzero()[0])
    only = torch.zeros_like(model.lipschitz)
    only[i] = model.lipschitz[i]
    assert prox_step(x, slope, only, lam).x[i] == 0


def test_newton_on_the_support_ends_the_lasso_and_an_empty_support_stays():
    model, lam = lasso()
    x, steps = two_metric(model, lam)
    assert residual(model, x, lam) < 1e-12 and steps < 200
    torch.testing.assert_close(lasso_run(model.matrix, -model.slope(torch.zeros(30, dtype=torch.float64)), lam, 400).x, x)
    zero = torch.zeros(12, dtype=torch.float64)
    assert torch.equal(newton_on_support(model, zero, 1e6), zero) and torch.equal(two_metric(model, 1e6)[0], zero)


def test_bounds_are_kept_and_the_result_is_optimal():
    model = lasso()[0]
    x = next(islice(prox_descend(model, 0.0, 0.0, 0.5), 400, None))
    g = model.gradient(model.matrix @ x)
    assert (x >= 0).all() and (x <= 0.5).all() and (x == 0.5).any() and (x == 0).any()
    assert (g[x == 0] >= -1e-9).all() and (g[x == 0.5] <= 1e-9).all() and g[(x > 0) & (x < 0.5)].abs().max() < 1e-8


def test_predictions_are_recomputed_and_agree():
    model = quadratic()
    for count, point in enumerate(islice(descend(model, lambda g: [select(g, model.lipschitz)], x=normal(12)), 1005), 1):
        if count in (5, 999, 1000, 1001):
            assert point.value == pytest.approx(float(model.loss(model.matrix @ point.x)), abs=1e-9)


def test_with_tau_of_all_parameters_the_optimizer_is_sgd():
    start, gradients = normal(4, 3), [normal(4, 3, seed=s) for s in range(4)]
    mine, other = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizers = GreedyBlocks([mine], lr=0.1, weight_decay=0.2, tau=12), torch.optim.SGD([other], lr=0.1, weight_decay=0.2)
    for gradient in gradients:
        for parameter, optimizer in zip((mine, other), optimizers, strict=True):
            parameter.grad = gradient.clone()
            optimizer.step()
    torch.testing.assert_close(mine, other)


def test_the_optimizer_moves_the_most_promising_parameters_of_all_groups():
    a, b, idle = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(2))
    optimizer = GreedyBlocks([{"params": [a], "lr": 1.0}, {"params": [b, idle], "lr": 0.01}], tau=2)
    optimizer.step()  # nothing has a gradient
    a.grad, b.grad = torch.tensor([1.0, -2.0, 0.5]), torch.tensor([9.0, 20.0])  # lr g^2: 1, 4, 0.25 and 0.81, 4
    optimizer.step()
    torch.testing.assert_close(a.data, torch.tensor([0.0, 2.0, 0.0]))
    torch.testing.assert_close(b.data, torch.tensor([0.0, -0.2]))
    assert torch.equal(idle.data, torch.ones(2))


def test_any_method_takes_the_optimizer():
    result = api.train("grpo", task="token_bandit", steps=5, settings={"update.optimizer": "greedy_bcd", "update.learning_rate": 50.0})
    assert result.after["pass@1"] > result.before["pass@1"]


def test_bad_input_gets_a_sentence():
    with pytest.raises(ValueError, match="unknown rule 'best'; use one of gs, gsl"):
        select(torch.ones(2), torch.ones(2), "best")
    with pytest.raises(ValueError, match="unknown update 'newton'"):
        block_step(torch.ones(2), torch.ones(2), torch.eye(2), [0], "newton")
    with pytest.raises(ValueError, match="tau >= 1"):
        GreedyBlocks([nn.Parameter(torch.ones(1))], tau=0)


def test_the_study_runs():
    found = run(rows=60, columns=20)
    assert found == STUDY.run(rows=60, columns=20) and found["gsl"] < found["random"]
