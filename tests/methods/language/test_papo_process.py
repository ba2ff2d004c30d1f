"""PAPO (process-aware): what it reduces to, who receives process credit, rubrics, and the components in the loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.domains.language.toys.toy_arith import GruPolicy, ToyArith
from anypo.loops.on_policy import train
from anypo.methods.language import grpo
from anypo.methods.language.papo_process import METHOD, OutcomeAndProcess, advantages, arithmetic_rubric, rubric_score
from anypo.run import Run
from anypo.seams.reward import TaskReward
from tests.helpers import assert_resumes, assert_trains, trained


def rows(seed: int, count: int = 24, chance: float = 0.5) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    outcome = torch.bernoulli(torch.full((count,), chance, dtype=torch.float64), generator=g)
    return torch.stack([outcome, torch.rand(count, generator=g, dtype=torch.float64)], dim=1), torch.randperm(count, generator=g) % 4


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), ddof=st.sampled_from([0, 1]))
def test_lam_zero_and_constant_scores_are_grpo(seed: int, ddof: int) -> None:
    reward, group = rows(seed)
    plain = grpo.advantages(reward[:, 0], group, ddof=ddof)
    assert torch.equal(advantages(reward, group, lam=0.0, ddof=ddof).advantages, plain)
    flat = torch.stack([reward[:, 0], torch.full_like(reward[:, 0], 0.1)], dim=1)
    assert torch.equal(advantages(flat, group, ddof=ddof).advantages, plain)


def test_at_most_one_right_answer_in_every_group_is_grpo() -> None:
    reward = torch.tensor([[1.0, 0.3], [0.0, 0.9], [0.0, 0.1], [0.0, 0.5]], dtype=torch.float64)
    group = torch.tensor([0, 0, 1, 1])
    assert torch.equal(advantages(reward, group, ddof=1).advantages, grpo.advantages(reward[:, 0], group, ddof=1))


def test_all_right_is_grpo_on_the_process_score() -> None:
    reward, group = rows(0, chance=1.0)
    assert torch.equal(advantages(reward, group).advantages, grpo.advantages(reward[:, 1], group))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), lam=st.floats(0, 3))
def test_the_process_part_ranks_the_right_and_ignores_the_wrong(seed: int, lam: float) -> None:
    reward, group = rows(seed)
    right = reward[:, 0] == 1
    parts = advantages(reward, group, lam)
    assert parts.process[~right].eq(0).all()
    assert torch.zeros(4, dtype=torch.float64).index_add(0, group, parts.process).abs().max() < 1e-9
    hacked = reward.clone()
    hacked[~right, 1] = 100.0
    assert torch.equal(advantages(hacked, group, lam).advantages, parts.advantages)


def test_lone_and_all_wrong_groups_are_zero() -> None:
    reward = torch.tensor([[1.0, 0.3], [0.0, 0.9], [0.0, 0.1]], dtype=torch.float64)
    assert advantages(reward, torch.tensor([0, 1, 1])).advantages.eq(0).all()


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("3+4=7; 7*2=14", (1.0, 1.0, 1.0)),
        ("3+4=8; 7*2=14", (0.5, 0.5, 1.0)),
        ("3+4=7; 3+4=7", (1.0, 0.5, 0.5)),
        ("10 - 4 = 6", (1.0, 1.0, 1.0)),
        ("the answer is 7", (0.0, 0.0, 0.0)),
    ],
)
def test_arithmetic_rubric(text: str, items: tuple[float, ...]) -> None:
    assert arithmetic_rubric(text) == items
    assert rubric_score(torch.tensor([items])).item() == pytest.approx(sum(items) / 3)


def test_the_rubric_is_asked_for_right_answers_alone() -> None:
    asked: list[str] = []

    def rubric(text: str) -> tuple[float, ...]:
        asked.append(text)
        return (1.0, 0.0)

    mask = torch.ones(3, 1, dtype=torch.bool)
    batch = Batch(torch.zeros(3, 1, dtype=torch.int64), mask, torch.zeros(3, 1), torch.zeros(3, dtype=torch.int64))
    batch.signals |= {"completion": ["a", "b", "c"], "task_reward": torch.tensor([1.0, 0.0, 1.0])}
    task = TokenBandit()
    reward = OutcomeAndProcess(rubric)(batch, Run(METHOD, task.policy(), task, steps=1))
    assert asked == ["a", "c"] and reward.tolist() == [[1.0, 0.5], [0.0, 0.0], [1.0, 0.5]] and batch.objectives == ("outcome", "process")


def two_rewards(prompt: Tensor, action: Tensor, mask: Tensor) -> Tensor:
    return torch.stack([(action[:, 0] == 1).double(), (action == 2).double().mean(1)], dim=1)


def test_the_loop_trains_on_two_rewards_and_on_written_steps() -> None:
    run = assert_trains(METHOD, reward=two_rewards, objectives=("outcome", "process"))
    assert {"reward/outcome", "reward/process", "process_signal"} <= run.history[-1].keys()
    policy, task = GruPolicy(hidden=16), ToyArith(small=True, steps=True)
    run = train(Run(METHOD.set("select.prompts", 8), policy, task, steps=2))
    assert all(torch.isfinite(p).all() for p in policy.parameters()) and "reward/process" in run.history[-1]


def test_tasks_without_a_process_score_are_refused() -> None:
    with pytest.raises(ValueError, match="no process score"):
        trained(METHOD, 1)
    with pytest.raises(ValueError, match="two rewards"):
        trained(METHOD.but(reward=TaskReward()), 1)


def test_a_stopped_run_continues_identically(tmp_path: Path) -> None:
    assert_resumes(METHOD, tmp_path, reward=two_rewards, objectives=("outcome", "process"))
