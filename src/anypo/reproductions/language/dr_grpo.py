"""Claims of Dr. GRPO: no length bias and no difficulty bias. token_bandit with exact success, lengths and gradients.

Two sides of the length bias of GRPO's aggregation (each row's own mean):
- Under a reward that ignores the response the expected update is zero whatever the aggregation, and what moves the length is noise: the noise of
  short responses is divided by less, so it moves end tokens most, and in a softmax noise on a rare token's logit raises its probability on
  average. The effect is of second order in the step size (measured with 128 prompts, 400 steps: -12% at step 0.5 for each prompt, -24% at 1);
  it needs responses of some length (mean 5.6 here) and many prompts to be told from the random walk of single ones.
- Where the policy can tell that its response is going to be wrong, the effect is of first order: a wrong response is punished less a token the
  longer it is, so wrong responses grow and right ones shrink.
"""

from __future__ import annotations

from statistics import fmean

import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.language.toys.token_bandit import TabularTokens, TokenBandit
from anypo.method import Method
from anypo.methods.language.dr_grpo import METHOD as DR_GRPO
from anypo.reproductions.common import CoinReward, LengthBandit, mean_length, plain_sgd, success_on_bandit, train_on
from anypo.run import Run
from anypo.seams.credit import GroupRelative
from anypo.seams.objective import ClippedSurrogate
from anypo.task import Prompt

SEEDS = (0, 1, 2)


def _learns(shuffled: bool) -> Evidence:
    worst, slowest = success_on_bandit(DR_GRPO, shuffled=shuffled)
    return Evidence({"success": round(worst, 3), "steps": slowest}, "success above 0.9 within 300 steps, worst of 3 seeds", worst > 0.9)


@claim("Dr. GRPO raises the expected success of token_bandit from below 0.1 to above 0.9 within 300 steps")
def learns() -> Evidence:
    return _learns(shuffled=False)


@ablation(learns, "advantages dealt to the wrong rows")
def learns_without_credit() -> Evidence:
    return _learns(shuffled=True)


def aggregated(how: str, std: bool = True) -> Method:
    """The clipped surrogate alone with one aggregation, no KL."""
    return DR_GRPO.but(credit=GroupRelative(std=std), objective=ClippedSurrogate(0.2, 0.2, how))


def _length_drift(aggregation: str, seed: int) -> float:
    """Relative change of the exact mean length after 200 steps of a reward that ignores the response; 64 prompts, SGD step 1 for each."""
    task = LengthBandit(prompts=64, seed=seed)
    policy = task.policy()
    before = mean_length(policy)
    method = plain_sgd(aggregated(aggregation), 64.0).but(reward=CoinReward(0.2))
    train_on(method, policy, task, steps=200, seed=seed, watch=lambda run, batch: None)
    return mean_length(policy) / before - 1


def _random_reward(*aggregations: str) -> Evidence:
    drift = {how: round(fmean(_length_drift(how, seed) for seed in SEEDS), 3) for how in aggregations}
    return Evidence(drift, "mean length moves by less than 6% (mean of 3 seeds)", all(abs(d) < 0.06 for d in drift.values()))


@claim("under a reward that ignores the response, constant and token-mean aggregation keep the mean length within 6%", slow=True)
def no_length_bias() -> Evidence:
    return _random_reward("constant", "token_mean")


@ablation(no_length_bias, "mean over rows of each row's mean (GRPO's aggregation)")
def length_bias_of_seq_mean() -> Evidence:
    return _random_reward("seq_mean")


class _TellingBandit(TokenBandit):
    """The first token is drawn by the task, not written by the policy: 2 (the response will be right, 20%) or 1 (wrong). Token 0 ends the string;
    tokens 1 and 2 keep repeating (the other one has logit -5), so that the policy always sees which case it is in."""

    def __init__(self, seed: int) -> None:
        super().__init__(16, 3, 12, eos=0, seed=seed, reward=lambda prompt, action, mask: (action[:, 0] == 2).double())

    def collect(self, prompts: list[Prompt], run: Run) -> Batch:
        rows = torch.tensor([p.content for p in prompts for _ in range(p.samples)])
        group = torch.tensor([g for g, p in enumerate(prompts) for _ in range(p.samples)])
        coin = torch.bernoulli(torch.full((len(rows), 1), 0.2), generator=run.generator).long()
        batch = self.continue_from(rows, group, run, prefix=1 + coin)
        batch.valid = batch.mask.clone()
        batch.mask[:, 0] = False
        batch.logp[:, 0] = 0
        return batch

    def policy(self, **options: object) -> TabularTokens:
        policy = super().policy(autoregressive=True)
        with torch.no_grad():
            policy.logits[..., 0] -= 1
            policy.logits[..., 1, 2] = policy.logits[..., 2, 1] = -5
        return policy


