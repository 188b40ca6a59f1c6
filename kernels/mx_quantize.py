"""MXFP8 from bf16, fp16 or fp32: along rows, along columns, or both in one read, scales written where they are used.

Formulas, and what non-finite and tiny blocks become: `moegraph.ops.mx_format`, rounding `rceil`. How swizzled scales
lie in memory, tiles, and padded rows: `moegraph.ops.mx_scales`. Results are the same bits as theirs.

What is read is either matrices [.., N, K], or ragged rows [R, K] sorted by expert, cut into tiles of 128 rows by the
schedule of `tiles.py`. A program takes 32 rows of a tile: along rows it has whole blocks, along columns one each. Where
columns are asked for it is one warp, so that no maximum of a column crosses warps: a thread has 16 columns of every
fourth or eighth row in registers. What bounds these kernels is how many instructions an element takes, not memory.

    along rows     data where x is, rows past the last offset zero; scales [.., N, K/32] or swizzled
    along columns  data where x is, or of ragged rows padded to tiles; scales [.., N/32, K], or swizzled of the
                   transposed matrix [.., K, N/32]

Legend: R rows, N rows of a matrix, K columns, E experts, B tiles.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moegraph.kernels.config import Config
from moegraph.kernels.e4m3 import INFINITE, amax_bits, on_hardware, quantized
from moegraph.kernels.launch import Launch
from moegraph.kernels.tiles import Schedule, max_tiles, tile_schedule

_TILE = 128
_ROWS = Config(block_n=128, num_warps=2)
_COLUMNS = Config(block_n=128, num_warps=1)
_NARROW = Config(block_n=64, num_warps=1)  # both axes and fp32: twice as wide, some spill


class Quantized(NamedTuple):
    """float8_e4m3fn data and uint8 scales; None for the axis that was not asked for."""

    row_data: Tensor | None
    row_scale: Tensor | None
    column_data: Tensor | None
    column_scale: Tensor | None


@triton.jit
def scale_and_factor(amax):
    """int32 bits of a block's amax → the E8M0 byte of its scale, int32, and what its elements are multiplied by: NaN
    where the byte is 255."""
    byte = tl.maximum((amax + (0x1FFFFF - (8 << 23))) >> 23, 0)  # a mantissa above that of 448 carries
    factor = tl.where(byte == 0, 127 << 23, (254 - byte) << 23)
    infinite = amax >= INFINITE
    byte = tl.where(infinite, tl.where(amax > INFINITE, 255, 254), byte)
    factor = tl.where(infinite, tl.where(amax > INFINITE, 0x7FFFFFFF, 0x00400000), factor)
    return byte, factor.to(tl.float32, bitcast=True)


@triton.jit
def mx_quantize_kernel(
    x_ptr,
    expert_ptr,
    first_ptr,
    last_ptr,
    offsets_ptr,
    row_data_ptr,
    row_scale_ptr,
    column_data_ptr,
    column_scale_ptr,
    matrix_rows,
    num_tiles,
    K: tl.constexpr,
    E: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SWIZZLED: tl.constexpr,
    HARDWARE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """32 rows and BLOCK_K columns per program; neighbours in the grid are neighbours in memory. E = 0: matrices."""
    HIGH: tl.constexpr = (K + 127) // 128  # blocks of swizzled scales along K
    WIDTH: tl.constexpr = ((HIGH * 128 if SWIZZLED else K) + BLOCK_K - 1) // BLOCK_K
    GROUPS: tl.constexpr = BLOCK_K // 32
    part = tl.program_id(0) // WIDTH
    column = tl.program_id(0) % WIDTH
    tile = part // 4
    part = part % 4
    if E > 0:
        expert = tl.load(expert_ptr + tile)
        first = tl.load(first_ptr + tile)
        last = tl.load(last_ptr + tile)
        used = (expert < E) & (last > first)
        begin = tl.load(offsets_ptr + expert - 1, mask=used & (expert > 0), other=0)
        start = tl.where(used, tile - (first - begin) // 128, tile)  # the expert's first tile
        wide = tl.where(used, (last - begin + 127) // 128, 1)  # and how many it has
    else:
        wide = (matrix_rows + 127) // 128
        matrix = tile // wide
        start = matrix * wide
        first = matrix * matrix_rows + (tile - start) * 128
        last = (matrix + 1) * matrix_rows
        used = True
    i = tl.arange(0, 32)
    r = first + part * 32 + i
    c = column * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = (r < last)[:, None] & (c < K)[None, :]
    at = r.to(tl.int64)[:, None] * K + c[None, :]
    x = tl.load(x_ptr + at, mask=inside & used, other=0.0).to(tl.float32)

    if ROWS:
        blocks = tl.reshape(x, (32, GROUPS, 32))
        byte, factor = scale_and_factor(amax_bits(blocks, 2, HARDWARE))
        data = quantized(blocks, factor[:, :, None], HARDWARE)
        tl.store(row_data_ptr + at, tl.reshape(data, (32, BLOCK_K)), mask=inside)
        g = column * GROUPS + tl.arange(0, GROUPS)
        if SWIZZLED:
            block = (tile.to(tl.int64) * HIGH + g // 4) * 512 + g % 4
            to = block[None, :] + (i * 16 + part * 4)[:, None]
            keep = (g < HIGH * 4)[None, :] & (tile < num_tiles)
        else:
            to = r.to(tl.int64)[:, None] * (K // 32) + g[None, :]
            keep = (r < last)[:, None] & (g < K // 32)[None, :]
        tl.store(row_scale_ptr + to, byte.to(tl.uint8), mask=keep)

    if COLUMNS:
        byte, factor = scale_and_factor(amax_bits(x, 0, HARDWARE))
        data = quantized(x, factor[None, :], HARDWARE)
        if E > 0:
            row = (tile * 4 + part).to(tl.int64)
            here = tile < num_tiles
            to = (row * 32 + i)[:, None] * K + c[None, :]
            tl.store(column_data_ptr + to, data, mask=(c < K)[None, :] & here)
        else:
            row = (first // 32 + part).to(tl.int64)
            here = first + part * 32 < last
            tl.store(column_data_ptr + at, data, mask=inside)
        if SWIZZLED:
            block = start.to(tl.int64) * HIGH + (c // 128) * wide + (tile - start)
            to = block * 512 + (c % 32) * 16 + (c % 128) // 32 * 4 + part
            keep = (c < HIGH * 128) & (tile < num_tiles)
        else:
            to = row * K + c
            keep = (c < K) & here
        tl.store(column_scale_ptr + to, byte.to(tl.uint8), mask=keep)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def empty_quantized(x: Tensor, num_experts: int, *, rows: bool, columns: bool, swizzled: bool) -> Quantized:
    """Tensors for the results of `mx_quantize`; num_experts 0: matrices."""

    def scales(*shape: int) -> Tensor:
        return x.new_empty(shape, dtype=torch.uint8)

    *lead, n, k = x.shape
    tiles = -(-n // _TILE) + num_experts
    row_data = row_scale = column_data = column_scale = None
    if rows:
        padded = tiles * _TILE
        row_data = torch.empty_like(x, dtype=torch.float8_e4m3fn)
        row_scale = scales(*lead, padded, _up(k, 128) // 32) if swizzled else scales(*lead, n, k // 32)
    if columns:
        high = tiles * _TILE if num_experts else n
        column_data = x.new_empty(*lead, high, k, dtype=torch.float8_e4m3fn)
        column_scale = scales(*lead, _up(k, 128), tiles * 4) if swizzled else scales(*lead, -(-high // 32), k)
    return Quantized(row_data, row_scale, column_data, column_scale)


def empty_swizzled(like: Tensor, rows: int, columns: int, num_experts: int) -> tuple[Tensor, Tensor]:
    """(data [R, K] unwritten, swizzled scales of zeros) for kernels that write the scales of rows that exist only."""
    scale = like.new_zeros((-(-rows // _TILE) + num_experts) * _TILE, _up(columns, 128) // 32, dtype=torch.uint8)
    return like.new_empty(rows, columns, dtype=torch.float8_e4m3fn), scale


def mx_quantize_launch(
    x: Tensor,
    out: Quantized,
    offsets: Tensor | None,
    schedule: Schedule | None,
    *,
    swizzled: bool,
    config: Config | None = None,
) -> Launch:
    """The launch that fills `out`; of `config`, block_n columns per program, a multiple of 32, and the warps count."""
    if config is None:
        narrow = out.row_data is not None or x.dtype.itemsize > 2
        config = _ROWS if out.column_data is None else _NARROW if narrow else _COLUMNS
    *_, n, k = x.shape
    rows = x.numel() // k
    experts = 0 if offsets is None else offsets.shape[0]
    tiles = rows // n * -(-n // _TILE) if offsets is None else -(-rows // _TILE) + experts
    launched = tiles if offsets is None else max_tiles(rows, experts, _TILE)

    def pointer(tensor: Tensor | None) -> Tensor:
        """A tensor that is not there is not looked at: any other stands for it."""
        return x if tensor is None else tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor

    arguments: dict[str, Any] = {
        "x_ptr": x,
        "expert_ptr": pointer(schedule.expert if schedule else None),
        "first_ptr": pointer(schedule.first if schedule else None),
        "last_ptr": pointer(schedule.last if schedule else None),
        "offsets_ptr": pointer(offsets),
        "row_data_ptr": pointer(out.row_data),
        "row_scale_ptr": pointer(out.row_scale),
        "column_data_ptr": pointer(out.column_data),
        "column_scale_ptr": pointer(out.column_scale),
        "matrix_rows": n,
        "num_tiles": tiles,
    }
    constants = {
        "K": k,
        "E": experts,
        "ROWS": out.row_data is not None,
        "COLUMNS": out.column_data is not None,
        "SWIZZLED": swizzled,
        "HARDWARE": on_hardware(),
        "BLOCK_K": config.block_n,
    }
    grid = (launched * 4 * triton.cdiv(_up(k, 128) if swizzled else k, config.block_n),)
    return Launch(mx_quantize_kernel, grid, arguments, constants, config)


def mx_quantize(
    x: Tensor, offsets: Tensor | None = None, *, rows: bool = True, columns: bool = False, swizzled: bool = False
) -> Quantized:
    """x [.., N, K], or ragged x [R, K] with offsets [E] int32; contiguous, on the device.

    Sizes that are quantised along must be multiples of 32; who calls has seen to that.
    """
    experts = 0 if offsets is None else offsets.shape[0]
    out = empty_quantized(x, experts, rows=rows, columns=columns, swizzled=swizzled)
    if offsets is None and x.numel() == 0:
        return out
    schedule = None if offsets is None else tile_schedule(offsets, x.shape[0], _TILE, tail=True)
    mx_quantize_launch(x, out, offsets, schedule, swizzled=swizzled).run()
    return out
