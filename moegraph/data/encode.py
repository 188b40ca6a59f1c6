"""Encode a stream of documents on several threads, in order, with bounded memory.

Contract: documents are cut into pieces, pieces are gathered into chunks of about `CHUNK_CHARACTERS`, chunks are encoded
by `workers` threads (the tokenizer releases the GIL), and the pieces come back in their first order. At most
2 · workers chunks exist at a time. A document longer than `PIECE_CHARACTERS` is cut after a line end, so that no
document is too long to encode; the ids do not depend on `workers`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moegraph.data.manifest import SplitName
from moegraph.data.sources import Document, document_digest
from moegraph.data.tokenizer import TextTokenizer, one_thread_per_call

PIECE_CHARACTERS = 1 << 20
CHUNK_CHARACTERS = 1 << 18


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a document; `last` ends the document."""

    text: str
    digest: bytes
    last: bool


@dataclass(frozen=True, slots=True)
class EncodedPiece:
    """The ids of a piece. `digest` is the document's SHA-256, the same in all its pieces."""

    ids: NDArray[np.uint32]
    digest: bytes
    last: bool


def split_of(digest: bytes, validation_fraction: float) -> SplitName:
    """The split of a document: decided by its own hash alone, so that it stays when other documents are added."""
    return "validation" if int.from_bytes(digest[:8], "big") < validation_fraction * 2.0**64 else "train"


def encode_documents(
    documents: Iterable[Document], tokenizer: TextTokenizer, workers: int
) -> Generator[EncodedPiece, None, None]:
    """Yield the encoded pieces of all documents, in order."""
    waiting: deque[tuple[list[Piece], Future[list[NDArray[np.uint32]]]]] = deque()
    with one_thread_per_call(), ThreadPoolExecutor(workers, thread_name_prefix="encode") as pool:
        try:
            for chunk in _chunks(documents):
                waiting.append((chunk, pool.submit(tokenizer.encode_batch, [piece.text for piece in chunk])))
                if len(waiting) == 2 * workers:
                    yield from _finished(*waiting.popleft())
            while waiting:
                yield from _finished(*waiting.popleft())
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _finished(chunk: list[Piece], future: Future[list[NDArray[np.uint32]]]) -> Iterator[EncodedPiece]:
    for piece, ids in zip(chunk, future.result(), strict=True):
        yield EncodedPiece(ids, piece.digest, piece.last)


def _chunks(documents: Iterable[Document]) -> Iterator[list[Piece]]:
    chunk: list[Piece] = []
    characters = 0
    for document in documents:
        for piece in _pieces(document):
            chunk.append(piece)
            characters += len(piece.text)
            if characters >= CHUNK_CHARACTERS:
                yield chunk
                chunk, characters = [], 0
    if chunk:
        yield chunk


def _pieces(document: Document) -> Iterator[Piece]:
    text, digest = document.text, document_digest(document.text)
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        line_end = text.rfind("\n", start, start + PIECE_CHARACTERS)
        end = start + PIECE_CHARACTERS if line_end < 0 else line_end + 1
        yield Piece(text[start:end], digest, last=False)
        start = end
    yield Piece(text[start:], digest, last=True)
