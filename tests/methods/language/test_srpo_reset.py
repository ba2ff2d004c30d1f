"""SRPO and RRPO: what they reduce to, where resets are made, what of a reset group is trained, and the component in the loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.language.toys.key_chain import make_key_chain
from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.loops.on_policy import train
from anypo.method import Method
from anypo.methods.language import grpo
from anypo.methods.language.srpo_reset import METHOD, RRPO, AskPolicy, ResetRollout, advantages, choose_failed, cpi, reset_step, suffix_mask
from anypo.run import Run
from anypo.seams.groups import broadcast
from tests.helpers import assert_resumes, assert_trains, random_rows


class At:
    """A localizer that always names one step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def __call__(self, batch: Batch, rows: Tensor, steps: Tensor, run: Run) -> Tensor:
        return torch.full_like(rows, self.step)


def chain_batch(method: Method, seed: int = 0) -> tuple[Run, Batch]:
    policy, task = make_key_chain(4, 5, seed=seed)
    run = Run(method, policy, task, steps=1, seed=seed)
    batch = method.rollout(method.select(task, run), run)
    batch.reward = method.reward(batch, run)
    return run, batch


def test_reset_at_zero_is_a_fresh_grpo_group() -> None:
    rows = random_rows(3)
    segment = torch.where(rows.mask, torch.arange(5).expand(8, -1), -1)
    mine = advantages(rows.reward, rows.group, segment, rows.mask, torch.zeros(8, dtype=torch.int64))
    assert torch.equal(mine, broadcast(grpo.advantages(rows.reward, rows.group), rows.mask))


def test_random_resets_with_one_step_are_grpo() -> None:
    u = torch.rand(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert reset_step(u, torch.ones(50, dtype=torch.int64), torch.full((50,), -1), "random").eq(0).all()


def test_a_localizer_that_never_parses_is_random_resetting() -> None:
    def batch(method: Method) -> Batch:
        return chain_batch(method)[1]

    own, random = batch(METHOD.but(rollout=ResetRollout("self", localizer=At(-1)))), batch(RRPO)
    assert torch.equal(own.action, random.action) and torch.equal(own.signals["reset_step"], random.signals["reset_step"])
    assert torch.equal(own.group, random.group)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_equal_endings_give_exact_zeros(value: float) -> None:
    segment, mask = torch.zeros(4, 3, dtype=torch.int64), torch.ones(4, 3, dtype=torch.bool)
    found = advantages(torch.full((4,), value), torch.zeros(4, dtype=torch.int64), segment, mask, torch.zeros(4, dtype=torch.int64))
    assert found.eq(0).all()


def test_only_failed_members_are_chosen() -> None:
    reward, group = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0]), torch.tensor([7, 7, 2, 2, 9, 9])
    assert choose_failed(reward, group, torch.tensor([0.999, 0.999, 0.0])).tolist() == [-1, 1, 4]
    assert choose_failed(reward, group, torch.tensor([0.0, 0.0, 0.999])).tolist() == [-1, 1, 5]


def test_the_reset_step_itself_is_drawn_anew() -> None:
    _, batch = chain_batch(METHOD.but(rollout=ResetRollout(localizer=At(2))))
    ends = batch.group >= 4
    assert ends.any() and batch.parent is not None and batch.keep is not None
    assert batch.branch_at is not None and batch.branch_at[ends].eq(2).all() and batch.signals["reset_step"][ends].eq(2).all()
    assert torch.equal(batch.action[ends][:, :2], batch.action[batch.parent[ends]][:, :2])
    assert batch.keep[ends].tolist() == [[False, False, True, True, True]] * int(ends.sum())
    assert batch.keep[~ends].all()
    assert torch.equal(batch.keep, suffix_mask(batch.segment, batch.mask, batch.signals["reset_step"]))
    failed = batch.signals["task_reward"][batch.parent[ends]]
    assert failed.eq(0).all()
    assert len(torch.unique(batch.action[ends][:, 2])) > 1


