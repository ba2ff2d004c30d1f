"""Claims of ExPPO: its mass and signs on random groups, the credit of a rare right answer in exact expectation, and training on token_bandit with
three right answers a prompt that start at unequal probabilities (30 prompts, 12 symbols, groups of 16)."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cache
from statistics import fmean

import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.language.toys.token_bandit import TabularTokens, TokenBandit
from anypo.method import Credit
from anypo.methods.language.exppo import METHOD as EXPPO
from anypo.methods.language.exppo import ExplorationPreserving, advantages
from anypo.reproductions.common import plain_sgd, train_on
from anypo.run import Run
from anypo.seams.groups import group_sum

SEEDS = (0, 1, 2)
WIDE = {"c_min": 0.0, "c_max": math.inf}  # the shared normalizer without its clip


def _random_groups(lam: float, c_min: float, c_max: float) -> tuple[Tensor, Tensor, Tensor]:
    """GRPO's and ExPPO's advantages [N] and the groups of 2,000 random groups of 8, responses of up to 6 tokens, pass rates all over [0,1]."""
    generator, groups, size, horizon = torch.Generator().manual_seed(0), 2000, 8, 6
    rows = groups * size
    group = torch.arange(groups).repeat_interleave(size)
    chance = torch.rand(groups, generator=generator, dtype=torch.float64)[group]
    reward = torch.bernoulli(chance, generator=generator)
    mask = torch.arange(horizon) < torch.randint(1, horizon + 1, (rows, 1), generator=generator)
    logp = -3 * torch.rand(rows, horizon, generator=generator, dtype=torch.float64)
    base, shaped = (advantages(reward, group, mask, logp, strength, c_min, c_max)[:, 0] for strength in (0.0, lam))
    return base, shaped, group


def _mass(c_min: float, c_max: float) -> Evidence:
    base, shaped, group = _random_groups(0.9, c_min, c_max)
    error = float((group_sum(shaped.abs(), group) - group_sum(base.abs(), group)).abs().max())
    return Evidence(error, "< 1e-9 in every group", error < 1e-9)


@claim("every group keeps its total absolute advantage")
def keeps_mass() -> Evidence:
    return _mass(**WIDE)


@ablation(keeps_mass, "no shared normalization")
def loses_mass() -> Evidence:
    return _mass(1.0, 1.0)


def _signs(lam: float) -> Evidence:
    base, shaped, _ = _random_groups(lam, 0.5, 2.0)
    changed = int((base.sign() != shaped.sign()).sum())
    return Evidence({"changed signs": changed, "responses with an advantage": int((base != 0).sum())}, "no sign changes", changed == 0)


@claim("no advantage changes its sign, even at strength 0.99")
def keeps_signs() -> Evidence:
    return _signs(0.99)


@ablation(keeps_signs, "a factor that is not bounded to stay positive (strength 3)")
def changes_signs() -> Evidence:
    return _signs(3.0)


def _rare_share(lam: float, pass_rate: float, size: int = 8) -> float:
    """Exact expected share of the rare right answer in the credit of all right ones: a rare and a common right answer with odds 1 to 4, and a wrong one.
    Every composition of a group of `size` counts with its multinomial probability."""
    chance = torch.tensor([0.2 * pass_rate, 0.8 * pass_rate, 1 - pass_rate], dtype=torch.float64)
    counts = [(a, b, size - a - b) for a, b in itertools.product(range(size + 1), repeat=2) if a + b <= size]
    arm = torch.tensor([k for count in counts for k in range(3) for _ in range(count[k])])
    probability = torch.tensor(
        [math.factorial(size) * math.prod(float(chance[k]) ** n / math.factorial(n) for k, n in enumerate(c)) for c in counts],
        dtype=torch.float64,
    )
    group = torch.arange(len(counts)).repeat_interleave(size)
    credit = advantages((arm < 2).double(), group, torch.ones(len(arm), 1), chance.log()[arm][:, None], lam)[:, 0] * probability[group]
    return float(credit[arm == 0].sum() / credit[arm < 2].sum())


def _mode_credit(lam: float) -> Evidence:
    # The factor's strength for right answers is the pass rate, so the effect fades on hard prompts: 0.201 at pass rate 0.1.
    shares = {f"pass rate {p}": round(_rare_share(lam, p), 4) for p in (0.3, 0.5, 0.7, 0.9)}
    return Evidence(shares, "above 0.205 at every pass rate (GRPO: 0.2)", min(shares.values()) > 0.205)


@claim("a right answer that is a fifth of the right samples earns more than a fifth of their credit in exact expectation")
def credits_rare() -> Evidence:
    return _mode_credit(0.5)


@ablation(credits_rare, "strength 0: GRPO")
def credits_by_frequency() -> Evidence:
    return _mode_credit(0.0)


PROMPTS, SYMBOLS, GROUP = 30, 12, 16
STEP = 0.3 * PROMPTS  # SGD 0.3 for each prompt's mean over its group
START = (1.0, 0.3, -0.3)  # logits of the three right answers; 0 for the others


@dataclass
class MisreadSurprisal:
    """An ablation: the log-probs that the credit reads are those of other rows of the same group."""

    inner: Credit

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        shuffled = torch.argsort(torch.rand(len(batch) // GROUP, GROUP, generator=run.generator), dim=1)
        rows = (shuffled + GROUP * torch.arange(len(shuffled))[:, None]).flatten()
        return self.inner(batch.but(logp=batch.logp[rows]), run)


def _right_entropy(task: TokenBandit, policy: TabularTokens) -> Tensor:
    """Entropy [P] of the policy over a prompt's right answers."""
    log_share = policy.logits.detach()[:, 0].gather(1, task.targets[:, :, 0]).log_softmax(-1)
    return -(log_share.exp() * log_share).sum(-1)


