"""The manifest of a checkpoint: which step of which run it is, and the sizes and hashes that prove its files.

Contract: a manifest is data from strangers. Its size is capped, its JSON strict (no key twice, no NaN), its schema
closed and typed; file names have to be those that moegraph gives, so none leads out of the folder; and its fingerprint
(SHA-256 over the rest of it, hence over every file's hash) has to be right.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from moegraph.checkpoint.disk import open_file
from moegraph.checkpoint.names import MANIFEST, MAX_ELEMENTS, SHARD_PATTERN, TENSOR_PATTERN
from moegraph.errors import CheckpointError
from moegraph.kernels.strict_json import Refused, parse

FORMAT: Final = "moegraph-checkpoint"
VERSION: Final = 2  # 1: the hash of a large file is its plain SHA-256
MAX_MANIFEST_BYTES = 16 << 20
MAX_DEPTH = 64
ITEM_BYTES = {"F64": 8, "F32": 4, "BF16": 2}  # the dtypes there are, as safetensors calls them

Sha256 = Annotated[str, Field(pattern=r"\A[0-9a-f]{64}\z")]
Size = Annotated[int, Field(ge=0, le=MAX_ELEMENTS)]
Real = Annotated[float, Field(allow_inf_nan=False)]
Text = Annotated[str, Field(max_length=256)]


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class TensorEntry(_Closed):
    """A whole tensor: its shape and dtype."""

    shape: Annotated[list[Annotated[int, Field(ge=1, le=MAX_ELEMENTS)]], Field(max_length=8)]
    dtype: Literal["F64", "F32", "BF16"]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class FileEntry(_Closed):
    """A shard file: its size and the SHA-256 of its content, as `piece_hash` says."""

    bytes: Size
    sha256: Sha256


class LayoutEntry(_Closed):
    """The layout that wrote it. Any other can read it."""

    dp: Annotated[int, Field(ge=1, le=1 << 24)]
    ep: Annotated[int, Field(ge=1, le=1 << 24)]
    pp: Annotated[int, Field(ge=1, le=1 << 24)]
    schedule: Text


class DataPosition(_Closed):
    """Where the run was in its data: the first `samples` positions of the order of this seed are done."""

    fingerprint: Sha256
    seed: Annotated[int, Field(ge=0, le=1 << 63)]
    samples: Annotated[int, Field(ge=0, le=1 << 62)]
    epoch: Annotated[int, Field(ge=0, le=1 << 62)]


class StepNumbers(_Closed):
    """What the saved step reported: losses in nats per token, the norm before clipping (null where a skipped step's
    are not finite), the choices of each expert [MoE layers][E]."""

    loss: Real | None
    loss_total: Real | None
    balance_loss: Real | None
    z_loss: Real | None
    grad_norm: Real | None
    lr: Real
    valid_targets: Size
    expert_counts: list[list[Size]]


class Counters(_Closed):
    """Small state that is no tensor: steps of the optimizer, steps computed again with a larger bucket, the size of a
    bucket at the end, in balanced loads (null where buckets hold anything), and steps skipped, in all and last."""

    optimizer_steps: Annotated[int, Field(ge=0, le=1 << 31)]
    replays: Annotated[int, Field(ge=0, le=1 << 31)]
    capacity: Annotated[float, Field(gt=0.0, le=65536.0)] | None
    skipped_steps: Annotated[int, Field(ge=0, le=1 << 31)] = 0
    skipped_in_a_row: Annotated[int, Field(ge=0, le=1 << 31)] = 0


class Accepted(_Closed):
    """Losses and gradient norms of the last accepted steps, oldest first, that a spike is told by."""

    losses: Annotated[list[Real], Field(max_length=4096)] = []
    norms: Annotated[list[Real], Field(max_length=4096)] = []


class Manifest(_Closed):
    """The content of manifest.json. `run` is the same for all checkpoints of a run, also after it was resumed; `saved`
    is a local time, for people. `spec` holds every final value as data, `audit` is the digest of the
    step in the run's audit.jsonl."""

    format: Literal["moegraph-checkpoint"]
    version: Literal[1, 2]
    run: Annotated[str, Field(pattern=r"\A[0-9a-f]{32}\z")]
    step: Annotated[int, Field(ge=0, le=1 << 31)]
    saved: Text
    layout: LayoutEntry
    data: DataPosition
    counters: Counters
    numbers: StepNumbers
    accepted: Accepted = Accepted()
    audit: Sha256 | None = None
    spec: dict[str, Any]
    graph_hashes: dict[str, Text]
    versions: dict[str, Text]
    tensors: dict[Annotated[str, Field(pattern=rf"\A{TENSOR_PATTERN}\z")], TensorEntry]
    files: dict[Annotated[str, Field(pattern=rf"\A{SHARD_PATTERN}\z")], FileEntry]
    fingerprint: Sha256

    @property
    def total_bytes(self) -> int:
        """Bytes of all shard files."""
        return sum(each.bytes for each in self.files.values())


def manifest_json(content: dict[str, Any]) -> bytes:
    """The text of a manifest with this content, which has everything but format, version and fingerprint."""
    whole = {"format": FORMAT, "version": VERSION, **content}
    whole["fingerprint"] = _fingerprint(whole)
    text = json.dumps(whole, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    return text.encode()


def read_manifest(folder: Path) -> Manifest:
    """Reads and checks the manifest of a checkpoint. Raises CheckpointError, which names the file and what is wrong."""
    path = folder / MANIFEST
    raw = read_small_file(path, MAX_MANIFEST_BYTES)
    try:
        value = parse(raw)
        if _depth(value) > MAX_DEPTH:
            raise Refused("it is nested too deeply")
    except Refused as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not the manifest of a checkpoint: its format is not {FORMAT}")
    if type(value.get("version")) is not int or not 1 <= value["version"] <= VERSION:
        raise CheckpointError(
            f"{path} has version {str(value.get('version'))[:20]}, this moegraph reads 1 to {VERSION}: use the "
            "moegraph that wrote it"
        )
    try:
        manifest = Manifest.model_validate(value)
        right = _fingerprint({key: each for key, each in value.items() if key != "fingerprint"})
    except (ValidationError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {_first_problem(error)}") from error
    if right != manifest.fingerprint:
        raise CheckpointError(f"{path} is damaged: it was changed after it was written, its fingerprint is wrong")
    return manifest


def read_small_file(path: Path, most: int) -> bytes:
    """The content of a regular file of at most `most` bytes. Raises CheckpointError."""
    try:
        handle = open_file(path)
        try:
            size = os.fstat(handle).st_size
            if size > most:
                raise CheckpointError(f"{path} is damaged: it has {size} bytes, more than {most}")
            with open(handle, "rb", closefd=False) as file:
                return file.read(size)
        finally:
            os.close(handle)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def _fingerprint(content: dict[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, dict | list)
        ]
    return depth


def _first_problem(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)[:200]
    first, *more = error.errors(include_url=False, include_input=False)
    where = ".".join(str(part)[:80] for part in first["loc"]) or "the top level"
    return f"{where}: {first['msg'][:200]}" + (f" (and {len(more)} more problems)" if more else "")
