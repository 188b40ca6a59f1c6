"""FP8 with fp32 scales from bf16, fp16 or fp32: one scale per row, or per column of an expert's rows, transposed.

Formulas: `moegraph.ops.fp8_format`; the same bits. Tiles and padded rows: `moegraph.ops.mx_scales`.

    rows       data [.., K], scale [..]. A row that fits a program is read once, a longer one twice.
    columns_t  data [K, R'], scale [E, K]. First the amax of each expert's columns, by atomic maxima of integers, which
               are the same in any order; then, in a second read, data, transposed on the way.

Legend: R rows, R' = B · 128 padded rows, K columns, E experts, B tiles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moegraph.kernels.config import Config
from moegraph.kernels.e4m3 import E4M3_MAX, INFINITE, amax_bits, on_hardware, quantized
from moegraph.kernels.launch import Launch
from moegraph.kernels.tiles import Schedule, max_tiles, tile_schedule

LARGEST = tl.constexpr(3.4028234663852886e38)  # of fp32
_TILE = 128
_ELEMENTS = 4096  # per program of `rows`: so many rows that there are as many elements, or this much of a longer one
_WIDEST = 8192
_ROWS = Config(num_warps=4)
_LONG_ROWS = Config(num_warps=8)
_COLUMNS = Config(block_m=128, block_n=64, num_warps=4)


@triton.jit
def scale_and_factor(bits):
    """int32 bits of an amax → its scale and what is multiplied by, fp32; NaN for an amax that is not finite."""
    amax = tl.where(bits < INFINITE, bits, 0x7FC00000).to(tl.float32, bitcast=True)
    scale = tl.where(bits == 0, 1.0, tl.div_rn(amax, tl.zeros_like(amax) + E4M3_MAX))
    factor = tl.div_rn(tl.zeros_like(amax) + E4M3_MAX, tl.where(bits == 0, 1.0, amax))
    return scale, tl.where(factor > LARGEST, LARGEST, factor)


@triton.jit
def fp8_rows_kernel(
    x_ptr,
    offsets_ptr,
    data_ptr,
    scale_ptr,
    num_rows,
    K: tl.constexpr,
    E: tl.constexpr,
    HARDWARE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_M rows per program, BLOCK_K columns at a time. E = 0: all rows exist."""
    r = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = r < num_rows
    if E > 0:
        exists = exists & (r < tl.load(offsets_ptr + E - 1))
    at = r.to(tl.int64)[:, None] * K + tl.arange(0, BLOCK_K)[None, :]
    c = tl.arange(0, BLOCK_K)[None, :]
    x = tl.load(x_ptr + at, mask=exists[:, None] & (c < K), other=0.0).to(tl.float32)
    amax = amax_bits(x, 1, HARDWARE)
    for first in range(BLOCK_K, K, BLOCK_K):
        more = tl.load(x_ptr + at + first, mask=exists[:, None] & (c + first < K), other=0.0).to(tl.float32)
        amax = tl.maximum(amax, amax_bits(more, 1, HARDWARE))
    scale, factor = scale_and_factor(amax)
    tl.store(scale_ptr + r, scale, mask=r < num_rows)
    inside = (r < num_rows)[:, None]
    tl.store(data_ptr + at, quantized(x, factor[:, None], HARDWARE), mask=inside & (c < K))
    for first in range(BLOCK_K, K, BLOCK_K):
        more = tl.load(x_ptr + at + first, mask=exists[:, None] & (c + first < K), other=0.0).to(tl.float32)
        data = quantized(more, factor[:, None], HARDWARE)
        tl.store(data_ptr + at + first, data, mask=inside & (c + first < K))


