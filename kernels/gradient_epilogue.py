"""The epilogue of a gradient through the down projection: that of the activation and of the router weight.

With the accumulator da [BLOCK_M, BLOCK_N], the pre-activation z and the router weight s of a row it writes dz and
s · activation, and returns ds, as `dgrad_swiglu` says. It works on PARTS slices of the tile, so that it fits in
registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moegraph.kernels.activation import gated_slopes
from moegraph.kernels.launch import load_half, store_half, store_rows


@triton.jit
def gradients_of(
    acc,
    s,
    gate,
    up,
    col,
    rows,
    tensors,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """The epilogue of COLS columns of which gate and up are given, fp32; returns dz of both as stored, and the columns'
    part of ds [ROWS]."""
    first, last = rows
    _, dz_desc, act_desc = tensors
    act, by_gate, by_up = gated_slopes(gate, up, CLAMPED, ALPHA, LIMIT)
    ds = tl.sum(acc * act, 1)
    store_rows(act_desc, first, last, col, (act * s).to(act_desc.dtype), ROWS, COLS)
    da = acc * s
    by_up = (da * by_up).to(dz_desc.dtype)
    store_half(dz_desc, first, last, 1, col, by_up, ROWS, COLS)
    by_gate = (da * by_gate).to(dz_desc.dtype)
    store_half(dz_desc, first, last, 0, col, by_gate, ROWS, COLS)
    return by_gate, by_up, ds


@triton.jit
def gradients(
    acc,
    s,
    col,
    rows,
    tensors,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """`gradients_of` the pre-activation in tensors[0]."""
    first, last = rows
    gate = load_half(tensors[0], first, last, 0, col, ROWS, COLS).to(tl.float32)
    up = load_half(tensors[0], first, last, 1, col, ROWS, COLS).to(tl.float32)
    return gradients_of(acc, s, gate, up, col, rows, tensors, ROWS, COLS, CLAMPED, ALPHA, LIMIT)


@triton.jit
def _slice(
    acc,
    s,
    col,
    rows,
    tensors,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """The epilogue of COLS columns; returns their part of ds [ROWS]."""
    _, _, ds = gradients(acc, s, col, rows, tensors, ROWS, COLS, CLAMPED, ALPHA, LIMIT)
    return ds


@triton.jit
def gradient_epilogue(
    acc,
    s,
    col,
    rows,
    tensors,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    PARTS: tl.constexpr,
    CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """acc [ROWS, COLS] fp32, s [ROWS, 1] fp32; rows (first, last), tensors (z, dz, activation), columns from
    `col` → ds [ROWS] of these columns. PARTS is 1, 2 or 4."""
    PART: tl.constexpr = COLS // PARTS
    if PARTS == 1:
        ds = _slice(acc, s, col, rows, tensors, ROWS, PART, CLAMPED, ALPHA, LIMIT)
    elif PARTS == 2:
        a0, a1 = tl.split(acc.reshape(ROWS, 2, PART).permute(0, 2, 1))
        ds = _slice(a0, s, col, rows, tensors, ROWS, PART, CLAMPED, ALPHA, LIMIT)
        ds += _slice(a1, s, col + PART, rows, tensors, ROWS, PART, CLAMPED, ALPHA, LIMIT)
    else:
        left, right = tl.split(acc.reshape(ROWS, 2, COLS // 2).permute(0, 2, 1))
        a0, a1 = tl.split(left.reshape(ROWS, 2, PART).permute(0, 2, 1))
        ds = _slice(a0, s, col, rows, tensors, ROWS, PART, CLAMPED, ALPHA, LIMIT)
        ds += _slice(a1, s, col + PART, rows, tensors, ROWS, PART, CLAMPED, ALPHA, LIMIT)
        a2, a3 = tl.split(right.reshape(ROWS, 2, PART).permute(0, 2, 1))
        ds += _slice(a2, s, col + 2 * PART, rows, tensors, ROWS, PART, CLAMPED, ALPHA, LIMIT)
        ds += _slice(a3, s, col + 3 * PART, rows, tensors, ROWS, PART, CLAMPED, ALPHA, LIMIT)
    return ds
