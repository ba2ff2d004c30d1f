"""A small transformer flow over patches of 8x8 pictures, whose attention can be made block-sparse along a route.

Sixteen tokens of 2x2 pixels see one another in blocks of four tokens, the quadrants of the picture. A route says, for each layer and each block of
queries, which blocks of keys stay. Routing equations: the abstract of RPO (routing policy optimization); floors [reconstructed].
Left out: cross-attention to texts (the condition scales and shifts every layer), and kernels that profit from sparsity.
"""

from __future__ import annotations

import json
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from anypo.batch import Batch
from anypo.domains.diffusion.network import FREQUENCIES, level_features
from anypo.domains.diffusion.policy import Condition, DenoisingPolicy, step_signals
from anypo.domains.diffusion.tasks import Digits
from anypo.policy import Signals

SIDE, PATCH, CLASSES = 8, 2, 10
BLOCKS = tuple(row // 2 * 2 + column // 2 for row in range(SIDE // PATCH) for column in range(SIDE // PATCH))  # quadrant of every token


def block_mass(P: Float[Tensor, "*N n n"], blocks: Sequence[int] | Tensor) -> Float[Tensor, "*N B B"]:
    """M[q,k]: mean over the queries of block q of the attention that falls on block k. Rows sum to 1 as those of P do."""
    member = nn.functional.one_hot(torch.as_tensor(blocks)).to(P)
    return member.T @ P @ member / member.sum(0)[:, None]


def routed_attention(
    scores: Float[Tensor, "*N n n"], value: Float[Tensor, "*N n d"], keep: Tensor | None, blocks: Sequence[int] | Tensor
) -> Float[Tensor, "*N n d"]:
    """Softmax over the keys whose block is kept, times the values. `keep` [*N,B,B] 0/1 for (query, key) blocks; None keeps all."""
    return _probabilities(scores, keep, blocks) @ value


def _probabilities(scores: Tensor, keep: Tensor | None, blocks: Sequence[int] | Tensor) -> Tensor:
    if keep is None:
        return scores.softmax(-1)
    block = torch.as_tensor(blocks)
    return scores.masked_fill(~keep.bool()[..., block[:, None], block], -torch.inf).softmax(-1)


class Layer(nn.Module):
    """Attention, then a perceptron, each after a norm that the condition scales and shifts, and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.tuning = nn.Linear(width, 4 * width)
        self.query_key_value, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, h: Float[Tensor, "N n W"], told: Float[Tensor, "N W"], keep: Tensor | None, seen: list[Tensor] | None) -> Tensor:
        """`keep` [N,B,B]; the layer's dense block mass [N,B,B] is added to `seen`."""
        scale, shift, scale_wide, shift_wide = self.tuning(told)[:, None].chunk(4, dim=-1)
        parts = self.query_key_value(self.norm(h) * (1 + scale) + shift)
        query, key, value = parts.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = query @ key.mT / query.shape[-1] ** 0.5
        if seen is not None:
            seen.append(block_mass(scores.softmax(-1).mean(1), BLOCKS))
        h = h + self.out(routed_attention(scores, value, None if keep is None else keep[:, None], BLOCKS).transpose(1, 2).flatten(2))
        return h + self.narrow(nn.functional.gelu(self.wide(self.norm(h) * (1 + scale_wide) + shift_wide)))


class PatchFlow(DenoisingPolicy):
    """The transformer as a policy. Signals of steps outside the batch's mask are those of a velocity of 0: only steps that may be trained are computed."""

    blocks = max(BLOCKS) + 1
    learning_rate = 1e-4  # 1e-3, good for the perceptrons, destroys it

    def __init__(self, *, width: int = 64, layers: int = 4, heads: int = 4, name: str = "patch_flow", seed: int = 0) -> None:
        super().__init__()
        self.name, self.sizes = name, {"width": width, "layers": layers, "heads": heads}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.patch, self.pixels = nn.Linear(PATCH**2, width), nn.Linear(width, PATCH**2)
            self.place = nn.Parameter(0.1 * torch.randn(len(BLOCKS), width))
            self.told = nn.Sequential(nn.Linear(1 + 2 * FREQUENCIES + CLASSES, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
            self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
            self.norm = nn.LayerNorm(width)

    def forward(
        self, x: Float[Tensor, "N 64"], level: Float[Tensor, " N"], condition: Float[Tensor, "N C"], keep: Tensor | None = None,
        seen: list[Tensor] | None = None,
    ) -> Float[Tensor, "N 64"]:  # fmt: skip
        """The velocity. `keep` [N,L,B,B] 0/1 routes the layers; their dense block masses are added to `seen`."""
        told = self.told(torch.cat([level_features(level.to(x)), condition.to(x)], dim=-1))
        grid = x.unflatten(-1, (SIDE // PATCH, PATCH, SIDE // PATCH, PATCH)).transpose(-3, -2)
        h = self.patch(grid.flatten(-2).flatten(-3, -2)) + self.place + told[:, None]
        for number, layer in enumerate(self.layers):
            h = layer(h, told, None if keep is None else keep[:, number], seen)
        out = self.pixels(self.norm(h)).unflatten(-1, (PATCH, PATCH)).unflatten(-3, (SIDE // PATCH, SIDE // PATCH))
        return out.transpose(-3, -2).flatten(-4)

    def velocity(self, x: Tensor, level: Tensor, condition: Condition) -> Tensor:
        assert isinstance(condition, Tensor)
        lead = x.shape[:-1]
        return self(x.flatten(0, -2), level.expand(lead).flatten(), condition.expand(*lead, -1).flatten(0, -2)).view(x.shape)

    def evaluate(self, batch: Batch, needs: Set[str]) -> Signals:
        x, (kept, pull, std) = batch.context, batch.signal("step").unbind(-1)
        rows, steps = batch.mask.nonzero(as_tuple=True)
        found = self(x[rows, steps], batch.signal("level")[rows, steps], batch.signal("condition")[rows, steps])
        velocity = torch.zeros_like(x).index_put((rows, steps), found.to(x))
        signals = step_signals(kept[..., None] * x + pull[..., None] * velocity, std, batch, needs)
        if "velocity" in needs:
            signals["velocity"] = velocity
        return signals

    def save_pretrained(self, folder: Path | str) -> None:
        """Weights and sizes in a folder, which `load_patches` reads."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        save_file({k: v.contiguous() for k, v in self.state_dict().items()}, folder / "policy.safetensors")
        (folder / "policy.json").write_text(json.dumps({"kind": "patches", "name": self.name} | self.sizes, indent=1))


def load_patches(folder: Path) -> PatchFlow:
    """A policy that `save_pretrained` wrote."""
    sizes = json.loads((folder / "policy.json").read_text())
    sizes.pop("kind")
    policy = PatchFlow(**sizes)
    policy.load_state_dict({k: v.float() for k, v in load_file(folder / "policy.safetensors").items()})
    return policy


class PatchDigits(Digits):
    """The digits, drawn by the transformer."""

    def __init__(self, reward: Any = "classifier", **options: Any) -> None:
        super().__init__(reward, **options)
        self.name = self.name.replace("digits", "patches")
