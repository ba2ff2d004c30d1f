"""Claims of GRPO on token_bandit (P=16, V=4, T=2; exact success probabilities). Length bias and clip-higher are claims of Dr. GRPO and DAPO."""

from __future__ import annotations

import math
from functools import cache, partial
from statistics import fmean

import torch
from torch import Tensor

from anypo.claims import Evidence, ablation, claim
from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.method import Method
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.reproductions.common import BANDIT_STEP, CoinReward, plain_sgd, steps_to, success_on_bandit, train_on
from anypo.run import Run
from anypo.seams.credit import GroupRelative


def _learns(shuffled: bool) -> Evidence:
    worst, slowest = success_on_bandit(GRPO, shuffled=shuffled)
    return Evidence({"success": round(worst, 3), "steps": slowest}, "success above 0.9 within 300 steps, worst of 3 seeds", worst > 0.9)


@claim("GRPO raises the expected success of token_bandit from below 0.1 to above 0.9 within 300 steps")
def learns() -> Evidence:
    return _learns(shuffled=False)


@ablation(learns, "advantages dealt to the wrong rows")
def learns_without_credit() -> Evidence:
    return _learns(shuffled=True)


def _gradient(method: Method, reward: torch.Tensor, relative: bool = True) -> float:
    """Largest entry of the parameter gradient of one batch with these rewards [N]; raw rewards are the advantages unless `relative`."""
    task = TokenBandit(prompts=2, seed=0)
    policy = task.policy(scale=0.5)
    run = Run(method, policy, task, steps=1)
    batch = run.collect(method.select(task, run))
    run.prepare_signals(batch, method.needs())
    batch.reward = reward
    batch.advantage = method.credit(batch, run) if relative else reward[:, None] * batch.mask
    policy.zero_grad()
    run.backward(batch, run.loss_fn)
    return 0.0 if policy.logits.grad is None else float(policy.logits.grad.abs().max())


def _zero_variance(relative: bool) -> Evidence:
    sizes = {str(r): _gradient(GRPO, torch.full((16,), r, dtype=torch.float64), relative) for r in (0.1, 1.0, -7.3)}
    return Evidence(sizes, "exactly 0 for each reward that all responses share", all(size == 0.0 for size in sizes.values()))


@claim("a group whose responses all earn the same gives exactly zero gradient")
def zero_variance() -> Evidence:
    return _zero_variance(relative=True)


@ablation(zero_variance, "raw rewards instead of group-relative ones")
def zero_variance_raw() -> Evidence:
    return _zero_variance(relative=False)


def _masked_row(count_it: bool) -> Evidence:
    """Gradient of a batch, against the same batch with one more row whose actions are masked (or, in the ablation, not)."""
    task = TokenBandit(prompts=2, seed=0)
    policy = task.policy(scale=0.5)
    run = Run(GRPO, policy, task, steps=1)
    batch = run.collect(GRPO.select(task, run))
    run.prepare_signals(batch, GRPO.needs())
    batch.reward = torch.arange(16, dtype=torch.float64) % 3
    batch.advantage = GRPO.credit(batch, run)
    wider = batch[torch.cat([torch.arange(16), torch.tensor([3])])]
    if not count_it:
        wider.mask[-1] = False
    gradients = []
    for rows in (batch, wider):
        policy.zero_grad()
        run.policy.backward(rows, run.loss_fn.needs, run.loss_fn)
        assert policy.logits.grad is not None
        gradients.append(policy.logits.grad.clone())
    difference = float((gradients[0] - gradients[1]).abs().max())
    return Evidence(difference, "no change in any entry of the gradient", difference == 0.0)


@claim("a row without counted actions changes nothing in the gradient")
def masked_row_changes_nothing() -> Evidence:
    return _masked_row(count_it=False)


@ablation(masked_row_changes_nothing, "the row's actions count")
def counted_row_changes_it() -> Evidence:
    return _masked_row(count_it=True)


def _steps_at_scales(std: bool) -> Evidence:
    """Steps to success 0.9 when all rewards are multiplied by a factor, at one step size and one seed."""
    steps: dict[str, float] = {}
    for factor in (0.1, 1.0, 10.0):
        task = TokenBandit(seed=0)
        targets = task.targets[:, 0]

        def scaled(prompt: Tensor, action: Tensor, mask: Tensor, targets: Tensor = targets, factor: float = factor) -> Tensor:
            return factor * (action == targets[prompt]).all(-1).double()

        task.reward_function = scaled
        method = plain_sgd(GRPO, BANDIT_STEP).but(credit=GroupRelative(std=std), regularize=())
        steps[f"reward x {factor}"] = steps_to(train_on(method, task.policy(), task, steps=120, stop=lambda success: success > 0.9), 0.9)
    return Evidence(
        steps, "within 2 steps of each other, below 120", max(steps.values()) - min(steps.values()) <= 2 and max(steps.values()) < 120
    )


@claim("the scale of the reward changes neither the update nor the speed of learning")
def scale_free() -> Evidence:
    return _steps_at_scales(std=True)


@ablation(scale_free, "no division by the group's standard deviation")
def scale_matters_without_std() -> Evidence:
    return _steps_at_scales(std=False)


def _drift(beta: float) -> float:
    """Exact KL of a response from the policy to its start after 200 steps of a reward that ignores the response, mean of 16 prompts, 2 seeds."""
    found = []
    for seed in range(2):
        task = TokenBandit(seed=seed)
        policy = task.policy()
        train_on(
            plain_sgd(GRPO, BANDIT_STEP).but(reward=CoinReward(0.5)).set("regularize.0.beta", beta), policy, task, steps=200, seed=seed
        )
        log_probs = policy.logits.detach().log_softmax(-1)
        found.append(float((log_probs.exp() * (log_probs + math.log(4))).sum(-1).sum(-1).mean()))
    return fmean(found)


_drift_without_penalty = cache(partial(_drift, 0.0))


def _stays(beta: float) -> Evidence:
    found = {"kl": round(_drift(beta) if beta else _drift_without_penalty(), 3), "kl without penalty": round(_drift_without_penalty(), 3)}
    return Evidence(found, "at most 0.7 of the drift without a penalty", found["kl"] <= 0.7 * found["kl without penalty"])


@claim("the KL penalty (beta 0.04) keeps the policy near its reference while the reward carries no information")
def stays_near_reference() -> Evidence:
    return _stays(0.04)


@ablation(stays_near_reference, "beta 0")
def drifts_without_penalty() -> Evidence:
    return _stays(0.0)
