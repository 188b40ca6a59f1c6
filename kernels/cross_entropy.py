"""Cross entropy of each row of logits and its gradient, reading the logits once each.

    lse[t] = log Σ_v exp x[t, v]      loss[t] = lse[t] - x[t, label[t]], 0 where the label is -100
    dx[t, v] = exp(x[t, v] - lse[t]) · (g_loss[t] + g_lse[t]) - [v = label[t]] · g_loss[t]

g_loss counts as zero where the label is -100. A label outside 0 … V-1 gives NaN, in the loss and in its row of dx.
Everything is added in fp32. Rows of any size: a maximum and a sum relative to it are carried over blocks of columns.

Legend: T tokens, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moegraph.kernels.config import Config
from moegraph.kernels.launch import Launch

_FORWARD = Config(block_n=4096, num_warps=8)
_BACKWARD = Config(block_n=4096, num_warps=8)


@triton.jit
def cross_entropy_kernel(
    logits_ptr,
    labels_ptr,
    loss_ptr,
    lse_ptr,
    stride,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One row per program."""
    t = tl.program_id(0)
    row = logits_ptr + t.to(tl.int64) * stride
    v = tl.arange(0, BLOCK_V)
    largest = -float("inf")
    total = 0.0
    for first in range(0, V, BLOCK_V):
        x = tl.load(row + first + v, mask=first + v < V, other=-float("inf")).to(tl.float32)
        now = tl.maximum(largest, tl.max(x, 0))
        shift = tl.where(tl.abs(now) == float("inf"), 0.0, now)
        before = tl.where(tl.abs(largest) == float("inf"), 0.0, largest)
        carried = tl.where(total == 0.0, 0.0, total * tl.exp(before - shift))  # an empty sum may stay one
        total = carried + tl.sum(tl.exp(x - shift), 0)
        largest = now
    lse = tl.where(tl.abs(largest) == float("inf"), 0.0, largest) + tl.log(total)
    label = tl.load(labels_ptr + t)
    known = (label >= 0) & (label < V)
    target = tl.load(row + label, mask=known, other=float("nan")).to(tl.float32)
    tl.store(lse_ptr + t, lse)
    tl.store(loss_ptr + t, tl.where(label == -100, 0.0, lse - target))


@triton.jit
def cross_entropy_backward_kernel(
    grad_loss_ptr,
    grad_lse_ptr,
    logits_ptr,
    labels_ptr,
    lse_ptr,
    out_ptr,
    stride,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    LOSS: tl.constexpr,
    LSE: tl.constexpr,
):
    """BLOCK_V columns of one row per program."""
    t = tl.program_id(0)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    label = tl.load(labels_ptr + t)
    at_label = 0.0
    factor = 0.0
    if LOSS:
        known = (label >= 0) & (label < V)
        at_label = tl.where(label == -100, 0.0, tl.load(grad_loss_ptr + t).to(tl.float32))
        at_label = tl.where(known | (label == -100), at_label, float("nan"))
        factor = at_label
    if LSE:
        factor += tl.load(grad_lse_ptr + t).to(tl.float32)
    x = tl.load(logits_ptr + t.to(tl.int64) * stride + v, mask=v < V, other=0.0).to(tl.float32)
    grad = tl.exp(x - tl.load(lse_ptr + t)) * factor
    grad = tl.where(v == label, grad - at_label, grad)
    tl.store(out_ptr + t.to(tl.int64) * V + v, grad.to(out_ptr.dtype.element_ty), mask=v < V)


def cross_entropy_launch(logits: Tensor, labels: Tensor, loss: Tensor, lse: Tensor) -> Launch:
    """The launch that writes `loss` and `lse` [T] fp32."""
    rows, width = logits.shape
    c = _FORWARD
    arguments = {
        "logits_ptr": logits,
        "labels_ptr": labels,
        "loss_ptr": loss,
        "lse_ptr": lse,
        "stride": logits.stride(0),
    }
    constants = {"V": width, "BLOCK_V": min(c.block_n, triton.next_power_of_2(width))}
    return Launch(cross_entropy_kernel, (rows,), arguments, constants, c)


def cross_entropy_backward_launch(
    grad_loss: Tensor | None, grad_lse: Tensor | None, logits: Tensor, labels: Tensor, lse: Tensor, out: Tensor
) -> Launch:
    """The launch that writes `out` [T, V], contiguous."""
    rows, width = logits.shape
    c = _BACKWARD
    block = min(c.block_n, triton.next_power_of_2(width))
    arguments = {
        "grad_loss_ptr": lse if grad_loss is None else grad_loss,
        "grad_lse_ptr": lse if grad_lse is None else grad_lse,
        "logits_ptr": logits,
        "labels_ptr": labels,
        "lse_ptr": lse,
        "out_ptr": out,
        "stride": logits.stride(0),
    }
    constants = {"V": width, "BLOCK_V": block, "LOSS": grad_loss is not None, "LSE": grad_lse is not None}
    return Launch(cross_entropy_backward_kernel, (rows, triton.cdiv(width, block)), arguments, constants, c)


def _rows(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()


def cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """logits [T, V] bf16, fp16 or fp32, labels [T] int64 → (loss [T], lse [T]) fp32."""
    loss, lse = (logits.new_empty(logits.shape[0], dtype=torch.float32) for _ in range(2))
    if logits.numel():
        cross_entropy_launch(_rows(logits), labels.contiguous(), loss, lse).run()
    return loss, lse


def cross_entropy_backward(
    grad_loss: Tensor | None, grad_lse: Tensor | None, logits: Tensor, labels: Tensor, lse: Tensor
) -> Tensor:
    """The gradient of both for logits, [T, V] in their dtype; grad_loss and grad_lse [T], one of them may be None."""
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if out.numel():
        by_loss = None if grad_loss is None else grad_loss.contiguous()
        by_lse = None if grad_lse is None else grad_lse.contiguous()
        cross_entropy_backward_launch(by_loss, by_lse, _rows(logits), labels.contiguous(), lse, out).run()
    return out
