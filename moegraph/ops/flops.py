"""Floating-point operations of matrix products, from shapes alone.

Convention: a multiply and an add are two operations; only matrix products count (norms, pointwise work, routing and
softmax are left out); backward is twice the forward, which the caller adds; nothing is counted for recomputation.
Attention counts the scores that the mask keeps: a causal query at position i sees i + 1 keys, or `window` of them.
Documents are not known from shapes, so they count as one. `grouped_mm` counts its R rows once, whatever the number of
experts: experts that a token does not visit cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moegraph.ops.attention import attention
from moegraph.ops.expert_ffn import expert_ffn
from moegraph.ops.grouped_mm import grouped_mm
from moegraph.ops.linear import linear, router_logits


def visible_keys(seq_len: int, window: int | None) -> int:
    """How many (query, key) pairs a causal mask over seq_len positions keeps, each query seeing at most `window`."""
    width = seq_len if window is None else min(window, seq_len)
    return width * (width + 1) // 2 + (seq_len - width) * width


def flops(target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> int:
    """Forward operations of one layer-graph node; zero for callables without a matrix product.

    args are the node's positional arguments as anything with a `.shape` (fake or real tensors) where the callable
    takes tensors; kwargs its keyword arguments.
    """
    kwargs = kwargs or {}
    if target is linear or target is router_logits:
        tokens, width = args[0].shape
        return int(2 * tokens * width * args[1].shape[0])
    if target is grouped_mm:
        rows, width = args[0].shape
        return int(2 * rows * width * args[1].shape[1])
    if target is expert_ffn:
        rows, two_f, width = args[1].shape[0], args[5].shape[1], args[0].shape[1]
        return int(2 * rows * width * two_f + 2 * rows * (two_f // 2) * width)
    if target is attention:
        sequences, seq_len, heads, width = args[0].shape
        pairs = visible_keys(seq_len, kwargs.get("window"))
        return int(2 * 2 * sequences * heads * width * pairs)
    return 0
