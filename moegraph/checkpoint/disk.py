"""Small file operations that survive a power cut: what they wrote is on disk when they return."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def sync_folder(path: Path) -> None:
    """Flushes a folder's entries to disk: files in it that were made, renamed or removed. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def partial_file(path: Path) -> Path:
    """What `write_file` writes before it is renamed to `path`."""
    return path.with_name(f".{path.name}.partial")


def write_file(path: Path, content: bytes) -> None:
    """Writes or replaces a file in one rename: a reader finds the old content or the new one, whole. Raises OSError."""
    partial = partial_file(path)
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
    sync_folder(path.parent)


def open_file(path: Path) -> int:
    """A handle to read a file that has to be a regular one, no link. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe must not make us wait
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(None, "it is not a regular file")
    return handle


def read_at_most(path: Path, most: int) -> bytes:
    """The content of a regular file. Raises OSError, also where it has more than `most` bytes."""
    with open(open_file(path), "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(None, f"it has more than {most} bytes")
    return content


def read_lines(path: Path, longest: int) -> Iterator[bytes]:
    """The lines of a regular file one by one, each with its newline but perhaps the last. Raises OSError, also where
    one has more than `longest` bytes."""
    with open(open_file(path), "rb") as file:
        while line := file.readline(longest + 1):
            if len(line) > longest:
                raise OSError(None, f"one of its lines has more than {longest} bytes")
            yield line


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write to the file system of a folder. Raises OSError."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
