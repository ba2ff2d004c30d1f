"""Claims of GRPO, Dr. GRPO and DAPO on token_bandit (P=16, V=4, T=2 unless stated; exact success probabilities)."""

from __future__ import annotations

from statistics import fmean

import torch

from anypo.domains.language.toys.token_bandit import TabularTokens, TokenBandit
from anypo.method import Method
from anypo.methods.language.dapo import METHOD as DAPO
from anypo.methods.language.dr_grpo import METHOD as DR_GRPO
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.policy import Signals
from anypo.reproduce import Evidence, ablation, claim
from anypo.reproductions.common import CoinReward, ShuffledCredit, plain_sgd, steps_to, train_on
from anypo.run import Run
from anypo.seams.objective import ClippedSurrogate
from anypo.seams.reward import TaskReward
from anypo.seams.rollout import OnPolicy

SEEDS = (0, 1, 2)
STEP = 16.0  # SGD step 1 for each of the 16 prompts


def _final_success(change: object = None) -> Evidence:
    found = {}
    for method in (GRPO, DR_GRPO, DAPO):
        trained = plain_sgd(method, STEP)
        trained = trained.but(credit=ShuffledCredit(trained.credit)) if change == "shuffled" else trained
        worst = 1.0
        for seed in SEEDS:
            task = TokenBandit(seed=seed)
            policy = task.policy()
            before = task.expected_success(policy)
            worst = min(worst, train_on(trained, policy, task, steps=300, seed=seed)[-1] if before < 0.1 else 0.0)
        found[method.name] = round(worst, 3)
    return Evidence(found, "success below 0.1 before, above 0.9 after 300 steps, worst of 3 seeds", min(found.values()) > 0.9)


@claim("GRPO, Dr. GRPO and DAPO raise the expected success of token_bandit from below 0.1 to above 0.9 within 300 steps")
def learns() -> Evidence:
    return _final_success()


@ablation(learns, "advantages dealt to the wrong rows")
def learns_without_credit() -> Evidence:
    return _final_success("shuffled")


def _gradient(reward: torch.Tensor, method: Method, raw: bool = False) -> float:
    """Largest parameter gradient after one batch with the given rewards, as a function of the credit alone."""
    task = TokenBandit(prompts=2, seed=0)
    policy = task.policy(scale=0.5)
    run = Run(method, policy, task, steps=1)
    batch = run.collect(method.select(task, run))
    batch.reward = reward[: len(batch)]
    batch.advantage = (batch.reward[:, None] * batch.mask) if raw else method.credit(batch, run)
    policy.zero_grad()
    method.objective(batch, Signals(policy.evaluate(batch, {"logp"})), run).value.backward()
    return float(policy.logits.grad.abs().max())  # type: ignore[union-attr]


@claim("a group whose responses all earn the same gives exactly zero gradient")
def zero_variance() -> Evidence:
    size = _gradient(torch.ones(16, dtype=torch.float64), GRPO)
    return Evidence(size, "exactly 0", size == 0.0)


@ablation(zero_variance, "raw rewards instead of group-relative ones")
def zero_variance_raw() -> Evidence:
    size = _gradient(torch.ones(16, dtype=torch.float64), GRPO, raw=True)
    return Evidence(size, "exactly 0", size == 0.0)


class _LongBandit(TokenBandit):
    """Three symbols, token 0 ends the response, at most 12 tokens."""

    def __init__(self, seed: int) -> None:
        super().__init__(prompts=16, vocabulary=3, horizon=12, eos=0, seed=seed, reward=lambda p, a, m: torch.zeros(len(p), dtype=torch.float64))


def _mean_length(policy: TabularTokens) -> float:
    """Exact expected length: the sum over positions of the probability of having reached them."""
    going_on = 1 - policy.logits.detach().softmax(-1)[..., 0]
    reached = torch.cat([torch.ones_like(going_on[:, :1]), going_on[:, :-1]], dim=1).cumprod(1)
    return float(reached.sum(1).mean())


