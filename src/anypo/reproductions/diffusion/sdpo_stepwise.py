"""Claims of SDPO: training digits by chains of four steps, interpolated rewards, pairs from one noise, and the loss of a pair."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from statistics import fmean

import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.diffusion import builtin
from anypo.domains.diffusion.denoise import ddim_schedule
from anypo.domains.diffusion.sample import as_batch, sample
from anypo.domains.diffusion.tasks import EVALUATION_SEED, Digits
from anypo.loops.on_policy import step
from anypo.method import Method
from anypo.methods.diffusion.flow_grpo import DDPO
from anypo.methods.diffusion.sdpo_stepwise import METHOD, anchor_step, clean_states, dense_reward, pair_loss, pairs
from anypo.reproductions.common import ShuffledCredit
from anypo.run import Run

SEEDS = (0, 1, 2)
STEPS = 15
ARMS = {
    "sdpo": METHOD,
    "shuffled": METHOD.but(credit=ShuffledCredit(METHOD.credit)),
    "ddpo": DDPO.set("rollout.steps", 4).set("select.prompts", 80).set("select.group_size", 2),
}


def _rolled(method: Method, seed: int) -> tuple[Run, Batch]:
    """A batch of digits that are rewarded for their ink."""
    run = Run(method, builtin.flow("digits"), Digits("ink"), steps=STEPS, seed=seed)
    return run, run.method.rollout(run.method.select(run.task, run), run)


def _prefixes(run: Run) -> Tensor:
    """[4]: mean reward of the clean states of 400 chains of four steps, from held-out noise. The first is the model's one-step sample, the last the end."""
    task, prompt = run.task, torch.arange(400) % 10
    start = torch.randn(400, 64, generator=torch.Generator().manual_seed(EVALUATION_SEED))
    schedule, condition = ddim_schedule(task.levels(4), 1.0), task.condition(prompt)  # type: ignore[attr-defined]
    x = sample(run.policy, start, condition, schedule, torch.Generator().manual_seed(EVALUATION_SEED + 1))  # type: ignore[arg-type]
    clean = clean_states(as_batch(run.policy, x, condition, schedule, prompt, prompt))  # type: ignore[arg-type]
    return torch.stack([task.reward(clean[:, k], prompt).mean() for k in range(4)])  # type: ignore[attr-defined]


@cache
def _rises(arm: str, seed: int) -> tuple[float, ...]:
    """How much 15 updates of 160 chains raise the reward of the clean states of step 1, 2, 3 and 4."""
    run = Run(ARMS[arm], builtin.flow("digits"), Digits("ink"), steps=STEPS, seed=seed)
    before = _prefixes(run)
    for _ in range(STEPS):
        step(run)
    return tuple(round(v, 3) for v in (_prefixes(run) - before).tolist())


def _all_rise(arm: str, seeds: Iterable[int] = SEEDS) -> Evidence:
    found = [_rises(arm, seed) for seed in seeds]
    holds = all(rise[3] >= 0.15 and min(rise[:2]) >= rise[3] / 2 for rise in found)
    return Evidence(
        found, "the last step's reward rises by 0.15 or more, those of one and two steps by at least half as much, on every seed", holds
    )


# Not the dense reward's doing alone: the reward of the end alone raises the prefixes as much on a seed of the choice.
@claim("trained on chains of four steps, the samples of one and of two steps get better, too")
def prefixes_rise() -> Evidence:
    return _all_rise("sdpo")


@ablation(prefixes_rise, "the advantages dealt to the wrong chains")
def nothing_rises() -> Evidence:
    return _all_rise("shuffled", SEEDS[:1])


def _one_step(arm: str, seeds: Iterable[int] = SEEDS) -> Evidence:
    found = {name: [_rises(name, seed)[0] for seed in seeds] for name in (arm, "ddpo")}
    return Evidence(
        found, "the mean rise of the one-step samples is above DDPO's by 0.02", fmean(found[arm]) >= fmean(found["ddpo"]) + 0.02
    )


