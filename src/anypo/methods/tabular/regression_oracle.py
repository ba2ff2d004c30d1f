"""Regression-oracle bandits: SquareCB-style exploration and oscillation in payments (arXiv:2412.00569).

A chain of generations: act by a policy made from a model's predictions, log a batch, forget old data, fit the next model to what is left by plain
empirical risk minimization, deploy. Inverse-gap weighting (SquareCB, FastCB) makes an exploring policy out of any regression model, at far less regret
than uniform exploration; but each policy shifts labels and actions of the data that the next model learns from, so its estimates away from the logged
policy get worse and fluctuate. Equations 1 and 2 are the standard rules, the world and the settings are [reconstructed], the paper's data are
proprietary. Left out: boosted trees as the model, a choice of gamma on logs. Baselines: uniform, epsilon-greedy, softmax.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anypo.domains.tabular.payments import Transactions, fit, payments, predict, transactions, uniform_log_loss
from anypo.method import Paper, Study

KINDS = ("squarecb", "fastcb", "uniform", "egreedy", "softmax")


class Policy(NamedTuple):
    probability: Tensor  # [N,K], exactly 0 where an action is not available


class Estimates(NamedTuple):
    ips: Tensor
    snips: Tensor
    dr: Tensor
    dm: Tensor
    ess: Tensor  # effective sample size, in (0,N]


class Drift(NamedTuple):
    imbalance: float  # in [0.5,1]
    positive_rate: float
    coverage: float  # entropy of the action frequencies, in [0,1] of its maximum
    log_loss: float
    auc: float


class Oscillation(NamedTuple):
    lag1: float
    sign_changes: int


class Log(NamedTuple):
    """A generation's batch; everything as it was when the decision was made."""

    context: Tensor  # [n,d]
    available: Tensor  # [n,K] bool
    action: Tensor  # [n]
    propensity: Tensor  # [n]
    reward: Tensor  # [n] 0 or 1
    prediction: Tensor  # [n] of the action taken


class Generation(NamedTuple):
    regret: float  # best available minus the policy's expected approval
    positive_rate: float
    imbalance: float
    coverage: float
    log_loss: float  # of the logged predictions
    auc: float
    test_log_loss: float  # of the generation's model on held-out transactions with uniform actions


def probabilities(prediction: Float[Tensor, "N K"], available: Bool[Tensor, "N K"], kind: str = "squarecb", gamma: float = 200.0) -> Policy:
    """Equations 1-3. `gamma`: greediness of squarecb and fastcb, share of uniform actions of egreedy, scale of softmax; >= 0.

    Raises ValueError for an unknown kind or a row without an available action."""
    inside = available.bool()
    if kind not in KINDS:
        raise ValueError(f"unknown exploration '{kind}'; use {', '.join(KINDS)}")
    if not inside.any(-1).all():
        raise ValueError("every row needs an available action; leave out the rows without one")
    count = inside.sum(-1, keepdim=True).to(prediction)
    masked = torch.where(inside, prediction, float("-inf"))
    best = masked.argmax(-1, keepdim=True)  # smallest index on ties
    if kind == "uniform":
        return Policy(inside / count)
    if kind == "softmax":
        return Policy(torch.where(inside, gamma * prediction, float("-inf")).softmax(-1))
    if kind == "egreedy":
        return Policy((gamma * inside / count).scatter_add(-1, best, torch.full_like(count, 1 - gamma)))
    gap = torch.where(inside, masked.amax(-1, keepdim=True) - prediction, torch.zeros_like(prediction))
    if kind == "squarecb":
        others = 1 / (count + gamma * gap)
    else:
        least = 1 - masked.amax(-1, keepdim=True)
        room = count * least + gamma * gap
        others = torch.where(room > 0, least / room.where(room > 0, torch.ones_like(room)), 1 / count)
    others = torch.where(inside, others, torch.zeros_like(others)).scatter(-1, best, 0.0)
    return Policy(others.scatter(-1, best, 1 - others.sum(-1, keepdim=True)))


def ope(
    reward: Float[Tensor, " N"], action: Int[Tensor, " N"], propensity: Float[Tensor, " N"], target: Float[Tensor, "N K"],
    model: Float[Tensor, "N K"], cap: float = 10.0,
) -> Estimates:  # fmt: skip
    """Equation 4: value of the policy `target` from logs of another; `model` predicts rewards, weights are capped at `cap` (infinity: no cap)."""
    w = (target.gather(-1, action[:, None])[:, 0] / propensity).clamp(max=cap)
    direct = (target * model).sum(-1)
    doubly = direct + w * (reward - model.gather(-1, action[:, None])[:, 0])
    return Estimates((w * reward).mean(), (w * reward).sum() / w.sum(), doubly.mean(), direct.mean(), w.sum() ** 2 / (w**2).sum())


def drift(reward: Float[Tensor, " N"], action: Int[Tensor, " N"], prediction_logged: Float[Tensor, " N"], actions: int) -> Drift:
    """Equation 5: what a batch looks like to the model that is fitted to it."""
    rate = float(reward.mean())
    share = action.bincount(minlength=actions).double() / len(action)
    p = prediction_logged.clamp(1e-12, 1 - 1e-12)
    loss = -(reward * p.log() + (1 - reward) * (-p).log1p()).mean()
    entropy = -torch.xlogy(share, share).sum() / math.log(actions)
    return Drift(max(rate, 1 - rate), rate, float(entropy), float(loss), _auc(reward, prediction_logged))


