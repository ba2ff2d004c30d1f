"""A sandbox for Python written by a model: `run_python(code)` in a subprocess with limits and without a network.

What holds on every POSIX system: a fresh interpreter without site-packages, an empty environment, a temporary folder of its own that is
removed afterwards, limits on CPU time, address space, open files and the size of each file (setrlimit), a watch over wall-clock time, over
what is printed and over the folder's size, and a kill of the whole process group. What the kernel enforces on Linux where it can, named in
`SandboxResult.guards`:

- `landlock`: files are readable in the folder and in Python's own library, writable in the folder alone; no subfolders, links or pipes.
- `seccomp`: no sockets, no new processes or threads, no programs, no signals to others, no tracing, mounting or raised limits.
- `network`: a network namespace without any interface that is up.

An audit hook of the interpreter refuses the same things everywhere, with a readable error; alone it is a fence and no wall, because code
that reaches for the interpreter's insides can get round it. Where the kernel leaves files or network to it, this is logged once. Left out:
packages outside the standard library, threads, and any promise against bugs in the kernel or in the interpreter; code from an adversary
belongs in a virtual machine.

The child's side, and what exactly it refuses, is `confine.py`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO

logger = logging.getLogger("anypo")
OUTPUT_BYTES = 1 << 16  # of stdout and of stderr each; a program that prints more is stopped
MOST_FILES = 64  # in the folder at one time
PROGRAM = "program.py"
CHILD = str(Path(__file__).resolve().with_name("confine.py"))


@dataclass(frozen=True)
class SandboxResult:
    """What a program printed, and how it ended.

    `status`: "ok" (exit code 0), "error" (an exception, another exit code, or a crash, as when memory runs out), "timeout", "output" (it
    printed too much) or "files" (its folder grew too large).
    """

    stdout: str
    stderr: str
    status: str
    guards: tuple[str, ...] = ()  # what the kernel enforced


def run_python(code: str, *, stdin: str = "", timeout: float = 5.0, memory_mb: int = 256, files_mb: int = 1) -> SandboxResult:
    """Run a program and wait for its end. `timeout` in seconds of wall clock, `memory_mb` (at least 64) of address space, `files_mb` on disk.

    Hashes of strings are fixed, so that a program without randomness of its own gives the same result each time. Raises ValueError for
    limits out of range, RuntimeError when the child could not confine itself.
    """
    if not timeout > 0 or memory_mb < 64 or files_mb < 1:
        raise ValueError(f"a sandbox needs timeout > 0, memory_mb >= 64 and files_mb >= 1, not {timeout}, {memory_mb} and {files_mb}")
    read, write = os.pipe()
    with (
        os.fdopen(read, "rb") as report,
        tempfile.TemporaryDirectory(prefix="anypo-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as errors,
    ):
        given.write(stdin.encode(errors="replace"))
        given.seek(0)
        (Path(folder) / PROGRAM).write_text(code, encoding="utf-8", errors="replace")
        limits = [int(timeout) + 1, memory_mb << 20, files_mb << 20, write]
        command = [sys.executable, "-s", "-S", "-P", "-B", CHILD, *map(str, limits)]
        environment = {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1"}
        try:
            process = subprocess.Popen(
                command, stdin=given, stdout=out, stderr=errors, cwd=folder, env=environment, pass_fds=[write], start_new_session=True
            )
        finally:
            os.close(write)
        status = _watch(process, Path(folder), (out, errors), timeout, files_mb << 20)
        reported = report.read().decode()
        if not reported and status in ("ok", "error"):
            said = _text(errors).strip().splitlines()
            raise RuntimeError(f"the sandbox could not be set up: {said[-1] if said else 'its process ended without a word'}")
        guards = tuple(reported.split()[1:])
        if reported and not ("landlock" in guards and {"seccomp", "network"} & set(guards)):
            _warn_once(guards)
        return SandboxResult(_text(out), _text(errors), status, guards)


@cache
def _warn_once(guards: tuple[str, ...]) -> None:
    held = ", ".join(guards) or "nothing"
    logger.warning("of the sandbox's guards this kernel enforces %s; files or network are guarded by an audit hook alone", held)


def _watch(process: subprocess.Popen[bytes], folder: Path, outputs: Iterable[IO[bytes]], timeout: float, most: int) -> str:
    """The status of a process at its end, which comes at the latest when a limit is passed."""
    deadline = time.monotonic() + timeout
    status = ""
    try:
        while not status:
            try:
                code = process.wait(timeout=0.02)
                status = "ok" if code == 0 else "timeout" if code == -signal.SIGXCPU else "error"
            except subprocess.TimeoutExpired:
                if time.monotonic() > deadline:
                    status = "timeout"
            if any(os.fstat(output.fileno()).st_size > OUTPUT_BYTES for output in outputs):
                status = "output"
            elif status != "timeout" and _too_large(folder, most):
                status = "files"
    finally:  # also when an alarm of the caller breaks the wait off
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return status


def _too_large(folder: Path, most: int) -> bool:
    size = 0
    with os.scandir(folder) as entries:
        for count, entry in enumerate(entries):
            try:
                size += 0 if entry.name == PROGRAM else entry.stat(follow_symlinks=False).st_size
            except FileNotFoundError:
                continue
            if size > most or count > MOST_FILES:
                return True
    return False


def _text(output: IO[bytes]) -> str:
    output.seek(0)
    return output.read(OUTPUT_BYTES).decode(errors="replace")