def test_the_first_responses_can_be_left_out() -> None:
    _, batch = chain_batch(METHOD.but(rollout=ResetRollout(include_base=False, localizer=At(1))))
    assert batch.keep is not None
    assert not batch.keep[batch.group < 4].any() and batch.keep[batch.group >= 4].any(1).all()


def test_only_new_actions_are_counted() -> None:
    run, batch = chain_batch(METHOD.but(rollout=ResetRollout(localizer=At(3))))
    ends = int((batch.group >= 4).sum())
    assert run.actions == 4 * 8 * 5 + ends * 2


def test_no_failure_no_reset() -> None:
    task = TokenBandit(2, reward=lambda prompt, action, mask: torch.ones(len(prompt), dtype=torch.float64))
    run = Run(METHOD, task.policy(), task, steps=1)
    batch = METHOD.rollout(METHOD.select(task, run), run)
    assert len(batch) == 16 and batch.parent is not None and batch.parent.eq(-1).all()


class Talker:
    """A stand-in for a policy that reads: replies by the script, remembers what it was asked."""

    context_limit = 200

    def __init__(self, *replies: str) -> None:
        self.replies, self.asked = replies, list[str]()

    def encode(self, text: str) -> Tensor:
        self.asked.append(text)
        return torch.arange(len(text))

    def decode(self, tokens: Tensor) -> str:
        return "".join(chr(t) for t in tokens.tolist())

    def sample(self, prompts: list[Tensor], samples: int, **options: object) -> object:
        text = [self.replies[i].ljust(8) for i in range(len(prompts))]

        class Reply:
            tokens = torch.tensor([[ord(c) for c in t] for t in text])
            valid = torch.ones(len(text), 8, dtype=torch.bool)

        return Reply()


def test_the_policy_is_asked_for_the_first_wrong_step() -> None:
    run, _ = chain_batch(METHOD)
    action = torch.tensor([[ord(c) for c in "1+1;3;9"]] * 3)
    batch = Batch(action=action, mask=torch.ones(3, 7, dtype=torch.bool), logp=torch.zeros(3, 7), group=torch.zeros(3, dtype=torch.int64))
    batch.signals["prompt_text"] = ["first", "second", "x" * 200]
    steps = torch.tensor([[0, 0, 0, 0, 1, 1, 2]] * 3)
    policy = Talker("step 2", "no idea")
    run.policy = policy  # type: ignore[assignment]
    spent = run.actions
    assert AskPolicy()(batch, torch.arange(3), steps, run).tolist() == [1, -1, -1]  # the last does not fit the context
    assert "Problem:\nfirst" in policy.asked[0] and "1. 1+1;\n2. 3;\n3. 9" in policy.asked[0]
    assert run.actions - spent == 16


def test_a_policy_without_text_is_not_asked() -> None:
    run, batch = chain_batch(METHOD)
    assert AskPolicy()(batch, torch.arange(3), torch.zeros_like(batch.action), run).tolist() == [-1, -1, -1]


def test_a_lucky_mdp_without_improvable_states() -> None:
    evenly = torch.full((2, 3, 2), 0.5, dtype=torch.float64)
    found = cpi(evenly, torch.ones_like(evenly[..., 0]), torch.full_like(evenly[..., 0], 1 / 3), torch.full_like(evenly[0, 0], 0.5))
    assert found.coverage == 0 and found.adv_oracle == 0 and found.alpha_oracle == 0


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="self or random"):
        chain_batch(METHOD.set("rollout.mode", "best"))


def test_it_trains_and_resumes(tmp_path: Path) -> None:
    assert_trains(METHOD)
    assert_resumes(METHOD, tmp_path)


def test_it_trains_on_a_chain() -> None:
    policy, task = make_key_chain(4, 4)
    run = train(Run(METHOD, policy, task, steps=3))
    assert torch.isfinite(policy.logits).all() and run.history[-1]["resets"] == 4
