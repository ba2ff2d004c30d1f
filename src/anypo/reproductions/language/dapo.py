"""Claims of DAPO: it learns, clip-higher is faster on a rare token, dynamic sampling leaves only groups with contrast, shaping shortens."""

from __future__ import annotations

from functools import cache
from statistics import fmean

import torch

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.language.toys.token_bandit import TabularTokens, TokenBandit
from anypo.method import Method, Rollout
from anypo.methods.language.dapo import METHOD as DAPO
from anypo.methods.language.dapo import DynamicSampling, OverlongShaping
from anypo.reproductions.common import BANDIT_STEP, LengthBandit, mean_length, plain_sgd, rounds_to_half, success_on_bandit, train_on
from anypo.run import Run
from anypo.seams.objective import ClippedSurrogate
from anypo.seams.reward import TaskReward
from anypo.seams.rollout import OnPolicy


def _learns(shuffled: bool) -> Evidence:
    worst, slowest = success_on_bandit(DAPO, shuffled=shuffled)
    return Evidence({"success": round(worst, 3), "steps": slowest}, "success above 0.9 within 300 steps, worst of 3 seeds", worst > 0.9)


@claim("DAPO raises the expected success of token_bandit from below 0.1 to above 0.9 within 300 steps")
def learns() -> Evidence:
    return _learns(shuffled=False)


@ablation(learns, "advantages dealt to the wrong rows")
def learns_without_credit() -> Evidence:
    return _learns(shuffled=True)


def clip_alone(clip_high: float) -> Method:
    """DAPO without resampling and shaping, so that only the clip differs."""
    return DAPO.but(objective=ClippedSurrogate(0.2, clip_high, "token_mean"), reward=TaskReward(), rollout=OnPolicy())


@cache
def rounds_with_clip(clip_high: float) -> float:
    return rounds_to_half(clip_alone(clip_high))


def _clip_higher(clip_high: float) -> Evidence:
    found = {"0.2/0.2": round(rounds_with_clip(0.2), 2), f"0.2/{clip_high} tested": round(rounds_with_clip(clip_high), 2)}
    return Evidence(
        found, "at least 1.5 rounds fewer than 0.2/0.2 (mean of 6 seeds)", rounds_with_clip(clip_high) <= rounds_with_clip(0.2) - 1.5
    )


@claim("clip-higher (0.2/0.28) brings a rare pivotal token to probability 0.5 in fewer rounds than the symmetric clip", slow=True)
def clip_higher_is_faster() -> Evidence:
    return _clip_higher(0.28)


@ablation(clip_higher_is_faster, "the upper clip back at 0.2")
def clip_higher_off() -> Evidence:
    return _clip_higher(0.2)


def _idle_rows(rollout: Rollout) -> Evidence:
    """Share of a batch's rows that have no advantage, worst step of 40 on token_bandit, 2 seeds."""
    shares: list[float] = []

    def idle(run: Run, batch: Batch) -> None:
        assert batch.advantage is not None
        shares.append(float((batch.advantage == 0).all(1).double().mean()))

    for seed in range(2):
        task = TokenBandit(seed=seed)
        train_on(plain_sgd(DAPO, BANDIT_STEP).but(rollout=rollout), task.policy(), task, steps=40, seed=seed, watch=idle)
    found = {"worst": round(max(shares), 3), "mean": round(fmean(shares), 3)}
    return Evidence(found, "no row without an advantage in any step", max(shares) == 0.0)


@claim("dynamic sampling leaves only groups with contrast: every row of every batch has an advantage")
def every_row_counts() -> Evidence:
    return _idle_rows(DynamicSampling())


@ablation(every_row_counts, "groups without contrast are kept")
def idle_rows_without_it() -> Evidence:
    return _idle_rows(OnPolicy())


def _overlong_share(policy: TabularTokens) -> float:
    """Exact probability of a response that reaches into the buffer: more than 10 of at most 12 tokens."""
    return float((1 - policy.logits.detach().softmax(-1)[..., 0])[:, :10].prod(1).mean())


def _shaping(coefficient: float) -> Evidence:
    """120 steps in which closeness to the limit is all that is judged; responses of 1 to 10 tokens are equally good."""
    task = LengthBandit(seed=0)
    policy = task.policy()
    before = _overlong_share(policy)
    method = plain_sgd(DAPO, BANDIT_STEP).but(reward=OverlongShaping(coefficient=coefficient), rollout=OnPolicy())
    train_on(method, policy, task, steps=120, watch=lambda run, batch: None)
    after, length = _overlong_share(policy), mean_length(policy)
    found = {"overlong before": round(before, 3), "overlong after": round(after, 3), "mean length after": round(length, 2)}
    # Tables of independent positions shorten more than they need to: every earlier end token is safer too.
    return Evidence(found, "a third of the overlong responses at most are left", after < before / 3)


@claim("overlong shaping makes responses near the limit rare")
def shaping_shortens() -> Evidence:
    return _shaping(1.0)


@ablation(shaping_shortens, "coefficient 0")
def no_shaping() -> Evidence:
    return _shaping(0.0)


def _more_rounds_help(max_rounds: int) -> Evidence:
    """Groups in the batch, as a share of those wanted, while success is rare (the first 3 steps of token_bandit with 3 tokens, 1/64)."""
    filled: list[float] = []

    def groups(run: Run, batch: Batch) -> None:
        filled.append(len(torch.unique(batch.group)) / run.task.prompts_per_step)

    for seed in range(6):
        task = TokenBandit(horizon=3, seed=seed)
        train_on(
            plain_sgd(DAPO, 1.0).but(rollout=DynamicSampling(max_rounds=max_rounds)), task.policy(), task, steps=3, seed=seed, watch=groups
        )
    return Evidence(round(fmean(filled), 3), "at least a quarter of the wanted groups have contrast", fmean(filled) >= 0.25)


@claim("drawing further prompts fills the batch with groups that have contrast where success is rare")
def resampling_fills_the_batch() -> Evidence:
    return _more_rounds_help(3)


@ablation(resampling_fills_the_batch, "no further prompts are drawn")
def one_round_only() -> Evidence:
    return _more_rounds_help(1)
