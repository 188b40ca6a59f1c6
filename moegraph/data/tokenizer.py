"""Tokenizers: load any Hugging Face `tokenizer.json`, or train a byte-level BPE.

Contract: a `TextTokenizer` turns text into ids in [0, vocab_size) and never adds, cuts or pads anything by itself: the
file's truncation, padding and special-token templates are switched off. Text can not forge a special token: one that
is spelled out in a document is encoded as ordinary characters. Both ways are deterministic; the file's bytes are its
identity (`sha256`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from moegraph.errors import DataError

MAX_TOKENIZER_BYTES = 128 << 20
END_OF_DOCUMENT = "<|endoftext|>"
# The end-of-document tokens that published tokenizers use. A file that holds exactly one of them needs no option.
KNOWN_END_TOKENS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>")
SMALLEST_VOCAB = 257  # 256 bytes and the end-of-document token
LARGEST_VOCAB = 1 << 20


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer with its identity. `serialized` is the tokenizer.json, byte for byte."""

    tokenizer: Tokenizer
    serialized: bytes
    vocab_size: int
    eos_token: str
    eos_id: int

    @property
    def sha256(self) -> str:
        """The hash of the tokenizer.json, in hex."""
        return hashlib.sha256(self.serialized).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """The ids of each text, one uint32 array each, with no token added. Releases the GIL while it works."""
        encodings = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))


def load_tokenizer(path: Path, eos_token: str | None = None) -> TextTokenizer:
    """Load a `tokenizer.json`. `eos_token` names its end-of-document token; by default the one that it is known to be.

    Raises DataError for a file that is missing, over 128 MiB, not a tokenizer, or whose end token is not clear.
    """
    try:
        if not path.is_file():
            raise DataError(f"{path} is not a file: give the tokenizer.json itself", exit_code=2)
        with path.open("rb") as file:
            serialized = file.read(MAX_TOKENIZER_BYTES + 1)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(serialized) > MAX_TOKENIZER_BYTES:
        raise DataError(f"{path} is larger than {MAX_TOKENIZER_BYTES} bytes: that is not a tokenizer.json")
    return tokenizer_from_bytes(serialized, str(path), eos_token)


def tokenizer_from_bytes(serialized: bytes, name: str, eos_token: str | None = None) -> TextTokenizer:
    """A tokenizer from the bytes of its JSON; `name` is for messages. Raises DataError like `load_tokenizer`."""
    try:
        tokenizer = Tokenizer.from_str(serialized.decode("utf-8"))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic inside the Rust library is no Exception
        raise DataError(f"{name} is not a tokenizer.json that `tokenizers` can load: {str(error)[:300]}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    vocab: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    if not vocab:
        raise DataError(f"{name} has an empty vocabulary")
    vocab_size = max(vocab.values()) + 1
    if vocab_size > LARGEST_VOCAB:
        raise DataError(f"{name} has token ids up to {vocab_size - 1}; at most {LARGEST_VOCAB} tokens are supported")
    token = _end_token(vocab, name) if eos_token is None else eos_token
    if token not in vocab:
        raise DataError(f"{name} has no token {token!r}: name its end-of-document token")
    return TextTokenizer(tokenizer, serialized, vocab_size, token, vocab[token])


def _end_token(vocab: dict[str, int], name: str) -> str:
    found = [token for token in KNOWN_END_TOKENS if token in vocab]
    if len(found) != 1:
        seen = f"has several ({', '.join(found)})" if found else "has none of the usual ones"
        raise DataError(f"which token of {name} ends a document? It {seen}: name it with --eos-token")
    return found[0]


def check_vocab_size(vocab_size: int) -> None:
    """Raises DataError for a size that no tokenizer can be trained to."""
    if not SMALLEST_VOCAB <= vocab_size <= LARGEST_VOCAB:
        raise DataError(f"vocab_size {vocab_size} is outside [{SMALLEST_VOCAB}, {LARGEST_VOCAB}]", exit_code=2)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> TextTokenizer:
    """Train a byte-level BPE of at most `vocab_size` tokens; id 0 is `<|endoftext|>`, then come the 256 bytes.

    The same texts give the same tokenizer, bit for bit. Few texts give fewer tokens. Raises DataError for a
    `vocab_size` outside [257, 2^20].
    """
    check_vocab_size(vocab_size)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    with one_thread_per_call():
        tokenizer.train_from_iterator(texts, trainer)
    return tokenizer_from_bytes(tokenizer.to_str(pretty=True).encode("utf-8"), "the trained tokenizer")


@contextmanager
def one_thread_per_call() -> Iterator[None]:
    """Inside, `tokenizers` starts no threads of its own, so that our number of workers is the true one.

    The library has no call for this, only a variable that it reads from the environment; it is put back afterwards.
    """
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before
