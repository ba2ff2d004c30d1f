"""PARL and A-PARL: bilevel policy alignment (arXiv:2308.02585).

A reward is learned from preferences between trajectories of the policy that this same reward induces. Alternating the two fits the reward as if
trajectories were given, the direct part of the gradient; A-PARL adds how a change of the reward moves the policy, and with it what is compared.
Upper level: nu maximizes G, the likelihood of preferences (or a utility), on trajectories of theta*(nu); lower level: theta*(nu) maximizes the
learned reward. The hypergradient follows the publication as the row's specification recalls it; its score-function estimators and its closed form
on a bandit are derived there, and the ridge term in theta is [reconstructed]. A step first moves nu, at the policy that the last step left
behind, then theta, so that the estimates see trajectories of the very policy they are about. Left out: continuous control.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.tabular.preferences import AlignedPolicy, PreferenceBandit, preference_objective
from anypo.method import Method, Paper
from anypo.policy import Loss, Policy, Signals
from anypo.run import MethodLoss, Run
from anypo.seams.credit import GroupRelative
from anypo.seams.natural import conjugate_gradient
from anypo.seams.objective import ClippedSurrogate
from anypo.seams.rollout import OnPolicy
from anypo.seams.select import UniformPrompts
from anypo.seams.update import GradientSteps

Features = Float[Tensor, "... A k"]
Rewarding = Float[Tensor, "... k"]  # nu
Acting = Float[Tensor, "... A"]  # theta


class Lower(NamedTuple):
    value: Tensor  # [...]
    gradient: Tensor  # [...,A] in theta
    hessian: Tensor  # [...,A,A]
    mixed: Tensor  # [...,A,k] derivative of the gradient in nu


class Solution(NamedTuple):
    theta: Tensor  # [...,A]


class Hypergradient(NamedTuple):
    objective: Tensor  # [...] G
    direct: Tensor  # [...,k] with the policy held fixed
    theta_gradient: Tensor  # [...,A]
    correction: Tensor  # [...,k] through the policy
    total: Tensor  # [...,k]


class Trajectories(NamedTuple):
    gradient: Tensor  # [...,d]
    mixed: Tensor  # [...,d,k]
    hessian: Tensor  # [...,d,d]


class Pairs(NamedTuple):
    nu_gradient: Tensor  # [...,k]
    theta_gradient: Tensor  # [...,d]


def fisher(policy: Acting) -> Float[Tensor, "... A A"]:
    """diag(pi) - pi pi^T, the derivative of a softmax."""
    return torch.diag_embed(policy) - policy[..., :, None] * policy[..., None, :]


def lower(reward_features: Features, nu: Rewarding, theta: Acting, l2: float) -> Lower:
    """Equation 1 on a bandit: V = pi.r - l2/2 |theta|^2 with r = Phi nu, and its derivatives."""
    policy, reward = theta.softmax(-1), (reward_features @ nu[..., None])[..., 0]
    value = (policy * reward).sum(-1)
    slope = policy * (reward - value[..., None])
    outer = slope[..., :, None] * policy[..., None, :]
    hessian = torch.diag_embed(slope) - outer - outer.mT - l2 * torch.eye(theta.shape[-1]).to(theta)
    return Lower(value - l2 / 2 * theta.pow(2).sum(-1), slope - l2 * theta, hessian, fisher(policy) @ reward_features)


def lower_solution(reward_features: Features, nu: Rewarding, l2: float, ascents: int = 500, newton_steps: int = 10) -> Solution:
    """theta*(nu), by gradient ascent from 0 with a step that always climbs, and Newton steps at its end. `l2` > 0."""
    theta = reward_features.new_zeros(reward_features.shape[:-1])
    reward = (reward_features @ nu[..., None])[..., 0]
    step = 1 / (reward.amax(-1, keepdim=True) - reward.amin(-1, keepdim=True) + l2)
    for _ in range(ascents):
        theta = theta + step * lower(reward_features, nu, theta, l2).gradient
    for _ in range(newton_steps):
        found = lower(reward_features, nu, theta, l2)
        theta = theta - torch.linalg.solve(found.hessian, found.gradient)
    return Solution(theta)


def through_policy(mixed: Float[Tensor, "... d k"], hessian: Float[Tensor, "... d d"], theta_gradient: Float[Tensor, "... d"]) -> Rewarding:
    """Equation 3, implicit part: -(d2V/dtheta dnu)^T (d2V/dtheta2)^-1 dG/dtheta."""
    return (mixed.mT @ torch.linalg.solve(-hessian, theta_gradient)[..., None])[..., 0]


def hypergradient(
    reward_features: Features, nu: Rewarding, theta: Acting, preference: Float[Tensor, "... A A"], l2: float, l2_nu: float
) -> Hypergradient:
    """Equations 2-5 on a bandit with preference feedback; exact where theta is theta*(nu)."""
    policy, reward = theta.softmax(-1), (reward_features @ nu[..., None])[..., 0]
    gap = reward[..., :, None] - reward[..., None, :]
    surprise = policy[..., :, None] * policy[..., None, :] * (preference - gap.sigmoid())
    direct = ((surprise - surprise.mT).sum(-1)[..., None, :] @ reward_features)[..., 0, :] - l2_nu * nu
    log_chance = torch.nn.functional.logsigmoid(gap)
    likelihood = preference * log_chance + (1 - preference) * log_chance.mT
    slope = (fisher(policy) @ (likelihood + likelihood.mT) @ policy[..., None])[..., 0]
    below = lower(reward_features, nu, theta, l2)
    correction = through_policy(below.mixed, below.hessian, slope)
    objective = preference_objective(reward, policy, preference) - l2_nu / 2 * nu.pow(2).sum(-1)
    return Hypergradient(objective, direct, slope, correction, direct + correction)


def utility_hypergradient(
    reward_features: Features, nu: Rewarding, theta: Acting, utility: Acting, l2: float, l2_nu: float
) -> Hypergradient:
    """Equations 2-3 on a bandit with the utility of every action as feedback: without the policy's part only the ridge is left."""
    policy, below = theta.softmax(-1), lower(reward_features, nu, theta, l2)
    slope, direct = (fisher(policy) @ utility[..., None])[..., 0], -l2_nu * nu
    correction = through_policy(below.mixed, below.hessian, slope)
    return Hypergradient(
        (policy * utility).sum(-1) - l2_nu / 2 * nu.pow(2).sum(-1), direct, slope, correction, direct + correction
    )  # fmt: skip


