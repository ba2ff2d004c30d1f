"""Claims of V0 in a synthetic world of prompts and policies whose success is known exactly, and on a prompt bandit.

A prompt is one of four centres plus noise, a policy is a direction u, and success is sigma(u.x - w.x/2): what one policy can do says little
about another. The bandit's prompts have features, and how likely the untrained policy is to succeed depends on them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anypo.claims import Evidence, ablation, claim
from anypo.domains.language.toys.token_bandit import TabularTokens, TokenBandit
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.methods.language.v0_value import METHOD as V0
from anypo.methods.language.v0_value import InContextHead, PredictedBudget, allocate, class_weights, frontier, loss, value
from anypo.reproductions.common import plain_sgd, train_on
from anypo.task import Prompt

SEEDS = range(8)


@dataclass
class World:
    """Prompts, policies and their success; everything random comes from one seed."""

    seed: int

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        self.centres, self.difficulty = 1.5 * self.normal(4, 8), 0.3 * self.normal(8)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def prompts(self, *shape: int) -> Tensor:
        return self.centres[torch.randint(4, shape, generator=self.generator)] + self.normal(*shape, 8)

    def success(self, u: Tensor, x: Tensor, offset: float = 0.0) -> Tensor:
        return (x @ u + offset - x @ self.difficulty / 2).sigmoid()

    def outcomes(self, probability: Tensor) -> Tensor:
        return torch.bernoulli(probability, generator=self.generator)


def auroc(score: Tensor, outcome: Tensor) -> float:
    """Chance that a success is scored above a failure, ties counted half; 1/2 where there are not both."""
    gap = score[outcome == 1][:, None] - score[outcome == 0][None]
    return float((gap.sign() / 2 + 0.5).mean()) if gap.numel() else 0.5


@cache
def capability(seed: int) -> dict[str, float]:
    """Mean AUROC over 16 policies on 200 unseen prompts, by what the prediction is made from."""
    world = World(seed)
    u = 0.7 * world.normal(16, 8)
    contexts = [(x, world.outcomes(world.success(policy, x))) for policy, x in zip(u, world.prompts(16, 64), strict=True)]
    found: dict[str, list[float]] = {"own": [], "swapped": [], "context-free": [], "oracle": []}
    for i, policy in enumerate(u):
        x = world.prompts(200)
        probability = world.success(policy, x)
        scores = (value(*contexts[i], x), value(*contexts[(i + 1) % 16], x), -x @ world.difficulty, probability)
        outcome = world.outcomes(probability)
        for name, score in zip(found, scores, strict=True):
            found[name].append(auroc(score, outcome))
    return {name: fmean(numbers) for name, numbers in found.items()}


def _capability(which: str) -> Evidence:
    mean = {name: fmean(capability(seed)[name] for seed in SEEDS) for name in capability(0)}
    measured = {name: round(number, 3) for name, number in mean.items()}
    holds = mean[which] > max(0.75, mean["context-free"] + 0.15, mean["swapped"] + 0.2)
    return Evidence(measured, f"{which}: AUROC above 0.75, above context-free + 0.15, above swapped + 0.2", holds)


@claim("on unseen prompts V0 tells a policy's successes from its failures by the policy's own history, without any training")
def zero_shot() -> Evidence:
    return _capability("own")


@ablation(zero_shot, "the history of another policy")
def zero_shot_swapped() -> Evidence:
    return _capability("swapped")


def task_of(world: World, tasks: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Support [B,64,8] and its labels, and queries [B,8,8] in the order positive, negative, ..., of `tasks` new policies."""
    u = 0.7 * world.normal(tasks, 8, 1)
    x, pool = world.prompts(tasks, 64), world.prompts(tasks, 64)
    y, outcome = (world.outcomes((p @ u)[..., 0].sub(p @ world.difficulty / 2).sigmoid()) for p in (x, pool))
    order = outcome.argsort(dim=1, descending=True, stable=True)
    chosen = torch.stack([order[:, :4], order[:, -4:]], dim=2).flatten(1)
    whole = (outcome.sum(1) >= 4) & (outcome.sum(1) <= 60) & (y.sum(1) > 0) & (y.sum(1) < 64)
    return x[whole], y[whole], pool.gather(1, chosen[..., None].expand(-1, -1, 8))[whole], outcome.gather(1, chosen)[whole]


