"""Continuing trajectories from their middle: every task keeps the beginning, draws a new ending and counts only that; steps of a trajectory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from anypo.batch import Batch
from anypo.domains.language.models import load_policy
from anypo.domains.language.tasks import make_task
from anypo.domains.language.toys.key_chain import make_key_chain
from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.domains.language.toys.toy_arith import make_toy_arith
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.run import Run
from anypo.seams.rollout import as_roots, continue_rows, step_starts, steps_of


def bandit(**options: Any) -> tuple[Any, Any]:
    task = TokenBandit(4, 4, 4, **options)
    return task.policy(scale=0.5, autoregressive=True), task


def text() -> tuple[Any, Any]:
    return load_policy("builtin"), make_task("chain", max_tokens=12)


TASKS = {
    "token_bandit": bandit,
    "token_bandit with an end token": lambda: bandit(eos=0),
    "key_chain": lambda: make_key_chain(4, 5),
    "toy_arith": lambda: make_toy_arith(steps=True, target=0.05),
    "text": text,
}


def collected(name: str, samples: int = 3) -> tuple[Run, Batch]:
    policy, task = TASKS[name]()
    run = Run(GRPO, policy, task, steps=1)
    return run, run.collect([p.but(samples=samples) for p in task.prompts(4, run.rng)])


@pytest.mark.parametrize("name", list(TASKS))
def test_the_beginning_is_kept_and_only_the_ending_is_new(name: str) -> None:
    run, batch = collected(name)
    lengths = batch.lengths
    rows = torch.tensor([0, 0, 5, 11, 5, 5])
    depth = torch.minimum(torch.tensor([1, 1, 2, 0, 3, 99]), lengths[rows])
    spent = run.actions
    new = continue_rows(batch, rows, depth, run)
    assert new.parent is not None and new.branch_at is not None and len(new) == 6
    assert new.parent.tolist() == rows.tolist() and new.branch_at.tolist() == depth.tolist()
    assert new.group.tolist() == batch.group[rows].tolist()
    assert new.signals["prompt_id"].tolist() == batch.signals["prompt_id"][rows].tolist()
    for i, (row, shared) in enumerate(zip(rows.tolist(), depth.tolist(), strict=True)):
        assert new.action[i, :shared].tolist() == batch.action[row, :shared].tolist()
        assert new.mask[i, :shared].all()
    assert run.actions - spent == int((new.lengths - depth).sum())
    seen = run.policy.observe(new, {"logp"}).logp
    torch.testing.assert_close(torch.where(new.mask, seen, 0.0), new.logp.to(seen), atol=2e-4, rtol=0)
    both = Batch.concat([as_roots(batch), new])  # they have the same fields and signals
    assert torch.isfinite(run.score_rewards(both)).all()


@pytest.mark.parametrize("name", list(TASKS))
def test_equal_generators_give_equal_endings(name: str) -> None:
    run, batch = collected(name)
    rows = torch.arange(12)
    state = run.generator.get_state()
    first = continue_rows(batch, rows, torch.ones_like(rows), run)
    run.generator.set_state(state)
    again = continue_rows(batch, rows, torch.ones_like(rows), run)
    assert torch.equal(first.action, again.action) and torch.equal(first.logp, again.logp)


def test_a_text_that_has_ended_comes_back_as_it_was() -> None:
    run, batch = collected("text")
    assert batch.terminated is not None
    rows = torch.arange(len(batch))
    new = continue_rows(batch, rows, batch.lengths, run)
    ended = batch.terminated
    assert torch.equal(new.lengths[ended], batch.lengths[ended])
    assert [c for c, e in zip(new.signals["completion"], ended.tolist(), strict=True) if e] == [
        c for c, e in zip(batch.signals["completion"], ended.tolist(), strict=True) if e
    ]
    assert new.terminated is not None and new.terminated[ended].all()


def test_conversations_go_on_from_the_beginning_of_a_turn() -> None:
    policy, task = load_policy("builtin"), make_task("calculator", max_tokens=6)
    run = Run(GRPO, policy, task, steps=1)
    batch = run.collect([p.but(samples=2) for p in task.prompts(2, run.rng)])
    row, depth = step_starts(steps_of(batch, run)).nonzero().unbind(1)
    new = continue_rows(batch, row, depth, run)
    assert new.branch_at is not None and torch.equal(new.branch_at, depth)
    for i, (parent, shared) in enumerate(zip(row.tolist(), depth.tolist(), strict=True)):
        assert new.action[i, :shared].tolist() == batch.action[parent, :shared].tolist()
    with pytest.raises(ValueError, match="none begins at token 1"):
        continue_rows(batch, row[:1], torch.tensor([1]), run)


def test_endings_are_drawn_anew() -> None:
    run, batch = collected("token_bandit")
    rows = torch.zeros(64, dtype=torch.int64)
    new = continue_rows(batch, rows, torch.full((64,), 2), run)
    assert len(torch.unique(new.action[:, 2:], dim=0)) > 4


def test_a_task_that_cannot_continue_is_refused() -> None:
    run, batch = collected("token_bandit")

    class Plain:
        name = "plain"

    run.task = Plain()  # type: ignore[assignment]
    with pytest.raises(ValueError, match="'plain' does not offer"):
        continue_rows(batch, torch.tensor([0]), torch.tensor([1]), run)


class Speller:
    """Decodes token k to the k-th text."""

    texts = ("a", "b\n", "\n", " ")

    def decode(self, tokens: torch.Tensor) -> str:
        return "".join(self.texts[t] for t in tokens.tolist())


def rows_of(action: list[list[int]], mask: list[list[int]]) -> Batch:
    kept = torch.tensor(mask).bool()
    return Batch(action=torch.tensor(action), mask=kept, logp=torch.zeros(kept.shape), group=torch.zeros(len(kept), dtype=torch.int64))


def test_steps_are_segments_else_lines_else_blocks() -> None:
    run, _ = collected("token_bandit")
    batch = rows_of([[0, 1, 2, 0, 0], [0, 0, 1, 0, 0]], [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    assert steps_of(batch, run).tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, -1, -1]]
    assert steps_of(batch, run, 2).tolist() == [[0, 0, 1, 1, 2], [0, 0, 1, -1, -1]]
    run.policy = Speller()  # type: ignore[assignment]
    assert steps_of(batch, run).tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, -1, -1]]  # an empty line belongs to the break before it
    batch.segment = torch.tensor([[0, 0, 1, 1, 2], [0, 1, 1, 0, 0]])
    assert steps_of(batch, run).tolist() == [[0, 0, 1, 1, 2], [0, 1, 1, -1, -1]]
    assert step_starts(steps_of(batch, run)).long().tolist() == [[1, 0, 1, 0, 1], [1, 1, 0, 0, 0]]
