"""The hash of a large file that several threads can compute.

    a file of at most 16 MiB     its SHA-256
    a larger one                 the SHA-256 of the SHA-256s, in binary, of each 16 MiB of it, in order

One thread computes SHA-256 at 1 to 2 GB/s, which is slower than many disks. Version 1 of the manifest knows the plain
SHA-256 only (`plain_sha256`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from moegraph.checkpoint.disk import open_file

PIECE = 16 << 20
_THREADS = min(4, os.cpu_count() or 1)
_WAITING = 16  # pieces that may wait to be hashed
_CHUNK = 4 << 20


class PieceHash:
    """`update` takes bytes, in order, which must not change before `hexdigest`; hashing goes on behind."""

    def __init__(self) -> None:
        self._parts: list[memoryview] = []
        self._size = 0
        self._pieces: list[Future[bytes]] = []
        self._pool: ThreadPoolExecutor | None = None

    def update(self, content: memoryview) -> None:
        """The next bytes. Waits where too many wait to be hashed."""
        while content:
            if self._size == PIECE:
                self._begin()
            part = content[: PIECE - self._size]
            self._parts.append(part)
            self._size += len(part)
            content = content[len(part) :]

    def hexdigest(self) -> str:
        """The hash of all that was given; nothing can be given afterwards."""
        try:
            last = _hash_parts(self._parts)
            if not self._pieces:
                return last.hex()
            return hashlib.sha256(b"".join([*(each.result() for each in self._pieces), last])).hexdigest()
        finally:
            self.close()

    def close(self) -> None:
        """Nobody wants to know any more."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _begin(self) -> None:
        """A piece is whole, and more follows."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="hash")
        self._pieces.append(self._pool.submit(_hash_parts, self._parts))
        self._parts, self._size = [], 0
        if len(self._pieces) > _WAITING:
            self._pieces[-_WAITING].result()


def file_hash(path: Path) -> str:
    """That of a file's content, read piece by piece, the next pieces from the disk while others are hashed. Raises
    OSError."""
    found, handle, done = PieceHash(), open_file(path), 0
    try:
        while content := os.pread(handle, _CHUNK, done):
            done += len(content)
            _read_ahead(handle, done)
            found.update(memoryview(content))
        return found.hexdigest()
    finally:
        found.close()
        os.close(handle)


def plain_sha256(path: Path) -> str:
    """SHA-256 of a file's content in hex. Raises OSError."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK))
    handle, done = open_file(path), 0
    try:
        while count := os.readv(handle, [buffer]):
            done += count
            _read_ahead(handle, done)
            digest.update(buffer[:count])
    finally:
        os.close(handle)
    return digest.hexdigest()


def _hash_parts(parts: Sequence[memoryview]) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()


def _read_ahead(handle: int, done: int) -> None:
    """Asks the system to have what follows in memory soon, and does not wait for it."""
    if done % PIECE == 0 and hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(handle, done + 2 * PIECE, PIECE, os.POSIX_FADV_WILLNEED)
