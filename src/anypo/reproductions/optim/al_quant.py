"""Claims of adaptive log-space quantization: exact zeros, update error, drift, dormant entries, topology, training on scikit-learn's digits.

Settings and thresholds are those of the row's specification unless a comment says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from statistics import fmean

import torch
from torch import Tensor, nn

from anypo.claims import Evidence, ablation, claim
from anypo.domains.optim.optimizer import QuantizedOptimizer, by_size
from anypo.domains.optim.quantizer import BlockQuantizer, Quantizer
from anypo.domains.optim.rules import Adam, Came, Rule, adafactor, confident
from anypo.methods.optim.adam4bit import linear_map
from anypo.methods.optim.adam8bit import dynamic_map
from anypo.methods.optim.al_quant import LogQuantizer, UniformQuantizer, al, blocks_of, log_codes, log_values
from anypo.reproductions.optim.digits import Optimizer, trained

SEEDS = (0, 1, 2)
MORE_SEEDS = range(10)
BLOCK = 256
Store = Callable[[Tensor], Tensor]  # a non-negative tensor as it is after storage


def _fixed(x: Tensor) -> Tensor:
    """Log-space codes over one interval for all, e^46 wide and placed so that nothing here lies far outside."""
    blocks = blocks_of(x, BLOCK)
    lo = torch.full_like(blocks[:, 0], -28.0)
    return log_values(log_codes(blocks, lo, lo + 46, 8), lo, lo + 46, 8).flatten()[: x.numel()]


def _through(quantizer: Quantizer) -> Store:
    return lambda x: quantizer.decode(quantizer.encode(x), x.shape)


LINEAR = BlockQuantizer(torch.linspace(0, 1, 256, dtype=torch.float64), BLOCK)
STORES: dict[str, Store] = {
    "adaptive log": lambda x: al(x, 8, BLOCK).values,
    "fixed log": _fixed,
    "linear": _through(LINEAR),
    "dynamic": _through(BlockQuantizer(dynamic_map(False), BLOCK)),
}


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _normal(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _exact_zero(name: str) -> Evidence:
    generator = _generator(0)
    x = 10 ** (-12 * torch.rand(4096, generator=generator, dtype=torch.float64))
    x[torch.rand(4096, generator=generator) < 0.2] = 0
    tiny = x.clone()
    tiny[::7] = 1e-38
    found, found_tiny = STORES[name](x), STORES[name](tiny)
    some = x > 0
    wrong = int(((found == 0) != (x == 0)).sum() + ((found_tiny == 0) != (tiny == 0)).sum())
    error = float(((found - x).abs() / x)[some].max())
    return Evidence(
        {"wrong zeros": wrong, "largest relative error": round(error, 4)},
        "zero exactly where the value is zero (1e-38 is not), relative error below 0.06 over twelve decades",
        wrong == 0 and error < 0.06,
    )


@claim(
    "a code is zero if and only if the value is zero, and values over twelve decades in a block keep a relative error below 6% in 8 bits"
)
def exact_zero() -> Evidence:
    return _exact_zero("adaptive log")


@ablation(exact_zero, "linear codes")
def exact_zero_linear() -> Evidence:
    return _exact_zero("linear")


def _relative(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def _update_error(name: str) -> Evidence:
    reconstruction: dict[str, list[float]] = {n: [] for n in STORES}
    update: dict[str, list[float]] = {n: [] for n in STORES}
    for seed in SEEDS:
        generator = _generator(seed)
        v = (3 * _normal(4096, generator=generator)).exp()
        m = v.sqrt() * _normal(4096, generator=generator)
        for other, store in STORES.items():
            kept = store(v)
            reconstruction[other].append(_relative(kept, v))
            update[other].append(_relative(m / (kept.sqrt() + 1e-8), m / (v.sqrt() + 1e-8)))
    errors = {n: fmean(values) for n, values in update.items()}
    similar = max(fmean(reconstruction[n]) for n in ("adaptive log", "linear", "dynamic"))
    found = {n: {"reconstruction": round(fmean(reconstruction[n]), 4), "update": float(f"{errors[n]:.3g}")} for n in STORES}
    baselines = [n for n in STORES if n != "adaptive log"]
    return Evidence(
        found,
        "update error at most 0.6 of every other code's, though linear and dynamic codes reconstruct to 2% as well (3 seeds)",
        similar < 0.02 and all(errors[name] <= 0.6 * errors[n] for n in baselines),
    )


@claim("on second moments of wide range Adam's update error is below that of linear, dynamic and fixed-range codes of 8 bits")
def update_is_near() -> Evidence:
    return _update_error("adaptive log")


@ablation(update_is_near, "a fixed logarithmic range")
def update_fixed() -> Evidence:
    return _update_error("fixed log")


@ablation(update_is_near, "the dynamic code")
def update_dynamic() -> Evidence:
    return _update_error("dynamic")


def _drifts(deviation: float, names: Iterable[str]) -> dict[str, float]:
    """Mean relative error of v after 200 averages at beta2 .999, gradients of log-normal scale."""
    total = dict.fromkeys(names, 0.0)
    for seed in SEEDS:
        generator = _generator(seed)
        scale = (deviation * _normal(2560, generator=generator)).exp()
        exact, kept = torch.zeros_like(scale), {n: torch.zeros_like(scale) for n in total}
        for _ in range(200):
            new = (scale * _normal(2560, generator=generator)).square()
            exact = 0.999 * exact + 0.001 * new
            kept = {n: STORES[n](0.999 * value + 0.001 * new) for n, value in kept.items()}
        for n, value in kept.items():
            total[n] += float(((value - exact).abs() / exact).mean()) / len(SEEDS)
    return total


def _drift(name: str, deviation: float, others: tuple[str, ...]) -> Evidence:
    found = _drifts(deviation, dict.fromkeys((name, *others)))
    return Evidence(
        {n: round(value, 3) for n, value in found.items()},
        "mean relative drift at most half of the others' (3 seeds)",
        all(found[name] <= 0.5 * found[n] for n in others),
    )


@claim("after 200 averages the second moment has drifted at most half as far as in fixed-range logarithmic and linear codes")
def drifts_less() -> Evidence:
    return _drift("adaptive log", 1.0, ("fixed log", "linear"))


@ablation(drifts_less, "a fixed logarithmic range")
def drifts_fixed() -> Evidence:
    return _drift("fixed log", 1.0, ("fixed log", "linear"))


@claim("for gradients of wide range it has drifted at most half as far as in the dynamic code")
def drifts_less_than_dynamic() -> Evidence:
    return _drift("adaptive log", 3.0, ("dynamic",))


@ablation(drifts_less_than_dynamic, "a fixed logarithmic range")
def drifts_fixed_wide() -> Evidence:
    return _drift("fixed log", 3.0, ("dynamic",))


def _with(second: Quantizer, rule: Rule | None = None, min_size: int = 0, rate: float = 1e-3) -> Optimizer:
    """An optimizer of `rule` with uniform 8-bit momentum and `second` for all non-negative states of at least `min_size` entries."""
    storage = by_size(min_size, momentum=UniformQuantizer(BLOCK), second=second, factored=second, confidence=second)
    return lambda parameters: QuantizedOptimizer(parameters, rule or Adam(), storage, lr=rate)


def _dormant(second: Quantizer) -> Evidence:
    generator = _generator(0)
    parameters = [nn.Parameter(torch.zeros(1024, dtype=torch.float64)) for _ in range(2)]
    optimizers = _with(second)([parameters[0]]), torch.optim.Adam([parameters[1]], lr=1e-3)
    idle = torch.arange(1024) % 4 == 0
    for step in range(51):
        gradient = _normal(1024, generator=generator)
        if step < 50:
            gradient[idle] = 0
        before = [p.detach()[idle].clone() for p in parameters]
        for parameter, optimizer in zip(parameters, optimizers, strict=True):
            parameter.grad = gradient.clone()
            optimizer.step()
    mine, exact = (p.detach()[idle] - b for p, b in zip(parameters, before, strict=True))
    difference, shrunk = float((mine / exact - 1).abs().max()), 1 - float((mine / exact).mean())
    return Evidence(
        {"largest relative difference": float(f"{difference:.3g}"), "mean shrinkage": round(shrunk, 4)},
        "the first update after 50 idle steps equals that of full precision to 1e-6",
        difference <= 1e-6,
    )


@claim("entries without gradient for 50 steps wake with the update of full precision")
def dormant() -> Evidence:
    return _dormant(LogQuantizer(8, BLOCK))


@ablation(dormant, "the zero-free linear map of 4-bit optimizers, in blocks")
def dormant_zero_free() -> Evidence:
    return _dormant(BlockQuantizer(linear_map(), BLOCK))


@cache
def _whole(rule: type[Rule], rate: float) -> list[float]:
    """Test losses with states in full precision, by seed."""
    return [trained(_with(LINEAR, rule(), 1 << 30, rate), seed)[0] for seed in SEEDS]


def _losses(second: Quantizer, rule: type[Rule], min_size: int, rate: float) -> tuple[list[float], list[float], dict[str, list[float]]]:
    """Test losses by seed with quantized states and in full precision, and both to report."""
    mine, whole = [trained(_with(second, rule(), min_size, rate), seed)[0] for seed in SEEDS], _whole(rule, rate)
    return mine, whole, {"loss": [round(x, 4) for x in mine], "32-bit loss": [round(x, 4) for x in whole]}


def _at_most(second: Quantizer) -> Evidence:
    mine, whole, found = _losses(second, Adam, 4096, 1e-3)
    return Evidence(found, "mean test loss at most 3% above 32-bit (3 seeds)", fmean(mine) <= 1.03 * fmean(whole))


@claim("a network trained on digits by AdamW with 8-bit log-space states has a test loss at most 3% above 32-bit", slow=True)
def as_good() -> Evidence:
    return _at_most(LogQuantizer(8, BLOCK))


@ablation(as_good, "linear 8-bit codes for the second moment")
def worse_linear() -> Evidence:
    return _at_most(LINEAR)


# The step size is that of seeds 100 to 102 at which the loss with other codes of the same states scatters by a tenth and 16 bits by a hundredth; at
# 1e-3 CAME without bias correction scatters by more than 3% whatever its states. "Each seed" is sharper than the mean, where scatter may cancel.
def _follows(second: Quantizer) -> Evidence:
    mine, whole, found = _losses(second, Came, 0, 1e-4)
    return Evidence(
        found, "test loss within 3% of 32-bit on each of 3 seeds", all(abs(a / b - 1) <= 0.03 for a, b in zip(mine, whole, strict=True))
    )


@claim("CAME with 16-bit log-space states and 8-bit momentum matches the test loss of 32-bit CAME to 3% on each of three seeds", slow=True)
def came_as_good() -> Evidence:
    return _follows(LogQuantizer(16, 1024))


@ablation(came_as_good, "linear 8-bit codes for the non-negative states")
def came_worse_linear() -> Evidence:
    return _follows(LINEAR)


def _factors(seed: int, deviation: float) -> tuple[Tensor, Tensor, Tensor]:
    """A gradient [256,256] with rows of log-normal scale, and Adafactor's factors after 20 steps of such gradients."""
    generator = _generator(seed)
    scale = (deviation * _normal(256, generator=generator)).exp()[:, None]
    row = col = torch.zeros(256, dtype=torch.float64)
    for _ in range(20):
        g = scale * _normal(256, 256, generator=generator)
        row, col, _ = adafactor(g, row, col, 0.9)
    return g, row, col


