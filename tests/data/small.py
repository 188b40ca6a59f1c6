"""Small documents, and folders of exactly known tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moegraph.data.manifest import Inputs, Splits, TokenizerEntry, dtype_for, new_manifest, write_manifest
from moegraph.data.shards import ShardWriter
from moegraph.data.tokenizer import train_tokenizer

WORDS = ("def", "return", "class", "self", "import", "yield", "lambda", "while", "for", "in", "not", "or", "and")


def sentence(number: int) -> str:
    """A short document that differs for every number."""
    return " ".join(WORDS[(number * step + step) % len(WORDS)] for step in range(1, 12)) + f" {number}\n"


def write_tokens(folder: Path, documents: list[list[int]], *, shard_tokens: int = 1 << 20) -> Path:
    """Write a folder whose training documents have exactly these ids (eos, id 0, is added), with a 300-token
    vocabulary whose ids are whatever the caller says."""
    folder.mkdir()
    tokenizer = train_tokenizer([" ".join(map(sentence, range(60)))], 300)
    (folder / "tokenizer.json").write_bytes(tokenizer.serialized)
    dtype = dtype_for(tokenizer.vocab_size)
    train = ShardWriter(folder, "train", dtype, tokenizer.eos_id, shard_tokens)
    for ids in documents:
        train.append(np.array(ids, dtype=np.uint32), last=True)
    validation = ShardWriter(folder, "validation", dtype, tokenizer.eos_id, shard_tokens)
    entry = TokenizerEntry(
        sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        eos_token=tokenizer.eos_token,
        eos_id=tokenizer.eos_id,
    )
    splits = Splits(train=train.finish(), validation=validation.finish())
    write_manifest(new_manifest(Inputs(documents_sha256="0" * 64), entry, splits), folder)
    return folder
