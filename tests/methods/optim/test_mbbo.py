from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anypo.domains.optim.bilevel import Quadratic
from anypo.methods.optim.mbbo import (
    PLAIN,
    STUDY,
    Rates,
    State,
    ball,
    correction,
    hypergradient,
    optimize,
    projection,
    run,
    start,
    step,
    tracker,
    upper_gradient,
)

EVERY = torch.arange(10)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def some_state(problem, version, seed=0):
    """A state after a few noisy steps, so that nothing in it is special."""
    state = start(problem, normal(5, seed=seed), normal(10, 4, seed=seed), normal(10, seed=seed), version)
    for t in range(3):
        state = step(problem, state, torch.tensor([t, 5, 9]), normal(3, seed=t), Rates())
    return state


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.floats(0.05, 0.95), st.integers(0, 1000))
def test_with_all_blocks_the_tracker_is_storm(blocks, alpha, seed):
    state, now, before = normal(3, blocks, 2, seed=seed)
    found = tracker(state, now, before, torch.arange(blocks), alpha)
    assert found.gamma == pytest.approx(1 - alpha)
    torch.testing.assert_close(found.state, now + (1 - alpha) * (state - before))


def test_at_alpha_one_the_tracker_is_the_newest_sample():
    state, now, before = normal(4, 2), normal(2, 2, seed=1), normal(2, 2, seed=2)
    found = tracker(state, now, before, torch.tensor([3, 1]), 1.0)
    assert torch.equal(found.state[[3, 1]], now) and torch.equal(found.state[[0, 2]], state[[0, 2]])
    assert found.gamma == 0 and correction(10, 2, 0.1) == pytest.approx(8 / 1.8 + 0.9)


def test_a_tracker_of_a_constant_quantity_is_a_moving_average():
    state, now = normal(4, 2), normal(2, 2, seed=1)
    found = tracker(state, now, now, torch.tensor([0, 2]), 0.3).state
    torch.testing.assert_close(found[[0, 2]], 0.7 * state[[0, 2]] + 0.3 * now)


def test_one_block_is_single_block_variance_reduction():
    problem = Quadratic.random(0, blocks=1)
    state = start(problem, normal(5), normal(1, 4), normal(1), version=1)
    zero, rates = torch.tensor([0]), Rates()
    for t in range(3):
        sample = normal(1, seed=t)
        now, before = problem.at(state.x, state.y, zero, sample), problem.at(state.x_prev, state.y_prev, zero, sample)
        s = now.gy + 0.9 * (state.s_y - before.gy)
        H = now.gyy + 0.9 * (state.H - before.gyy)
        new = step(problem, state, zero, sample, rates)
        torch.testing.assert_close(new.s_y, s)
        torch.testing.assert_close(new.H, H)
        torch.testing.assert_close(new.y, state.y - 0.05 * s)
        state = new


def test_plain_rates_are_stochastic_bilevel_optimization():
    problem = Quadratic.random(0)
    state, block, sample = some_state(problem, 2), torch.tensor([1, 4]), normal(2, seed=9)
    now = problem.at(state.x, state.y[block], block, sample)
    new = step(problem, state, block, sample, PLAIN)
    v = state.v[block]
    torch.testing.assert_close(new.y[block], state.y[block] - 0.05 * now.gy)
    torch.testing.assert_close(new.v[block], v - 0.05 * (now.times_hessian(v) - now.fy))
    torch.testing.assert_close(new.x, state.x - 0.01 * (now.fx - now.times_mixed(v)).mean(0))
    assert torch.equal(new.z, new.estimate)


@pytest.mark.parametrize("version", [1, 2])
def test_exact_states_all_blocks_and_no_noise_give_the_exact_hypergradient(version):
    problem, x = Quadratic.random(0), normal(5)
    y, zero = problem.lower(x), torch.zeros(10, dtype=torch.float64)
    state = start(problem, x, y, zero, version)
    if version == 2:
        state = replace(state, v=problem.inverse_product(y), v_prev=problem.inverse_product(y))
    new = step(problem, state, EVERY, zero, replace(Rates(), lam=1e-3))
    torch.testing.assert_close(new.estimate, problem.hypergradient(x).gradient)
    torch.testing.assert_close(new.y, y, rtol=0, atol=1e-12)


