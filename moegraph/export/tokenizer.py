"""The tokenizer of a run's data, for the exported model."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moegraph.checkpoint.disk import read_at_most
from moegraph.data.corpora import resolve_source
from moegraph.data.manifest import TOKENIZER_NAME, read_manifest
from moegraph.data.tokenizer import MAX_TOKENIZER_BYTES
from moegraph.errors import DataError


@dataclass(frozen=True)
class RunTokenizer:
    """tokenizer.json byte for byte, and the token that ends a document."""

    content: bytes
    eos_token: str
    eos_id: int

    def config(self, max_seq_len: int) -> dict[str, Any]:
        """tokenizer_config.json: the file as it is, whatever the architecture's own tokenizer would be."""
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": max_seq_len,
            "bos_token": None,
            "eos_token": self.eos_token,
            "pad_token": None,
            "clean_up_tokenization_spaces": False,
        }


def read_tokenizer(source: str, base: Path, fingerprint: str) -> RunTokenizer:
    """The tokenizer of the data with this fingerprint in `source`, relative to `base`. Raises DataError if the data
    are not there, are others, or the tokenizer is not the one that they were made with."""
    folder = resolve_source(source, base)
    manifest = read_manifest(folder)
    if manifest.fingerprint != fingerprint:
        raise DataError(f"{folder} holds other data than the run was trained on")
    path = folder / TOKENIZER_NAME
    try:
        content = read_at_most(path, MAX_TOKENIZER_BYTES)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    if hashlib.sha256(content).hexdigest() != manifest.tokenizer.sha256:
        raise DataError(f"{path} was changed after the data were prepared")
    return RunTokenizer(content, manifest.tokenizer.eos_token, manifest.tokenizer.eos_id)
