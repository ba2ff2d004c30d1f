"""VPO: when it is GRPO, sets of answers in tokens and texts, odd sets, and the components in the loop."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.loops.on_policy import step, train
from anypo.method import Method
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.methods.language.grpo import advantages as grpo_advantages
from anypo.methods.language.vpo import (
    METHOD,
    VARIANTS,
    SetAdvantage,
    SetReward,
    SetRollout,
    advantages,
    answer_index,
    best_at_k,
    mean_reward,
    set_reward,
    share,
    split_sets,
)
from anypo.run import Run
from anypo.seams.credit import GroupRelative
from anypo.task import Prompt
from tests.helpers import assert_continues, assert_trains, trained


def sets(seed: int, count: int = 8, size: int = 4, kinds: int = 3, draws: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards, which answers there are (row 0 none, row 1 one), and trade-offs."""
    g = torch.Generator().manual_seed(seed)
    vectors = torch.rand(count, size, kinds, generator=g, dtype=torch.float64)
    valid = torch.rand(count, size, generator=g) < 0.7
    valid[0], valid[1] = False, torch.arange(size) == 1
    weights = torch.rand(draws, kinds, generator=g, dtype=torch.float64)
    return vectors, valid, weights / weights.sum(1, keepdim=True)


def first_symbol(prompt: Tensor, action: Tensor, mask: Tensor) -> Tensor:
    """Two rewards for the first token: 1 and 0 for symbol 1, 0 and 1 for symbol 2, a half each for symbol 3."""
    table = torch.tensor([[0, 0], [1, 0], [0, 1], [0.5, 0.5]], dtype=torch.float64)
    return table[action[:, 0]] * mask[:, :1]


class Sets(TokenBandit):
    """Every token is an answer of its own."""

    def __init__(self, horizon: int = 4, **options: Any) -> None:
        super().__init__(4, 4, horizon, **({"reward": first_symbol, "objectives": ("left", "right")} | options))

    def continue_from(self, *start: Any, **options: Any) -> Batch:
        batch = super().continue_from(*start, **options)
        batch.signals["candidate"] = torch.arange(batch.horizon).expand(batch.mask.shape)
        return batch


def trained_sets(method: Method, steps: int = 3, horizon: int = 4, **options: Any) -> Run:
    task = Sets(horizon, **options)
    return train(Run(method, task.policy(scale=0.1), task, steps=steps))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000))
def test_worth_and_shares_by_hand(seed: int) -> None:
    vectors, valid, weights = sets(seed)
    vectors = (2 * vectors).round()  # ties
    value, parts = set_reward(vectors, valid, weights), share(vectors, valid, weights)
    for i in range(len(vectors)):
        there = valid[i].nonzero().flatten().tolist()
        total, counts = 0.0, [0.0] * vectors.shape[1]
        for w in weights:
            worths = {j: float(vectors[i, j] @ w) for j in there}
            best = max(worths.values(), default=0.0)
            winners = [j for j in there if worths[j] == pytest.approx(best, abs=1e-12)]
            total += best / len(weights)
            for j in winners:
                counts[j] += 1 / len(winners) / len(weights)
        assert float(value[i]) == pytest.approx(total)
        if len({tuple(vectors[i, j].tolist()) for j in there}) == len(there):  # else rounding decides between near ties
            assert parts[i].tolist() == pytest.approx(counts)
    assert float(parts.sum(1)[0]) == 0 and parts.sum(1)[1:].tolist() == pytest.approx(valid[1:].any(1).double().tolist())


def test_one_answer_is_the_scalar_with_the_mean_trade_off() -> None:
    vectors, _, weights = sets(0, size=1)
    one = torch.ones(len(vectors), 1, dtype=torch.bool)
    scalar = vectors[:, 0] @ weights.mean(0)
    torch.testing.assert_close(set_reward(vectors, one, weights), scalar)
    group = torch.arange(8) % 2
    torch.testing.assert_close(advantages(vectors, one, weights, group), grpo_advantages(scalar, group))


def test_equal_answers_are_one_and_one_hot_trade_offs_are_coverage() -> None:
    vectors, _, weights = sets(1)
    full = torch.ones(vectors.shape[:2])
    torch.testing.assert_close(set_reward(vectors[:, :1].expand_as(vectors), full, weights), vectors[:, 0] @ weights.mean(0))
    torch.testing.assert_close(set_reward(vectors, full, torch.eye(3, dtype=torch.float64)), vectors.amax(1).mean(1))


def test_one_equal_trade_off_is_the_best_by_the_mean() -> None:
    vectors, _, _ = sets(2)
    full, equal = torch.ones(vectors.shape[:2]), torch.full((1, 3), 1 / 3, dtype=torch.float64)
    torch.testing.assert_close(set_reward(vectors, full, equal), vectors.mean(2).amax(1))
    torch.testing.assert_close(mean_reward(vectors, full, equal), vectors.mean((1, 2)))


