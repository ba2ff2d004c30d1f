"""Adaptive log-space optimizer-state quantization.

Changes the quantizer of adam8bit and chooses it by what a state is: non-negative states get codes spread evenly over the logarithms that occur in their
block, with one code for exact zero (zero if and only if the value is zero); signed momentum gets uniform 8-bit codes; factored states are one block
a vector, CAME's factors have 16 bits, small or protected tensors stay whole. Any method takes it with `--set update.optimizer=al_quant` (AdamW), or
`al_adafactor`, `al_came`, `al_projected`. The rule is the abstract's; its rounding, block sizes and the protected roles are [reconstructed]. The
paper's number is unknown. Left out: the policy's protection by layer (first and last), for which an optimizer sees no layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from anypo.domains.optim.optimizer import QuantizedOptimizer
from anypo.domains.optim.quantizer import Quantizer, Stored
from anypo.domains.optim.rules import Adafactor, Adam, Came, ProjectedAdam, Rule
from anypo.domains.optim.rules import adafactor as adafactor
from anypo.method import Paper, Study

PROTECTED = ("norm", "bias", "embedding")


class LogCodes(NamedTuple):
    codes: Int[Tensor, " n"]  # 0 for zero, else 1..2^bits - 1
    lo: Float[Tensor, " blocks"]  # smallest logarithm, 0 in a block of zeros
    hi: Float[Tensor, " blocks"]  # largest logarithm
    values: Float[Tensor, " n"]


class Uniform(NamedTuple):
    codes: Int[Tensor, " n"]  # -127..127
    scale: Float[Tensor, " blocks"]
    values: Float[Tensor, " n"]


class Errors(NamedTuple):
    reconstruction: Tensor  # ||v_q - v|| / ||v||
    update: Tensor  # ||u_q - u|| / ||u||


class Averages(NamedTuple):
    exact: Tensor  # [n]
    quantized: Tensor  # [n]


def blocks_of(x: Tensor, block: int) -> Float[Tensor, "blocks block"]:
    """A flattened tensor in blocks, in 64 bits, the last one filled up with zeros."""
    flat = x.detach().flatten().double()
    return nn.functional.pad(flat, (0, -len(flat) % block)).view(-1, block)


def log_codes(blocks: Float[Tensor, "blocks block"], lo: Tensor, hi: Tensor, bits: int) -> Int[Tensor, "blocks block"]:
    """Equation 2 for the intervals [lo, hi] [blocks]; logarithms outside take the end codes."""
    top, width = 2**bits - 2, (hi - lo)[:, None]
    position = torch.where(width > 0, (blocks.log() - lo[:, None]) / width, torch.zeros_like(blocks)).clamp(0, 1)
    return torch.where(blocks > 0, 1 + (top * position + 0.5).floor(), torch.zeros_like(blocks)).long()


def log_values(codes: Int[Tensor, "blocks block"], lo: Tensor, hi: Tensor, bits: int) -> Float[Tensor, "blocks block"]:
    """Equation 3."""
    found = torch.exp(lo[:, None] + (codes - 1).double() / (2**bits - 2) * (hi - lo)[:, None])
    return torch.where(codes > 0, found, torch.zeros_like(found))


def ends(blocks: Float[Tensor, "blocks block"]) -> tuple[Tensor, Tensor]:
    """Smallest and largest positive value of each block [blocks]; 1 where there is none, so that the logarithms are 0."""
    empty = ~(blocks > 0).any(1)
    low = torch.where(blocks > 0, blocks, torch.full_like(blocks, math.inf)).amin(1)
    return low.masked_fill(empty, 1.0), blocks.amax(1).masked_fill(empty, 1.0)


def al(x: Float[Tensor, " n"], bits: int = 8, block: int = 256) -> LogCodes:
    """Equations 1-3 for non-negative `x`."""
    blocks = blocks_of(x, block)
    lo, hi = (end.log() for end in ends(blocks))
    codes = log_codes(blocks, lo, hi, bits)
    return LogCodes(codes.flatten()[: x.numel()], lo, hi, log_values(codes, lo, hi, bits).flatten()[: x.numel()].to(x))


def momentum(x: Float[Tensor, " n"], block: int = 256) -> Uniform:
    """Equation 4: signed values in 255 even steps a block."""
    blocks = blocks_of(x, block)
    scale = blocks.abs().amax(1) / 127
    codes = (blocks / torch.where(scale > 0, scale, torch.ones_like(scale))[:, None] + 0.5).floor().clamp(-127, 127)
    return Uniform(codes.flatten()[: x.numel()].long(), scale.to(x), (codes * scale[:, None]).flatten()[: x.numel()].to(x))


def update_error(m: Tensor, v: Tensor, bits: int = 8, block: int = 256, eps: float = 1e-8) -> Errors:
    """Equation 6 for Adam's m / (sqrt(v) + eps) with an exact m [n] and v [n] in log-space codes."""
    stored = al(v, bits, block).values
    exact = m / (v.sqrt() + eps)
    return Errors((stored - v).norm() / v.norm(), (m / (stored.sqrt() + eps) - exact).norm() / exact.norm())


