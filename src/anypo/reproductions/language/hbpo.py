"""Claims of HBPO on len_arith, a problem whose answers need thinking tokens: easy prompts about 4, hard ones about 30 (32 prompts, half hard).

The policy is a table: logits over the lengths 2, 6, ..., 62 are f[difficulty] + g[budget], with g = 0 where no budget is told, so that what is
learned under budgets reaches unprompted lengths through f. Lengths and accuracies are exact expectations without a budget."""

from __future__ import annotations

from functools import cache
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.method import Method
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.methods.language.hbpo import METHOD as HBPO
from anypo.methods.language.hbpo import budget_value, reward
from anypo.policy import Policy, Signals
from anypo.reproductions.common import plain_sgd, train_on
from anypo.run import Run
from anypo.seams.select import UniformPrompts
from anypo.task import Prompt

LENGTHS = torch.arange(2, 63, 4).double()
BUDGETS, MAX_LEN, BETA = (8, 16, 32, 40), 64, 4.0
NEEDED = torch.tensor([4.0, 30.0], dtype=torch.float64)  # tokens, easy and hard
STEPS = 400


def chance(difficulty: Tensor | int, length: Tensor) -> Tensor:
    """Probability of a right answer."""
    return 0.01 + 0.98 * torch.sigmoid((length - NEEDED[difficulty]) / 0.7)


class LengthTable(Policy):
    """Chooses a number of tokens; context [N,2] is (difficulty, 0 or 1 + the budget's index). The choice is the first action."""

    provides = frozenset({"logp"})
    optimizer = "sgd"

    def __init__(self) -> None:
        super().__init__()
        self.by_difficulty = nn.Parameter((-(((LENGTHS - 16) / 10) ** 2) / 2).repeat(2, 1))
        self.by_budget = nn.Parameter(torch.stack([-(((LENGTHS - b) / 12) ** 2) / 2 for b in BUDGETS]))

    def table(self) -> Tensor:
        """Log-probs [difficulty, 1 + budgets, lengths]."""
        told = torch.cat([torch.zeros_like(self.by_budget[:1]), self.by_budget])
        return (self.by_difficulty[:, None] + told[None]).log_softmax(-1)

    def evaluate(self, batch: Batch, needs: Any) -> Signals:
        chosen = self.table()[batch.context[:, 0], batch.context[:, 1]].gather(1, batch.action[:, :1])
        return Signals(logp=nn.functional.pad(chosen, (0, batch.horizon - 1)))


class LenArith:
    """The task: prompt i is hard when i is odd."""

    name = "len_arith"
    objectives = ("reward",)
    prompts_per_step = 32

    def prompts(self, count: int, rng: np.random.Generator) -> list[Prompt]:
        return [Prompt(id=i, content=i % 2) for i in range(count)]

    def collect(self, prompts: list[Prompt], run: Run) -> Batch:
        group = torch.tensor([g for g, p in enumerate(prompts) for _ in range(p.samples)])
        told = [1 + BUDGETS.index(p.columns["budget"]) if "budget" in p.columns else 0 for p in prompts]
        context = torch.tensor([[p.content, b] for p, b in zip(prompts, told, strict=True)])[group]
        log_probs = run.policy.table()[context[:, 0], context[:, 1]].detach()  # type: ignore[operator]
        choice = torch.multinomial(log_probs.exp(), 1, generator=run.generator)
        length = LENGTHS[choice[:, 0]]
        horizon = int(LENGTHS[-1])
        logp = nn.functional.pad(log_probs.gather(1, choice), (0, horizon - 1))
        signals = {
            "prompt_id": torch.tensor([p.id for p in prompts])[group],
            "right": torch.bernoulli(chance(context[:, 0], length), generator=run.generator),
        }
        return Batch(
            action=nn.functional.pad(choice, (0, horizon - 1)), mask=torch.arange(horizon) < length[:, None], logp=logp, group=group,
            context=context, version=torch.full((len(group),), run.version), signals=signals,
        )  # fmt: skip

    def score(self, batch: Batch, run: Run) -> Tensor:
        return batch.signals["right"]

    def evaluate(self, run: Run) -> dict[str, float]:
        return {"pass@1": fmean(unprompted(run.policy)[1])}  # type: ignore[arg-type]


def unprompted(policy: LengthTable) -> tuple[list[float], list[float]]:
    """Mean length and accuracy, [easy, hard] each, without a budget."""
    probability = policy.table()[:, 0].detach().exp()
    return (probability @ LENGTHS).tolist(), [float(probability[d] @ chance(d, LENGTHS)) for d in (0, 1)]


class LengthPenalty:
    """The task's reward minus a price for every token."""

    price = 0.03

    def __call__(self, batch: Batch, run: Run) -> Tensor:
        return run.score_rewards(batch) - self.price * batch.lengths


METHODS: dict[str, Method] = {
    "HBPO": HBPO,
    "GRPO": GRPO.but(regularize=()),
    "penalty": GRPO.but(reward=LengthPenalty(), regularize=()),
}


