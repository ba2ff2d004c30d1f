"""Decoder: the same Llama-type body as `direct.py` for decoding, one token a row, with its weights laid out for few rows.

A step on a handful of rows is bound by reading the weights and by the number of calls. So queries, keys and values become one product, and on a
CPU each matrix is reordered once a sampling call into the blocks of the matrix kernels, whose products also take the activation, the gate and the
sum with the state along. For few rows these kernels are our own where they can be compiled: they read the weights nearly as fast as memory
gives them. The reordering costs about as much as one step and, until the sampling call ends, a second copy of the weights.
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
from anypo.domains.language.kernels import LANES, FewRowsLayer, Norms, Panels, Slab, available

Attend = Callable[[Tensor, int, float], Tensor]
PACKED_BYTES = 4 << 30
SMALL = 1 << 16  # matrices of fewer elements are multiplied as they are
PANEL_ROWS = {torch.float32: 32, torch.bfloat16: 16}  # with more rows a product is bound by arithmetic, and oneDNN's is as fast


class Decoder:
    """A snapshot of the weights of one body and read-out: valid until the next update of either."""

    def __init__(self, direct: Direct, head: Any, rows: int) -> None:
        """`rows`: about how many rows a step will have."""
        self.direct = direct
        layout = Layout([*direct.body.parameters(), head.weight], rows, width=direct.layers[0].query[0].shape[0] // direct.heads)
        self.layers = [(_layer(layer, layout), layer.scale) for layer in direct.layers]
        self.in_c = all(isinstance(layer, FewRowsLayer) for layer, _ in self.layers)  # then states, keys and values are float32
        self.final = Norm(direct.final[0].float() if self.in_c else direct.final[0], direct.final[1])
        slab = layout.slab if layout.suits(head.weight) else None
        self.head = Product(head.weight, head.bias, layout) if slab is None else Panels(head.weight, head.bias, slab)

    def step(self, token: Int64[Tensor, " n"], position: Int64[Tensor, " n"], attend: Attend) -> Float[Tensor, "n D"]:
        """States after reading `token` at `position`. `attend(mixed [n,H+2K,W], layer, scale)` keeps the keys and values, which follow the H heads'
        queries in `mixed`, and returns what the queries see, [n,H,W]; query heads that share a key head stand together."""
        body, heads, key_heads = self.direct.body, self.direct.heads, self.direct.key_heads
        state = body.embed_tokens(token)
        if self.in_c:
            state = state.float()
        turn = Turn(*(x[:, 0] for x in body.rotary_emb(state, position[:, None])))
        for index, (layer, scale) in enumerate(self.layers):
            out = attend(layer.mix(state, turn, heads, key_heads), index, scale)
            state = layer.finish(out.flatten(1), state)
        return self.final(state)


def _layer(layer: Layer, layout: Layout) -> CallsLayer | FewRowsLayer:
    parts = (layer.query, layer.key, layer.value)
    biases = [bias for _, bias in parts if bias is not None]
    if len(biases) not in (0, 3):
        raise AttributeError("some of queries, keys and values have a bias and some have none")
    mix = torch.cat([weight for weight, _ in parts]), torch.cat(biases) if biases else None
    matrices = [mix, layer.output, *((weight, None) for weight in (layer.gate, layer.up, layer.down))]
    norms = (layer.norm_before, layer.norm_after, layer.norm_query, layer.norm_key)
    if layout.slab is not None and all(layout.suits(weight) for weight, _ in matrices):
        return FewRowsLayer(norms, [Panels(*pair, layout.slab) for pair in matrices])
    return CallsLayer(norms, [Product(*pair, layout) for pair in matrices])


class CallsLayer:
    """One layer but for its attention, from PyTorch's calls."""

    def __init__(self, norms: Norms, matrices: list[Product]) -> None:
        self.before, self.after, self.query, self.key = (None if n is None else Norm(*n) for n in norms)
        self.mixing, self.output, self.gate, self.up, self.down = matrices

    def mix(self, state: Float[Tensor, "n D"], turn: Turn, heads: int, key_heads: int) -> Float[Tensor, "n H+2K W"]:
        """Queries, keys and values of the normed state, queries and keys rotated."""
        assert self.before is not None
        mixed = self.mixing(self.before(state)).unflatten(1, (heads + 2 * key_heads, -1))
        turned = mixed[:, : heads + key_heads]
        if self.query is not None and self.key is not None:
            turned[:, :heads], turned[:, heads:] = self.query(turned[:, :heads]), self.key(turned[:, heads:])
        turned.copy_(turn(turned))
        return mixed

    def finish(self, attended: Float[Tensor, "n A"], state: Float[Tensor, "n D"]) -> Float[Tensor, "n D"]:
        """`state` plus the output of the attention, plus the gated layer of that."""
        state = self.output.plus(attended, state)
        assert self.after is not None
        inner = self.after(state)
        return self.down.plus(self.up.times(inner, self.gate.silu(inner)), state)


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

    def __init__(self, cosine: Float[Tensor, "n W"], sine: Float[Tensor, "n W"]) -> None:
        self.cosine, self.sine, self.half = cosine.contiguous(), sine.contiguous(), sine.shape[-1] // 2
        self.signed = torch.cat([-sine[:, : self.half], sine[:, self.half :]], dim=-1)

    def __call__(self, x: Float[Tensor, "n H W"]) -> Float[Tensor, "n H W"]:
        return torch.addcmul(x * self.cosine[:, None], x.roll(self.half, -1), self.signed[:, None])


