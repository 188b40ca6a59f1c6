"""Writes a large file about as fast as the disk can, and its SHA-256 with it.

    this thread     write │ write │ write │ …                 into the system's memory
    threads           hash    │ hash  │ hash  │ …             of the same bytes, never read back
    a helper                  │ flush to disk │ flush …       what is written so far, so that the disk is never idle

Contract: when the context is left without an error, everything is on disk. A small file is written without threads.
Whatever goes wrong in a helper raises OSError in `write` or at the end.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType

from moegraph.checkpoint.piece_hash import PIECE, PieceHash

FLUSH = 256 << 20  # bytes after which the disk is told to begin


class FileWriter:
    """A new or emptied file. `sha256`, in hex and as `piece_hash` says, is there once the context has been left."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.sha256 = ""
        self._hash = PieceHash()
        self._written = self._asked = 0
        self._flushes: SimpleQueue[bool] = SimpleQueue()
        self._helper: threading.Thread | None = None
        self._error: OSError | None = None

    def __enter__(self) -> FileWriter:
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        return self

    def write(self, content: memoryview) -> None:
        """Appends bytes, which must not change before the context is left. Raises OSError."""
        for start in range(0, len(content), PIECE):
            piece = content[start : start + PIECE]
            self._hash.update(piece)
            while piece:
                count = os.write(self._file, piece)
                piece = piece[count:]
                self._written += count
            if self._written - self._asked >= FLUSH:
                self._begin_flush()
            if self._error is not None:
                raise self._error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                os.fsync(self._file)
                self.sha256 = self._hash.hexdigest()
        finally:
            self._hash.close()
            if self._helper is not None:
                self._flushes.put(False)
                self._helper.join()
            os.close(self._file)
        if error is None and self._error is not None:
            raise self._error

    def _begin_flush(self) -> None:
        self._asked = self._written
        if self._helper is None:
            self._helper = threading.Thread(target=self._flush, daemon=True, name="flush-file")
            self._helper.start()
        self._flushes.put(True)

    def _flush(self) -> None:
        try:
            while self._flushes.get():
                os.fsync(self._file)
        except OSError as error:
            self._error = error
