"""Token embedding with a deterministic weight gradient.

Legend: T tokens, V vocabulary, D model width.
"""

from typing import Any

import torch
from torch import Tensor

from moegraph.ops.precision import accumulate_dtype


@torch.library.custom_op("moegraph::embedding", mutates_args=())
def _embedding(ids: Tensor, weight: Tensor) -> Tensor:
    return weight.index_select(0, ids.reshape(-1))


@_embedding.register_fake
def _(ids: Tensor, weight: Tensor) -> Tensor:
    return weight.new_empty(ids.numel(), weight.shape[1])


@torch.library.custom_op("moegraph::embedding_wgrad", mutates_args=())
def embedding_wgrad(grad: Tensor, ids: Tensor, vocab_size: int) -> Tensor:
    """Σ over the tokens of each id of grad [T, D] → [V, D], accumulated in float32 (float64), without atomics."""
    wide = grad.contiguous().to(accumulate_dtype(grad.dtype))
    total = torch.ops.aten.embedding_dense_backward.default(wide, ids.reshape(-1), vocab_size, -1, False)
    return total.to(grad.dtype)  # type: ignore[no-any-return]


@embedding_wgrad.register_fake
def _(grad: Tensor, ids: Tensor, vocab_size: int) -> Tensor:
    return grad.new_empty(vocab_size, grad.shape[1])


@torch.library.custom_op("moegraph::embedding_wgrad_add", mutates_args=("into",))
def embedding_wgrad_add(into: Tensor, keep: Tensor, grad: Tensor, ids: Tensor, vocab_size: int) -> Tensor:
    """`embedding_wgrad` added to `into` [V, D] where `keep` [1] int32 is not 0, else written there. `keep` lives on the
    host, which knows it. On CUDA the sum is not rounded to the dtype of grad first, and what is added to are the rows
    that tokens have. Returns an empty tensor, by which a graph says that this has been done."""
    accumulate = bool(keep)
    if grad.is_cuda:
        from moegraph.kernels import embedding_grad

        embedding_grad.embedding_grad_into(grad, ids.reshape(-1), into, accumulate=accumulate)
    elif accumulate:
        into.add_(embedding_wgrad(grad, ids, vocab_size))
    else:
        into.copy_(embedding_wgrad(grad, ids, vocab_size))
    return into.new_empty(0)


@embedding_wgrad_add.register_fake
def _(into: Tensor, keep: Tensor, grad: Tensor, ids: Tensor, vocab_size: int) -> Tensor:
    return into.new_empty(0)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ids, weight = inputs
    ctx.save_for_backward(ids)
    ctx.vocab_size = weight.shape[0]


def _backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None]:
    (ids,) = ctx.saved_tensors
    return None, embedding_wgrad(grad, ids, ctx.vocab_size) if ctx.needs_input_grad[1] else None


_embedding.register_autograd(_backward, setup_context=_setup)


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """Rows of weight [V, D] for ids [T] int64 → [T, D].

    An id outside 0 … V-1 raises IndexError on CPU and trips a device assertion on CUDA; the loader refuses such data.
    """
    rows: Tensor = _embedding(ids, weight)
    return rows
