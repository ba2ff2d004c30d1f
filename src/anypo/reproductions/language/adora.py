"""Claims of ADORA: two families of prompts that share one softmax over the lengths 1 to 8 (20 prompts each, groups of 16, 60 steps of SGD 0.5).

In family L a response of length l is right with probability l/8, in family S with probability 1 - l/9: half of the prompts reward longer responses.
By length all L prompts and about two thirds of the S prompts are advantageous throughout, so how the share follows learning is shown by difficulty.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.language.toys.token_bandit import TabularTokens, TokenBandit
from anypo.methods.language.adora import METHOD as ADORA
from anypo.methods.language.adora import RolloutAdaptation, advantageous, base_advantages, weights
from anypo.policy import Signals
from anypo.reproductions.common import BANDIT_STEP, plain_sgd, train_on
from anypo.run import Run
from anypo.seams.groups import broadcast
from anypo.seams.objective import ClippedSurrogate

SEEDS = (0, 1, 2, 3)
PROMPTS, LONGEST, GROUP, STEPS, STEP_SIZE = 40, 8, 16, 60, 0.5
NOT_CUT_OFF = LONGEST + 1  # no response is cut off: the longest has 8 tokens


class LengthPolicy(TabularTokens):
    """One softmax over lengths for all prompts: the first action chooses the length, the tokens after it follow with certainty."""

    provides = frozenset({"logp"})

    def __init__(self) -> None:
        super().__init__(1, LONGEST, 1)

    def evaluate(self, batch: Batch, needs: Set[str]) -> Signals:
        chosen = self.logits[0, 0].log_softmax(-1)[batch.action[:, 0]]
        first = torch.arange(batch.horizon) == 0
        return Signals(logp=torch.where(first, chosen[:, None], torch.zeros_like(chosen)[:, None]))

    def mean_length(self) -> float:
        """Exact."""
        return float(self.logits.detach()[0, 0].softmax(-1) @ torch.arange(1, LONGEST + 1, dtype=torch.float64))


class TwoFamilies(TokenBandit):
    """Even prompts are of family L, odd ones of family S; whether a response is right is drawn."""

    def __init__(self, seed: int) -> None:
        super().__init__(PROMPTS, LONGEST, LONGEST, seed=seed)

    def continue_from(
        self, prompt: Tensor, group: Tensor, run: Run, prefix: Tensor | None = None, temperature: Tensor | None = None
    ) -> Batch:
        chance: Tensor = run.policy.logits.detach()[0, 0].softmax(-1)
        action = torch.zeros(len(prompt), LONGEST, dtype=torch.int64)
        action[:, 0] = torch.multinomial(chance, len(prompt), replacement=True, generator=run.generator)
        mask = torch.arange(LONGEST) <= action[:, :1]
        logp = torch.zeros(mask.shape, dtype=torch.float64)
        logp[:, 0] = chance.log()[action[:, 0]]
        return Batch(action=action, mask=mask, logp=logp, group=group, context=prompt, signals={"prompt_id": prompt})

    def score(self, batch: Batch, run: Run) -> Tensor:
        length = batch.lengths.double()
        chance = torch.where(batch.context % 2 == 0, length / 8, 1 - length / 9)
        return torch.bernoulli(chance, generator=run.generator)


@dataclass
class MisplacedWeights:
    """An ablation: the same weights, dealt to the wrong groups."""

    lam: float

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        assert batch.reward is not None
        found = weights(batch.reward, batch.group, batch.mask, l_max=NOT_CUT_OFF, lam=self.lam)
        dealt = found.view(-1, GROUP)[torch.randperm(PROMPTS, generator=run.generator)].flatten()
        return broadcast(dealt * base_advantages(batch.reward, batch.group), batch.mask)


@cache
def _trained(lam: float, misplaced: bool = False) -> float:
    """Exact mean length after training, mean of the seeds."""
    credit: Any = MisplacedWeights(lam) if misplaced else RolloutAdaptation(lam=lam, l_max=NOT_CUT_OFF)
    method = ADORA.but(credit=credit, regularize=(), objective=ClippedSurrogate(aggregation="constant", max_len=1))
    method = plain_sgd(method, STEP_SIZE, group_size=GROUP)
    ends = []
    for seed in SEEDS:
        policy = LengthPolicy()
        train_on(method, policy, TwoFamilies(seed), steps=STEPS, seed=seed, watch=lambda run, batch: None)
        ends.append(policy.mean_length())
    return fmean(ends)


def _switch(criterion: str) -> Evidence:
    """1,000 groups of four right responses with 1 to 4 tokens and four wrong ones with 5 to 8; then one right response grows to 9 tokens."""
    generator, groups = torch.Generator().manual_seed(0), 1000
    length = torch.cat(
        [torch.randint(1, 5, (groups, 4), generator=generator), torch.randint(5, 9, (groups, 4), generator=generator)], dim=1
    )
    reward = (torch.arange(8) < 4).double().repeat(groups)
    shares = []
    for longest in (None, 9):
        if longest:
            length[:, 0] = longest
        mask = torch.arange(9) < length.flatten()[:, None]
        found = advantageous(reward, torch.arange(groups).repeat_interleave(8), mask, l_max=NOT_CUT_OFF, criterion=criterion)
        shares.append(float(found.double().mean()))
    return Evidence({"before": shares[0], "after": shares[1]}, "none before, all after", shares == [0.0, 1.0])


@claim("prompts turn from disadvantageous to advantageous as soon as one of their right responses is longer than the wrong ones on average")
def follows_rollouts() -> Evidence:
    return _switch("length")


@ablation(follows_rollouts, "the difficulty criterion, which does not look at lengths")
def blind_to_length() -> Evidence:
    return _switch("difficulty")


def _longer(lam: float, misplaced: bool = False) -> Evidence:
    mine, grpo = _trained(lam, misplaced), _trained(1.0)
    return Evidence({"this": round(mine, 2), "grpo": round(grpo, 2)}, "more than 0.4 tokens above GRPO", mine > grpo + 0.4)


@claim("attenuating prompts without a length advantage to 0.1 shifts a shared policy to longer responses")
def longer_responses() -> Evidence:
    return _longer(0.1)


@ablation(longer_responses, "weight 1: GRPO")
def as_long_without_weight() -> Evidence:
    return _longer(1.0)


@ablation(longer_responses, "the same weights, dealt to the wrong prompts")
def as_long_with_misplaced_weights() -> Evidence:
    return _longer(0.1, misplaced=True)


def _stability(lams: tuple[float, ...]) -> Evidence:
    lengths = {str(lam): round(_trained(lam), 2) for lam in lams}
    gain = min(lengths.values()) - _trained(1.0)
    apart = max(lengths.values()) - min(lengths.values())
    return Evidence(
        {**lengths, "least gain over grpo": round(gain, 2)}, "less than 0.5 apart, all above GRPO by 0.4", apart < 0.5 and gain > 0.4
    )


@claim("the weight needs no tuning: 0.05, 0.1 and 0.3 end less than half a token apart, all of them well above GRPO")
def stable_weight() -> Evidence:
    return _stability((0.05, 0.1, 0.3))


@ablation(stable_weight, "weight 1, which is GRPO, among them")
def unstable_with_grpo() -> Evidence:
    return _stability((0.05, 0.1, 1.0))


def _falls(step_size: float) -> Evidence:
    """token_bandit, 16 prompts, the difficulty criterion: share of advantageous prompts at its highest and in the last of 150 steps (means of ten)."""
    method = plain_sgd(ADORA.but(credit=RolloutAdaptation(criterion="difficulty"), regularize=()), step_size)
    peaks, ends = [], []
    for seed in SEEDS[:2]:
        task = TokenBandit(seed=seed)
        shares = train_on(method, task.policy(), task, steps=150, seed=seed, watch=lambda run, batch: run.history[-1]["tas_share"])
        tens = [fmean(shares[i : i + 10]) for i in range(0, len(shares), 10)]
        peaks.append(max(tens))
        ends.append(tens[-1])
    peak, end = fmean(peaks), fmean(ends)
    return Evidence({"peak": round(peak, 3), "end": round(end, 3)}, "the end below half of the peak", end < 0.5 * peak)


@claim("prompts stop counting as advantageous by difficulty once they are learned")
def forgets_learned_prompts() -> Evidence:
    return _falls(BANDIT_STEP)


@ablation(forgets_learned_prompts, "a policy that learns nothing (step size 0)")
def same_prompts_for_ever() -> Evidence:
    return _falls(0.0)
