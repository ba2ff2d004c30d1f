"""What the system does with large tensors on Linux: pages of 2 MB instead of 4 KB, and freed memory given back.

Both are left alone elsewhere, and where the user has set `GLIBC_TUNABLES`. They change where numbers lie, never the numbers.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

M_MMAP_THRESHOLD = -3  # from malloc.h
TUNABLES, LARGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"
SYSTEM_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def restart_with_large_pages() -> None:
    """Replace this process by itself with glibc told to ask for large pages, which it heeds only when a program begins.

    A training step of SmolLM2-135M takes a tenth less time so: fewer pages are faulted in and looked up. Does nothing where the kernel gives large
    pages to all programs or to none. Call it before anything is imported that takes long, and before anything is written.
    """
    if wants_large_pages():
        os.environ[TUNABLES] = LARGE_PAGES
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def wants_large_pages() -> bool:
    """Whether glibc would have to ask for large pages and has not been told anything yet."""
    if sys.platform != "linux" or TUNABLES in os.environ:
        return False
    try:
        return "[madvise]" in SYSTEM_SETTING.read_text()
    except OSError:
        return False


def return_freed_memory() -> None:
    """Ask glibc to give freed tensors back to the system at once. By default it raises its threshold with use and keeps them, which cost a step
    of SmolLM2-135M in float32 220 MB and no time; in bfloat16 it would cost a seventh of the backward pass."""
    if sys.platform == "linux":
        import ctypes

        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL("libc.so.6").mallopt(M_MMAP_THRESHOLD, 1 << 20)