def test_a_set_is_worth_no_less_than_its_parts() -> None:
    vectors, _, weights = sets(3)
    full = torch.ones(vectors.shape[:2])
    value = set_reward(vectors, full, weights)
    assert bool((value >= mean_reward(vectors, full, weights)).all())
    assert bool((value >= (vectors @ weights.mean(0)).amax(1) - 1e-12).all())
    assert float(best_at_k(vectors[0], weights)) == float(value[0])


def test_missing_answers_may_hold_anything_and_negative_rewards_stay_negative() -> None:
    vectors, valid, weights = sets(4)
    dirty = torch.where(valid[..., None], vectors, torch.nan)
    for function in (set_reward, mean_reward, share):
        assert torch.equal(function(dirty, valid, weights), function(vectors, valid, weights))
    assert float(set_reward(vectors, valid, weights)[0]) == 0 and bool(
        (set_reward(-vectors - 1, valid, weights)[1:] < 0).eq(valid[1:].any(1)).all()
    )


def test_trade_offs_by_row_are_trade_offs_for_all() -> None:
    vectors, valid, weights = sets(5)
    assert torch.equal(set_reward(vectors, valid, weights.expand(8, -1, -1)), set_reward(vectors, valid, weights))


def test_trade_offs_are_shared_in_a_group_and_drawn_anew_for_the_next() -> None:
    run = trained_sets(METHOD, 0)
    drawn = SetAdvantage(draws=7).trade_offs(torch.tensor([5, 2, 5, 2]), torch.zeros(4, 1, 3), run)
    assert drawn.shape == (4, 7, 3) and torch.equal(drawn[0], drawn[2]) and not torch.equal(drawn[0], drawn[1])
    torch.testing.assert_close(drawn.sum(2), torch.ones(4, 7))


@pytest.mark.parametrize("draws", [0, 16])
def test_one_answer_and_one_reward_train_as_grpo(draws: int) -> None:
    plain = METHOD.but(rollout=GRPO.rollout, reward=GRPO.reward, credit=GRPO.credit)
    mine = METHOD.set("credit.draws", draws)
    torch.testing.assert_close(trained(mine, 4).policy.logits, trained(plain, 4).policy.logits)


def test_one_answer_and_equal_weights_train_as_grpo_on_the_sum() -> None:
    plain = METHOD.but(rollout=GRPO.rollout, reward=GRPO.reward, credit=GroupRelative(weights=(0.5, 0.5)))
    for method in (VARIANTS["max_scalar"], VARIANTS["multi_rlvr"]):
        torch.testing.assert_close(trained_sets(method, horizon=1).policy.logits, trained_sets(plain, horizon=1).policy.logits)


def test_answers_are_scored_as_whole_responses() -> None:
    task = Sets(eos=0)
    run = Run(METHOD, task.policy(scale=0.1), task, steps=1)
    batch = step(run)
    vectors, answered = batch.signals["vector_reward"], batch.signals["answered"]
    assert vectors.shape == (32, 4, 2) and torch.equal(answered, batch.mask)
    for i in range(len(batch)):
        for j in range(4):
            one = batch.action[i, j : j + 1][None]
            wanted = first_symbol(one, one, batch.mask[i, j : j + 1][None])[0]
            assert torch.equal(vectors[i, j], wanted * answered[i, j])
    assert batch.objectives == ("left", "right")
    torch.testing.assert_close(batch.reward, vectors.sum(1) / answered.sum(1, keepdim=True))


def test_rows_without_an_answer_are_worth_nothing() -> None:
    task = Sets()
    run = Run(METHOD, task.policy(), task, steps=1)
    batch = task.collect([Prompt(0, 0, samples=4)], run)
    batch.mask = batch.mask.clone()
    batch.mask[0] = False
    batch.reward = SetReward()(batch, run)
    found = SetAdvantage()(batch, run)
    assert not batch.signals["answered"][0].any() and batch.reward[0].tolist() == [0, 0]
    assert torch.isfinite(found).all() and not found[0].any()


def test_a_row_without_candidates_is_one_answer() -> None:
    task = TokenBandit(4, partial=True)
    run = Run(METHOD, task.policy(), task, steps=1)
    batch = task.collect([Prompt(0, 0, samples=3)], run)
    members, answered = split_sets(batch)
    assert answered.shape == (3, 1) and torch.equal(members.action, batch.action) and torch.equal(members.mask, batch.mask)


def test_tokens_of_a_text_are_split_at_separators() -> None:
    assert answer_index(["4", "|", "||", "5", "|||6", "7", "|||", "", "8"], "|||", 3) == [0, 0, 0, 1, 1, 2, 2, -1, -1]
    assert answer_index([], "|||", 3) == [] and answer_index(["a", "|", "|", "b"], "|||", 3) == [0, 0, 0, 0]


