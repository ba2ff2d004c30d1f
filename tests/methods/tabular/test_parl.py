import itertools

import pytest
import torch
from torch.nn import functional as F

from anypo import api
from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.domains.tabular.preferences import PreferenceBandit, preference_objective
from anypo.loops.on_policy import step, train
from anypo.methods.tabular.parl import (
    METHOD,
    VARIANTS,
    hypergradient,
    lower,
    lower_solution,
    pair_gradient,
    trajectory,
    utility_hypergradient,
)
from anypo.run import Run
from tests.helpers import assert_continues

RIDGES = {"l2": 0.3, "l2_nu": 0.05}


def problem(seed=0, actions=5, size=3):
    """features [2,A,k], nu [2,k], theta [2,A], preference [2,A,A]"""
    g = torch.Generator().manual_seed(seed)
    features, nu, theta, true = (
        torch.randn(2, *s, generator=g, dtype=torch.float64) for s in ((actions, size), (size,), (actions,), (actions,))
    )
    return features, nu, theta, (true[:, :, None] - true[:, None, :]).sigmoid()


def test_the_lower_level_is_its_own_derivatives():
    features, nu, theta, _ = (x[0] for x in problem())
    value = lambda t, n: t.softmax(-1) @ features @ n - 0.15 * t @ t  # noqa: E731
    found = lower(features, nu, theta, 0.3)
    hessian = torch.autograd.functional.hessian(value, (theta, nu))
    torch.testing.assert_close(found.value, value(theta, nu))
    torch.testing.assert_close(found.hessian, hessian[0][0])
    torch.testing.assert_close(found.mixed, hessian[0][1])
    torch.testing.assert_close(found.gradient, torch.autograd.functional.jacobian(lambda t: value(t, nu), theta))


def test_the_lower_solution_is_a_maximum():
    features, nu, *_ = problem(1)
    found = lower(features, 3 * nu, lower_solution(features, 3 * nu, 0.3).theta, 0.3)
    torch.testing.assert_close(found.gradient, torch.zeros(2, 5).double(), rtol=0, atol=1e-12)
    assert (torch.linalg.eigvalsh(found.hessian) < 0).all()


def test_without_the_implicit_part_it_fits_the_reward_to_given_data():
    """The direct part is the gradient of the same likelihood with the policy held fixed."""
    features, nu, theta, preference = problem(2)
    leaf = nu.clone().requires_grad_()
    objective = preference_objective((features @ leaf[..., None])[..., 0], theta.softmax(-1), preference) - 0.025 * leaf.pow(2).sum(-1)
    found = hypergradient(features, nu, theta, preference, **RIDGES)
    torch.testing.assert_close(found.direct, torch.autograd.grad(objective.sum(), leaf)[0])
    torch.testing.assert_close(found.objective, objective.detach())
    assert torch.equal(found.total, found.direct + found.correction)


def test_indifferent_preferences_leave_nothing_to_learn():
    features, nu, theta, preference = problem(3)
    found = hypergradient(features, torch.zeros_like(nu), torch.zeros_like(theta), torch.full_like(preference, 0.5), **RIDGES)
    torch.testing.assert_close(found.total, torch.zeros_like(nu), rtol=0, atol=1e-15)
    torch.testing.assert_close(found.objective, -torch.tensor(2.0).log().double().expand(2))


def test_a_policy_that_does_not_depend_on_the_reward_leaves_the_direct_part():
    """One feature for all actions alike: the reward cannot move the policy."""
    features, nu, _, preference = problem(4)
    features = features[:, :1].expand_as(features)
    found = hypergradient(features, nu, lower_solution(features, nu, 0.3).theta, preference, **RIDGES)
    torch.testing.assert_close(found.correction, torch.zeros_like(nu), rtol=0, atol=1e-12)


