"""The built-in language model: a Llama-type causal model of under a million parameters with a character tokenizer.

`PATH` is the folder that `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained` read; `pretrain.py` in this package
made it.
"""

from __future__ import annotations

from pathlib import Path

PATH = Path(__file__).parent / "model"
