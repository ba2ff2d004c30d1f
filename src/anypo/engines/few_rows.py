"""Products of few rows with a large float32 matrix, faster than PyTorch's: `few_rows.c`, where it can be compiled (`native.load`)."""

from __future__ import annotations

import ctypes
import functools

import torch
from jaxtyping import Float
from torch import Tensor

from anypo.engines.native import load

LANES = 16  # outputs in a panel and rows in a tile, as in few_rows.c
STORE, ADD, MULTIPLY = range(3)


class Slab:
    """Hands out pieces of large float32 tensors: one large piece of fresh memory is faulted in much faster than many of 2 MB."""

    CHUNK = 1 << 24

    def __init__(self) -> None:
        self.rest = torch.empty(0)

    def take(self, count: int) -> Float[Tensor, " count"]:
        if len(self.rest) < count:
            self.rest = torch.empty(max(count, self.CHUNK))
        piece, self.rest = self.rest[:count], self.rest[count:]
        return piece


class Panels:
    """A matrix [E,D] laid out in panels of 16 outputs: a copy of its values at this moment."""

    def __init__(self, weight: Float[Tensor, "E D"], bias: Float[Tensor, " E"] | None, slab: Slab) -> None:
        """Call it only where `available()`; float32 on a CPU."""
        self.outputs, self.inputs = weight.shape
        self.bias = None if bias is None else bias.detach().contiguous()
        self.panels = slab.take(-(-self.outputs // LANES) * LANES * self.inputs)
        weight = weight.detach().contiguous()
        _functions()[0](weight.data_ptr(), self.panels.data_ptr(), self.inputs, self.outputs)

    def __call__(self, x: Float[Tensor, "n D"], other: Float[Tensor, "n E"] | None = None, what: int = STORE) -> Float[Tensor, "n E"]:
        """x @ weight.T + bias; with `other` that plus it (ADD) or times it (MULTIPLY), written over `other` where it lies in one piece."""
        x = x.contiguous()
        out = x.new_empty(len(x), self.outputs) if other is None else other.contiguous()
        space = x.new_empty(-(-len(x) // LANES) * LANES * self.inputs)
        bias = None if self.bias is None else self.bias.data_ptr()
        _functions()[1](
            x.data_ptr(), self.panels.data_ptr(), bias, out.data_ptr(), space.data_ptr(), len(x), self.inputs, self.outputs, what
        )
        return out


def available() -> bool:
    return load("few_rows.c") is not None


@functools.cache
def _functions() -> tuple[ctypes._CFuncPtr, ctypes._CFuncPtr]:
    library = load("few_rows.c")
    assert library is not None
    pack, product = library.anypo_pack, library.anypo_product
    pack.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_long] * 2
    product.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_long] * 3 + [ctypes.c_int]
    pack.restype = product.restype = None
    return pack, product
