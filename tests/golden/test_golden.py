"""Runs every golden case of every implemented row by the one rule of the design: a public pure function named as the quantity, called with
inputs and params as keyword arguments, equals `expected` within `atol`. ANYPO_GOLDEN_DIR points the same runner at another folder of cases."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from anypo import catalogue
from tests.golden.adapters import ADAPTERS, MODULES

FOLDER = Path(os.environ.get("ANYPO_GOLDEN_DIR") or Path(__file__).parent / "cases")


def _modules(slug: str) -> list[str]:
    found = MODULES.get(slug) or [m for m in [catalogue.modules().get(slug)] if m]
    return [m for m in found if importlib.util.find_spec(m) is not None]


def _cases() -> list[Any]:
    params = []
    for path in sorted(FOLDER.glob("*.json")):
        content = json.loads(path.read_text())
        slug = content["method"]
        if _modules(slug):
            params += [pytest.param(slug, case, id=f"{slug}-{case['name']}") for case in content["cases"]]
    return params


def _numeric(value: Any) -> bool:
    return (isinstance(value, int | float) and not isinstance(value, bool)) or isinstance(value, bool)


def _rectangular(value: Any) -> bool:
    """Whether nested lists hold numbers only and every level has one length."""
    if not isinstance(value, list):
        return False
    if all(_numeric(v) for v in value):
        return True
    return all(isinstance(v, list) and _rectangular(v) for v in value) and len({_shape(v) for v in value}) == 1


def _shape(value: Any) -> tuple[int, ...]:
    return (len(value), *(_shape(value[0]) if value else ())) if isinstance(value, list) else ()


def _flat(value: Any) -> list[Any]:
    return [x for v in value for x in _flat(v)] if isinstance(value, list) else [value]


def _convert(value: Any) -> Any:
    if not _rectangular(value):
        return value
    items = _flat(value)
    integers = bool(items) and all(isinstance(x, int) for x in items)
    return torch.tensor(value, dtype=torch.int64 if integers else torch.float64)


def _function(slug: str, quantity: str) -> Any:
    if (slug, quantity) in ADAPTERS:
        return ADAPTERS[slug, quantity]
    for name in _modules(slug):
        function = getattr(importlib.import_module(name), quantity, None)
        if function is not None:
            return function
    raise AssertionError(f"no public function '{quantity}' in {' or '.join(_modules(slug))}")


def _field(result: Any, name: str) -> Any:
    if isinstance(result, dict):
        return result[name]
    if hasattr(result, name):
        return getattr(result, name)
    if name == "loss" and not dataclasses.is_dataclass(result) and not hasattr(result, "_fields"):
        return result
    raise AssertionError(f"the result has no field '{name}'")


def _loss(result: Any) -> torch.Tensor:
    return result if isinstance(result, torch.Tensor) else _field(result, "loss")


def _same(actual: Any, expected: Any, atol: float, where: str) -> None:
    if isinstance(expected, dict):
        for name, value in expected.items():
            _same(_field(actual, name), value, atol, f"{where}.{name}")
        return
    wanted = _convert(expected)
    if isinstance(wanted, torch.Tensor) or (_numeric(expected) and not isinstance(expected, bool)):
        got = torch.as_tensor(actual, dtype=torch.float64).detach()
        target = torch.as_tensor(wanted, dtype=torch.float64)
        assert not torch.isnan(got).any(), f"{where} has NaN"
        if got.numel() == 0 and target.numel() == 0:
            return
        assert got.shape == target.shape, f"{where}: shape {tuple(got.shape)}, expected {tuple(target.shape)}"
        same = (got - target).abs() <= atol + 1e-12
        same |= got == target
        assert same.all(), (
            f"{where}: {got.tolist()} differs from {target.tolist()} by {float((got - target).abs().max()):.3g} (atol {atol})"
        )
        return
    if isinstance(expected, list) and any(isinstance(v, float) for v in _flat(expected)):
        assert len(actual) == len(expected), f"{where}: {len(actual)} items, expected {len(expected)}"
        for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
            _same(a, e, atol, f"{where}[{i}]")
        return
    if isinstance(actual, torch.Tensor):
        actual = actual.tolist()
    if isinstance(expected, float) and isinstance(actual, float):
        assert math.isclose(actual, expected, abs_tol=atol), where
        return
    assert actual == expected, f"{where}: {actual!r} differs from {expected!r}"


@pytest.mark.parametrize(("slug", "case"), _cases())
def test_golden_case(slug: str, case: dict[str, Any]) -> None:
    expected = case["expected"]
    arguments = {name: _convert(value) for name, value in (case["inputs"] | case["params"]).items()}
    gradients = [k for k in expected if k.startswith("grad_") and k[5:] in case["inputs"]] if isinstance(expected, dict) else []
    for name in gradients:
        arguments[name[5:]] = torch.as_tensor(arguments[name[5:]], dtype=torch.float64).requires_grad_(True)
    result = _function(slug, case["quantity"])(**arguments)
    if gradients:
        loss = _loss(result)
        found = (
            torch.autograd.grad(loss, [arguments[k[5:]] for k in gradients], allow_unused=True)
            if loss.requires_grad
            else [None] * len(gradients)
        )
        for name, gradient in zip(gradients, found, strict=True):
            gradient = torch.zeros_like(arguments[name[5:]]) if gradient is None else gradient
            _same(gradient, expected[name], case["atol"], name)
    rest = {k: v for k, v in expected.items() if k not in gradients} if isinstance(expected, dict) else expected
    _same(result, rest, case["atol"], case["quantity"])
