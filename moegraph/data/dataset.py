"""Open a prepared folder and read windows of its token stream.

The token stream of a split is its documents in order, each ended by the end-of-document token, over all shards.

Contract: `TokenDataset.open` checks the manifest and every file's size, and with `verify` every hash, offset and id,
before anything is read. Later reads refuse a shard that was replaced or written since it was opened, and an id that the
vocabulary does not have, by name. No split is ever copied into memory.
"""

from __future__ import annotations

import bisect
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moegraph.data.manifest import TOKENIZER_NAME, Manifest, SplitName, read_manifest, shard_files
from moegraph.data.shards import OFFSETS_DTYPE, FileStamp, file_stamp, map_array, tokens_dtype
from moegraph.data.tokenizer import TextTokenizer, load_tokenizer
from moegraph.errors import DataError

BLOCK = 1 << 22  # values checked at a time


@dataclass(frozen=True, eq=False)
class Shard:
    """One mapped shard. `start` is the place of its first token in the split's stream."""

    tokens_path: Path
    offsets_path: Path
    start: int
    tokens: NDArray[Any]
    offsets: NDArray[np.uint64]
    stamps: tuple[FileStamp, FileStamp]

    def check_unchanged(self) -> None:
        """Raise DataError if one of the files was replaced or written since the shard was opened."""
        for path, stamp in zip((self.tokens_path, self.offsets_path), self.stamps, strict=True):
            if file_stamp(path) != stamp:
                raise DataError(f"{path} was changed while it was in use: prepare the data again and start anew")