def _correlation(own: bool, seeds: Iterable[int] = SEEDS) -> Evidence:
    """160 chains of eight steps: interpolated and true rewards of the clean states at the five steps that were not scored."""
    found, row, k = [], torch.arange(160), torch.arange(8)
    for seed in seeds:
        run, batch = _rolled(METHOD.set("rollout.steps", 8), seed)
        x0, prompt = clean_states(batch), batch.signal("prompt_id")
        true = torch.stack([run.task.reward(x0[:, step], prompt) for step in range(8)], dim=1)  # type: ignore[attr-defined]
        anchor = anchor_step(x0)
        source = row if own else torch.randperm(160, generator=torch.Generator().manual_seed(seed))
        guess = dense_reward(x0, true[source, 0], true[source, anchor[source]], true[source, -1]).reward
        between = (k > 0) & (k < 7) & (k != anchor[:, None])
        found.append(round(float(torch.corrcoef(torch.stack([guess[between], true[between]]))[0, 1]), 3))
    return Evidence(found, "correlation above 0.6 on every seed", min(found) > 0.6)


# The similarities are not what does it: on the seeds of the choice the plain mean of the three rewards correlates as much (0.71 to 0.73).
@claim("rewards interpolated from three queries a chain of eight steps correlate with the true rewards of the clean states between")
def interpolation_tells() -> Evidence:
    return _correlation(own=True)


@ablation(interpolation_tells, "the three rewards are those of another chain")
def other_chains_do_not() -> Evidence:
    return _correlation(own=False)


def _variance(shared: bool, seeds: Iterable[int] = SEEDS) -> Evidence:
    """How much larger the variance of the advantage difference is, step by step, with independent start noise than for 1000 pairs a seed from one noise
    (as `shared` has it). Advantages are standardized by all of a prompt's returns, so that the 32 newest do not add noise of their own."""
    variances: dict[str, list[Tensor]] = {"pairs": [], "independent": []}
    for seed in seeds:
        for name, start, offset in (("pairs", shared, 0), ("independent", False, 1000)):  # two samples even where both arms are independent
            settings = {"rollout.shared_start": start, "select.prompts": 1000, "credit.buffer": 10**6}
            method = METHOD
            for path, value in settings.items():
                method = method.set(path, value)
            run, batch = _rolled(method, seed + offset)
            batch.reward = run.method.reward(batch, run)
            advantage, (i, j) = run.method.credit(batch, run), pairs(batch.group)
            variances[name].append((advantage[i] - advantage[j]).var(0))
    ratio = (sum(variances["independent"]) / sum(variances["pairs"])).tolist()  # type: ignore[operator, union-attr]
    return Evidence([round(r, 3) for r in ratio], "at least 1.1 times as large at the first step", ratio[0] >= 1.1)


# Ancestral steps soon forget where they started: at later steps there is no difference.
@claim("pairs from one noise differ less in the advantage of their first step than pairs from independent noise")
def shared_noise_helps() -> Evidence:
    return _variance(shared=True)


@ablation(shared_noise_helps, "independent noise in both")
def independent_noise() -> Evidence:
    return _variance(shared=False)


# The two are apart by less than their seeds: mean rise 0.39 against 0.35 here, 0.35 against 0.37 on three other seeds. In this problem what is better
# after four steps is better after one.
@claim("DDPO, rewarded for the end alone, improves the one-step samples less at equal updates", reproduced=False)
def better_in_one_step() -> Evidence:
    return _one_step("sdpo")


@ablation(better_in_one_step, "the advantages dealt to the wrong chains")
def worse_in_one_step() -> Evidence:
    return _one_step("shuffled", SEEDS[:1])


def _equal_pair(difference: bool) -> Evidence:
    """Loss and gradient of 8 random chains of 4 steps paired with themselves, log-ratios within the clip."""
    generator = torch.Generator().manual_seed(0)
    old, advantage = (torch.randn(8, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    logp = (old + 0.005 * torch.randn(8, 4, generator=generator, dtype=torch.float64)).requires_grad_()
    other, its_advantage = (logp, advantage) if difference else (old, torch.zeros_like(old))
    value = pair_loss(logp, old, other, old, advantage, its_advantage, lam=0.99, scale=1.0, eps=1e-2, adv_clip=5.0)
    slope = float(torch.autograd.grad(value, logp)[0].abs().max())
    return Evidence({"loss": float(value.detach()), "largest gradient": slope}, "both exactly 0", float(value.detach()) == 0 and slope == 0)


@claim("a pair of equal trajectories costs nothing and pulls nowhere")
def equal_pair_is_silent() -> Evidence:
    return _equal_pair(difference=True)


@ablation(equal_pair_is_silent, "every log-ratio regressed onto its own advantage")
def own_advantage() -> Evidence:
    return _equal_pair(difference=False)