def trajectory(
    score: Float[Tensor, "... N T d"], reward_gradient: Float[Tensor, "... N T k"], reward: Float[Tensor, "... N T"],
    mask: Bool[Tensor, "... N T"], curvature: Float[Tensor, "... N T d d"], theta: Float[Tensor, "... d"], gamma: float, l2: float,
) -> Trajectories:  # fmt: skip
    """Equation 4: gradient, mixed derivative and Hessian of V from trajectories; `score` and `curvature` are those of single actions."""
    inside = mask.bool()
    scores = torch.where(inside[..., None], score, 0.0).cumsum(-2)
    curvatures = torch.where(inside[..., None, None], curvature, 0.0).cumsum(-3)
    weight = inside * gamma ** torch.arange(mask.shape[-1], dtype=score.dtype) / mask.shape[-2]
    paid = torch.where(inside, weight * reward, 0.0)
    slopes = torch.where(inside[..., None], weight[..., None] * reward_gradient, 0.0)
    second = torch.einsum("...nt,...ntd,...nte->...de", paid, scores, scores) + torch.einsum("...nt,...ntde->...de", paid, curvatures)
    return Trajectories(
        torch.einsum("...nt,...ntd->...d", paid, scores) - l2 * theta,
        torch.einsum("...ntd,...ntk->...dk", scores, slopes),
        second - l2 * torch.eye(theta.shape[-1]).to(theta),
    )