@cache
def trained(kind: str, seed: int) -> LengthTable:
    """400 steps of SGD 1.0 on the mean over rows of the choice's log-prob times its advantage (16 attempts at each prompt)."""
    policy = LengthTable()
    method = plain_sgd(METHODS[kind], 1.0).but(select=UniformPrompts(group_size=16))
    method = method.set("objective.aggregation", "constant").set("objective.max_len", 1)
    train_on(method, policy, LenArith(), steps=STEPS, seed=seed, watch=lambda run, batch: None)  # type: ignore[arg-type]
    return policy


def means(kind: str, seeds: range = range(3)) -> dict[str, float]:
    runs = [unprompted(trained(kind, seed)) for seed in seeds]
    names = ("easy tokens", "hard tokens", "easy accuracy", "hard accuracy")
    return {name: round(fmean([*length, *accuracy][i] for length, accuracy in runs), 3) for i, name in enumerate(names)}


def _adapts(kind: str) -> Evidence:
    mine, plain = means(kind), means("GRPO")
    holds = (
        mine["hard tokens"] - mine["easy tokens"] > 8
        and mine["easy tokens"] <= 0.7 * plain["easy tokens"]
        and all(mine[f"{d} accuracy"] >= plain[f"{d} accuracy"] - 0.02 for d in ("easy", "hard"))
    )
    text = "hard minus easy above 8 tokens, easy at most 0.7 of GRPO's, accuracy within 2 points"
    return Evidence({"HBPO": mine, "GRPO": plain} if kind == "HBPO" else {kind: mine}, text, holds)


@claim("HBPO learns to answer easy prompts with at most 0.7 of GRPO's tokens and keeps its accuracy on both kinds", slow=True)
def adapts() -> Evidence:
    return _adapts("HBPO")


@ablation(adapts, "plain GRPO, no budgets and no length in the reward")
def adapts_without_budgets() -> Evidence:
    return _adapts("GRPO")


def _keeps_hard(kind: str) -> Evidence:
    worst = [min(accuracy) for accuracy in zip(*(unprompted(trained(kind, seed))[1] for seed in range(3)), strict=True)]
    found = {"easy": round(worst[0], 3), "hard": round(worst[1], 3)}
    return Evidence(found, "worst of 3 seeds above 0.95 on both kinds", min(worst) > 0.95)


@claim("HBPO shortens answers without losing accuracy on easy or hard prompts in any seed", slow=True)
def keeps_hard_prompts() -> Evidence:
    return _keeps_hard("HBPO")


@ablation(keeps_hard_prompts, "a plain length penalty of 0.03 a token")
def loses_hard_prompts() -> Evidence:
    return _keeps_hard("penalty")


def _bounded(capped: bool) -> Evidence:
    """All lengths and budgets of right answers: is the reward within the budget's value, and does it fall with length beyond the budget?"""
    length, above, falling = torch.arange(1, MAX_LEN + 1), 0, True
    for budget in range(1, MAX_LEN + 1):
        told = torch.full_like(length, budget)
        ideal = budget_value(told, BETA, MAX_LEN)
        value = reward(torch.ones_like(length), length, told, BETA, 1 / MAX_LEN, MAX_LEN)
        if not capped:
            value = budget_value(length, BETA, MAX_LEN) - (length - told).abs() / MAX_LEN
        above += int((value > ideal + 1e-12).sum())
        falling &= bool((value[budget - 1 :].diff() <= 1e-12).all())
    return Evidence(
        {"above the budget's value": above, "falls beyond the budget": falling}, "none above, always falling", above == 0 and falling
    )


@claim("the reward never exceeds the budget's value and does not rise with length beyond the budget")
def bounded() -> Evidence:
    return _bounded(True)


@ablation(bounded, "no cap at the budget's value")
def bounded_without_cap() -> Evidence:
    return _bounded(False)


def expected_rewards(policy: LengthTable, differentiated: bool) -> Tensor:
    """[difficulty, budget] expected reward of the attempts told each budget; without `differentiated` a right answer counts 1."""
    found = torch.zeros(2, len(BUDGETS), dtype=torch.float64)
    for d in (0, 1):
        for k, budget in enumerate(BUDGETS):
            value = chance(d, LENGTHS)
            if differentiated:
                value = value * reward(torch.ones_like(LENGTHS), LENGTHS, torch.full_like(LENGTHS, budget), BETA, 1 / MAX_LEN, MAX_LEN)
            found[d, k] = policy.table()[d, k + 1].detach().exp() @ value
    return found


def _ordered(differentiated: bool) -> Evidence:
    mean = torch.stack([expected_rewards(trained("HBPO", seed), differentiated) for seed in range(3)]).mean(0)
    easy, hard = ({b: round(float(v), 2) for b, v in zip(BUDGETS, row, strict=True)} for row in mean)
    holds = hard[32] > max(hard[8], hard[16]) + 0.1 and easy[8] > easy[32] + 0.1 and easy[32] > easy[40] + 0.1
    return Evidence({"easy": easy, "hard": hard}, "hard: 32 above 8 and 16; easy: 8 above 32 above 40, by 0.1", holds)


@claim("after training the large budget pays most on hard prompts and the small one on easy prompts", slow=True)
def budgets_pay_by_difficulty() -> Evidence:
    return _ordered(True)


@ablation(budgets_pay_by_difficulty, "a right answer counts 1, whatever its length and budget")
def budgets_without_differentiated_reward() -> Evidence:
    return _ordered(False)
