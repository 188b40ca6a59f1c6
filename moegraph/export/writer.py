"""Writes published tensors as safetensors files, piece by piece.

    model.safetensors                                            all in one file, up to the limit; else
    model-00001-of-00003.safetensors, …                          as many as it takes, a tensor whole in one of them
    model.safetensors.index.json                                 which tensor is in which

Contract: no more than `CHUNK` elements, or one piece that has to be rearranged, are in memory at a time. What was
written is on disk when this returns.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from moegraph.checkpoint.disk import write_file
from moegraph.checkpoint.shard_writer import DTYPE_NAMES
from moegraph.export.names import Published
from moegraph.export.source import Read

CHUNK = 1 << 24  # elements
DEFAULT_SHARD_BYTES = 5 * 10**9
INDEX = "model.safetensors.index.json"


def write_weights(
    folder: Path,
    tensors: Sequence[Published],
    read: Read,
    dtype: torch.dtype,
    limit: int,
    tick: Callable[[str], None] = lambda name: None,
) -> dict[str, int]:
    """Writes all tensors in `dtype`, those that are wide in float32, into files of at most `limit` bytes of data each
    (more where one tensor alone has more). Returns the files and their sizes. Raises OSError."""
    shards = _split(tensors, dtype, limit)
    names = [
        "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        for number in range(1, len(shards) + 1)
    ]
    sizes = {}
    for name, shard in zip(names, shards, strict=True):
        tick(f"writing {name}")
        sizes[name] = _write_file(folder / name, shard, read, dtype)
    if len(shards) > 1:
        total = sum(_bytes(each, dtype) for each in tensors)
        where = {each.name: name for name, shard in zip(names, shards, strict=True) for each in shard}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        write_file(folder / INDEX, (json.dumps(index, indent=2) + "\n").encode())
    return sizes


def stored_dtype(tensor: Published, dtype: torch.dtype) -> torch.dtype:
    """The dtype a tensor is written in."""
    return torch.float32 if tensor.wide else dtype


def _bytes(tensor: Published, dtype: torch.dtype) -> int:
    return tensor.numel * stored_dtype(tensor, dtype).itemsize


def _split(tensors: Sequence[Published], dtype: torch.dtype, limit: int) -> list[list[Published]]:
    shards: list[list[Published]] = [[]]
    used = 0
    for tensor in tensors:
        size = _bytes(tensor, dtype)
        if shards[-1] and used + size > limit:
            shards.append([])
            used = 0
        shards[-1].append(tensor)
        used += size
    return shards


def _write_file(path: Path, tensors: Sequence[Published], read: Read, dtype: torch.dtype) -> int:
    # Wider elements first, so that each tensor begins at a multiple of its elements' size.
    ordered = sorted(tensors, key=lambda each: -stored_dtype(each, dtype).itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in ordered:
        begin, end = end, end + _bytes(tensor, dtype)
        kind = DTYPE_NAMES[stored_dtype(tensor, dtype)]
        header[tensor.name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in ordered:
            for values in _values(tensor, read):
                _write(file, values.to(stored_dtype(tensor, dtype)))
        file.flush()
        os.fsync(file.fileno())
    return 8 + len(text) + end


def _values(tensor: Published, read: Read) -> Iterator[Tensor]:
    """The elements of a tensor in the order of memory, in parts."""
    if tensor.source is None:
        yield torch.full((tensor.numel,), tensor.value)
        return
    size = math.prod(tensor.piece)
    if tensor.arrange is None:
        end = tensor.start + size * tensor.count
        for at in range(tensor.start, end, CHUNK):
            yield read(tensor.source, at, min(CHUNK, end - at))
        return
    for number in range(tensor.count):
        piece = read(tensor.source, tensor.start + number * size, size).view(tensor.piece)
        yield tensor.arrange(piece).contiguous().view(-1)


def _write(file: BinaryIO, values: Tensor) -> None:
    content: Any = values.contiguous().view(torch.uint8).numpy()
    file.write(memoryview(content))
