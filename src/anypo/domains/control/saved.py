"""Saved policies: a folder with `policy.json` (kind, spaces, sizes) and `policy.safetensors`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors.torch import load_file, save_file

from anypo.domains.control.envs import Spaces
from anypo.domains.control.kinds import kind_named

if TYPE_CHECKING:
    from anypo.domains.control.policy import EnvironmentPolicy


def save(policy: EnvironmentPolicy, folder: Path) -> None:
    """Write the policy; what is there is replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    spaces = policy.spaces
    bounds = {"low": None if spaces.low is None else spaces.low.tolist(), "high": None if spaces.high is None else spaces.high.tolist()}
    description = {"kind": type(policy).__name__, "spaces": vars(spaces) | bounds, "configuration": policy.configuration}
    save_file({name: value.contiguous() for name, value in policy.state_dict().items()}, folder / "policy.safetensors")
    (folder / "policy.json").write_text(json.dumps(description, indent=1))


def load(folder: Path) -> EnvironmentPolicy:
    """Read a saved policy. Raises ValueError when the folder holds none."""
    if not (folder / "policy.json").exists():
        raise ValueError(f"{folder} holds no saved control policy (no policy.json); give the folder of a run or its model/ folder")
    description = json.loads((folder / "policy.json").read_text())
    kind = kind_named(description["kind"])
    if kind is None:
        raise ValueError(f"{folder} holds a {description['kind']}, which only the program that made it can load")
    bounds = {
        name: None if description["spaces"][name] is None else np.array(description["spaces"][name], dtype=np.float32)
        for name in ("low", "high")
    }
    policy = kind(Spaces(**description["spaces"] | bounds), **description["configuration"])
    policy.load_state_dict(load_file(folder / "policy.safetensors"))
    return policy
