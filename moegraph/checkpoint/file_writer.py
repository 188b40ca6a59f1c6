"""Writes a large file about as fast as the disk can, and its SHA-256 with it.

    main thread      write │ write │ write │ …                 into the system's memory
    one helper             hash    │ hash  │ hash  │ …          of the same bytes, never read back
    another helper                 │ flush to disk │ flush …    what is written so far, so that the disk is never idle

Contract: when the context is left without an error, everything is on disk. A file of a few pieces is written without
helpers. Whatever goes wrong in a helper raises OSError in `write` or at the end.
"""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType

PIECE = 16 << 20  # bytes that are written and hashed at once
FLUSH = 256 << 20  # bytes after which the disk is told to begin


class FileWriter:
    """A new or emptied file. `sha256`, in hex, is there once the context has been left."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.sha256 = ""
        self._digest = hashlib.sha256()
        self._written = self._asked = 0
        self._pieces: SimpleQueue[memoryview | None] = SimpleQueue()
        self._flushes: SimpleQueue[bool] = SimpleQueue()
        self._helpers: list[threading.Thread] = []
        self._error: OSError | None = None

    def __enter__(self) -> FileWriter:
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        return self

    def write(self, content: memoryview) -> None:
        """Appends bytes, which must not change before the context is left. Raises OSError."""
        for start in range(0, len(content), PIECE):
            piece = content[start : start + PIECE]
            self._hash(piece)
            while piece:
                count = os.write(self._file, piece)
                piece = piece[count:]
                self._written += count
            if self._written - self._asked >= FLUSH:
                self._asked = self._written
                self._flushes.put(True)
            if self._error is not None:
                raise self._error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._pieces.put(None)
            self._flushes.put(False)
            if error is None:
                os.fsync(self._file)
        finally:
            for helper in self._helpers:
                helper.join()
            os.close(self._file)
        if error is None and self._error is not None:
            raise self._error
        self.sha256 = self._digest.hexdigest()

    def _hash(self, piece: memoryview) -> None:
        if not self._helpers:
            if self._written + len(piece) < PIECE:
                self._digest.update(piece)
                return
            for work in (self._hash_pieces, self._flush):
                self._helpers.append(threading.Thread(target=work, daemon=True, name="write-file"))
                self._helpers[-1].start()
        self._pieces.put(piece)

    def _hash_pieces(self) -> None:
        while (piece := self._pieces.get()) is not None:
            self._digest.update(piece)

    def _flush(self) -> None:
        try:
            while self._flushes.get():
                os.fsync(self._file)
        except OSError as error:
            self._error = error
