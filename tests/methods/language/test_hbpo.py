"""HBPO: what it reduces to, the shape of its reward, announced budgets, and the components in the loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from anypo.domains.language.models import load_policy
from anypo.domains.language.tasks import make_task
from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.loops.on_policy import train
from anypo.method import Method
from anypo.methods.language import grpo
from anypo.methods.language.hbpo import METHOD, advantages, announced, budget_value, reward
from anypo.run import Run
from tests.helpers import assert_resumes, assert_trains


def test_one_budget_met_exactly_has_no_advantage() -> None:
    budget = torch.full((6,), 16)
    value = reward(torch.ones(6), budget, budget)
    assert torch.equal(value, budget_value(budget, 4.0, 64))
    found = advantages(value, torch.tensor([0, 0, 0, 1, 1, 1]), budget)
    assert found.inter.eq(0).all()
    torch.testing.assert_close(found.intra, torch.zeros(6, dtype=torch.float64), atol=1e-12, rtol=0)  # a mean of equal numbers rounds


def test_all_wrong_pushes_small_budgets_down_most() -> None:
    budget, group = torch.tensor([8, 16, 32, 40]), torch.zeros(4, dtype=torch.int64)
    found = advantages(torch.zeros(4, dtype=torch.float64), group, budget)
    assert found.inter.eq(0).all() and torch.equal(found.intra, -budget_value(budget, 4.0, 64))
    assert (found.advantages.diff() > 0).all()


def test_a_budget_at_the_limit_pays_nothing() -> None:
    length = torch.arange(1, 65)
    value = reward(torch.ones(64), length, torch.full((64,), 64), alpha=0.0)
    assert float(value.max()) <= 1e-12


def test_without_the_budget_part_it_is_grpo() -> None:
    value, group = torch.randn(8, generator=torch.Generator().manual_seed(0), dtype=torch.float64), torch.arange(8) % 2
    assert torch.equal(advantages(value, group, torch.full((8,), 8)).inter, grpo.advantages(value, group, ddof=1))


def test_a_lone_attempt_has_no_advantage() -> None:
    found = advantages(torch.tensor([3.0, 1.0, 0.0]).double(), torch.tensor([0, 1, 1]), torch.tensor([8, 8, 8]))
    assert found.advantages[0] == 0 and found.advantages[1:].ne(0).all()


def test_wrong_unreadable_and_overlong_answers() -> None:
    length, budget = torch.tensor([8, 8, 65, 8]), torch.full((4,), 8)
    value = reward(torch.tensor([0, -1, 1, 1]), length, budget)
    assert value[:3].tolist() == [0.0, -1.0, 0.0] and value[3] == budget_value(torch.tensor(8), 4.0, 64)


def test_announcing() -> None:
    assert announced("2+2=", 8, "<{budget}>{prompt}") == "<8>2+2="
    talk = [{"role": "system", "content": "s"}, {"role": "user", "content": "a{b}"}]
    assert announced(talk, 16, "{prompt}|{budget}") == [talk[0], {"role": "user", "content": "a{b}|16"}]
    assert talk[1]["content"] == "a{b}" and announced(7, 8) == 7


def test_every_prompt_is_attempted_under_every_budget() -> None:
    policy, task = load_policy("builtin"), make_task("arithmetic", max_tokens=8)
    method = METHOD.set("select.prompts", 2).set("select.group_size", 8).set("rollout.max_len", 20).set("rollout.budgets", (4, 6, 8, 10))
    run = Run(method, policy, task, steps=1)
    batch = method.rollout(method.select(task, run), run)
    assert batch.group.tolist() == [0] * 8 + [1] * 8
    assert batch.signals["budget"].tolist() == [4, 4, 6, 6, 8, 8, 10, 10] * 2
    assert batch.limit == 20 and int(batch.lengths.max()) <= 20
    assert len(torch.unique(batch.signals["prompt_id"])) == 2
    assert all(str(b) in text for b, text in zip(batch.signals["budget"].tolist(), batch.signals["prompt_text"], strict=True))
    value = method.reward(batch, run)
    batch.reward = value
    assert (value <= batch.signals["budget_value"] + 1e-12).all() and torch.isfinite(method.credit(batch, run)).all()


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (METHOD.set("select.group_size", 6), "multiple of 4"),
        (METHOD.set("rollout.budgets", (8, 100, 16, 32)), "between 1 and"),
        (METHOD.set("rollout.budgets", ()), "between 1 and"),
    ],
)
def test_budgets_that_cannot_be_dealt_are_refused(method: Method, words: str) -> None:
    task = TokenBandit(2)
    run = Run(method, task.policy(), task, steps=1)
    with pytest.raises(ValueError, match=words):
        method.rollout(method.select(task, run), run)


def test_several_rewards_become_one() -> None:
    def two(prompt: torch.Tensor, action: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.stack([(action[:, 0] == 1).double(), 10.0 * (action[:, 1] == 1).double()], dim=1)

    task = TokenBandit(2, 3, 2, reward=two, objectives=("right", "form"))
    run = train(Run(METHOD, task.policy(scale=0.1), task, steps=2))
    assert torch.isfinite(run.policy.logits).all() and "reward/form" not in run.history[-1]


def test_it_trains_and_resumes(tmp_path: Path) -> None:
    assert_trains(METHOD)
    assert_resumes(METHOD, tmp_path)
