"""Claims of SPO (single stream): tracking a drifting success rate, no rows without signal, speed on token_bandit (64 prompts, V=4, T=2, 64 responses
a step, logits N(0,0.5)), gradient variance by enumeration, and the sampler. Prioritized sampling is not claimed to be faster: with more prompts
than a step takes, it neglects those near 0. The loss is a mean over 128 tokens, so the SGD step 0.3 of each token is 38.4 here."""

from __future__ import annotations

from functools import cache
from statistics import fmean

import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.method import Method
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.methods.language.grpo import advantages as group_advantages
from anypo.methods.language.spo_single import METHOD as SPO
from anypo.methods.language.spo_single import TRACKER, PrioritizedPrompts, advantages, init, rho, update
from anypo.reproductions.common import plain_sgd, steps_to, train_on
from anypo.run import Run
from anypo.seams.select import UniformPrompts

PROMPTS = 64
STEP = 0.3 * PROMPTS * 2
SEEDS = range(5)
PROFILE_STEPS = 8  # steps' worth of responses that SPO spends on its offline samples: 8 for each of the 64 prompts


def tracking_error(forget: bool) -> float:
    """Mean |v - p| of 400 independent trackers over 200 visits in which p climbs from 0.1 to 0.9 and the stored response's log-prob moves along."""
    generator = torch.Generator().manual_seed(0)
    rates = torch.linspace(0.1, 0.9, 200, dtype=torch.float64)
    tracker = init(torch.bernoulli(rates[:1].expand(400, 8), generator=generator).sum(1))
    errors, reward = [], torch.zeros(400, dtype=torch.float64)
    for visit, p in enumerate(rates):
        before = rates[max(visit - 1, 0)]
        then, now = (torch.where(reward > 0, q, 1 - q).log()[:, None] for q in (before, p))
        kept = rho(then, now, torch.ones(400, 1), torch.full((400,), visit > 0)).rho if forget else torch.ones(400, dtype=torch.float64)
        errors.append(float((tracker.value - p).abs().mean()))
        reward = torch.bernoulli(p.expand(400), generator=generator)
        tracker = update(reward, tracker.alpha, tracker.beta, kept)
    return fmean(errors)


def _tracks(forget: bool) -> Evidence:
    found = {"tracker": round(tracking_error(forget), 3), "running mean": round(tracking_error(False), 3)}
    return Evidence(found, "below 0.15 and at most 0.8 of the running mean's", found["tracker"] < min(0.15, 0.8 * found["running mean"]))


@claim("the KL-adaptive tracker follows a success rate that drifts from 0.1 to 0.9 more closely than the running mean does")
def tracks() -> Evidence:
    return _tracks(forget=True)


@ablation(tracks, "no forgetting (rho = 1)")
def does_not_track_without_forgetting() -> Evidence:
    return _tracks(forget=False)


def without_signal(tracked: bool) -> tuple[float, float]:
    """Shares of zero-variance groups (G = 8) and of rows with |A| < 1e-3 on 4096 prompts with U-shaped success rates. Trackers have seen 8 offline
    samples and 20 visits; when not `tracked` the rows' advantages are those of their groups."""
    generator = torch.Generator().manual_seed(0)
    base = torch.rand(4096, generator=generator, dtype=torch.float64)
    rates = torch.sigmoid(2.9 * torch.logit(base.clamp(1e-6, 1 - 1e-6)))

    def attempts(count: int) -> Tensor:
        return torch.bernoulli(rates[:, None].expand(-1, count), generator=generator)

    grouped = attempts(8)
    silent = float((grouped.amax(1) == grouped.amin(1)).double().mean())
    if not tracked:
        group = torch.arange(4096).repeat_interleave(8)
        return silent, float((group_advantages(grouped.flatten(), group).abs() < 1e-3).double().mean())
    tracker = init(attempts(8).sum(1))
    for _ in range(20):
        tracker = update(attempts(1)[:, 0], tracker.alpha, tracker.beta, torch.full((4096,), 0.96, dtype=torch.float64))
    found = advantages(attempts(1)[:, 0], tracker.alpha, tracker.beta).advantages
    return silent, float((found.abs() < 1e-3).double().mean())


def _no_degenerate_rows(tracked: bool) -> Evidence:
    silent, small = without_signal(tracked)
    return Evidence(
        {"zero-variance groups": round(silent, 3), "rows without signal": round(small, 4)}, "groups in 0.55..0.65, rows below 0.05",
        0.55 < silent < 0.65 and small < 0.05,
    )  # fmt: skip


@claim("where 60% of GRPO's groups of 8 have no variance, fewer than 5% of SPO's rows have no advantage")
def no_degenerate_rows() -> Evidence:
    return _no_degenerate_rows(tracked=True)


@ablation(no_degenerate_rows, "the group's mean as the baseline")
def degenerate_groups() -> Evidence:
    return _no_degenerate_rows(tracked=False)


def steps_needed(method: Method) -> tuple[float, float]:
    """Mean over seeds of the steps to success 0.9, and the share of rows with |A| < 1e-3 on the way."""
    steps, silent = [], []
    for seed in SEEDS:
        task = TokenBandit(PROMPTS, 4, 2, seed=seed)
        policy = task.policy(scale=0.5, seed=seed)

        def look(run: Run, batch: Batch, task: TokenBandit = task) -> tuple[float, float]:
            assert batch.advantage is not None
            return task.expected_success(run.policy), float((batch.advantage[:, 0].abs() < 1e-3).double().mean())  # type: ignore[arg-type]

        seen = train_on(method, policy, task, steps=200, seed=seed, watch=look, stop=lambda now: now[0] > 0.9)
        steps.append(steps_to([success for success, _ in seen], 0.9))
        silent.append(fmean(share for _, share in seen))
    return fmean(steps), fmean(silent)


