"""Products of few rows in C, and what happens without a compiler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anypo.engines import few_rows, native

needs_compiler = pytest.mark.skipif(not few_rows.available(), reason="no compiler, or a processor without AVX-512")


@needs_compiler
@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 40), inputs=st.integers(1, 50), outputs=st.integers(1, 70), bias=st.booleans())
def test_products_are_pytorchs(rows: int, inputs: int, outputs: int, bias: bool) -> None:
    g = torch.Generator().manual_seed(rows + 100 * inputs + 10_000 * outputs)
    x, weight, other = (torch.randn(*shape, generator=g) for shape in ((rows, inputs), (outputs, inputs), (rows, outputs)))
    shift = torch.randn(outputs, generator=g) if bias else None
    panels, expected = few_rows.Panels(weight, shift, few_rows.Slab()), torch.nn.functional.linear(x, weight, shift)
    close = {"atol": 1e-5 * inputs**0.5, "rtol": 1e-5}
    torch.testing.assert_close(panels(x), expected, **close)
    torch.testing.assert_close(panels(x, other.clone(), few_rows.ADD), expected + other, **close)
    torch.testing.assert_close(panels(x, other.clone(), few_rows.MULTIPLY), expected * other, **close)


@needs_compiler
def test_a_row_does_not_depend_on_how_many_there_are() -> None:
    x, weight = torch.randn(37, 48), torch.randn(33, 48)
    panels = few_rows.Panels(weight, None, few_rows.Slab())
    together = panels(x)
    assert all(torch.equal(panels(x[:n]), together[:n]) for n in (1, 4, 5, 9, 16, 17, 36))
    assert torch.equal(panels(x.t().contiguous().t()), together)  # rows that do not lie side by side


def test_pieces_of_a_slab_do_not_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows.Slab, "CHUNK", 10)
    slab = few_rows.Slab()
    pieces = [slab.take(n).fill_(n) for n in (4, 6, 3, 20, 7)]
    assert [(len(piece), set(piece.tolist())) for piece in pieces] == [(n, {n}) for n in (4, 6, 3, 20, 7)]


@pytest.mark.parametrize("lacking", ["compiler", "instructions", "switch", "sound source"])
def test_without_it_pytorch_does_the_work(lacking: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if lacking == "compiler":
        monkeypatch.setenv("PATH", "")
    elif lacking == "instructions":
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    elif lacking == "switch":
        monkeypatch.setenv("ANYPO_NATIVE", "0")
    else:
        monkeypatch.setattr(native, "FLAGS", (*native.FLAGS, "-Derror", "-include", "nowhere.h"))
    assert native.load.__wrapped__("few_rows.c") is None


@needs_compiler
def test_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native.load.__wrapped__("few_rows.c") is not None
    assert [path.suffix for path in (tmp_path / "anypo").iterdir()] == [".so"]
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("compiled again"))
    assert native.load.__wrapped__("few_rows.c") is not None


@needs_compiler
def test_it_shares_pytorchs_threads() -> None:
    script = (
        "import torch; from anypo.engines import few_rows; few_rows.Panels(torch.randn(32, 32), None, few_rows.Slab())(torch.randn(4, 32));"
        "print(len({line.split()[-1] for line in open('/proc/self/maps') if 'gomp' in line or 'iomp' in line}))"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip() == "1"
