"""Decoder: the same Llama-type body as `direct.py` for decoding, one token a row, with its weights laid out for few rows.

A step on a handful of rows is bound by reading the weights and by the number of calls. So queries, keys and values become one product, and on a
CPU each matrix is reordered once a sampling call into the blocks of the matrix kernels, whose products also take the activation, the gate and the
sum with the state along. In float32 these kernels are our own where they can be compiled: they read the weights nearly as fast as memory gives
them. The reordering costs about as much as one step and, until the sampling call ends, a second copy of the weights.
Left out: the reordering of models above PACKED_BYTES, and of those so small that calls, not weights, take the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn.functional import linear, silu

from anypo.domains.language.direct import Direct, Layer
from anypo.engines.few_rows import ADD, MULTIPLY, Panels, Slab, available

Attend = Callable[[Tensor, Tensor, Tensor, int, float], Tensor]
PACKED_BYTES = 4 << 30
SMALL = 1 << 16  # matrices of fewer elements are multiplied as they are
PANEL_ROWS = 32  # with more rows than that a product is bound by arithmetic, and oneDNN's is as fast


class Decoder:
    """A snapshot of the weights of one body and read-out: valid until the next update of either."""

    def __init__(self, direct: Direct, head: Any, rows: int) -> None:
        """`rows`: about how many rows a step will have."""
        self.direct = direct
        layout = Layout([*direct.body.parameters(), head.weight], rows)
        self.layers = [_DecodingLayer(layer, layout) for layer in direct.layers]
        self.final = Norm(*direct.final)
        self.head = Product(head.weight, head.bias, layout)

    def step(self, token: Int64[Tensor, " n"], position: Int64[Tensor, " n"], attend: Attend) -> Float[Tensor, "n D"]:
        """States after reading `token` at `position`. `attend(query [n,K,g,W], key [n,K,W], value [n,K,W], layer, scale)` keeps the new keys and
        values and returns what the queries see, [n,K,g,W]; g query heads share a key head."""
        body, heads, key_heads = self.direct.body, self.direct.heads, self.direct.key_heads
        state = body.embed_tokens(token)
        turn = Turn(*(x[:, 0, None] for x in body.rotary_emb(state, position[:, None])))
        for index, layer in enumerate(self.layers):
            mixed = layer.mix(layer.norm_before(state)).unflatten(1, (heads + 2 * key_heads, -1))
            turned, value = mixed.split([heads + key_heads, key_heads], dim=1)
            if layer.norm_query is not None and layer.norm_key is not None:
                query, key = turned.split([heads, key_heads], dim=1)
                turned = torch.cat([layer.norm_query(query), layer.norm_key(key)], dim=1)
            query, key = turn(turned).split([heads, key_heads], dim=1)
            # Query heads that share a key head stand in line as several queries, so that the keys need not be repeated.
            out = attend(query.unflatten(1, (key_heads, -1)), key, value, index, layer.scale)
            state = layer.output.plus(out.reshape(len(token), -1), state)
            inner = layer.norm_after(state)
            state = layer.down.plus(layer.up.times(inner, layer.gate.silu(inner)), state)
        return self.final(state)


class _DecodingLayer:
    def __init__(self, layer: Layer, layout: Layout) -> None:
        parts = (layer.query, layer.key, layer.value)
        biases = [bias for _, bias in parts if bias is not None]
        if len(biases) not in (0, 3):
            raise AttributeError("some of queries, keys and values have a bias and some have none")
        self.mix = Product(torch.cat([weight for weight, _ in parts]), torch.cat(biases) if biases else None, layout)
        self.output = Product(*layer.output, layout)
        self.gate, self.up, self.down = (Product(weight, None, layout) for weight in (layer.gate, layer.up, layer.down))
        self.norm_before, self.norm_after = Norm(*layer.norm_before), Norm(*layer.norm_after)
        self.norm_query = None if layer.norm_query is None else Norm(*layer.norm_query)
        self.norm_key = None if layer.norm_key is None else Norm(*layer.norm_key)
        self.scale = layer.scale


class Norm:
    """Root-mean-square norm of few rows, x / sqrt(mean(x^2) + eps) * weight, in as few calls as there are: half the time of `direct.normalize`."""

    def __init__(self, weight: Float[Tensor, " D"], eps: float) -> None:
        self.weight, self.shrink = weight.detach(), 1 / math.sqrt(len(weight))
        self.floor = torch.full((1,), math.sqrt(eps), device=weight.device)

    def __call__(self, x: Float[Tensor, "*n D"]) -> Float[Tensor, "*n D"]:
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).mul_(self.shrink)
        return torch.div(x, size.hypot_(self.floor), out=torch.empty_like(x)).mul_(self.weight)


class Turn:
    """Rotary position embedding of one step, `direct.rotate` in three calls: the two halves of a head change places, the sign is the sine's."""

    def __init__(self, cosine: Float[Tensor, "n 1 W"], sine: Float[Tensor, "n 1 W"]) -> None:
        self.cosine, self.half = cosine, sine.shape[-1] // 2
        self.sine = torch.cat([-sine[..., : self.half], sine[..., self.half :]], dim=-1)

    def __call__(self, x: Float[Tensor, "n H W"]) -> Float[Tensor, "n H W"]:
        return torch.addcmul(x * self.cosine, x.roll(self.half, -1), self.sine)


