"""A checkpoint on disk, checked before it is used, of which only the bytes that are wanted are read.

    with one = Checkpoint.open(folder): manifest, sizes, headers and coverage are right, or CheckpointError
    one.verify(): the content of every file has the hash of the manifest
    one.read(tensor, start, out): elements start … start + len(out) of a tensor, from whichever files have them

Nothing in a checkpoint is ever executed: there are JSON and plain numbers in it.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moegraph.checkpoint.disk import open_file, sha256_of
from moegraph.checkpoint.manifest import ITEM_BYTES, Manifest, read_manifest
from moegraph.checkpoint.names import MANIFEST, Segment
from moegraph.checkpoint.shard_header import read_header
from moegraph.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

_CHUNK = 64 << 20  # bytes read at once for a tensor that is not in host memory


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
            path = self.folder / name
            try:
                found = sha256_of(path)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
            if found != self.manifest.files[name].sha256:
                raise CheckpointError(f"{path} is damaged: its content has not the SHA-256 of the manifest")

    def read(self, tensor: str, start: int, out: Tensor) -> None:
        """Fills `out` (one-dimensional, contiguous, of the tensor's dtype, on any device) with the elements from
        `start` on. Raises CheckpointError if a file ends early, ValueError if there are no such elements."""
        entry = self.manifest.tensors[tensor]
        stop = start + out.numel()
        if not 0 <= start <= stop <= entry.numel or out.element_size() != ITEM_BYTES[entry.dtype]:
            raise ValueError(f"{tensor} has {entry.numel} {entry.dtype}, not [{start}:{stop}] of {out.dtype}")
        places = self.places[tensor]
        index = bisect_right(places, start, key=lambda each: each.segment.start) - 1
        done = start
        while done < stop:
            place = places[index]
            end = min(place.segment.stop, stop)
            self._read_part(place, done, out[done - start : end - start])
            done, index = end, index + 1

    def _read_part(self, place: _Place, first: int, out: Tensor) -> None:
        path, size = self.folder / place.file, out.element_size()
        offset = place.offset + (first - place.segment.start) * size
        try:
            handle = open_file(path)
            try:
                if out.device.type == "cpu":
                    _read_exactly(handle, offset, out)
                    return
                step = _CHUNK // size
                for at in range(0, out.numel(), step):
                    part = out[at : at + step]
                    host = part.new_empty(part.shape, device="cpu")
                    _read_exactly(handle, offset + at * size, host)
                    part.copy_(host)
            finally:
                os.close(handle)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def _read_exactly(handle: int, offset: int, out: Tensor) -> None:
    import torch

    content: Any = out.view(torch.uint8).numpy()
    view = memoryview(content)
    while view:
        count = os.preadv(handle, [view], offset)
        if count == 0:
            raise OSError(None, "it ends early")
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
