"""Compares hashes of a checkpoint's files while they are read, each byte from the disk once.

    reading       piece, piece, piece …        of files that this rank reads as a whole, in their order
    threads           hash,  hash,  hash …     of these pieces, in memory where they have just been read to
    a helper      reads and hashes the other files that it was given

Contract: what is offered must not change before `finish`, which raises CheckpointError naming a file that is damaged.
Nothing depends on what is offered: what was not, or not in order, is read again.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from moegraph.checkpoint.disk import open_file
from moegraph.checkpoint.manifest import FileEntry
from moegraph.checkpoint.piece_hash import PieceHash
from moegraph.errors import CheckpointError

_CHUNK = 4 << 20


class Verifier:
    """`passing`: the files whose pieces will be offered; `others` are read by a helper. `hash_of`: of a whole file."""

    def __init__(
        self,
        folder: Path,
        files: Mapping[str, FileEntry],
        passing: Iterable[str],
        others: Iterable[str],
        hash_of: Callable[[Path], str],
    ) -> None:
        self._folder, self._files, self._hash_of = folder, files, hash_of
        self._streams = {name: _Stream(folder / name) for name in passing}
        self._others = list(others)
        self._left = threading.Event()
        self._error: Exception | None = None
        self._helper = threading.Thread(target=self._hash_others, daemon=True, name="verify-checkpoint")
        if self._others:
            self._helper.start()

    def offer(self, name: str, offset: int, content: memoryview) -> None:
        """Bytes of a file that have been read from `offset` on. Raises OSError."""
        if name in self._streams:
            self._streams[name].add(offset, content)

    def finish(self) -> None:
        """Waits for the rest. Raises CheckpointError."""
        try:
            for name, stream in self._streams.items():
                compare(self._folder, name, self._files, lambda path, stream=stream: stream.finish())  # type: ignore[misc]
        except BaseException:
            self.abandon()
            raise
        if self._others:
            self._helper.join()
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        """Nobody wants to know any more. The helper ends after the file that it is reading."""
        self._left.set()
        for stream in self._streams.values():
            stream.hash.close()

    def _hash_others(self) -> None:
        try:
            for name in self._others:
                if self._left.is_set():
                    return
                compare(self._folder, name, self._files, self._hash_of)
        except Exception as error:  # whatever it is, `finish` raises it
            self._error = error


def compare(folder: Path, name: str, files: Mapping[str, FileEntry], hash_of: Callable[[Path], str]) -> None:
    """Raises CheckpointError if a file has another hash than its entry, or cannot be read."""
    path = folder / name
    try:
        found = hash_of(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    if found != files[name].sha256:
        raise CheckpointError(f"{path} is damaged: its content has not the SHA-256 of the manifest")


class _Stream:
    """The hash of a file of which pieces come by."""

    def __init__(self, path: Path) -> None:
        self._path, self._done = path, 0
        self.hash = PieceHash()

    def add(self, offset: int, content: memoryview) -> None:
        if self._done < offset <= self._done + _CHUNK:  # the header
            self._read(offset)
        if offset == self._done:
            self.hash.update(content)
            self._done += len(content)

    def finish(self) -> str:
        self._read(None)
        return self.hash.hexdigest()

    def _read(self, end: int | None) -> None:
        handle = open_file(self._path)
        try:
            while end is None or self._done < end:
                size = _CHUNK if end is None else min(_CHUNK, end - self._done)
                content = os.pread(handle, size, self._done)
                if not content:
                    return
                self.hash.update(memoryview(content))
                self._done += len(content)
        finally:
            os.close(handle)
