"""Epilogues that write a tile's results in MXFP8, as the next product reads them: data, and swizzled scales.

A tile has 128 rows of one expert, as many as a block of swizzled scales (mx_scales.py), so that tile i of the schedule
writes block row i. Swizzled scales are zeros before: those of rows that do not exist are not written. A pre-activation
that is saved in MXFP8 has plain scales. Blocks of 32 columns never cross a slice of the epilogue. The bits are those of
the quantising kernel on what the product would have stored in bf16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moegraph.kernels.activation import gated
from moegraph.kernels.e4m3 import amax_bits, quantized
from moegraph.kernels.gradient_epilogue import gradients, gradients_of
from moegraph.kernels.launch import store_half, store_rows
from moegraph.kernels.mx_dequantize import decoded_scale
from moegraph.kernels.mx_quantize import scale_and_factor
from moegraph.kernels.up_epilogue import activated, with_bias


@triton.jit
def quantized_tile(x, ROWS: tl.constexpr, COLS: tl.constexpr, HARDWARE: tl.constexpr):
    """x [ROWS, COLS] fp32 → its E4M3 bytes, and the bytes of its scales [ROWS, COLS / 32], int32."""
    blocks = tl.reshape(x, (ROWS, COLS // 32, 32))
    byte, factor = scale_and_factor(amax_bits(blocks, 2, HARDWARE))
    data = quantized(blocks, factor[:, :, None], HARDWARE)
    return tl.reshape(data, (ROWS, COLS)), byte


@triton.jit
def store_swizzled(
    scale_ptr,
    byte,
    tile,
    exist,
    group,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    ALL: tl.constexpr,
):
    """Writes scales [ROWS, GROUPS] of the first `exist` rows of a tile, to the groups from `group` on of COUNT that lie
    behind FIRST others; a row has ALL."""
    HIGH: tl.constexpr = (ALL + 3) // 4
    i = tl.arange(0, ROWS)
    inside = group + tl.arange(0, GROUPS)
    g = FIRST + inside
    column = (tile.to(tl.int64) * HIGH + g // 4) * 512 + g % 4
    to = column[None, :] + (i % 32 * 16 + i // 32 * 4)[:, None]
    tl.store(scale_ptr + to, byte.to(tl.uint8), mask=(inside < COUNT)[None, :] & (i < exist)[:, None])


@triton.jit
def _save_half(
    z_desc,
    scale_ptr,
    x,
    col,
    first,
    last,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    HALF: tl.constexpr,
    F: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """Writes one half of the pre-activation in MXFP8."""
    data, byte = quantized_tile(x, ROWS, COLS, HARDWARE)
    store_half(z_desc, first, last, HALF, col, data, ROWS, COLS)
    r = first + tl.arange(0, ROWS)
    g = col // 32 + tl.arange(0, COLS // 32)
    at = r.to(tl.int64)[:, None] * (F // 16) + HALF * (F // 32) + g[None, :]
    tl.store(scale_ptr + at, byte.to(tl.uint8), mask=(r < last)[:, None] & (g < F // 32)[None, :])


@triton.jit
def _restored_half(
    z_ptr,
    scale_ptr,
    col,
    first,
    last,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    HALF: tl.constexpr,
    F: tl.constexpr,
):
    """One half of a pre-activation in MXFP8, 32 columns of it, rounded to bf16, in fp32.

    By pointers: what a descriptor loads the compiler takes into registers in every layout that is asked for, and what
    is computed of it as well; they spill.
    """
    tl.static_assert(COLS == 32)
    r = first + tl.arange(0, ROWS)
    c = col + tl.arange(0, COLS)
    at = r.to(tl.int64)[:, None] * (2 * F) + HALF * F + c[None, :]
    data = tl.load(z_ptr + at, mask=(r < last)[:, None] & (c < F)[None, :], other=0)
    of_row = r.to(tl.int64) * (F // 16) + HALF * (F // 32) + col // 32
    scale = decoded_scale(tl.load(scale_ptr + of_row, mask=(r < last) & (col < F), other=127).to(tl.int32))
    return (data.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale[:, None]).to(tl.bfloat16).to(tl.float32)


@triton.jit
def _up_slice(
    gate,
    up,
    col,
    rows,
    tensors,
    tile,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    F: tl.constexpr,
    BIAS: tl.constexpr,
    CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    SAVED: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    first, last, _ = rows
    z_desc, z_scale_ptr, act_desc, scale_ptr = tensors
    if SAVED:
        gate, up = with_bias(gate, up, col, rows, COLS, F, BIAS)
        gate = gate.to(tl.bfloat16).to(tl.float32)
        _save_half(z_desc, z_scale_ptr, gate, col, first, last, ROWS, COLS, 0, F, HARDWARE)
        up = up.to(tl.bfloat16).to(tl.float32)
        _save_half(z_desc, z_scale_ptr, up, col, first, last, ROWS, COLS, 1, F, HARDWARE)
        act = gated(gate, up, CLAMPED, ALPHA, LIMIT)
    else:
        act = activated(gate, up, col, rows, (z_desc, act_desc), ROWS, COLS, F, BIAS, CLAMPED, ALPHA, LIMIT)
    data, byte = quantized_tile(act.to(tl.bfloat16).to(tl.float32), ROWS, COLS, HARDWARE)
    store_rows(act_desc, first, last, col, data, ROWS, COLS)
    store_swizzled(scale_ptr, byte, tile, last - first, col // 32, ROWS, COLS // 32, 0, F // 32, F // 32)


@triton.jit
def mx_up_epilogue(
    gate,
    up,
    col,
    rows,
    tensors,
    tile,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    PARTS: tl.constexpr,
    F: tl.constexpr,
    BIAS: tl.constexpr,
    CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    SAVED: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """`up_epilogue` with tensors (z, its scales, the activation, its scales): the activation in MXFP8, z in bf16 or
    (SAVED) in MXFP8."""
    PART: tl.constexpr = COLS // PARTS
    if PARTS == 1:
        _up_slice(gate, up, col, rows, tensors, tile, ROWS, PART, F, BIAS, CLAMPED, ALPHA, LIMIT, SAVED, HARDWARE)
    else:
        g0, g1 = tl.split(gate.reshape(ROWS, 2, PART).permute(0, 2, 1))
        u0, u1 = tl.split(up.reshape(ROWS, 2, PART).permute(0, 2, 1))
        _up_slice(g0, u0, col, rows, tensors, tile, ROWS, PART, F, BIAS, CLAMPED, ALPHA, LIMIT, SAVED, HARDWARE)
        _up_slice(g1, u1, col + PART, rows, tensors, tile, ROWS, PART, F, BIAS, CLAMPED, ALPHA, LIMIT, SAVED, HARDWARE)


@triton.jit
def _gradient_slice(
    acc,
    s,
    col,
    rows,
    tensors,
    quantized_tensors,
    tile,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    F: tl.constexpr,
    CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    SAVED: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    first, last = rows
    z_ptr, z_scale_ptr, data_desc, scale_ptr = quantized_tensors
    GROUPS: tl.constexpr = COLS // 32
    if SAVED:
        gate = _restored_half(z_ptr, z_scale_ptr, col, first, last, ROWS, COLS, 0, F)
        up = _restored_half(z_ptr, z_scale_ptr, col, first, last, ROWS, COLS, 1, F)
        by_gate, by_up, ds = gradients_of(acc, s, gate, up, col, rows, tensors, ROWS, COLS, CLAMPED, ALPHA, LIMIT)
    else:
        by_gate, by_up, ds = gradients(acc, s, col, rows, tensors, ROWS, COLS, CLAMPED, ALPHA, LIMIT)
    data, byte = quantized_tile(by_up.to(tl.float32), ROWS, COLS, HARDWARE)
    store_half(data_desc, first, last, 1, col, data, ROWS, COLS)
    store_swizzled(scale_ptr, byte, tile, last - first, col // 32, ROWS, GROUPS, F // 32, F // 32, F // 16)
    data, byte = quantized_tile(by_gate.to(tl.float32), ROWS, COLS, HARDWARE)
    store_half(data_desc, first, last, 0, col, data, ROWS, COLS)
    store_swizzled(scale_ptr, byte, tile, last - first, col // 32, ROWS, GROUPS, 0, F // 32, F // 16)
    return ds


@triton.jit
def mx_gradient_epilogue(
    acc,
    s,
    col,
    rows,
    tensors,
    quantized_tensors,
    tile,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    PARTS: tl.constexpr,
    F: tl.constexpr,
    CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    SAVED: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """`gradient_epilogue` that writes dz in MXFP8 too, to quantized_tensors (z, its scales, dz, its scales); z is in
    tensors and bf16, or (SAVED) there and in MXFP8."""
    if PARTS == 1:
        ds = _gradient_slice(
            acc, s, col, rows, tensors, quantized_tensors, tile, ROWS, COLS, F, CLAMPED, ALPHA, LIMIT, SAVED, HARDWARE
        )
    else:
        HALF: tl.constexpr = COLS // 2
        left, right = tl.split(acc.reshape(ROWS, 2, HALF).permute(0, 2, 1))
        ds = mx_gradient_epilogue(
            left, s, col, rows, tensors, quantized_tensors, tile,
            ROWS, HALF, PARTS // 2, F, CLAMPED, ALPHA, LIMIT, SAVED, HARDWARE,
        )  # fmt: skip
        ds += mx_gradient_epilogue(
            right, s, col + HALF, rows, tensors, quantized_tensors, tile,
            ROWS, HALF, PARTS // 2, F, CLAMPED, ALPHA, LIMIT, SAVED, HARDWARE,
        )  # fmt: skip
    return ds
