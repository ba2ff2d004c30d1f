"""Claims of SRPO and RRPO on a chain of 16 steps (8 prompts, 4 symbols; success 0.98 a step, 0.3 at 4 hard steps a prompt, 0.6% for the whole chain)
with exact success probabilities, and of the analysis by conservative policy iteration on random MDPs. Budgets count sampled actions; a new ending
costs its own actions only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from statistics import fmean

import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.loops.on_policy import step
from anypo.method import Method
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.methods.language.srpo_reset import METHOD as SRPO
from anypo.methods.language.srpo_reset import ResetRollout, cpi, suffix_signal
from anypo.reproductions.common import hard_chain, plain_sgd
from anypo.run import Run

STEPS, PROMPTS, GROUP = 16, 8, 8
BUDGET = 120_000  # sampled actions


@dataclass
class StandIn:
    """Names the first wrong step with probability `accuracy`, else a random one."""

    accuracy: float = 0.9

    def __call__(self, batch: Batch, rows: Tensor, steps: Tensor, run: Run) -> Tensor:
        right = run.task.right[batch.context[rows][:, None], torch.arange(STEPS), batch.action[rows]]  # type: ignore[attr-defined]
        anywhere = torch.randint(STEPS, (len(rows),), generator=run.generator)
        return torch.where(torch.rand(len(rows), generator=run.generator) < self.accuracy, (~right).long().argmax(1), anywhere)


def resets(mode: str, accuracy: float = 0.9, include_base: bool = True) -> Method:
    return SRPO.but(rollout=ResetRollout(mode=mode, include_base=include_base, localizer=StandIn(accuracy)))


@cache
def trained(name: str, accuracy: float = 0.9) -> tuple[float, float]:
    """Success at the budget, and the share of mixed groups among the reset groups; means of 4 seeds.

    SGD 0.5 on the sum over prompts of the mean over a group of the sum over actions; with reset groups there are twice as many groups.
    """
    method, factor = (GRPO, 1) if name == "grpo" else (resets(name, accuracy), 2)
    method = plain_sgd(method, 0.5 * PROMPTS * factor, group_size=GROUP).but(regularize=())
    method = method.set("objective.aggregation", "constant").set("objective.max_len", 1)
    ends, mixed = [], []
    for seed in range(4):
        policy, task, _ = hard_chain(seed)
        run = Run(method, policy, task, steps=BUDGET, seed=seed, max_actions=BUDGET)
        while not run.finished:
            batch = step(run)
            assert batch.reward is not None
            share = batch.reward[PROMPTS * GROUP :].view(-1, GROUP).mean(1)
            mixed += ((share > 0) & (share < 1)).tolist()
        ends.append(task.expected_success(policy))
    return fmean(ends), fmean(mixed) if mixed else 0.0


def _learns(accuracy: float) -> Evidence:
    found = {"SRPO": trained("self", accuracy)[0], "RRPO": trained("random")[0], "GRPO": trained("grpo")[0]}
    rounded = {name: round(value, 3) for name, value in found.items()}
    return Evidence(rounded, "SRPO above both others by 0.08", found["SRPO"] > max(found["GRPO"], found["RRPO"]) + 0.08)


@claim("at 120,000 sampled actions SRPO succeeds more often than GRPO and than random resets (4 seeds)", slow=True)
def learns() -> Evidence:
    return _learns(0.9)


@ablation(learns, "the localizer names random steps")
def learns_without_localization() -> Evidence:
    return _learns(0.0)


def _mixed(accuracy: float) -> Evidence:
    own, random = trained("self", accuracy)[1], trained("random")[1]
    return Evidence({"self": round(own, 3), "random": round(random, 3)}, "self above 1.5 times random", own > 1.5 * random)


@claim("resets at the localized step give more groups with right and wrong endings than resets at random steps", slow=True)
def mixed_groups() -> Evidence:
    return _mixed(0.9)


@ablation(mixed_groups, "the localizer names random steps")
def mixed_groups_without_localization() -> Evidence:
    return _mixed(0.0)


@dataclass
class Beside:
    """Resets one step behind the first error, or at it."""

    behind: bool

    def __call__(self, batch: Batch, rows: Tensor, steps: Tensor, run: Run) -> Tensor:
        right = run.task.right[batch.context[rows][:, None], torch.arange(STEPS), batch.action[rows]]  # type: ignore[attr-defined]
        return ((~right).long().argmax(1) + int(self.behind)).clamp(max=STEPS - 1)


def _behind(behind: bool) -> Evidence:
    """All reset groups of five collections whose first error leaves a step behind it, against the closed form."""
    shares, expected = [], []
    for seed in range(5):
        policy, task, p = hard_chain(seed)
        method = SRPO.but(rollout=ResetRollout(localizer=Beside(behind)))
        run = Run(method, policy, task, steps=1, seed=seed)
        batch = method.rollout(method.select(task, run), run)
        first, prompts = batch.signals["reset_step"][PROMPTS * GROUP :: GROUP] - int(behind), batch.context[PROMPTS * GROUP :: GROUP]
        share = batch.signals["task_reward"][PROMPTS * GROUP :].view(-1, GROUP).mean(1)
        inside = first < STEPS - 2
        shares += ((share > 0) & (share < 1))[inside].tolist()
        expected += [
            float(suffix_signal(p[q], int(e), GROUP).mixed[int(e) + int(behind)])
            for q, e in zip(prompts[inside], first[inside], strict=True)
        ]
    found = {"mixed": round(fmean(shares), 3), "closed form": round(fmean(expected), 3), "groups": len(shares)}
    return Evidence(found, "exactly 0, as the closed form says", fmean(shares) == 0 and fmean(expected) == 0)


@claim("a reset behind the first error tells nothing: none of its groups is mixed")
def behind_the_error() -> Evidence:
    return _behind(True)


@ablation(behind_the_error, "the reset is at the first error")
def at_the_error() -> Evidence:
    return _behind(False)


def _prefix(suffix_only: bool) -> Evidence:
    """Largest gradient in the logits of steps before each prompt's reset, and behind it, of a batch of reset groups alone.

    The policy has moved since the batch was drawn, as in a second epoch: at the first pass the advantages of a group cancel on what all share.
    """
    policy, task, _ = hard_chain(0)
    method = resets("self", include_base=False).but(regularize=())
    run = Run(method, policy, task, steps=1)
    batch = method.rollout(method.select(task, run), run)
    batch.reward = torch.randn(len(batch), generator=torch.Generator().manual_seed(0), dtype=torch.float64)  # every group has contrast
    if not suffix_only:
        batch.signals["reset_step"] = torch.zeros_like(batch.group)
        batch.keep = batch.mask & (batch.keep.any(1, keepdim=True) if batch.keep is not None else batch.mask)
    batch.advantage = method.credit(batch, run)
    with torch.no_grad():
        policy.logits += 0.3 * torch.randn(policy.logits.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    policy.backward(batch, run.loss_fn.needs, run.loss_fn)
    assert policy.logits.grad is not None and batch.branch_at is not None
    start = torch.full((PROMPTS,), STEPS)
    resets_at = batch.branch_at[PROMPTS * GROUP :]
    start[batch.context[PROMPTS * GROUP :]] = resets_at
    size = policy.logits.grad.abs().amax(-1)
    before = torch.arange(STEPS) < start[:, None]
    found = {"before the reset": float(size[before].max()), "behind": float(size[~before].max())}
    return Evidence(found, "exactly 0 before the reset, above 0 behind", found["before the reset"] == 0 and found["behind"] > 0)


@claim("the shared beginning of a reset group gets exactly zero gradient")
def prefix_has_no_gradient() -> Evidence:
    return _prefix(True)


@ablation(prefix_has_no_gradient, "the advantage reaches the whole trajectory")
def prefix_trained() -> Evidence:
    return _prefix(False)


def random_mdp(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """P [4,3,4], R [4,3], pi [4,3], mu [4] with one improvable state: in state 0 actions differ in all, in state 1 slightly, elsewhere not."""
    g = torch.Generator().manual_seed(seed)

    def simplex(*shape: int) -> Tensor:
        weights = -torch.rand(*shape, generator=g, dtype=torch.float64).clamp(min=1e-9).log()
        return weights / weights.sum(-1, keepdim=True)

    transition, reward = simplex(4, 1, 4).repeat(1, 3, 1), torch.rand(4, 1, generator=g, dtype=torch.float64).repeat(1, 3)
    transition[0] = simplex(3, 4)
    reward[0] = torch.tensor([0.05, 0.95, 0.4], dtype=torch.float64)
    reward[1] += 0.03 * torch.rand(3, generator=g, dtype=torch.float64)
    return transition, reward, simplex(4, 3), torch.full((4,), 0.25, dtype=torch.float64)


def performance(transition: Tensor, reward: Tensor, policy: Tensor, start: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """(1 - gamma) mu.V, and the greedy policy."""
    inside = torch.eye(len(start), dtype=reward.dtype) - gamma * torch.einsum("sa,sat->st", policy, transition)
    value = torch.linalg.solve(inside, (policy * reward).sum(1))
    greedy = torch.nn.functional.one_hot((reward + gamma * transition @ value).argmax(1), reward.shape[1]).to(reward)
    return (1 - gamma) * start @ value, greedy


def _bound(with_coverage: bool, gamma: float = 0.9, tau: float = 0.01) -> Evidence:
    """Of 300 random MDPs: in how many the oracle's mean advantage is the larger one, and how often a step misses its guaranteed gain."""
    larger, missed, count = 0, 0, 0
    for seed in range(300):
        transition, reward, policy, start = random_mdp(seed)
        found = cpi(transition, reward, policy, start, gamma, tau)
        if not 0 < float(found.coverage) < 1:
            continue
        count += 1
        larger += bool(found.adv_oracle > found.adv_random)
        before, greedy = performance(transition, reward, policy, start, gamma)
        gain = found.coverage * found.adv_oracle if with_coverage else found.adv_oracle
        scale = (1 - gamma) / (4 * reward.max())
        everywhere, improvable = torch.ones_like(start, dtype=torch.bool), found.max_advantage > tau
        for mean, where in ((found.adv_random, everywhere), (gain, improvable)):
            alpha = torch.where(where, scale * mean, torch.zeros_like(start))[:, None]
            after, _ = performance(transition, reward, (1 - alpha) * policy + alpha * greedy, start, gamma)
            missed += bool(after - before < mean**2 / (8 * reward.max()) - 1e-12)
    holds = larger == count and missed == 0 and count > 200
    return Evidence({"MDPs": count, "oracle larger": larger, "bound missed": missed}, "larger in all, missed in none", holds)


@claim(
    "an oracle that resets in improvable states alone sees the larger mean advantage, and both kinds of step gain at least what CPI guarantees"
)
def guaranteed_gain() -> Evidence:
    return _bound(True)


@ablation(guaranteed_gain, "the oracle's step forgets how rarely its states are visited (coverage 1)")
def guaranteed_gain_without_coverage() -> Evidence:
    return _bound(False)