class Speaker:
    """A policy that decodes token t as the letter of number t, and 0 as a separator."""

    def decode(self, tokens: Tensor) -> str:
        return "".join("|||" if t == 0 else chr(96 + t) for t in tokens.tolist())


def spoken(rows: list[list[int]]) -> Batch:
    width = max(len(row) for row in rows)
    action = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.arange(width) < torch.tensor([len(row) for row in rows])[:, None]
    return Batch(
        action, mask, torch.zeros(mask.shape), torch.zeros(len(rows), dtype=torch.int64),
        signals={"completion": [Speaker().decode(a[m]) for a, m in zip(action, mask, strict=True)]},
    )  # fmt: skip


def test_texts_become_sets_of_texts() -> None:
    batch = spoken([[1, 2, 0, 3], [0, 4, 0, 5, 0, 6], [], [7, 0, 0, 8]])
    run: Any = SimpleNamespace(policy=Speaker())
    found = SetRollout(size=3, inner=lambda prompts, run: batch)([], run)
    assert found.signals["answers"] == [["ab", "c"], ["", "d", "e"], [""], ["g", "", "h"]]
    assert found.signals["candidate"].tolist() == [
        [0, 0, 0, 1, -1, -1], [0, 1, 1, 2, 2, -1], [-1] * 6, [0, 0, 1, 2, -1, -1],
    ]  # fmt: skip
    members, answered = split_sets(found)
    assert answered.tolist() == [[True, True, False], [True, True, True], [True, False, False], [True, False, True]]
    assert members.signals["completion"] == ["ab", "c", "", "d", "e", "", "g", "h"]
    assert members.group.tolist() == [0] * 8


def test_messages_ask_for_sets_and_plain_texts_only_when_told() -> None:
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "p"}]
    asked = SetRollout(size=2).asked(chat)
    assert asked[0] == chat[0] and asked[1]["content"] == "p\nGive 2 different answers, separated by |||" and chat[1]["content"] == "p"
    assert SetRollout().asked("p") == "p" and SetRollout(ask_plain=True).asked("p").startswith("p\nGive 4")
    assert SetRollout(size=1, ask_plain=True).asked("p") == "p" and SetRollout().asked(7) == 7


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("rollout.size", 0, "rollout.size"),
        ("rollout.separator", "", "separator"),
        ("credit.members", "worst", "best or mean"),
        ("credit.scale", (1.0,), "2 rewards"),
    ],
)
def test_what_cannot_be_is_refused(path: str, value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        trained_sets(METHOD.set(path, value), 1)


def test_rewards_on_other_scales_are_brought_to_a_common_one() -> None:
    def tenfold(prompt: Tensor, action: Tensor, mask: Tensor) -> Tensor:
        return first_symbol(prompt, action, mask) * torch.tensor([1.0, 10.0])

    scaled = trained_sets(METHOD.set("credit.scale", (1.0, 10.0)), reward=tenfold).policy.logits
    torch.testing.assert_close(scaled, trained_sets(METHOD).policy.logits)
    assert not torch.allclose(scaled, trained_sets(METHOD, reward=tenfold).policy.logits)


def test_praise_by_answer_keeps_its_sum_and_leaves_blame_alone() -> None:
    task = Sets(eos=0)
    run = Run(METHOD, task.policy(scale=0.1), task, steps=1)
    batch = step(run)
    credit = SetAdvantage(by_answer=True)
    weights = credit.trade_offs(batch.group, batch.signals["vector_reward"], run)
    credit.trade_offs = lambda *_: weights  # type: ignore[method-assign]
    fine, coarse = credit(batch, run), SetAdvantage.__call__(credit_like(weights), batch, run)
    blamed = (coarse < 0) | ~batch.mask
    assert torch.equal(fine[blamed], coarse[blamed]) and not torch.equal(fine, coarse)
    torch.testing.assert_close(fine.sum(1), coarse.sum(1))


def credit_like(weights: Tensor) -> SetAdvantage:
    credit = SetAdvantage()
    credit.trade_offs = lambda *_: weights  # type: ignore[method-assign]
    return credit


@pytest.mark.parametrize("method", [METHOD, *VARIANTS.values()], ids=lambda m: m.name)
def test_the_loop_trains(method: Method) -> None:
    assert_trains(method, steps=4, eos=0, horizon=4, partial=True)
    run = trained_sets(method, 4, eos=0)
    assert torch.isfinite(run.policy.logits).all()
    assert all({"set_reward", "answers", "reward/left"} <= record.keys() for record in run.history)


def test_a_stopped_run_continues_identically(tmp_path: Path) -> None:
    def run_to(out: Path, upto: int) -> Run:
        task = Sets()
        run = Run(METHOD, task.policy(scale=0.1), task, steps=4, out=out, checkpoint_every=2)
        run.resume()
        while run.step < upto:
            step(run)
        return run

    assert_continues(run_to, tmp_path)
