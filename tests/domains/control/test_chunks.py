"""Action chunks: several environment steps as one, and recordings cut to fit; environments made of array equations."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest

from anypo.domains.control import point_avoid, two_goals
from anypo.domains.control.chunks import Chunked, windows
from anypo.domains.control.envs import Classic, describe, make_environments, maker
from anypo.domains.control.replay import Recording
from anypo.domains.control.tasks import GymTask


def test_a_chunk_is_its_steps_in_a_row() -> None:
    make = maker("Pendulum-v1")
    spaces = describe(make)
    plain, chunked = make_environments(make, spaces, 2), Chunked(make_environments(make, spaces, 2), 3)
    for row in range(2):
        np.testing.assert_array_equal(plain.reset(row, row), chunked.reset(row, row))
    actions = np.random.default_rng(0).uniform(-2, 2, (2, 3))
    total = chunked.step(actions)
    steps = [plain.step(actions[:, i : i + 1]) for i in range(3)]
    np.testing.assert_allclose(total.reward, sum(s.reward for s in steps))
    np.testing.assert_array_equal(total.observation, steps[-1].observation)
    assert GymTask("Pendulum-v1", action_chunk=3).spaces.action_size == 3


def test_what_is_left_of_a_chunk_after_an_end_is_not_taken() -> None:
    make = maker(point_avoid.NAME)
    chunked = Chunked(make_environments(make, describe(make), 2), 4)
    state = chunked.get_state(0)
    chunked.set_state(0, state | {"state": np.array([0.83, 0.0])})  # two whole steps from the goal
    chunked.set_state(1, state | {"state": np.array([0.0, 0.5])})
    seen = chunked.step(np.tile([1.0, 0.0], (2, 4)))
    assert seen.terminated.tolist() == [True, False] and seen.reward.tolist() == [1.0, 0.0]
    np.testing.assert_allclose(seen.observation, [[0.93, 0.0], [0.2, 0.5]], atol=1e-6)
    only = chunked.step(np.tile([1.0, 0.0], (1, 4)), np.array([1]))
    np.testing.assert_allclose(only.observation, [[0.4, 0.5]], atol=1e-6)


def test_windows_stop_at_the_end_of_an_episode() -> None:
    ends = np.array([False, False, True, False, True])
    numbers = np.arange(5, dtype=np.float32)
    recording = Recording(numbers[:, None], numbers[:, None], numbers, numbers[:, None] + 1, ends, np.zeros(5, bool))
    found = windows(recording, 2)
    np.testing.assert_array_equal(found.action, [[0, 1], [1, 2], [2, 2], [3, 4], [4, 4]])
    np.testing.assert_array_equal(found.reward, [1, 3, 2, 7, 4])
    np.testing.assert_array_equal(found.next_observation[:, 0], [2, 3, 3, 5, 5])
    np.testing.assert_array_equal(found.terminated, [False, True, True, True, True])
    assert windows(recording, 1) is recording


def test_chunks_of_discrete_actions_are_refused() -> None:
    with pytest.raises(ValueError, match="action_chunk takes continuous"):
        GymTask("CartPole-v1", action_chunk=2)


@pytest.mark.parametrize("name", [point_avoid.NAME, two_goals.NAME])
def test_array_environments_step_alike_one_by_one_and_together(name: str) -> None:
    make = maker(name)
    rows, alone = make_environments(make, describe(make), 3), [gymnasium.make(name) for _ in range(3)]
    assert isinstance(rows, Classic) and rows.limit == make().spec.max_episode_steps
    for row, environment in enumerate(alone):
        np.testing.assert_allclose(rows.reset(row, row), environment.reset(seed=row)[0], atol=1e-6)
    rng = np.random.default_rng(0)
    for _ in range(10):
        action = rng.uniform(-1.2, 1.2, (3, 2))
        seen = rows.step(action)
        for row, environment in enumerate(alone):
            observation, reward, terminated, _, _ = environment.step(action[row])
            np.testing.assert_allclose(seen.observation[row], observation, atol=1e-6)
            assert (seen.reward[row], seen.terminated[row]) == (reward, terminated)


def test_demonstrations_succeed_on_both_sides_of_the_disc() -> None:
    task = GymTask(point_avoid.NAME, action_chunk=4)
    shown = task.demonstrations(np.random.default_rng(0))
    assert shown is not None and shown.action.shape[1] == 8
    plain = GymTask(point_avoid.NAME).demonstrations(np.random.default_rng(0))
    assert plain is not None
    ends = np.flatnonzero(plain.terminated | plain.truncated)
    assert len(ends) == point_avoid.DEMONSTRATIONS and (plain.reward[ends] == 1).all()
    beside = np.abs(plain.observation[:, 0] - 0.5) < 0.1
    assert (plain.observation[beside, 1] > 0.2).any() and (plain.observation[beside, 1] < -0.2).any()
    assert GymTask("Pendulum-v1").demonstrations(np.random.default_rng(0)) is None


def test_a_goal_of_the_grid_is_reached_within_its_columns_only() -> None:
    grid = two_goals.Grid()
    moved = grid.step(np.array([[12.0, 8.0, 12.0], [23.0, 23.0, 12.0]]), np.array([[0.0, 1.0], [0.0, 1.0], [0.0, 9.0]]))
    assert moved.terminated.tolist() == [True, False, False] and moved.reward.tolist() == [1.0, 0.0, 0.0]
    assert moved.state[1, 2] == 13.0  # at most one cell a step
