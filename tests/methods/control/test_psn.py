"""PSN: what the spec says it reduces to, the veto and ties, the students of the skill grid, and the loop."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anypo.domains.control.setup import build
from anypo.domains.control.skill_grid import (
    CELLS,
    ENDS,
    EXPERT,
    GOAL,
    NEXT,
    PAYS,
    PITS,
    QUALITY,
    START,
    SkillGrid,
    Students,
    competence,
    initial_skill,
    lessons,
    move_probabilities,
    student_update,
    unassisted_return,
    view,
)
from anypo.loops import on_policy
from anypo.method import Method
from anypo.methods.control.psn import METHOD, VARIANTS, Nudger, guidance, learnability, nudge
from anypo.run import Run


def small_run(method: Method = METHOD, steps: int = 4, out: Path | None = None, env: str = "SkillGrid-v0", horizon: int = 32) -> Run:
    method = method.set("update.epochs", 2).set("update.minibatches", 2)
    policy, task = build(env, None, seed=0, envs=4, horizon=horizon, hidden=(16, 16))
    run = Run(method, policy, task, steps=steps, seed=0, out=out, checkpoint_every=2)
    if out is not None:
        run.resume()
    return run


def candidates(seed: int, rows: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, learn_next, b [rows,4]; the last candidate is the expert's, with the largest q."""
    g = torch.Generator().manual_seed(seed)
    q, learn = torch.rand(rows, 4, generator=g, dtype=torch.float64), torch.rand(rows, 4, generator=g, dtype=torch.float64)
    q[:, 3] = q.amax(1) + 0.1
    return q, learn, torch.tensor([0.0, 0.25, 0.5, 1.0], dtype=torch.float64).expand(rows, 4)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.0, 1.0), st.floats(0.0, 5.0))
def test_mastered_and_hopeless_states_teach_nothing(seed: int, margin: float, w_learn: float) -> None:
    q, learn, b = candidates(seed)
    known = (learn > 0.5).double()  # competence 0 or 1
    with_bonus = nudge(q, learnability(known), b, q[:, 3], w_learn=w_learn, margin=margin)
    without = nudge(q, learn, b, q[:, 3], w_learn=0.0, margin=margin)
    assert torch.equal(with_bonus.score, without.score) and torch.equal(with_bonus.index, without.index)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.0, 1.0))
def test_without_the_bonus_it_is_value_based_correction_with_a_veto(seed: int, margin: float) -> None:
    q, learn, b = candidates(seed)
    found = nudge(q, learn, b, q[:, 3], w_learn=0.0, w_assist=0.2, margin=margin)
    worth = torch.where(q < q[:, 3:] - margin, -torch.inf, q - 0.2 * b)
    assert torch.equal(found.index, worth.argmax(1))


def test_the_expert_survives_every_veto_and_ties_go_to_the_least_assistance() -> None:
    q, learn, b = candidates(0)
    assert (nudge(q, learn, b, 1e6, w_learn=100.0, w_assist=50.0).index == 3).all()  # an expert value that no candidate has
    same = torch.ones(2, 3)
    assert nudge(same, same, torch.tensor([[1.0, 0.0, 0.5], [0.5, 1.0, 0.25]]), 1.0, w_assist=0.0).index.tolist() == [1, 2]


def test_progress_is_relative_and_unknown_kinds_are_refused() -> None:
    p, old = torch.tensor([0.5, 0.4, 0.1]), torch.tensor([0.1, 0.3, 0.2])
    torch.testing.assert_close(learnability(p, old, "progress"), torch.tensor([1.0, 0.25, 0.0]))
    for kind, previous in (("flow", old), ("progress", None)):
        with pytest.raises(ValueError, match="learnability is"):
            learnability(p, previous, kind)
    assert guidance(0.5, 0.9) == 0.0 and guidance(0.5, 1.0) == 0.0 and guidance(0.5, 0.0) == 0.5


def test_the_expert_reaches_the_goal_and_values_are_exact() -> None:
    cell, steps = START, 0
    while not ENDS[cell]:
        cell, steps = int(NEXT[cell, EXPERT[cell]]), steps + 1
    assert cell == GOAL and QUALITY[START].max() == pytest.approx(0.97 ** (steps - 1))
    assert PAYS[list(PITS)].tolist() == [-1.0] * 4 and initial_skill()[START] == 0.9 and np.allclose(initial_skill()[list(PITS)], 0.1)
    assert unassisted_return(np.ones(CELLS)) == pytest.approx(1.0)


