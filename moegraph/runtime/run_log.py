"""What a run leaves in its folder for people and programs to read: metrics.jsonl, manifest.json, TensorBoard files.

Contract:
- metrics.jsonl has one JSON object per line, each with `step`, appended with a single write and readable while the run
  goes on. JSON has no NaN: such a number is written as null and its key listed under `non_finite`.
- A run that was killed may leave half a line. The reader skips it; a run that continues the file removes it first. A
  run that repeats steps writes them again, and the reader keeps the last record of each step.
- manifest.json is written aside and renamed: a reader finds the old one or the new one, whole.
- Logging never ends a run. Whatever goes wrong with a file or with TensorBoard is said once through `warn`.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from moegraph.checkpoint.disk import read_at_most, read_lines
from moegraph.errors import UsageError
from moegraph.runtime.tensorboard import TensorBoard

METRICS, MANIFEST = "metrics.jsonl", "manifest.json"
MAX_BYTES = 16 << 20  # of a record, and of the manifest


def _to_stderr(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr)


class RunLog:
    """Writes the log of one run. `folder` is made if it is missing; `warn` is told about each kind of trouble once."""

    def __init__(self, folder: Path, warn: Callable[[str], None] = _to_stderr) -> None:
        self.folder = folder
        self._warn = warn
        self._warned: set[str] = set()
        self._file: int | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(folder / METRICS, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            _remove_torn_line(self._file)
        except OSError as error:
            self._trouble(METRICS, error)
        self._tensorboard = TensorBoard(folder, lambda error: self._trouble("TensorBoard files", error))

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends one record: a mapping with `step` of JSON-able values; tuples become lists."""
        if not isinstance(record["step"], int):
            raise ValueError(f"a record's step is a whole number, not {record['step']!r}")
        if self._file is not None:
            try:
                _append(self._file, json.dumps(_finite(record), ensure_ascii=False, allow_nan=False) + "\n")
            except OSError as error:
                self._trouble(METRICS, error)
        self._tensorboard.write(record)

    def write_manifest(self, manifest: Mapping[str, Any]) -> None:
        """Writes or replaces manifest.json."""
        try:
            _replace(self.folder / MANIFEST, json.dumps(manifest, ensure_ascii=False, allow_nan=False, indent=2) + "\n")
        except OSError as error:
            self._trouble(MANIFEST, error)

    def close(self) -> None:
        """Closes the files. A closed log may be closed again."""
        if self._file is not None:
            with suppress(OSError):
                os.close(self._file)
            self._file = None
        self._tensorboard.close()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _trouble(self, what: str, error: Exception) -> None:
        if what not in self._warned:
            self._warned.add(what)
            reason = getattr(error, "strerror", None) or error
            self._warn(f"{what} in {self.folder} cannot be written ({reason}); training goes on without")


def read_records(folder: Path) -> list[dict[str, Any]]:
    """The records of a run, the last one of each step, in the order of steps. Lines that are not whole are skipped.

    Raises `UsageError` if the folder has no metrics.jsonl.
    """
    by_step: dict[int, dict[str, Any]] = {}
    try:
        for line in read_lines(folder / METRICS, MAX_BYTES):
            try:
                record = json.loads(line.decode("utf-8", errors="replace"))
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                by_step[record["step"]] = record
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(
            f"{folder} is not the folder of a run: it has no {METRICS} that can be read ({reason})"
        ) from error
    return [by_step[step] for step in sorted(by_step)]


def read_manifest(folder: Path) -> dict[str, Any]:
    """manifest.json of a run. Raises `UsageError` if there is none, or if it is not one."""
    try:
        manifest = json.loads(read_at_most(folder / MANIFEST, MAX_BYTES).decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{folder} is not the folder of a run: it has no {MANIFEST} that can be read") from error
    if not isinstance(manifest, dict):
        raise UsageError(f"{folder / MANIFEST} is not the manifest of a run: it holds no mapping")
    return manifest


def _append(file: int, line: str) -> None:
    """One whole line or nothing: what a full disk cut off is taken back."""
    data, before = line.encode(), os.fstat(file).st_size
    try:
        written = os.write(file, data)
        if written < len(data):
            os.write(file, data[written:])
    except OSError:
        with suppress(OSError):
            os.ftruncate(file, before)
        raise


def _remove_torn_line(file: int) -> None:
    """Cuts the file after its last newline."""
    end = size = os.fstat(file).st_size
    while end > 0:
        start = max(end - 65536, 0)
        newline = os.pread(file, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        os.ftruncate(file, end)


def _replace(path: Path, text: str) -> None:
    handle, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(partial, 0o644)
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(partial)
        raise


def _finite(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with null for numbers that JSON cannot say, and their dotted keys under `non_finite`."""
    lost: list[str] = []

    def clean(value: Any, path: str) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            lost.append(path)
            return None
        if isinstance(value, Mapping):
            return {key: clean(each, f"{path}.{key}" if path else str(key)) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [clean(each, f"{path}[{i}]") for i, each in enumerate(value)]
        return value

    cleaned: dict[str, Any] = clean(record, "")
    return {**cleaned, "non_finite": lost} if lost else cleaned
