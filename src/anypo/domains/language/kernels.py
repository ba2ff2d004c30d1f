"""What `kernels.c` computes faster than PyTorch's calls do, where it can be compiled: decoding steps of few rows, and the gate of a training pass.

All of it is for a CPU; numbers are float32, matrices may be bfloat16. Whoever calls sees to that, and to `available()`.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import c_float, c_long, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from anypo.engines.native import load

LANES = 16  # outputs in a panel and rows in a tile, as in kernels.c
SOURCE = Path(__file__).with_name("kernels.c")
Norms = Sequence[tuple[Tensor, float] | None]  # weight [D] and eps


class Turn(Protocol):
    """Rotary position embedding of one step."""

    cosine: Float[Tensor, "n W"]
    sine: Float[Tensor, "n W"]


class Slab:
    """Hands out pieces of large tensors: one large piece of fresh memory is faulted in faster than many of 2 MB."""

    CHUNK = 1 << 24  # numbers

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.rest = torch.empty(0, dtype=dtype)

    def take(self, count: int) -> Shaped[Tensor, " count"]:
        if len(self.rest) < count:
            self.rest = self.rest.new_empty(max(count, self.CHUNK))
        piece, self.rest = self.rest[:count], self.rest[count:]
        return piece


class _Matrix(ctypes.Structure):
    _fields_ = (("panels", c_void_p), ("bias", c_void_p), ("inputs", c_long), ("outputs", c_long), ("narrow", c_long))


class _Norm(ctypes.Structure):
    _fields_ = (("weight", c_void_p), ("eps", c_float))


class _Keys(ctypes.Structure):
    _fields_ = (("keys", c_void_p), ("values", c_void_p), ("first", c_void_p), ("capacity", c_long), ("columns", c_long))


class Panels:
    """A matrix [E,D] laid out in panels of 16 outputs: a copy of its values at this moment."""

    def __init__(self, weight: Float[Tensor, "E D"], bias: Float[Tensor, " E"] | None, slab: Slab) -> None:
        self.outputs, self.inputs = weight.shape
        self.bias = None if bias is None else bias.detach().float().contiguous()
        self.panels = slab.take(-(-self.outputs // LANES) * LANES * self.inputs)
        narrow, weight = weight.dtype == torch.bfloat16, weight.detach().contiguous()
        pack = _library().anypo_pack_narrow if narrow else _library().anypo_pack
        pack(weight.data_ptr(), self.panels.data_ptr(), self.inputs, self.outputs)
        bias_at = None if self.bias is None else self.bias.data_ptr()
        self.matrix = ctypes.byref(_Matrix(self.panels.data_ptr(), bias_at, self.inputs, self.outputs, narrow))

    def __call__(self, x: Float[Tensor, "n D"]) -> Float[Tensor, "n E"]:
        """x @ weight.T + bias, in float32."""
        x = x.float().contiguous()
        out, space = x.new_empty(len(x), self.outputs), _side_by_side(x, self.inputs)  # named, so that they live through the call
        _library().anypo_product(self.matrix, x.data_ptr(), len(x), out.data_ptr(), space.data_ptr())
        return out


class FewRowsLayer:
    """One layer of a Llama-type body but for its attention; the counterpart of `decoder.CallsLayer`."""

    def __init__(self, norms: Norms, matrices: list[Panels]) -> None:
        """Norms before the attention, after it, of queries' and of keys' heads; queries, keys and values in one matrix, output, gate, up, down."""
        self.norms = [None if n is None else (n[0].detach().float(), n[1]) for n in norms]  # kept alive: they are pointed to
        self.before, self.after, self.query, self.key = (
            _Norm(None, 0.0) if n is None else _Norm(n[0].data_ptr(), n[1]) for n in self.norms
        )
        self.mixing, self.output, self.gate, self.up, self.down = matrices
        self.widest = max(panels.inputs for panels in matrices)

    def mix(self, state: Float[Tensor, "n D"], turn: Turn, heads: int, key_heads: int) -> Float[Tensor, "n H+2K W"]:
        """Queries, keys and values of the normed state, queries and keys rotated."""
        rows, width = turn.cosine.shape
        out, room, space = state.new_empty(rows, self.mixing.outputs), torch.empty_like(state), _side_by_side(state, self.mixing.inputs)
        _library().anypo_mix(
            state.data_ptr(), self.before, self.mixing.matrix, self.query, self.key, heads, key_heads, turn.cosine.data_ptr(),
            turn.sine.data_ptr(), width, rows, out.data_ptr(), room.data_ptr(), space.data_ptr(),
        )  # fmt: skip
        return out.unflatten(1, (-1, width))

    def finish(self, attended: Float[Tensor, "n A"], state: Float[Tensor, "n D"]) -> Float[Tensor, "n D"]:
        """`state`, written over: plus the output of the attention, plus the gated layer of that."""
        rows, attended = len(state), attended.contiguous()
        room, space = state.new_empty(rows, self.widest), _side_by_side(state, self.widest)
        _library().anypo_finish(
            attended.data_ptr(), self.output.matrix, self.after, self.gate.matrix, self.up.matrix, self.down.matrix, rows, state.data_ptr(),
            room.data_ptr(), space.data_ptr(),
        )  # fmt: skip
        return state


@dataclass
class Columns:
    """Keys and values of rows or prompts, [rows,K,capacity,W] each, of which `columns` are filled, in a row from column `first` [rows] on."""

    keys: Tensor
    values: Tensor
    columns: int
    first: Int64[Tensor, " rows"] | None = None

    def struct(self) -> _Keys:
        first = None if self.first is None else self.first.data_ptr()
        return _Keys(self.keys.data_ptr(), self.values.data_ptr(), first, self.keys.shape[2], self.columns)


def attend(
    mixed: Float[Tensor, "n H+2K W"], own: Columns, shared: Columns | None, owner: Int64[Tensor, " n"] | None, scale: float
) -> Float[Tensor, "n H W"]:
    """Attention of one token a row: its key and value are put into the last column of `own`, and its queries see that and, in `shared`, the prompt
    `owner` of the row. W is a multiple of 16."""
    rows, lines, width = mixed.shape
    key_heads = own.keys.shape[1]
    heads = lines - 2 * key_heads
    out = mixed.new_empty(rows, heads, width)
    _library().anypo_attend(
        mixed.data_ptr(), ctypes.byref(own.struct()), None if shared is None else ctypes.byref(shared.struct()),
        None if owner is None else owner.data_ptr(), rows, key_heads, heads // key_heads, width, scale, out.data_ptr(),
    )  # fmt: skip
    return out


def gate(opened: Float[Tensor, "n I"], raised: Float[Tensor, "n I"]) -> Float[Tensor, "n I"]:
    """silu(opened) * raised, in one pass over both."""
    out = torch.empty_like(opened)
    _library().anypo_gate(opened.data_ptr(), raised.data_ptr(), out.data_ptr(), out.numel())
    return out


def gate_backward(
    opened: Float[Tensor, "n I"], raised: Float[Tensor, "n I"], slope: Float[Tensor, "n I"]
) -> tuple[Float[Tensor, "n I"], Float[Tensor, "n I"], Float[Tensor, "n I"]]:
    """`gate` once more, and the gradients in `opened` and `raised` for `slope`, the one in the gate's result, which is written over."""
    inner, by_opened = torch.empty_like(opened), torch.empty_like(opened)
    _library().anypo_gate_backward(*(x.data_ptr() for x in (opened, raised, slope, inner, by_opened)), inner.numel())
    return inner, by_opened, slope


def available() -> bool:
    """Whether the C can be had here."""
    return load(SOURCE) is not None


def _side_by_side(x: Tensor, width: int) -> Tensor:
    return x.new_empty(-(-len(x) // LANES) * LANES * width)


@functools.cache
def _library() -> ctypes.CDLL:
    library = load(SOURCE)
    assert library is not None
    matrix, keys, norm, at, count = ctypes.POINTER(_Matrix), ctypes.POINTER(_Keys), _Norm, c_void_p, c_long
    library.anypo_pack.argtypes = library.anypo_pack_narrow.argtypes = (at, at, count, count)
    library.anypo_product.argtypes = (matrix, at, count, at, at)
    library.anypo_mix.argtypes = (at, norm, matrix, norm, norm, count, count, at, at, count, count, at, at, at)
    library.anypo_finish.argtypes = (at, matrix, norm, matrix, matrix, matrix, count, at, at, at)
    library.anypo_attend.argtypes = (at, keys, keys, at, count, count, count, count, c_float, at)
    library.anypo_gate.argtypes = (at, at, at, count)
    library.anypo_gate_backward.argtypes = (at, at, at, at, at, count)
    return library
