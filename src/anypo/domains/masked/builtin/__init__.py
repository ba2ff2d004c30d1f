"""The built-in masked model: a bidirectional transformer of about 0.1 million parameters over digits, `+` and `=`, trained on split_sum.

`PATH` is the folder of its weights; `pretrain.py` in this package made it.
"""

from __future__ import annotations

from pathlib import Path

PATH = Path(__file__).parent / "model"