def drift(grads: Float[Tensor, "S n"], bits: int = 8, block: int = 256, beta2: float = 0.999) -> Averages:
    """The average of g^2 after S steps, exact and stored in log-space codes after each."""
    exact = stored = torch.zeros_like(grads[0])
    for g in grads:
        exact = beta2 * exact + (1 - beta2) * g**2
        stored = al(beta2 * stored + (1 - beta2) * g**2, bits, block).values
    return Averages(exact, stored)


def plan(
    numel: Sequence[int], role: Sequence[str], kind: Sequence[str], protect: Sequence[str] = PROTECTED, protect_below: int = 1024
) -> list[str]:
    """Equation 5: how each state is stored: fp32, uniform8, al16 or al8."""
    by_kind = {"momentum": "uniform8", "confidence": "al16"}
    return ["fp32" if r in protect or n < protect_below else by_kind.get(k, "al8") for n, r, k in zip(numel, role, kind, strict=True)]


class LogQuantizer:
    """`al` as storage. Keeps the two end values of a block rather than their logarithms, which 32 bits would blur, and 16-bit codes as 2 bytes."""

    def __init__(self, bits: int = 8, block: int = 256) -> None:
        if bits not in (8, 16) or block < 1:
            raise ValueError(f"log-space storage takes 8 or 16 bits and blocks of at least 1 value, not {bits} and {block}")
        self.bits, self.block = bits, block

    def encode(self, values: Tensor) -> Stored:
        blocks = blocks_of(values, self.block)
        low, high = ends(blocks)
        codes = log_codes(blocks, low.log(), high.log(), self.bits).flatten()[: values.numel()]
        return Stored(codes.to(torch.uint8 if self.bits == 8 else torch.uint16), torch.stack([low, high], 1).to(values))

    def decode(self, stored: Stored, shape: torch.Size) -> Tensor:
        low, high = stored.scale.double().log().unbind(1)
        codes = nn.functional.pad(stored.codes.long(), (0, -shape.numel() % self.block)).view(-1, self.block)
        return log_values(codes, low, high, self.bits).flatten()[: shape.numel()].view(shape).to(stored.scale)


class UniformQuantizer:
    """`momentum` as storage."""

    def __init__(self, block: int = 256) -> None:
        self.block = block

    def encode(self, values: Tensor) -> Stored:
        found = momentum(values, self.block)
        return Stored(found.codes.to(torch.int8), found.scale)

    def decode(self, stored: Stored, shape: torch.Size) -> Tensor:
        return (stored.codes.to(stored.scale) * stored.scale.repeat_interleave(self.block)[: shape.numel()]).view(shape)


class AlOptimizer(QuantizedOptimizer):
    """`rule` with its states stored as `plan` says; `block` for momentum and whole second moments, `vector` for factored and confidence states."""

    rule_type: type[Any] = Adam

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, weight_decay: float = 0.0, rule: Rule | None = None, block: int = 256,
        vector: int = 1024, protect: Sequence[str] = PROTECTED, protect_below: int = 1024,
    ) -> None:  # fmt: skip
        whole, factors = LogQuantizer(8, block), LogQuantizer(8, vector)
        quantizers: dict[str, Quantizer] = {"uniform8": UniformQuantizer(block), "al16": LogQuantizer(16, vector)}

        def storage(kind: str, role: str, numel: int) -> Quantizer | None:
            (name,) = plan([numel], [role], [kind], protect, protect_below)
            return (quantizers | {"al8": factors if kind == "factored" else whole}).get(name)

        super().__init__(params, rule or self.rule_type(), storage, lr, weight_decay)


class AlAdafactor(AlOptimizer):
    rule_type = Adafactor


class AlCame(AlOptimizer):
    rule_type = Came


class AlProjected(AlOptimizer):
    rule_type = ProjectedAdam


def run(seed: int = 0, elements: int = 4096, deviation: float = 3.0) -> dict[str, Any]:
    """Errors of 8- and 16-bit log-space codes on log-normal second moments: {bits: {reconstruction, update}}."""
    generator = torch.Generator().manual_seed(seed)
    v = (deviation * torch.randn(elements, generator=generator, dtype=torch.float64)).exp()
    m = v.sqrt() * torch.randn(elements, generator=generator, dtype=torch.float64)
    found = {bits: update_error(m, v, bits) for bits in (8, 16)}
    return {f"al{bits}": {name: float(value) for name, value in errors._asdict().items()} for bits, errors in found.items()}


STUDY = Study(
    name="al_quant",
    paper=Paper("Adaptive log-space optimizer-state quantization", "", None),
    domain="optim",
    run=run,
    kind="component",
    summary="non-negative optimizer states in codes even in the logarithm, zero kept exactly; usable from any method as update.optimizer=al_quant",
)
