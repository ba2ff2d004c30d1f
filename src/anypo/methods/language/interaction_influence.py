"""Interaction influence: interaction-aware influence functions for groups of training examples (arXiv:2605.15675).

Classical influence functions add up what the removal of each example does to a target (say, a held-out loss). Here the target is expanded to second
order while the parameters' response to a removal stays first order: the sum gains a term for every pair, positive for redundant examples. The same
terms give a greedy choice of training data that is paid less for more of the same. Equations 1-3 and the greedy rule are the paper's, 4 follows
from them, the sign form of 5 is derived, 6 is [reconstructed]. `InfluencePrompts` is this library's use for reinforcement learning (equation 7): any
method takes it as its `select`. Left out: random projections of gradients; a large model's gradients are held whole, one row a prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper, Study
from anypo.seams.groups import group_mean
from anypo.task import Prompt, Task

if TYPE_CHECKING:
    from anypo.run import Run


class Influence(NamedTuple):
    first: Tensor  # [M]
    pair: Tensor  # [M,M] > 0 redundant, < 0 complementary


class GroupInfluence(NamedTuple):
    first_order: Tensor  # the standard sum
    interaction: Tensor
    total: Tensor  # predicted change of the target when the group is removed


class Selection(NamedTuple):
    order: Tensor  # [k] int, as chosen
    marginal: Tensor  # [k] predicted change of the target by each addition


class Removals(NamedTuple):
    first: Tensor  # [n]
    pair: Tensor  # [n,n]
    members: Tensor  # [sizes,groups,n] bool
    actual: Tensor  # [sizes,groups] change of the target by retraining


class LogisticParts(NamedTuple):
    w: Tensor  # [P] or [G,P]
    grads: Tensor  # [n,P] without the ridge term
    hess: Tensor  # [P,P] with it
    tgrad: Tensor  # [P] of the mean target loss, no ridge
    thess: Tensor  # [P,P]


def shifts(grads: Float[Tensor, "M P"], hess: Float[Tensor, "P P"], n: int, damping: float = 0.0) -> Float[Tensor, "M P"]:
    """Equation 1: change of the parameters when each example leaves a mean loss over `n`. `hess` is that of the whole objective, ridge included.

    Raises ValueError when the damped Hessian is not positive definite.
    """
    damped = (hess + hess.T) / 2 + damping * torch.eye(hess.shape[0]).to(hess)
    root, failed = torch.linalg.cholesky_ex(damped)
    if failed:
        raise ValueError("the Hessian is not positive definite; raise damping, or give the Gauss-Newton matrix of a network")
    return torch.cholesky_solve(grads.T, root).T / n


def influence(delta: Float[Tensor, "M P"], target_grad: Float[Tensor, " P"], target_hess: Float[Tensor, "P P"]) -> Influence:
    """Equations 2 and 3, from the shifts of equation 1."""
    return Influence(delta @ target_grad, delta @ ((target_hess + target_hess.T) / 2) @ delta.T)


def pair_from_target_gradients(delta: Float[Tensor, "M P"], target_grads: Float[Tensor, "B P"]) -> Float[Tensor, "M M"]:
    """Equation 6: the pairwise term with the target's Hessian as the mean outer product of its examples' gradients, which is never formed."""
    effects = delta @ target_grads.T  # [M,B] first-order effect of each removal on each target example
    return effects @ effects.T / len(target_grads)


def group_influence(
    first: Float[Tensor, " M"], pair: Float[Tensor, "M M"], members: Int[Tensor, " S"] | Bool[Tensor, "... M"]
) -> GroupInfluence:
    """Equation 4: indices of one group, or membership [...,M] of many."""
    inside = members.to(first)
    if members.dtype != torch.bool:
        inside = torch.zeros_like(first).index_fill(0, members.long(), 1.0)
    alone, together = inside @ first, (inside @ pair * inside).sum(-1) / 2
    return GroupInfluence(alone, together, alone + together)


def greedy(first: Float[Tensor, " M"], pair: Float[Tensor, "M M"], k: int, stop_early: bool = False) -> Selection:
    """Equation 5: `k` examples to ADD, each the one that is predicted to lower the target most given those before; ties go to the lower index.

    `stop_early` ends before the first addition that would not lower it. Raises ValueError for a `k` outside 1..M.
    """
    if not 1 <= k <= len(first):
        raise ValueError(f"k is between 1 and the {len(first)} candidates, not {k}")
    value, order, marginal = pair.diagonal() / 2 - first, [], []
    for _ in range(k):
        best = int(value.argmin())
        if stop_early and value[best] >= 0:
            break
        order.append(best)
        marginal.append(value[best])
        value = (value + pair[best]).index_fill(0, torch.tensor(best), float("inf"))
    return Selection(torch.tensor(order, dtype=torch.int64), torch.stack(marginal) if marginal else first.new_zeros(0))


@dataclass
class InfluencePrompts:
    """Trains on those of a pool of prompts whose policy gradients, taken together, promise most for held-out prompts.

    Pool and held-out prompts are attempted first; these attempts count as generated actions. Rewards count relative to the prompt's other attempts.
    """

    prompts: int | None = None  # chosen a step, >= 1; None = the task's own default
    group_size: int = 8  # attempts at each chosen prompt, >= 1
    pool: int = 4  # candidates for every prompt chosen, >= 1
    held_out: int = 16  # prompts whose mean loss is the target, >= 1
    attempts: int = 8  # at each candidate and each held-out prompt, >= 2
    step_size: float = 1.0  # of the gradient step that the choice foresees, > 0: damping 1 / step_size, no Hessian

    needs = frozenset({"logp"})

    def __call__(self, task: Task, run: Run) -> list[Prompt]:
        if self.pool < 1 or self.held_out < 1 or self.attempts < 2:
            raise ValueError("select.pool and select.held_out must be at least 1, select.attempts at least 2")
        count = self.prompts or task.prompts_per_step
        candidates, held_out = task.prompts(count * self.pool, run.rng), task.prompts(self.held_out, run.rng)
        grads, target = (self._gradients(prompts, run) for prompts in (candidates, held_out))
        delta = shifts(grads, torch.zeros(2 * [grads.shape[1]]).to(grads), count, 1 / self.step_size)
        chosen = greedy(delta @ target.mean(0), pair_from_target_gradients(delta, target), count)
        run.log(foreseen=float(chosen.marginal.sum()))
        return [candidates[i].but(samples=self.group_size) for i in chosen.order.tolist()]

    def _gradients(self, prompts: list[Prompt], run: Run) -> Float[Tensor, "M P"]:
        batch = run.collect([prompt.but(samples=self.attempts) for prompt in prompts])
        run.prepare_signals(batch, run.method.needs("reward"))
        batch.reward = run.method.reward(batch, run)
        return prompt_gradients(batch, run)


def prompt_gradients(batch: Batch, run: Run) -> Float[Tensor, "M P"]:
    """Gradient of every group's policy-gradient loss, the mean of -logp (reward - group's mean), in the policy's parameters; groups in order."""
    parameters, rows = [p for p in run.policy.parameters() if p.requires_grad], []
    advantage = batch.outcome - group_mean(batch.outcome, batch.group)
    for group in torch.unique(batch.group):
        part = batch.group == group
        logp = run.policy.evaluate(batch[part], {"logp"})["logp"]
        loss = -(logp * batch.counted[part] * advantage[part, None]).sum() / part.sum()
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        rows.append(torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(parameters, found, strict=True)]))
    return torch.stack(rows)


