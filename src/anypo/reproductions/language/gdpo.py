"""Claims of GDPO with two rewards, a right answer and its format, on token_bandit (P=16, V=4, T=2)."""

from __future__ import annotations

import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.claims import Evidence, ablation, claim
from anypo.domains.language.toys.token_bandit import TabularTokens, TokenBandit
from anypo.method import Credit
from anypo.methods.language.gdpo import METHOD as GDPO
from anypo.methods.language.gdpo import DecoupledNormalization, advantages, reward_combination
from anypo.reproductions.common import BANDIT_STEP, ShuffledCredit, plain_sgd, train_on
from anypo.run import Run
from anypo.seams.credit import GroupRelative

SEEDS = (0, 1, 2)


def _two_groups(decoupled: bool) -> Evidence:
    """Groups of two with two binary rewards each: the better response of the first earns one of them, that of the second both."""
    reward = torch.tensor([[0, 0], [0, 1], [0, 0], [1, 1]], dtype=torch.float64)
    group = torch.tensor([0, 0, 1, 1])
    total = advantages(reward, group, (1, 1), batch_norm=False) if decoupled else reward_combination(reward, group, (1, 1))
    found = {"one reward": round(float(total[1]), 4), "both rewards": round(float(total[3]), 4)}
    return Evidence(found, "both rewards earn a clearly larger advantage than one", float(total[3]) > 1.5 * float(total[1]))


@claim(
    "a response that earns two rewards gets a larger advantage in its group than one that earns one, where summing first makes them equal"
)
def distinguishes_totals() -> Evidence:
    return _two_groups(decoupled=True)


@ablation(distinguishes_totals, "rewards are summed before they are normalized")
def totals_look_alike() -> Evidence:
    return _two_groups(decoupled=False)


def format_bandit(seed: int, conflict: bool = False) -> TokenBandit:
    """Two rewards. `correct`: the first token is the target's; `format`: the last one is. With `conflict`, `correct` is the whole target and
    `format` a first token which the target does not begin with: easier to find, and no response earns both."""
    task = TokenBandit(seed=seed, objectives=("correct", "format"))
    targets = task.targets[:, 0]

    def rewards(prompt: Tensor, action: Tensor, mask: Tensor) -> Tensor:
        right = action == targets[prompt]
        if conflict:
            wrong_start = action[:, 0] == (targets[prompt, 0] + 1) % task.vocabulary
            return torch.stack([right.all(-1), wrong_start], dim=1).double()
        return right.double()

    task.reward_function = rewards
    return task


def _both(task: TokenBandit, policy: TabularTokens) -> tuple[float, float]:
    with torch.no_grad():
        correct, form = task.expected_reward(policy).mean(0).tolist()
    return correct, form


def _learns_both(credit: Credit) -> Evidence:
    """Worst exact chances of both rewards after 80 steps, and the mean number of distinct advantages in the first 20 batches, against RC's."""
    chances, own, summed = [], [], []

    def distinct(run: Run, batch: Batch) -> None:
        assert batch.advantage is not None and batch.reward is not None
        if run.step <= 20:
            own.append(_distinct(batch.advantage[:, 0]))
            summed.append(_distinct(reward_combination(batch.reward, batch.group, (1, 1))))

    for seed in SEEDS:
        task = format_bandit(seed)
        policy = task.policy()
        train_on(plain_sgd(GDPO.but(credit=credit), BANDIT_STEP), policy, task, steps=80, seed=seed, watch=distinct)
        chances.append(_both(task, policy))
    found = {
        "correct": round(min(c for c, _ in chances), 3),
        "format": round(min(f for _, f in chances), 3),
        "distinct advantages": round(sum(own) / len(own), 1),
        "distinct if summed first": round(sum(summed) / len(summed), 1),
    }
    holds = min(map(min, chances)) > 0.9 and sum(own) > 1.1 * sum(summed)
    return Evidence(found, "both above 0.9 (worst of 3 seeds), at least 10% more distinct advantages than if summed first", holds)


def _distinct(values: Tensor) -> int:
    return len(torch.unique(values.round(decimals=9)))


@claim("GDPO learns both rewards of token_bandit to above 0.9 and tells more combinations of rewards apart than summing them first")
def learns_both() -> Evidence:
    return _learns_both(DecoupledNormalization())


@ablation(learns_both, "rewards are summed before they are normalized")
def learns_with_summed_rewards() -> Evidence:
    return _learns_both(GroupRelative())


@ablation(learns_both, "advantages dealt to the wrong rows")
def learns_without_credit() -> Evidence:
    return _learns_both(ShuffledCredit(DecoupledNormalization()))


def _farming(conditions: tuple[tuple[float, ...], ...]) -> Evidence:
    found = []
    for seed in SEEDS:
        task = format_bandit(seed, conflict=True)
        policy = task.policy()
        method = plain_sgd(GDPO.but(credit=DecoupledNormalization(conditions=conditions)), BANDIT_STEP)
        train_on(method, policy, task, steps=80, seed=seed, watch=lambda run, batch: None)
        found.append(_both(task, policy)[0])
    return Evidence(round(min(found), 3), "chance of a right answer above 0.9, worst of 3 seeds", min(found) > 0.9)


@claim(
    "an easy reward made conditional on the hard one cannot be farmed: the right answer is learned although a wrong one is easier to reward"
)
def conditioning_stops_farming() -> Evidence:
    return _farming(((1, 0, 1.0),))


@ablation(conditioning_stops_farming, "the easy reward counts always")
def farming_without_condition() -> Evidence:
    return _farming(())
