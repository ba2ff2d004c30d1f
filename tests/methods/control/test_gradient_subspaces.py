import copy

import pytest
import torch

from anypo.domains.control.setup import build
from anypo.loops import off_policy, on_policy
from anypo.methods.control.gradient_subspaces import (
    METHOD,
    VARIANTS,
    SubspaceSteps,
    fraction,
    lanczos,
    overlap,
    projected_update,
    snapshot,
    subspace,
)
from anypo.methods.control.ppo import METHOD as PPO
from anypo.methods.control.sac import METHOD as SAC
from anypo.run import Run
from anypo.seams.natural import fisher_vector_product, flat_gradient, flatten


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def symmetric(size=30, seed=0):
    found = torch.randn(size, size, generator=generator(seed), dtype=torch.float64)
    return found + found.mT


def orthonormal(size, k, seed=0):
    return torch.linalg.qr(torch.randn(size, k, generator=generator(seed), dtype=torch.float64)).Q


def test_the_whole_space_holds_everything():
    g = torch.randn(7, generator=generator(), dtype=torch.float64)
    first, second = subspace(symmetric(7), 7).basis, subspace(symmetric(7, 1), 7, "magnitude").basis
    torch.testing.assert_close(fraction(first, g), torch.tensor(1.0).double())
    torch.testing.assert_close(overlap(first, second), torch.tensor(1.0).double())


def test_equal_and_orthogonal_spans():
    whole = orthonormal(9, 6)
    torch.testing.assert_close(overlap(whole[:, :3], whole[:, :3]), torch.tensor(1.0).double())
    assert overlap(whole[:, :3], whole[:, 3:]) < 1e-24
    assert fraction(whole[:, :3], whole[:, 3:].sum(1)) < 1e-24


def test_a_rotation_of_the_basis_changes_nothing():
    first, second, turn = orthonormal(9, 3), orthonormal(9, 3, 1), orthonormal(3, 3, 2)
    g = torch.randn(9, generator=generator(), dtype=torch.float64)
    torch.testing.assert_close(fraction(first @ turn, g), fraction(first, g))
    torch.testing.assert_close(overlap(first @ turn, second), overlap(first, second))
    torch.testing.assert_close(projected_update(g, g, first @ turn, 0.3), projected_update(g, g, first, 0.3))


def test_a_zero_gradient_lies_nowhere():
    assert fraction(orthonormal(5, 2), torch.zeros(5, dtype=torch.float64)) == 0


def test_the_update_moves_inside_the_span_alone():
    basis, theta = orthonormal(8, 3), torch.zeros(8, dtype=torch.float64)
    g = torch.randn(8, generator=generator(), dtype=torch.float64)
    moved = projected_update(theta, g, basis, 0.1)
    torch.testing.assert_close(fraction(basis, moved), torch.tensor(1.0).double())
    torch.testing.assert_close(projected_update(theta, g, orthonormal(8, 8), 0.1), -0.1 * g)


@pytest.mark.parametrize("order", ["largest", "magnitude"])
@pytest.mark.parametrize("size", [12, 200])
def test_lanczos_finds_the_eigenpairs_of_the_matrix(size, order):
    matrix = symmetric(size)
    wanted, found = subspace(matrix, 5, order), lanczos(lambda v: matrix @ v, size, 5, order, accuracy=1e-9)
    torch.testing.assert_close(found.eigenvalues, wanted.eigenvalues)
    torch.testing.assert_close(found.projector, wanted.projector, atol=1e-6, rtol=0)


def test_lanczos_finds_repeated_eigenvalues_and_those_of_zero():
    values = torch.tensor([3.0, 3.0, 3.0, 1.0] + [0.0] * 26).double()
    found = lanczos(lambda v: values * v, 30, 6, accuracy=1e-9)
    torch.testing.assert_close(found.eigenvalues, values[:6], atol=1e-8, rtol=0)
    torch.testing.assert_close(found.projector.diagonal()[:4], torch.ones(4).double())
    torch.testing.assert_close(found.basis.mT @ found.basis, torch.eye(6).double())
    assert lanczos(torch.zeros_like, 4, 2).eigenvalues.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("k", "order", "message"), [(2, "smallest", "use largest or magnitude"), (0, "largest", "k between"), (6, "largest", "k between")]
)
def test_what_is_no_subspace_is_refused(k, order, message):
    with pytest.raises(ValueError, match=message):
        subspace(symmetric(5), k, order)
    with pytest.raises(ValueError, match=message):
        lanczos(lambda v: v, 5, k, order)


