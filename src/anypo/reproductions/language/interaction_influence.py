"""Claims of interaction influence: groups of a logistic regression and of a small network, selection among near-duplicates, copies of an example.

Sizes are those of the row's specification unless a comment says otherwise. Every comparison is with retraining to convergence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from statistics import fmean

import torch
from torch import Tensor

from anypo.claims import Evidence, ablation, claim
from anypo.methods.language.interaction_influence import (
    correlation,
    greedy,
    group_influence,
    influence,
    log_loss,
    logistic_fit,
    logistic_parts,
    random_groups,
    removals,
    shifts,
)

SEEDS = (0, 1, 2)
LAM = 0.01  # ridge
Pairs = Callable[[Tensor], Tensor]  # what is done to the pairwise term


def whole(pair: Tensor) -> Tensor:
    return pair


def none(pair: Tensor) -> Tensor:
    return torch.zeros_like(pair)


def of_itself(pair: Tensor) -> Tensor:
    """No interactions: only each example's own second-order term."""
    return torch.diag(pair.diagonal())


def _tracking(pairs: Pairs) -> Evidence:
    found, holds = {}, True
    runs = [removals(seed, (20, 40)) for seed in SEEDS]
    for i, size in enumerate((20, 40)):
        scores: dict[str, list[float]] = {"first-order r": [], "r": [], "first-order error": [], "error": []}
        for first, pair, members, actual in runs:
            predicted = group_influence(first, pairs(pair), members[i])
            for name, guess in (("first-order ", predicted.first_order), ("", predicted.total)):
                scores[name + "r"].append(correlation(guess, actual[i]))
                scores[name + "error"].append(float((guess - actual[i]).abs().mean()))
        mean = {name: fmean(values) for name, values in scores.items()}
        found[f"groups of {size}"] = {name: round(value, 4) for name, value in mean.items()}
        holds &= mean["r"] > mean["first-order r"] + 0.015 and mean["error"] < 0.8 * mean["first-order error"]
    return Evidence(found, "correlation at least 0.015 higher, mean absolute error at most 0.8 of it, at both sizes (3 seeds)", holds)


@claim("for a logistic regression, the pairwise term brings predictions nearer to retraining without the group")
def tracks_retraining() -> Evidence:
    return _tracking(whole)


@ablation(tracks_retraining, "no curvature of the target")
def tracks_without_curvature() -> Evidence:
    return _tracking(none)


@ablation(tracks_retraining, "self terms only, no interactions")
def tracks_without_interactions() -> Evidence:
    return _tracking(of_itself)


