"""Rows from token order to expert order and back, at memory speed.

    permute   out[inverse[t·K + j]] = x[t]                    zeros past the last offset
    combine   out[t] = Σ_j y[inverse[t·K + j]], j = 0 … K-1   rows past the last offset are not read

and the same for one number per choice: the router's weights, and back their gradients.

Sums are in fp32, in slot order, without atomics: the same bits every time, and the same as the reference.

Legend: T tokens, D width, K top-k, R = T·K rows, E experts.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moegraph.kernels.config import Config
from moegraph.kernels.launch import Launch

_WIDTH = 2048  # columns at a time; on H200 any width from 256 to 4096 and 1 to 8 warps gives the same time
_CONFIG = Config(num_warps=4)


@triton.jit
def permute_kernel(
    x_ptr, inverse_ptr, offsets_ptr, out_ptr, K: tl.constexpr, E: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr
):
    """One token per program: its row is read once and written K times."""
    t = tl.program_id(0)
    end = tl.load(offsets_ptr + E - 1)
    for d in range(0, D, BLOCK_N):
        c = d + tl.arange(0, BLOCK_N)
        value = tl.load(x_ptr + t.to(tl.int64) * D + c, mask=c < D, other=0.0)
        zero = tl.zeros_like(value)
        for j in tl.static_range(K):
            row = tl.load(inverse_ptr + t * K + j)
            tl.store(out_ptr + row.to(tl.int64) * D + c, tl.where(row < end, value, zero), mask=c < D)


@triton.jit
def combine_kernel(
    y_ptr,
    inverse_ptr,
    offsets_ptr,
    out_ptr,
    K: tl.constexpr,
    E: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One token and BLOCK_N columns per program; neighbours in the grid read neighbours in memory."""
    num_n: tl.constexpr = (D + BLOCK_N - 1) // BLOCK_N
    t = tl.program_id(0) // num_n
    c = tl.program_id(0) % num_n * BLOCK_N + tl.arange(0, BLOCK_N)
    end = tl.load(offsets_ptr + E - 1)
    acc = tl.zeros((BLOCK_N,), tl.float32)
    for j in tl.static_range(K):
        row = tl.load(inverse_ptr + t * K + j)
        value = tl.load(y_ptr + row.to(tl.int64) * D + c, mask=(c < D) & (row < end), other=0.0)
        acc += value.to(tl.float32)
    tl.store(out_ptr + t.to(tl.int64) * D + c, acc.to(out_ptr.dtype.element_ty), mask=c < D)


@triton.jit
def move_weights_kernel(
    from_ptr, index_ptr, offsets_ptr, out_ptr, num_rows, E: tl.constexpr, BACK: tl.constexpr, BLOCK: tl.constexpr
):
    """out[i] = from[index[i]], BLOCK at a time; zero where the row, which is i or (BACK) index[i], does not exist."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    end = tl.load(offsets_ptr + E - 1)
    index = tl.load(index_ptr + i, mask=i < num_rows, other=0)
    exists = (index if BACK else i) < end
    value = tl.load(from_ptr + index, mask=exists & (i < num_rows), other=0.0)
    tl.store(out_ptr + i, value, mask=i < num_rows)


def _columns(width: int) -> int:
    return min(_WIDTH, int(triton.next_power_of_2(width)))


def permute_launch(x: Tensor, inverse: Tensor, offsets: Tensor, out: Tensor, top_k: int) -> Launch:
    """The launch that writes `out` [R, D]."""
    arguments = {"x_ptr": x, "inverse_ptr": inverse, "offsets_ptr": offsets, "out_ptr": out}
    constants = {"K": top_k, "E": offsets.shape[0], "D": x.shape[1], "BLOCK_N": _columns(x.shape[1])}
    return Launch(permute_kernel, (x.shape[0],), arguments, constants, _CONFIG)


def permute(x: Tensor, inverse: Tensor, offsets: Tensor, top_k: int) -> Tensor:
    """x [T, D], inverse [R] int32 → rows [R, D]."""
    out = x.new_empty(inverse.shape[0], x.shape[1])
    if out.numel():
        permute_launch(x, inverse, offsets, out, top_k).run()
    return out


def combine_launch(y: Tensor, inverse: Tensor, offsets: Tensor, out: Tensor, top_k: int) -> Launch:
    """The launch that writes `out` [T, D]."""
    width = y.shape[1]
    block_n = _columns(width)
    arguments = {"y_ptr": y, "inverse_ptr": inverse, "offsets_ptr": offsets, "out_ptr": out}
    constants = {"K": top_k, "E": offsets.shape[0], "D": width, "BLOCK_N": block_n}
    return Launch(combine_kernel, (out.shape[0] * triton.cdiv(width, block_n),), arguments, constants, _CONFIG)


def combine(y: Tensor, inverse: Tensor, offsets: Tensor, top_k: int) -> Tensor:
    """y [R, D], inverse [R] int32 → [T, D]."""
    out = y.new_empty(inverse.shape[0] // top_k, y.shape[1])
    if out.numel():
        combine_launch(y, inverse, offsets, out, top_k).run()
    return out


def move_weights_launch(values: Tensor, index: Tensor, offsets: Tensor, out: Tensor, *, back: bool = False) -> Launch:
    """The launch that writes `out` [R] from `values` [R] at `index` [R]."""
    tensors = {"from_ptr": values, "index_ptr": index, "offsets_ptr": offsets, "out_ptr": out}
    arguments = {**tensors, "num_rows": index.shape[0]}
    constants = {"E": offsets.shape[0], "BACK": back, "BLOCK": _WIDTH}
    return Launch(move_weights_kernel, (triton.cdiv(index.shape[0], _WIDTH),), arguments, constants, _CONFIG)


def gather_weights(weights: Tensor, order: Tensor, offsets: Tensor) -> Tensor:
    """weights [T, K], order [R] int32 → the weight of each row [R], zero past the last offset."""
    out = weights.new_empty(order.shape[0])
    if out.numel():
        move_weights_launch(weights, order, offsets, out).run()
    return out


def gather_weights_backward(grad: Tensor, inverse: Tensor, offsets: Tensor, top_k: int) -> Tensor:
    """grad [R], inverse [R] int32 → the gradient of each choice's weight [T, K], zero where its row does not exist."""
    out = grad.new_empty(inverse.shape[0] // top_k, top_k)
    if out.numel():
        move_weights_launch(grad, inverse, offsets, out, back=True).run()
    return out