def logistic_fit(
    x: Float[Tensor, "n P"], y: Tensor, lam: float, keep: Bool[Tensor, "... n"] | None = None, steps: int = 100
) -> Float[Tensor, "... P"]:
    """Weights of least mean log loss over the kept examples plus lam/2 |w|^2, by Newton steps; labels `y` [n] are 0 or 1, no intercept."""
    inside = torch.ones(len(x)).to(x) if keep is None else keep.to(x)
    weight, ridge = inside / inside.sum(-1, keepdim=True), lam * torch.eye(x.shape[1]).to(x)
    w = x.new_zeros(*inside.shape[:-1], x.shape[1])
    for _ in range(steps):
        p = (w @ x.T).sigmoid()
        slope = (weight * (p - y.to(x))) @ x + lam * w
        if slope.abs().max() < 1e-12:
            break
        curvature = torch.einsum("...n,np,nq->...pq", weight * p * (1 - p), x, x) + ridge
        w = w - torch.linalg.solve(curvature, slope)
    return w


def log_loss(logits: Tensor, y: Tensor) -> Tensor:
    """Mean log loss [...] of logits [...,n] for labels 0 or 1."""
    return torch.nn.functional.softplus(torch.where(y.bool(), -logits, logits)).mean(-1)


def logistic_parts(x: Float[Tensor, "n P"], y: Tensor, x_target: Float[Tensor, "m P"], y_target: Tensor, lam: float) -> LogisticParts:
    """Fit and everything the estimator asks of a logistic regression, exactly."""
    w = logistic_fit(x, y, lam)
    (grads, hess), (target, thess) = (_logistic_derivatives(w, *data) for data in ((x, y), (x_target, y_target)))
    return LogisticParts(w, grads, hess + lam * torch.eye(len(w)).to(w), target.mean(0), thess)


