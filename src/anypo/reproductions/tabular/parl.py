"""Claims of PARL on preference bandits with six actions and two reward features that cannot express the true reward; everything but the last claim in
closed form, 300 steps from a reward and a policy of 0. Six problems run side by side."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.tabular.preferences import AlignedPolicy, PreferenceBandit
from anypo.methods.tabular.parl import METHOD as PARL
from anypo.methods.tabular.parl import VARIANTS, hypergradient, lower, lower_solution, pair_gradient, trajectory, utility_hypergradient
from anypo.reproductions.common import train_on
from anypo.run import Run

L2, L2_NU = PARL.update.l2, PARL.update.l2_nu  # type: ignore[attr-defined]
STEPS, SEED = 300, 0


def upper(task: PreferenceBandit, policy: AlignedPolicy, feedback: str) -> Any:
    """The hypergradient and what belongs to it, at the policy's parameters."""
    place = (task.features, policy.nu.detach(), policy.theta.detach())
    if feedback == "utility":
        return utility_hypergradient(*place, task.true_reward, L2, L2_NU)
    return hypergradient(*place, task.preference, L2, L2_NU)


@cache
def trained(implicit: bool, feedback: str, seed: int = SEED) -> tuple[Tensor, Tensor, Tensor]:
    """Of each problem [6]: G and true return at the end, with theta solved exactly for the reward learned; and the hypergradient's square by step."""
    task = PreferenceBandit(seed=seed)
    policy = task.policy()
    method = VARIANTS["exact"].set("update.implicit", implicit).set("update.feedback", feedback)

    def size(run: Run, batch: Batch) -> Tensor:
        return upper(task, policy, feedback).total.pow(2).sum(-1)

    squares = train_on(method, policy, task, steps=STEPS, watch=size)
    with torch.no_grad():
        policy.theta.copy_(lower_solution(task.features, policy.nu, L2).theta)
    return upper(task, policy, feedback).objective, task.measure(policy)["return"], torch.stack(squares)


def rounded(values: Tensor) -> list[float]:
    return [round(value, 4) for value in values.tolist()]


def _objective(implicit: bool) -> Evidence:
    mine, direct = trained(implicit, "preference")[0], trained(False, "preference")[0]
    holds = bool((mine >= direct - 1e-6).all()) and int((mine > direct + 1e-3).sum()) >= 2
    return Evidence({"G": rounded(mine), "direct part": rounded(direct)}, "never below, above by 0.001 in 2 of 6 problems or more", holds)


@claim(
    "with the part through the policy the alignment objective ends at least as high as with the direct part alone, and higher in some problems"
)
def objective() -> Evidence:
    return _objective(True)


@ablation(objective, "the direct part alone")
def objective_direct() -> Evidence:
    return _objective(False)


def _utility(implicit: bool) -> Evidence:
    mine, direct = trained(implicit, "utility")[1], trained(False, "utility")[1]
    return Evidence(
        {"true return": rounded(mine), "direct part": rounded(direct)}, "higher in all problems", bool((mine > direct + 1e-3).all())
    )


@claim("learning a reward from the utility of trajectories needs the part through the policy: the true return is higher in every problem")
def utility() -> Evidence:
    return _utility(True)


@ablation(utility, "the direct part alone")
def utility_direct() -> Evidence:
    return _utility(False)


