"""HSIR: the score against its definition, when it is GRPO or rejection sampling, exits, rounds, the filter, and the components in the loop."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cosine_similarity

from anypo.batch import Batch
from anypo.domains.language.toys.check_again import CheckAgain, make_check_again
from anypo.loops.on_policy import step, train
from anypo.method import Method
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.methods.language.grpo import advantages as grpo
from anypo.methods.language.hsir import (
    METHOD,
    VARIANTS,
    KeepDiverse,
    VerifyThenExit,
    advantages,
    diversity,
    dpo_pairs,
    indiv,
    sampling_rounds,
    select,
    step_repr,
    step_weights,
    verify_exit,
)
from anypo.run import Run
from tests.helpers import assert_continues, assert_resumes, assert_trains, trained

SFT = VARIANTS["sft"]


def on_check_again(method: Method, steps: int, out: Path | None = None, levels: Any = (1, 2, 3)) -> Run:
    policy, task = make_check_again(warm_steps=20, levels=levels)
    run = Run(method.set("select.prompts", 6), policy, task, steps=steps, seed=0, out=out, checkpoint_every=2)
    if out is not None:
        run.resume()
    return train(run)


def parameters(run: Run) -> Tensor:
    return torch.cat([p.detach().flatten() for p in run.policy.parameters()])


def by_definition(rows: Tensor, weight: Tensor) -> float:
    pairs = [(i, j) for i in range(len(rows)) for j in range(i + 1, len(rows))]
    total = sum(float(weight[i] * weight[j]) for i, j in pairs)
    return 1 - sum(float(weight[i] * weight[j] * cosine_similarity(rows[i], rows[j], 0)) for i, j in pairs) / total


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), count=st.integers(2, 6))
def test_the_score_is_its_definition_alone_and_in_a_batch(seed: int, count: int) -> None:
    g = torch.Generator().manual_seed(seed)
    rows, weight = torch.randn(count, 4, generator=g, dtype=torch.float64), torch.rand(count, generator=g, dtype=torch.float64) + 0.1
    assert float(indiv(rows, weight)) == pytest.approx(by_definition(rows, weight))
    padded, there = torch.cat([rows, 9 + torch.zeros(2, 4)])[None], torch.arange(count + 2)[None] < count
    found = indiv(padded.double(), torch.cat([weight, torch.ones(2)])[None], there)
    assert float(found) == pytest.approx(by_definition(rows, weight))


def test_degenerate_solutions_have_a_score() -> None:
    one, zeros = torch.tensor([[1.0, 2.0]]), torch.zeros(3, 2)
    assert float(indiv(one, torch.ones(1))) == float(indiv(one[:0], torch.ones(0))) == 1
    assert float(indiv(zeros, torch.ones(3))) == 1  # cosines of zero vectors are 0
    lopsided = indiv(torch.eye(3), torch.tensor([1.0, 0, 0]))  # no pair has weight: uniform
    assert float(lopsided) == pytest.approx(1)


def test_means_and_weights_see_their_own_step_alone() -> None:
    hidden = torch.tensor([[1.0, 0], [3, 0], [math.nan, math.inf], [0, 2]], requires_grad=True)
    segment = torch.tensor([0, 0, -1, 1])
    assert step_repr(hidden, segment).tolist() == [[2, 0], [0, 2]]
    weight = step_weights(torch.tensor([[0.1, 0.2, 0.4, 0.3], [0.0, 0.0, 1.0, 0.0]], requires_grad=True), segment)
    assert weight.tolist() == pytest.approx([0.5, 0.5]) and not weight.requires_grad
    assert step_weights(torch.zeros(2, 4), segment).tolist() == [0, 0]


def test_no_bonus_and_single_steps_are_grpo() -> None:
    g = torch.Generator().manual_seed(1)
    score, correct, group = (
        torch.rand(24, generator=g),
        torch.bernoulli(torch.full((24,), 0.5), generator=g),
        torch.randperm(24, generator=g) % 4,
    )
    torch.testing.assert_close(advantages(score, correct, group, lam=0.0), grpo(correct, group))
    torch.testing.assert_close(advantages(torch.ones(24), correct, group), grpo(correct, group), atol=1e-5, rtol=1e-5)
    assert advantages(torch.full((4,), 0.4), torch.ones(4), torch.zeros(4, dtype=torch.int64)).eq(0).all()
    wrong = advantages(score, torch.zeros(24), group)
    assert wrong.eq(0).all()  # diversity never pays for a wrong answer
    assert torch.equal(parameters(on_check_again(METHOD.set("reward.lam", 0.0), 3)), parameters(on_check_again(GRPO, 3)))
    assert not torch.equal(parameters(on_check_again(METHOD, 3)), parameters(on_check_again(GRPO, 3)))
    assert torch.equal(trained(METHOD.set("reward.lam", 0.0), 3).policy.logits, trained(GRPO, 3).policy.logits)


def test_exits() -> None:
    correct, mask = torch.tensor([[1, 0, 1], [0, 0, 1], [0, 0, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1]])
    found = verify_exit(correct, mask)
    assert found.first.tolist() == [0, -1, -1] and found.keep.tolist() == [[1, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert verify_exit(correct, mask, min_step=1).first.tolist() == [2, -1, -1]
    assert verify_exit(correct[:, :0], mask[:, :0]).first.tolist() == [-1, -1, -1]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), keep=st.sampled_from([0.1, 0.3, 0.5, 1.0]))
def test_the_filter_is_its_definition(seed: int, keep: float) -> None:
    g = torch.Generator().manual_seed(seed)
    score, correct = torch.randint(0, 4, (20,), generator=g).double(), torch.bernoulli(torch.full((20,), 0.6), generator=g)
    group = torch.randperm(20, generator=g) % 3
    found = select(score, correct, group, keep)
    for k in range(3):
        rows = [i for i in range(20) if group[i] == k and correct[i] > 0]
        best = sorted(rows, key=lambda i: -float(score[i]))[: max(1, math.ceil(keep * len(rows) - 1e-9))]
        assert sorted(best) == [i for i in range(20) if group[i] == k and found[i]]


def test_pairs_need_both_sides() -> None:
    score, correct = torch.tensor([0.2, 0.9, 0.1, 0.5]), torch.tensor([1, 1, 0, 0])
    assert dpo_pairs(score, correct, torch.tensor([0, 0, 0, 1])) == [[1, 2]]
    assert dpo_pairs(score, torch.zeros(4), torch.zeros(4)) == []


def rollout(component: VerifyThenExit, samples: int = 4, levels: Any = (1, 2, 3), warm: int = 40) -> tuple[Batch, Run]:
    policy, task = make_check_again(warm_steps=warm, levels=levels)
    run = Run(SFT.but(rollout=component), policy, task, steps=1, seed=3)
    return component([p.but(samples=samples) for p in task.prompts(24, np.random.default_rng(5))], run), run


def test_rescued_solutions_are_cut_where_they_were_right() -> None:
    batch, run = rollout(VerifyThenExit(max_rounds=1))
    plain, _ = rollout(VerifyThenExit(max_rounds=1, exits=False))
    rescued = batch.signals["accepted"] & ~plain.signals["accepted"]
    assert rescued.sum() > 0 and torch.equal(batch.group, plain.group)
    assert torch.equal(run.task.score(batch, run) == 1, batch.signals["accepted"])
    for row in rescued.nonzero().flatten().tolist():
        before, after = plain.signals["completion"][row], batch.signals["completion"][row]
        assert len(after) < len(before) + 1 and before.startswith(after[:-2]) and after[-2] == "#"
    known = run.policy.observe(batch, {"logp"}).logp
    torch.testing.assert_close(torch.where(batch.mask, batch.logp, 0.0), known, atol=1e-5, rtol=1e-5)
    assert batch.segment is not None
    assert batch.segment.amax(1).tolist() == [len(text) // 2 - 1 for text in batch.signals["completion"]]


def test_rounds_go_on_until_enough_are_accepted() -> None:
    batch, _ = rollout(VerifyThenExit(want=3, max_rounds=4), samples=2)
    for q in range(24):
        rows = batch.signals["accepted"][batch.group == q].long()
        hits = torch.zeros(1, 4, dtype=torch.int64)
        hits[0, : len(rows) // 2] = rows.view(-1, 2).sum(1)
        found = sampling_rounds(hits, 3)
        assert int(found.rounds) == len(rows) // 2 and int(found.accepted) == int(rows.sum())


def test_keeping_all_without_exits_is_rejection_sampling() -> None:
    batch, run = rollout(VerifyThenExit(max_rounds=1, exits=False))
    batch.reward = run.score_rewards(batch)
    run.prepare_signals(batch, {"old_hidden"})
    advantage = KeepDiverse(keep=1.0)(batch, run)
    right = batch.reward[:, None] * batch.mask
    torch.testing.assert_close(advantage, right * len(batch) / batch.reward.sum())
    assert KeepDiverse()(batch, run).ne(0).any(1).sum() < batch.reward.sum()


def test_answers_are_no_steps_and_a_policy_may_show_its_attention() -> None:
    batch, run = rollout(VerifyThenExit(max_rounds=1, exits=False))
    run.prepare_signals(batch, {"old_hidden"})
    score = diversity(batch, run)
    short = torch.tensor([len(text) <= 4 for text in batch.signals["completion"]])  # one step and the answer, or the answer alone
    assert short.any() and score[short].eq(1).all() and score[~short].lt(1).any()
    batch.signals["old_attention"] = torch.zeros(len(batch), batch.horizon, batch.horizon)
    assert torch.isfinite(diversity(batch, run, "policy")).all()
    assert METHOD.set("reward.attention", "policy").needs() >= {"old_attention"}
    with pytest.raises(ValueError, match="attention is that of"):
        diversity(batch, run, "none")


@pytest.mark.parametrize("method", [METHOD, SFT], ids=["hsir", "sft"])
def test_the_loop_trains_and_resumes(method: Method, tmp_path: Path) -> None:
    run = on_check_again(method, 3)
    assert all(math.isfinite(record["loss"]) for record in run.history)
    assert_continues(lambda out, upto: on_check_again(method, upto, out=out), tmp_path)


def test_other_tasks(tmp_path: Path) -> None:
    assert_trains(METHOD)
    assert_trains(SFT.set("rollout.exits", False))
    assert_resumes(METHOD, tmp_path)
    with pytest.raises(ValueError, match="exits=false"):
        trained(SFT, 1)


def test_the_stand_in_keeps_the_protocol() -> None:
    policy, task = make_check_again(warm_steps=20)
    run = Run(GRPO, policy, task, steps=1)
    batch = step(run)
    seen = make_check_again(warm_steps=20)[0].observe(batch, {"logp", "entropy", "hidden"})
    torch.testing.assert_close(seen.logp, batch.logp, atol=1e-5, rtol=1e-5)
    assert torch.isfinite(seen.entropy).all() and seen.hidden.shape[:2] == batch.mask.shape
    for prompt, completion in CheckAgain(wrong_check=0.0).demonstrations(50, np.random.default_rng(0)):
        whole = policy.encode(prompt + completion)
        end = policy.sample([whole], [1], max_tokens=3, generator=torch.Generator())
        assert end.finished.all() and policy.decode(end.tokens[0]) == ""
    with pytest.raises(ValueError, match="no problem"):
        policy.sample([policy.encode("7+3")], [1], generator=torch.Generator())