def test_the_hypergradient_is_the_gradient_of_the_objective():
    problem, x = Quadratic.random(3), normal(5)
    found = problem.hypergradient(x)
    parts = (problem.A, problem.B, problem.e, problem.t, problem.c, problem.rx)
    assert torch.equal(hypergradient(*parts, x).gradient, found.gradient)
    slope = torch.autograd.functional.jacobian(lambda z: problem.hypergradient(z).objective, x)
    torch.testing.assert_close(found.gradient, slope)


@pytest.mark.parametrize("version", [1, 2])
def test_untouched_blocks_keep_everything_and_their_previous_y_is_their_y(version):
    problem = Quadratic.random(0)
    state, block = some_state(problem, version), torch.tensor([2, 7])
    rest = [i for i in range(10) if i not in (2, 7)]
    new = step(problem, state, block, normal(2), Rates())
    for name in ("y", "s_y", *(("H",) if version == 1 else ("v", "u"))):
        assert torch.equal(getattr(new, name)[rest], getattr(state, name)[rest]), name
        assert not torch.equal(getattr(new, name)[block], getattr(state, name)[block]), name
    assert torch.equal(new.y_prev[rest], new.y[rest]) and torch.equal(new.y_prev, state.y) and torch.equal(new.x_prev, state.x)


def test_the_same_sample_at_both_iterates_adds_no_noise_to_their_difference():
    problem, sample = Quadratic.random(0), normal(10, seed=4)
    x, z, y = normal(5), normal(5, seed=1), normal(10, 4)
    difference = problem.at(x, y, EVERY, sample).gy - problem.at(z, y, EVERY, sample).gy
    torch.testing.assert_close(difference, -(problem.B @ (x - z)))


def test_projection_symmetrizes_and_clips_and_leaves_large_spectra():
    matrix = normal(6, 3, 3)
    found = projection(matrix, 0.5).matrix
    torch.testing.assert_close(found, found.mT)
    assert (torch.linalg.eigvalsh(found) >= 0.5 - 1e-12).all()
    spd = matrix @ matrix.mT + torch.eye(3)
    torch.testing.assert_close(projection(spd, 0.5).matrix, spd)


def test_ball_shortens_long_rows_alone():
    v = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    torch.testing.assert_close(ball(v, 2.5), torch.tensor([[1.5, 2.0], [0.3, 0.4], [0.0, 0.0]]))


def test_large_steps_with_few_blocks_diverge_and_the_defaults_do_not():
    problem = Quadratic.random(0)
    large = optimize(problem, 1, 2, 300, 0, replace(Rates(), eta=0.05, tau=0.2), last=10)
    assert not large < 100 and optimize(problem, 1, 2, 300, 0, last=10) < 5


def test_the_upper_gradient_needs_matrices_of_version_one_only():
    class NoMatrix:
        def __init__(self, found):
            self.fx, self.fy, self.gy = found.fx, found.fy, found.gy
            self.times_hessian, self.times_mixed = found.times_hessian, found.times_mixed

        def hessian(self):
            raise AssertionError("version 2 asked for a matrix")

    class Free:
        blocks = 10

        def at(self, *point):
            return NoMatrix(Quadratic.random(0).at(*point))

    state = start(Free(), normal(5), normal(10, 4), normal(10), version=2)
    state = step(Free(), state, torch.tensor([0, 3]), normal(2), Rates())
    assert torch.isfinite(state.x).all()
    with pytest.raises(AssertionError, match="asked for a matrix"):
        start(Free(), normal(5), normal(10, 4), normal(10), version=1)
    assert upper_gradient(Quadratic.random(0).at(normal(5), normal(10, 4), EVERY, normal(10)), normal(10, 4)).shape == (5,)


def test_bad_input_gets_a_sentence():
    problem = Quadratic.random(0)
    with pytest.raises(ValueError, match="lie in"):
        Rates(alpha=0.0)
    with pytest.raises(ValueError, match="versions 1 and 2, not 3"):
        start(problem, normal(5), normal(10, 4), normal(10), version=3)
    with pytest.raises(ValueError, match="make it with start"):
        step(problem, State(*[normal(5)] * 2, *[normal(10, 4)] * 3, normal(5)), torch.tensor([0]), normal(1), Rates())


def test_the_study_runs_and_repeats():
    found = run(steps=60, touched=10)
    assert found == STUDY.run(steps=60, touched=10) and set(found) == {"v1", "v2", "plain"}
    assert all(0 < value < 10 for value in found.values())
