"""Recorded steps: Minari's layouts are read as they are written, learned from, and refused with a sentence when they do not fit."""

from __future__ import annotations

from pathlib import Path

import gymnasium
import numpy as np
import pytest

from anypo import api
from anypo.domains.control.envs import describe, maker
from anypo.domains.control.replay import Recording, read, write

PENDULUM = describe(maker("Pendulum-v1"))
LENGTHS = (5, 12)  # of the episodes that are written


def episodes(name: str) -> list[dict[str, np.ndarray]]:
    """Random episodes with the fields and types that Minari keeps: one more observation than actions, rewards in double precision."""
    environment, kept = gymnasium.make(name), []
    environment.action_space.seed(0)
    for length in LENGTHS:
        observations, actions, rewards = [environment.reset(seed=length)[0]], [], []
        for _ in range(length):
            actions.append(environment.action_space.sample())
            seen, reward, *_ = environment.step(actions[-1])
            observations.append(seen)
            rewards.append(reward)
        ends = np.arange(1, length + 1) == length
        kept.append({"observations": np.array(observations), "actions": np.array(actions), "rewards": np.array(rewards, dtype=np.float64),
                     "terminations": ends & (length == LENGTHS[0]), "truncations": ends & (length != LENGTHS[0])})  # fmt: skip
    return kept


def write_as_minari(folder: Path, kept: list[dict[str, np.ndarray]]) -> Path:
    """`<folder>/data/main_data.hdf5`, with a group an episode. Episode 10 comes before episode 2 in the file's own order."""
    h5py = pytest.importorskip("h5py")
    (folder / "data").mkdir(parents=True)
    with h5py.File(folder / "data" / "main_data.hdf5", "w") as file:
        for number, episode in zip((2, 10), kept, strict=True):
            group = file.create_group(f"episode_{number}")
            group.attrs["id"] = number
            for name, value in episode.items():
                group.create_dataset(name, data=value)
            group.create_group("infos").create_dataset("anything", data=np.zeros(3))
    return folder


def assert_is(found: Recording, kept: list[dict[str, np.ndarray]]) -> None:
    np.testing.assert_array_equal(found.observation, np.concatenate([e["observations"][:-1] for e in kept]))
    np.testing.assert_array_equal(found.next_observation, np.concatenate([e["observations"][1:] for e in kept]))
    np.testing.assert_array_equal(found.action, np.concatenate([e["actions"] for e in kept]))
    np.testing.assert_allclose(found.reward, np.concatenate([e["rewards"] for e in kept]), rtol=1e-6)
    assert found.terminated.nonzero()[0].tolist() == [4] and found.truncated.nonzero()[0].tolist() == [16]


def test_minaris_hdf5_layout_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = episodes("Pendulum-v1")
    folder = write_as_minari(tmp_path / "pendulum" / "random-v0", kept)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    for source in (str(folder), str(folder / "data" / "main_data.hdf5"), "minari:pendulum/random-v0"):
        assert_is(read(source, PENDULUM), kept)


@pytest.mark.filterwarnings("ignore::UserWarning")  # it misses an author and the like
@pytest.mark.parametrize("layout", ["hdf5", "arrow"])
def test_what_minari_itself_writes_is_read(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    minari = pytest.importorskip("minari")
    pytest.importorskip({"hdf5": "h5py", "arrow": "pyarrow"}[layout])
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    kept = episodes("Pendulum-v1")
    buffers = [minari.data_collector.EpisodeBuffer(id=i, infos={}, **{k: list(v) for k, v in e.items()}) for i, e in enumerate(kept)]
    minari.create_dataset_from_buffers("test/pendulum-v0", buffers, env="Pendulum-v1", data_format=layout)
    assert_is(read("minari:test/pendulum-v0", PENDULUM), kept)
    assert_is(read(str(tmp_path / "test" / "pendulum-v0"), PENDULUM), kept)


def test_discrete_observations_are_read_as_one_hot(tmp_path: Path) -> None:
    kept, spaces = episodes("FrozenLake-v1"), describe(maker("FrozenLake-v1"))
    found = read(str(write_as_minari(tmp_path / "lake", kept)), spaces)
    assert found.observation.shape == (17, 16)
    np.testing.assert_array_equal(found.next_observation.argmax(1), np.concatenate([e["observations"][1:] for e in kept]))


def test_offline_learning_from_a_minari_folder_collects_nothing(tmp_path: Path) -> None:
    folder = write_as_minari(tmp_path / "pendulum", episodes("Pendulum-v1"))
    settings = {"rollout.batch_size": 16, "rollout.warmup": 1, "rollout.steps": 4}
    result = api.train("sac", env="Pendulum-v1", steps=2, hidden=16, evaluation_episodes=1, data=str(folder), settings=settings)
    assert result.run is not None and result.run.actions == 0 and result.run.version == 8


def test_recordings_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no recording minari:no/such-v0"):
        read("minari:no/such-v0", PENDULUM)
    with pytest.raises(ValueError, match=r"there is no recording .*steps\.npz"):
        read(str(tmp_path / "steps.npz"), PENDULUM)
    few, none = np.zeros((3, 3), np.float32), np.zeros(3, bool)
    fine = Recording(few, np.zeros((3, 1), np.float32), np.zeros(3, np.float32), few, none, none)
    for wrong, said in (
        (fine._replace(action=np.zeros((3, 2), np.float32)), "another environment"),
        (fine._replace(action=np.zeros(3, np.int64)), "another environment"),
        (fine._replace(reward=np.full(3, np.nan, np.float32)), "not finite"),
    ):
        write(tmp_path / "steps.npz", wrong)
        with pytest.raises(ValueError, match=said):
            read(str(tmp_path / "steps.npz"), PENDULUM)


def test_damaged_and_empty_minari_files_are_refused(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    damaged, empty, parted = (tmp_path / name for name in ("damaged.hdf5", "empty.hdf5", "parted.hdf5"))
    damaged.write_bytes(b"no HDF5 at all")
    h5py.File(empty, "w").close()
    with h5py.File(parted, "w") as file:
        group = file.create_group("episode_0")
        group.create_group("observations").create_dataset("camera", data=np.zeros((2, 3)))
        for name, shape in (("actions", (1, 1)), ("rewards", (1,)), ("terminations", (1,)), ("truncations", (1,))):
            group.create_dataset(name, data=np.zeros(shape))
    for path, said in ((damaged, "no recording that can be read"), (empty, "holds no episodes"), (parted, "several parts")):
        with pytest.raises(ValueError, match=said):
            read(str(path), PENDULUM)
