"""The epilogue of an up projection: bias, pre-activation z and activation, from accumulators of gate and up columns.

It works on PARTS slices of the tile, so that registers and the shared memory that stores go through are halved, and the
next tile's loads have room. `a` is computed from z as stored.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moegraph.kernels.activation import gated
from moegraph.kernels.launch import store_half, store_rows


@triton.jit
def with_bias(gate, up, col, rows, COLS: tl.constexpr, F: tl.constexpr, BIAS: tl.constexpr):
    """Accumulators of columns from `col`, with the bias of the rows' expert where there is one."""
    _, _, bias_ptr = rows
    if BIAS:
        c = col + tl.arange(0, COLS)
        gate += tl.load(bias_ptr + c, mask=c < F, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias_ptr + F + c, mask=c < F, other=0.0).to(tl.float32)[None, :]
    return gate, up


@triton.jit
def activated(
    gate,
    up,
    col,
    rows,
    tensors,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    F: tl.constexpr,
    BIAS: tl.constexpr,
    CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Writes z; returns the activation in fp32."""
    first, last, _ = rows
    z_desc, _ = tensors
    gate, up = with_bias(gate, up, col, rows, COLS, F, BIAS)
    gate = gate.to(z_desc.dtype)
    up = up.to(z_desc.dtype)
    store_half(z_desc, first, last, 0, col, gate, ROWS, COLS)
    store_half(z_desc, first, last, 1, col, up, ROWS, COLS)
    return gated(gate.to(tl.float32), up.to(tl.float32), CLAMPED, ALPHA, LIMIT)


@triton.jit
def _slice(
    gate,
    up,
    col,
    rows,
    tensors,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    F: tl.constexpr,
    BIAS: tl.constexpr,
    CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """The epilogue of COLS columns of the activation."""
    first, last, _ = rows
    act = activated(gate, up, col, rows, tensors, ROWS, COLS, F, BIAS, CLAMPED, ALPHA, LIMIT)
    store_rows(tensors[1], first, last, col, act.to(tensors[1].dtype), ROWS, COLS)


@triton.jit
def up_epilogue(
    gate,
    up,
    col,
    rows,
    tensors,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    PARTS: tl.constexpr,
    F: tl.constexpr,
    BIAS: tl.constexpr,
    CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """gate and up [ROWS, COLS] fp32 of columns from `col`; rows (first, last, the expert's bias), tensors
    (z, activation). PARTS is 1 or 2."""
    PART: tl.constexpr = COLS // PARTS
    if PARTS == 1:
        _slice(gate, up, col, rows, tensors, ROWS, PART, F, BIAS, CLAMPED, ALPHA, LIMIT)
    else:
        g0, g1 = tl.split(gate.reshape(ROWS, 2, PART).permute(0, 2, 1))
        u0, u1 = tl.split(up.reshape(ROWS, 2, PART).permute(0, 2, 1))
        _slice(g0, u0, col, rows, tensors, ROWS, PART, F, BIAS, CLAMPED, ALPHA, LIMIT)
        _slice(g1, u1, col + PART, rows, tensors, ROWS, PART, F, BIAS, CLAMPED, ALPHA, LIMIT)


@triton.jit
def up_epilogue_fp8(
    gate,
    up,
    col,
    rows,
    tensors,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    F: tl.constexpr,
    BIAS: tl.constexpr,
    CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """`up_epilogue` that writes the activation in FP8, and returns the scales [ROWS] of its rows in these columns."""
    first, last, _ = rows
    act = activated(gate, up, col, rows, tensors, ROWS, COLS, F, BIAS, CLAMPED, ALPHA, LIMIT)
    largest = tl.max(tl.abs(act), 1)
    inverse = tl.minimum(448.0 / largest, 3.4028234e38)  # the largest fp32 for a block of zeros
    data = tl.clamp(act * inverse[:, None], -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    store_rows(tensors[1], first, last, col, data.to(tensors[1].dtype), ROWS, COLS)
    return tl.where(largest == 0, 1.0, largest / 448.0)