class Network:
    """Logits of a network with one hidden layer of tanh units, for many parameter vectors [G,P] at once, with their Jacobians."""

    def __init__(self, features: int, hidden: int = 32) -> None:
        self.features, self.hidden = features, hidden
        self.size = hidden * (features + 2) + 1

    def __call__(self, theta: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [G,n] and Jacobians [G,n,P] on x [n,d]."""
        weight, bias, out, last = theta.split([self.hidden * self.features, self.hidden, self.hidden, 1], dim=-1)
        h = (torch.einsum("ghd,nd->gnh", weight.view(-1, self.hidden, self.features), x) + bias[:, None]).tanh()
        inner = out[:, None] * (1 - h**2)
        outer = (inner[..., None] * x[:, None]).flatten(-2)
        return torch.einsum("gnh,gh->gn", h, out) + last, torch.cat([outer, inner, h, torch.ones_like(h[..., :1])], -1)

    def derivatives(self, theta: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients [G,n,P] of every example and Gauss-Newton matrices [G,P,P] of the weighted loss."""
        logits, jacobian = self(theta, x)
        p = logits.sigmoid()
        scaled = jacobian * (weight * p * (1 - p)).sqrt()[..., None]
        return (p - y)[..., None] * jacobian, scaled.mT @ scaled

    def fit(self, theta: Tensor, x: Tensor, y: Tensor, keep: Tensor, steps: int = 200, tolerance: float = 1e-6) -> Tensor:
        """Gauss-Newton steps, halved until the objective falls, from theta [G,P] on the kept examples [G,n].

        Raises RuntimeError when the slope is not below `tolerance` after `steps`."""
        weight = keep.double() / keep.sum(-1, keepdim=True)

        def objective(candidate: Tensor) -> Tensor:
            logits = self(candidate, x)[0]
            losses = torch.nn.functional.softplus(torch.where(y.bool(), -logits, logits))
            return (weight * losses).sum(-1) + LAM / 2 * (candidate**2).sum(-1)

        for _ in range(steps):
            grads, curvature = self.derivatives(theta, x, y, weight)
            slope = torch.einsum("gn,gnp->gp", weight, grads) + LAM * theta
            if slope.abs().max() < tolerance:
                return theta
            step = torch.linalg.solve(curvature + LAM * torch.eye(self.size, dtype=theta.dtype), slope)
            size, now = torch.ones(len(theta), 1, dtype=theta.dtype), objective(theta)
            for _ in range(6):
                worse = objective(theta - size * step) > now
                if not worse.any():
                    break
                size[worse] /= 2
            theta = theta - size * step
        raise RuntimeError("the network did not converge; raise the ridge or the number of steps")


def _digits(seed: int) -> tuple[Tensor, ...]:
    """200 training and 160 target images of the digits 0 and 1, as 10 principal components, with labels."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(n_class=2, return_X_y=True)
    x, y = torch.tensor(images / 16), torch.tensor(labels).double()
    x = x - x.mean(0)
    x = x @ torch.linalg.svd(x, full_matrices=False).Vh[:10].T
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    train, target = order[:200], order[200:360]
    return x[train] / x.std(), y[train], x[target] / x.std(), y[target]


@cache
def _network_removals(seed: int, sizes: tuple[int, ...] = (20, 40), groups: int = 24) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """First-order and pairwise terms, membership [sizes,groups,n] and what retraining from the trained parameters does to the target."""
    x, y, x_target, y_target = _digits(seed)
    generator = torch.Generator().manual_seed(seed)
    net = Network(x.shape[1])
    start = 0.3 * torch.randn(1, net.size, generator=generator, dtype=torch.float64)
    theta = net.fit(start, x, y, torch.ones(1, len(x), dtype=torch.bool))
    (grads, hess), (target, target_hess) = (
        net.derivatives(theta, *data, torch.full((1,), 1 / len(data[0]), dtype=torch.float64)) for data in ((x, y), (x_target, y_target))
    )
    whole_hess = hess[0] + LAM * torch.eye(net.size, dtype=torch.float64)
    delta = shifts(grads[0], whole_hess, len(x), 0.01 * float(whole_hess.diagonal().mean()))
    members = torch.stack([random_groups(x, size, groups, generator) for size in sizes])
    flat = members.flatten(0, 1)
    retrained = net.fit(theta.expand(len(flat), -1), x, y, ~flat)
    actual = log_loss(net(retrained, x_target)[0], y_target) - log_loss(net(theta, x_target)[0], y_target)
    return *influence(delta, target[0].mean(0), target_hess[0]), members, actual.view(members.shape[:2])


# 24 groups a size (retraining a network costs more), Gauss-Newton matrices for both Hessians. Seeds on which nothing was chosen; on two others the
# correlation rose by 0.03 to 0.10 at every size. Self terms alone raise it too, by 0.005 to 0.05 here, so they are no ablation.
def _network(pairs: Pairs) -> Evidence:
    gains, found = [], []
    for seed in SEEDS:
        first, pair, members, actual = _network_removals(seed)
        predicted = group_influence(first, pairs(pair), members)
        both = [fmean(correlation(guess[i], actual[i]) for i in range(2)) for guess in (predicted.first_order, predicted.total)]
        gains.append(both[1] - both[0])
        found.append([round(r, 3) for r in both])
    return Evidence(
        found, "correlation (mean of groups of 20 and 40) more than 0.01 higher in at least 2 of 3 seeds", sum(g > 0.01 for g in gains) >= 2
    )


@claim("for a network of 32 hidden units on digits, the pairwise term brings predictions nearer to retraining", slow=True)
def tracks_a_network() -> Evidence:
    return _network(whole)


@ablation(tracks_a_network, "no curvature of the target")
def network_without_curvature() -> Evidence:
    return _network(none)


def _selected(seed: int, features: int, pairs: Pairs) -> dict[str, float]:
    """Target loss of refitting with 20 added examples: greedy, the 20 largest influences, greedy without interactions, 5 random draws."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    def coins(count: int) -> Tensor:
        return torch.randint(2, (count,), generator=g).double()

    true, centres = normal(features), normal(10, features)
    labels = (centres @ true > 0).double()
    x, y = normal(20, features), coins(20)
    pool = torch.cat([(centres[:, None] + 0.1 * normal(10, 20, features)).flatten(0, 1), normal(200, features)])
    pool_y = torch.cat([labels.repeat_interleave(20), coins(200)])
    target, target_y = (centres[:, None] + 0.1 * normal(10, 30, features)).flatten(0, 1), labels.repeat_interleave(30)
    parts = logistic_parts(x, y, target, target_y, LAM)
    delta = shifts(((pool @ parts.w).sigmoid() - pool_y)[:, None] * pool, parts.hess, len(x))
    first, pair = influence(delta, parts.tgrad, parts.thess)

    def refitted(chosen: Tensor) -> float:
        w = logistic_fit(torch.cat([x, pool[chosen]]), torch.cat([y, pool_y[chosen]]), LAM)
        return float(log_loss(target @ w, target_y))

    return {
        "greedy": refitted(greedy(first, pairs(pair), 20).order),
        "largest influence": refitted(first.topk(20).indices),
        "greedy, self terms only": refitted(greedy(first, of_itself(pair), 20).order),
        "random": fmean(refitted(torch.randperm(400, generator=g)[:20]) for _ in range(5)),
    }


# The spec leaves the number of features open. With 5, greedy was 0.09 below the largest influences and 0.12 below chance on the choosing seeds; losses
# vary a lot from problem to problem, hence 40 of them. Refitting is on the base examples and the chosen ones.
def _selection(features: int, pairs: Pairs, rivals: tuple[str, ...] = ("largest influence", "random")) -> Evidence:
    runs = [_selected(seed, features, pairs) for seed in range(40)]
    mean = {name: fmean(r[name] for r in runs) for name in runs[0]}
    return Evidence(
        {name: round(loss, 3) for name, loss in mean.items()},
        f"mean target loss of 40 problems: greedy at least 0.02 below {' and '.join(rivals)}",
        all(mean["greedy"] < mean[name] - 0.02 for name in rivals),
    )


@claim("from a pool with planted near-duplicates, the greedy rule adds better data than the largest influences or chance")
def selects_better() -> Evidence:
    return _selection(5, whole)


@ablation(selects_better, "no curvature of the target: the largest influences")
def selects_without_curvature() -> Evidence:
    return _selection(5, none)


# Better by 0.04 on 12 choosing seeds, worse by 0.02 on these 40.
@claim("it adds better data than the greedy rule with self terms alone", reproduced=False)
def selects_better_by_interactions() -> Evidence:
    return _selection(5, whole, ("greedy, self terms only",))


@claim("it does so when the base model has as many features (20) as training examples, and is poor", reproduced=False)
def selects_better_at_a_poor_base() -> Evidence:
    return _selection(20, whole)


def _copies(pairs: Pairs) -> Evidence:
    worst = 0.0
    for seed in SEEDS:
        g = torch.Generator().manual_seed(seed)
        x, x_target = (torch.randn(60, 4, generator=g, dtype=torch.float64) for _ in range(2))
        y, y_target = (torch.randint(2, (60,), generator=g) for _ in range(2))
        for k in (2, 3, 7):
            x[:k], y[:k] = x[0].clone(), y[0].clone()
            parts = logistic_parts(x, y, x_target, y_target, LAM)
            first, pair = influence(shifts(parts.grads, parts.hess, 60), parts.tgrad, parts.thess)
            total = group_influence(first, pairs(pair), torch.arange(k)).total
            worst = max(worst, float((total - (k * first[0] + k**2 * pair[0, 0] / 2)).abs()))
    return Evidence(float(f"{worst:.2g}"), "k copies give k I + k^2 Q / 2 within 1e-9 (k = 2, 3, 7; 3 problems)", worst < 1e-9)


@claim("copies of an example are redundant: their self term counts with the square of their number")
def copies() -> Evidence:
    return _copies(whole)


@ablation(copies, "self terms only, no interactions")
def copies_without_interactions() -> Evidence:
    return _copies(of_itself)
