"""BAPO: what it reduces to, the pitfalls of the bonus, resampling, the stages, and training through the loop."""

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

from anypo.batch import Batch
from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.loops.on_policy import step, train
from anypo.method import Method
from anypo.methods.language.bapo import (
    BAD_FORMAT,
    EARLY,
    METHOD,
    BoundaryResampling,
    BoundaryReward,
    StageSwitch,
    distinct_answers,
    reliability,
    resample,
    reward,
    stage,
)
from anypo.methods.language.grpo import METHOD as GRPO
from anypo.run import Run
from anypo.task import Prompt
from tests.helpers import trained


def rows(seed: int, count: int = 40) -> dict[str, Tensor]:
    """Rewards of 0, a partial score or bad format, mostly 0; IDK rows earn 0 or bad format; groups in no order."""
    g = torch.Generator().manual_seed(seed)
    idk = torch.rand(count, generator=g) < 0.3
    score = torch.rand(count, generator=g, dtype=torch.float64) * (torch.rand(count, generator=g) < 0.15) * ~idk
    score[torch.rand(count, generator=g) < 0.2] = BAD_FORMAT
    return {
        "reward": score, "idk": idk, "answer": torch.randint(6, (count,), generator=g), "group": torch.randperm(count, generator=g) % 7,
    }  # fmt: skip


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10_000), early=st.booleans())
def test_without_bonus_it_is_the_reward_of_grpo(seed: int, early: bool) -> None:
    given_rows = rows(seed)
    assert torch.equal(reward(**given_rows, early=early, alpha=2.0, bonus=0.0), given_rows["reward"])


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), early=st.booleans())
def test_without_idk_nothing_changes(seed: int, early: bool) -> None:
    given_rows = rows(seed)
    given_rows["idk"] = torch.zeros_like(given_rows["idk"])
    assert torch.equal(reward(**given_rows, early=early), given_rows["reward"])


def test_the_early_stage_suspends_the_bonus_from_alpha_on() -> None:
    given_rows = rows(0)
    share = float(given_rows["idk"].double().mean())
    assert torch.equal(reward(**given_rows, early=True, alpha=share), given_rows["reward"])
    assert not torch.equal(reward(**given_rows, early=True, alpha=share + 1e-6), given_rows["reward"])
    assert not torch.equal(reward(**given_rows, early=False, alpha=0.0), given_rows["reward"])


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10_000), early=st.booleans())
def test_the_bonus_reaches_readable_idk_of_failing_groups_alone(seed: int, early: bool) -> None:
    r = rows(seed)
    got = reward(**r, early=early, alpha=2.0, n_div=2)
    for g in r["group"].unique():
        members = r["group"] == g
        failed = bool((r["reward"][members] <= 0).all())
        answers = {int(a) for a in r["answer"][members & ~r["idk"]]}
        assert distinct_answers(r["idk"], r["answer"], r["group"])[members].eq(len(answers)).all()
        pays = failed and (early or len(answers) <= 2)
        for i in members.nonzero().flatten().tolist():
            earns = pays and bool(r["idk"][i]) and float(r["reward"][i]) != BAD_FORMAT
            assert got[i] == r["reward"][i] + 0.5 * earns


def test_idk_is_not_lifted_above_a_partial_score() -> None:
    found = reward(torch.tensor([0.1, 0.3, 0.0]), torch.tensor([0, 1, 0]), torch.arange(3), torch.zeros(3, dtype=torch.int64), early=False)
    assert found.tolist() == pytest.approx([0.1, 0.0, 0.0])


def test_a_group_of_idk_alone_earns_the_bonus_and_has_no_advantage() -> None:
    idk, group = torch.ones(4, dtype=torch.bool), torch.zeros(4, dtype=torch.int64)
    found = reward(torch.zeros(4), idk, torch.arange(4), group, early=False, n_div=0)
    assert found.tolist() == [0.5] * 4 and distinct_answers(idk, torch.arange(4), group).eq(0).all()
    assert reward(torch.zeros(0), idk[:0], group[:0], group[:0]).shape == (0,)


def test_the_stage_counts_all_validations_below_the_best_and_ends_for_good() -> None:
    val = torch.tensor([0.5, 0.4, 0.5, 0.4, 0.6, 0.5, 0.9])
    assert stage(val, tolerance=1).tolist() == [True, True, True, False, False, False, False]
    assert stage(val, tolerance=3).all() and stage(torch.linspace(0, 1, 9), tolerance=0).all()


def test_groups_that_fail_without_idk_are_resampled() -> None:
    reward_, idk = torch.tensor([0.0, -1, 0, 0, 0, 0.2, 0, 0]), torch.tensor([0, 0, 0, 1, 0, 0, 0, 0])
    assert resample(reward_, idk, torch.tensor([7, 7, 2, 2, 4, 4, 3, 3])) == [3, 7]


