"""Causal attention with grouped queries, document masks and sliding windows, as one operator and its gradient.

A query sees the keys at its own and earlier positions of its own document, at most `window` of them, itself included.
Document -1 is padding: it sees nothing and nobody sees it; its output and its gradients are zero. The same operator
runs everywhere; which implementation it uses is chosen by `attention_backend`, from shapes and dtypes only.

Legend: B sequences, S sequence length, H query heads, Hkv key/value heads, Dh head width.
"""

from typing import Any

import torch
from torch import Tensor

from moegraph.ops import attention_cuda as cuda
from moegraph.ops import attention_reference as reference
from moegraph.ops.precision import accumulate_dtype


def _backend(q: Tensor, document_ids: Tensor | None, window: int | None) -> str:
    if q.device.type != "cuda" or q.numel() == 0:
        return "reference"
    return cuda.attention_backend("cuda", q.dtype, q.shape[-1], documents=document_ids is not None, window=window)[0]


@torch.library.custom_op("moegraph::attention", mutates_args=())
def _attention(
    q: Tensor, k: Tensor, v: Tensor, document_ids: Tensor | None, window: int | None, scale: float
) -> tuple[Tensor, Tensor]:
    backend = _backend(q, document_ids, window)
    if backend == "reference":
        return reference.attention_forward(q, k, v, document_ids, window, scale)
    return cuda.attention_forward(backend, q, k, v, document_ids, window, scale)


@_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, document_ids: Tensor | None, window: int | None, scale: float
) -> tuple[Tensor, Tensor]:
    sequences, seq_len, heads, _width = q.shape
    lse = q.new_empty(sequences, heads, seq_len, dtype=accumulate_dtype(q.dtype))
    return q.new_empty(q.shape), lse


@torch.library.custom_op("moegraph::attention_backward", mutates_args=())
def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    document_ids: Tensor | None,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of `attention` for grad [B, S, H, Dh], from its inputs, `out` and `lse`."""
    backend = _backend(q, document_ids, window)
    if backend == "reference":
        return reference.attention_backward(grad, q, k, v, out, lse, document_ids, window, scale)
    return cuda.attention_backward(backend, grad, q, k, v, out, lse, document_ids, window, scale)


@attention_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    document_ids: Tensor | None,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, document_ids, ctx.window, ctx.scale = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, out, lse, document_ids)


def _backward(ctx: Any, grad: Tensor | None, _grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return None, None, None, None, None, None
    q, k, v, out, lse, document_ids = ctx.saved_tensors
    dq, dk, dv = attention_backward(grad, q, k, v, out, lse, document_ids, ctx.window, ctx.scale)
    return dq, dk, dv, None, None, None


_attention.register_autograd(_backward, setup_context=_setup)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    document_ids: Tensor | None = None,
    *,
    window: int | None = None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """softmax(scale · q kᵀ) v under the masks of this module.

    q [B, S, H, Dh], k and v [B, S, Hkv, Dh] with H a multiple of Hkv, document_ids [B, S] int32 (each document's tokens
    together within a row, -1 padding) → (out [B, S, H, Dh] in q's dtype, lse [B, H, S] float32, float64 for float64).
    lse is not differentiable, and 0 for a query that sees nothing.

    Raises ValueError for a window below 1, or heads that do not divide.
    """
    if window is not None and window < 1:
        raise ValueError(f"window {window} must be at least 1: a query always sees itself")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} query heads are not a multiple of {k.shape[2]} key/value heads")
    result: tuple[Tensor, Tensor] = _attention(q, k, v, document_ids, window, scale)
    return result
