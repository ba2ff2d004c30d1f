"""RePO: what it reduces to, replay strategies against brute force, the buffer, and the components in the loop."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.domains.language.toys.toy_arith import make_toy_arith
from anypo.loops.on_policy import step, train
from anypo.methods.language import grpo
from anypo.methods.language.repo import METHOD, advantages, loss, max_variance, select
from anypo.run import Run
from anypo.seams.credit import GroupRelative
from tests.helpers import assert_resumes, assert_trains, gradient, random_rows, trained


def test_without_replay_it_is_grpo() -> None:
    rows = random_rows(0)
    everyone = torch.ones(8, dtype=torch.bool)
    mine = advantages(rows.reward, rows.group, everyone)
    assert torch.equal(mine, grpo.advantages(rows.reward, rows.group, ddof=1, eps=1e-4))
    rows.logp.requires_grad_(True)
    found = loss(rows.logp, rows.old_logp, mine, rows.mask, everyone)
    plain = grpo.loss(rows.logp, rows.old_logp, rows.ref_logp, rows.mask, mine, beta=0.0)
    torch.testing.assert_close(found.loss, plain.loss, atol=1e-12, rtol=0)
    torch.testing.assert_close(gradient(found, rows.logp)[0], gradient(plain, rows.logp)[0], atol=1e-12, rtol=0)
    assert found.off == 0


def test_nothing_replayed_trains_like_grpo() -> None:
    plain = METHOD.but(rollout=grpo.METHOD.rollout, credit=GroupRelative(ddof=1, eps=1e-4), objective=grpo.METHOD.objective, control=())
    for mine in (METHOD.set("rollout.replayed", 0), METHOD.set("rollout.min_cache", 10_000)):
        torch.testing.assert_close(trained(mine, 4).policy.logits, trained(plain, 4).policy.logits, atol=1e-12, rtol=0)


def test_fresh_looking_replay_is_a_second_grpo_group() -> None:
    rows = random_rows(1)
    online = torch.arange(8) < 4
    mine = advantages(rows.reward, rows.group, online)
    apart = grpo.advantages(rows.reward, 2 * rows.group + online, ddof=1, eps=1e-4)
    assert torch.equal(mine, apart)
    found = loss(rows.old_logp, rows.old_logp, mine, rows.mask, online)
    one = grpo.loss(rows.old_logp, rows.old_logp, rows.ref_logp, rows.mask, apart, beta=0.0)
    torch.testing.assert_close(found.loss, one.loss, atol=1e-12, rtol=0)


def test_lone_and_equal_replayed_rows_have_no_advantage() -> None:
    reward, group = torch.tensor([1.0, 0.0, 5.0, 2.0, 2.0]), torch.tensor([0, 0, 0, 1, 1])
    found = advantages(reward, group, torch.tensor([1, 1, 0, 0, 0]))
    assert found[2:].eq(0).all() and found[:2].ne(0).all()


def test_padding_of_replayed_rows_changes_nothing() -> None:
    rows = random_rows(2)
    online = torch.arange(8) % 2 == 0
    clean = loss(rows.logp, rows.old_logp, rows.advantages, rows.mask, online)
    rows.old_logp[~rows.mask] = float("-inf")
    dirty = loss(rows.logp, rows.old_logp, rows.advantages, rows.mask, online)
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.25, 0.3, 1.0, -2.0]), min_size=1, max_size=8), st.integers(1, 8))
def test_the_largest_variance_is_that_of_all_subsets(values: list[float], k: int) -> None:
    k = min(k, len(values))
    reward = torch.tensor(values, dtype=torch.float64)

    def rank(subset: tuple[int, ...]) -> tuple[float, float, tuple[int, ...]]:
        chosen = reward[list(subset)]
        return (-round(float(chosen.var(correction=0)), 9), -round(float(chosen.sum()), 9), subset)

    assert tuple(max_variance(reward, k)) == min(itertools.combinations(range(len(values)), k), key=rank)


def test_strategies() -> None:
    reward = torch.tensor([0.5, 1.0, 0.0, 1.0, 0.2])
    assert select(reward, "recent", 2, 1) == [3, 4]
    assert select(reward, "highest", 3, 1) == [1, 3, 0]
    assert select(reward, "all", 2, 1) == [0, 1, 2, 3, 4]
    assert select(reward, "highest", 3, 6) == [] and select(torch.zeros(0), "max_variance", 2, 0) == []
    drawn = {i for seed in range(40) for i in select(reward, "random", 2, 1, torch.Generator().manual_seed(seed))}
    assert drawn == {0, 1, 2, 3, 4}
    with pytest.raises(ValueError, match="unknown replay strategy"):
        select(reward, "oldest")


def test_replayed_rows_keep_what_they_were() -> None:
    """Replayed rows are rows of earlier steps, of the same prompt, with their own log-probs and rewards."""
    policy, task = make_toy_arith(target=0.05)
    run = Run(METHOD.set("select.prompts", 100).set("rollout.min_cache", 4), policy, task, steps=3)
    first, second = step(run), step(run)
    online = second.signals["is_online"]
    assert int((~online).sum()) == 800 and second.version is not None
    assert second.version[~online].eq(0).all() and second.version[online].eq(1).all()

    def known(batch: object, i: int) -> tuple[object, ...]:
        b = batch
        return (
            int(b.signals["prompt_id"][i]), tuple(b.action[i].tolist()), tuple(b.logp[i].tolist()), float(b.signals["task_reward"][i]),
            b.signals["completion"][i], b.signals["columns"][i]["solution"], tuple(b.context[i].tolist()),
        )  # type: ignore[attr-defined]  # fmt: skip

    earlier = {known(first, i) for i in range(len(first))}
    assert all(known(second, i) in earlier for i in (~online).nonzero().flatten().tolist())
    assert all(len(torch.unique(second.signals["prompt_id"][second.group == g])) == 1 for g in range(100))


def test_the_kl_is_that_of_fresh_rows() -> None:
    run = trained(METHOD.set("objective.beta", 0.1), 3)
    assert "ref_logp" in METHOD.set("objective.beta", 0.1).needs() and run.history[-1]["kl"] > 0


def test_several_rewards() -> None:
    def two(prompt: torch.Tensor, action: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.stack([(action[:, 0] == 1).double(), 10.0 * (action[:, 1] == 1).double()], dim=1)

    task = TokenBandit(2, 3, 2, reward=two, objectives=("first", "second"))
    run = train(Run(METHOD, task.policy(scale=0.1), task, steps=4))
    assert torch.isfinite(run.policy.logits).all() and run.history[-1]["replayed"] == 1


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        trained(METHOD.set("control.0.capacity", 0), 1)
    with pytest.raises(ValueError, match="seq or token"):
        trained(METHOD.set("objective.aggregation", "rows"), 1)


def test_it_trains_and_resumes(tmp_path: Path) -> None:
    assert_trains(METHOD)
    assert_resumes(METHOD, tmp_path)
