"""Opening prepared data: whatever does not hold is refused, by name, before it can do harm."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moegraph.data.dataset import TokenDataset
from moegraph.data.manifest import Manifest, read_manifest
from moegraph.data.prepare import Prepared
from moegraph.errors import DataError

from .small import write_tokens


def edit_manifest(folder: Path, *keys: str | int, value: Any) -> None:
    """Set one value of the manifest, and make the fingerprint right again, as an attacker would."""
    path = folder / "manifest.json"
    table = json.loads(path.read_text())
    place = table
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    path.write_text(json.dumps(table))
    try:
        manifest = Manifest.model_validate_json(path.read_bytes())
    except ValueError:
        return
    table["fingerprint"] = manifest.computed_fingerprint()
    path.write_text(json.dumps(table))


def test_a_changed_byte_is_refused_by_the_name_of_its_shard(prepared: Prepared) -> None:
    assert TokenDataset.open(prepared.path).num_tokens > 1000
    path = prepared.path / "train-00001.tokens.bin"
    content = bytearray(path.read_bytes())
    content[10] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"train-00001\.tokens\.bin was changed after it was written"):
        TokenDataset.open(prepared.path)


def test_a_shard_of_another_size_or_a_missing_one_is_refused_even_unverified(prepared: Prepared) -> None:
    tokens, offsets = prepared.path / "train-00001.tokens.bin", prepared.path / "train-00000.offsets.bin"
    content = tokens.read_bytes()
    tokens.write_bytes(content[:-2])
    with pytest.raises(DataError, match=r"train-00001\.tokens\.bin has \d+ bytes, its manifest says \d+"):
        TokenDataset.open(prepared.path, verify=False)
    tokens.write_bytes(content)
    offsets.unlink()
    with pytest.raises(DataError, match=r"train-00000\.offsets\.bin is missing"):
        TokenDataset.open(prepared.path, verify=False)


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_a_shard_must_be_a_regular_file(prepared: Prepared, tmp_path: Path, kind: str) -> None:
    path = prepared.path / "train-00000.tokens.bin"
    secret = tmp_path / "secret"
    path.rename(secret)
    {"link": lambda: path.symlink_to(secret), "pipe": lambda: os.mkfifo(path), "folder": path.mkdir}[kind]()
    with pytest.raises(DataError, match=r"train-00000\.tokens\.bin is not a regular file"):
        TokenDataset.open(prepared.path, verify=False)


@pytest.mark.parametrize("verify", [True, False])
def test_an_id_outside_the_vocabulary_is_named_with_shard_and_position(tmp_path: Path, verify: bool) -> None:
    folder = write_tokens(tmp_path / "out", [[5, 6, 7], [8, 300, 9], [10, 11]], shard_tokens=4)
    message = r"train-00001\.tokens\.bin: token 1 has id 300, but vocab_size is 300"
    with pytest.raises(DataError, match=message):
        TokenDataset.open(folder, verify=verify).read(2, 6)


def test_an_empty_shard_is_refused_by_name(prepared: Prepared) -> None:
    for suffix in ("tokens", "offsets"):
        (prepared.path / f"train-00001.{suffix}.bin").write_bytes(b"" if suffix == "tokens" else bytes(8))
    edit_manifest(prepared.path, "splits", "train", "shards", 1, "tokens", value=0)
    edit_manifest(prepared.path, "splits", "train", "shards", 1, "documents", value=0)
    with pytest.raises(DataError, match=r"train-00001\.tokens\.bin is an empty shard"):
        TokenDataset.open(prepared.path)


def test_a_split_without_documents_is_refused(tmp_path: Path) -> None:
    folder = write_tokens(tmp_path / "out", [[5, 6]])
    with pytest.raises(DataError, match="no validation documents"):
        TokenDataset.open(folder, "validation")


@pytest.mark.parametrize(
    "offsets", [[0, 9, 3, 12], [0, 0, 8, 12], [0, (1 << 64) - 1, 8, 12], [0, 1 << 63, (1 << 63) + 1, 12]]
)
def test_offsets_that_do_not_rise_are_refused(tmp_path: Path, offsets: list[int]) -> None:
    folder = write_tokens(tmp_path / "out", [[5, 6, 7], [8, 9, 10], [11, 12, 13]])
    raw = np.array(offsets, dtype="<u8").tobytes()
    (folder / "train-00000.offsets.bin").write_bytes(raw)
    digest = hashlib.sha256(raw).hexdigest()
    edit_manifest(folder, "splits", "train", "shards", 0, "offsets_sha256", value=digest)
    with pytest.raises(DataError, match=r"train-00000\.offsets\.bin: the offsets do not rise"):
        TokenDataset.open(folder)


def test_an_offset_outside_its_window_is_refused_when_read_unverified(tmp_path: Path) -> None:
    folder = write_tokens(tmp_path / "out", [[5, 6, 7], [8, 9, 10], [11, 12, 13]])
    (folder / "train-00000.offsets.bin").write_bytes(np.array([0, 1 << 63, 8, 12], dtype="<u8").tobytes())
    dataset = TokenDataset.open(folder, verify=False)
    with pytest.raises(DataError, match=r"train-00000\.offsets\.bin: the offsets do not rise"):
        dataset.read(2, 10)


def test_a_document_without_its_end_token_is_refused(tmp_path: Path) -> None:
    folder = write_tokens(tmp_path / "out", [[5, 6], [7, 8]])
    raw = np.array([0, 2, 6], dtype="<u8").tobytes()
    (folder / "train-00000.offsets.bin").write_bytes(raw)
    edit_manifest(folder, "splits", "train", "shards", 0, "offsets_sha256", value=hashlib.sha256(raw).hexdigest())
    with pytest.raises(DataError, match="does not end with eos_id 0"):
        TokenDataset.open(folder)


def test_data_other_than_those_the_run_began_with_are_refused(prepared: Prepared) -> None:
    fingerprint = prepared.manifest.fingerprint
    assert TokenDataset.open(prepared.path, expected_fingerprint=fingerprint).fingerprint == fingerprint
    with pytest.raises(DataError, match="holds other data"):
        TokenDataset.open(prepared.path, expected_fingerprint="0" * 64)


def test_data_changed_while_the_run_goes_on_are_refused(prepared: Prepared) -> None:
    dataset = TokenDataset.open(prepared.path)
    dataset.read(0, 10)
    path = prepared.path / "train-00000.tokens.bin"
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(1, 1))
    with pytest.raises(DataError, match=r"train-00000\.tokens\.bin was changed while it was in use"):
        dataset.read(0, 10)


def test_another_tokenizer_in_the_folder_is_refused(prepared: Prepared) -> None:
    path = prepared.path / "tokenizer.json"
    path.write_text(path.read_text() + "\n")
    with pytest.raises(DataError, match="is not the tokenizer that made the data"):
        TokenDataset.open(prepared.path)


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("version",), 2, "has version 2, this moegraph reads 1"),
        (("format",), "other", "format: "),
        (("surprise",), 1, "surprise: Extra inputs"),
        (("splits", "train", "shards", 0, "file"), "../../etc/passwd", "file: Extra inputs"),
        (("splits", "train", "shards", 0, "tokens"), -1, "tokens: "),
        (("splits", "train", "shards", 0, "tokens"), 1e3, "tokens: "),
        (("splits", "train", "shards", 0, "tokens"), "12", "tokens: "),
        (("splits", "train", "shards", 0, "tokens"), 2**60, "tokens: "),
        (("splits", "train", "shards", 0, "tokens_sha256"), "A" * 64, "tokens_sha256: "),
        (("splits", "train", "shards"), {}, "shards: "),
        (("tokenizer", "vocab_size"), True, "vocab_size: "),
        (("tokenizer", "vocab_size"), 2**40, "vocab_size: "),
        (("tokenizer", "vocab_size"), 70_000, "dtype uint16 does not go with vocab_size 70000"),
        (("tokenizer", "eos_id"), 300, "eos_id 300 is not below"),
        (("dtype",), "object", "dtype: "),
        (("inputs", "validation_fraction"), float("nan"), "manifest"),
    ],
)
def test_a_hostile_manifest_is_refused_by_the_name_of_the_key(
    prepared: Prepared, keys: tuple[str | int, ...], value: Any, message: str
) -> None:
    edit_manifest(prepared.path, *keys, value=value)
    with pytest.raises(DataError, match=rf"manifest\.json .*{message}|manifest\.json: {message}"):
        TokenDataset.open(prepared.path, verify=False)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not valid JSON"),
        (b"[1]", "not a valid manifest"),
        (b"\xff", "not valid JSON"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"version": 1, "version": 1}', "'version' appears twice"),
        (b'{"version": ' + b"9" * 5000 + b"}", "not valid JSON"),
    ],
)
def test_what_is_no_manifest_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_manifest(tmp_path)


def test_an_edited_or_huge_or_missing_manifest_is_refused(prepared: Prepared, tmp_path: Path) -> None:
    path = prepared.path / "manifest.json"
    path.write_text(path.read_text().replace('"empty_documents": 0', '"empty_documents": 1'))
    with pytest.raises(DataError, match="its fingerprint is wrong"):
        TokenDataset.open(prepared.path)
    with path.open("wb") as file:
        file.truncate(10 << 30)
    with pytest.raises(DataError, match="larger than"):
        TokenDataset.open(prepared.path)
    with pytest.raises(DataError, match=r"holds no manifest\.json: make it with `moegraph data prepare`"):
        TokenDataset.open(tmp_path / "absent")


def test_reading_spans_shards_and_marks_where_documents_start(tmp_path: Path) -> None:
    documents = [[5, 6, 7], [8], [9, 10], [11, 12, 13, 14]]
    folder = write_tokens(tmp_path / "out", documents, shard_tokens=5)
    dataset = TokenDataset.open(folder)
    assert [shard.start for shard in dataset.shards] == [0, 6, 14][: len(dataset.shards)]
    stream = [token for document in documents for token in [*document, 0]]
    begins = [place == 0 for document in documents for place in range(len(document) + 1)]
    for start in range(len(stream)):
        for stop in range(start, len(stream) + 1):
            ids, starts = dataset.read(start, stop - start)
            assert ids.tolist() == stream[start:stop]
            assert starts.tolist() == begins[start:stop]
    with pytest.raises(ValueError, match="outside"):
        dataset.read(len(stream), 1)
