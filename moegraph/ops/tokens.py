"""Small operators on tokens: the padding mask, a gated output, a scaled sum, runs of tokens. All functional aten."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def token_mask(document_ids: Tensor) -> Tensor:
    """document_ids [B, S] → [T] bool: true for tokens of a document, false for padding (id -1)."""
    return document_ids.reshape(-1) >= 0


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """x [T, D] · sigmoid(gate [T, 1]), in the dtype of x."""
    return x * torch.sigmoid(gate)


def scaled_sum(x: Tensor, factor: Tensor) -> Tensor:
    """Σ x · factor → 0-d, for x of any shape and a 0-d factor."""
    return x.sum() * factor


def split_tokens(x: Tensor, chunks: int) -> tuple[Tensor, ...]:
    """x [T, …] → `chunks` runs of neighbouring tokens, the first ones longer by one where T is not divisible."""
    length, longer = divmod(x.shape[0], chunks)
    return torch.split(x, [length + 1] * longer + [length] * (chunks - longer))  # its gradient is one concatenation


def join_tokens(parts: Sequence[Tensor]) -> Tensor:
    """Runs of tokens [T_c, …] → [Σ T_c, …], in order."""
    return torch.cat(list(parts))
