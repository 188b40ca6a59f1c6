"""The manifest of a folder of token shards: what is in it, where it came from, and the hashes that prove it.

```
manifest.json            this file: format version, tokenizer, splits, fingerprint
tokenizer.json           the Hugging Face tokenizer that made the ids
train-00000.tokens.bin   ids, uint16 (uint32 when vocab_size > 65536), little endian, each document ended by eos_id
train-00000.offsets.bin  uint64, little endian, documents + 1: where each document starts, and the end
validation-00000.*       the same for the held-out documents
```

Contract: the manifest is data from strangers. Its size is capped, its schema closed and strictly typed, duplicate keys
are refused, file names are generated rather than read, and its fingerprint (SHA-256 over its canonical content, hence
over every shard's hash) must be right. Two folders with one fingerprint hold the same tokens in the same order.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from moegraph.errors import DataError

FORMAT_VERSION: Final = 1
MANIFEST_NAME = "manifest.json"
TOKENIZER_NAME = "tokenizer.json"
MAX_MANIFEST_BYTES = 64 << 20
DEFAULT_VOCAB_SIZE = 4096
DEFAULT_VALIDATION_FRACTION = 0.02
DEFAULT_SHARD_TOKENS = 1 << 26

SplitName = Literal["train", "validation"]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Size = Annotated[int, Field(ge=0, le=1 << 48)]
VocabSize = Annotated[int, Field(ge=1, le=1 << 32)]


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Inputs(_Closed):
    """Everything that decides the content of a folder. Exactly one of `vocab_size` (a BPE trained on the documents)
    and `tokenizer_sha256` (a given tokenizer.json) is set."""

    documents_sha256: Sha256
    vocab_size: VocabSize | None = DEFAULT_VOCAB_SIZE
    tokenizer_sha256: Sha256 | None = None
    eos_token: str | None = None
    validation_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = DEFAULT_VALIDATION_FRACTION
    shard_tokens: Annotated[int, Field(ge=1, le=1 << 40)] = DEFAULT_SHARD_TOKENS

    def key(self) -> str:
        """A hash of these values and of the format version, in hex."""
        return _canonical_sha256({"version": FORMAT_VERSION, "inputs": self.model_dump(mode="json")})


class TokenizerEntry(_Closed):
    """The tokenizer of a folder: hash of its tokenizer.json, number of ids, and the end-of-document token."""

    sha256: Sha256
    vocab_size: VocabSize
    eos_token: str
    eos_id: Annotated[int, Field(ge=0)]


class ShardEntry(_Closed):
    """One shard: counts, and the SHA-256 of its two files."""

    tokens: Size
    documents: Size
    tokens_sha256: Sha256
    offsets_sha256: Sha256


class SplitEntry(_Closed):
    """The shards of one split, in order. `empty_documents` had no token and were left out."""

    shards: tuple[ShardEntry, ...]
    empty_documents: Size

    @property
    def tokens(self) -> int:
        """Tokens of all shards, the end-of-document tokens included."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        """Documents of all shards, without the empty ones."""
        return sum(shard.documents for shard in self.shards)


class Splits(_Closed):
    """The two splits of a folder."""

    train: SplitEntry
    validation: SplitEntry


class Manifest(_Closed):
    """The content of manifest.json."""

    format: Literal["moegraph-tokens"]
    version: Literal[1]
    inputs: Inputs
    tokenizer: TokenizerEntry
    dtype: Literal["uint16", "uint32"]
    splits: Splits
    fingerprint: Sha256

    def split(self, name: SplitName) -> SplitEntry:
        """The entry of one split."""
        return self.splits.train if name == "train" else self.splits.validation

    def computed_fingerprint(self) -> str:
        """SHA-256 over the canonical JSON of everything but the fingerprint itself, in hex."""
        return _canonical_sha256(self.model_dump(mode="json", exclude={"fingerprint"}))


def new_manifest(inputs: Inputs, tokenizer: TokenizerEntry, splits: Splits) -> Manifest:
    """A manifest with its fingerprint filled in."""
    draft = Manifest(
        format="moegraph-tokens",
        version=FORMAT_VERSION,
        inputs=inputs,
        tokenizer=tokenizer,
        dtype=dtype_for(tokenizer.vocab_size),
        splits=splits,
        fingerprint="0" * 64,
    )
    return draft.model_copy(update={"fingerprint": draft.computed_fingerprint()})


def dtype_for(vocab_size: int) -> Literal["uint16", "uint32"]:
    """The narrowest stored type that holds every id."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def shard_files(split: SplitName, index: int) -> tuple[str, str]:
    """The names of a shard's token file and offsets file."""
    return f"{split}-{index:05d}.tokens.bin", f"{split}-{index:05d}.offsets.bin"


def write_manifest(manifest: Manifest, folder: Path) -> None:
    """Write manifest.json into `folder`."""
    text = json.dumps(manifest.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n"
    (folder / MANIFEST_NAME).write_text(text, encoding="utf-8")


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of `folder`. Raises DataError naming the file and what is wrong with it."""
    path = folder / MANIFEST_NAME
    try:
        if path.is_symlink() or not path.is_file():
            raise DataError(f"{folder} holds no {MANIFEST_NAME}: make it with `moegraph data prepare`")
        with path.open("rb") as file:
            raw = file.read(MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(raw) > MAX_MANIFEST_BYTES:
        raise DataError(f"{path} is larger than {MAX_MANIFEST_BYTES} bytes: that is not a manifest")
    _check_json(raw, path)
    try:
        manifest = Manifest.model_validate_json(raw)
    except ValidationError as error:
        raise DataError(f"{path} is not a valid manifest: {_first_problems(error)}") from error
    _check_consistent(manifest, path)
    return manifest


def _check_json(raw: bytes, path: Path) -> None:
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except RecursionError as error:
        raise DataError(f"{path} is not valid JSON: nested too deeply") from error
    except ValueError as error:
        raise DataError(f"{path} is not valid JSON: {str(error)[:200]}") from error
    version = value.get("version") if isinstance(value, dict) else None
    if isinstance(version, int) and version != FORMAT_VERSION:
        raise DataError(f"{path} has version {version}, this moegraph reads {FORMAT_VERSION}: prepare the data again")


def _check_consistent(manifest: Manifest, path: Path) -> None:
    tokenizer = manifest.tokenizer
    if tokenizer.eos_id >= tokenizer.vocab_size:
        raise DataError(f"{path}: eos_id {tokenizer.eos_id} is not below vocab_size {tokenizer.vocab_size}")
    if manifest.dtype != dtype_for(tokenizer.vocab_size):
        raise DataError(f"{path}: dtype {manifest.dtype} does not go with vocab_size {tokenizer.vocab_size}")
    if manifest.computed_fingerprint() != manifest.fingerprint:
        raise DataError(f"{path} was changed after it was written: its fingerprint is wrong; prepare the data again")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise ValueError(f"key {key[:80]!r} appears twice")
        table[key] = value
    return table


def _first_problems(error: ValidationError, most: int = 5) -> str:
    found = [(".".join(str(part)[:80] for part in item["loc"]), item["msg"][:200]) for item in error.errors()]
    problems = [f"{where[:200] or 'top level'}: {message}" for where, message in found]
    more = f"; and {len(problems) - most} more" if len(problems) > most else ""
    return "; ".join(problems[:most]) + more


def _canonical_sha256(value: dict[str, Any]) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()
