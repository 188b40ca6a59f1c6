"""Compares hashes of a checkpoint's files while they are read, each byte from the disk once.

    reading       piece, piece, piece …        of files that this rank reads as a whole, in their order
    one helper    hash of each of these pieces, in memory where they have just been read to
    another       reads and hashes the other files that it was given

Contract: what is offered must not change before `finish`, which raises CheckpointError naming the first file that is
damaged. Nothing depends on what is offered: what was not, or not in order, is read again.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from queue import Full, Queue

from moegraph.checkpoint.disk import open_file, sha256_of
from moegraph.checkpoint.manifest import FileEntry
from moegraph.errors import CheckpointError

_WAITING = 8  # pieces that may wait to be hashed
_PIECE = 4 << 20


class Verifier:
    """`passing`: the files whose pieces will be offered; `others` are read by a helper."""

    def __init__(
        self, folder: Path, files: Mapping[str, FileEntry], passing: Iterable[str], others: Iterable[str]
    ) -> None:
        self._folder, self._files = folder, files
        self._streams = {name: _Stream(folder / name) for name in passing}
        self._others = list(others)
        self._pieces: Queue[tuple[str, int, memoryview] | None] = Queue(_WAITING)
        self._left = threading.Event()
        self._errors: list[Exception] = []
        self._helpers = [self._helper(self._hash_offered)] if self._streams else []
        self._helpers += [self._helper(self._hash_others)] if self._others else []

    def offer(self, name: str, offset: int, content: memoryview) -> None:
        """Bytes of a file that have been read from `offset` on."""
        if name in self._streams:
            self._pieces.put((name, offset, content))

    def finish(self) -> None:
        """Waits for the rest. Raises CheckpointError."""
        if self._streams:
            self._pieces.put(None)
        for helper in self._helpers:
            helper.join()
        if self._errors:
            raise self._errors[0]

    def leave(self) -> None:
        """Nobody wants to know any more."""
        self._left.set()
        with suppress(Full):
            self._pieces.put_nowait(None)

    def _helper(self, work: Callable[[], None]) -> threading.Thread:
        helper = threading.Thread(target=work, daemon=True, name="verify-checkpoint")
        helper.start()
        return helper

    def _hash_offered(self) -> None:
        while (each := self._pieces.get()) is not None and not self._left.is_set():
            name, offset, content = each
            self._try(name, lambda name=name, at=offset, piece=content: self._streams[name].add(at, piece))  # type: ignore[misc]
        for name, stream in self._streams.items():
            if not self._left.is_set():
                self._try(name, lambda name=name, stream=stream: self._compare(name, stream.finish()))  # type: ignore[misc]

    def _hash_others(self) -> None:
        for name in self._others:
            if not self._left.is_set():
                self._try(name, lambda name=name: self._compare(name, sha256_of(self._folder / name)))  # type: ignore[misc]

    def _compare(self, name: str, found: str) -> None:
        if found != self._files[name].sha256:
            raise damaged(self._folder / name)

    def _try(self, name: str, work: Callable[[], None]) -> None:
        try:
            work()
        except CheckpointError as error:
            self._errors.append(error)
        except OSError as error:
            self._errors.append(CheckpointError(f"{self._folder / name} cannot be read: {error.strerror or error}"))
        except Exception as error:  # whatever it is, `offer` must not wait for ever
            self._errors.append(error)


def damaged(path: Path) -> CheckpointError:
    """The error for a file that is not what was written."""
    return CheckpointError(f"{path} is damaged: its content has not the SHA-256 of the manifest")


class _Stream:
    """The hash of a file of which pieces come by."""

    def __init__(self, path: Path) -> None:
        self._path, self._digest, self._done = path, hashlib.sha256(), 0

    def add(self, offset: int, content: memoryview) -> None:
        if self._done < offset <= self._done + _PIECE:  # the header
            self._read(offset)
        if offset == self._done:
            self._digest.update(content)
            self._done += len(content)

    def finish(self) -> str:
        self._read(None)
        return self._digest.hexdigest()

    def _read(self, end: int | None) -> None:
        handle = open_file(self._path)
        try:
            while end is None or self._done < end:
                size = _PIECE if end is None else min(_PIECE, end - self._done)
                content = os.pread(handle, size, self._done)
                if not content:
                    return
                self._digest.update(content)
                self._done += len(content)
        finally:
            os.close(handle)