@dataclass(frozen=True, eq=False)
class TokenDataset:
    """One split of a prepared folder. Made by `open`."""

    path: Path
    split: SplitName
    manifest: Manifest
    shards: tuple[Shard, ...]

    @classmethod
    def open(
        cls,
        path: Path | str,
        split: SplitName = "train",
        *,
        verify: bool = True,
        expected_fingerprint: str | None = None,
    ) -> TokenDataset:
        """Open a folder written by `prepare`.

        `verify` reads everything once (hashes, offsets, ids); without it only the manifest and the sizes are checked.
        `expected_fingerprint` is the fingerprint that a run began with: other data are refused.
        Raises DataError naming the file, and the place in it, for whatever does not hold.
        """
        folder = Path(path)
        manifest = read_manifest(folder)
        if expected_fingerprint is not None and manifest.fingerprint != expected_fingerprint:
            raise DataError(
                f"{folder} holds other data (fingerprint {manifest.fingerprint[:12]}…) than the run began with "
                f"({expected_fingerprint[:12]}…): point data.source at the data of the run, or start a new run"
            )
        entry = manifest.split(split)
        if not entry.shards:
            raise DataError(f"{folder} has no {split} documents: prepare it with more text or another fraction")
        shards: list[Shard] = []
        start = 0
        for index in range(len(entry.shards)):
            shards.append(_open_shard(folder, manifest, split, index, start))
            start += entry.shards[index].tokens
        dataset = cls(folder, split, manifest, tuple(shards))
        if verify:
            dataset.verify()
        return dataset

    @property
    def fingerprint(self) -> str:
        """SHA-256 in hex that stands for all tokens of all splits and their order."""
        return self.manifest.fingerprint

    @property
    def vocab_size(self) -> int:
        """Every id is below this."""
        return self.manifest.tokenizer.vocab_size

    @property
    def eos_id(self) -> int:
        """The id that ends each document."""
        return self.manifest.tokenizer.eos_id

    @property
    def num_tokens(self) -> int:
        """Length of the token stream."""
        return self.manifest.split(self.split).tokens

    @property
    def num_documents(self) -> int:
        """Documents of the split."""
        return self.manifest.split(self.split).documents

    def num_samples(self, seq_len: int) -> int:
        """How many whole windows of `seq_len` tokens, each with its next token, the stream holds."""
        return (self.num_tokens - 1) // seq_len

    def tokenizer(self) -> TextTokenizer:
        """The tokenizer that made the ids. Raises DataError if the file is not the one of the manifest."""
        entry = self.manifest.tokenizer
        tokenizer = load_tokenizer(self.path / TOKENIZER_NAME, entry.eos_token)
        if tokenizer.sha256 != entry.sha256:
            raise DataError(f"{self.path / TOKENIZER_NAME} is not the tokenizer that made the data: its hash differs")
        return tokenizer

    def read(self, start: int, length: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Tokens [start, start + length) of the stream: ids int64 [length], and where documents start, bool [length].

        Raises DataError for an id outside the vocabulary and for a shard that was changed since it was opened.
        """
        if not 0 <= start <= start + length <= self.num_tokens:
            raise ValueError(f"window [{start}, {start + length}) is outside [0, {self.num_tokens})")
        ids = np.empty(length, dtype=np.int64)
        starts = np.zeros(length, dtype=np.bool_)
        done = 0
        index = bisect.bisect_right(self.shards, start, key=lambda shard: shard.start) - 1
        while done < length:
            shard = self.shards[index]
            low = start + done - shard.start
            high = min(low + length - done, len(shard.tokens))
            shard.check_unchanged()
            part = ids[done : done + high - low]
            part[:] = shard.tokens[low:high]
            if part.size and int(part.max()) >= self.vocab_size:
                self._refuse_id(shard, low)
            first, last = np.searchsorted(shard.offsets, np.array([low, high], dtype=OFFSETS_DTYPE))
            inside = shard.offsets[first:last]
            if ((inside < low) | (inside >= high)).any():
                raise DataError(f"{shard.offsets_path}: the offsets do not rise: prepare the data again")
            starts[inside.astype(np.int64) - low + done] = True
            done += high - low
            index += 1
        return ids, starts

    def verify(self) -> None:
        """Read everything once: hashes, offsets, ids, end tokens. Raises DataError naming the first breach."""
        self.tokenizer()
        entry = self.manifest.split(self.split)
        for shard, expected in zip(self.shards, entry.shards, strict=True):
            for path, digest in (
                (shard.offsets_path, expected.offsets_sha256),
                (shard.tokens_path, expected.tokens_sha256),
            ):
                if _sha256_of(path) != digest:
                    raise DataError(f"{path} was changed after it was written: its SHA-256 is not the manifest's")
            for low in range(0, len(shard.tokens), BLOCK):
                if int(shard.tokens[low : low + BLOCK].max()) >= self.vocab_size:
                    self._refuse_id(shard, low)
            for low in range(0, len(shard.offsets) - 1, BLOCK):
                begins = shard.offsets[low : low + BLOCK]
                ends = shard.offsets[low + 1 : low + 1 + BLOCK]
                if (ends <= begins[: len(ends)]).any():
                    raise DataError(f"{shard.offsets_path}: the offsets do not rise: prepare the data again")
                if (shard.tokens[(ends - np.uint64(1)).astype(np.int64)] != self.eos_id).any():
                    raise DataError(f"{shard.tokens_path}: a document does not end with eos_id {self.eos_id}")

    def _refuse_id(self, shard: Shard, low: int) -> None:
        position = low + int(np.argmax(shard.tokens[low : low + BLOCK] >= self.vocab_size))
        raise DataError(
            f"{shard.tokens_path}: token {position} has id {int(shard.tokens[position])}, "
            f"but vocab_size is {self.vocab_size}: prepare the data again"
        )


def _open_shard(folder: Path, manifest: Manifest, split: SplitName, index: int, start: int) -> Shard:
    entry = manifest.split(split).shards[index]
    tokens_path, offsets_path = (folder / name for name in shard_files(split, index))
    if entry.tokens == 0 or entry.documents == 0:
        raise DataError(f"{tokens_path} is an empty shard: prepare the data again")
    stamps = file_stamp(tokens_path), file_stamp(offsets_path)
    tokens = map_array(tokens_path, tokens_dtype(manifest.dtype), entry.tokens)
    offsets = map_array(offsets_path, OFFSETS_DTYPE, entry.documents + 1)
    if int(offsets[0]) != 0 or int(offsets[-1]) != entry.tokens:
        raise DataError(f"{offsets_path}: the offsets do not span the {entry.tokens} tokens of the shard")
    return Shard(tokens_path, offsets_path, start, tokens, offsets, stamps)


def _sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
