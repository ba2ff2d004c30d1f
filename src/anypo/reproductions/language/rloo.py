"""Claims of RLOO: its gradient is unbiased where the exact gradient is known; it learns token_bandit."""

from __future__ import annotations

import torch
from torch import Tensor

from anypo.claims import Evidence, ablation, claim
from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.method import Credit
from anypo.methods.language.rloo import METHOD as RLOO
from anypo.methods.language.rloo import LeaveOneOut
from anypo.reproductions.common import success_on_bandit
from anypo.run import Run
from anypo.seams.credit import GroupRelative
from anypo.task import Prompt

GROUPS = 20_000
PARTS = 50  # independent estimates, for the standard error


def _learns(shuffled: bool) -> Evidence:
    # The loss sums over a response's tokens instead of averaging them: half the step of the other rows for two tokens.
    worst, slowest = success_on_bandit(RLOO, step_size=8.0, shuffled=shuffled)
    return Evidence({"success": round(worst, 3), "steps": slowest}, "success above 0.9 within 300 steps, worst of 3 seeds", worst > 0.9)


@claim("RLOO raises the expected success of token_bandit from below 0.1 to above 0.9 within 300 steps")
def learns() -> Evidence:
    return _learns(shuffled=False)


@ablation(learns, "advantages dealt to the wrong rows")
def learns_without_credit() -> Evidence:
    return _learns(shuffled=True)


def _gradients(credit: Credit) -> tuple[Tensor, Tensor]:
    """`PARTS` estimates of the gradient of the mean reward [PARTS, entries], together 20,000 groups of 8, and the exact one [entries].

    Four one-token prompts over four symbols, of which one is right with chance 0.03, 0.1, 0.3 and 0.6: they differ in difficulty.
    """
    chances = torch.tensor([0.03, 0.1, 0.3, 0.6], dtype=torch.float64)
    task = TokenBandit(4, 4, 1, reward=lambda prompt, action, mask: (action[:, 0] == 3).double())
    policy = task.policy()
    with torch.no_grad():
        policy.logits[:, 0, 3] = (3 * chances / (1 - chances)).log()
    method = RLOO.but(credit=credit)
    run = Run(method, policy, task, steps=1)
    estimates = []
    for _ in range(PARTS):
        batch = run.collect([Prompt(id=p, content=p, samples=8) for p in range(4) for _ in range(GROUPS // PARTS // 4)])
        batch.reward = run.score_rewards(batch)
        batch.advantage = method.credit(batch, run)
        policy.zero_grad()
        run.backward(batch, run.loss_fn)
        assert policy.logits.grad is not None
        estimates.append(-policy.logits.grad.flatten())
    (exact,) = torch.autograd.grad(task.expected_reward(policy).mean(), policy.logits)
    return torch.stack(estimates), exact.flatten()


def _bias(credit: Credit) -> Evidence:
    """Distance between the mean estimate, times the factor that fits best, and the exact gradient, in standard errors of that distance."""
    estimates, exact = _gradients(credit)
    mean = estimates.mean(0)
    factor = float(mean @ exact / (mean @ mean))  # a bias in scale alone would be a matter of step size
    error = factor * float((estimates.var(0) / PARTS).sum().sqrt())
    distance = float((factor * mean - exact).norm()) / error
    return Evidence({"standard errors": round(distance, 2), "best factor": round(factor, 3)}, "within 3 standard errors, factor within 5% of 1",
                    distance < 3 and abs(factor - 1) < 0.05)  # fmt: skip


@claim(
    "the mean RLOO gradient over 20,000 groups is the exact policy gradient, within 3 standard errors, when prompts differ in difficulty"
)
def unbiased() -> Evidence:
    return _bias(LeaveOneOut(beta=0.0))


@ablation(unbiased, "GRPO's division by the group's standard deviation, at its best scale")
def biased_by_std() -> Evidence:
    return _bias(GroupRelative(std=True))


@ablation(unbiased, "the group's mean with the response itself as the baseline")
def biased_by_own_reward() -> Evidence:
    return _bias(GroupRelative(std=False))
