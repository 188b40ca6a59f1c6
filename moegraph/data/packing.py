"""Pack windows of the token stream into rows that neither attention nor loss can cross a document in.

Legend: B sequences, S sequence length. A row is S + 1 tokens of the stream: S inputs and, one further, S labels.

```
stream      a0 a1 a2 eos b0 b1 eos c0 …          row of S = 7, document_mask on
tokens      a0 a1 a2 eos b0 b1 eos
labels      a1 a2 eos −100 b1 eos −100            the token after an eos belongs to another document
positions    0  1  2   3  0  1   2
document_ids 0  0  0   0  1  1   1
```

A row that begins inside a document counts its positions from 0 all the same: attention cannot see what came before.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IGNORED_LABEL = -100
PADDING_DOCUMENT = -1


@dataclass(frozen=True)
class PackedRows:
    """tokens, labels int64 [B, S]; positions, document_ids int32 [B, S]. An ignored label is −100; the document id of
    padding is −1."""

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    positions: NDArray[np.int32]
    document_ids: NDArray[np.int32]


def pack_rows(ids: NDArray[np.int64], starts: NDArray[np.bool_], *, document_mask: bool) -> PackedRows:
    """Pack ids int64 [B, S + 1] with `starts` bool [B, S + 1], true where a document starts.

    Without `document_mask` every label is simply the next token, positions run from 0 to S − 1, and all of a row is
    one document.
    """
    tokens, labels = ids[:, :-1].copy(), ids[:, 1:].copy()
    places = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    if not document_mask:
        return PackedRows(tokens, labels, places.copy(), np.zeros(tokens.shape, dtype=np.int32))
    labels[starts[:, 1:]] = IGNORED_LABEL
    inner = starts[:, :-1].copy()
    inner[:, 0] = False  # the first document of a row is number 0, whether it starts here or earlier
    latest_start = np.maximum.accumulate(np.where(inner, places, 0), axis=1)
    return PackedRows(
        tokens,
        labels,
        (places - latest_start).astype(np.int32),
        np.cumsum(inner, axis=1, dtype=np.int32),
    )


def pad_rows(rows: PackedRows, count: int, token: int) -> PackedRows:
    """`rows` with rows of padding behind them, `count` in all: `token` everywhere, nothing to predict."""
    missing = count - rows.tokens.shape[0]
    shape = (missing, rows.tokens.shape[1])
    return PackedRows(
        np.concatenate([rows.tokens, np.full(shape, token, dtype=np.int64)]),
        np.concatenate([rows.labels, np.full(shape, IGNORED_LABEL, dtype=np.int64)]),
        np.concatenate([rows.positions, np.zeros(shape, dtype=np.int32)]),
        np.concatenate([rows.document_ids, np.full(shape, PADDING_DOCUMENT, dtype=np.int32)]),
    )
