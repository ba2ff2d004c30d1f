"""A small bidirectional transformer for masked text: token and position embeddings, pre-norm layers, a linear output.

Any other module that maps `(ids [B,L], attention [B,L] bool)` to logits [B,L,V] (or to an object with `.logits`) serves as well; nothing else of
this domain looks inside. Left out: dropout, rotary positions, time conditioning (the share of masked tokens says as much).
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn import functional


class Layer(nn.Module):
    """Attention over all attended positions, then a two-layer perceptron, each after a norm and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_perceptron = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.mixed = nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Float[Tensor, "B L D"], attended: Tensor) -> Float[Tensor, "B L D"]:
        """`attended` [B,1,1,L] bool: the positions that every position looks at."""
        rows, length, width = x.shape
        parts = self.queries_keys_values(self.norm_attention(x)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, attn_mask=attended)
        x = x + self.mixed(seen.transpose(1, 2).reshape(rows, length, width))
        return x + self.perceptron(self.norm_perceptron(x))


class Bidirectional(nn.Module):
    """The network. `configuration` holds the arguments that rebuild it."""

    def __init__(self, vocabulary: int, *, width: int = 64, layers: int = 2, heads: int = 4, positions: int = 32, seed: int = 0) -> None:
        """`vocabulary` counts the mask token; `positions` is the longest text. Weights depend on `seed` alone."""
        super().__init__()
        self.configuration: dict[str, Any] = {
            "vocabulary": vocabulary, "width": width, "layers": layers, "heads": heads, "positions": positions,
        }  # fmt: skip
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
            self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
            self.norm, self.output = nn.LayerNorm(width), nn.Linear(width, vocabulary)
            for embedding in (self.token, self.position):
                nn.init.normal_(embedding.weight, std=0.1)

    def forward(self, ids: Int64[Tensor, "B L"], attention: Bool[Tensor, "B L"]) -> Float[Tensor, "B L V"]:
        """Logits of every position. Raises ValueError for a text longer than the positions there are."""
        if ids.shape[1] > len(self.position.weight):
            raise ValueError(f"a text of {ids.shape[1]} tokens is longer than the network's {len(self.position.weight)} positions")
        x = self.token(ids) + self.position.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x, attention[:, None, None, :])
        return self.output(self.norm(x))
