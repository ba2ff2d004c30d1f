"""Policies whose actions are denoising steps.

A batch of chains: `context` [N,T,D] is where each step starts (x_k), `action` [N,T,D] where it led (x_{k+1}), and the sampler's constants come
with it as signals: `level` [N,T] and `step` [N,T,3] (keep, pull, std: the step's mean is keep x + pull v). So one `evaluate` serves the SDE of a
flow, DDIM and DDPM, and whatever else steps by an affine rule. `condition` is [N,T,C], a list of N prompts, or absent.
Left out: a critic (the rewards come once, at the end of a chain).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from torch import Tensor

from anypo.batch import Batch
from anypo.domains.diffusion.denoise import HALF_LOG_TWO_PI, gaussian_kl, gaussian_logp
from anypo.domains.diffusion.network import VelocityNetwork
from anypo.policy import Policy, Signals

Condition = Tensor | list[str] | None


class DenoisingPolicy(Policy):
    """A policy that predicts velocities; subclasses say how.

    Provides [N,T] `logp` (of the whole step: summed over the D numbers), `entropy`, `kl_old` (exact KL from the policy that acted, whose `old_mean`
    the batch carries), and [N,T,D] `mean`, `log_std`, `velocity`. Steps without noise have no density: 0 for all but `mean` and `velocity`.
    """

    provides = frozenset({"logp", "entropy", "kl_old", "mean", "log_std", "velocity"})
    memoryless = True
    learning_rate = 1e-3
    optimizer = "adam"
    rows_at_once = 32_768  # denoising steps in one forward and backward pass

    def velocity(self, x: Float[Tensor, "N T D"], level: Float[Tensor, "N T"], condition: Condition) -> Float[Tensor, "N T D"]:
        """The predicted eps - x_data at points x and levels."""
        raise TypeError(f"{type(self).__name__} does not say how it predicts velocities; a denoising policy implements `velocity`")

    def chunks(self, batch: Batch) -> Iterator[Tensor]:
        yield from torch.arange(len(batch)).split(max(1, self.rows_at_once // max(batch.horizon, 1)))

    def evaluate(self, batch: Batch, needs: Set[str]) -> Signals:
        x, (keep, pull, std) = batch.context, batch.signal("step").unbind(-1)
        velocity = self.velocity(x, batch.signal("level"), batch.signals.get("condition"))
        mean = keep[..., None] * x + pull[..., None] * velocity
        signals = step_signals(mean, std, batch, needs)
        if "velocity" in needs:
            signals["velocity"] = velocity
        return signals


def step_signals(mean: Float[Tensor, "N T D"], std: Float[Tensor, "N T"], batch: Batch, needs: Set[str]) -> Signals:
    """What can be said of Gaussian steps with these means and deviations."""
    noisy = std > 0
    safe, zero = torch.where(noisy, std, torch.ones_like(std)), mean.new_zeros(())
    signals = Signals()
    if "mean" in needs:
        signals["mean"] = mean
    if "logp" in needs:
        signals["logp"] = torch.where(noisy & batch.mask, gaussian_logp(batch.action, mean, safe[..., None]), zero)
    if "kl_old" in needs:
        signals["kl_old"] = torch.where(noisy, gaussian_kl(batch.signal("old_mean"), mean, safe[..., None]), zero)
    if "log_std" in needs:
        signals["log_std"] = safe.log()[..., None].expand_as(mean).clone()
    if "entropy" in needs:
        signals["entropy"] = torch.where(noisy, mean.shape[-1] * (safe.log() + 0.5 + HALF_LOG_TWO_PI), zero)
    return signals


class FlowPolicy(DenoisingPolicy):
    """A small velocity network as a policy."""

    def __init__(self, network: VelocityNetwork, name: str = "flow") -> None:
        super().__init__()
        self.network, self.name = network, name

    def velocity(self, x: Tensor, level: Tensor, condition: Condition) -> Tensor:
        assert not isinstance(condition, list)
        return self.network(x, level, condition)

    def save_pretrained(self, folder: Path | str) -> None:
        """Weights and sizes in a folder, which `load` reads."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        save_file({k: v.contiguous() for k, v in self.network.state_dict().items()}, folder / "policy.safetensors")
        (folder / "policy.json").write_text(json.dumps(self.configuration, indent=1))

    @property
    def configuration(self) -> dict[str, Any]:
        """The network's sizes, as plain values."""
        network = self.network
        return {"name": self.name, "size": network.size, "condition": network.condition, "hidden": list(network.hidden)}


def load(folder: Path) -> FlowPolicy:
    """A policy that `save_pretrained` wrote. Raises ValueError when the folder holds none."""
    if not (folder / "policy.json").exists():
        raise ValueError(f"{folder} holds no saved flow policy (no policy.json); give the folder of a run or its model/ folder")
    sizes = json.loads((folder / "policy.json").read_text())
    if "hidden" not in sizes or "size" not in sizes:
        raise ValueError(f"{folder} holds a policy of another domain; give one that a diffusion run saved")
    network = VelocityNetwork(sizes["size"], condition=sizes["condition"], hidden=tuple(sizes["hidden"]))
    network.load_state_dict({k: v.float() for k, v in load_file(folder / "policy.safetensors").items()})
    return FlowPolicy(network, sizes["name"])
