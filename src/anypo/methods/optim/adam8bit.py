"""8-bit optimizers: block-wise dynamic quantization, stable embedding (arXiv:2110.02861).

Adam keeps two numbers a parameter. This keeps them in one byte each plus one scale a block, with unchanged hyper-parameters: block-wise
normalization, so that an outlier spoils its own block alone, a code with small relative error over seven orders of magnitude, and for language
models an embedding that is normalized and whose state stays in 32 bits. At each step a block is decoded, updated, used, and encoded again. Any
method takes it with `--set update.optimizer=adam8bit`. The maps are those of the authors' code, the rest is the paper's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from anypo.domains.optim.optimizer import QuantizedOptimizer, by_size
from anypo.domains.optim.quantizer import BlockQuantizer, Quantizer
from anypo.domains.optim.rules import Adam
from anypo.method import Paper, Study


class Quantized(NamedTuple):
    codes: Tensor  # [n], 0..255
    scale: Tensor  # [blocks]
    values: Tensor  # [n] what the codes stand for


class AdamState(NamedTuple):
    p: Tensor
    m: Tensor  # first moment as it is after storage
    v: Tensor  # second moment as it is after storage


def dynamic_map(signed: bool = True, bits: int = 8) -> Float[Tensor, " C"]:
    """Equation 1: the sorted 2^bits values of the dynamic tree code, in [-1,1] or [0,1]; 0 and 1 are among them."""
    levels = bits - 1
    values = [0.0, 1.0]
    for i in range(levels):
        edges = torch.linspace(0.1, 1, 2 ** (i if signed else i + 1) + 1, dtype=torch.float64)
        centres = (10.0 ** (i - levels + 1) * (edges[1:] + edges[:-1]) / 2).tolist()
        values += centres + ([-c for c in centres] if signed else [])
    return torch.tensor(sorted(values), dtype=torch.float64)


def quantize(x: Float[Tensor, " n"], block: int = 2048, signed: bool = True) -> Quantized:
    """Equations 2-3: block-wise codes and scales, and the values they stand for."""
    quantizer = BlockQuantizer(dynamic_map(signed), block)
    stored = quantizer.encode(x)
    return Quantized(stored.codes, stored.scale, quantizer.decode(stored, x.shape))


def adam_step(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, t: int, lr: float, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, block: int = 2048
) -> AdamState:
    """Equation 4: one step on full-precision values; the new moments come back as they are after storage (`block` 0 stores them exactly)."""
    m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
    p = p - lr * (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + eps)
    if block:
        m, v = quantize(m, block, signed=True).values, quantize(v, block, signed=False).values
    return AdamState(p, m, v)


def adam_run(
    p: Tensor, grads: Float[Tensor, "S n"], lr: float, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, block: int = 2048
) -> Float[Tensor, " n"]:
    """The parameters after one step for each gradient, the moments stored quantized in between."""
    state = AdamState(p, torch.zeros_like(p), torch.zeros_like(p))
    for t, g in enumerate(grads, 1):
        state = adam_step(state.p, g, state.m, state.v, t, lr, b1, b2, eps, block)
    return state.p


class Adam8bit(QuantizedOptimizer):
    """torch.optim.Adam with its moments in 8 bits. Tensors below `min_size`, and groups with `full_precision` (embeddings), keep 32 bits.

    Decoupled decay (AdamW) is the only kind. Raises ValueError for hyper-parameters out of range.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0,
        block: int = 2048, min_size: int = 4096, quantizers: tuple[Quantizer, Quantizer] | None = None,
    ) -> None:  # fmt: skip
        """`quantizers`: for the first and second moment; None = the signed and unsigned dynamic code in blocks of `block`."""
        first, second = quantizers or (BlockQuantizer(dynamic_map(True), block), BlockQuantizer(dynamic_map(False), block))
        super().__init__(params, Adam(betas, eps), by_size(min_size, momentum=first, second=second), lr, weight_decay)


class StableEmbedding(nn.Embedding):
    """Equation 6: Xavier-uniform rows, layer-normalized after the lookup. Give its parameters to a group with `full_precision=True`."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__(count, size)
        nn.init.xavier_uniform_(self.weight)
        self.norm = nn.LayerNorm(size)

    def forward(self, index: Tensor) -> Tensor:
        return self.norm(super().forward(index))


def run(seed: int = 0, elements: int = 1 << 20, steps: int = 10) -> dict[str, Any]:
    """State size and drift of 8-bit Adam against torch's on one tensor with random gradients: {bytes_ratio, largest_difference}."""
    generator = torch.Generator().manual_seed(seed)
    small, whole = (nn.Parameter(torch.zeros(elements)) for _ in range(2))
    mine, reference = Adam8bit([small], lr=1e-3), torch.optim.Adam([whole], lr=1e-3)
    for _ in range(steps):
        small.grad = whole.grad = torch.randn(elements, generator=generator)
        mine.step()
        reference.step()
    return {"bytes_ratio": mine.state_bytes() / (8 * elements), "largest_difference": float((small - whole).detach().abs().max())}


STUDY = Study(
    name="adam8bit",
    paper=Paper("8-bit Optimizers via Block-wise Quantization", "2110.02861", 2021),
    domain="optim",
    run=run,
    kind="component",
    summary="Adam's moments in one byte each, by block-wise dynamic quantization; usable from any method as update.optimizer=adam8bit",
)