@cache
def trained_head(seed: int, steps: int = 500) -> tuple[float, float, float]:
    """AUROC of the kernel, of a head trained on other policies of the same world, and of that head when the labels it reads are shuffled."""
    world = World(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = InContextHead(8)
    optimizer = torch.optim.Adam(head.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for _ in range(steps):
        x, y, query, label = task_of(world, 16)
        weight = torch.stack([class_weights(*pair) for pair in zip(y, label, strict=True)])
        optimizer.zero_grad()
        loss(head(x.float(), y, query.float()), label, weight).combined.backward()
        optimizer.step()
        schedule.step()
    found = []
    for _ in range(32):
        u, x, query = 0.7 * world.normal(8), world.prompts(64), world.prompts(200)
        y, outcome = world.outcomes(world.success(u, x)), world.outcomes(world.success(u, query))
        with torch.no_grad():
            logits = [
                head(x[None].float(), labels[None], query[None].float())[0]
                for labels in (y, y[torch.randperm(64, generator=world.generator)])
            ]
        found.append([auroc(s, outcome) for s in (value(x, y, query), *(z[:, 1] - z[:, 0] for z in logits))])
    kernel, own, shuffled = (fmean(column) for column in zip(*found, strict=True))
    return kernel, own, shuffled


def _head(column: int) -> Evidence:
    kernel, head = (fmean(trained_head(seed)[c] for seed in range(2)) for c in (0, column))
    return Evidence({"kernel": round(kernel, 3), "head": round(head, 3)}, "head at least kernel - 0.02", head >= kernel - 0.02)


@claim("a small transformer trained on other policies' histories predicts a new policy as well as the kernel does", slow=True)
def in_context() -> Evidence:
    return _head(1)


@ablation(in_context, "the labels of the support are dealt to the wrong prompts")
def in_context_shuffled() -> Evidence:
    return _head(2)


def tracking(seed: int, window: int | None) -> float:
    """Mean absolute error over the last 10 of 40 rounds in which a policy turns into another; 16 new pairs a round. None: the first 128 pairs."""
    world = World(seed)
    start, end = 0.7 * world.normal(2, 8)
    x, y = world.prompts(128), torch.zeros(0)
    y, errors = world.outcomes(world.success(start, x)), []
    for t in range(40):
        u = start + (end - start) * (t + 1) / 40
        query = world.prompts(100)
        errors.append(float((value(x, y, query) - world.success(u, query)).abs().mean()))
        new = world.prompts(16)
        if window is not None:
            x, y = torch.cat([x, new])[-window:], torch.cat([y, world.outcomes(world.success(u, new))])[-window:]
    return fmean(errors[-10:])


def _tracking(window: int | None) -> Evidence:
    mine, still = (fmean(tracking(seed, w) for seed in range(16)) for w in (window, None))
    measured = {"error": round(mine, 3), "with the first history": round(still, 3)}
    return Evidence(measured, "below 0.7 of the error with the first history", mine < 0.7 * still)


@claim("a sliding history follows a policy that changes")
def tracks() -> Evidence:
    return _tracking(128)


@ablation(tracks, "the history does not slide")
def tracks_without_sliding() -> Evidence:
    return _tracking(None)


def mixed(success: Tensor, samples: Tensor) -> float:
    """Expected share of groups with both outcomes."""
    return float((1 - success**samples - (1 - success) ** samples).mean())


def _budget(predict: Callable[[Tensor, torch.Generator], Tensor]) -> Evidence:
    """200 prompts of success Beta(1/2,1/2), 4 attempts on average, mean of 20 draws."""
    rng, g, shares = np.random.default_rng(0), torch.Generator().manual_seed(0), []
    for _ in range(20):
        p = torch.tensor(rng.beta(0.5, 0.5, 200))
        noise = 0.15 * torch.randn(200, generator=g, dtype=torch.float64)
        shares.append([
            mixed(p, torch.full((200,), 4)),
            mixed(p, allocate((predict(p, g) + noise).clamp(0.02, 0.98), 800)),
            mixed(p, allocate(predict(p, g), 800)),
        ])  # fmt: skip
    uniform, noisy, exact = (fmean(column) for column in zip(*shares, strict=True))
    measured = {"uniform": round(uniform, 4), "noisy prediction": round(noisy, 4), "exact prediction": round(exact, 4)}
    return Evidence(measured, "uniform < noisy < exact", uniform < noisy < exact)


@claim("a budget by predicted success makes more groups mixed than a uniform one, also with predictions that are off by 0.15")
def budget() -> Evidence:
    return _budget(lambda p, g: p)


@ablation(budget, "predictions of other prompts")
def budget_shuffled() -> Evidence:
    return _budget(lambda p, g: p[torch.randperm(len(p), generator=g)])


class FeatureBandit(TokenBandit):
    """64 prompts around 8 centres; the initial chance of the right first token is the same for all prompts of a centre, from rare to nearly sure."""

    def __init__(self, seed: int) -> None:
        super().__init__(64, 4, 2, seed=seed, prompts_per_step=16)
        g = torch.Generator().manual_seed(seed + 500)
        self.centre = torch.randint(8, (64,), generator=g)
        noise = torch.randn(64 + 8, 8, generator=g, dtype=torch.float64)
        self.features = 1.5 * noise[64:][self.centre] + 0.5 * noise[:64]
        self.bias = torch.linspace(-2, 5, 8).double()[torch.randperm(8, generator=g)]

    def policy(self, **options: Any) -> TabularTokens:
        policy = super().policy(**options)
        with torch.no_grad():
            policy.logits.scatter_add_(2, self.targets[:, 0, :, None], self.bias[self.centre][:, None, None].expand(-1, 2, 1))
        return policy

    def prompts(self, count: int, rng: np.random.Generator) -> list[Prompt]:
        return [p.but(columns={"features": self.features[p.id]}) for p in super().prompts(count, rng)]


@dataclass
class Dealt(PredictedBudget):
    """An ablation: every prompt is attempted as often as another one should be."""

    def __call__(self, task: Any, run: Any) -> list[Prompt]:
        chosen = super().__call__(task, run)
        return [p.but(samples=chosen[i - 1].samples) for i, p in enumerate(chosen)]


@cache
def trained(seed: int, select: type[PredictedBudget] | None) -> float:
    """Exact success after 100 updates of 16 prompts with 4 attempts on average; None: GRPO's uniform budget. Both without the KL term."""
    task, method = FeatureBandit(seed), GRPO if select is None else V0.but(select=select())
    return train_on(plain_sgd(method, 8.0, group_size=4).but(regularize=()), task.policy(), task, steps=100, seed=seed)[-1]


def _gain(select: type[PredictedBudget]) -> Evidence:
    gains = [trained(seed, select) - trained(seed, None) for seed in range(10)]
    error = stdev(gains) / len(gains) ** 0.5
    measured = {
        "gain": round(fmean(gains), 4),
        "standard error": round(error, 4),
        "uniform": round(fmean(trained(s, None) for s in range(10)), 3),
    }
    return Evidence(measured, "gain above two standard errors", fmean(gains) > 2 * error)


@claim("in GRPO on prompts of unequal difficulty V0's budget ends with more success after 100 updates than a uniform one", slow=True)
def learns() -> Evidence:
    return _gain(PredictedBudget)


@ablation(learns, "every prompt gets the attempts of another one")
def learns_shuffled() -> Evidence:
    return _gain(Dealt)


COST, LAMS = torch.tensor([0.1, 0.4, 1.0]).double(), torch.tensor([0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0]).double()


@cache
def routed(seed: int, shift: int) -> tuple[float, Tensor]:
    """Accuracy of the best single model of three, and the router's frontier [7,2]. `shift`: a model is judged by the history of another."""
    world = World(seed)
    u = 0.6 * world.normal(3, 8)
    offsets = (-0.3, 0.3, 0.9)
    query = world.prompts(2000)
    truth = torch.stack([world.success(u[m], query, offsets[m]) for m in range(3)], dim=1)
    columns = []
    for m in range(3):
        x = world.prompts(256)
        columns.append(value(x, world.outcomes(world.success(u[m], x, offsets[m])), query))
    predicted = torch.stack([columns[(m + shift) % 3] for m in range(3)], dim=1)
    return float(truth.mean(0).max()), frontier(predicted, truth, COST, LAMS)


def _router(shift: int) -> Evidence:
    best = fmean(routed(seed, shift)[0] for seed in SEEDS)
    points = torch.stack([routed(seed, shift)[1] for seed in SEEDS]).mean(0)
    falls = bool((points[1:, 1] <= points[:-1, 1] + 1e-9).all())
    better = bool(((points[:, 0] > best + 0.05) & (points[:, 1] < 1)).any())
    measured = {"best single model": round(best, 3)} | {
        f"lam {lam:g}": [round(number, 3) for number in point] for lam, point in zip(LAMS.tolist(), points.tolist(), strict=True)
    }
    return Evidence(
        measured, "some price: accuracy above the best single model + 0.05, cost below 1; cost falls with the price", falls and better
    )


@claim("the router answers better than the best single model, at lower cost, and a higher price of models lowers the cost")
def routes() -> Evidence:
    return _router(0)


@ablation(routes, "every model is judged by the history of another one")
def routes_shuffled() -> Evidence:
    return _router(1)
