"""8-bit optimizers: block-wise dynamic quantization, stable embedding (arXiv:2110.02861).

Adam keeps two numbers a parameter. This keeps them in one byte each plus one scale a block, with unchanged hyper-parameters: block-wise
normalization, so that an outlier spoils its own block alone, a code with small relative error over seven orders of magnitude, and for language
models an embedding that is normalized and whose state stays in 32 bits. At each step a block is decoded, updated, used, and encoded again. Any
method takes it with `--set update.optimizer=adam8bit`. The maps are those of the authors' code, the rest is the paper's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from anypo.domains.optim.quantizer import BlockQuantizer, Quantizer, Stored
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


class Adam8bit(torch.optim.Optimizer):
    """torch.optim.Adam with its moments in 8 bits. Tensors below `min_size`, and groups with `full_precision` (embeddings), keep 32 bits.

    `decoupled` decay (AdamW) is the only kind. Raises ValueError for hyper-parameters out of range.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0,
        block: int = 2048, min_size: int = 4096, quantizers: tuple[Quantizer, Quantizer] | None = None,
    ) -> None:  # fmt: skip
        """`quantizers`: for the first and second moment; None = the signed and unsigned dynamic code in blocks of `block`."""
        if lr <= 0 or not all(0 <= b < 1 for b in betas) or eps < 0 or weight_decay < 0:
            raise ValueError(f"adam8bit needs lr > 0, betas in [0,1), eps and weight_decay >= 0, not {lr}, {betas}, {eps}, {weight_decay}")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "full_precision": False})
        self.min_size = min_size
        self.quantizers = quantizers or (BlockQuantizer(dynamic_map(True), block), BlockQuantizer(dynamic_map(False), block))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return result

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, (b1, b2) = self.state[parameter], group["betas"]
        gradient = parameter.grad.float()  # type: ignore[union-attr]
        t = state["t"] = state.get("t", 0) + 1
        m, v = (self._load(state, name, quantizer, gradient) for name, quantizer in zip("mv", self.quantizers, strict=True))
        m.mul_(b1).add_(gradient, alpha=1 - b1)
        v.mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
        if group["weight_decay"]:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(((m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + group["eps"])).to(parameter.dtype), alpha=-group["lr"])
        whole = group["full_precision"] or parameter.numel() < self.min_size
        for name, value, quantizer in (("m", m, self.quantizers[0]), ("v", v, self.quantizers[1])):
            if whole:
                state[name] = value
            else:
                state[f"{name}_codes"], state[f"{name}_scale"] = quantizer.encode(value)

    def _load(self, state: dict[str, Any], name: str, quantizer: Quantizer, like: Tensor) -> Tensor:
        """A moment in full precision: stored as it is, stored in codes, or zero before the first step."""
        if name in state:
            return state[name]
        if f"{name}_codes" in state:
            return quantizer.decode(Stored(state[f"{name}_codes"], state[f"{name}_scale"]), like.shape)
        return torch.zeros_like(like)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():  # torch casts all state to the parameter's type; codes are bytes
            for name in ("m_codes", "v_codes"):
                if name in state:
                    state[name] = state[name].to(torch.uint8)

    def state_bytes(self) -> int:
        """Bytes that the moments occupy."""
        tensors = (value for state in self.state.values() for value in state.values() if isinstance(value, Tensor))
        return sum(value.numel() * value.element_size() for value in tensors)


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