def test_the_exact_return_is_the_mean_of_episodes() -> None:
    skill = np.full(CELLS, 0.8)
    assert np.allclose(move_probabilities(skill).sum(-1), 1)
    rng, students = np.random.default_rng(0), Students(4000)
    students.skill[:] = skill
    rows, total = np.arange(4000), 0.0
    students.begin(rows, rng)
    students.eta = students.rho = 0.0
    for _ in range(40):
        reward, ended = students.step(rows, np.zeros(len(rows)), rng)
        total, rows = total + reward.sum(), rows[~ended]
    assert total / 4000 == pytest.approx(float(unassisted_return(skill)), abs=0.05)


@settings(max_examples=30, deadline=None)
@given(st.floats(0.02, 0.98), st.floats(0.0, 1.0))
def test_skill_grows_by_doing_and_decays_under_assistance(skill: float, b: float) -> None:
    assert student_update(np.array(skill), 0.0) >= skill and student_update(np.array(skill), 1.0) <= skill
    assert 0.02 <= student_update(np.array(skill), b, 5.0, 5.0) <= 0.98


def test_practice_and_autopilot_are_the_ends_of_assistance() -> None:
    practice, autopilot = (lessons(lambda o, b=b: np.full(len(o), b), students=4, episodes=20) for b in (0.0, 1.0))
    never = lessons(Nudger(w_task=0.0, w_learn=0.0, margin=1e9), students=4, episodes=20)
    assert all(np.array_equal(a, b) for a, b in zip(practice, never, strict=True))
    assert (autopilot.gain <= 0).all() and (practice.gain > 0).all() and (autopilot.pits == 0).all()


def test_competence_comes_from_unassisted_steps_alone() -> None:
    students, rng, rows = Students(3), np.random.default_rng(0), np.arange(3)
    students.begin(rows, rng)
    students.step(rows, np.array([0.0, 0.5, 1.0]), rng)
    assert students.trials.sum(1).tolist() == [1.0, 0.0, 0.0] and (competence(students.successes, students.trials)[1:] == 0.5).all()
    students.cell[:] = GOAL
    assert (view(students.observe(rows)).here == 0).all()  # nothing to learn where an episode ends


def test_the_reward_is_the_shared_one_and_the_veto_reads_observations() -> None:
    run = small_run()
    batch = on_policy.step(run)
    after = view(batch.signals["next_context"]).here
    wanted = batch.signals["raw_reward"] + 0.5 * 4 * after * (1 - after) - 0.2 * batch.action
    torch.testing.assert_close(batch.reward, wanted)
    seen = np.zeros((2, CELLS + 5), dtype=np.float32)
    seen[0, CELLS + 1], seen[:, CELLS + 2 :] = -1.5, 0.5
    assert Nudger(w_task=0.0)(seen).tolist() == [1, 0]


def test_guidance_fades_with_competence() -> None:
    run = small_run(VARIANTS["fading"])
    first, second = on_policy.step(run), on_policy.step(run)
    mean = float(view(first.context).here.mean())
    assert run.history[0]["w_learn"] == pytest.approx(0.5 * (1 - mean / 0.9))
    after = view(second.signals["next_context"]).here
    wanted = second.signals["raw_reward"] + run.history[0]["w_learn"] * 4 * after * (1 - after) - 0.2 * second.action
    torch.testing.assert_close(second.reward, wanted)


@pytest.mark.parametrize("method", [METHOD, VARIANTS["fading"]])
def test_a_stopped_run_continues_identically(method: Method, tmp_path: Path) -> None:
    whole = on_policy.train(small_run(method, 4, tmp_path / "whole"))
    on_policy.train(small_run(method, 2, tmp_path / "halves"))
    halves = on_policy.train(small_run(method, 4, tmp_path / "halves"))
    for a, b in zip(whole.policy.parameters(), halves.policy.parameters(), strict=True):
        assert torch.equal(a, b) and torch.isfinite(a).all()


def test_students_stay_for_their_episodes_and_other_environments_are_refused() -> None:
    env = SkillGrid()
    env.reset(seed=0)
    env.student.skill[:] = 0.5
    for _ in range(299):
        env.reset()
    assert (env.student.skill == 0.5).all()
    env.reset()
    assert (env.student.skill[0] == initial_skill()).all() and env.episode == 1
    with pytest.raises(ValueError, match="SkillGrid"):
        on_policy.step(small_run(env="CartPole-v1"))
