"""Cross entropy per token; no float32 copy of all logits ever exists.

On CUDA moegraph's Triton kernels read the logits once forward and once backward. Elsewhere, and for float64, it is
computed in row chunks.

Legend: T tokens, V vocabulary. A label of -100 is ignored: its loss and its gradient row are zero. Any other label
outside 0 … V-1 raises on CPU and gives NaN on CUDA; the loader refuses such data.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from moegraph.ops.precision import accumulate_dtype

IGNORED = -100


def _uses_kernels(logits: Tensor) -> bool:
    return logits.device.type == "cuda" and logits.dtype != torch.float64


def _chunks(logits: Tensor) -> Iterator[slice]:
    """Row ranges of about 1 MiB (in cache) on CPU and 256 MiB on a device, in float32."""
    elements = 2**18 if logits.device.type == "cpu" else 2**26
    rows = max(1, elements // max(1, logits.shape[1]))
    return (slice(start, start + rows) for start in range(0, logits.shape[0], rows))


@torch.library.custom_op("moegraph::cross_entropy", mutates_args=())
def _cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    if _uses_kernels(logits):
        from moegraph.kernels import cross_entropy as kernels

        return kernels.cross_entropy(logits, labels)
    wide = accumulate_dtype(logits.dtype)
    lse = torch.empty(logits.shape[0], dtype=wide, device=logits.device)
    for rows in _chunks(logits):
        torch.logsumexp(logits[rows].to(wide), dim=-1, out=lse[rows])
    counted = labels != IGNORED
    target = logits.gather(1, torch.where(counted, labels, 0)[:, None])[:, 0].to(wide)
    return torch.where(counted, lse - target, 0.0), lse


@_cross_entropy.register_fake
def _(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    wide = accumulate_dtype(logits.dtype)
    return logits.new_empty(logits.shape[0], dtype=wide), logits.new_empty(logits.shape[0], dtype=wide)


@torch.library.custom_op("moegraph::cross_entropy_backward", mutates_args=())
def cross_entropy_backward(
    grad_loss: Tensor | None, grad_lse: Tensor | None, logits: Tensor, labels: Tensor, lse: Tensor
) -> Tensor:
    """Gradient of (loss, lse) for logits [T, V]: softmax · (g_loss + g_lse) - onehot(label) · g_loss, in their dtype.

    grad_loss and grad_lse are [T] or None; g_loss counts as zero where the label is ignored.
    """
    if _uses_kernels(logits):
        from moegraph.kernels import cross_entropy as kernels

        return kernels.cross_entropy_backward(grad_loss, grad_lse, logits, labels, lse)
    counted = labels != IGNORED
    zero = torch.zeros_like(lse)
    at_label = zero if grad_loss is None else torch.where(counted, grad_loss, 0.0)
    factor = at_label if grad_lse is None else at_label + grad_lse
    target = torch.where(counted, labels, 0)[:, None]
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    for rows in _chunks(logits):
        same = logits.dtype == lse.dtype
        part = torch.sub(logits[rows], lse[rows, None], out=out[rows]) if same else logits[rows] - lse[rows, None]
        part.exp_().mul_(factor[rows, None])
        part.scatter_add_(1, target[rows], -at_label[rows, None])
        if not same:
            out[rows] = part
    return out


@cross_entropy_backward.register_fake
def _(grad_loss: Tensor | None, grad_lse: Tensor | None, logits: Tensor, labels: Tensor, lse: Tensor) -> Tensor:
    return logits.new_empty(logits.shape)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, output[1])


def _backward(ctx: Any, grad_loss: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, None]:
    if grad_loss is None and grad_lse is None:
        return None, None
    return cross_entropy_backward(grad_loss, grad_lse, *ctx.saved_tensors), None


_cross_entropy.register_autograd(_backward, setup_context=_setup)


def cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """logits [T, V], labels [T] int64 → (loss [T], lse [T]) in float32 (float64 for float64).

    loss = logsumexp(logits) - logits[label], zero where the label is -100; lse is the logsumexp of every row. Both are
    differentiable.
    """
    result: tuple[Tensor, Tensor] = _cross_entropy(logits, labels)
    return result