def pair_gradient(
    score_sum: Float[Tensor, "... N d"], pairs: Int[Tensor, "M 2"], logit_gradient: Float[Tensor, "... M k"],
    residual: Float[Tensor, "... M"], log_likelihood: Float[Tensor, "... M"],
) -> Pairs:  # fmt: skip
    """Equation 4: gradients of G without its ridge from answers about pairs of trajectories. `residual`: answer minus predicted chance."""
    both = score_sum[..., pairs, :].sum(-2)
    return Pairs((residual[..., None] * logit_gradient).mean(-2), (log_likelihood[..., None] * both).mean(-2))


@dataclass
class LearnedReward:
    """What the learned reward says, summed over a row."""

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        found = run.score(batch, {"learned_reward"}).learned_reward
        return torch.where(batch.mask, found, 0.0).sum(1)


@dataclass
class ExactReturn:
    """Minus the learned reward in expectation over actions, mean over the copies."""

    needs = frozenset({"table", "learned_table"})

    def __call__(self, batch: Batch, new: Signals, run: Run) -> Loss:
        return Loss(-(new.table * new.learned_table.detach()).sum(-1).mean())


@dataclass
class BilevelSteps(GradientSteps):
    """One step of nu along the hypergradient, then `epochs` steps of theta on the method's loss with the reward of the new nu, for every copy."""

    epochs: int = 20  # K, steps of theta, >= 1
    learning_rate: float | None = 0.5  # alpha > 0, of theta; None = the policy's own
    max_grad_norm: float | None = None
    upper_rate: float = 0.5  # beta > 0, of nu
    gamma: float = 0.95  # discount of the learned reward, in [0,1]
    l2: float = 0.3  # > 0, ridge of theta; without it a softmax's Hessian is singular
    l2_nu: float = 0.05  # >= 0, ridge of nu
    iterations: int = 20  # of conjugate gradients, >= 1
    damping: float = 1e-3  # >= 0, added to the negative Hessian
    feedback: str = "preference"  # or utility: the task's own score of a row
    implicit: bool = True  # False: the direct part alone, as when reward and policy are alternated

    def __call__(self, batch: Batch, loss_fn: MethodLoss, run: Run) -> dict[str, float]:
        if not isinstance(run.policy, AlignedPolicy) or not isinstance(run.task, PreferenceBandit):
            raise ValueError(
                f"{run.method.name} learns a reward beside its policy, which needs the task preference_bandit, not {run.task.name}"
            )
        if self.feedback not in ("preference", "utility"):
            raise ValueError(f"update.feedback is preference or utility, not '{self.feedback}'")
        direct, correction = self.parts(batch, run.policy, run.task, run)
        with torch.no_grad():
            run.policy.nu.add_(direct + correction if self.implicit else direct, alpha=self.upper_rate)
        run.advance_version()
        batch.reward = run.method.reward(batch, run)
        batch.advantage = run.method.credit(batch, run)
        sizes = {"hypergradient": direct + correction, "direct": direct}
        return super().__call__(batch, loss_fn, run) | {name: float(g.pow(2).sum(-1).mean()) for name, g in sizes.items()}

    def build(self, policy: Policy) -> torch.optim.Optimizer:
        """For theta alone. The loss is a mean over copies, and each moves as if it were by itself."""
        copies = len(policy.theta)
        return torch.optim.SGD([policy.theta], lr=copies * (self.learning_rate or policy.learning_rate), weight_decay=self.l2 / copies)

    def parts(self, batch: Batch, policy: AlignedPolicy, task: PreferenceBandit, run: Run) -> tuple[Tensor, Tensor]:
        """Direct and implicit part [B,k] of the hypergradient, estimated from the batch. Each row is compared with one other of its copy.

        Raises ValueError unless every copy has equally many rows, at least 2.
        """
        copies = len(policy.theta)
        count = torch.bincount(batch.signals["prompt_id"], minlength=copies)
        if int(count.min()) != int(count.max()) or int(count[0]) < 2:
            raise ValueError("parl compares rows of a copy; give every copy equally many, with select.group_size of 2 or more")
        seen = policy.observe(batch, {"score", "curvature", "learned_reward", "reward_gradient"})
        rows = batch.signals["prompt_id"].argsort(stable=True).view(copies, -1)
        score, curvature, reward, slope = (
            seen[name][rows] for name in ("score", "curvature", "learned_reward", "reward_gradient")
        )  # fmt: skip
        mask, n = batch.mask[rows], rows.shape[1]
        centred = reward - reward.mean(1, keepdim=True)  # the same expectation, less variance
        found = trajectory(score, slope, centred, mask, curvature, policy.theta.detach(), self.gamma, self.l2)
        inside = mask * self.gamma ** torch.arange(batch.horizon, dtype=score.dtype)
        total, change = (reward * inside).sum(-1), (slope * inside[..., None]).sum(-2)
        score_sum = (score * mask[..., None]).sum(-2)
        pairs = torch.stack([torch.arange(n), torch.arange(n).roll(-1)], dim=1)
        ridge = self.l2_nu * policy.nu.detach()
        if self.feedback == "utility":
            utility = run.score_rewards(batch)[rows]
            theta_gradient = ((utility - utility.mean(1, keepdim=True))[..., None] * score_sum).mean(1)
            direct = -ridge
        else:
            first, second = rows[:, pairs[:, 0]], rows[:, pairs[:, 1]]
            answer = task.ask(batch, first.flatten(), second.flatten(), run.generator).view(copies, n)
            logit = total[:, pairs[:, 0]] - total[:, pairs[:, 1]]
            likelihood = torch.nn.functional.logsigmoid(torch.where(answer > 0, logit, -logit))
            gradients = pair_gradient(
                score_sum, pairs, change[:, pairs[:, 0]] - change[:, pairs[:, 1]], answer - logit.sigmoid(),
                likelihood - likelihood.mean(1, keepdim=True),
            )  # fmt: skip
            direct, theta_gradient = gradients.nu_gradient - ridge, gradients.theta_gradient
        solved = torch.stack([self.solve(-h, g) for h, g in zip(found.hessian, theta_gradient, strict=True)])
        return direct, torch.einsum("bdk,bd->bk", found.mixed, solved)

    def solve(self, matrix: Float[Tensor, "d d"], b: Float[Tensor, " d"]) -> Float[Tensor, " d"]:
        """Conjugate gradients, which end early where an estimated Hessian is not negative definite."""
        return conjugate_gradient(lambda v: matrix @ v + self.damping * v, b, self.iterations)


