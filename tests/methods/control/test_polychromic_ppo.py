"""Polychromic PPO: sets, shared advantages and their clipped loss, the vine, and the method on an environment and on strings."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from anypo.batch import Batch
from anypo.domains.control.setup import build
from anypo.domains.language.toys.token_bandit import TokenBandit
from anypo.loops import on_policy
from anypo.methods.control.polychromic_ppo import (
    FOR_DOMAIN,
    METHOD,
    VARIANTS,
    SetCredit,
    VineRollout,
    Visited,
    advantages,
    draw_sets,
    first_actions,
    loss,
    pass_at_k,
    set_scores,
    vine_loss,
)
from anypo.run import Run
from anypo.seams.credit import group_relative
from anypo.seams.objective import clipped
from anypo.seams.rollout import continue_rows
from tests.helpers import assert_resumes, assert_resumes_on_cartpole, assert_trains, gradient, random_rows

LANGUAGE = FOR_DOMAIN["language"]


def problem(seed: int, rows: int = 6, size: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    sets = torch.tensor(list(itertools.combinations(range(rows), size)))
    return torch.rand(rows, generator=g, dtype=torch.float64), torch.randint(3, (rows,), generator=g), sets


@pytest.mark.parametrize("seed", range(3))
def test_scores_and_shares_one_set_at_a_time(seed: int) -> None:
    reward, signature, sets = problem(seed)
    sets = sets[torch.randperm(len(sets), generator=torch.Generator().manual_seed(seed))[:7]]
    found, scores = advantages(reward, signature, sets), set_scores(reward, signature, sets)
    share = torch.zeros(6, dtype=torch.float64)
    for g, rows in enumerate(sets.tolist()):
        diversity = len({int(signature[i]) for i in rows}) / 3
        torch.testing.assert_close(scores.score[g], diversity * reward[rows].mean())
        share[rows] += 6 / (len(sets) * 3) * (scores.score[g] - scores.score.mean())
    torch.testing.assert_close(found.trajectory, share)
    torch.testing.assert_close(found.gain + found.loss, share)
    shuffled = sets[:, torch.randperm(3, generator=torch.Generator().manual_seed(seed))]
    torch.testing.assert_close(set_scores(reward, signature, shuffled).score, scores.score)


def test_sets_of_one_are_the_group_relative_advantage() -> None:
    reward, signature, _ = problem(3)
    found = advantages(reward, signature, torch.arange(6)[:, None])
    torch.testing.assert_close(found.trajectory, group_relative(reward, torch.zeros(6, dtype=torch.int64), std=False))


def test_distinct_identical_unsuccessful_and_lone_sets() -> None:
    reward, _, sets = problem(4)
    same, different = torch.zeros(6, dtype=torch.int64), torch.arange(6)
    torch.testing.assert_close(set_scores(reward, different, sets).score, reward[sets].mean(1))
    torch.testing.assert_close(set_scores(reward, same, sets).score, reward[sets].mean(1) / 3)
    assert set_scores(reward, same, sets, "shifted").score.eq(0).all()
    assert advantages(torch.zeros_like(reward), different, sets).trajectory.eq(0).all()
    assert advantages(reward, different, sets[:1]).trajectory.eq(0).all()
    with pytest.raises(ValueError, match="fraction or shifted"):
        set_scores(reward, same, sets, "entropy")


def test_states_do_not_meet() -> None:
    (r0, s0, sets), (r1, s1, _) = problem(5), problem(6)
    group = torch.arange(12) // 6
    together = advantages(torch.cat([r0, r1]), torch.cat([s0, s1]), torch.cat([sets, sets + 6]), group=group)
    alone = [advantages(r, s, sets).trajectory for r, s in ((r0, s0), (r1, s1))]
    torch.testing.assert_close(together.trajectory, torch.cat(alone))


@pytest.mark.parametrize("window", [None, 2])
def test_the_clip_is_inside_the_sum_over_sets(window: int | None) -> None:
    rows = random_rows(0, rows=6, spread=0.6)
    reward, signature, sets = problem(7)
    found = advantages(reward, signature, sets)
    inside = first_actions(rows.mask, torch.zeros(6, dtype=torch.int64), window)
    ratio = torch.where(inside, (rows.logp - rows.old_logp).exp(), 1.0)
    total = torch.zeros((), dtype=torch.float64)
    for g, members in enumerate(sets.tolist()):
        for i in members:
            total -= clipped(ratio[i], found.set[g], 0.8, 1.2)[inside[i]].mean() / (3 * len(sets))
    torch.testing.assert_close(loss(rows.logp, rows.old_logp, rows.mask, reward, signature, sets, 0.2, window), total)
    averaged = -(clipped(ratio, found.trajectory[:, None], 0.8, 1.2) * inside).sum(1) / inside.sum(1)
    assert not torch.isclose(averaged.mean(), total)  # what clipping the averaged advantage would give


def test_without_a_clip_it_is_reinforce_with_the_shares() -> None:
    rows = random_rows(1, rows=6)
    reward, signature, sets = problem(8)
    logp = rows.logp.clone().requires_grad_()
    (found,) = gradient(loss(logp, rows.old_logp, rows.mask, reward, signature, sets, clip=1e6), logp)
    share = advantages(reward, signature, sets).trajectory[:, None]
    ratio = (rows.logp - rows.old_logp).exp()
    torch.testing.assert_close(found, torch.where(rows.mask, -ratio * share / rows.mask.sum(1, keepdim=True) / 6, 0.0))


def test_padding_does_not_matter() -> None:
    rows = random_rows(2, rows=6)
    reward, signature, sets = problem(9)
    wild = torch.where(rows.mask, rows.logp, float("-inf")).requires_grad_()
    found = loss(wild, torch.where(rows.mask, rows.old_logp, float("nan")), rows.mask, reward, signature, sets)
    torch.testing.assert_close(found, loss(rows.logp, rows.old_logp, rows.mask, reward, signature, sets))
    assert torch.isfinite(gradient(found, wild)[0]).all()
    assert vine_loss(rows.logp, rows.old_logp, reward, -reward, torch.zeros_like(rows.mask)) == 0


def test_sets_hold_rows_of_one_state_and_none_twice() -> None:
    group = torch.tensor([3, 1, 3, 1, 3, 1, 3, 1])
    every = draw_sets(group, 2, None, torch.Generator())
    assert len(every) == 12 and (group[every[:, 0]] == group[every[:, 1]]).all()
    some = draw_sets(group, 3, 2, torch.Generator().manual_seed(0))
    assert some.shape == (4, 3) and all(len(set(row)) == 3 for row in some.tolist()) and (group[some] == group[some[:, :1]]).all()
    with pytest.raises(ValueError, match=r"select\.group_size to 5"):
        draw_sets(group, 5, None, torch.Generator())


def test_pass_at_k_of_all_and_none() -> None:
    assert pass_at_k(8, torch.tensor([0, 8, 1]), 4).tolist() == [0.0, 1.0, 0.5]


def vined(states: int = 3) -> tuple[Run, Batch]:
    policy, task = build("CartPole-v1", None, seed=0, hidden=(16, 16))
    run = Run(VARIANTS["window"].but(rollout=VineRollout(states=states)), policy, task, steps=2, seed=0)
    return run, on_policy.step(run)


def test_the_vine_restores_its_states_exactly_and_acts_on_policy() -> None:
    policy, task = build("CartPole-v1", None, seed=0, hidden=(16, 16))
    run = Run(METHOD.but(rollout=VineRollout(states=3)), policy, task, steps=1, seed=0)
    run.begin_step()
    batch = run.method.rollout(run.method.select(task, run), run)
    assert len(batch) == 2 * 8 * 3 and len(torch.unique(batch.group)) == 6
    grown = (batch.parent >= 0).nonzero().flatten()
    assert len(grown) == 32 and (batch.branch_at[grown] > 0).all()
    for row in grown.tolist():
        parent, depth = int(batch.parent[row]), int(batch.branch_at[row])
        assert torch.equal(batch.context[row, : depth + 1], batch.context[parent, : depth + 1])
        assert torch.equal(batch.action[row, :depth], batch.action[parent, :depth])
        assert batch.parent[batch.group == batch.group[row]].eq(parent).all()
    torch.testing.assert_close(policy.observe(batch, {"logp"}).logp, batch.logp)
    assert run.actions == int(batch.mask.sum() - batch.branch_at.sum())
    again = task.continue_rows(batch, torch.tensor([0, 1]), batch.lengths[:2], run)
    assert torch.equal(again.action[0, : batch.lengths[0]], batch.action[0, : batch.lengths[0]]) and torch.equal(
        again.lengths, batch.lengths[:2]
    )


def test_sets_for_the_window_and_ppo_for_the_rest() -> None:
    run, batch = vined()
    start, place = batch.branch_at[:, None], torch.arange(batch.horizon)[None]
    assert torch.equal(batch.signal("vine"), batch.mask & (place >= start) & (place < start + 5))
    assert torch.equal(batch.counted, batch.mask & (place >= start))
    rest = batch.counted & ~batch.signal("vine")
    assert abs(float(batch.advantage[rest].mean())) < 1e-5 and batch.advantage[~batch.counted].eq(0).all()
    assert torch.isfinite(torch.tensor([v for v in run.history[-1].values() if isinstance(v, float)])).all()


def test_segments_and_lone_attempts_are_refused() -> None:
    policy, task = build("CartPole-v1", None, seed=0, envs=2, horizon=16, hidden=(8,))
    run = Run(METHOD.set("select.group_size", 1), policy, task, steps=1, seed=0)
    with pytest.raises(ValueError, match=r"select\.group_size"):
        on_policy.step(run)
        on_policy.step(run)


def test_segments_cannot_be_continued() -> None:
    policy, task = build("CartPole-v1", None, seed=0, envs=2, horizon=4, hidden=(8,))
    run = Run(METHOD, policy, task, steps=1, seed=0)
    prompts = task.prompts(2, run.rng)
    for _ in range(2):
        batch = run.collect(prompts)
    with pytest.raises(ValueError, match="whole episodes"):
        continue_rows(batch, torch.arange(2), torch.tensor([1, 2]), run)


def test_returns_are_scaled_to_what_was_seen() -> None:
    run, _ = vined()
    run.state["polychromic.range"] = [0.0, 0.0]
    assert SetCredit().scaled(torch.zeros(3), run).eq(0).all()
    assert SetCredit().scaled(torch.tensor([-2.0, 2.0, 0.0]), run).tolist() == [0.0, 1.0, 0.5]
    assert SetCredit().scaled(torch.tensor([1.0]), run).tolist() == [0.75]
    assert SetCredit(low=0.0, high=1.0).scaled(torch.tensor([-1.0, 0.5, 3.0]), run).tolist() == [0.0, 0.5, 1.0]


def test_trajectories_are_told_apart_by_what_they_visit() -> None:
    _, batch = vined(1)
    seen = torch.tensor([[[0.0], [1.0]], [[1.0], [0.02]], [[1.0], [5.0]]])
    small = batch[:3].but(context=seen, action=torch.tensor([[0, 1], [1, 1], [0, 1]]))
    whole = torch.ones(3, 2, dtype=torch.bool)
    assert Visited()(small, whole).tolist() == [0, 0, 1]
    assert Visited()(small.but(context=["a"] * 3), whole).tolist() == [0, 1, 0]
    assert Visited()(small, torch.tensor([[False, True]] * 3)).tolist() == [0, 1, 2]


def test_the_control_form_continues_identically(tmp_path: Path) -> None:
    assert_resumes_on_cartpole(METHOD, tmp_path / "all")
    assert_resumes_on_cartpole(VARIANTS["window"], tmp_path / "window")


def test_continuous_actions_and_negative_rewards() -> None:
    policy, task = build("Pendulum-v1", None, seed=0, hidden=(8,))
    run = Run(METHOD.set("select.prompts", 1), policy, task, steps=2, seed=0)
    on_policy.train(run)
    assert run.state["polychromic.range"][0] < 0 == run.state["polychromic.range"][1]
    assert all(torch.isfinite(p).all() for p in policy.parameters())


def test_the_language_form_trains_and_continues_identically(tmp_path: Path) -> None:
    run = assert_trains(LANGUAGE, reward=lambda prompt, action, mask: (action[:, 0] == 1).double())
    assert run.history[-1]["kinds"] >= 1
    assert_resumes(LANGUAGE, tmp_path)


def test_sets_are_diverse_in_strings() -> None:
    task = TokenBandit(prompts=2)
    run = Run(LANGUAGE, task.policy(), task, steps=1, seed=0)
    batch = on_policy.step(run)
    kinds = [len({tuple(a) for a in batch.action[batch.group == g].tolist()}) for g in range(2)]
    assert run.history[-1]["kinds"] == sum(kinds) / 2
