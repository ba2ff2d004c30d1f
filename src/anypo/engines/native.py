"""C that is compiled for this processor when it is first needed, with the system's compiler, and kept in the user's cache.

Only for what PyTorch's kernels leave undone, and never needed: without a compiler, or on another processor, callers take PyTorch's way.
`ANYPO_NATIVE=0` switches it off.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

FLAGS = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-shared")
log = logging.getLogger(__name__)


@functools.cache
def load(source: Path) -> ctypes.CDLL | None:
    """The library made from a C file; None where it cannot be had: no compiler, no AVX-512, not Linux, or switched off.

    It shares PyTorch's threads: both ask for libgomp by the same name, and PyTorch's is loaded first.
    """
    compiler = shutil.which("gcc") or shutil.which("cc")
    unfit = platform.system() != "Linux" or torch.backends.cpu.get_cpu_capability() != "AVX512"
    if os.environ.get("ANYPO_NATIVE") == "0" or unfit or compiler is None:
        return None
    try:
        mark = hashlib.sha256(b"\0".join([source.read_bytes(), repr((compiler, FLAGS)).encode(), _processor()])).hexdigest()[:16]
        library = _cache() / f"{source.stem}-{mark}.so"
        if not library.exists():
            _compile(compiler, source, library)
        return ctypes.CDLL(str(library))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: a user without a home
        log.info("%s was not compiled, PyTorch does its work: %s", source.name, error)
        return None


def _compile(compiler: str, source: Path, library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=library.parent) as place:
        made = Path(place) / library.name
        subprocess.run([compiler, *FLAGS, str(source), "-o", str(made), "-lm"], check=True, capture_output=True, timeout=60)
        made.replace(library)  # processes that compile at the same time replace one another's equal file


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "anypo"


def _processor() -> bytes:
    """What tells processors apart for -march=native."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "model"))})).encode()
