"""What kernels that make rows write of them in 8 bits, chunk by chunk, and tensors to hold it.

    mx      E4M3 and swizzled scales (mx_scales.py), zeros before: those of rows that do not exist are not written
    fp8     E4M3 and a scale per row, which is known once the whole row is
    blocks  E4M3 and a scale per row and 128 columns [K/128, R]

The bits are those of the quantising kernels on what was stored in 16 bits.

Legend: R rows, K columns, E experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moegraph.kernels import fp8_quantize, mx_quantize
from moegraph.kernels.e4m3 import amax_bits, quantized

FORMATS = {"mx": 1, "fp8": 2, "blocks": 3}  # as kernels know them; 0 is none
MX, FP8, BLOCKS = (tl.constexpr(FORMATS[name]) for name in ("mx", "fp8", "blocks"))


@triton.jit
def store_mx(
    x,
    data_ptr,
    scale_ptr,
    r,
    place,
    first,
    inside,
    real,
    PART: tl.constexpr,
    F: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """x [ROWS, COLS] fp32, from column `first` on of part PART, F columns wide, of rows with K; the scales of rows that
    lie at `place`."""
    HIGH: tl.constexpr = (K + 127) // 128
    blocks = tl.reshape(x, (ROWS, COLS // 32, 32))
    byte, factor = mx_quantize.scale_and_factor(amax_bits(blocks, 2, HARDWARE))
    data = tl.reshape(quantized(blocks, factor[:, :, None], HARDWARE), (ROWS, COLS))
    c = PART * F + first + tl.arange(0, COLS)[None, :]
    tl.store(data_ptr + r.to(tl.int64)[:, None] * K + c, data, mask=inside)
    g = first // 32 + tl.arange(0, COLS // 32)
    column = PART * (F // 32) + g
    at = ((place // 128).to(tl.int64) * HIGH)[:, None] + (column // 4)[None, :]
    at = at * 512 + (place % 32 * 16 + place % 128 // 32 * 4)[:, None] + (column % 4)[None, :]
    tl.store(scale_ptr + at, byte.to(tl.uint8), mask=real[:, None] & (g < F // 32)[None, :])


@triton.jit
def store_blocks(
    x,
    data_ptr,
    scale_ptr,
    r,
    num_rows,
    first,
    inside,
    PART: tl.constexpr,
    F: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """The same with an fp32 scale per row and 128 columns."""
    blocks = tl.reshape(x, (ROWS, COLS // 128, 128))
    scale, factor = fp8_quantize.scale_and_factor(amax_bits(blocks, 2, HARDWARE))
    data = tl.reshape(quantized(blocks, factor[:, :, None], HARDWARE), (ROWS, COLS))
    c = PART * F + first + tl.arange(0, COLS)[None, :]
    tl.store(data_ptr + r.to(tl.int64)[:, None] * K + c, data, mask=inside)
    g = first // 128 + tl.arange(0, COLS // 128)
    at = (PART * (F // 128) + g).to(tl.int64)[None, :] * num_rows + r[:, None]
    tl.store(scale_ptr + at, scale, mask=(r < num_rows)[:, None] & (g < F // 128)[None, :])


def empty_rows(like: Tensor, rows: int, columns: int, num_experts: int, name: str) -> tuple[Tensor, Tensor]:
    """(data, scale) of `rows` rows in the format of that name; swizzled scales are zeros."""
    if name == "mx":
        return mx_quantize.empty_swizzled(like, rows, columns, num_experts)
    shape = (rows,) if name == "fp8" else (columns // 128, rows)
    data = like.new_empty(rows, columns, dtype=torch.float8_e4m3fn)
    return data, like.new_empty(shape, dtype=torch.float32)
