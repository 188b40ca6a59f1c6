"""A checkpoint on disk, checked before it is used, of which only the bytes that are wanted are read.

    with one = Checkpoint.open(folder): manifest, sizes, headers and coverage are right, or CheckpointError
    one.verify(): the content of every file has the hash of the manifest
    with one.verified(files, segments) as read: the same, while segments are read
    one.read(tensor, start, out): elements start … start + len(out) of a tensor, from whichever files have them

Nothing in a checkpoint is ever executed: there are JSON and plain numbers in it.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moegraph.checkpoint.disk import open_file
from moegraph.checkpoint.manifest import ITEM_BYTES, Manifest, read_manifest
from moegraph.checkpoint.names import MANIFEST, Segment
from moegraph.checkpoint.piece_hash import file_hash, plain_sha256
from moegraph.checkpoint.shard_header import read_header
from moegraph.checkpoint.verifier import Verifier, compare
from moegraph.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

_CHUNK = 16 << 20  # bytes read at once

Seen = Callable[[str, int, memoryview], None]  # is told what was read: file, offset, bytes
Read = Callable[[str, int, "Tensor"], None]


@dataclass(frozen=True)
class _Place:
    """Where a segment lies."""

    segment: Segment
    file: str
    offset: int


@dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint. `places`: per tensor its segments, in order, without a gap or an overlap."""

    folder: Path
    manifest: Manifest
    places: Mapping[str, Sequence[_Place]]

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Reads manifest and headers. Raises CheckpointError naming the file that is damaged, missing or unknown."""
        manifest = read_manifest(folder)
        _refuse_unknown_files(folder, manifest)
        places: dict[str, list[_Place]] = {name: [] for name in manifest.tensors}
        for name, entry in manifest.files.items():
            path = folder / name
            for segment, dtype, offset in read_header(path, entry.bytes):
                tensor = manifest.tensors.get(segment.tensor)
                if tensor is None or dtype != tensor.dtype or segment.stop > tensor.numel:
                    raise CheckpointError(f"{path} is damaged: {segment.key} ({dtype}) is not what the manifest says")
                places[segment.tensor].append(_Place(segment, name, offset))
        for name, found in places.items():
            found.sort(key=lambda each: each.segment.start)
            _check_covered(folder, name, found, manifest.tensors[name].numel)
        return cls(folder, manifest, places)

    def verify(self, files: Iterable[str] | None = None, tick: Callable[[str], None] = lambda name: None) -> None:
        """Reads files (default all) and compares their hashes. Raises CheckpointError naming the first that differs."""
        for name in self.manifest.files if files is None else files:
            tick(name)
            compare(self.folder, name, self.manifest.files, self._hash_of)

    @contextmanager
    def verified(self, files: Iterable[str], reading: Iterable[Segment]) -> Iterator[Read]:
        """Yields a function as `read`. When the context is left, these files have the right content, or CheckpointError
        has been raised; what was read is then not to be used. `reading`: what will be read. Files of which that is
        everything are read once, both for use and for their hash, and best in the order of `in_file_order`."""
        given = list(files)
        passing = self._read_as_a_whole(given, reading) if self._hash_of is file_hash else set()
        others = [name for name in given if name not in passing]
        verifier = Verifier(self.folder, self.manifest.files, passing, others, self._hash_of)
        try:
            yield lambda tensor, start, out: self._read(tensor, start, out, verifier.offer)
        except BaseException:
            verifier.abandon()
            raise
        verifier.finish()

    @property
    def _hash_of(self) -> Callable[[Path], str]:
        return file_hash if self.manifest.version > 1 else plain_sha256

    def in_file_order(self, segments: Iterable[Segment]) -> list[Segment]:
        """Segments by where they begin on disk."""

        def place(segment: Segment) -> tuple[str, int]:
            found = self._first_place(segment.tensor, segment.start)
            return found.file, found.offset + segment.start - found.segment.start

        return sorted(segments, key=place)

    def _read_as_a_whole(self, files: Iterable[str], reading: Iterable[Segment]) -> set[str]:
        """The files of which all data will be read."""
        left = dict.fromkeys(files, 0)
        for places in self.places.values():
            for place in places:
                if place.file in left:
                    left[place.file] += place.segment.stop - place.segment.start
        for segment in reading:
            for place in self.places[segment.tensor]:
                common = min(segment.stop, place.segment.stop) - max(segment.start, place.segment.start)
                if place.file in left and common > 0:
                    left[place.file] -= common
        return {name for name, count in left.items() if count == 0}

    def read(self, tensor: str, start: int, out: Tensor) -> None:
        """Fills `out` (one-dimensional, contiguous, of the tensor's dtype, on any device) with the elements from
        `start` on. Raises CheckpointError if a file ends early, ValueError if there are no such elements."""
        self._read(tensor, start, out, lambda file, offset, content: None)

    def _read(self, tensor: str, start: int, out: Tensor, seen: Seen) -> None:
        entry = self.manifest.tensors[tensor]
        stop = start + out.numel()
        if not 0 <= start <= stop <= entry.numel or out.element_size() != ITEM_BYTES[entry.dtype]:
            raise ValueError(f"{tensor} has {entry.numel} {entry.dtype}, not [{start}:{stop}] of {out.dtype}")
        done = start
        while done < stop:
            place = self._first_place(tensor, done)
            end = min(place.segment.stop, stop)
            self._read_part(place, done, out[done - start : end - start], seen)
            done = end

    def _first_place(self, tensor: str, start: int) -> _Place:
        places = self.places[tensor]
        return places[bisect_right(places, start, key=lambda each: each.segment.start) - 1]

    def _read_part(self, place: _Place, first: int, out: Tensor, seen: Seen) -> None:
        path, size = self.folder / place.file, out.element_size()
        offset = place.offset + (first - place.segment.start) * size
        try:
            handle = open_file(path)
            try:
                step = _CHUNK // size
                for at in range(0, out.numel(), step):
                    part = out[at : at + step]
                    host = part if part.device.type == "cpu" else part.new_empty(part.shape, device="cpu")
                    _read_exactly(handle, offset + at * size, host, lambda o, c: seen(place.file, o, c))
                    if host is not part:
                        part.copy_(host)
            finally:
                os.close(handle)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def _read_exactly(handle: int, offset: int, out: Tensor, seen: Callable[[int, memoryview], None]) -> None:
    import torch

    content: Any = out.view(torch.uint8).numpy()
    view = memoryview(content)
    while view:
        count = os.preadv(handle, [view], offset)
        if count == 0:
            raise OSError(None, "it ends early")
        seen(offset, view[:count])
        view, offset = view[count:], offset + count


def _refuse_unknown_files(folder: Path, manifest: Manifest) -> None:
    try:
        found = sorted(entry.name for entry in os.scandir(folder))
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror or error}") from error
    for name in found:
        if name != MANIFEST and name not in manifest.files:
            raise CheckpointError(f"{folder / name} is not of this checkpoint: remove it")


def _check_covered(folder: Path, name: str, places: Sequence[_Place], numel: int) -> None:
    end = 0
    for place in places:
        if place.segment.start != end:
            what = "twice" if place.segment.start < end else "nowhere"
            where = min(place.segment.start, end)
            raise CheckpointError(f"{folder / place.file}: element {where} of {name} is {what} in the checkpoint")
        end = place.segment.stop
    if end != numel:
        raise CheckpointError(f"{folder} is damaged: element {end} of {name} is nowhere in it")