def test_utility_without_a_ridge_is_the_implicit_part_alone():
    features, nu, theta, preference = problem(5)
    found = utility_hypergradient(features, nu, theta, preference[:, 0], l2=0.3, l2_nu=0.0)
    assert found.direct.eq(0).all() and torch.equal(found.total, found.correction) and found.total.ne(0).any()


def chain(seed=0):
    """All paths of two steps with three actions, where the second is chosen in view of the first: probabilities, and the parts of the estimators."""
    g = torch.Generator().manual_seed(seed)
    theta, nu = torch.randn(12, generator=g, dtype=torch.float64), torch.randn(2, generator=g, dtype=torch.float64)
    slopes = torch.randn(4, 3, 2, generator=g, dtype=torch.float64)
    paths = list(itertools.product(range(3), repeat=2))

    def logs(t):
        table = t.view(4, 3).log_softmax(-1)
        return torch.stack([torch.stack([table[0, a], table[1 + a, b]]) for a, b in paths])

    slope = torch.stack([torch.stack([slopes[0, a], slopes[1 + a, b]]) for a, b in paths])
    score = torch.autograd.functional.jacobian(logs, theta)
    curvature = torch.stack(
        [torch.stack([torch.autograd.functional.hessian(lambda t, i=i, j=j: logs(t)[i, j], theta) for j in (0, 1)]) for i in range(9)]
    )
    return theta, nu, logs, slope, score, curvature


def test_the_trajectory_estimators_are_unbiased_over_two_steps():
    theta, nu, logs, slope, score, curvature = chain()
    discount = torch.tensor([1.0, 0.9]).double()
    value = lambda t, n: logs(t).sum(1).exp() @ (slope @ n @ discount) - 0.15 * t @ t  # noqa: E731
    chance = logs(theta).sum(1).exp()
    each = [trajectory(score[[i]], slope[[i]], (slope @ nu)[[i]], torch.ones(1, 2), curvature[[i]], theta, 0.9, 0.3) for i in range(9)]
    gradient, mixed, hessian = (torch.stack([getattr(e, name) for e in each]) for name in ("gradient", "mixed", "hessian"))
    exact = torch.autograd.functional.hessian(value, (theta, nu))
    torch.testing.assert_close(chance @ gradient, torch.autograd.functional.jacobian(lambda t: value(t, nu), theta))
    torch.testing.assert_close(torch.tensordot(chance, mixed, 1), exact[0][1])
    torch.testing.assert_close(torch.tensordot(chance, hessian, 1), exact[0][0])


def test_the_pair_estimators_are_unbiased_over_two_steps():
    theta, nu, logs, slope, score, _ = chain(1)
    total = slope.sum(1)
    answers = torch.randn(9, generator=torch.Generator().manual_seed(2)).double() * 2
    preference = (answers[:, None] - answers[None]).sigmoid()

    def objective(t, n):
        chance = logs(t).sum(1).exp()
        return preference_objective(total @ n, chance, preference)

    chance, pairs = logs(theta).sum(1).exp(), torch.cartesian_prod(torch.arange(9), torch.arange(9))
    logit = (total @ nu)[pairs[:, 0]] - (total @ nu)[pairs[:, 1]]
    weight = 81 * chance[pairs[:, 0]] * chance[pairs[:, 1]]  # makes the mean over pairs an expectation
    wanted = preference[pairs[:, 0], pairs[:, 1]]
    likelihood = wanted * F.logsigmoid(logit) + (1 - wanted) * F.logsigmoid(-logit)
    found = pair_gradient(
        score.sum(1), pairs, total[pairs[:, 0]] - total[pairs[:, 1]], weight * (wanted - logit.sigmoid()), weight * likelihood
    )
    by_theta, by_nu = torch.autograd.functional.jacobian(objective, (theta, nu))
    torch.testing.assert_close(found.theta_gradient, by_theta)
    torch.testing.assert_close(found.nu_gradient, by_nu)


