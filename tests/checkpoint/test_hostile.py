"""A thousand seeded mutations of headers and manifests: each is refused in a sentence, fast, and without much memory;
or it changed nothing."""

from __future__ import annotations

import json
import random
import struct
import tracemalloc
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from moegraph.checkpoint.manifest import manifest_json
from moegraph.checkpoint.names import MANIFEST, parse_key, shard_name
from moegraph.checkpoint.reader import Checkpoint
from moegraph.checkpoint.shard_header import read_header
from moegraph.errors import CheckpointError
from tests.checkpoint.small_checkpoints import rewrite, values, whole, write_checkpoint
from tests.mutations import mutate_text, mutate_tree

LIMIT = 16 << 20  # bytes of memory beyond what a whole checkpoint takes


def with_header(good: bytes, header: bytes, chance: random.Random | None = None) -> bytes:
    """The file with another header; sometimes its length is a lie."""
    length = len(header)
    if chance is not None and chance.random() < 0.2:
        length = chance.choice([0, 1, length - 1, length + 1, 1 << 20, 1 << 40, (1 << 64) - 1])
    (before,) = struct.unpack("<Q", good[:8])
    return struct.pack("<Q", length) + header + good[8 + before :]


def check(read: Callable[[], object], unchanged: Callable[[], bool]) -> bool:
    """Whether it was refused; if not, it has to hold what the good one holds. In little memory either way."""
    tracemalloc.start()
    said = None
    try:
        read()
    except CheckpointError as error:
        said = str(error)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < LIMIT, peak
    assert len(said) < 1000 if said is not None else unchanged()
    return said is not None


def is_right(folder: Path) -> bool:
    """Whether it holds the values that were written."""
    found = whole(folder)
    return all(torch.equal(found[name].reshape(-1), value.reshape(-1)) for name, value in values().items())


@pytest.mark.parametrize("seed", range(5))
def test_mutated_headers(tmp_path: Path, seed: int) -> None:
    """With sizes and hashes that are right: whoever forges a file can forge those too."""
    folder = write_checkpoint(tmp_path)
    path, chance = folder / shard_name(0, 2), random.Random(seed)
    good = path.read_bytes()
    (length,) = struct.unpack("<Q", good[:8])
    header = good[8 : 8 + length]
    files = json.loads((folder / MANIFEST).read_bytes())["files"]
    refused = 0
    for _ in range(100):
        if chance.random() < 0.5:
            new = json.dumps(mutate_tree(json.loads(header), chance)).encode()
        else:
            new = mutate_text(header, chance)
        bad = with_header(good, new, chance)
        path.write_bytes(bad)
        rewrite(folder, files={**files, path.name: {"bytes": len(bad), "sha256": sha256(bad).hexdigest()}})
        refused += check(lambda: Checkpoint.open(folder).verify(), lambda: is_right(folder))
    assert refused > 80


@pytest.mark.parametrize("seed", range(5))
def test_mutated_manifests(tmp_path: Path, seed: int) -> None:
    """With a fingerprint that is right: whoever forges a manifest can forge that too."""
    folder = write_checkpoint(tmp_path)
    path, chance = folder / MANIFEST, random.Random(seed)
    good = path.read_bytes()
    refused = 0
    for _ in range(100):
        if chance.random() < 0.5:
            tree = mutate_tree(json.loads(good), chance)
            tree.pop("fingerprint", None)
            path.write_bytes(manifest_json(tree))
        else:
            path.write_bytes(mutate_text(good, chance))
        refused += check(lambda: Checkpoint.open(folder).verify(), lambda: is_right(folder))
    assert refused > 70


def test_a_header_that_claims_to_be_huge_is_not_read(tmp_path: Path) -> None:
    """A sparse file of 10 GB whose header would fill it."""
    path = tmp_path / shard_name(0, 1)
    size = 10 << 30
    with path.open("wb") as file:
        file.write(struct.pack("<Q", size - 8))
        file.truncate(size)
    assert check(lambda: read_header(path, size), lambda: False)


def test_a_manifest_of_10_gigabytes_is_not_read(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    with (folder / MANIFEST).open("r+b") as file:
        file.truncate(10 << 30)
    assert check(lambda: Checkpoint.open(folder), lambda: False)


@pytest.mark.parametrize(
    "key",
    ["master.x[1:1]", "master.x[2:1]", "master.x[01:2]", "master.x[-1:2]", "other.x[0:1]", "master.[0:1]", "master.x",
     "master.x[0:1]\n", "master.a/b[0:1]", "master.x[٠:1]", "master.x[0:9999999999999999]"],
)  # fmt: skip
def test_names_that_are_no_segments(key: str) -> None:
    assert parse_key(key) is None
