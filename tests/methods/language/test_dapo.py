"""DAPO: dynamic sampling with any kind of reward, overlong shaping, and the component in the loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.methods.language.dapo import METHOD, DynamicSampling, OverlongShaping
from anypo.run import Run
from anypo.task import Prompt
from tests.helpers import assert_resumes, assert_trains, trained


class Scripted:
    """A rollout whose groups have contrast or not by script: one list of 0/1 for each round, one entry a prompt."""

    def __init__(self, *rounds: list[int]) -> None:
        self.rounds, self.asked = list(rounds), list[int]()

    def __call__(self, prompts: list[Prompt], run: Run) -> Batch:
        self.asked.append(len(prompts))
        batch = run.collect(prompts)
        script = torch.tensor(self.rounds.pop(0))
        first = torch.cat([torch.ones(1, dtype=torch.bool), batch.group[1:] != batch.group[:-1]])
        batch.signals["task_reward"] = (script[batch.group] * first).double()
        return batch


def sampled(*rounds: list[int], max_rounds: int = 3) -> tuple[Scripted, Batch]:
    task = TokenBandit(prompts=4)
    inner = Scripted(*rounds)
    method = METHOD.but(rollout=DynamicSampling(inner, max_rounds))
    run = Run(method, task.policy(), task, steps=1)
    return inner, method.rollout(method.select(task, run), run)


def test_prompts_without_contrast_are_replaced_until_the_batch_is_full() -> None:
    inner, batch = sampled([1, 0, 1, 0], [0, 1], [1])
    assert inner.asked == [4, 2, 1]
    assert len(batch) == 4 * 8 and len(torch.unique(batch.group)) == 4
    for g in torch.unique(batch.group):
        assert len(torch.unique(batch.signals["task_reward"][batch.group == g])) == 2
        assert len(torch.unique(batch.signals["prompt_id"][batch.group == g])) == 1


def test_a_full_first_round_is_the_only_one() -> None:
    inner, batch = sampled([1, 1, 1, 1])
    assert inner.asked == [4] and len(batch) == 32


def test_it_ends_with_what_there_is() -> None:
    inner, batch = sampled([0, 0, 1, 0], [0, 0, 0], [0, 0, 0])
    assert inner.asked == [4, 3, 3] and len(batch) == 8
    _, nothing = sampled([0, 0, 0, 0], [0, 0, 0, 0], max_rounds=2)
    assert len(nothing) == 32 and nothing.signals["task_reward"].eq(0).all()


@pytest.mark.parametrize(
    ("reward", "objectives", "useful"),
    [
        ([[1.0, 0.0], [0.0, 1.0]], ("a", "b"), True),  # two objectives that cancel in the sum
        ([[1.0, 0.0], [1.0, 0.0]], ("a", "b"), False),
        ([[1.0, 0.0], [0.0, 1.0]], (), False),  # the same dense total
        ([[1.0, 0.0], [1.0, 1.0]], (), True),
        ([0.5, 0.5], (), False),
    ],
)
def test_contrast_of_every_kind_of_reward(reward: list, objectives: tuple[str, ...], useful: bool) -> None:
    mask = torch.ones(2, 2, dtype=torch.bool)
    batch = Batch(action=mask.long(), mask=mask, logp=mask.double(), group=torch.tensor([3, 3]), objectives=objectives)
    batch.signals["task_reward"] = torch.tensor(reward)
    task = TokenBandit()
    run = Run(METHOD, task.policy(), task, steps=1)
    assert DynamicSampling().contrast(batch, run).tolist() == [useful] * 2


def shaped(reward: Tensor, objectives: tuple[str, ...] = (), limit: int | None = None) -> Tensor:
    mask = torch.arange(10) < torch.tensor([3, 9, 10])[:, None]
    batch = Batch(action=mask.long(), mask=mask, logp=mask.double(), group=torch.zeros(3, dtype=torch.int64), objectives=objectives)
    if limit is not None:
        batch.signals["limit"] = torch.full((3,), limit)
    return OverlongShaping(inner=lambda batch, run: reward, coefficient=2.0)(batch, None)  # type: ignore[arg-type]


def test_shaping_of_every_kind_of_reward() -> None:
    penalty = torch.tensor([0.0, -1.0, -2.0], dtype=torch.float64)  # buffer of 2 tokens before 10, coefficient 2
    torch.testing.assert_close(shaped(torch.ones(3, dtype=torch.float64)), 1 + penalty)
    several = shaped(torch.ones(3, 2, dtype=torch.float64), ("a", "b"))
    torch.testing.assert_close(several.sum(1), 2 + penalty)
    dense = shaped(torch.zeros(3, 10, dtype=torch.float64))
    torch.testing.assert_close(dense.sum(1), penalty)
    assert dense[1, 8] == -1 and dense[2, 9] == -2


def test_shaping_counts_from_the_tasks_limit_not_from_the_longest_response() -> None:
    assert shaped(torch.ones(3, dtype=torch.float64), limit=64).eq(1).all()


@pytest.mark.parametrize("task", [{}, {"eos": 0, "horizon": 3}, {"targets": 2}])
def test_the_loop_trains(task: dict) -> None:
    run = assert_trains(METHOD, **task)
    assert all(r["sampling_rounds"] <= 3 and 0 <= r["prompts_with_contrast"] <= 1 for r in run.history)


def test_a_task_without_contrast_does_not_stop_the_run() -> None:
    run = trained(METHOD, 2, reward=lambda prompt, action, mask: torch.ones(len(prompt), dtype=torch.float64))
    assert run.history[-1]["prompts_with_contrast"] == 0 and run.history[-1]["grad_norm"] == 0


def test_a_stopped_run_continues_identically(tmp_path: Path) -> None:
    assert_resumes(METHOD, tmp_path)