def _length_after(policy: TabularTokens, first: int) -> float:
    """Exact mean number of tokens written after the first one, over prompts."""
    chances = policy.logits.detach().softmax(-1)  # [P,T,previous,next]
    state = torch.zeros(chances.shape[0], 3, dtype=torch.float64)
    state[:, first] = 1
    total = torch.zeros(chances.shape[0], dtype=torch.float64)
    for t in range(1, policy.horizon):
        total += state.sum(1)
        state = torch.einsum("ps,psn->pn", state, chances[:, t, :3])
        state[:, 0] = 0
    return float(total.mean())


def _wrong_and_right(aggregation: str, step_size: float) -> Evidence:
    drifts: dict[str, list[float]] = {"wrong": [], "right": []}
    for seed in SEEDS:
        task = _TellingBandit(seed)
        policy = task.policy()
        before = {"wrong": _length_after(policy, 1), "right": _length_after(policy, 2)}
        train_on(plain_sgd(aggregated(aggregation), step_size), policy, task, steps=60, seed=seed, watch=lambda run, batch: None)
        for which, first in (("wrong", 1), ("right", 2)):
            drifts[which].append(_length_after(policy, first) / before[which] - 1)
    found = {which: round(fmean(values), 3) for which, values in drifts.items()}
    return Evidence(found, "both lengths move by less than 10% (mean of 3 seeds)", all(abs(d) < 0.1 for d in found.values()))


@claim("wrong responses do not grow longer, nor right ones shorter, where the reward does not depend on what the policy writes")
def wrong_responses_keep_their_length() -> Evidence:
    return _wrong_and_right("constant", 16.0 * 11 / 4.6)  # 11 tokens at most, 4.6 on average: the same push a token as below


@ablation(wrong_responses_keep_their_length, "mean over rows of each row's mean (GRPO's aggregation)")
def wrong_responses_grow() -> Evidence:
    return _wrong_and_right("seq_mean", 16.0)


def _difficulty(std: bool) -> Evidence:
    """Mean update of 4,000 groups a prompt over the exact policy gradient: one token, success chance 0.05, 0.2 and 0.5."""
    chances = torch.tensor([0.05, 0.2, 0.5], dtype=torch.float64)
    task = TokenBandit(3, 2, 1, reward=lambda prompt, action, mask: (action[:, 0] == 1).double())
    policy = task.policy()
    with torch.no_grad():
        policy.logits[:, 0, 1] = (chances / (1 - chances)).log()
    method = aggregated("constant", std=std)
    run = Run(method, policy, task, steps=1)
    batch = run.collect([Prompt(id=p, content=p, samples=8) for p in range(3) for _ in range(4000)])
    batch.reward = run.score_rewards(batch)
    batch.advantage = method.credit(batch, run)
    run.backward(batch, run.loss_fn)
    assert policy.logits.grad is not None
    found = -policy.logits.grad[:, 0, 1] * 3  # the loss averages over the prompts
    share: Tensor = found / (chances * (1 - chances))
    measured = {f"chance {c:.2f}": round(s, 3) for c, s in zip(chances.tolist(), share.tolist(), strict=True)}
    # Centring on the group's own mean takes 1/G from every prompt's gradient: 7/8 for all of them.
    return Evidence(measured, "7/8 of the exact gradient within 0.05 at every difficulty", bool(((share - 7 / 8).abs() < 0.05).all()))


@claim("the expected update is the same share of the true gradient for hard and for easy prompts")
def no_difficulty_bias() -> Evidence:
    return _difficulty(std=False)


@ablation(no_difficulty_bias, "division by the group's standard deviation")
def difficulty_bias_of_std() -> Evidence:
    return _difficulty(std=True)
