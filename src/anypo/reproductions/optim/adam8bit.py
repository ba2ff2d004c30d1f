"""Claims of the 8-bit optimizers: the code, block-wise against tensor-wise, training on scikit-learn's digits, state size, stable embedding."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from anypo.claims import Evidence, ablation, claim
from anypo.domains.optim.quantizer import BlockQuantizer
from anypo.methods.optim.adam8bit import Adam8bit, StableEmbedding, dynamic_map, quantize, run
from anypo.reproductions.optim.digits import Optimizer, mean_trained

SEEDS = (0, 1, 2)


def _relative_error(x: Tensor, values: Tensor) -> float:
    return float(((values - x).abs() / x.abs()).mean())


def _code_error(code_map: Tensor) -> Evidence:
    generator = torch.Generator().manual_seed(0)
    x = 10 ** (-4 * torch.rand(100_000, generator=generator, dtype=torch.float64))
    x[0] = 1.0
    quantizer = BlockQuantizer(code_map, len(x))
    found = {"values": len(code_map), "relative error": round(_relative_error(x, quantizer.decode(quantizer.encode(x), x.shape)), 4)}
    return Evidence(
        found,
        "256 values, mean relative error below 0.06 over four orders of magnitude",
        len(code_map) == 256 and found["relative error"] < 0.06,
    )


@claim("the dynamic code of 256 values has a mean relative error below 0.06 on inputs spread over four orders of magnitude")
def code_error() -> Evidence:
    return _code_error(dynamic_map(True))


@ablation(code_error, "a linear code of 256 values")
def linear_code_error() -> Evidence:
    return _code_error(torch.linspace(-1, 1, 256, dtype=torch.float64))


def _outlier(block: int) -> Evidence:
    x = torch.randn(20_480, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    spoiled = x.clone()
    spoiled[100] = 1000.0
    far = slice(2048, None)  # the blocks without the outlier
    clean, hit = (_relative_error(x[far], quantize(values, block).values[far]) for values in (x, spoiled))
    return Evidence(
        {"without": round(clean, 4), "with": round(hit, 4)},
        "an outlier changes the other blocks' error by less than 1%",
        abs(hit / clean - 1) < 0.01,
    )


@claim("block-wise normalization confines an outlier to its block")
def outlier_is_confined() -> Evidence:
    return _outlier(2048)


@ablation(outlier_is_confined, "one block for the whole tensor")
def outlier_spreads() -> Evidence:
    return _outlier(20_480)


def _optimizer(kind: str) -> Optimizer:
    """`kind`: float, dynamic or linear (the second moment in a linear code)."""
    if kind == "float":
        return lambda parameters: torch.optim.Adam(parameters, lr=1e-3)
    second = BlockQuantizer(dynamic_map(False) if kind == "dynamic" else torch.linspace(0, 1, 256, dtype=torch.float64), 256)
    return lambda parameters: Adam8bit(parameters, lr=1e-3, quantizers=(BlockQuantizer(dynamic_map(True), 256), second))


def _as_good(kind: str) -> Evidence:
    (loss, accuracy), (target, goal) = (mean_trained(_optimizer(k), SEEDS) for k in (kind, "float"))
    found = {"loss": round(loss, 4), "32-bit loss": round(target, 4), "accuracy": round(accuracy, 4), "32-bit accuracy": round(goal, 4)}
    return Evidence(
        found,
        "test loss at most 2% above, accuracy within 1 point of 32-bit Adam (3 seeds)",
        loss <= 1.02 * target and accuracy >= goal - 0.01,
    )


@claim("a network trained on digits with 8-bit states is as good as with 32-bit Adam at the same hyper-parameters", slow=True)
def as_good() -> Evidence:
    return _as_good("dynamic")


@ablation(as_good, "a linear code for the second moment")
def diverges() -> Evidence:
    return _as_good("linear")


def _size(elements: int) -> Evidence:
    ratio = run(elements=elements, steps=2)["bytes_ratio"]
    return Evidence(round(ratio, 4), "at most 0.27 of 32-bit states", ratio <= 0.27)


@claim("the states of a large tensor take at most 0.27 of the bytes")
def size() -> Evidence:
    return _size(1 << 16)


@ablation(size, "a tensor below the smallest size, kept in 32 bits")
def size_of_small() -> Evidence:
    return _size(1024)


def _stable(embedding: nn.Module) -> Evidence:
    index = torch.arange(200)
    with torch.no_grad():
        before = embedding(index)
        next(embedding.parameters()).mul_(100)
        after = embedding(index)
    change = float((after - before).norm() / before.norm())
    mean, variance = float(before.mean(1).abs().max()), float((before.var(1, correction=0) - 1).abs().max())
    found = {"change": round(change, 4), "mean": round(mean, 4), "variance - 1": round(variance, 4)}
    return Evidence(
        found, "below 1% when the table grows 100-fold; rows of mean 0 and variance 1 to 1%", max(change, mean, variance) < 0.01
    )


@claim("the stable embedding's outputs are normalized and do not follow the scale of its table")
def stable() -> Evidence:
    torch.manual_seed(0)
    return _stable(StableEmbedding(200, 64))


@ablation(stable, "no layer normalization")
def unstable() -> Evidence:
    torch.manual_seed(0)
    return _stable(nn.Embedding(200, 64))