def _length_drift(aggregation: str) -> float:
    """Relative change of the mean length after 400 steps of a reward that ignores the response; mean of 3 seeds."""
    drifts = []
    for seed in SEEDS:
        task = _LongBandit(seed)
        policy = task.policy()
        before = _mean_length(policy)
        method = plain_sgd(GRPO, STEP).but(
            reward=CoinReward(0.2), objective=ClippedSurrogate(aggregation=aggregation), regularize=(), rollout=OnPolicy()
        )
        after = train_on(method, policy, task, steps=400, seed=seed, watch=lambda run, batch: 0.0)
        assert len(after) == 400
        drifts.append(_mean_length(policy) / before - 1)
    return fmean(drifts)


def _length_evidence(*aggregations: str) -> Evidence:
    drift = {name: round(_length_drift(name), 3) for name in aggregations}
    return Evidence(drift, "mean length moves by less than 6% in every case", all(abs(d) < 0.06 for d in drift.values()))


@claim("under a reward that ignores the response, token-mean and constant aggregation keep the mean length within 6%", slow=True)
def no_length_bias() -> Evidence:
    return _length_evidence("token_mean", "constant")


@ablation(no_length_bias, "mean over rows of each row's mean (GRPO's aggregation)")
def length_bias_of_seq_mean() -> Evidence:
    return _length_evidence("seq_mean")


def pivotal_bandit(seed: int) -> tuple[TokenBandit, TabularTokens]:
    """P=16, V=6, T=3; the reward is that the first token was the rare pivotal one (token 5, probability 0.05 at the start)."""
    task = TokenBandit(16, 6, 3, seed=seed, reward=lambda prompt, action, mask: (action[:, 0] == 5).double())
    policy = task.policy()
    with torch.no_grad():
        policy.logits[:, 0, 5] = torch.log(torch.tensor(5 * 0.05 / 0.95))
    return task, policy


def rounds_to_half(method: Method, step_size: float = 5.0, seeds: tuple[int, ...] = tuple(range(6))) -> float:
    """Mean number of batches, 8 gradient steps each, until the pivotal token reaches probability 0.5."""
    method = plain_sgd(method, step_size, epochs=8)
    rounds = []
    for seed in seeds:
        task, policy = pivotal_bandit(seed)

        def chance(run: Run, batch: object, policy: TabularTokens = policy) -> float:
            return float(policy.logits.detach()[:, 0].softmax(-1)[:, 5].mean())

        rounds.append(steps_to(train_on(method, policy, task, steps=60, seed=seed, watch=chance, stop=lambda p: p >= 0.5), 0.5))
    return fmean(rounds)


def token_mean_grpo(clip_high: float) -> Method:
    """The clipped surrogate alone on token_mean: no KL, no resampling, no shaping, so that only the clip differs."""
    return GRPO.but(objective=ClippedSurrogate(0.2, clip_high, "token_mean"), regularize=(), reward=TaskReward(), rollout=OnPolicy())


def _clip_higher(clip_high: float) -> Evidence:
    symmetric, higher = rounds_to_half(token_mean_grpo(0.2)), rounds_to_half(token_mean_grpo(clip_high))
    found = {"0.2/0.2": round(symmetric, 2), f"0.2/{clip_high}": round(higher, 2)}
    return Evidence(found, "the wider upper clip needs at least 1 round less (mean of 6 seeds)", higher <= symmetric - 1)


@claim("clip-higher (0.2/0.28) brings a rare pivotal token to probability 0.5 in fewer rounds than the symmetric clip", slow=True)
def clip_higher_is_faster() -> Evidence:
    return _clip_higher(0.28)


@ablation(clip_higher_is_faster, "the upper clip back at 0.2")
def clip_higher_off() -> Evidence:
    return _clip_higher(0.2)
