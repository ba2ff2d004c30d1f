"""Claims of POISE: unbiasedness by enumeration; what the probe knows, the spread of the gradient and the final success on toy_arith (sums below 20,
128 rollouts a step, exact success probabilities instead of samples, AdamW at the policy's own step size, a warm start at 30%)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean

import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.language.toys.toy_arith import GruPolicy, ToyArith, make_toy_arith
from anypo.loops.on_policy import step
from anypo.method import Method
from anypo.methods.language.poise import METHOD as POISE
from anypo.methods.language.poise import STATE, advantages, batch_features
from anypo.reproductions.common import ShuffledCredit
from anypo.run import Run
from anypo.seams.credit import GroupRelative
from anypo.seams.select import UniformPrompts

PROMPTS = 64  # a step, with two rollouts each
GROUPS = POISE.but(name="grpo", select=UniformPrompts(prompts=16, group_size=8), credit=GroupRelative(), control=())  # GRPO, the same loss
PAIRS = POISE.set("select.prompts", PROMPTS)


def enumerated_gradient(cross: bool) -> tuple[Tensor, Tensor]:
    """Exact expected policy gradient [5] of pairs of rollouts whose probe knows their reward, and the true gradient."""
    generator = torch.Generator().manual_seed(0)
    probability = torch.randn(5, generator=generator, dtype=torch.float64).softmax(-1)
    reward = torch.rand(5, generator=generator, dtype=torch.float64)
    score = torch.eye(5, dtype=torch.float64) - probability
    expected = torch.zeros(5, dtype=torch.float64)
    for i, j in itertools.product(range(5), repeat=2):
        rows = torch.tensor([i, j])
        prediction = reward[rows] if cross else reward[rows].flip(0)  # flipped, each rollout's baseline is its own prediction
        found = advantages(prediction, reward[rows], torch.zeros(2, dtype=torch.int64), "none").advantages
        expected += probability[i] * probability[j] * (found[:, None] * score[rows]).mean(0)
    return expected, (probability * reward) @ score


def _unbiased(cross: bool) -> Evidence:
    expected, true = enumerated_gradient(cross)
    found = {"largest error": float((expected - true).abs().max()), "largest entry": float(expected.abs().max())}
    return Evidence(found, "error below 1e-9", found["largest error"] < 1e-9)


@claim("with a probe that knows every reward, the cross-rollout baseline leaves the expected gradient exactly as it is")
def unbiased() -> Evidence:
    return _unbiased(cross=True)


@ablation(unbiased, "each rollout's baseline is its own prediction: the gradient vanishes")
def self_baseline_vanishes() -> Evidence:
    return _unbiased(cross=False)


@dataclass
class Trained:
    """A run of POISE for `steps` steps on toy_arith."""

    policy: GruPolicy
    task: ToyArith
    run: Run


@cache
def after(steps: int, seed: int) -> Trained:
    policy, task = make_toy_arith(small=False)
    run = Run(PAIRS, policy, task, steps=1000, seed=seed)
    for _ in range(steps):
        step(run)
    return Trained(policy, task, run)


def collected(trained: Trained, prompts: int, samples: int, seed: int) -> Batch:
    """Fresh rollouts of distinct problems with the signals of the credit; touches no stream of the run."""
    run = Run(PAIRS, trained.policy, trained.task, steps=1, seed=seed)
    drawn = trained.task.prompts(prompts, run.rng)
    batch = run.collect([p.but(samples=samples) for p in drawn])
    batch.reward = run.score_rewards(batch)
    run.prepare_signals(batch, PAIRS.needs("credit"))
    return batch


def predicted(trained: Trained, batch: Batch, shuffled: bool) -> Tensor:
    """The probe's prediction of every row, from its own features (or another row's)."""
    state = trained.run.state[STATE]
    value = ((batch_features(batch) - state["mean"]) / state["std"] @ state["weight"] + state["bias"]).clamp(0, 1)
    return value[torch.randperm(len(value), generator=torch.Generator().manual_seed(0))] if shuffled else value


@cache
def quality(shuffled: bool) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """By seed: how well values of all 400 problems, from one rollout each, correlate with exact success and explain an independent second rollout's
    reward; mean of 4 draws."""
    correlation, explained = [], []
    for seed in range(3):
        trained, found = after(50, seed), []
        for draw in range(4):
            first, second = (collected(trained, 400, 1, 100 + 2 * draw + i) for i in range(2))
            ids = first.signals["prompt_id"]
            value = predicted(trained, first, shuffled)
            truth = trained.task.success_probabilities(trained.policy, [trained.task.problems[i] for i in ids.tolist()]).double()
            reward = torch.zeros(400, dtype=torch.float64)
            reward[second.signals["prompt_id"]] = second.outcome.double()
            error = (reward[ids] - value).square().mean() / reward.var(correction=0)
            found.append((float(torch.corrcoef(torch.stack([value, truth]))[0, 1]), float(1 - error)))
        correlation.append(fmean(c for c, _ in found))
        explained.append(fmean(e for _, e in found))
    return tuple(correlation), tuple(explained)


def _knows(shuffled: bool) -> Evidence:
    found = [round(c, 3) for c in quality(shuffled)[0]]
    return Evidence(found, "> 0.5 for each of 3 seeds", min(found) > 0.5)


@claim("after 50 steps the value that the probe sees in one rollout correlates above 0.5 with the prompt's exact success", slow=True)
def knows() -> Evidence:
    return _knows(shuffled=False)


@ablation(knows, "the value is that of another prompt's rollout")
def knows_nothing() -> Evidence:
    return _knows(shuffled=True)


def _explains(shuffled: bool) -> Evidence:
    found = [round(e, 3) for e in quality(shuffled)[1]]
    return Evidence(found, "> 0.02 for each of 3 seeds (the batch mean explains 0)", min(found) > 0.02)


# Not reproduced: from a single rollout the probe also sees how that rollout went, and its window lags behind the policy. The mean is about 0.015,
# one seed of three is below 0; exact success would explain about 0.25.
@claim(
    "after 50 steps the probe's value explains more of an independent rollout's reward than the batch mean does",
    slow=True,
    reproduced=False,
)
def explains() -> Evidence:
    return _explains(shuffled=False)


@ablation(explains, "the value is that of another prompt's rollout")
def explains_nothing() -> Evidence:
    return _explains(shuffled=True)


def relative_variance(method: Method, trained: Trained, batches: int = 100) -> float:
    """var / |mean|^2 of the policy gradient over batches of 64 rollouts; the probe and the policy stand still."""
    run = Run(method, trained.policy, trained.task, steps=1, seed=7)
    run.state = trained.run.state
    gradients = []
    for _ in range(batches):
        batch = run.collect(method.select(trained.task, run))
        batch.reward = run.score_rewards(batch)
        run.prepare_signals(batch, method.needs("credit"))
        batch.advantage = method.credit(batch, run)
        trained.policy.zero_grad()
        run.backward(batch, run.loss_fn)
        gradients.append(torch.cat([p.grad.flatten() for p in trained.policy.parameters() if p.grad is not None]))
    stacked = torch.stack(gradients).double()
    mean = stacked.mean(0)
    variance = (stacked - mean).square().sum(1).mean() * batches / (batches - 1)
    return float(variance / (mean.square().sum() - variance / batches))  # |mean|^2 without its own sampling noise


def _spread(method: Method) -> Evidence:
    grpo = replace(GROUPS, select=UniformPrompts(prompts=8, group_size=8), credit=GroupRelative(std=False))
    pairs, groups = [], []
    for seed in range(3):
        trained = after(10, seed)
        pairs.append(relative_variance(method, trained))
        groups.append(relative_variance(grpo, trained))
    found = {"32 prompts x 2": [round(v, 2) for v in pairs], "8 x 8, group mean": [round(v, 2) for v in groups]}
    return Evidence(found, "below 0.95 of GRPO's, mean of 3 seeds", fmean(pairs) < 0.95 * fmean(groups))


@claim(
    "at 64 rollouts the gradient of 32 prompts x 2 with the probe's baseline varies less than that of 8 x 8 with the group mean", slow=True
)
def varies_less() -> Evidence:
    return _spread(PAIRS.set("select.prompts", 32).set("credit.normalize", "none"))


@ablation(varies_less, "the pair's mean as the baseline, no probe")
def varies_more_without_probe() -> Evidence:
    return _spread(PAIRS.set("select.prompts", 32).but(credit=GroupRelative(std=False), control=()))


def final_success(method: Method, seed: int, steps: int = 60) -> tuple[float, float]:
    """Exact success after equal rollouts, and the probe's share of the time of a step."""
    policy, task = make_toy_arith(small=False)
    run = Run(method, policy, task, steps=steps, seed=seed)
    while not run.finished:
        step(run)
    seconds = [{name: t for name, t in r["time"].items() if name != "tokens_per_second"} for r in run.history]
    return task.expected_success(policy), fmean(t.get("probe", 0.0) / sum(t.values()) for t in seconds)


@cache
def grpo_success() -> tuple[float, ...]:
    return tuple(final_success(GROUPS, seed)[0] for seed in range(3))


def _as_good(method: Method) -> Evidence:
    ends = [final_success(method, seed) for seed in range(3)]
    found = {
        "POISE": [round(success, 3) for success, _ in ends], "GRPO": [round(success, 3) for success in grpo_success()],
        "probe's share of the time": round(fmean(share for _, share in ends), 3),
    }  # fmt: skip
    return Evidence(found, "at least GRPO's less 0.02, mean of 3 seeds", fmean(s for s, _ in ends) >= fmean(grpo_success()) - 0.02)


@claim("at equal rollouts (60 steps of 128) the final exact match is at least GRPO's less 2 points", slow=True)
def as_good() -> Evidence:
    return _as_good(PAIRS)


@ablation(as_good, "advantages dealt to the wrong rows")
def not_without_credit() -> Evidence:
    return _as_good(PAIRS.but(credit=ShuffledCredit(PAIRS.credit)))