def test_of_a_quadratic_loss_the_span_never_turns():
    matrix, seen = symmetric(20), []
    for seed in range(3):
        theta = torch.randn(20, generator=generator(seed), dtype=torch.float64).requires_grad_()
        seen.append(lanczos(fisher_vector_product(theta @ matrix @ theta / 2, [theta]), 20, 4, accuracy=1e-9).basis)
    for later in seen[1:]:
        torch.testing.assert_close(overlap(seen[0], later), torch.tensor(1.0).double())


def a_run(method=METHOD, steps=4, seed=0, task="Pendulum-v1", out=None):
    policy, built = build(task, None, needs=method.needs(), seed=seed, envs=4, horizon=16, hidden=(6, 5))
    return Run(method.set("update.k", 4) if hasattr(method.update, "k") else method, policy, built, steps=steps, seed=seed, out=out)


def quick(**options):
    return METHOD.but(update=SubspaceSteps(epochs=2, minibatches=2, learning_rate=1e-2, optimizer="adam", k=4, every=1, **options))


@pytest.mark.parametrize("task", ["Pendulum-v1", "CartPole-v1"])
def test_a_snapshot_is_that_of_the_explicit_hessian_and_of_the_networks_own_loss(task):
    run = a_run(quick(), task=task)
    batch = on_policy.step(run)
    before = copy.deepcopy(run.policy.state_dict())
    found = snapshot(batch, run.loss_fn, run.policy, 4)
    twin = copy.deepcopy(run.policy).double()
    parameters = list(twin.critic_network.parameters())
    loss = run.method.regularize[0](batch, twin.evaluate(batch, {"value"}), run).value
    product = fisher_vector_product(loss, parameters)
    hessian = torch.stack([product(row) for row in torch.eye(len(found["value"].gradient), dtype=torch.float64)])
    exact = subspace(hessian, 4)
    torch.testing.assert_close(found["value"].eigenvalues, exact.eigenvalues, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(overlap(found["value"].basis, exact.basis), torch.tensor(1.0).double(), rtol=0, atol=1e-4)
    torch.testing.assert_close(found["value"].gradient, flat_gradient(loss, parameters))
    assert found["value"].chance == 4 / len(hessian)
    assert all(torch.equal(before[name], value) for name, value in run.policy.state_dict().items())


def test_looking_does_not_change_the_training():
    watched, plain = (
        a_run(quick()),
        a_run(PPO.but(update=PPO.update.__class__(epochs=2, minibatches=2, learning_rate=1e-2, optimizer="adam"))),
    )
    for _ in range(3):
        on_policy.step(watched), on_policy.step(plain)
    assert torch.equal(flatten(watched.policy.parameters()), flatten(plain.policy.parameters()))
    assert all(0 <= r["subspace/policy"] <= 1 and 0 <= r["subspace/value"] <= 1 for r in watched.history)
    assert "overlap/value" not in watched.history[0] and 0 <= watched.history[1]["overlap/value"] <= 1


def test_it_looks_every_so_many_batches():
    run = a_run(quick().set("update.every", 2), steps=4)
    on_policy.train(run)
    assert ["subspace/policy" in r for r in run.history] == [True, False, True, False]


def test_projected_steps_stay_in_the_span():
    run = a_run(VARIANTS["projected"])
    groups = {g["role"]: g["params"] for g in run.policy.parameter_groups()}
    before = {role: flatten(parameters) for role, parameters in groups.items()}
    on_policy.step(run)
    for role, parameters in groups.items():
        moved = (flatten(parameters) - before[role]).double()
        assert moved.norm() > 0
        assert float(fraction(run.method.update.latest[role].basis, moved)) == pytest.approx(1, abs=1e-4)


def test_a_saved_run_goes_on_with_the_same_spans(tmp_path):
    method = quick(project=True).set("update.every", 3)
    whole = a_run(method)
    on_policy.train(whole)
    first = a_run(method, out=tmp_path)
    on_policy.step(first), on_policy.step(first)
    first.save()
    second = a_run(method, out=tmp_path)
    assert second.resume()
    on_policy.train(second)
    assert torch.equal(flatten(second.policy.parameters()), flatten(whole.policy.parameters()))
    assert second.history[-1]["overlap/value"] == whole.history[-1]["overlap/value"]


def test_sac_is_measured_too():
    run = a_run(SAC.set("rollout.warmup", 16).set("rollout.steps", 16).set("rollout.batch_size", 32))
    off_policy.step(run)
    batch = next(iter(run.method.rollout.minibatches(run, 1)))
    batch.advantage = run.method.credit(batch, run)
    found = snapshot(batch, run.loss_fn, run.policy, 4)
    assert set(found) == {"policy", "value"}
    assert found["value"].gradient.norm() > 0 and 0 < found["value"].fraction <= 1