class Product:
    """x @ weight.T + bias for few rows, alone or with what follows it."""

    def __init__(self, weight: Float[Tensor, "E D"], bias: Tensor | None, layout: Layout) -> None:
        weight = weight.detach()
        self.bias = None if bias is None else bias.detach()
        self.panels: Panels | None = None
        self.packed = layout.packs(weight)
        if self.packed and layout.slab is not None and weight.dtype == torch.float32:
            self.panels = Panels(weight, self.bias, layout.slab)
        elif self.packed:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, layout.rows)
        else:
            self.weight = weight

    def __call__(self, x: Float[Tensor, "n D"]) -> Float[Tensor, "n E"]:
        if self.panels is not None:
            return self.panels(x)
        return self._one(x, "none") if self.packed else linear(x, self.weight, self.bias)

    def silu(self, x: Float[Tensor, "n D"]) -> Float[Tensor, "n E"]:
        if self.panels is not None:
            return silu(self.panels(x), inplace=True)
        return self._one(x, "swish") if self.packed else silu(linear(x, self.weight, self.bias), inplace=True)

    def times(self, x: Float[Tensor, "n D"], other: Float[Tensor, "n E"]) -> Float[Tensor, "n E"]:
        """The product times `other`, which is overwritten."""
        if self.panels is not None:
            return self.panels(x, other, MULTIPLY)
        return self._two(x, other, "mul") if self.packed else linear(x, self.weight, self.bias).mul_(other)

    def plus(self, x: Float[Tensor, "n D"], other: Float[Tensor, "n E"]) -> Float[Tensor, "n E"]:
        """The product plus `other`, which is overwritten."""
        if self.panels is not None:
            return self.panels(x, other, ADD)
        return self._two(x, other, "add") if self.packed else linear(x, self.weight, self.bias).add_(other)

    def _one(self, x: Tensor, what: str) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, what, [], "")

    def _two(self, x: Tensor, other: Tensor, what: str) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise.binary(x, other, self.weight, self.bias, what)


class Layout:
    """How the matrices of one decoder lie: as they are, in oneDNN's blocks, or in float32 in panels of our own, which a few rows read faster."""

    def __init__(self, matrices: list[Tensor], rows: int) -> None:
        self.rows = rows
        size = sum(p.numel() * p.element_size() for p in matrices)
        self.pack = size <= PACKED_BYTES and matrices[0].device.type == "cpu" and torch.backends.mkldnn.is_available()
        self.slab = Slab() if self.pack and rows <= PANEL_ROWS and available() else None

    def packs(self, weight: Tensor) -> bool:
        return self.pack and weight.numel() >= SMALL and weight.dtype in (torch.float32, torch.bfloat16)
