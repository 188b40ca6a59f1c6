"""A damaged checkpoint is refused before anything of it is used, and the file at fault is named."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moegraph.checkpoint import piece_hash
from moegraph.checkpoint.manifest import manifest_json, read_manifest
from moegraph.checkpoint.names import MANIFEST, Segment, shard_name
from moegraph.checkpoint.reader import Checkpoint
from moegraph.errors import CheckpointError
from tests.checkpoint.small_checkpoints import content, rewrite, values, whole, write_checkpoint

FIRST, SECOND = shard_name(0, 2), shard_name(1, 2)
FILES = [FIRST, SECOND, MANIFEST]


def load(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    checkpoint.verify()


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert caught.value.exit_code == 1
    return str(caught.value)


@pytest.mark.parametrize("cut", [1, 10, 23, 24])
def test_what_is_whole_is_read_whatever_its_cuts(tmp_path: Path, cut: int) -> None:
    folder = write_checkpoint(tmp_path, cut=cut)
    load(folder)
    found = whole(folder)
    assert all(torch.equal(found[name], value) for name, value in values().items())


@pytest.mark.parametrize("start", range(0, 24, 5))
@pytest.mark.parametrize("count", [1, 2, 7, 24])
def test_any_part_of_a_tensor_is_read(tmp_path: Path, start: int, count: int) -> None:
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path))
    right = values()["master.layers.0.weight"].reshape(-1)[start : start + count]
    out = torch.empty(len(right))
    checkpoint.read("master.layers.0.weight", start, out)
    assert torch.equal(out, right)
    with pytest.raises(ValueError, match="has 24 F32, not"):
        checkpoint.read("master.layers.0.weight", start, torch.empty(25 - start))


def test_only_the_bytes_that_are_wanted_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path))
    read, original = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda *arguments: read.append(original(*arguments)) or read[-1])
    checkpoint.read("master.layers.0.weight", 8, torch.empty(5))
    assert read == [2 * 4, 3 * 4]  # two elements of one file, three of the next


def test_the_safetensors_library_reads_the_files_too(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    found = load_file(folder / FIRST)
    name = "master.layers.0.weight"
    assert torch.equal(found[f"{name}[0:10]"], values()[name].reshape(-1)[:10])


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_anywhere_is_found(tmp_path: Path, name: str) -> None:
    folder = write_checkpoint(tmp_path)
    path = folder / name
    good = path.read_bytes()
    step = max(1, len(good) // 150)
    for place in [*range(0, len(good), step), len(good) - 1]:
        bad = bytearray(good)
        bad[place] ^= 1 << (place % 8)
        path.write_bytes(bad)
        assert name in refused(folder), place


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("left", [0, 1, 7, 8, 100, -2])
def test_a_truncated_file_is_named_with_its_sizes(tmp_path: Path, name: str, left: int) -> None:
    folder = write_checkpoint(tmp_path)
    good = (folder / name).read_bytes()
    (folder / name).write_bytes(good[:left])
    said = refused(folder)
    assert name in said
    if name != MANIFEST:
        assert f"is truncated: it has {len(good[:left])} of {len(good)} bytes" in said


@pytest.mark.parametrize("name", FILES)
def test_a_longer_file_is_named(tmp_path: Path, name: str) -> None:
    folder = write_checkpoint(tmp_path)
    with (folder / name).open("ab") as file:
        file.write(b"\0")
    assert name in refused(folder)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    folder = write_checkpoint(tmp_path)
    (folder / name).unlink()
    assert name in refused(folder)


def test_swapped_shards_are_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, cut=12)
    names = [folder / FIRST, folder / SECOND]
    first, second = (path.read_bytes() for path in names)
    names[0].write_bytes(second)
    names[1].write_bytes(first)
    assert FIRST in refused(folder)


def test_a_shard_of_another_step_is_named(tmp_path: Path) -> None:
    folder, other = write_checkpoint(tmp_path, 7), write_checkpoint(tmp_path, 8)
    name = "master.layers.0.weight"
    tensors = load_file(other / FIRST)
    tensors[f"{name}[0:10]"] += 1
    save_file(tensors, other / FIRST, {"format": "pt"})
    (folder / FIRST).write_bytes((other / FIRST).read_bytes())
    assert (folder / FIRST).stat().st_size == read_manifest(folder).files[FIRST].bytes
    assert f"{FIRST} is damaged: its content has not the SHA-256" in refused(folder)


@pytest.mark.parametrize("name", ["extra.safetensors", shard_name(2, 3), ".hidden"])
def test_a_file_too_many_is_named(tmp_path: Path, name: str) -> None:
    folder = write_checkpoint(tmp_path)
    (folder / name).write_bytes(b"")
    assert name in refused(folder)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_what_is_no_regular_file_is_not_opened(tmp_path: Path, name: str, kind: str) -> None:
    folder = write_checkpoint(tmp_path)
    path = folder / name
    content = path.read_bytes()
    path.unlink()
    if kind == "link":
        (tmp_path / "elsewhere").write_bytes(content)
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    assert name in refused(folder)


class _Bomb:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, ("executed",)


@pytest.mark.parametrize("name", FILES)
def test_a46_a_pickle_in_any_file_is_refused_and_not_executed(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint(tmp_path)
    monkeypatch.chdir(tmp_path)
    (folder / name).write_bytes(pickle.dumps(_Bomb()))
    assert name in refused(folder)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "path", ["../shard-00000-of-00002.safetensors", "/etc/passwd", "shard-00000-of-00002.safetensors/../x", "a\0b", ""]
)
def test_a_file_name_that_leads_elsewhere_is_refused(tmp_path: Path, path: str) -> None:
    folder = write_checkpoint(tmp_path)
    files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
    rewrite(folder, files={**files, path: files[FIRST]})
    assert MANIFEST in refused(folder)


def test_a_tensor_that_is_only_in_the_manifest_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    tensors = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["tensors"]
    rewrite(folder, tensors={**tensors, "master.more": {"shape": [1 << 40], "dtype": "F64"}})
    assert "element 0 of master.more is nowhere in it" in refused(folder)


@pytest.mark.parametrize("gone", list(content()))
def test_a_manifest_without_one_of_its_parts_is_refused(tmp_path: Path, gone: str) -> None:
    folder = write_checkpoint(tmp_path)
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    for key in (gone, "fingerprint", "format", "version"):
        manifest.pop(key)
    (folder / MANIFEST).write_bytes(manifest_json(manifest))
    assert f"{gone}: Field required" in refused(folder)


def test_a_newer_version_is_refused_by_its_number(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    rewrite(folder, version=3)
    assert "has version 3, this moegraph reads 1 to 2" in refused(folder)


@pytest.mark.parametrize("version", [1, 2])
def test_a_large_file_of_either_version_is_compared_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    """Version 1 has the plain SHA-256 of a file, version 2 that of its pieces' ones."""
    monkeypatch.setattr(piece_hash, "PIECE", 32)
    folder = write_checkpoint(tmp_path)
    files = Checkpoint.open(folder).manifest.model_dump()["files"]
    content = (folder / FIRST).read_bytes()
    pieces = [hashlib.sha256(content[at : at + 32]).digest() for at in range(0, len(content), 32)]
    assert files[FIRST]["sha256"] == hashlib.sha256(b"".join(pieces)).hexdigest()
    if version == 1:
        plain = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in files}
        rewrite(folder, version=1, files={name: {**files[name], "sha256": plain[name]} for name in files})
    wanted = [Segment(name, 0, entry.numel) for name, entry in Checkpoint.open(folder).manifest.tensors.items()]
    for damaged in (False, True):
        if damaged:
            (folder / FIRST).write_bytes(content[:-40] + bytes([content[-40] ^ 1]) + content[-39:])
        with suppress(CheckpointError) if damaged else nullcontext():
            load(folder)
            assert not damaged
        with suppress(CheckpointError) if damaged else nullcontext():
            checkpoint = Checkpoint.open(folder)
            with checkpoint.verified(files, wanted) as read:
                for segment in checkpoint.in_file_order(wanted):
                    read(segment.tensor, segment.start, torch.empty(segment.stop))
            assert not damaged