def _auc(reward: Tensor, score: Tensor) -> float:
    """Chance that a positive scores above a negative, ties half; 1/2 with one class only."""
    won, lost = score[reward > 0.5], score[reward <= 0.5].sort().values
    if len(won) == 0 or len(lost) == 0:
        return 0.5
    below = torch.searchsorted(lost, won) + torch.searchsorted(lost, won, right=True)
    return float(below.double().mean() / 2 / len(lost))


def oscillation(regret: Float[Tensor, " G"]) -> Oscillation:
    """Equation 6 of a series over generations: lag-1 autocorrelation of what a straight line leaves, sign changes of the differences."""
    time = torch.arange(len(regret), dtype=regret.dtype) - (len(regret) - 1) / 2
    level = regret - regret.mean()
    rest = level - time * (time @ level) / (time @ time)
    total, steps = float(rest @ rest), regret.diff()
    constant = total <= 1e-24 * (1 + float(regret @ regret))
    return Oscillation(0.0 if constant else float(rest[1:] @ rest[:-1]) / total, int((steps[1:] * steps[:-1] < 0).sum()))


def take(rows: Transactions, probability: Float[Tensor, "n K"], prediction: Float[Tensor, "n K"], generator: torch.Generator) -> Log:
    """Draw an action and its reward for each of the rows."""
    action = torch.multinomial(probability, 1, generator=generator)
    propensity, approval, guess = (x.gather(-1, action)[:, 0] for x in (probability, rows.approval, prediction))
    reward = (torch.rand(len(action), generator=generator, dtype=torch.float64) < approval).double()
    return Log(rows.context, rows.available, action[:, 0], propensity, reward, guess)


def learn(logs: list[Log], actions: int, cap: float | None = None) -> Float[Tensor, "K d1"]:
    """The next model, fitted to at least one batch: unweighted, or with weights min(uniform / propensity, cap)."""
    joined = Log(*(torch.cat(x) for x in zip(*logs, strict=True)))
    weight = None if cap is None else (1 / joined.available.sum(-1) / joined.propensity).clamp(max=cap)
    return fit(joined.context, joined.action, joined.reward, actions, weight)


def generations(
    seed: int = 0, kind: str = "squarecb", gamma: float = 200.0, count: int = 16, size: int = 2000, window: int = 1, delay: int = 0,
    offset: float = 0.0, cap: float | None = None,
) -> list[Generation]:  # fmt: skip
    """`count` generations of `size` transactions. `window`: batches remembered; `delay`: generations until a batch can be learned from; `cap`: of
    importance weights in training, None for none of them. Uniform as long as nothing can be learned from. `offset`: see `payments.World`."""
    generator = torch.Generator().manual_seed(seed)
    world = payments(generator, offset=offset)
    test = transactions(world, 4000, generator)
    actions, features = world.linear.shape
    logs: list[Log] = []
    found = []
    for g in range(count):
        end = max(g - delay, 0)
        known = logs[max(end - window, 0) : end]
        prior = torch.zeros(actions, features + 1, dtype=torch.float64)  # predicts 1/2 everywhere
        model = learn(known, actions, cap) if known else prior
        rows = transactions(world, size, generator)
        guess = predict(model, rows.context)
        chance = probabilities(guess, rows.available, kind if known else "uniform", gamma).probability
        log = take(rows, chance, guess, generator)
        logs.append(log)
        best = rows.approval.where(rows.available, torch.zeros_like(rows.approval)).amax(-1)
        regret = float((best - (chance * rows.approval).sum(-1)).mean())
        shape = drift(log.reward, log.action, log.prediction, actions)
        loss = uniform_log_loss(predict(model, test.context), test.approval, test.available)
        found.append(Generation(regret, shape.positive_rate, shape.imbalance, shape.coverage, shape.log_loss, shape.auc, loss))
    return found


def run(
    seed: int = 0, kind: str = "squarecb", gamma: float = 200.0, count: int = 16, size: int = 2000, window: int = 1, delay: int = 0,
    offset: float = 0.0,
) -> dict[str, Any]:  # fmt: skip
    """Regret, test log loss, imbalance and coverage at the first model and over the last five generations, and how the test log loss oscillates."""
    found = generations(seed, kind, gamma, count, size, window, delay, offset)
    table = torch.tensor(found, dtype=torch.float64)
    first, last = table[min(1 + delay, count - 1)], table[-5:].mean(0)
    numbers = {
        f"{when}_{name}": float(row[i]) for when, row in (("first", first), ("last", last)) for i, name in enumerate(Generation._fields)
    }
    return numbers | oscillation(table[min(1 + delay, count - 3) :, -1])._asdict()


STUDY = Study(
    name="regression_oracle",
    paper=Paper("Contextual Bandits in Payment Processing: Non-uniform Exploration and Supervised Learning at Adyen", "2412.00569", 2024),
    domain="tabular",
    run=run,
    kind="system",
    summary="generations of bandit policies by inverse-gap weighting of a refitted model: low regret, but each policy worsens the next model's data",
)
