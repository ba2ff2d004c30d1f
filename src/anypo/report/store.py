"""The metrics of a run: JSON lines, one object a step, that survive a killed process and resume exactly.

A line is one `write` to a file opened for appending, so a run killed at any moment leaves whole lines and at most one torn last one. Files
that are replaced as a whole (a shortened metrics file, JSON results, pages) are written beside their target, flushed to disk and renamed.
Left out: a database, a background writer and a lock; one process writes a file, any number may read it.
"""

from __future__ import annotations

import errno
import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class MetricsStore:
    """Append-only metrics of one run. `step` is an integer that grows with every record; wall-clock values go under `time`."""

    def __init__(self, path: Path | str) -> None:
        """Opens `path`, which may not exist yet. Raises ValueError when a line in its middle is damaged."""
        self.path = Path(path)
        lines = _whole_lines(self.path)
        self.last_step: int | None = lines[-1][1]["step"] if lines else None
        self._clean = self.path.exists() and self.path.read_bytes() == b"".join(line for line, _ in lines)

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds one line. Floats keep every bit; NaN and infinities become null; 0-d arrays and tensors become numbers.

        Raises ValueError when `step` is missing or not larger than the last one, or when a value is neither a number, text nor a collection
        of these; raises OSError, leaving the file as it was, when the disk is full.
        """
        step = record.get("step")
        if isinstance(step, bool) or not isinstance(step, int):
            raise ValueError(f"a metrics record needs an integer 'step', not {step!r}")
        if self.last_step is not None and step <= self.last_step:
            raise ValueError(f"step {step} does not follow step {self.last_step} in {self.path}; use truncate_after to go back")
        line = (json.dumps(_plain(record, "record"), allow_nan=False) + "\n").encode()
        if not self._clean:
            self._rewrite(_whole_lines(self.path))
        _append_bytes(self.path, line)
        self.last_step = step

    def truncate_after(self, step: int) -> None:
        """Forgets every record later than `step`: what a run resumed from the checkpoint of `step` has not done yet."""
        self._rewrite([(line, record) for line, record in _whole_lines(self.path) if record["step"] <= step])

    def records(self) -> list[Record]:
        """Every whole record, in order."""
        return read(self.path)

    def _rewrite(self, lines: list[tuple[bytes, Record]]) -> None:
        write_bytes_atomic(self.path, b"".join(line for line, _ in lines))
        self.last_step = lines[-1][1]["step"] if lines else None
        self._clean = True


def read(path: Path | str) -> list[Record]:
    """The records of a metrics file; [] when there is none. A torn last line (a killed run) is dropped.

    Raises ValueError with the line's number when a line before the last is damaged.
    """
    return [record for _, record in _whole_lines(Path(path))]


def flatten(record: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Every number of a record under its dotted name ("time.seconds"); null, which stands for NaN or infinity, becomes NaN."""
    out: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            out |= flatten(value, f"{prefix}{key}.")
        elif value is None:
            out[prefix + key] = math.nan
        elif isinstance(value, int | float):
            out[prefix + key] = float(value)
    return out


def columns(records: Iterable[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """(steps, values) of one dotted name, over the records that hold it."""
    pairs = [(record["step"], flat[name]) for record in records if name in (flat := flatten(record))]
    return [step for step, _ in pairs], [value for _, value in pairs]


def read_json(path: Path | str) -> Any:
    """The object in a JSON file. Raises ValueError, naming the file, when it is not whole; OSError when it is not there."""
    try:
        return json.loads(Path(path).read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def write_json_atomic(path: Path | str, value: Any) -> None:
    """Writes `value` as JSON; a reader, or a crash, finds the old file or the new one, never a part. NaN and infinities become null."""
    text = json.dumps(_plain(value, "value"), indent=2, ensure_ascii=False, allow_nan=False)
    write_bytes_atomic(Path(path), (text + "\n").encode("utf-8", "backslashreplace"))


def write_bytes_atomic(path: Path, content: bytes) -> None:
    """Replaces `path` with `content` in one step: a temporary file beside it, flushed to disk, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, path.stat().st_mode & 0o777 if path.exists() else 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    _flush_directory(path.parent)


def _flush_directory(directory: Path) -> None:
    """Makes a rename durable; systems that cannot open a directory do so on their own."""
    if os.name == "posix":
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _append_bytes(path: Path, line: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o644)
    try:
        size = os.fstat(descriptor).st_size
        try:
            if os.write(descriptor, line) != len(line):
                raise OSError(errno.ENOSPC, "no space left for the metrics of this step", str(path))
        except OSError:
            os.ftruncate(descriptor, size)  # a part of a line would hide the next record
            raise
    finally:
        os.close(descriptor)


def _whole_lines(path: Path) -> list[tuple[bytes, Record]]:
    """(line with its newline, record) of every line that can be read; the last may be torn, no other may."""
    content = path.read_bytes() if path.exists() else b""
    lines = content.removesuffix(b"\n").split(b"\n") if content else []
    out = []
    for number, line in enumerate(lines, start=1):
        record = _parse(line)
        if record is not None:
            out.append((line + b"\n", record))
        elif number < len(lines):
            raise ValueError(f"{path}, line {number} is damaged; delete that line, or resume from a checkpoint before it")
    return out


def _parse(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and type(record.get("step")) is int else None


def _plain(value: Any, where: str) -> Any:
    """`value` in JSON's own types. Raises ValueError that names the key of what has no such form."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, where) for item in value]
    if hasattr(value, "tolist"):  # NumPy and torch, scalars and arrays alike, without importing either
        return _plain(value.tolist(), where)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Path):
        return str(value)
    raise ValueError(f"'{where}' holds a {type(value).__name__}, which JSON cannot; give a number, text, a list or a dictionary")