@cache
def grpo_steps() -> tuple[float, float]:
    groups = GRPO.but(select=UniformPrompts(prompts=8, group_size=8), objective=SPO.objective, regularize=())
    return steps_needed(plain_sgd(groups, STEP))


def _faster(update_tracker: bool) -> Evidence:
    method = plain_sgd(SPO, STEP).but(select=PrioritizedPrompts(candidates=1))
    steps, silent = steps_needed(method if update_tracker else method.but(control=()))
    other, other_silent = grpo_steps()
    found = {
        "SPO steps": steps, "offline beside": PROFILE_STEPS, "GRPO steps": other, "SPO rows without signal": round(silent, 4),
        "GRPO rows without signal": round(other_silent, 3),
    }  # fmt: skip
    return Evidence(found, "SPO, offline samples included, needs no more steps than GRPO (mean of 5 seeds)", steps + PROFILE_STEPS <= other)


@claim(
    "one response for each of 64 prompts reaches success 0.9 in no more steps than 8 responses for 8 prompts, profiling included", slow=True
)
def faster() -> Evidence:
    return _faster(update_tracker=True)


@ablation(faster, "the tracker stays at its offline estimate")
def slower_with_frozen_tracker() -> Evidence:
    return _faster(update_tracker=False)


def variance_reduction(targets: int, baseline: bool) -> float:
    """Reduction of the gradient's variance (trace, exact over all strings, mean over 2000 trackers) by the raw advantage r - v, for one prompt of
    which `targets` of the 16 strings are right, under the uniform policy. (With one target and a policy that hits it half the time it is not
    reduced: the hits then have the smallest scores, and a baseline weighs the misses up.)"""
    task = TokenBandit(1, 4, 2, targets=targets, seed=0)
    policy, rate = task.policy(), targets / 16
    strings = policy.all_strings()
    probability = policy.string_logp(0, strings).exp().detach()
    reward = task.rewards(torch.zeros(len(strings), dtype=torch.int64), strings, torch.ones_like(strings, dtype=torch.bool))
    score = torch.nn.functional.one_hot(strings, 4).double() - policy.logits.detach()[0].softmax(-1)
    generator = torch.Generator().manual_seed(0)

    def coin(count: int) -> Tensor:
        return torch.bernoulli(torch.full((2000, count), rate, dtype=torch.float64), generator=generator)

    tracker = init(coin(8).sum(1))
    for _ in range(20):
        tracker = update(coin(1)[:, 0], tracker.alpha, tracker.beta, torch.full((2000,), 0.96, dtype=torch.float64))
    value = tracker.value if baseline else torch.zeros(2000, dtype=torch.float64)

    def variance(v: Tensor) -> Tensor:
        raw = reward[None] - v[:, None]  # [trackers, strings]
        second = (raw**2 * probability * score.square().sum((1, 2))).sum(1).mean()
        first = torch.einsum("rs,s,stv->tv", raw, probability, score) / len(v)
        return second - first.square().sum()

    return float(1 - variance(value) / variance(torch.zeros(1, dtype=torch.float64)))


def _less_variance(baseline: bool) -> Evidence:
    found = {f"success {count / 16}": round(variance_reduction(count, baseline), 3) for count in (2, 8)}
    return Evidence(found, "above 0.3 at success 0.5", found["success 0.5"] > 0.3)


@claim("the tracked baseline lowers the variance of the policy gradient by more than 30% on prompts of success one half")
def less_variance() -> Evidence:
    return _less_variance(baseline=True)


@ablation(less_variance, "no baseline")
def same_variance_without_baseline() -> Evidence:
    return _less_variance(baseline=False)


def draw_ratio(explore: float) -> float:
    """How often prompts with v in [0.3,0.7] are drawn, over how often those with v > 0.97 are; steps of 16 from 256 prompts."""
    task = TokenBandit(256, 4, 2)
    run = Run(SPO, task.policy(), task, steps=1)
    generator = torch.Generator().manual_seed(0)
    value = torch.where(torch.arange(256) % 2 == 0, 0.3 + 0.4 * torch.rand(256, generator=generator), 0.98).double()
    run.state[TRACKER] = dict(enumerate(torch.stack([8 * value, 8 * (1 - value)], 1).tolist()))
    select = PrioritizedPrompts(prompts=16, candidates=16, explore=explore)
    counts = torch.zeros(256)
    for _ in range(300):
        counts[[p.id for p in select(task, run)]] += 1
    return float(counts[::2].mean() / counts[1::2].mean())


def _prefers_the_middle(explore: float) -> Evidence:
    ratio = round(draw_ratio(explore), 2)
    return Evidence(ratio, "> 2", ratio > 2)


@claim("prompts with a tracked success of 0.3 to 0.7 are drawn more than twice as often as those above 0.97")
def prefers_the_middle() -> Evidence:
    return _prefers_the_middle(0.05)


@ablation(prefers_the_middle, "the weight is its floor alone")
def uniform_draws() -> Evidence:
    return _prefers_the_middle(1e6)
