"""TIAR: lam = 0 is ternary GRPO, groups without attempts, verdicts of tasks and texts, and the components in the loop."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.domains.language.toys.toy_arith import ABSTAIN, GruPolicy, ToyArith
from anypo.loops.on_policy import train
from anypo.methods.language import grpo
from anypo.methods.language.tiar import (
    METHOD,
    TrajectoryInformed,
    abstention_bonus,
    advantages,
    confidence,
    majority_share,
    metrics,
    verdicts,
)
from anypo.run import Run
from anypo.task import Prompt
from tests.helpers import trained


def rows(seed: int, count: int = 24) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, (count,), generator=g), torch.randperm(count, generator=g) % 4


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000))
def test_lam_zero_is_ternary_grpo(seed: int) -> None:
    outcome, group = rows(seed)
    assert torch.equal(advantages(outcome, group, lam=0.0), grpo.advantages(outcome.double(), group))


def test_half_confidence_and_no_abstention_change_nothing() -> None:
    group = torch.zeros(4, dtype=torch.int64)
    for outcome in ([0, 1, -1, 0], [1, 1, -1, -1], [1, 1, 1, -1]):
        verdict = torch.tensor(outcome)
        assert torch.equal(advantages(verdict, group, lam=3.0), grpo.advantages(verdict.double(), group))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), lam=st.floats(0, 3))
def test_only_abstaining_rows_move_and_by_at_most_lam(seed: int, lam: float) -> None:
    outcome, group = rows(seed)
    moved = advantages(outcome, group, lam=lam) - grpo.advantages(outcome.double(), group)
    assert moved[outcome != 0].eq(0).all() and (moved.abs() <= lam + 1e-12).all()


def test_confidence_counts_attempts_alone() -> None:
    outcome, group = torch.tensor([0, 0, 1, -1, -1, -1, 0, 0]), torch.tensor([0, 0, 0, 0, 0, 0, 1, 1])
    assert confidence(outcome, group).tolist() == [0.25] * 6 + [-1.0] * 2


def test_a_group_that_abstains_throughout_gets_nothing_or_the_given_bonus() -> None:
    outcome, group = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    assert advantages(outcome, group).eq(0).all()
    assert abstention_bonus(outcome, confidence(outcome, group), 1.0, 0.3).tolist() == pytest.approx([0.3] * 3)


def test_an_abstainer_among_wrong_answers_gets_the_full_bonus() -> None:
    outcome, group = torch.tensor([0, -1, -1, -1]), torch.zeros(4, dtype=torch.int64)
    moved = advantages(outcome, group, lam=0.7) - advantages(outcome, group, lam=0.0)
    assert moved.tolist() == pytest.approx([0.7, 0, 0, 0])


def test_majority_needs_no_labels() -> None:
    outcome, group = torch.tensor([0, -1, -1, 1, -1, 0]), torch.tensor([0, 0, 0, 0, 0, 1])
    share = majority_share(torch.tensor([5, 3, 3, 4, 3, 5]), outcome, group)
    assert share.tolist() == [0.75] * 5 + [-1.0]


def test_metrics_of_empty_cases_are_zero() -> None:
    assert metrics(torch.tensor([1, 1]), torch.tensor([0, 0])) == (0.0, 0.0, 0.0, 1.0)
    assert metrics(torch.tensor([0, 0]), torch.tensor([1, 1])) == (1.0, 1.0, 1.0, 0.0)


class Abstaining(TokenBandit):
    """Token 3 as the first token abstains."""

    def collect(self, prompts: list[Prompt], run: Run) -> Batch:
        batch = super().collect(prompts, run)
        batch.signals["abstained"] = batch.action[:, 0] == 3
        return batch


def often_abstaining() -> tuple[GruPolicy, ToyArith]:
    """An untrained policy that likes to write the abstention and to stop."""
    policy = GruPolicy(hidden=16)
    with torch.no_grad():
        policy.output.bias[policy.encode(ABSTAIN)] += 3
        policy.output.bias[policy.eos] += 3
    return policy, ToyArith(small=True, unanswerable=0.3)


def test_the_loop_trains_where_tasks_say_who_abstained() -> None:
    for method in (METHOD, METHOD.set("credit.confidence", "majority"), METHOD.but(reward=grpo.METHOD.reward)):
        task = Abstaining(prompts=4)
        run = train(Run(method, task.policy(scale=0.1), task, steps=4))
        assert torch.isfinite(run.policy.logits).all()
    policy, arithmetic = often_abstaining()
    run = train(Run(METHOD.set("select.prompts", 8), policy, arithmetic, steps=2))
    assert all(torch.isfinite(p).all() for p in policy.parameters()) and "abstained" in run.history[-1]


def test_abstaining_from_an_unanswerable_prompt_is_right_unless_labels_are_not_trusted() -> None:
    policy, task = often_abstaining()
    run = Run(METHOD, policy, task, steps=1)
    batch = run.collect([p.but(samples=4) for p in task.problems])
    abstained, answerable = batch.signals["abstained"], batch.signals["answerable"]
    assert bool((abstained & answerable).any()) and bool((abstained & ~answerable).any())
    trusting, blind = verdicts(batch, run), verdicts(batch, run, trust_labels=False)
    assert (trusting[abstained & ~answerable] == 1).all() and (trusting[abstained & answerable] == 0).all()
    assert torch.equal(blind == 0, abstained)


def test_words_abstain_too() -> None:
    mask = torch.ones(4, 1, dtype=torch.bool)
    texts = ["I don't know.", "42", "This cannot be determined", "I know: 7"]
    batch = Batch(torch.zeros(4, 1, dtype=torch.int64), mask, torch.zeros(4, 1), torch.zeros(4, dtype=torch.int64))
    batch.signals |= {"completion": texts, "task_reward": torch.tensor([0.0, 1.0, 0.0, 0.0])}
    task = TokenBandit()
    assert verdicts(batch, Run(METHOD, task.policy(), task, steps=1)).tolist() == [0, 1, 0, -1]


def test_tasks_without_abstention_and_unknown_confidences_are_refused() -> None:
    with pytest.raises(ValueError, match="who abstained"):
        trained(METHOD, 1)
    task = Abstaining(prompts=4)
    with pytest.raises(ValueError, match="success or majority"):
        train(Run(METHOD.but(credit=TrajectoryInformed(confidence="vote")), task.policy(), task, steps=1))