def _step_error(seed: int, deviation: float, store: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> float:
    """Relative error of g / sqrt(vhat) with stored factors."""
    g, row, col = _factors(seed, deviation)
    return _relative(confident(g, *store(row, col)), confident(g, row, col))


def _separate(bits: int) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    return lambda row, col: (al(row, bits, len(row)).values, al(col, bits, len(col)).values)


def _mixed(row: Tensor, col: Tensor) -> tuple[Tensor, Tensor]:
    both = torch.cat([row, col])
    kept_row, kept_col = al(both, 8, len(both)).values.split([len(row), len(col)])
    return kept_row, kept_col


def _topology(store: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Evidence:
    found = {
        f"rows of deviation {d}": round(
            fmean(_step_error(s, d, _mixed) for s in MORE_SEEDS) / fmean(_step_error(s, d, store) for s in MORE_SEEDS), 3
        )
        for d in (0.5, 3.0)
    }
    return Evidence(found, "update error of mixed blocks at least 1.1 times as large (10 seeds)", min(found.values()) >= 1.1)


# The specification measured factors of 1.2 to 1.3 and asks for more than 1; 1.1 leaves a margin on both sides.
@claim("a block that mixes Adafactor's row and column factors has a larger update error than a block for each")
def topology() -> Evidence:
    return _topology(_separate(8))


@ablation(topology, "rows and columns in one block")
def topology_mixed() -> Evidence:
    return _topology(_mixed)


def _confidence_error(seed: int, bits: int) -> float:
    """Relative error of CAME's update after 20 steps with the factors of its instability stored in `bits`."""
    generator = _generator(seed)
    scale = (_normal(256, generator=generator)).exp()[:, None]
    rule = Came()
    states: dict[str, Tensor] = {}
    for t in range(1, 21):
        rule.direction(scale * _normal(256, 256, generator=generator), states, t)
    row, col = states["instability_row"], states["instability_col"]
    return _relative(confident(states["m"], *_separate(bits)(row, col)), confident(states["m"], row, col))


def _bits(bits: int) -> Evidence:
    found = {
        "factored": fmean(_step_error(s, 1.0, _separate(8)) for s in SEEDS) / fmean(_step_error(s, 1.0, _separate(bits)) for s in SEEDS),
        "confidence": fmean(_confidence_error(s, 8) for s in SEEDS) / fmean(_confidence_error(s, bits) for s in SEEDS),
    }
    return Evidence(
        {n: round(value, 1) for n, value in found.items()},
        "update error in 8 bits at least 20 times as large (3 seeds)",
        min(found.values()) >= 20,
    )


@claim("16 bits for factored or confidence states make the update error at least 20 times smaller than 8 bits")
def more_bits() -> Evidence:
    return _bits(16)


@ablation(more_bits, "8 bits")
def no_more_bits() -> Evidence:
    return _bits(8)