def _logistic_derivatives(w: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of every example [n,P] and Hessian of the mean loss [P,P], without a ridge."""
    p = (x @ w).sigmoid()
    return (p - y.to(x))[:, None] * x, (x * (p * (1 - p))[:, None]).T @ x / len(x)


def random_groups(x: Float[Tensor, "n P"], size: int, count: int, generator: torch.Generator) -> Bool[Tensor, "count n"]:
    """Groups to remove: 70% are the `size` examples farthest along a random direction, which are alike; the rest are drawn uniformly."""
    score = torch.randn(count, x.shape[1], generator=generator, dtype=x.dtype) @ x.T
    alike = torch.arange(count) < round(0.7 * count)
    score = torch.where(alike[:, None], score, torch.rand(count, len(x), generator=generator, dtype=x.dtype))
    return torch.zeros_like(score).scatter(1, score.topk(size, dim=1).indices, 1.0).bool()


def correlation(a: Float[Tensor, " G"], b: Float[Tensor, " G"]) -> float:
    """Pearson correlation."""
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1])


def removals(
    seed: int = 0, sizes: tuple[int, ...] = (20, 40, 80), groups: int = 80, n: int = 200, features: int = 20, lam: float = 0.01
) -> Removals:
    """A logistic regression on labels drawn from one, its influence terms, and what retraining without each of many groups does to its loss."""
    generator = torch.Generator().manual_seed(seed)
    x, x_target = (torch.randn(n, features, generator=generator, dtype=torch.float64) for _ in range(2))
    true = torch.randn(features, generator=generator, dtype=torch.float64)
    y, y_target = (torch.bernoulli((data @ true).sigmoid(), generator=generator) for data in (x, x_target))
    parts = logistic_parts(x, y, x_target, y_target, lam)
    terms = influence(shifts(parts.grads, parts.hess, n), parts.tgrad, parts.thess)
    members = torch.stack([random_groups(x, size, groups, generator) for size in sizes])
    actual = log_loss(logistic_fit(x, y, lam, ~members) @ x_target.T, y_target) - log_loss(x_target @ parts.w, y_target)
    return Removals(*terms, members, actual)


def run(seed: int = 0, sizes: tuple[int, ...] = (20, 40, 80), groups: int = 80) -> dict[str, Any]:
    """How both estimators track retraining without a group, by group size K: {correlation_first_K, error_first_K, correlation_K, error_K}."""
    first, pair, members, actual = removals(seed, sizes, groups)
    predicted, found = group_influence(first, pair, members), {}
    for i, size in enumerate(sizes):
        for name, guess in ((f"first_{size}", predicted.first_order[i]), (f"{size}", predicted.total[i])):
            found[f"correlation_{name}"] = correlation(guess, actual[i])
            found[f"error_{name}"] = float((guess - actual[i]).abs().mean())
    return found


STUDY = Study(
    name="interaction_influence",
    paper=Paper("Interaction-Aware Influence Functions for Group Attribution", "2605.15675", 2026),
    domain="language",
    run=run,
    kind="component",
    summary="what removing or adding a group of training examples does to a target, with a term for every pair that tells redundant from complementary",
)
