"""One interface for optimizer state that is kept in fewer bits: a quantizer turns a tensor into what is stored, and back.

Optimizers that quantize their state (8-bit, 4-bit, log-space) differ in the quantizer alone. Left out: widths that do not divide a byte, other than
whole bytes.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Stored(NamedTuple):
    """A quantized tensor."""

    codes: Tensor  # [n], flattened, integers; [(n+1)//2] bytes where two share one
    scale: Tensor  # [blocks], or what else the quantizer needs to undo its normalization


class Quantizer(Protocol):
    """Lossy storage of a tensor of any shape."""

    def encode(self, values: Tensor) -> Stored: ...

    def decode(self, stored: Stored, shape: torch.Size) -> Tensor: ...


class BlockQuantizer:
    """Nearest value of a sorted code map after division by each block's largest magnitude (arXiv:2110.02861 eq. 2-3).

    Ties go to the lower code. A block of zeros has scale 0 and decodes to zeros. `code_map` has at most 256 sorted values in [-1,1].
    """

    def __init__(self, code_map: Tensor, block: int) -> None:
        if block < 1:
            raise ValueError(f"a quantization block needs at least 1 value, not {block}")
        self.code_map, self.block = code_map, block
        self.middles = (code_map[1:] + code_map[:-1]) / 2

    def encode(self, values: Tensor) -> Stored:
        flat = values.detach().flatten()
        blocks = torch.nn.functional.pad(flat, (0, -len(flat) % self.block)).view(-1, self.block)
        scale = blocks.abs().amax(dim=1)
        unit = torch.where(scale > 0, scale, torch.ones_like(scale))[:, None]
        codes = torch.searchsorted(self.middles.to(values), (blocks / unit).contiguous())
        return Stored(codes.to(torch.uint8).flatten()[: len(flat)], scale)

    def decode(self, stored: Stored, shape: torch.Size) -> Tensor:
        scale = stored.scale.repeat_interleave(self.block)[: len(stored.codes)]
        return (self.code_map.to(scale)[stored.codes.long()] * scale).view(shape)


class Packed:
    """Another quantizer's codes of at most 4 bits, two in a byte, the first in the low half."""

    def __init__(self, inner: Quantizer) -> None:
        self.inner = inner

    def encode(self, values: Tensor) -> Stored:
        codes, scale = self.inner.encode(values)
        low, high = torch.nn.functional.pad(codes, (0, len(codes) % 2)).view(-1, 2).unbind(1)
        return Stored(low | (high << 4), scale)

    def decode(self, stored: Stored, shape: torch.Size) -> Tensor:
        codes = torch.stack([stored.codes & 15, stored.codes >> 4], dim=1).flatten()[: shape.numel()]
        return self.inner.decode(Stored(codes, stored.scale), shape)
