"""TRPO and natural gradients: exact solutions, the Fisher matrix, the constraint, a policy that stays where no step is acceptable."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from anypo.loops.on_policy import step
from anypo.methods.control.trpo import METHOD, cg, fisher_softmax, full_step, kl, line_search, surrogate
from anypo.policy import MissingSignal
from anypo.run import Run
from anypo.seams import natural
from tests.helpers import assert_resumes_on_cartpole, random_rows, trained_on_cartpole


def positive_matrix(size: int = 6, seed: int = 0) -> torch.Tensor:
    half = torch.randn(size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return half @ half.T + 0.5 * torch.eye(size, dtype=torch.float64)


def vector(size: int = 6, seed: int = 1) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_enough_iterations_solve_exactly() -> None:
    matrix, b = positive_matrix(), vector()
    torch.testing.assert_close(cg(matrix, b, 50, 1e-24), torch.linalg.solve(matrix, b))
    damped = matrix + 0.3 * torch.eye(6, dtype=torch.float64)
    torch.testing.assert_close(cg(matrix, b, 50, 1e-24, damping=0.3), torch.linalg.solve(damped, b))


def test_identity_gives_the_gradient_direction_and_no_gradient_no_step() -> None:
    b = vector()
    found = full_step(torch.eye(6, dtype=torch.float64), b, delta=0.02)
    torch.testing.assert_close(found.step, b / b.norm() * 0.04**0.5)
    torch.testing.assert_close(found.expected_improvement, b.norm() * 0.04**0.5)
    assert full_step(positive_matrix(), torch.zeros(6, dtype=torch.float64)).step.eq(0).all()


def test_the_full_step_meets_the_quadratic_constraint() -> None:
    matrix = positive_matrix()
    found = full_step(matrix, vector(), delta=0.03).step
    torch.testing.assert_close(0.5 * found @ matrix @ found, torch.tensor(0.03, dtype=torch.float64))


def test_a_curvature_that_is_not_positive_stops_the_solver_and_the_step() -> None:
    b = vector()
    assert natural.conjugate_gradient(lambda v: -v, b).eq(0).all()
    assert natural.scale_to_radius(b, -1.0, 0.01).eq(0).all() and natural.scale_to_radius(b, float("nan"), 0.01).eq(0).all()


def test_fisher_vector_products_are_the_hessian_of_the_mean_kl() -> None:
    g = torch.Generator().manual_seed(0)
    features = torch.randn(5, 3, 4, generator=g, dtype=torch.float64)
    theta = torch.randn(4, generator=g, dtype=torch.float64, requires_grad=True)
    logits = features @ theta
    product = natural.fisher_vector_product(kl("categorical", logits_old=logits.detach(), logits=logits).mean(), [theta], damping=0.2)
    fisher = fisher_softmax(features, theta.detach())
    for seed in range(3):
        v = vector(4, seed)
        torch.testing.assert_close(product(v), fisher @ v + 0.2 * v)


def test_the_gradient_of_the_kl_is_zero_at_the_old_policy_and_constants_have_none() -> None:
    theta = vector(3).requires_grad_()
    value = kl("categorical", logits_old=theta.detach()[None], logits=theta[None]).mean()
    assert natural.flat_gradient(value, [theta]).abs().max() < 1e-15
    assert natural.flat_gradient(torch.ones(()), [theta]).eq(0).all()


def test_flatten_and_assign_are_inverse() -> None:
    parameters = [torch.randn(2, 3), torch.randn(4)]
    wanted = [p.clone() for p in parameters]
    flat = natural.flatten(parameters)
    natural.assign(parameters, torch.zeros_like(flat))
    natural.assign(parameters, flat)
    assert all(torch.equal(a, b) for a, b in zip(parameters, wanted, strict=True))


def test_the_search_shrinks_until_accepted_and_else_returns_the_start() -> None:
    start, move = torch.zeros(2), torch.ones(2)
    found = natural.line_search(start, move, lambda point, fraction: float(point[0]) < 0.6, shrink=0.5)
    assert found.index == 1 and torch.equal(found.point, torch.full((2,), 0.5))
    refused = natural.line_search(start, move, lambda point, fraction: False)
    assert refused.index == -1 and refused.point is start
    gains, kls, expected = torch.tensor([0.0, 0.1]), torch.tensor([0.001, 0.001]), torch.tensor([1.0, 0.8])
    assert line_search(gains, kls, expected, 0.01) == 1


def test_padding_and_empty_rows_change_nothing() -> None:
    rows = random_rows(0)
    a = rows.advantages[:, None].expand_as(rows.logp)
    wild = [torch.where(rows.mask, x, float("nan")) for x in (rows.logp, rows.old_logp, a)]
    torch.testing.assert_close(surrogate(*wild, rows.mask), surrogate(rows.logp, rows.old_logp, a, rows.mask))
    assert surrogate(*wild, torch.zeros_like(rows.mask)) == 0


def test_every_step_stays_inside_the_region_and_fills_it() -> None:
    run = trained_on_cartpole(METHOD.set("update.damping", 0.001), 4)
    for record in run.history:
        assert record["line_search"] >= 0 and record["gain"] > 0
        assert 0.005 < record["kl"] <= 0.01


def test_without_a_search_it_is_the_natural_gradient_at_the_constraint() -> None:
    """In a region so small that the quadratic model is exact, the full step already has the wanted KL and the expected gain."""
    method = METHOD.set("update.delta", 1e-4).set("update.shrink", 0.99).set("update.damping", 1e-4)
    record = trained_on_cartpole(method, 1).history[0]
    assert 0 <= record["line_search"] <= 5
    assert 0.5e-4 < record["kl"] <= 1e-4  # damping takes a part of it
    assert record["gain"] == pytest.approx(record["expected_gain"], rel=0.1)


@pytest.mark.parametrize("why", ["no gain is enough", "no gradient"])
def test_the_actor_stays_exactly_where_it_was_while_the_critic_learns(why: str) -> None:
    run = trained_on_cartpole(METHOD, 0)
    before = [p.clone() for p in run.policy.parameters()]
    method = METHOD.set("update.accept_ratio", 1e9)
    if why == "no gradient":
        method = METHOD.but(credit=Zero())
    run = Run(method, run.policy, run.task, steps=1)
    step(run)
    assert run.history[0]["line_search"] == -1
    moved = [not torch.equal(a, b) for a, b in zip(before, run.policy.parameters(), strict=True)]
    actor = len(list(run.policy.actor_network.parameters()))  # type: ignore[union-attr, operator]
    assert not any(moved[:actor]) and all(moved[actor:])


class Zero:
    """No action is better than another; the critic still learns returns of 1."""

    needs = frozenset({"old_value"})

    def __call__(self, batch, run):  # type: ignore[no-untyped-def]
        batch.signals["returns"] = torch.ones(batch.mask.shape)
        return torch.zeros(batch.mask.shape)


def test_continuous_actions() -> None:
    from anypo.domains.control.setup import build
    from anypo.loops.on_policy import train

    policy, task = build("Pendulum-v1", None, seed=0, envs=4, horizon=32, hidden=(16, 16))
    run = train(Run(METHOD, policy, task, steps=3))
    assert all(0 < record["kl"] <= 0.01 for record in run.history)


def test_a_policy_without_an_exact_kl_is_refused_by_name() -> None:
    from tests.helpers import trained

    with pytest.raises(MissingSignal, match="trpo needs the signal 'kl_old'"):
        trained(METHOD, 1)


def test_a_stopped_run_continues_identically(tmp_path: Path) -> None:
    assert_resumes_on_cartpole(METHOD, tmp_path)