READING = {"all in order": 1, "all backwards": -1, "a part": 0}


@pytest.mark.parametrize("how", READING)
def test_a_flipped_bit_is_found_while_the_file_is_read(tmp_path: Path, how: str) -> None:
    """Whether this rank reads all of the file, in which order, or a part."""
    folder = write_checkpoint(tmp_path)
    checkpoint = Checkpoint.open(folder)
    everything = [Segment(name, 0, entry.numel) for name, entry in checkpoint.manifest.tensors.items()]
    wanted = checkpoint.in_file_order(everything)[:: READING[how]] if READING[how] else everything[:1]
    assert len(checkpoint._read_as_a_whole(checkpoint.manifest.files, wanted)) == (2 if READING[how] else 0)

    def go() -> None:
        with checkpoint.verified(checkpoint.manifest.files, wanted) as read:
            for segment in wanted:
                out = torch.empty(segment.stop - segment.start)
                read(segment.tensor, segment.start, out)
                assert (out != 1e9).all()

    go()
    for name in checkpoint.manifest.files:
        good = (folder / name).read_bytes()
        for place in [*range(8, len(good), 41), len(good) - 1]:
            (folder / name).write_bytes(good[:place] + bytes([good[place] ^ 4]) + good[place + 1 :])
            with pytest.raises(CheckpointError, match=rf"{name} is damaged: its content has not the SHA-256"):
                go()
        (folder / name).write_bytes(good)


def test_an_error_while_reading_ends_the_comparison(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path))
    before = threading.active_count()
    with pytest.raises(KeyError), checkpoint.verified(checkpoint.manifest.files, []) as read:
        read("nothing", 0, torch.empty(1))
    for _ in range(200):
        if threading.active_count() > before:
            time.sleep(0.01)
    assert threading.active_count() <= before
