"""Recorded steps on disk, for offline learning: `.npz` files (written here) and Minari datasets (read in Minari's own format through `minari`).

A recording holds actions in the environment's units, whoever took them. Nothing is downloaded: a Minari dataset is a folder, or an id whose data
is already on this machine.
"""

from __future__ import annotations

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
    """A recording from `file.npz`, a Minari dataset folder, or `minari:<id>`.

    Raises ValueError when there is none or when it does not fit the environment, ImportError when Minari is needed and missing.
    """
    path = Path(source)
    if path.suffix == ".npz":
        if not path.exists():
            raise ValueError(f"there is no recording {source}; benchmarks/make_offline.py writes one")
        with np.load(path) as stored:
            absent = [name for name in Recording._fields if name not in stored]
            if absent:
                raise ValueError(f"{source} is no recording of steps: it lacks {', '.join(absent)}")
            found = Recording(*(stored[name] for name in Recording._fields))
    else:
        found = _read_minari(source)
    if found.observation.shape[1:] != (spaces.observation_size,) or (found.action.ndim == 1) != (spaces.actions is not None):
        raise ValueError(f"{source} was recorded in another environment: its observations or actions do not fit {spaces.name}")
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


def _read_minari(source: str) -> Recording:
    try:
        import minari
    except ImportError as error:
        raise ImportError('Minari datasets need the package minari; pip install "anypo[control]"') from error
    try:
        if source.startswith("minari:"):
            dataset = minari.load_dataset(source.removeprefix("minari:"), download=False)
        else:
            folder = Path(source)
            dataset = minari.MinariDataset(folder / "data" if (folder / "data").is_dir() else folder)
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(
            f"{source} is no recording that can be read ({error}); give file.npz, a Minari dataset folder or minari:<id>"
        ) from error
    parts = [
        Recording(
            _flat(e.observations[:-1]), np.asarray(e.actions), np.asarray(e.rewards, np.float32), _flat(e.observations[1:]),
            np.asarray(e.terminations, bool), np.asarray(e.truncations, bool),
        )
        for e in dataset.iterate_episodes()
    ]  # fmt: skip
    return joined(parts)


def _flat(observations: NDArray) -> NDArray[np.float32]:
    return np.asarray(observations, np.float32).reshape(len(observations), -1)