class Product:
    """x @ weight.T + bias for few rows, alone or with what follows it, which is overwritten."""

    def __init__(self, weight: Float[Tensor, "E D"], bias: Tensor | None, layout: Layout) -> None:
        weight = weight.detach()
        self.bias = None if bias is None else bias.detach()
        self.packed = layout.suits(weight)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, layout.rows) if self.packed else weight

    def __call__(self, x: Float[Tensor, "n D"]) -> Float[Tensor, "n E"]:
        return self._one(x, "none") if self.packed else linear(x, self.weight, self.bias)

    def silu(self, x: Float[Tensor, "n D"]) -> Float[Tensor, "n E"]:
        return self._one(x, "swish") if self.packed else silu(linear(x, self.weight, self.bias), inplace=True)

    def times(self, x: Float[Tensor, "n D"], other: Float[Tensor, "n E"]) -> Float[Tensor, "n E"]:
        return self._two(x, other, "mul") if self.packed else linear(x, self.weight, self.bias).mul_(other)

    def plus(self, x: Float[Tensor, "n D"], other: Float[Tensor, "n E"]) -> Float[Tensor, "n E"]:
        return self._two(x, other, "add") if self.packed else linear(x, self.weight, self.bias).add_(other)

    def _one(self, x: Tensor, what: str) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, what, [], "")

    def _two(self, x: Tensor, other: Tensor, what: str) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise.binary(x, other, self.weight, self.bias, what)


class Layout:
    """How the matrices of one decoder lie: as they are, in oneDNN's blocks, or in panels of our own, which few rows read faster."""

    def __init__(self, matrices: list[Tensor], rows: int, width: int) -> None:
        """All matrices of the model, about how many rows a step will have, and the width of a head."""
        self.rows = rows
        size = sum(p.numel() * p.element_size() for p in matrices)
        self.pack = size <= PACKED_BYTES and matrices[0].device.type == "cpu" and torch.backends.mkldnn.is_available()
        kinds = {p.dtype for p in matrices}
        dtype = kinds.pop() if len(kinds) == 1 else torch.float64
        few = rows <= PANEL_ROWS.get(dtype, 0) and width % LANES == 0
        self.slab = Slab(dtype) if self.pack and few and available() else None

    def suits(self, weight: Tensor) -> bool:
        """Whether reordering this matrix is worth it."""
        return self.pack and weight.numel() >= SMALL and weight.dtype in (torch.float32, torch.bfloat16)