def _decrease(implicit: bool) -> Evidence:
    squares = trained(implicit, "preference")[2]
    ratio = squares.mean(0) / squares[: STEPS // 10].mean(0)
    return Evidence(
        {"ratios": rounded(ratio), "mean": round(float(ratio.mean()), 3)}, "below 0.2 in the mean over problems", float(ratio.mean()) < 0.2
    )


@claim("the mean squared hypergradient falls as 1/T: over 300 steps it is about a tenth of that over the first 30")
def decrease() -> Evidence:
    return _decrease(True)


@ablation(decrease, "steps along the direct part alone")
def decrease_direct() -> Evidence:
    return _decrease(False)


def _derivative(part: str) -> Evidence:
    """Central differences of G(nu, theta*(nu)) at a random nu against a part of the hypergradient; the largest error over six problems."""
    task = PreferenceBandit(seed=SEED)
    nu = torch.randn(6, 2, generator=torch.Generator().manual_seed(SEED), dtype=torch.float64)

    def at(nu: Tensor) -> Any:
        return hypergradient(task.features, nu, lower_solution(task.features, nu, L2).theta, task.preference, L2, L2_NU)

    steps = 1e-5 * torch.eye(2, dtype=torch.float64)
    differences = torch.stack([(at(nu + h).objective - at(nu - h).objective) / 2e-5 for h in steps], dim=1)
    error = float((getattr(at(nu), part) - differences).abs().max())
    return Evidence({"largest error": error}, "below 1e-5", error < 1e-5)


@claim("the hypergradient is the derivative of the alignment objective through the policy that the reward induces")
def derivative() -> Evidence:
    return _derivative("total")


@ablation(derivative, "the direct part alone")
def derivative_direct() -> Evidence:
    return _derivative("direct")


def _sampled(second_order: bool) -> Evidence:
    """100,000 rows and as many pairs of one problem against the closed forms: relative errors (of norms). `second_order`: the score's own derivative and
    the second trajectory's score count."""
    task, samples, g = PreferenceBandit(copies=1, spread=1.0, seed=SEED), 100_000, torch.Generator().manual_seed(SEED)
    nu = torch.randn(1, 2, generator=g, dtype=torch.float64)
    theta = lower_solution(task.features, nu, L2).theta
    exact, above = lower(task.features, nu, theta, L2), hypergradient(task.features, nu, theta, task.preference, L2, 0.0)
    table, reward = theta[0].softmax(-1), task.features[0] @ nu[0]
    action = torch.multinomial(table, samples, replacement=True, generator=g)
    score = torch.eye(6, dtype=torch.float64)[action] - table
    curvature = table[:, None] * table - table.diag()
    mask = torch.ones(samples, 1, dtype=torch.bool)
    below = trajectory(
        score[:, None], task.features[0, action][:, None], reward[action][:, None], mask,
        curvature.expand(samples, 1, 6, 6) * second_order, theta[0], 1.0, L2,
    )  # fmt: skip
    other = action[torch.randperm(samples, generator=g)]
    answer = torch.bernoulli(task.preference[0, action, other], generator=g)
    logit = reward[action] - reward[other]
    likelihood = torch.nn.functional.logsigmoid(torch.where(answer > 0, logit, -logit))
    likelihood = likelihood - likelihood.mean()  # as the method does: the same expectation, less variance
    second = torch.eye(6, dtype=torch.float64)[other] - table
    pairs = torch.stack([torch.arange(samples), torch.arange(samples) + samples], dim=1)
    found = pair_gradient(
        torch.cat([score, second * second_order]),
        pairs,
        task.features[0, action] - task.features[0, other],
        answer - logit.sigmoid(),
        likelihood,
    )
    errors = {
        "Hessian": (below.hessian, exact.hessian[0]),
        "mixed": (below.mixed, exact.mixed[0]),
        "pairs, in nu": (found.nu_gradient, above.direct[0]),
        "pairs, in theta": (found.theta_gradient, above.theta_gradient[0]),
    }
    measured = {name: round(float((mine - right).norm() / right.norm()), 4) for name, (mine, right) in errors.items()}
    return Evidence(measured, "all below 0.05", max(measured.values()) < 0.05)


@claim("the score-function estimators converge to the closed forms: 100,000 samples are within 5%")
def estimators() -> Evidence:
    return _sampled(True)


@ablation(estimators, "without the derivative of the score and without the second trajectory's score")
def estimators_first_order() -> Evidence:
    return _sampled(False)