@dataclass
class ExactBilevelSteps(BilevelSteps):
    """The same with the expectations in closed form."""

    def parts(self, batch: Batch, policy: AlignedPolicy, task: PreferenceBandit, run: Run) -> tuple[Tensor, Tensor]:
        place = (task.features, policy.nu.detach(), policy.theta.detach())
        if self.feedback == "utility":
            found = utility_hypergradient(*place, task.true_reward, self.l2, self.l2_nu)
        else:
            found = hypergradient(*place, task.preference, self.l2, self.l2_nu)
        return found.direct, found.correction


METHOD = Method(
    name="parl",
    paper=Paper("PARL and A-PARL: bilevel policy alignment", "2308.02585", 2023),
    domain="tabular",
    summary="the reward is learned with the gradient through the policy that it induces, not as if trajectories were given",
    task="preference_bandit",
    select=UniformPrompts(group_size=64),
    rollout=OnPolicy(),
    reward=LearnedReward(),
    credit=GroupRelative(std=False),
    objective=ClippedSurrogate(),
    update=BilevelSteps(),
)

VARIANTS = {
    "exact": METHOD.but(
        name="parl.exact",
        summary="expectations in closed form in place of samples",
        select=UniformPrompts(group_size=2),
        objective=ExactReturn(),
        update=ExactBilevelSteps(),
    )
}
