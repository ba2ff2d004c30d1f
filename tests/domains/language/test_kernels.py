"""Products of few rows in C, and what happens without a compiler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from anypo.domains.language import decoder, kernels
from anypo.domains.language.network import Network
from anypo.domains.language.sampler import sample
from anypo.engines import native

needs_compiler = pytest.mark.skipif(not kernels.available(), reason="no compiler, or a processor without AVX-512")


@needs_compiler
@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 40), inputs=st.integers(1, 50), outputs=st.integers(1, 70), bias=st.booleans(), narrow=st.booleans())
def test_products_are_pytorchs(rows: int, inputs: int, outputs: int, bias: bool, narrow: bool) -> None:
    dtype = torch.bfloat16 if narrow else torch.float32
    g = torch.Generator().manual_seed(rows + 100 * inputs + 10_000 * outputs)
    x, weight = torch.randn(rows, inputs, generator=g), torch.randn(outputs, inputs, generator=g)
    shift = torch.randn(outputs, generator=g).to(dtype) if bias else None
    weight = weight.to(dtype)
    expected = torch.nn.functional.linear(x, weight.float(), None if shift is None else shift.float())
    torch.testing.assert_close(kernels.Panels(weight, shift, kernels.Slab(dtype))(x), expected, atol=1e-5 * inputs**0.5, rtol=1e-5)


@needs_compiler
def test_a_row_does_not_depend_on_how_many_there_are() -> None:
    x, weight = torch.randn(37, 48), torch.randn(33, 48)
    panels = kernels.Panels(weight, None, kernels.Slab())
    together = panels(x)
    assert all(torch.equal(panels(x[:n]), together[:n]) for n in (1, 4, 5, 9, 16, 17, 36))
    assert torch.equal(panels(x.t().contiguous().t()), together)  # rows that do not lie side by side


@needs_compiler
@pytest.mark.parametrize(("rows", "bias", "head_norms"), [(3, False, False), (16, True, True), (21, True, False)])
def test_a_layer_is_the_one_made_of_calls(rows: int, bias: bool, head_norms: bool) -> None:
    g = torch.Generator().manual_seed(rows)
    heads, key_heads, width, inner, middle = 4, 2, 16, 40, 56

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g)

    weights = [((heads + 2 * key_heads) * width, inner), (inner, heads * width), (middle, inner), (middle, inner), (inner, middle)]
    matrices = [(draw(*shape), draw(shape[0]) if bias and i < 2 else None) for i, shape in enumerate(weights)]
    norms = [
        (1 + 0.3 * draw(inner), 1e-5),
        (1 + 0.3 * draw(inner), 1e-6),
        *([(1 + 0.3 * draw(width), 1e-6)] * 2 if head_norms else [None] * 2),
    ]
    layout = decoder.Layout([matrices[0][0]], rows, width)  # matrices so small are left as they are
    theirs = decoder.CallsLayer(norms, [decoder.Product(*m, layout) for m in matrices])
    mine = kernels.FewRowsLayer(norms, [kernels.Panels(*m, kernels.Slab()) for m in matrices])
    angle, state, attended = draw(rows, width // 2).repeat(1, 2), draw(rows, inner), draw(rows, heads * width)
    turn = decoder.Turn(angle.cos(), angle.sin())
    torch.testing.assert_close(mine.mix(state, turn, heads, key_heads), theirs.mix(state, turn, heads, key_heads), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(mine.finish(attended, state.clone()), theirs.finish(attended, state.clone()), atol=1e-3, rtol=1e-4)


@needs_compiler
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("columns", [1, 63, 64, 150])
def test_attention_is_pytorchs(columns: int, shared: bool) -> None:
    g = torch.Generator().manual_seed(columns)
    rows, key_heads, group, width, prompts, prompt_columns = 5, 2, 3, 32, 3, 70
    own = kernels.Columns(
        *torch.randn(2, rows, key_heads, columns + 4, width, generator=g), columns, torch.tensor([0, columns - 1, 0, columns // 2, 0])
    )
    past = kernels.Columns(
        *torch.randn(2, prompts, key_heads, prompt_columns, width, generator=g), prompt_columns, torch.tensor([0, 69, 7])
    )
    owner = torch.tensor([2, 0, 1, 1, 2])
    mixed = 2 * torch.randn(rows, key_heads * (group + 2), width, generator=g)
    found = kernels.attend(mixed, own, past if shared else None, owner if shared else None, 0.3)
    query, key, value = mixed.split([key_heads * group, key_heads, key_heads], dim=1)
    assert torch.equal(own.keys[:, :, columns - 1], key) and torch.equal(own.values[:, :, columns - 1], value)
    for r in range(rows):
        pieces = [(own, r)] + ([(past, int(owner[r]))] if shared else [])
        keys, values = (
            torch.cat([getattr(p, name)[i, :, int(p.first[i]) : p.columns] for p, i in pieces], dim=1) for name in ("keys", "values")
        )
        expected = torch.nn.functional.scaled_dot_product_attention(query[r, :, None], keys, values, scale=0.3, enable_gqa=True)
        torch.testing.assert_close(found[r], expected[:, 0], atol=1e-5, rtol=1e-4)


@needs_compiler
def test_gate_and_its_gradients() -> None:
    g = torch.Generator().manual_seed(0)
    opened, raised, slope = (20 * torch.randn(7, 11, generator=g) for _ in range(3))
    opened[0, :4] = torch.tensor([-200.0, -87.5, 0.0, 200.0])
    opened, raised = opened.requires_grad_(), raised.requires_grad_()
    expected = torch.nn.functional.silu(opened) * raised
    expected.backward(slope)
    torch.testing.assert_close(kernels.gate(opened.detach(), raised.detach()), expected.detach())
    found = kernels.gate_backward(opened.detach(), raised.detach(), slope.clone())
    for mine, theirs in zip(found, (expected.detach(), opened.grad, raised.grad), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_pieces_of_a_slab_do_not_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.Slab, "CHUNK", 10)
    slab = kernels.Slab()
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
    assert native.load.__wrapped__(kernels.SOURCE) is None


@needs_compiler
def test_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native.load.__wrapped__(kernels.SOURCE) is not None
    assert [path.suffix for path in (tmp_path / "anypo").iterdir()] == [".so"]
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("compiled again"))
    assert native.load.__wrapped__(kernels.SOURCE) is not None


@needs_compiler
def test_it_shares_pytorchs_threads() -> None:
    script = (
        "import torch; from anypo.domains.language import kernels; kernels.Panels(torch.randn(32, 32), None, kernels.Slab())(torch.randn(4, 32));"
        "print(len({line.split()[-1] for line in open('/proc/self/maps') if 'gomp' in line or 'iomp' in line}))"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip() == "1"


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("samples", [4, 1])
def test_what_is_drawn_has_the_log_probs_of_the_model(kind: str, dtype: torch.dtype, samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts shared by their samples, or one row each; rows end at different times. In bfloat16 weights are narrow and decoding is float32."""
    monkeypatch.setattr(decoder, "SMALL", 1)
    torch.manual_seed(0)
    size = {
        "vocab_size": 50,
        "hidden_size": 48,
        "intermediate_size": 56,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    settings = size | {"head_dim": 16, "max_position_embeddings": 64, "initializer_range": 0.3}
    model = LlamaForCausalLM(LlamaConfig(**settings)) if kind == "llama" else Qwen3ForCausalLM(Qwen3Config(**settings))
    network = Network(model.eval().to(dtype))
    prompts = [torch.arange(n) + 3 for n in (7, 2, 12)]
    assert network.direct is not None and decoder.Decoder(network.direct, network.head, 3).in_c
    generator = torch.Generator().manual_seed(0)
    found = sample(network, prompts, samples, max_tokens=20, generator=generator, eos_ids=(1, 2, 30))
    assert len(set(found.valid.sum(1).tolist())) > 1
    exact = model.float()  # the weights that were drawn from, in the precision of decoding
    for i, tokens in enumerate(found.tokens):
        prompt, count = prompts[int(found.source[i])], int(found.valid[i].sum())
        logits = exact(torch.cat([prompt, tokens[:count]])[None]).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, tokens[:count, None])[:, 0]
        slack = 1e-4 if dtype == torch.float32 else 0.25  # prompts are read in bfloat16
        torch.testing.assert_close(found.logp[i, :count], expected.detach(), atol=slack, rtol=0)
