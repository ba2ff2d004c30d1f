"""4-bit optimizers: row and column normalization, zero-free second moment (arXiv:2309.01507).

Against 8-bit states (adam8bit): small blocks for the first moment, the smaller of row and column maximum as the scale of the second moment, because
its outliers fill rows or columns, and a linear map without zero for it, because a small v stored as 0 makes m / (sqrt(v) + eps) explode. Any method
takes it with `--set update.optimizer=adam4bit`. The maps and the normalization are those of the authors' code, the rest is the paper's. Left out: the
authors' fused kernels.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from anypo.domains.optim.optimizer import QuantizedOptimizer, by_size
from anypo.domains.optim.quantizer import BlockQuantizer, Packed, Quantizer, Stored
from anypo.domains.optim.rules import Adam, States, averaged_factors, factored_root
from anypo.domains.optim.rules import factored_v as factored_v
from anypo.method import Paper, Study
from anypo.methods.optim.adam8bit import Quantized, dynamic_map


class AdamState(NamedTuple):
    p: Tensor
    m: Tensor  # first moment as it is after storage
    v: Tensor  # second moment as it is after storage


def de_map(bits: int = 4, signed: bool = True, zero: bool = True) -> Float[Tensor, " C"]:
    """Equation 2: the dynamic exponent map, sorted. `zero=False` (DE-0, unsigned) has its smallest positive value again in place of 0."""
    found = dynamic_map(signed, bits)
    return found if zero else torch.where(found == 0, found[found > 0].min(), found)


def linear_map(bits: int = 4) -> Float[Tensor, " C"]:
    """Equation 3: {1, ..., 2^bits} / 2^bits, without zero."""
    return torch.arange(1, 2**bits + 1, dtype=torch.float64) / 2**bits


def quantize_m(x: Tensor, block: int = 128) -> Quantized:
    """Equations 1-2: codes [n], one scale a block, and the values, in the shape of `x`."""
    quantizer = BlockQuantizer(de_map(), block)
    stored = quantizer.encode(x)
    return Quantized(stored.codes, stored.scale, quantizer.decode(stored, x.shape))


def axis_maxima(x: Tensor) -> list[Tensor]:
    """Largest magnitude of every slice, for each axis: vectors of length x.shape[a]."""
    return [x.abs().amax(dim=[b for b in range(x.dim()) if b != a]) for a in range(x.dim())]


def smallest(maxima: Iterable[Tensor]) -> Tensor:
    """Equation 4: N[i1..id] = min_a maxima[a][ia]."""
    maxima = list(maxima)
    scale = maxima[0].view(-1, *[1] * (len(maxima) - 1))
    for axis, values in enumerate(maxima[1:], 1):
        scale = torch.minimum(scale, values.view(-1, *[1] * (len(maxima) - 1 - axis)))
    return scale


def rank1_scale(x: Tensor) -> Tensor:
    """Equation 4 for a tensor of 2 or more axes: a scale for every entry, at least |x|."""
    return smallest(axis_maxima(x))


class RankOneQuantizer:
    """Nearest value of a sorted code map after division by `rank1_scale`; vectors block-wise. Keeps the maxima of all axes, one after another."""

    def __init__(self, code_map: Tensor, block: int = 128) -> None:
        self.vectors = BlockQuantizer(code_map, block)

    def encode(self, values: Tensor) -> Stored:
        if values.dim() < 2:
            return self.vectors.encode(values)
        maxima = axis_maxima(values.detach())
        scale = smallest(maxima)
        unit = values.detach() / torch.where(scale > 0, scale, torch.ones_like(scale))
        return Stored(torch.searchsorted(self.vectors.middles.to(unit), unit).to(torch.uint8).flatten(), torch.cat(maxima))

    def decode(self, stored: Stored, shape: torch.Size) -> Tensor:
        if len(shape) < 2:
            return self.vectors.decode(stored, shape)
        values = self.vectors.code_map.to(stored.scale)[stored.codes.long()].view(shape)
        return values * smallest(stored.scale.split(list(shape)))


def quantize_v(x: Tensor) -> Quantized:
    """Equations 3-4: codes in the shape of `x` >= 0, all scales in one vector, and the values."""
    quantizer = RankOneQuantizer(linear_map())
    stored = quantizer.encode(x)
    return Quantized(stored.codes.view(x.shape), stored.scale, quantizer.decode(stored, x.shape))


def adamw_step(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, t: int, lr: float, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, wd: float = 0.0,
    block: int = 128,
) -> AdamState:  # fmt: skip
    """Equation 5: one step with the fresh moments, which come back as they are after storage (`block` of m; 0 stores both exactly)."""
    m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
    p = p - lr * ((m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + eps) + wd * p)
    return AdamState(p, quantize_m(m, block).values, quantize_v(v).values) if block else AdamState(p, m, v)


def stochastic(x: Float[Tensor, " n"], levels: Float[Tensor, " C"], draws: Float[Tensor, " n"]) -> Int[Tensor, " n"]:
    """Equation 7: the level above with probability (x - below) / (above - below), else the one below; `draws` are uniform in [0,1)."""
    below = (torch.searchsorted(levels, x, right=True) - 1).clamp(0, len(levels) - 2)
    return below + (draws < (x - levels[below]) / (levels[below + 1] - levels[below])).long()


class StochasticBlocks(BlockQuantizer):
    """A block quantizer that rounds by chance, so that the mean of what it stores is the value itself (draws of torch's global generator)."""

    def encode(self, values: Tensor) -> Stored:
        flat = values.detach().flatten()
        scale = super().encode(flat).scale
        unit = flat / torch.where(scale > 0, scale, torch.ones_like(scale)).repeat_interleave(self.block)[: len(flat)]
        return Stored(stochastic(unit, self.code_map.to(unit), torch.rand_like(unit)).to(torch.uint8), scale)


@dataclass
class FactoredAdam(Adam):
    """Equation 6: Adam whose second moment is kept as row and column means (more axes: the first against the rest); vectors as in Adam."""

    def direction(self, gradient: Tensor, states: States, t: int) -> Tensor:
        if gradient.dim() < 2:
            return super().direction(gradient, states, t)
        (b1, b2), flat = self.betas, gradient.flatten(1)
        m = states["m"] = b1 * states.get("m", torch.zeros_like(gradient)) + (1 - b1) * gradient
        row, col = (states.get(name, flat.new_zeros(size)) for name, size in zip(("row", "col"), flat.shape, strict=True))
        states["row"], states["col"] = row, col = averaged_factors(flat.square(), row, col, b2)
        root = factored_root(row, col).view_as(m) / (1 - b2**t) ** 0.5
        return (m / (1 - b1**t)) / (root + self.eps)


@dataclass
class Momentum:
    """SGD's momentum: m <- beta m + g."""

    beta: float = 0.9  # in [0,1)

    kinds: ClassVar[dict[str, str]] = {"m": "momentum"}

    def direction(self, gradient: Tensor, states: States, t: int) -> Tensor:
        states["m"] = self.beta * states.get("m", torch.zeros_like(gradient)) + gradient
        return states["m"].clone()


class Adam4bit(QuantizedOptimizer):
    """AdamW with moments in half a byte each; tensors below `min_size` entries and groups with `full_precision` keep 32 bits.

    `factored`: the second moment as row and column means in 32 bits. `quantizers`: other ones for the first and second moment.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0,
        block: int = 128, min_size: int = 4096, factored: bool = False, quantizers: tuple[Quantizer, Quantizer] | None = None,
    ) -> None:  # fmt: skip
        first, second = quantizers or (Packed(BlockQuantizer(de_map(), block)), Packed(RankOneQuantizer(linear_map(), block)))
        rule = (FactoredAdam if factored else Adam)(betas, eps)
        super().__init__(params, rule, by_size(min_size, momentum=first, second=second), lr, weight_decay)


class Sgd4bit(QuantizedOptimizer):
    """SGD with momentum in half a byte, stochastically rounded."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        block: int = 128,
        min_size: int = 4096,
    ) -> None:
        super().__init__(
            params, Momentum(momentum), by_size(min_size, momentum=Packed(StochasticBlocks(de_map(), block))), lr, weight_decay
        )


def run(seed: int = 0, rows: int = 1024, steps: int = 10) -> dict[str, Any]:
    """State size and drift of 4-bit Adam against torch's on one square matrix with random gradients: {bytes_ratio, largest_difference}."""
    generator = torch.Generator().manual_seed(seed)
    small, whole = (nn.Parameter(torch.zeros(rows, rows)) for _ in range(2))
    mine, reference = Adam4bit([small], lr=1e-3), torch.optim.Adam([whole], lr=1e-3)
    for _ in range(steps):
        small.grad = whole.grad = torch.randn(rows, rows, generator=generator)
        mine.step()
        reference.step()
    return {"bytes_ratio": mine.state_bytes() / (8 * rows * rows), "largest_difference": float((small - whole).detach().abs().max())}


STUDY = Study(
    name="adam4bit",
    paper=Paper("Memory Efficient Optimizers with 4-bit States", "2309.01507", 2023),
    domain="optim",
    run=run,
    kind="component",
    summary="Adam's moments in half a byte each, scaled by rows and columns and free of zeros; usable from any method as update.optimizer=adam4bit",
)
