"""Token shards: raw little-endian files that are appended to once and memory-mapped ever after.

Contract: a shard is two files, the ids of its documents one after another (each ended by the end-of-document token)
and their offsets. A document never straddles two shards. The writer holds no more than one document's pieces; the
reader maps only regular files whose size is what the manifest says.
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from moegraph.data.manifest import ShardEntry, SplitEntry, SplitName, shard_files
from moegraph.errors import DataError

OFFSETS_DTYPE = np.dtype("<u8")


def tokens_dtype(name: str) -> np.dtype[Any]:
    """The stored type of ids, little endian: "uint16" or "uint32"."""
    return np.dtype(name).newbyteorder("<")


class ShardWriter:
    """Writes the documents of one split; a new shard begins once the open one holds `shard_tokens` tokens."""

    def __init__(self, folder: Path, split: SplitName, dtype: str, eos_id: int, shard_tokens: int) -> None:
        self._folder, self._split = folder, split
        self._dtype = tokens_dtype(dtype)
        self._eos = np.array([eos_id], dtype=self._dtype)
        self._shard_tokens = shard_tokens
        self._shards: list[ShardEntry] = []
        self._empty_documents = 0
        self._file: IO[bytes] | None = None
        self._digest = hashlib.sha256()
        self._offsets: list[int] = [0]
        self._tokens = 0

    def append(self, ids: NDArray[np.uint32], *, last: bool) -> None:
        """Append a piece of the current document; `last` ends it. A document without any token leaves no trace but
        a count."""
        if ids.size:
            self._write(ids.astype(self._dtype))
        if not last:
            return
        if self._tokens == self._offsets[-1]:
            self._empty_documents += 1
            return
        self._write(self._eos)
        self._offsets.append(self._tokens)
        if self._tokens >= self._shard_tokens:
            self._finish_shard()

    def finish(self) -> SplitEntry:
        """Close the last shard; the entry for the manifest."""
        self._finish_shard()
        return SplitEntry(shards=tuple(self._shards), empty_documents=self._empty_documents)

    def close(self) -> None:
        """Close an open file, for when the writing is abandoned."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, ids: NDArray[Any]) -> None:
        if self._file is None:
            self._file = (self._folder / shard_files(self._split, len(self._shards))[0]).open("xb")
        raw = ids.tobytes()
        self._file.write(raw)
        self._digest.update(raw)
        self._tokens += ids.size

    def _finish_shard(self) -> None:
        if self._file is None:
            return
        _flush(self._file)
        self.close()
        raw_offsets = np.array(self._offsets, dtype=OFFSETS_DTYPE).tobytes()
        with (self._folder / shard_files(self._split, len(self._shards))[1]).open("xb") as file:
            file.write(raw_offsets)
            _flush(file)
        self._shards.append(
            ShardEntry(
                tokens=self._tokens,
                documents=len(self._offsets) - 1,
                tokens_sha256=self._digest.hexdigest(),
                offsets_sha256=hashlib.sha256(raw_offsets).hexdigest(),
            )
        )
        self._digest, self._offsets, self._tokens = hashlib.sha256(), [0], 0


def _flush(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


FileStamp = tuple[int, int, int, int]


def file_stamp(path: Path) -> FileStamp:
    """Device, inode, size in bytes and time of change in ns: equal stamps mean that nobody replaced or wrote it."""
    try:
        status = path.lstat()
    except OSError as error:
        raise DataError(f"{path} is missing or unreadable: {error.strerror or error}") from error
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def map_array(path: Path, dtype: np.dtype[Any], length: int) -> NDArray[Any]:
    """Map a file of exactly `length` values, read only. Raises DataError naming the file for a link, a device, a
    missing file, or another size."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise DataError(f"{path} is not a regular file")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != length * dtype.itemsize:
                raise DataError(f"{path} has {size} bytes, its manifest says {length * dtype.itemsize}")
            return np.memmap(file, dtype=dtype, mode="r", shape=(length,))
    except OSError as error:
        raise DataError(f"{path} is missing or unreadable: {error.strerror or error}") from error
