"""Environments from the command line: every mistake is one sentence and exit code 2, a failing simulator loses nothing, films and evaluation."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

WORLDS = '''
import gymnasium, numpy as np
from gymnasium import spaces

class World(gymnasium.Env):
    """Ten steps; raises or observes NaN at the sixth step of its third episode, as its kind says. Costs 1 a step."""
    episode = 0
    mended = False

    def __init__(self, kind="fine", render_mode=None):
        if kind == "unmade":
            raise RuntimeError("no license")
        self.kind, self.time = kind, 0
        seen = spaces.Box(-10, 10, (2,), np.float32)
        self.observation_space = spaces.Dict(a=seen, b=seen) if kind == "dict" else seen
        self.action_space = {"binary": spaces.MultiBinary(3), "whole": spaces.Box(0, 5, (2,), np.int64)}.get(kind, spaces.Discrete(2))
        if kind == "cost":
            self.action_space = spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        World.episode, self.time = World.episode + 1, 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.time += 1
        wrong = World.episode >= 3 and self.time == 6 and not World.mended
        if wrong and self.kind == "raises":
            raise RuntimeError("the gripper is stuck")
        seen = np.full(2, np.nan if wrong and self.kind == "nan" else self.time, np.float32)
        return seen, 1.0, self.time == 10, False, {"cost": 1.0} if self.kind == "cost" else {}

for kind in ("fine", "dict", "binary", "whole", "raises", "nan", "cost", "unmade"):
    if f"World-{kind}-v0" not in gymnasium.registry:
        gymnasium.register(f"World-{kind}-v0", entry_point=World, kwargs={"kind": kind})
'''

FEW = ("--option", "envs=1", "--option", "horizon=25", "--option", "evaluation_episodes=1", "--option", "hidden=8")
QUICK = (*FEW, "--set", "update.epochs=1", "--set", "update.minibatches=2")
Command = Callable[..., SimpleNamespace]


@pytest.fixture
def anypo(anypo: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    """The command line in an empty folder that holds the module `worlds`."""
    (tmp_path / "worlds.py").write_text(WORLDS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("worlds", None)
    return anypo


def world(kind: str) -> tuple[str, str]:
    """Arguments that name an environment of the module `worlds`; every kind is a class of its own for the count of episodes."""
    sys.modules.pop("worlds", None)
    import gymnasium

    for name in [n for n in gymnasium.registry if n.startswith("World-")]:
        del gymnasium.registry[name]
    return "--env", f"worlds:World-{kind}-v0"


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("binary", "actions of type MultiBinary; Discrete and continuous Box are supported, so wrap it in a gymnasium.ActionWrapper"),
        ("whole", "actions of type Box of int64"),
        ("dict", "observations of type Dict; Box and Discrete are supported, so wrap it in gymnasium's FlattenObservation"),
    ],
)
def test_unsupported_spaces_are_one_sentence(anypo: Command, kind: str, said: str) -> None:
    assert_mistake(anypo("train", "ppo", *world(kind), "--steps", 1), said)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--env", "CartPol-v1"), "unknown environment 'CartPol-v1'; did you mean CartPole-v1"),
        (("--env", "CartPole-v1", "--option", "video=film.mp4"), "the option video takes true or the name of a .gif file, not 'film.mp4'"),
        (("--env", "worlds:World-fine-v0", "--option", "video=true"), "World-fine-v0 draws no pictures"),
        (("--env", "CartPole-v1", "--option", "on_env_error=maybe"), "on_env_error is stop or restart, not 'maybe'"),
        (("--env", "nowhere:World-v0"), "the environment 'nowhere:World-v0' cannot be made: No module named 'nowhere'"),
        (("--env", "worlds:Word-v0"), "the environment 'worlds:Word-v0' cannot be made"),
        (("--env", "worlds:World-unmade-v0"), "the environment raised RuntimeError when it was made: no license"),
    ],
)
def test_mistakes_are_one_sentence(anypo: Command, arguments: tuple[str, ...], said: str) -> None:
    world("fine")
    assert_mistake(anypo("train", "ppo", *arguments, "--steps", 1, *QUICK), said)


def test_an_offline_method_says_what_it_learns_from(anypo: Command) -> None:
    assert_mistake(anypo("train", "spot", "--env", "Pendulum-v1", "--steps", 1, *FEW), "name a file with the option data")
    data = ("--option", "data=steps.npz")
    assert_mistake(anypo("train", "sac", "--env", "Pendulum-v1", "--steps", 1, *FEW, *data), "there is no recording steps.npz")


def test_a_limit_that_no_policy_meets_is_said(anypo: Command) -> None:
    found = anypo("train", "cpo", *world("cost"), "--steps", 1000, *QUICK, "--set", "update.patience=2", "--set", "credit.epochs=2")
    assert_mistake(found, "no policy seems to meet the cost limit of 5 an episode: the cost has not fallen below 10 for 2 steps")


@pytest.mark.parametrize(("kind", "what"), [("raises", "RuntimeError: the gripper is stuck"), ("nan", "not finite")])
@pytest.mark.parametrize("slug", ["ppo", "grpo"])
def test_a_failing_environment_stops_with_a_checkpoint_to_resume_from(
    anypo: Command, slug: str, kind: str, what: str, tmp_path: Path
) -> None:
    sizes = QUICK if slug == "ppo" else (*FEW, "--set", "select.group_size=2", "--option", "envs=2")
    chosen, out = world(kind), tmp_path / "run"
    found = anypo("train", slug, *chosen, "--steps", 4, "--out", out, *sizes)
    assert_mistake(found, f"World-{kind}-v0")
    assert what in found.stderr and "set the option on_env_error=restart to go on" in found.stderr
    assert any((out / "checkpoints").iterdir())
    sys.modules["worlds"].World.mended = True
    again = anypo("train", slug, "--resume", out)
    assert again.returncode == 0, again.stderr
    assert [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()] == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", ["raises", "nan"])
def test_a_failing_environment_begins_anew_on_request(anypo: Command, kind: str, tmp_path: Path) -> None:
    found = anypo("train", "ppo", *world(kind), "--steps", 3, "--out", tmp_path / "run", *QUICK, "--option", "on_env_error=restart")
    assert found.returncode == 0, found.stderr
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(records) == 3 and records[-1]["environment_failures"] >= 1


def test_a_run_with_a_film_is_evaluated_from_its_folder(anypo: Command, tmp_path: Path) -> None:
    pytest.importorskip("pygame")
    pytest.importorskip("imageio")
    found = anypo(
        "train", "ppo", "--env", "CartPole-v1", "--steps", 2, "--out", tmp_path / "run", *QUICK, "--option", "video=true", "--json"
    )
    assert found.returncode == 0, found.stderr
    assert (tmp_path / "run" / "CartPole-v1.gif").read_bytes()[:4] == b"GIF8"
    for target in (tmp_path / "run", tmp_path / "run" / "model"):
        numbers = json.loads(anypo("eval", target, "--task", "CartPole-v1", "--json").stdout)
        assert numbers["return"]["low"] <= numbers["return"]["value"] <= numbers["return"]["high"]
    assert_mistake(anypo("eval", tmp_path / "run", "--task", "Acrobot-v1"), "does not fit the spaces of Acrobot-v1")


def assert_mistake(found: SimpleNamespace, said: str) -> None:
    assert found.returncode == 2, found.stdout + found.stderr
    assert said in found.stderr
    assert "Traceback" not in found.stderr and len(found.stderr.strip().splitlines()) == 1
