"""Rows from token order to expert order in 8 bits: each token's row is read and quantised once and written K times.

    mx      data [R, D], scales [R, D/32] or swizzled [B · 128, 4 · ⌈D/128⌉], as `mx_quantize` has them
    fp8     data [R, D], scales [R], as `fp8_quantize` has them
    blocks  data [R, D], scales [D/128, R], as `fp8_quantize_blocks` has them

The bits are those of `permute` and then the quantiser, because every row is quantised by itself. Rows past the last
offset have data 0, and scale 0 (MX) or 1 (FP8). Where a row's swizzled scales lie follows from the offsets alone: as
much further back as the experts before its own are padded by.

Legend: T tokens, D width, K top-k, R = T·K rows, E experts, B = ⌈R/128⌉ + E tiles of 128 rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moegraph.kernels import fp8_quantize, mx_quantize
from moegraph.kernels.config import Config
from moegraph.kernels.e4m3 import amax_bits, on_hardware, quantized
from moegraph.kernels.launch import Launch
from moegraph.kernels.mx_scales import padded_places

_WIDTH = 2048  # columns per program of `mx` and `blocks`, not measured
_WIDEST = 8192  # of `fp8` at a time; longer rows are read twice
_MX = Config(num_warps=4)  # and of `blocks`
_FP8 = Config(num_warps=4)
_LONG = Config(num_warps=8)


@triton.jit
def mx_permute_quantize_kernel(
    x_ptr,
    inverse_ptr,
    offsets_ptr,
    data_ptr,
    scale_ptr,
    K: tl.constexpr,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    D: tl.constexpr,
    SWIZZLED: tl.constexpr,
    HARDWARE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One token and BLOCK_N columns per program. Swizzled scales are zeros before."""
    HIGH: tl.constexpr = (D + 127) // 128
    GROUPS: tl.constexpr = BLOCK_N // 32
    num_n: tl.constexpr = (D + BLOCK_N - 1) // BLOCK_N
    t = tl.program_id(0) // num_n
    n = tl.program_id(0) % num_n
    c = n * BLOCK_N + tl.arange(0, BLOCK_N)
    g = n * GROUPS + tl.arange(0, GROUPS)
    x = tl.load(x_ptr + t.to(tl.int64) * D + c, mask=c < D, other=0.0).to(tl.float32)
    blocks = tl.reshape(x, (GROUPS, 32))
    byte, factor = mx_quantize.scale_and_factor(amax_bits(blocks, 1, HARDWARE))
    data = tl.reshape(quantized(blocks, factor[:, None], HARDWARE), (BLOCK_N,))
    zero = tl.zeros_like(data)
    end = tl.load(offsets_ptr + E - 1)
    for j in tl.static_range(K):
        row = tl.load(inverse_ptr + t * K + j)
        tl.store(data_ptr + row.to(tl.int64) * D + c, tl.where(row < end, data, zero), mask=c < D)
        if SWIZZLED:
            place = padded_places(row + tl.arange(0, 1), offsets_ptr, E, E_PAD)
            i = place % 128
            block = (place // 128).to(tl.int64) * HIGH + g // 4
            to = block * 512 + i % 32 * 16 + i // 32 * 4 + g % 4
            tl.store(scale_ptr + to, byte.to(tl.uint8), mask=(g < D // 32) & (row < end))
        else:
            kept = tl.where(row < end, byte, 0).to(tl.uint8)
            tl.store(scale_ptr + row.to(tl.int64) * (D // 32) + g, kept, mask=g < D // 32)


@triton.jit
def fp8_permute_quantize_kernel(
    x_ptr,
    inverse_ptr,
    offsets_ptr,
    data_ptr,
    scale_ptr,
    K: tl.constexpr,
    E: tl.constexpr,
    D: tl.constexpr,
    HARDWARE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One token per program, BLOCK_N columns at a time: its scale needs the whole row."""
    t = tl.program_id(0)
    c = tl.arange(0, BLOCK_N)[None, :]
    at = x_ptr + t.to(tl.int64) * D + c
    x = tl.load(at, mask=c < D, other=0.0).to(tl.float32)
    amax = amax_bits(x, 1, HARDWARE)
    for first in range(BLOCK_N, D, BLOCK_N):
        more = tl.load(at + first, mask=c + first < D, other=0.0).to(tl.float32)
        amax = tl.maximum(amax, amax_bits(more, 1, HARDWARE))
    scale, factor = fp8_quantize.scale_and_factor(amax)
    end = tl.load(offsets_ptr + E - 1)
    one = tl.arange(0, 1)
    for j in tl.static_range(K):
        row = tl.load(inverse_ptr + t * K + j)
        tl.store(scale_ptr + row + one, tl.where(row < end, scale, 1.0))
    for first in range(0, D, BLOCK_N):
        if first > 0:
            x = tl.load(at + first, mask=c + first < D, other=0.0).to(tl.float32)
        data = quantized(x, factor[:, None], HARDWARE)
        for j in tl.static_range(K):
            row = tl.load(inverse_ptr + t * K + j)
            kept = tl.where(row < end, data, tl.zeros_like(data))
            tl.store(data_ptr + row.to(tl.int64) * D + c + first, kept, mask=c + first < D)


@triton.jit
def blocks_permute_quantize_kernel(
    x_ptr,
    inverse_ptr,
    offsets_ptr,
    data_ptr,
    scale_ptr,
    num_rows,
    K: tl.constexpr,
    E: tl.constexpr,
    D: tl.constexpr,
    HARDWARE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One token and BLOCK_N columns per program, a scale for 128 of them."""
    GROUPS: tl.constexpr = BLOCK_N // 128
    num_n: tl.constexpr = (D + BLOCK_N - 1) // BLOCK_N
    t = tl.program_id(0) // num_n
    n = tl.program_id(0) % num_n
    c = n * BLOCK_N + tl.arange(0, BLOCK_N)
    g = n * GROUPS + tl.arange(0, GROUPS)
    x = tl.load(x_ptr + t.to(tl.int64) * D + c, mask=c < D, other=0.0).to(tl.float32)
    blocks = tl.reshape(x, (GROUPS, 128))
    scale, factor = fp8_quantize.scale_and_factor(amax_bits(blocks, 1, HARDWARE))
    data = tl.reshape(quantized(blocks, factor[:, None], HARDWARE), (BLOCK_N,))
    zero = tl.zeros_like(data)
    end = tl.load(offsets_ptr + E - 1)
    for j in tl.static_range(K):
        row = tl.load(inverse_ptr + t * K + j)
        tl.store(data_ptr + row.to(tl.int64) * D + c, tl.where(row < end, data, zero), mask=c < D)
        tl.store(scale_ptr + g.to(tl.int64) * num_rows + row, tl.where(row < end, scale, 1.0), mask=g < D // 128)


def mx_permute_quantize_launch(
    x: Tensor, inverse: Tensor, offsets: Tensor, data: Tensor, scale: Tensor, top_k: int, *, swizzled: bool
) -> Launch:
    """The launch that writes `data` [R, D] and `scale`: swizzled, only of rows that exist, and the rest is zero
    already."""
    (tokens, d), experts = x.shape, offsets.shape[0]
    block_n = min(_WIDTH, triton.next_power_of_2(d))
    arguments = {
        "x_ptr": x,
        "inverse_ptr": inverse,
        "offsets_ptr": offsets,
        "data_ptr": data.view(torch.uint8),
        "scale_ptr": scale,
    }
    constants = {
        "K": top_k,
        "E": experts,
        "E_PAD": triton.next_power_of_2(experts),
        "D": d,
        "SWIZZLED": swizzled,
        "HARDWARE": on_hardware(),
        "BLOCK_N": block_n,
    }
    return Launch(mx_permute_quantize_kernel, (tokens * triton.cdiv(d, block_n),), arguments, constants, _MX)


def mx_permute_quantize(
    x: Tensor, inverse: Tensor, offsets: Tensor, top_k: int, *, swizzled: bool
) -> tuple[Tensor, Tensor]:
    """x [T, D] contiguous, D a multiple of 32, inverse [R] int32, offsets [E] int32 → (data [R, D], scale)."""
    rows, (_, d) = inverse.shape[0], x.shape
    if swizzled:
        data, scale = mx_quantize.empty_swizzled(x, rows, d, offsets.shape[0])
    else:
        data, scale = x.new_empty(rows, d, dtype=torch.float8_e4m3fn), x.new_empty(rows, d // 32, dtype=torch.uint8)
    if data.numel():
        mx_permute_quantize_launch(x, inverse, offsets, data, scale, top_k, swizzled=swizzled).run()
    return data, scale


def fp8_permute_quantize_launch(
    x: Tensor, inverse: Tensor, offsets: Tensor, data: Tensor, scale: Tensor, top_k: int
) -> Launch:
    """The launch that writes `data` [R, D] and `scale` [R]."""
    tokens, d = x.shape
    block_n = min(_WIDEST, triton.next_power_of_2(d))
    arguments = {
        "x_ptr": x,
        "inverse_ptr": inverse,
        "offsets_ptr": offsets,
        "data_ptr": data.view(torch.uint8),
        "scale_ptr": scale,
    }
    constants = {"K": top_k, "E": offsets.shape[0], "D": d, "HARDWARE": on_hardware(), "BLOCK_N": block_n}
    config = _FP8 if block_n <= 4096 else _LONG
    return Launch(fp8_permute_quantize_kernel, (tokens,), arguments, constants, config)


def fp8_permute_quantize(x: Tensor, inverse: Tensor, offsets: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """x [T, D] contiguous, inverse [R] int32, offsets [E] int32 → (data [R, D], scale [R] fp32)."""
    rows, (_, d) = inverse.shape[0], x.shape
    data = x.new_empty(rows, d, dtype=torch.float8_e4m3fn)
    scale = x.new_empty(rows, dtype=torch.float32)
    if data.numel():
        fp8_permute_quantize_launch(x, inverse, offsets, data, scale, top_k).run()
    elif rows:
        scale.fill_(1.0)
    return data, scale


def blocks_permute_quantize_launch(
    x: Tensor, inverse: Tensor, offsets: Tensor, data: Tensor, scale: Tensor, top_k: int
) -> Launch:
    """The launch that writes `data` [R, D] and `scale` [D/128, R]."""
    tokens, d = x.shape
    block_n = max(min(_WIDTH, triton.next_power_of_2(d)), 128)
    arguments = {
        "x_ptr": x,
        "inverse_ptr": inverse,
        "offsets_ptr": offsets,
        "data_ptr": data.view(torch.uint8),
        "scale_ptr": scale,
        "num_rows": inverse.shape[0],
    }
    constants = {"K": top_k, "E": offsets.shape[0], "D": d, "HARDWARE": on_hardware(), "BLOCK_N": block_n}
    grid = (tokens * triton.cdiv(d, block_n),)
    return Launch(blocks_permute_quantize_kernel, grid, arguments, constants, _MX)


def blocks_permute_quantize(x: Tensor, inverse: Tensor, offsets: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """x [T, D] contiguous, D a multiple of 128, inverse [R] int32, offsets [E] int32 → (data [R, D], scale [D/128, R]
    fp32)."""
    rows, (_, d) = inverse.shape[0], x.shape
    data = x.new_empty(rows, d, dtype=torch.float8_e4m3fn)
    scale = x.new_empty(d // 128, rows, dtype=torch.float32)
    if data.numel():
        blocks_permute_quantize_launch(x, inverse, offsets, data, scale, top_k).run()
    return data, scale
