"""Rows from token order to expert order and back, at memory speed.

    permute   out[r] = x[order[r] // K]                       zeros past the last offset
    combine   out[t] = Σ_j y[inverse[t·K + j]], j = 0 … K-1   rows past the last offset are not read

Sums are in fp32, in slot order, without atomics: the same bits every time, and the same as the reference.

Legend: T tokens, D width, K top-k, R = T·K rows, E experts.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moegraph.kernels.config import Config
from moegraph.kernels.launch import Launch

_PERMUTE = Config(block_m=4, block_n=1024, num_warps=4)
_COMBINE = Config(block_m=1, block_n=512, num_warps=4)


@triton.jit
def permute_kernel(
    x_ptr,
    order_ptr,
    offsets_ptr,
    out_ptr,
    num_rows,
    K: tl.constexpr,
    E: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """BLOCK_M rows per program, BLOCK_N columns at a time."""
    r = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = r < tl.load(offsets_ptr + E - 1)
    slot = tl.load(order_ptr + r, mask=exists, other=0)
    source = (slot // K).to(tl.int64)[:, None] * D
    target = r.to(tl.int64)[:, None] * D
    for d in range(0, D, BLOCK_N):
        c = d + tl.arange(0, BLOCK_N)[None, :]
        value = tl.load(x_ptr + source + c, mask=exists[:, None] & (c < D), other=0.0)
        tl.store(out_ptr + target + c, value, mask=(r < num_rows)[:, None] & (c < D))


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
    """One token and BLOCK_N columns per program."""
    t = tl.program_id(0)
    end = tl.load(offsets_ptr + E - 1)
    c = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_N,), tl.float32)
    for j in tl.static_range(K):
        row = tl.load(inverse_ptr + t * K + j)
        value = tl.load(y_ptr + row.to(tl.int64) * D + c, mask=(c < D) & (row < end), other=0.0)
        acc += value.to(tl.float32)
    tl.store(out_ptr + t.to(tl.int64) * D + c, acc.to(out_ptr.dtype.element_ty), mask=c < D)


def permute_launch(x: Tensor, order: Tensor, offsets: Tensor, out: Tensor, top_k: int) -> Launch:
    """The launch that writes `out` [R, D]."""
    c, width = _PERMUTE, x.shape[1]
    arguments = {"x_ptr": x, "order_ptr": order, "offsets_ptr": offsets, "out_ptr": out, "num_rows": order.shape[0]}
    block_n = min(c.block_n, triton.next_power_of_2(width))
    constants = {"K": top_k, "E": offsets.shape[0], "D": width, "BLOCK_M": c.block_m, "BLOCK_N": block_n}
    return Launch(permute_kernel, (triton.cdiv(order.shape[0], c.block_m),), arguments, constants, c)


def permute(x: Tensor, order: Tensor, offsets: Tensor, top_k: int) -> Tensor:
    """x [T, D], order [R] int32 → rows [R, D]."""
    out = x.new_empty(order.shape[0], x.shape[1])
    if out.numel():
        permute_launch(x, order, offsets, out, top_k).run()
    return out


def combine_launch(y: Tensor, inverse: Tensor, offsets: Tensor, out: Tensor, top_k: int) -> Launch:
    """The launch that writes `out` [T, D]."""
    c, width = _COMBINE, y.shape[1]
    block_n = min(c.block_n, triton.next_power_of_2(width))
    arguments = {"y_ptr": y, "inverse_ptr": inverse, "offsets_ptr": offsets, "out_ptr": out}
    constants = {"K": top_k, "E": offsets.shape[0], "D": width, "BLOCK_N": block_n}
    return Launch(combine_kernel, (out.shape[0], triton.cdiv(width, block_n)), arguments, constants, c)


def combine(y: Tensor, inverse: Tensor, offsets: Tensor, top_k: int) -> Tensor:
    """y [R, D], inverse [R] int32 → [T, D]."""
    out = y.new_empty(inverse.shape[0] // top_k, y.shape[1])
    if out.numel():
        combine_launch(y, inverse, offsets, out, top_k).run()
    return out