def test_padding_may_be_anything():
    theta, nu, _, slope, score, curvature = chain(2)
    mask = torch.tensor([[1, 0]] * 9)
    dirty = [torch.where(mask.view(9, 2, *[1] * (x.dim() - 2)).bool(), x, torch.nan) for x in (score, slope, slope @ nu, curvature)]
    found = trajectory(dirty[0], dirty[1], dirty[2], mask, dirty[3], theta, 0.9, 0.3)
    short = trajectory(score[:, :1], slope[:, :1], (slope @ nu)[:, :1], mask[:, :1], curvature[:, :1], theta, 0.9, 0.3)
    for mine, theirs in zip(found, short, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("feedback", ["preference", "utility"])
def test_the_sampled_parts_approach_the_exact_ones(feedback):
    task = PreferenceBandit(3, copies=2, spread=1.0)
    found = []
    for method, samples in ((METHOD, 200_000), (VARIANTS["exact"], 2)):
        method = method.set("update.feedback", feedback).set("select.group_size", samples).set("update.damping", 0.0)
        run = Run(method, task.policy(), task, steps=1)
        with torch.no_grad():
            run.policy.nu.copy_(torch.tensor([[0.5, -0.3], [0.2, 0.8]]))
            run.policy.theta.copy_(lower_solution(task.features, run.policy.nu, 0.3).theta)
        batch = method.rollout(method.select(task, run), run)
        found.append(torch.stack(method.update.parts(batch, run.policy, task, run)))
    torch.testing.assert_close(found[0], found[1], rtol=0.1, atol=0.01)


def test_a_step_moves_theta_with_the_new_reward_and_every_copy_by_itself():
    task = PreferenceBandit(copies=3)
    run = Run(VARIANTS["exact"].set("update.epochs", 1), task.policy(), task, steps=1)
    step(run)
    nu, theta = run.policy.nu.detach(), run.policy.theta.detach()
    start = hypergradient(task.features, torch.zeros(3, 2).double(), torch.zeros(3, 6).double(), task.preference, **RIDGES)
    torch.testing.assert_close(nu, 0.5 * start.total)
    torch.testing.assert_close(theta, 0.5 * lower(task.features, nu, torch.zeros(3, 6).double(), 0.3).gradient)


def test_the_direct_part_alone_is_a_choice():
    task = PreferenceBandit()
    run = Run(VARIANTS["exact"].set("update.implicit", False).set("update.feedback", "utility"), task.policy(), task, steps=3)
    train(run)
    assert run.policy.nu.eq(0).all() and run.policy.theta.eq(0).all()


@pytest.mark.parametrize("method", [METHOD, VARIANTS["exact"]])
def test_it_resumes(method, tmp_path):
    def run_to(out, upto):
        task = PreferenceBandit(copies=2)
        run = Run(method, task.policy(), task, steps=4, out=out, checkpoint_every=2)
        run.resume()
        while run.step < upto:
            step(run)
        return run

    assert_continues(run_to, tmp_path)


@pytest.mark.parametrize(
    ("path", "value", "words"), [("update.feedback", "likes", "preference or utility"), ("select.prompts", 2, "6 copies")]
)
def test_wrong_settings_are_one_sentence(path, value, words):
    with pytest.raises(ValueError, match=words):
        task = PreferenceBandit()
        train(Run(METHOD.set(path, value), task.policy(), task, steps=1))


def test_another_task_and_too_few_actions_are_refused():
    task = TokenBandit(2)
    with pytest.raises(ValueError, match="preference_bandit"):
        run = Run(METHOD.but(reward=lambda batch, run: torch.ones(len(batch))), task.policy(), task, steps=1)
        train(run)
    with pytest.raises(ValueError, match="2 or more actions"):
        PreferenceBandit(1)


def test_it_trains_from_the_command_line(tmp_path):
    api.train("parl", steps=2, out=tmp_path)
    assert api.evaluate(str(tmp_path))["best_return"]["value"] > 0
