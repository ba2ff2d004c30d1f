"""Claims of GSPO on token_bandit with T=16: what the length-normalized ratio does to noise, and training on stale batches.

Clip 0.05/0.08 (the paper's 3e-4/4e-4 belong to long responses of large models). With 4^16 strings nothing is hit at random, so the reward is the
share of right tokens, whose expectation is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.methods.language.gspo import METHOD as GSPO
from anypo.methods.language.gspo import SequenceClip, ratio
from anypo.reproductions.common import plain_sgd, train_on
from anypo.run import Run
from anypo.seams.objective import ClippedSurrogate

LENGTH = 16
WIDE = 1e9  # an upper clip that never binds
SequenceRatio = Callable[[Tensor, Tensor, Tensor], Tensor]


def _variances(noise: float, sequence_ratio: SequenceRatio, shuffle: bool = False) -> float:
    """Variance over rows of the log sequence ratio over that of the log token ratio: after independent noise on the logits or, without noise,
    after one GRPO step on the same rows. `shuffle` deals each position's tokens to other rows."""
    task = TokenBandit(64, 4, LENGTH, partial=True)
    policy = task.policy(scale=1.0)
    method = plain_sgd(GRPO.but(regularize=()), 64.0)
    run = Run(method, policy, task, steps=1)
    batch = run.collect(method.select(task, run))
    if noise:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            policy.logits.add_(noise * torch.randn(policy.logits.shape, generator=generator, dtype=torch.float64))
    else:
        batch.reward = run.score_rewards(batch)
        batch.advantage = method.credit(batch, run)
        method.update(batch, run.loss_fn, run)
    logp, old = policy.observe(batch, {"logp"}).logp, batch.logp
    if shuffle:
        order = torch.rand(logp.shape, generator=torch.Generator().manual_seed(2)).argsort(0)
        logp, old = logp.gather(0, order), old.gather(0, order)
    return float(sequence_ratio(logp, old, batch.mask).log().var() / (logp - old).var())


def _sum_ratio(logp: Tensor, old_logp: Tensor, mask: Tensor) -> Tensor:
    return (logp - old_logp).sum(1).exp()


def _noise(sequence_ratio: SequenceRatio) -> Evidence:
    share = _variances(0.1, sequence_ratio)
    return Evidence(round(share, 4), "1/16 = 0.0625 within 30%", abs(share * LENGTH - 1) < 0.3)


@claim(
    "independent noise on the logits reaches the sequence ratio with 1/16 of the variance it has in a token ratio of a 16-token response"
)
def noise_averages_out() -> Evidence:
    return _noise(ratio)


@ablation(noise_averages_out, "the plain product of token ratios (no length normalization)")
def noise_without_normalization() -> Evidence:
    return _noise(_sum_ratio)


def _signal(shuffle: bool) -> Evidence:
    share = _variances(0.0, ratio, shuffle)
    return Evidence(round(share, 3), "more than 2/16 and below 1", 2 / LENGTH < share < 1)


@claim("after a GRPO step on the same rows the sequence ratio keeps more of the variance, since the tokens of a row move together")
def signal_does_not_average_out() -> Evidence:
    return _signal(shuffle=False)


@ablation(signal_does_not_average_out, "each position's tokens dealt to other rows")
def shuffled_rows_average_out() -> Evidence:
    return _signal(shuffle=True)


@cache
def _curves(rule: str) -> list[list[float]]:
    """Exact share of right tokens over 30 batches with 8 gradient steps each, SGD step 64 for each of 16 prompts; 3 seeds."""
    objective = {
        "gspo": SequenceClip(0.05, 0.08),
        "gspo without clip": SequenceClip(1.0, WIDE),
        "grpo": ClippedSurrogate(0.2, 0.2, "seq_mean"),
    }[rule]
    method = plain_sgd(GSPO.but(objective=objective), 1024.0, epochs=8)
    curves = []
    for seed in range(3):
        task = TokenBandit(16, 4, LENGTH, partial=True, seed=seed)
        targets = task.targets[:, 0, :, None]

        def right(run: Run, batch: Batch, targets: Tensor = targets) -> float:
            return float(run.policy.logits.detach().softmax(-1).gather(-1, targets).mean())  # type: ignore[operator,union-attr]

        curves.append(train_on(method, task.policy(), task, steps=30, seed=seed, watch=right))
    return curves


def _fall(curve: list[float]) -> float:
    """The largest fall below what had been reached before."""
    return max(max(curve[: i + 1]) - value for i, value in enumerate(curve))


def _stale(rule: str) -> Evidence:
    tested, grpo = _curves(rule), _curves("grpo")
    found = {
        "right tokens at the end, worst seed": round(min(c[-1] for c in tested), 3),
        "largest fall": round(max(map(_fall, tested)), 3),
        "grpo at the end": round(min(c[-1] for c in grpo), 3),
        "grpo's largest fall": round(max(map(_fall, grpo)), 3),
    }
    holds = max(map(_fall, tested)) <= max(map(_fall, grpo)) + 0.02 and min(c[-1] for c in tested) > 0.88
    return Evidence(found, "no fall above GRPO's by 0.02 and more than 0.88 at the end, 3 seeds", holds)


@claim("with 8 large gradient steps a batch GSPO is as stable as GRPO: no collapse in any of 3 seeds")
def stable_on_stale_batches() -> Evidence:
    return _stale("gspo")


@ablation(stable_on_stale_batches, "no clip")
def unclipped_on_stale_batches() -> Evidence:
    return _stale("gspo without clip")
