import math

import pytest
import torch

from anypo import api
from anypo.domains.tabular.data import TASKS, gaussian_data, pendulum_model, wine
from anypo.domains.tabular.distance import factored, mahalanobis, reward_table
from anypo.domains.tabular.models import CategoricalModel, GaussianModel
from anypo.domains.tabular.paths import sets_bandit
from anypo.loops.on_policy import step, train
from anypo.methods.tabular.nll_to_po import (
    MATRIX,
    METHOD,
    VARIANTS,
    categorical,
    gaussian_nll,
    implicit,
    implicit_gradient,
    inner_covariance,
    optimal_matrix,
    optimal_reward,
    pg_loss,
    transformed,
)
from anypo.run import Run


def positive(n=3, seed=0):
    raw = torch.randn(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return raw @ raw.T + 0.3 * torch.eye(n, dtype=torch.float64)


def run_of(data, method, steps, out=None):
    run = Run(method, data.policy(), data, steps=steps, out=out, checkpoint_every=2)
    if out is not None:
        run.resume()
    return train(run)


def test_the_best_full_matrix_gives_the_maximum_likelihood_gaussian():
    covariance, mean = positive(), torch.arange(3.0).double()
    found = optimal_reward(mean, covariance, 0.7)
    torch.testing.assert_close(found.inner_covariance, covariance)
    torch.testing.assert_close(found.nll, gaussian_nll(torch.zeros(3).double(), covariance, covariance))
    worse = [optimal_reward(mean, covariance, 0.7, kind).nll for kind in ("diagonal", "isotropic")]
    assert found.nll < worse[0] < worse[1]


@pytest.mark.parametrize("kind", ["full", "diagonal", "isotropic"])
def test_no_other_matrix_of_its_kind_is_better(kind):
    covariance = positive(2, 1)
    best = optimal_matrix(covariance, 0.5, kind)
    moves = {"full": positive(2, 3), "diagonal": torch.diag(torch.tensor([1.0, -0.5]).double()), "isotropic": torch.eye(2).double()}[kind]
    gap = torch.zeros(2).double()

    def nll(matrix):
        return float(gaussian_nll(gap, inner_covariance(matrix, 0.5), covariance))

    for size in (0.02, -0.02):
        assert nll(best + size * moves * best.diagonal().min()) > nll(best)


def test_no_entropy_weight_leaves_a_point_mass():
    assert inner_covariance(positive(), 0.0).abs().max() == 0
    assert inner_covariance(positive(), 1e-6).abs().max() < 1e-5


def test_the_inner_covariance_is_stationary_for_the_exact_objective():
    matrix, policy = positive(2, 4), GaussianModel(1, 2, hidden=(), full=True)
    y = torch.randn(40, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x, wanted = torch.ones(40, 1).double(), torch.linalg.cholesky(inner_covariance(matrix, 0.6))
    with torch.no_grad():
        policy.network[0].weight.zero_()
        policy.network[0].bias.copy_(torch.cat([y.mean(0), wanted.diagonal().log(), wanted[1, :1]]))
    value = policy.expected_reward(x, y, matrix).mean() + 0.6 * policy.entropy(x).mean()
    for slope in torch.autograd.grad(value, list(policy.parameters())):
        assert slope.abs().max() < 1e-10


def test_expected_rewards_are_means_of_rewards():
    policy, x = GaussianModel(2, 2, hidden=(4,), full=True), torch.randn(1, 2, generator=torch.Generator().manual_seed(0)).double()
    y, matrix = torch.zeros(1, 2).double(), positive(2)
    drawn = policy.draw(x.expand(200_000, 2), torch.Generator().manual_seed(1))
    mean = mahalanobis(drawn.action[:, 0], y, matrix).mean()
    torch.testing.assert_close(mean, policy.expected_reward(x, y, matrix)[0].detach(), rtol=0.02, atol=0)
    model, classes = CategoricalModel(2, 3, hidden=(4,)), torch.tensor([1])
    wanted = model.log_probs(x).exp()[0] @ reward_table(positive())[:, 1]
    torch.testing.assert_close(model.expected_reward(x, classes, positive())[0], wanted)


def test_the_table_is_the_distance_of_one_hot_vectors():
    matrix, eye = positive(), torch.eye(3).double()
    torch.testing.assert_close(reward_table(matrix), mahalanobis(eye[:, None], eye[None], matrix))


def test_an_isotropic_table_gives_a_tempered_distribution():
    q = torch.tensor([0.5, 0.3, 0.2]).double()
    found = categorical(0.35 * torch.eye(3).double(), q, 0.7)
    torch.testing.assert_close(found.reward_table, -0.7 * (1 - torch.eye(3).double()))
    torch.testing.assert_close(found.policy, q.softmax(-1))


def inputs(generations, n=2, rows=3):
    g = torch.Generator().manual_seed(5)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    return draw(generations, rows, n), draw(rows, n).requires_grad_(), draw(rows, n).exp().requires_grad_(), draw(rows, n), positive(n)


def test_a_lone_normalized_generation_leaves_the_entropy_alone():
    samples, mean, std, target, matrix = inputs(1)
    found = pg_loss(samples, mean, std, target, matrix, "normalize", 0.3)
    entropy = (std.log() + 0.5 * math.log(2 * math.pi * math.e)).mean()
    torch.testing.assert_close(found.loss, -0.3 * entropy)
    assert (torch.autograd.grad(found.loss, mean)[0] == 0).all()


def test_a_clamp_has_no_gradient_beyond():
    samples, mean, std, target, matrix = inputs(4)
    far = pg_loss(samples + 1e3, mean, std, target, matrix, "none", 0.0, clamp=2.0)
    assert (torch.autograd.grad(far.loss, mean)[0] == 0).all()
    wide, none = (pg_loss(samples, mean, std, target, matrix, "none", 0.1, clamp=c).loss for c in (1e9, None))
    assert wide == none


def test_transforms():
    reward, group = torch.tensor([-3.0, -1.0, -2.0, -5.0]).double(), torch.tensor([0, 0, 1, 1])
    assert transformed(reward, group, "normalize").tolist() == [0.0, 2.0, 3.0, 0.0]
    torch.testing.assert_close(transformed(reward, group, "rbf", 0.5), (0.5 * reward).exp())
    assert transformed(reward, group, "none") is reward
    with pytest.raises(ValueError, match="use none"):
        transformed(reward, group, "standardize")


@pytest.mark.parametrize("transform", ["none", "normalize", "rbf"])
def test_the_components_are_the_papers_loss_with_joint_probabilities(transform):
    data = pendulum_model(transitions=30, hidden=8)
    method = METHOD.set("credit.transform", transform).set("reward.kind", "diagonal").set("update.learning_rate", 1e-12)
    run = Run(method, data.policy(), data, steps=1)
    batch = step(run)
    mean, scale = data.policy().parts(batch.context)
    shape = lambda t: t.reshape(-1, 5, 2).transpose(0, 1)  # noqa: E731
    std = scale.diagonal(dim1=-2, dim2=-1)
    wanted = pg_loss(
        shape(batch.action[:, 0]), shape(mean)[0], shape(std)[0], shape(batch.signals["target"])[0], run.state[MATRIX], transform, 0.01
    )
    assert run.history[0]["loss"] == pytest.approx(2 * wanted.loss.item(), abs=1e-9)


def test_implicit_differentiation_agrees_with_the_closed_forms():
    u, weight = torch.tensor([0.4, 1.5]).double(), 0.4
    log_std = 0.5 * (weight / (2 * u)).log()
    mean, covariance = torch.tensor([0.3, -0.2]).double(), positive(2)
    wanted = implicit(u, log_std, mean, mean, covariance, weight).hypergradient
    theta, leaf = torch.cat([mean, log_std]).requires_grad_(), u.clone().requires_grad_()
    gap, variance = theta[:2] - mean, (2 * theta[2:]).exp()
    inner = -(leaf * (variance + gap**2)).sum() + weight * theta[2:].sum()
    outer = -(theta[2:] + 0.5 * (covariance.diagonal() + gap**2) / variance).sum()
    torch.testing.assert_close(implicit_gradient(inner, outer, [theta], leaf, damping=0.0), wanted)

    q, matrix = torch.tensor([0.6, 0.3, 0.1]).double(), positive().requires_grad_()
    z = (reward_table(matrix.detach()) @ q / 0.7).requires_grad_()
    inner = z.softmax(-1) @ reward_table(matrix) @ q - 0.7 * (z.softmax(-1) * z.log_softmax(-1)).sum()
    found = implicit_gradient(inner, q @ z.log_softmax(-1), [z], matrix, damping=0.0, iterations=2)
    torch.testing.assert_close(
        found, categorical(matrix.detach(), q, 0.7).hypergradient, rtol=1e-5, atol=1e-7
    )  # what conjugate gradients leave


def test_the_factor_is_positive_definite():
    raw = 5 * torch.randn(20, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert all(torch.linalg.eigvalsh(factored(r)).min() > 0 for r in raw)


@pytest.mark.parametrize("full", [True, False])
def test_the_gaussian_model_is_a_gaussian(full):
    policy = GaussianModel(3, 2, hidden=(4,), full=full)
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drawn = policy.draw(x, torch.Generator().manual_seed(1))
    mean, scale = policy.parts(x)
    other = torch.distributions.MultivariateNormal(mean, scale_tril=scale)
    torch.testing.assert_close(drawn.logp[:, 0], other.log_prob(drawn.action[:, 0]).detach())
    torch.testing.assert_close(policy.entropy(x), other.entropy())
    assert full == bool((scale[:, 1, 0] != 0).all())


def test_u_follows_the_residuals_and_the_entropy_weight():
    data = gaussian_data(points=100)
    run = Run(METHOD.set("regularize.0.coefficient", 0.2), data.policy(), data, steps=1)
    residual = data.train.y - run.policy.parts(data.train.x)[0].detach()
    step(run)
    torch.testing.assert_close(inner_covariance(run.state[MATRIX], 0.2), residual.T @ residual / 100, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["", *VARIANTS])
def test_it_trains_and_resumes_to_the_same_numbers(name, tmp_path):
    method = VARIANTS[name] if name else METHOD
    if name == "bilevel":
        method = method.set("control.0.every", 1)
    whole = run_of(gaussian_data(), method, 4, tmp_path / "whole")
    run_of(gaussian_data(), method, 2, tmp_path / "halves")
    halves = run_of(gaussian_data(), method, 4, tmp_path / "halves")
    assert [r["loss"] for r in whole.history] == [r["loss"] for r in halves.history]
    assert torch.equal(whole.state[MATRIX], halves.state[MATRIX])
    assert (whole.state[MATRIX] != torch.eye(2)).any()
    for mine, other in zip(whole.policy.parameters(), halves.policy.parameters(), strict=True):
        assert torch.equal(mine, other)
    assert all(math.isfinite(r["loss"]) for r in whole.history)


def test_classes_and_transitions_train():
    pytest.importorskip("sklearn")
    bilevel = VARIANTS["bilevel"].set("control.0.every", 2)
    for data in (wine(hidden=4), wine(hidden=0), TASKS["breast_cancer"](hidden=4)):
        assert all(math.isfinite(r["loss"]) for r in run_of(data, bilevel, 4).history)
    assert all(math.isfinite(r["loss"]) for r in run_of(pendulum_model(), METHOD, 3).history)


def test_what_it_cannot_learn_from_is_refused():
    pytest.importorskip("sklearn")
    with pytest.raises(ValueError, match="for vectors"):
        run_of(wine(hidden=0), METHOD, 1)
    with pytest.raises(ValueError, match=r"pairs \(x, y\)"):
        run_of(sets_bandit(), METHOD, 1)
    with pytest.raises(ValueError, match="coefficient above 0"):
        run_of(gaussian_data(), METHOD.set("regularize.0.coefficient", 0.0), 1)
    with pytest.raises(ValueError, match="one member"):
        run_of(gaussian_data(), METHOD.set("select.group_size", 1), 1)
    with pytest.raises(ValueError, match="unknown reward matrix"):
        optimal_matrix(positive(), 0.1, "band")
    with pytest.raises(ValueError, match="500 training pairs"):
        run_of(gaussian_data(), METHOD.set("select.prompts", 501), 1)


def test_it_trains_by_name(tmp_path):
    result = api.train(METHOD, task="pendulum_model", steps=3, out=tmp_path / "run", transitions=50, hidden=8)
    found = api.evaluate(str(tmp_path / "run"), transitions=50, hidden=8)
    assert found["log_likelihood"]["value"] == pytest.approx(result.after["log_likelihood"])
