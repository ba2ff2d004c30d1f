"""Environments: the array forms equal Gymnasium's, states come back exactly, and what is not supported is said."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest

from anypo.domains.control.classic import KNOWN
from anypo.domains.control.envs import Classic, EnvironmentFailed, Separate, describe, make_environments, maker


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_the_array_form_follows_gymnasium_step_by_step(name: str) -> None:
    make = maker(name)
    spaces = describe(make)
    rows = make_environments(make, spaces, 3)
    assert isinstance(rows, Classic)
    theirs = [gymnasium.make(name) for _ in range(3)]
    for row, environment in enumerate(theirs):
        first, _ = environment.reset(seed=10 + row)
        np.testing.assert_allclose(rows.reset(row, 10 + row), first, atol=1e-6)
        environment.action_space.seed(row)
    ends = 0
    for _ in range(600):
        actions = [environment.action_space.sample() for environment in theirs]
        step = rows.step(np.array(actions))
        for row, (environment, action) in enumerate(zip(theirs, actions, strict=True)):
            seen, reward, terminated, truncated, _ = environment.step(action)
            np.testing.assert_allclose(step.observation[row], seen, atol=1e-4)
            assert step.reward[row] == pytest.approx(reward, abs=1e-6)
            assert (bool(step.terminated[row]), bool(step.truncated[row])) == (terminated, truncated)
            if terminated or truncated:
                ends += 1
                first, _ = environment.reset()
                np.testing.assert_allclose(rows.reset(row), first, atol=1e-6)
    assert ends >= 3


def test_stepping_some_rows_leaves_the_others_alone() -> None:
    rows = make_environments(maker("CartPole-v1"), describe(maker("CartPole-v1")), 3)
    for row in range(3):
        rows.reset(row, row)
    before = rows.get_state(1)["state"].copy()
    step = rows.step(np.array([1, 0]), np.array([0, 2]))
    assert step.observation.shape == (2, 4)
    np.testing.assert_array_equal(rows.get_state(1)["state"], before)


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1", "MountainCar-v0", "InvertedPendulum-v5", "Hopper-v5"])
def test_an_episode_goes_on_exactly_from_a_kept_state(name: str) -> None:
    make = maker(name)
    spaces = describe(make)
    rows, twin = make_environments(make, spaces, 1), make_environments(make, spaces, 1)
    assert rows.restorable
    rows.reset(0, 3)
    twin.reset(0, 99)
    rng = np.random.default_rng(0)

    def action() -> np.ndarray:
        return (
            rng.integers(spaces.actions, size=1) if spaces.actions else rng.uniform(-0.3, 0.3, (1, spaces.action_size)).astype(np.float32)
        )

    for _ in range(5):
        rows.step(action())
    twin.set_state(0, rows.get_state(0))
    for _ in range(10):
        a = action()
        ours, theirs = rows.step(a), twin.step(a)
        np.testing.assert_array_equal(ours.observation, theirs.observation)
        assert ours.reward[0] == theirs.reward[0]
    np.testing.assert_array_equal(rows.reset(0), twin.reset(0))  # the random stream came along


def test_an_unknown_environment_is_named_with_its_neighbours() -> None:
    with pytest.raises(ValueError, match="unknown environment 'CartPol-v1'; did you mean CartPole-v1"):
        maker("CartPol-v1")


class Small(gymnasium.Env):
    """A counter; `acts` is its action space. It raises at step 3 when `fault` is raise, and observes NaN when it is nan."""

    def __init__(self, acts: gymnasium.Space | None = None, fault: str = "", seen: gymnasium.Space | None = None) -> None:
        self.action_space = acts or gymnasium.spaces.Discrete(2)
        self.observation_space = seen or gymnasium.spaces.Box(-10, 10, (1,))
        self.fault, self.time = fault, 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        super().reset(seed=seed)
        self.time = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> tuple:
        self.time += 1
        if self.fault == "raise" and self.time == 3:
            raise RuntimeError("the motor is on fire")
        seen = np.full(1, np.nan if self.fault == "nan" and self.time == 3 else self.time, np.float32)
        return seen, 1.0, self.time == 5, False, {"cost": 0.5}


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (lambda: Small(gymnasium.spaces.MultiDiscrete([2, 2])), "actions of type MultiDiscrete"),
        (lambda: Small(gymnasium.spaces.Discrete(2, start=1)), "numbers its actions from 1"),
        (lambda: Small(seen=gymnasium.spaces.Tuple((gymnasium.spaces.Discrete(2),))), "observations of type Tuple"),
    ],
)
def test_unsupported_spaces_are_said(environment: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        describe(environment)  # type: ignore[arg-type]


@pytest.mark.parametrize(("fault", "said"), [("raise", "RuntimeError: the motor is on fire"), ("nan", "not finite")])
def test_a_failing_environment_is_said_or_begins_anew(fault: str, said: str) -> None:
    make = lambda: Small(fault=fault)  # noqa: E731
    strict = Separate(make(), make, describe(make), 2)
    tolerant = Separate(make(), make, describe(make), 2, tolerant=True)
    for rows in (strict, tolerant):
        for row in range(2):
            rows.reset(row, row)
        rows.step(np.zeros(2, int), np.array([1]))
        rows.step(np.zeros(2, int))
    with pytest.raises(EnvironmentFailed, match=said) as caught:
        strict.step(np.zeros(2, int))
    assert caught.value.row == 1 and "after 2 steps" in str(caught.value)
    step = tolerant.step(np.zeros(2, int))
    assert step.failed.tolist() == [False, True] and step.truncated.tolist() == [False, True]
    assert np.isfinite(step.observation).all() and step.cost.tolist() == [0.5, 0.0]
    tolerant.reset(1)
    assert tolerant.failures == 1
    assert tolerant.step(np.zeros(2, int), np.array([1])).observation[0, 0] == 1