@cache
def _trained(lam: float, misread: bool = False) -> tuple[float, float]:
    """(entropy over right answers, success) in exact expectation after 60 steps, mean of prompts and seeds."""
    credit: Credit = ExplorationPreserving(lam=lam)
    method = plain_sgd(EXPPO.but(credit=MisreadSurprisal(credit) if misread else credit, regularize=()), STEP, group_size=GROUP)
    found = []
    for seed in SEEDS:
        task = TokenBandit(PROMPTS, SYMBOLS, 1, targets=3, seed=seed)
        policy = task.policy()
        with torch.no_grad():
            policy.logits[:, 0].scatter_(1, task.targets[:, :, 0], torch.tensor(START, dtype=torch.float64).expand(PROMPTS, 3))
        train_on(method, policy, task, steps=60, seed=seed, watch=lambda run, batch: None)
        found.append((float(_right_entropy(task, policy).mean()), task.expected_success(policy)))
    entropy, success = zip(*found, strict=True)
    return fmean(entropy), fmean(success)


def _keeps_modes(lam: float, misread: bool = False) -> Evidence:
    (mine, success), (grpo, grpo_success) = _trained(lam, misread), _trained(0.0)
    found = {"entropy": mine, "entropy, grpo": grpo, "success": success, "success, grpo": grpo_success}
    expected = "entropy over right answers above 1.2 x GRPO's, success within 0.015"
    return Evidence({k: round(v, 3) for k, v in found.items()}, expected, mine > 1.2 * grpo and abs(success - grpo_success) < 0.015)


@claim("after the same steps the policy spreads over more of the right answers than GRPO's, at nearly the same success")
def keeps_modes() -> Evidence:
    return _keeps_modes(0.5)


@ablation(keeps_modes, "strength 0: GRPO")
def loses_modes() -> Evidence:
    return _keeps_modes(0.0)


@ablation(keeps_modes, "surprisals dealt to the wrong responses of the prompt")
def loses_modes_misread() -> Evidence:
    return _keeps_modes(0.5, misread=True)


def _local_condition(shaped: bool) -> Evidence:
    """200 random policies (one a prompt, 3 of 8 answers right) take one step of 1e-3; covariance under the policy over right answers."""
    prompts, symbols = 200, 8
    task = TokenBandit(prompts, symbols, 1, targets=3, seed=0)
    policy = task.policy(scale=1.0)
    before, right = _right_entropy(task, policy), task.targets[:, :, 0]
    probability = policy.logits.detach()[:, 0].softmax(-1)
    method = plain_sgd(EXPPO.but(credit=ExplorationPreserving(lam=0.9), regularize=()), 1e-3 * prompts, group_size=GROUP)
    batches: list[Batch] = train_on(method, policy, task, steps=1, watch=lambda run, batch: batch)
    batch = batches[0]
    assert batch.advantage is not None and batch.reward is not None
    credit = batch.advantage[:, 0] if shaped else advantages(batch.reward, batch.group, batch.mask, batch.logp, lam=0.0)[:, 0]
    earned = torch.zeros(prompts, symbols, dtype=torch.float64).index_put((batch.context, batch.action[:, 0]), credit, accumulate=True)
    push = (earned - probability * earned.sum(1, keepdim=True)).gather(1, right)
    log_share = probability.gather(1, right).log().log_softmax(-1)
    share = log_share.exp()
    covariance = (share * log_share * push).sum(1) - (share * log_share).sum(1) * (share * push).sum(1)
    learned = batch.advantage[:, 0].view(prompts, GROUP).any(1)  # a group that is all right or all wrong moves nothing
    agree = float(((covariance < 0) == (_right_entropy(task, policy) > before))[learned].double().mean())
    found = {
        "agreement": round(agree, 4),
        "policies": int(learned.sum()),
        "entropy rose": int((_right_entropy(task, policy) > before).sum()),
    }
    return Evidence(found, "the signs agree for at least 98% of the policies", agree >= 0.98)


@claim(
    "a small step raises the entropy over right answers exactly where their log-probabilities and shaped credits have negative covariance"
)
def local_condition() -> Evidence:
    return _local_condition(shaped=True)


@ablation(local_condition, "the covariance with GRPO's credits, without the factors")
def local_condition_unshaped() -> Evidence:
    return _local_condition(shaped=False)
