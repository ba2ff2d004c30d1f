"""LamPO: when it is RLOO, what a pair weighs, ROUGE-L against a plain table, odd groups, and the component in the loop."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anypo.batch import Batch
from anypo.domains.language.toys.gru_policy import GruPolicy
from anypo.domains.language.toys.toy_arith import ToyArith
from anypo.methods.language.lampo import METHOD, PairwiseAdvantage, RougeReward, advantages, longest_common, pair_weights, rouge_l
from anypo.methods.language.rloo import rloo
from anypo.run import Run
from anypo.seams.credit import sequence_score
from anypo.seams.groups import group_std, group_sum, peers
from anypo.seams.reward import content_tokens, reference_agreement
from tests.helpers import Rows, assert_resumes, assert_trains, random_rows, trained


def loops(rows: Rows, tau: float, score: str) -> list[float]:
    """The equations with plain Python loops."""
    s = [sum(p for p, kept in zip(*pair, strict=True) if kept) for pair in zip(rows.old_logp.tolist(), rows.mask.tolist(), strict=True)]
    s = [v / n for v, n in zip(s, rows.mask.sum(1).tolist(), strict=True)] if score == "mean" else s
    r, group, found = rows.reward.tolist(), rows.group.tolist(), []
    for i in range(len(r)):
        others = [j for j in range(len(r)) if group[j] == group[i] and j != i]
        terms = [2 / (1 + math.exp(math.copysign(1, r[i] - r[j]) * (s[i] - s[j]) / tau)) * (r[i] - r[j]) for j in others]
        found.append(sum(terms) / len(others) if others else 0.0)
    return found


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), tau=st.floats(0.2, 20), score=st.sampled_from(["mean", "sum"]))
def test_vectorized_is_the_loop_over_pairs(seed: int, tau: float, score: str) -> None:
    rows = random_rows(seed, rows=11)
    found = advantages(rows.reward, rows.group, rows.old_logp, rows.mask, tau, score)
    torch.testing.assert_close(found, torch.tensor(loops(rows, tau, score), dtype=torch.float64))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000))
def test_an_infinite_temperature_and_equal_scores_are_rloo(seed: int) -> None:
    rows = random_rows(seed)
    torch.testing.assert_close(advantages(rows.reward, rows.group, rows.old_logp, rows.mask, math.inf), rloo(rows.reward, rows.group))
    even = torch.full_like(rows.old_logp, -0.7)
    torch.testing.assert_close(advantages(rows.reward, rows.group, even, rows.mask, 0.1), rloo(rows.reward, rows.group))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), tau=st.floats(0.01, 100), std=st.booleans())
def test_a_group_sums_to_zero(seed: int, tau: float, std: bool) -> None:
    rows = random_rows(seed)
    found = group_sum(advantages(rows.reward, rows.group, rows.old_logp, rows.mask, tau, std=std), rows.group)
    torch.testing.assert_close(found, torch.zeros_like(found), atol=1e-12, rtol=0)


def test_weights_are_symmetric_within_groups_and_one_for_ties() -> None:
    rows = random_rows(3)
    reward = rows.reward.round()
    weights = pair_weights(reward, rows.group, rows.old_logp, rows.mask, 0.5)
    together = (rows.group[:, None] == rows.group) & ~torch.eye(len(reward), dtype=torch.bool)
    assert torch.equal(weights, weights.T) and torch.equal(weights > 0, together) and bool((weights < 2).all())
    tied = together & (reward[:, None] == reward)
    assert tied.any() and weights[tied].eq(1).all()


def test_a_rightly_ordered_pair_weighs_less_than_one_and_a_wrongly_ordered_one_more() -> None:
    reward, group, mask = torch.tensor([1.0, 0.0]), torch.zeros(2, dtype=torch.int64), torch.ones(2, 1)
    right = pair_weights(reward, group, torch.tensor([[-0.1], [-3.0]]), mask)[0, 1]
    wrong = pair_weights(reward, group, torch.tensor([[-3.0], [-0.1]]), mask)[0, 1]
    assert right < 1 < wrong and float(right + wrong) == pytest.approx(2)


def test_std_divides_by_the_groups_deviation() -> None:
    rows = random_rows(1)
    plain = advantages(rows.reward, rows.group, rows.old_logp, rows.mask)
    scaled = advantages(rows.reward, rows.group, rows.old_logp, rows.mask, std=True, ddof=1, eps=0.0)
    torch.testing.assert_close(scaled, plain / group_std(rows.reward, rows.group, 1))


def test_odd_groups_and_padding() -> None:
    reward, group = torch.tensor([1.0, 0.0, 0.3, 0.5, 0.5, 0.2], dtype=torch.float64), torch.tensor([4, 4, 7, 2, 2, 4])
    old, mask = torch.full((6, 3), -1.0, dtype=torch.float64), torch.ones(6, 3, dtype=torch.bool)
    mask[0, 1:], mask[1] = False, False
    old[0, 1], old[0, 2], old[1] = float("nan"), -float("inf"), float("nan")
    for std in (False, True):
        found = advantages(reward, group, old, mask, std=std, eps=0.0)
        assert torch.isfinite(found).all() and found[2] == 0 and found[3:5].eq(0).all() and found[0] > 0 > found[1]


def test_scores_are_detached_and_named() -> None:
    logp = torch.tensor([[-1.0, -3.0]], requires_grad=True)
    assert not sequence_score(logp, torch.ones(1, 2)).requires_grad
    assert sequence_score(logp, torch.ones(1, 2), "sum").item() == -4
    with pytest.raises(ValueError, match="mean or sum"):
        sequence_score(logp, torch.ones(1, 2), "median")
    with pytest.raises(ValueError, match="tau"):
        pair_weights(torch.zeros(2), torch.zeros(2, dtype=torch.int64), torch.zeros(2, 1), torch.ones(2, 1), tau=0.0)


def test_peers_of_groups_in_any_order() -> None:
    rows, other = peers(torch.tensor([5, 2, 5, 9, 5]))
    assert [sorted(r[o].tolist()) for r, o in zip(rows, other, strict=True)] == [[2, 4], [], [0, 4], [], [0, 2]]
    assert [t.shape for t in peers(torch.zeros(0, dtype=torch.int64))] == [(0, 0), (0, 0)]


@settings(max_examples=100, deadline=None)
@given(first=st.lists(st.integers(0, 4), max_size=90), second=st.lists(st.integers(0, 4), max_size=90))
def test_the_longest_common_subsequence_is_the_plain_tables(first: list[int], second: list[int]) -> None:
    table = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i, a in enumerate(first):
        for j, b in enumerate(second):
            table[i + 1][j + 1] = table[i][j] + 1 if a == b else max(table[i][j + 1], table[i + 1][j])
    assert longest_common(first, second) == table[-1][-1]


def test_rouge_l_at_its_ends() -> None:
    assert rouge_l("abc", "abc") == 1.0 and rouge_l([], []) == rouge_l([], "ab") == rouge_l("ab", []) == 0.0
    assert rouge_l("ba", "ab") == 0.5


def test_content_tokens_are_words_digits_and_signs() -> None:
    assert content_tokens(" So 12+x_1 =\n7 ") == ["so", "1", "2", "+", "x", "1", "=", "7"]


def arithmetic(method=METHOD, steps: bool = True) -> tuple[Run, Batch]:
    task, policy = ToyArith(small=True, steps=steps), GruPolicy()
    run = Run(method, policy, task, steps=1)
    return run, run.collect(method.select(task, run))


def test_the_reward_adds_rouge_to_the_outcome() -> None:
    run, batch = arithmetic()
    outcome, reward = run.score_rewards(batch), RougeReward(eta=0.3)(batch, run)
    texts = zip(batch.signals["completion"], batch.signals["columns"], strict=True)
    expected = [rouge_l(content_tokens(text), content_tokens(columns["solution"])) for text, columns in texts]
    torch.testing.assert_close(reward, outcome + 0.3 * torch.tensor(expected))
    assert reward.max() > 0 and torch.equal(RougeReward(eta=0.0)(batch, run), outcome)


def test_references_by_column_and_rows_without_one() -> None:
    run, batch = arithmetic()
    few = batch[0:4]
    few.signals["completion"] = ["1 2"] * 4
    few.signals["columns"] = [{"answer": "1 2", "solution": "9"}, {"answer": 12}, {"answer": None}, {}]
    assert reference_agreement(few, rouge_l).tolist() == [0.0, 1.0, 0.0, 0.0]
    bandit = trained(METHOD, 1)
    assert bandit.history[-1]["reference_agreement"] == 0.0  # its strings are no text


def test_the_loop_trains_with_one_reward_and_with_several() -> None:
    assert_trains(METHOD)
    assert_trains(METHOD.set("credit.score", "sum").set("credit.std", True), eos=0)

    def two(prompt, action, mask):
        return torch.stack([(action[:, 0] == 1).double(), (action[:, 1] == 2).double()], dim=1)

    assert_trains(METHOD, reward=two, objectives=("correct", "format"))
    only_credit = METHOD.but(name="x", base=METHOD, reward=METHOD.base.reward)
    assert torch.equal(trained(only_credit, 3, reward=two, objectives=("a", "b")).policy.logits,
                       trained(METHOD, 3, reward=two, objectives=("a", "b")).policy.logits)  # fmt: skip


def test_the_rewards_weights_count() -> None:
    def two(prompt, action, mask):
        return torch.stack([(action[:, 0] == 1).double(), (action[:, 1] == 2).double()], dim=1)

    first = METHOD.set("reward.weights", (1.0, 0.0))
    alone = trained(METHOD, 3, reward=lambda prompt, action, mask: (action[:, 0] == 1).double())
    torch.testing.assert_close(trained(first, 3, reward=two, objectives=("a", "b")).policy.logits, alone.policy.logits)


def test_off_it_trains_as_leave_one_out() -> None:
    class Rloo(PairwiseAdvantage):
        def __call__(self, batch: Batch, run: Run) -> torch.Tensor:
            return rloo(batch.reward, batch.group)[:, None] * batch.mask

    torch.testing.assert_close(
        trained(METHOD.set("credit.tau", math.inf), 4).policy.logits, trained(METHOD.but(name="x", credit=Rloo()), 4).policy.logits
    )


def test_a_stopped_run_continues_identically(tmp_path: Path) -> None:
    assert_resumes(METHOD, tmp_path)