@triton.jit
def fp8_columns_kernel(
    x_ptr,
    expert_ptr,
    first_ptr,
    last_ptr,
    amax_ptr,
    scale_ptr,
    data_ptr,
    num_tiles,
    K: tl.constexpr,
    E: tl.constexpr,
    AMAX: tl.constexpr,
    HARDWARE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile of BLOCK_M rows of one expert and BLOCK_K columns per program. AMAX: its part of amax [E, K]; else its
    data, the tile's scales too where it is the expert's first."""
    WIDTH: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    tile = tl.program_id(0) // WIDTH
    c = tl.program_id(0) % WIDTH * BLOCK_K + tl.arange(0, BLOCK_K)
    expert = tl.load(expert_ptr + tile)
    first = tl.load(first_ptr + tile)
    last = tl.load(last_ptr + tile)
    used = (expert < E) & (last > first)
    r = first + tl.arange(0, BLOCK_M)
    inside = (r < last)[:, None] & (c < K)[None, :] & used
    x = tl.load(x_ptr + r.to(tl.int64)[:, None] * K + c[None, :], mask=inside, other=0.0).to(tl.float32)
    to = expert.to(tl.int64) * K + c
    here = (c < K) & used
    if AMAX:
        tl.atomic_max(amax_ptr + to, amax_bits(x, 0, HARDWARE), mask=here, sem="relaxed")
    else:
        amax = tl.load(amax_ptr + to, mask=here, other=0)
        scale, factor = scale_and_factor(amax)
        before = tl.load(expert_ptr + tile - 1, mask=tile > 0, other=-1)
        tl.store(scale_ptr + to, scale, mask=here & (before != expert))
        data = tl.where(inside, quantized(x, factor[None, :], HARDWARE), 0)
        m = tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        out = data_ptr + c.to(tl.int64)[:, None] * num_tiles * BLOCK_M + m[None, :]
        tl.store(out, tl.trans(data.to(tl.uint8)), mask=(c < K)[:, None] & (tile < num_tiles))


def fp8_rows_launch(x: Tensor, offsets: Tensor | None, data: Tensor, scale: Tensor) -> Launch:
    """The launch that writes `data` [.., K] and `scale` [..]."""
    k, rows = x.shape[-1], scale.numel()
    block_k = min(triton.next_power_of_2(k), _WIDEST)
    block_m = max(_ELEMENTS // block_k, 1)
    arguments = {
        "x_ptr": x,
        "offsets_ptr": x if offsets is None else offsets,
        "data_ptr": data.view(torch.uint8),
        "scale_ptr": scale,
        "num_rows": rows,
    }
    constants = {
        "K": k,
        "E": 0 if offsets is None else offsets.shape[0],
        "HARDWARE": on_hardware(),
        "BLOCK_M": block_m,
        "BLOCK_K": block_k,
    }
    config = _ROWS if block_k <= _ELEMENTS else _LONG_ROWS
    return Launch(fp8_rows_kernel, (triton.cdiv(rows, block_m),), arguments, constants, config)


def fp8_quantize_rows(x: Tensor, offsets: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [.., K], or ragged x [R, K] with offsets [E] int32; contiguous, on the device → (data, scale [..])."""
    data = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scale = x.new_empty(x.shape[:-1], dtype=torch.float32)
    if data.numel():
        fp8_rows_launch(x, offsets, data, scale).run()
    return data, scale


def fp8_columns_launch(
    x: Tensor, offsets: Tensor, schedule: Schedule, amax: Tensor, scale: Tensor, data: Tensor, *, find_amax: bool
) -> Launch:
    """The launch that adds x's part to `amax` [E, K] int32 (find_amax), or the one that writes `data` [K, R'] and, of
    experts with rows, `scale` [E, K]."""
    (rows, k), experts = x.shape, offsets.shape[0]
    arguments = {
        "x_ptr": x,
        "expert_ptr": schedule.expert,
        "first_ptr": schedule.first,
        "last_ptr": schedule.last,
        "amax_ptr": amax,
        "scale_ptr": scale,
        "data_ptr": data.view(torch.uint8),
        "num_tiles": data.shape[1] // _TILE,
    }
    constants = {
        "K": k,
        "E": experts,
        "AMAX": find_amax,
        "HARDWARE": on_hardware(),
        "BLOCK_M": _TILE,
        "BLOCK_K": _COLUMNS.block_n,
    }
    grid = (max_tiles(rows, experts, _TILE) * triton.cdiv(k, _COLUMNS.block_n),)
    return Launch(fp8_columns_kernel, grid, arguments, constants, _COLUMNS)


def fp8_quantize_columns_t(x: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """x [R, K], offsets [E] int32; contiguous, on the device → (data [K, R'], scale [E, K])."""
    (rows, k), experts = x.shape, offsets.shape[0]
    data = x.new_empty(k, (-(-rows // _TILE) + experts) * _TILE, dtype=torch.float8_e4m3fn)
    scale = x.new_ones(experts, k, dtype=torch.float32)
    amax = x.new_zeros(experts, k, dtype=torch.int32)
    schedule = tile_schedule(offsets, rows, _TILE, tail=True)
    for find_amax in (True, False):
        fp8_columns_launch(x, offsets, schedule, amax, scale, data, find_amax=find_amax).run()
    return data, scale
