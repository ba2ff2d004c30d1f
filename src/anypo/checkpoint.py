"""Checkpoints: any nested state as safetensors plus JSON, written atomically and verified on reading. No pickle.

A checkpoint is a folder `step-00000012/` with `state.json`, `tensors.safetensors` and `manifest.json` (SHA-256 of both). It is written beside its
final name and renamed, so a killed process leaves either a whole checkpoint or none.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

log = logging.getLogger(__name__)
FILES = ("state.json", "tensors.safetensors")


class DamagedCheckpoint(ValueError):
    """A checkpoint whose files are missing or differ from its manifest."""


def pack(value: Any, tensors: dict[str, torch.Tensor], path: str = "") -> Any:
    """`value` as JSON, its tensors and arrays moved into `tensors` under their path. Raises TypeError for what cannot be stored exactly."""
    if isinstance(value, torch.Tensor):
        tensors[path] = value.detach().cpu().clone().contiguous()
        return {"__tensor__": path}
    if isinstance(value, np.ndarray):
        tensors[path] = torch.from_numpy(np.ascontiguousarray(value).copy())
        return {"__array__": path}
    if isinstance(value, dict):
        return {"__dict__": [[pack(k, tensors, f"{path}/k{i}"), pack(v, tensors, f"{path}/{k}")] for i, (k, v) in enumerate(value.items())]}
    if isinstance(value, list | tuple):
        return {f"__{type(value).__name__}__": [pack(v, tensors, f"{path}/{i}") for i, v in enumerate(value)]}
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"cannot store a {type(value).__name__} at '{path}' in a checkpoint; keep numbers, strings, tensors, lists and dicts in states"
    )


def unpack(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The inverse of `pack`."""
    if not isinstance(value, dict):
        return value
    (tag, inside), *_ = value.items()
    if tag == "__tensor__":
        return tensors[inside]
    if tag == "__array__":
        return tensors[inside].numpy()
    if tag == "__dict__":
        return {unpack(k, tensors): unpack(v, tensors) for k, v in inside}
    items = [unpack(v, tensors) for v in inside]
    return tuple(items) if tag == "__tuple__" else items


def save(folder: Path, step: int, state: dict[str, Any], keep: int = 2) -> Path:
    """Write one checkpoint and drop all but the newest `keep`. A full disk raises OSError and leaves the earlier ones whole."""
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step-{step:08d}"
    draft = folder / f".draft-{step:08d}-{os.getpid()}"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    try:
        tensors: dict[str, torch.Tensor] = {}
        (draft / FILES[0]).write_text(json.dumps(pack(state, tensors)))
        save_file(tensors, draft / FILES[1])
        (draft / "manifest.json").write_text(json.dumps({name: _digest(draft / name) for name in FILES}))
        for name in (*FILES, "manifest.json"):
            _flush(draft / name)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(draft, final)
        _flush(folder)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise OSError(
            f"could not write the checkpoint of step {step} to {folder} ({error.strerror or error}); the earlier ones are untouched"
        ) from error
    for old in sorted(folder.glob("step-*"))[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def load(checkpoint: Path) -> dict[str, Any]:
    """Read and verify one checkpoint. Raises DamagedCheckpoint naming the file."""
    try:
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        for name in FILES:
            if _digest(checkpoint / name) != manifest[name]:
                raise DamagedCheckpoint(f"{checkpoint / name} is damaged: its content differs from its checksum")
        return unpack(json.loads((checkpoint / FILES[0]).read_text()), load_file(checkpoint / FILES[1]))
    except (OSError, KeyError, json.JSONDecodeError) as error:
        raise DamagedCheckpoint(f"{checkpoint} is damaged or incomplete ({error})") from error


def load_latest(folder: Path) -> dict[str, Any] | None:
    """The newest whole checkpoint, or None when there is none; a damaged one is named in a warning and the one before it is used."""
    found = sorted(folder.glob("step-*"), reverse=True)
    for checkpoint in found:
        try:
            return load(checkpoint)
        except DamagedCheckpoint as error:
            log.warning("%s; going on with the one before it", error)
    if found:
        raise DamagedCheckpoint(f"every checkpoint in {folder} is damaged; start the run anew with another --out")
    return None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
