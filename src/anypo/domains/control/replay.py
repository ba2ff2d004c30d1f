"""Recorded steps on disk, for offline learning: `.npz` files (written here) and Minari datasets (their HDF5 files with `h5py`, others through `minari`).

A recording holds actions in the environment's units, whoever took them. Nothing is downloaded: a Minari dataset is a folder or file, or an id whose data
is already on this machine. Left out: observations of several parts (Dict, Tuple) and pictures.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from anypo.batch import Batch
from anypo.domains.control.collect import episodes
from anypo.domains.control.envs import Environments, Spaces
from anypo.domains.control.policy import EnvironmentPolicy


class Recording(NamedTuple):
    """M steps in the order they were taken."""

    observation: NDArray[np.float32]  # [M,O]
    action: NDArray  # [M] integers or [M,D], as the environment took them
    reward: NDArray[np.float32]  # [M]
    next_observation: NDArray[np.float32]  # [M,O], before any reset
    terminated: NDArray[np.bool_]  # [M]
    truncated: NDArray[np.bool_]  # [M]


def read(source: str, spaces: Spaces) -> Recording:
    """A recording from `file.npz`, a Minari dataset (its folder, its `main_data.hdf5`) or `minari:<id>`.

    Raises ValueError when there is none or when it does not fit the environment, ImportError when a package that it needs is missing.
    """
    found = _read_npz(Path(source)) if source.endswith(".npz") else _read_minari(source, spaces)
    acted = found.action.shape[1:] == (() if spaces.actions is not None else (spaces.action_size // spaces.chunk,))
    if found.observation.shape[1:] != (spaces.observation_size,) or not acted:
        raise ValueError(f"{source} was recorded in another environment: its observations or actions do not fit {spaces.name}")
    if not all(np.isfinite(part).all() for part in found):
        raise ValueError(f"{source} holds numbers that are not finite; leave those steps out")
    return found


def write(path: Path | str, recording: Recording) -> None:
    """Save a recording as a compressed `.npz` file."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **recording._asdict())  # type: ignore[arg-type]


def record_episodes(policy: EnvironmentPolicy, environments: Environments, seeds: list[int], rng: np.random.Generator | None) -> Recording:
    """Whole episodes of a policy from start seeds; sampled with `rng`, or by the likeliest actions when it is None."""
    noise = (lambda n: policy.noise(rng, (n,))) if rng is not None else None
    seen = episodes(environments, seeds, policy.actor(), policy.for_environment, noise)
    keep = seen.mask
    return Recording(
        seen.observation[keep], policy.for_environment(seen.action[keep]), seen.reward[keep], seen.following[keep], seen.terminated[keep],
        seen.truncated[keep],
    )  # fmt: skip


def joined(recordings: list[Recording]) -> Recording:
    """Several recordings as one."""
    return Recording(*(np.concatenate(parts) for parts in zip(*recordings, strict=True)))


def as_batch(recording: Recording, policy: EnvironmentPolicy) -> Batch:
    """The steps as M trajectories of one action, in the policy's own units."""
    action = torch.as_tensor(policy.from_environment(recording.action)).unsqueeze(1)
    reward = torch.from_numpy(recording.reward.astype(np.float32)).unsqueeze(1)
    mask = torch.ones(reward.shape, dtype=torch.bool)
    return Batch(
        action=action, mask=mask, logp=torch.zeros(mask.shape), group=torch.arange(len(mask)), reward=reward,
        context=torch.from_numpy(recording.observation.astype(np.float32)).unsqueeze(1),
        terminated=torch.from_numpy(recording.terminated).unsqueeze(1), truncated=torch.from_numpy(recording.truncated).unsqueeze(1),
        signals={"next_context": torch.from_numpy(recording.next_observation.astype(np.float32)).unsqueeze(1)},
    )  # fmt: skip


class _Episode(NamedTuple):
    """An episode of T steps as Minari keeps it."""

    observations: NDArray  # [T+1,...], the last one after the last step
    actions: NDArray  # [T,...]
    rewards: NDArray  # [T]
    terminations: NDArray  # [T]
    truncations: NDArray  # [T]


def _read_npz(path: Path) -> Recording:
    if not path.exists():
        raise ValueError(f"there is no recording {path}; benchmarks/make_offline.py writes one")
    with np.load(path) as stored:
        absent = [name for name in Recording._fields if name not in stored]
        if absent:
            raise ValueError(f"{path} is no recording of steps: it lacks {', '.join(absent)}")
        return Recording(*(stored[name] for name in Recording._fields))


def _read_minari(source: str, spaces: Spaces) -> Recording:
    root = Path(os.environ.get("MINARI_DATASETS_PATH", Path.home() / ".minari" / "datasets"))
    place = root / source.removeprefix("minari:") if source.startswith("minari:") else Path(source)
    data = place / "data" if (place / "data").is_dir() else place
    file = data / "main_data.hdf5" if data.is_dir() else data
    if not data.exists():
        raise ValueError(
            f"there is no recording {source}; give file.npz, the folder of a Minari dataset, its main_data.hdf5 or minari:<id>"
        )
    try:
        parts = [_as_recording(e, spaces) for e in (_hdf5_episodes(file) if file.is_file() else _minari_episodes(data))]
    except (OSError, KeyError, TypeError) as error:
        raise ValueError(f"{source} is no recording that can be read ({error}); give file.npz or a Minari dataset") from error
    if not parts:
        raise ValueError(f"{source} holds no episodes")
    return joined(parts)


def _hdf5_episodes(file: Path) -> Iterator[_Episode]:
    """From Minari's HDF5 layout: a group `episode_<number>` with a data set for every field."""
    try:
        import h5py
    except ImportError as error:
        raise ImportError('HDF5 recordings need the package h5py; pip install "anypo[control]"') from error
    with h5py.File(file) as stored:
        for name in sorted((n for n in stored if n.startswith("episode_")), key=lambda n: int(n.removeprefix("episode_"))):
            group = stored[name]
            if not all(isinstance(group[field], h5py.Dataset) for field in _Episode._fields):
                raise ValueError(f"{file} holds observations or actions of several parts; flatten them into one array each")
            yield _Episode(*(group[field][()] for field in _Episode._fields))


def _minari_episodes(data: Path) -> Iterator[_Episode]:
    try:
        import minari
    except ImportError as error:
        raise ImportError('Minari datasets that are no HDF5 files need the package minari; pip install "anypo[control]"') from error
    for e in minari.MinariDataset(data).iterate_episodes():
        yield _Episode(*(np.asarray(getattr(e, field)) for field in _Episode._fields))


def _as_recording(episode: _Episode, spaces: Spaces) -> Recording:
    seen = episode.observations
    if spaces.discrete_observation and seen.ndim == 1:
        seen = np.eye(spaces.observation_size)[seen.astype(np.int64)]
    seen = seen.astype(np.float32).reshape(len(seen), -1)
    flags = (np.asarray(x, dtype=bool) for x in (episode.terminations, episode.truncations))
    return Recording(seen[:-1], episode.actions, episode.rewards.astype(np.float32), seen[1:], *flags)
