"""The header of a shard file, checked before a byte of its data is used.

A safetensors file is 8 bytes (length n of the header, little endian), n bytes of JSON, and the data. Contract: a header
is data from strangers. It may not be longer than the file or than 16 MiB; every entry is a segment whose name, shape,
dtype and place agree; and the segments fill the data without a gap or an overlap.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from moegraph.checkpoint.disk import open_file
from moegraph.checkpoint.manifest import ITEM_BYTES
from moegraph.checkpoint.names import Segment, parse_key
from moegraph.errors import CheckpointError
from moegraph.kernels.strict_json import Refused, parse

MAX_HEADER_BYTES = 16 << 20
_LENGTH = 8


class StoredSegment(NamedTuple):
    """A segment in a file: `offset` is where its first byte lies."""

    segment: Segment
    dtype: str
    offset: int


def read_header(path: Path, size: int) -> list[StoredSegment]:
    """The segments of a shard file, in the order of their data. `size`: the bytes that the file has to have.

    Raises CheckpointError, which names the file and what is wrong with it.
    """
    try:
        handle = open_file(path)
        try:
            found = os.fstat(handle).st_size
            if found != size:
                what = "is truncated" if found < size else "is too long"
                raise CheckpointError(f"{path} {what}: it has {found} of {size} bytes")
            raw = _read_raw(handle, size)
        finally:
            os.close(handle)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except Refused as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    try:
        return _segments(raw, _LENGTH + len(raw), size)
    except Refused as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error


def _read_raw(handle: int, size: int) -> bytes:
    prefix = os.pread(handle, _LENGTH, 0)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < _LENGTH or length > min(size - _LENGTH, MAX_HEADER_BYTES):
        raise Refused(f"its header claims {length} bytes, and the file has {size}")
    raw = os.pread(handle, length, _LENGTH)
    if len(raw) < length:
        raise Refused("its header ends early")
    return raw


def _segments(raw: bytes, begin: int, size: int) -> list[StoredSegment]:
    table = parse(raw)
    if not isinstance(table, dict):
        raise Refused("its header is not a JSON object")
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(each, str) for each in metadata.values()):
        raise Refused("its metadata are not text")
    found = sorted((_entry(key, entry) for key, entry in table.items()), key=lambda each: each.offset)
    end = 0
    for segment, dtype, offset in found:
        if offset != end:
            what = "overlaps another segment" if offset < end else "leaves a gap before it"
            raise Refused(f"{segment.key[:100]} {what}")
        end += (segment.stop - segment.start) * ITEM_BYTES[dtype]
    if begin + end != size:
        raise Refused(f"its segments have {end} bytes, and its data {size - begin}")
    return [each._replace(offset=begin + each.offset) for each in found]


def _entry(key: str, entry: Any) -> StoredSegment:
    shown = ascii(key[:100])
    segment = parse_key(key)
    if segment is None:
        raise Refused(f"{shown} is not the name of a segment")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise Refused(f"the entry of {shown} has not dtype, shape and data_offsets")
    dtype, count = entry["dtype"], segment.stop - segment.start
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise Refused(f"{shown} has a dtype that no checkpoint has")
    if not _are_whole(entry["shape"]) or entry["shape"] != [count]:
        raise Refused(f"{shown} has not the shape [{count}]")
    offsets = entry["data_offsets"]
    if not _are_whole(offsets) or len(offsets) != 2 or offsets[0] < 0:
        raise Refused(f"{shown} has no place in the data")
    if offsets[1] - offsets[0] != count * ITEM_BYTES[dtype]:
        raise Refused(f"{shown} has {offsets[1] - offsets[0]} bytes, and {count} elements of {dtype} do not")
    return StoredSegment(segment, dtype, offsets[0])


def _are_whole(values: Any) -> bool:
    return isinstance(values, list) and len(values) < 9 and all(type(each) is int for each in values)
