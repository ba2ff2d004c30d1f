"""Masked models by name: the built-in one, or the folder of a run. A network of your own goes into `MaskedPolicy` directly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from anypo.domains.masked.builtin import PATH
from anypo.domains.masked.network import Bidirectional
from anypo.domains.masked.policy import Characters, MaskedPolicy


def load_policy(model: str = "builtin", **options: Any) -> MaskedPolicy:
    """ "builtin" or a folder that a run wrote. `options` are those of MaskedPolicy. Raises ValueError for a folder without such a model."""
    folder = PATH if model == "builtin" else Path(model)
    if not (folder / "config.json").exists() or not (folder / "model.safetensors").exists():
        raise ValueError(f"{model} holds no masked model (config.json and model.safetensors); give builtin or the model/ folder of a run")
    described = json.loads((folder / "config.json").read_text())
    if "network" not in described:
        raise ValueError(f"the model in {model} is of another kind; build it yourself and give it to MaskedPolicy")
    network = Bidirectional(**described["network"])
    network.load_state_dict(load_file(folder / "model.safetensors"))
    tokenizer = Characters(described["alphabet"], described["end"])
    return MaskedPolicy(network, tokenizer, **{"tail": described["tail"], "context_limit": described["network"]["positions"]} | options)