def test_reliability_weighs_precision_and_accuracy() -> None:
    assert reliability(torch.tensor([1.0, 0, 0, 0]), torch.tensor([0, 0, 1, 1])) == (0.5, 0.25, 0.5, 0.375)
    assert reliability(torch.zeros(2), torch.ones(2)) == (0.0, 0.0, 1.0, 0.0)


class Abstaining(TokenBandit):
    """Token 3 as the first token abstains; prompts from 2 on have no right answer. Validation falls at every step."""

    def __init__(self, prompts: int = 6, **options: Any) -> None:
        super().__init__(prompts, **options)

    def collect(self, prompts: list[Prompt], run: Run) -> Batch:
        batch = super().collect(prompts, run)
        batch.signals["abstained"] = batch.action[:, 0] == 3
        return batch

    def score(self, batch: Batch, run: Run) -> Tensor:
        return super().score(batch, run) * (batch.context < 2) * ~batch.signals["abstained"]

    def evaluate(self, run: Run) -> dict[str, float]:
        return {"pass@1": -float(run.step)}


def make_run(method: Method = METHOD, steps: int = 4, out: Path | None = None) -> Run:
    method = method.set("control.0.period", 1).set("control.0.tolerance", 1) if method.control else method
    task = Abstaining(seed=1)
    return Run(method.set("select.group_size", 3), task.policy(scale=0.5), task, steps=steps, seed=2, out=out, checkpoint_every=2)


def test_resampling_replaces_whole_groups_and_keeps_the_others() -> None:
    run = make_run(METHOD.but(rollout=BoundaryResampling(attempts=0)))
    prompts = [p.but(samples=3) for p in run.task.prompts(6, np.random.default_rng(0))]
    plain = run.method.rollout(prompts, run)
    chosen = resample(run.score_rewards(plain), plain.signals["abstained"], plain.group)
    assert chosen
    again = make_run(METHOD.but(rollout=BoundaryResampling(attempts=1)))
    batch = again.method.rollout(prompts, again)
    assert torch.equal(batch.group.bincount(), plain.group.bincount())
    assert torch.equal(batch.context, batch.group), "a group keeps its prompt"
    kept = ~torch.isin(batch.group, torch.tensor(chosen))
    assert torch.equal(batch.action[kept], plain.action[~torch.isin(plain.group, torch.tensor(chosen))])
    assert again.actions == plain.mask.sum() + 3 * 2 * len(chosen)
    assert len(batch.signals["task_reward"]) == len(batch)


def test_resampling_everything_leaves_the_new_rows_alone() -> None:
    class Hopeless(Abstaining):
        def score(self, batch: Batch, run: Run) -> Tensor:
            return torch.zeros(len(batch), dtype=torch.float64)

        def collect(self, prompts: list[Prompt], run: Run) -> Batch:
            batch = super().collect(prompts, run)
            return batch.but(signals=batch.signals | {"abstained": torch.zeros(len(batch), dtype=torch.bool)})

    task = Hopeless()
    run = Run(METHOD, task.policy(), task, steps=1)
    batch = step(run)
    assert len(batch) == 6 * 8 and run.history[0]["resampled_groups"] == 12.0


def test_the_switch_ends_the_stage_for_the_next_batch() -> None:
    run = make_run(steps=5)
    for _ in range(5):
        step(run)
    assert [record["exploring"] for record in run.history] == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert run.state[EARLY] is False
    assert ["validation" in record for record in run.history] == [True, True, True, False, False], "no more validations than needed"


def test_without_bonus_and_resampling_training_is_grpos() -> None:
    ours = METHOD.but(rollout=BoundaryResampling(attempts=0), reward=BoundaryReward(bonus=0.0))
    runs = [train(make_run(method)) for method in (ours, GRPO.but(regularize=()))]
    assert torch.equal(runs[0].policy.logits, runs[1].policy.logits)


def test_resume_continues_identically(tmp_path: Path) -> None:
    whole = train(make_run())
    first = make_run(out=tmp_path)
    step(first)
    step(first)
    continued = make_run(out=tmp_path)
    assert continued.resume() and continued.method.control[0].below == 1  # type: ignore[attr-defined]
    train(continued)
    assert torch.equal(continued.policy.logits, whole.policy.logits) and continued.state == whole.state
    numbers = [v for record in whole.history for v in record.values() if isinstance(v, float)]
    assert all(math.isfinite(v) for v in numbers)


def test_a_task_without_abstention_is_refused() -> None:
    with pytest.raises(ValueError, match="bapo cannot tell who abstained"):
        trained(METHOD, 1)


def test_the_switch_alone_keeps_its_count() -> None:
    switch = StageSwitch()
    switch.load_state_dict({"best": 0.5, "below": 3})
    assert switch.state_dict() == {"best": 0.5, "below": 3}
