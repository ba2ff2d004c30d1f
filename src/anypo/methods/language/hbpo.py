"""HBPO: hierarchical budget policy optimization (arXiv:2507.15844).

A penalty on length drives out long reasoning where it is needed. HBPO splits the attempts at a prompt into subgroups, each told its own token
budget. The reward of a right answer depends on its length and on the budget and never exceeds the budget's own value, which falls with the
budget. Advantages compare twice: an attempt with all attempts at the prompt (which budget wins here?), and its subgroup's mean reward with the
budget's value (is this budget enough here?). Equations 1-5 are those of the paper's code as the row's specification gives them; the code adds
the second part twice, the paper, and this file, once. Left out: the budget's place inside a thinking block, which is the chat template's business.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anypo.batch import Batch
from anypo.method import Paper, Rollout
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.seams.groups import broadcast, group_mean, group_size, standardize
from anypo.seams.objective import ClippedSurrogate
from anypo.seams.rollout import OnPolicy
from anypo.seams.select import UniformPrompts
from anypo.task import Prompt

if TYPE_CHECKING:
    from anypo.run import Run

RIGHT = 0.5  # a task reward above this is a right answer; one below 0 is an answer that could not be read
ANNOUNCEMENT = "I will answer with {budget} tokens.\n{prompt}"


def budget_value(tokens: Tensor, beta: float, max_len: int) -> Tensor:
    """Equation 1: F, from beta at no tokens down to 0 at `max_len`."""
    return beta * torch.cos(math.pi * tokens.double() / (2 * max_len))


def reward(
    correct: Int[Tensor, " N"], length: Int[Tensor, " N"], budget: Int[Tensor, " N"], beta: float = 4.0, alpha: float = 1 / 64, max_len: int = 64
) -> Float[Tensor, " N"]:  # fmt: skip
    """Equation 2. `correct`: 1 right, 0 wrong, -1 could not be read."""
    value = budget_value(length, beta, max_len) - alpha * (length - budget).abs().double()
    value = torch.minimum(value, budget_value(budget, beta, max_len))
    right = torch.where((correct == 1) & (length <= max_len), value, torch.zeros_like(value))
    return torch.where(correct == -1, torch.full_like(value, -1.0), right)


class Parts(NamedTuple):
    """The two comparisons and their sum, [N] each."""

    inter: Tensor
    intra: Tensor
    advantages: Tensor


def advantages(
    reward: Float[Tensor, " N"], group: Int[Tensor, " N"], budget: Int[Tensor, " N"], beta: float = 4.0, max_len: int = 64, eps: float = 1e-6,
    ddof: int = 1,
) -> Parts:  # fmt: skip
    """Equations 3-5. A prompt with a single attempt gets 0 in both parts."""
    return hierarchical(reward, group, budget, budget_value(budget, beta, max_len), eps, ddof)


def hierarchical(
    reward: Float[Tensor, " N"], group: Int[Tensor, " N"], budget: Int[Tensor, " N"], ideal: Float[Tensor, " N"], eps: float = 1e-6, ddof: int = 1
) -> Parts:  # fmt: skip
    """`advantages` for budgets whose values `ideal` are known: relative to the prompt's attempts, and the subgroup's mean below its ideal."""
    inter = standardize(reward, group, ddof, eps)
    subgroup = torch.unique(torch.stack([group, budget], 1), dim=0, return_inverse=True)[1]
    intra = torch.where(group_size(group) > 1, group_mean(reward, subgroup) - ideal.to(reward), torch.zeros_like(reward))
    return Parts(inter, intra, inter + intra)


def announced(content: Any, budget: int, announcement: str = ANNOUNCEMENT) -> Any:
    """A text with its budget, by a template with {budget} and {prompt}; of a list of messages the last is changed. Other content stays as it is."""
    if isinstance(content, str):
        return announcement.format(budget=budget, prompt=content)
    if isinstance(content, list) and content:
        return [*content[:-1], {**content[-1], "content": announcement.format(budget=budget, prompt=content[-1]["content"])}]
    return content


@dataclass
class BudgetedRollout:
    """The attempts at a prompt in equal subgroups, one a budget, which the prompt announces and the column `budget` repeats.

    Signals: `budget` [N]; `limit` [N], the hard limit of every attempt. `group` stays the prompt. Tasks whose prompts are no text read the column.
    """

    budgets: tuple[int, ...] = (8, 16, 32, 40)  # tokens, each in [1, max_len]
    max_len: int = 64  # hard limit in tokens, >= 1
    announcement: str = ANNOUNCEMENT  # template of the prompt with {budget} and {prompt}
    inner: Rollout = field(default_factory=OnPolicy)

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        count = len(self.budgets)
        if count == 0 or min(self.budgets) < 1 or max(self.budgets) > self.max_len:
            raise ValueError(f"rollout.budgets must lie between 1 and rollout.max_len ({self.max_len}), not {self.budgets}")
        uneven = [p.samples for p in prompts if p.samples % count]
        if uneven:
            raise ValueError(f"{uneven[0]} attempts cannot be dealt to {count} budgets; set select.group_size to a multiple of {count}")
        batch = self.inner([self.told(prompt, budget) for prompt in prompts for budget in self.budgets], run)
        batch.signals["budget"] = torch.tensor(self.budgets)[batch.group % count]
        batch.signals["limit"] = torch.full_like(batch.group, self.max_len)
        return batch.but(group=batch.group // count)

    def told(self, prompt: Prompt, budget: int) -> Prompt:
        """The prompt as its subgroup for one budget sees it."""
        return prompt.but(
            content=announced(prompt.content, budget, self.announcement), columns=prompt.columns | {"budget": budget},
            samples=prompt.samples // len(self.budgets), max_actions=self.max_len,
        )  # fmt: skip


@dataclass
class BudgetReward:
    """What an answer is worth by its length and its budget; leaves the budgets' own values in the signal `budget_value` [N].

    With several rewards the first says whether the answer is right. Needs the signal `budget` of `BudgetedRollout`.
    """

    beta: float = 4.0  # > 0, worth of a right answer without tokens
    alpha: float | None = None  # >= 0, price of a token of deviation from the budget; None = 1 / the hard limit

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        found = run.score_rewards(batch)
        outcome = found if found.dim() == 1 else found[:, 0] if batch.objectives else found.sum(1)
        batch.objectives = ()
        correct = torch.where(outcome < 0, -1, (outcome > RIGHT).long())
        limit, budget = batch.limit, batch.signal("budget")
        batch.signals["budget_value"] = budget_value(budget, self.beta, limit)
        run.log(correct=float((correct == 1).double().mean()))
        return reward(correct, batch.lengths, budget, self.beta, 1 / limit if self.alpha is None else self.alpha, limit)


@dataclass
class HierarchicalBudget:
    """Relative to all attempts at the prompt, plus how far the subgroup's mean reward is below its budget's value."""

    ddof: int = 1  # 0 population, 1 sample standard deviation
    eps: float = 1e-6  # > 0, added to the standard deviation

    compares_group = True

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        assert batch.reward is not None
        parts = hierarchical(batch.outcome, batch.group, batch.signal("budget"), batch.signal("budget_value"), self.eps, self.ddof)
        return broadcast(parts.advantages, batch.mask)


METHOD = GRPO.but(
    name="hbpo",
    paper=Paper("Hierarchical Budget Policy Optimization for Adaptive Reasoning", "2507.15844", 2025),
    summary="subgroups of attempts with token budgets of their own, compared with the budget's value and with one another",
    select=UniformPrompts(group_size=16),
    rollout=BudgetedRollout(),
    reward=BudgetReward(),
    credit=HierarchicalBudget(),
    objective=ClippedSurrogate(clip_low=0.2, clip_high=0.2, aggregation="token_mean"),
    regularize=(),
)
