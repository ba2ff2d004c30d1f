"""Policies that build a path city by city: one that looks anew at what is left of the problem at every step, and one that looks at the whole once.

Both are attention networks without positions. A problem is a path from an origin to a destination through cities that remain; a closed tour is one
whose origin is its destination.
"""

from __future__ import annotations

import json
from collections.abc import Set
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from anypo.batch import Batch
from anypo.policy import Policy, Signals

STATES = ("reduced", "direct")
ENDS = 2  # the tokens before the remaining cities: origin and destination
CLIP = 10.0  # logits of the direct policy lie in +-CLIP


class Layer(nn.Module):
    """Attention and two linear layers, each added with a weight that begins at 0."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.mix = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.feed = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
        self.weight = nn.Parameter(torch.zeros(2))

    def forward(self, x: Float[Tensor, "M K d"], open_: Bool[Tensor, "M K"]) -> Float[Tensor, "M K d"]:
        """Nobody attends to tokens that are not open."""
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.mix(x).chunk(3, dim=2))
        seen = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=open_[:, None, None, :])
        x = x + self.weight[0] * self.out(seen.transpose(1, 2).flatten(2))
        return x + self.weight[1] * self.feed(x)


class TourPolicy(Policy):
    """Logits of the next city. Provides `logp` and `entropy` [N,T] and `logits` [N,T,R], -inf for cities that are gone.

    A batch's `context` [N,2+R,2] holds the coordinates of the origin, the destination and the remaining cities, of which the first `size` [N] (a
    signal) exist; an action is the number of a remaining city. "reduced": the network sees origin, destination and what remains, at every step anew.
    "direct": it sees the whole problem once; a decoder then attends to the cities left from the present one (as in arXiv:1803.08475).
    """

    provides = frozenset({"logp", "entropy", "logits"})
    optimizer = "adam"
    learning_rate = 1e-3
    unit = "cities"

    def __init__(self, *, state: str = "reduced", layers: int = 3, width: int = 64, heads: int = 4, seed: int = 0) -> None:
        """Weights depend on `seed` alone. Raises ValueError for an unknown state or a width that the heads do not divide."""
        super().__init__()
        if state not in STATES:
            raise ValueError(f"unknown state '{state}' of a tour policy; use {' or '.join(STATES)}")
        if width % heads:
            raise ValueError(f"the width must be a multiple of the {heads} heads, not {width}")
        self.options = {"state": state, "layers": layers, "width": width, "heads": heads}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed = nn.Linear(2, width)
            self.ends = nn.Parameter(torch.randn(ENDS, width) / width**0.5)
            self.body = nn.ModuleList(Layer(width, heads) for _ in range(layers))
            if state == "direct":
                self.query = nn.Linear(3 * width, width, bias=False)
                self.glimpse = nn.MultiheadAttention(width, heads, bias=False, batch_first=True)
                self.key = nn.Linear(width, width, bias=False)
            else:
                self.readout = nn.Linear(width, 1)
        self.name = f"{state} tour policy"

    @property
    def reduced(self) -> bool:
        return self.options["state"] == "reduced"

    def encode(self, points: Float[Tensor, "M K 2"], left: Bool[Tensor, "M R"]) -> Float[Tensor, "M K d"]:
        """Origin, destination and the cities that are left."""
        x = self.embed(points)
        x = torch.cat([x[:, :ENDS] + self.ends, x[:, ENDS:]], dim=1)
        open_ = nn.functional.pad(left, (ENDS, 0), value=True)
        for layer in self.body:
            x = layer(x, open_)
        return x

    def scores(self, points: Float[Tensor, "M K 2"], left: Bool[Tensor, "M R"]) -> Float[Tensor, "M R"]:
        """Logits of reduced problems."""
        return self.readout(self.encode(points, left)[:, ENDS:])[..., 0].masked_fill(~left, -torch.inf)

    def point(self, h: Float[Tensor, "N K d"], at: Int[Tensor, "N T"], left: Bool[Tensor, "N T R"]) -> Float[Tensor, "N T R"]:
        """Logits of the direct policy: `at` is the token of the city that it is in."""
        cities, count = h[:, ENDS:], left.sum(-1, keepdim=True).clamp(min=1)
        here = h.gather(1, at[..., None].expand(*at.shape, h.shape[2]))
        context = torch.cat([here, h[:, 1:2].expand_as(here), left.to(h.dtype) @ cities / count], dim=-1)
        closed = (~left & left.any(-1, keepdim=True)).repeat_interleave(self.glimpse.num_heads, dim=0)
        seen = self.glimpse(self.query(context), cities, cities, attn_mask=closed, need_weights=False)[0]
        logits = CLIP * torch.tanh(seen @ self.key(cities).transpose(1, 2) / h.shape[2] ** 0.5)
        return logits.masked_fill(~left, -torch.inf)

    def logits(self, batch: Batch) -> Float[Tensor, "N T R"]:
        points, action = batch.context, batch.action
        left = remaining(action, batch.signal("size"), points.shape[1] - ENDS)
        at = torch.cat([torch.zeros_like(action[:, :1]), action[:, :-1] + ENDS], dim=1)
        if not self.reduced:
            exists = torch.arange(left.shape[2]) < batch.signal("size")[:, None]
            return self.point(self.encode(points, exists), at, left)
        here = points.gather(1, at[..., None].expand(*at.shape, 2))
        states = torch.cat([here[:, :, None], points[:, None, 1:].expand(-1, action.shape[1], -1, -1)], dim=2)
        return self.scores(states.flatten(0, 1), left.flatten(0, 1)).view(left.shape)

    def evaluate(self, batch: Batch, needs: Set[str]) -> Signals:
        logits = self.logits(batch)
        nothing = ~batch.mask[..., None]  # padding may have no city left
        logp = logits.masked_fill(nothing, 0.0).log_softmax(-1)
        taken = logp.gather(2, batch.action[..., None])[..., 0]
        entropy = -(logp.exp() * logp.masked_fill(torch.isinf(logp), 0.0)).sum(-1)
        found = {"logp": torch.where(batch.mask, taken, 0.0), "entropy": torch.where(batch.mask, entropy, 0.0), "logits": logits}
        return Signals({name: value for name, value in found.items() if name in needs})

    @torch.no_grad()
    def construct(self, points: Float[Tensor, "N K 2"], generator: torch.Generator | None = None) -> Int[Tensor, "N R"]:
        """The remaining cities in the order in which they are visited: drawn, or without a generator the likeliest each. The reduced problems shrink by
        a city a step."""
        count, cities = len(points), points.shape[1] - ENDS
        rows = torch.arange(count)[:, None]
        number = torch.arange(cities).expand(count, -1)  # of the cities that are left
        here, order = points[:, 0], list[Tensor]()
        whole = None if self.reduced else self.encode(points, torch.ones(count, cities, dtype=torch.bool))
        for _ in range(cities):
            if whole is None:
                state = torch.cat([here[:, None], points[:, 1:2], points[rows, number + ENDS]], dim=1)
                logits = self.scores(state, torch.ones_like(number, dtype=torch.bool))
            else:
                left = torch.zeros(count, cities, dtype=torch.bool).scatter_(1, number, True)
                at = order[-1][:, None] + ENDS if order else torch.zeros(count, 1, dtype=torch.int64)
                logits = self.point(whole, at, left[:, None])[:, 0].gather(1, number)
            place = logits.argmax(1) if generator is None else torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
            chosen = number.gather(1, place[:, None])
            order.append(chosen[:, 0])
            here = points[rows[:, 0], order[-1] + ENDS]
            number = number[number != chosen].view(count, -1)
        return torch.stack(order, dim=1)

    def save_pretrained(self, folder: Path | str) -> None:
        """Weights and sizes in a folder, which `load_tour_policy` reads."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: value.contiguous() for name, value in self.state_dict().items()}, folder / "policy.safetensors")
        (folder / "tours.json").write_text(json.dumps(self.options))


def load_tour_policy(folder: Path) -> TourPolicy:
    """A saved policy: a run's folder or its model/ folder. Raises ValueError when there is none."""
    folder = folder if (folder / "tours.json").exists() else folder / "model"
    if not (folder / "tours.json").exists():
        raise ValueError(f"{folder} holds no saved tour policy (no tours.json); give the folder of a run or its model/ folder")
    options: dict[str, Any] = json.loads((folder / "tours.json").read_text())
    policy = TourPolicy(**options)
    policy.load_state_dict(load_file(folder / "policy.safetensors"))
    return policy


def remaining(action: Int[Tensor, "N T"], size: Int[Tensor, " N"], cities: int) -> Bool[Tensor, "N T R"]:
    """Which of the first `size` cities are left before each step."""
    gone = nn.functional.one_hot(action, cities).cumsum(1) - nn.functional.one_hot(action, cities)
    return (gone == 0) & (torch.arange(cities) < size[:, None])[:, None]
