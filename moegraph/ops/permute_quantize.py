"""`permute` and then quantising, as one operator: a token's row is quantised once, not once for each of its experts.

    mx_permute_quantize           mx_quantize_rows(permute(x), offsets)
    fp8_permute_quantize          fp8_quantize_rows(permute(x), offsets)
    fp8_permute_quantize_blocks   fp8_quantize_blocks(permute(x), offsets)

All give those bits, since a row is quantised by itself. The gathered rows in 16 bits are never written. Kernels and
rules of the quantisers: `quantize`, `quantize_fp8`, `quantize_blocks`; of moving rows: `permute`. Nothing here has a
gradient.

Legend: T tokens, D width, E experts, K top-k, R rows = T·K, R' padded rows = (ceil(R / 128) + E) · 128; ⌈n⌉ is n
rounded up to a multiple of 128.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moegraph.ops import fp8_format
from moegraph.ops.mx_format import BLOCK, check_mx_input, mx_quantize
from moegraph.ops.mx_scales import TILE, num_tiles, swizzle_row_scales, zero_past
from moegraph.ops.quantize import uses_kernels
from moegraph.ops.quantize_blocks import BLOCK as WIDE_BLOCK
from moegraph.ops.quantize_blocks import check_rows_in_blocks, quantize_row_blocks

_E4M3 = torch.float8_e4m3fn


def _gathered(data: Tensor, token: Tensor, offsets: Tensor) -> Tensor:
    """FP8 data [T, D] by the token of each row, [R, D]; zero past the last offset. Bytes move, whatever they mean."""
    return zero_past(data.view(torch.uint8).index_select(0, token), offsets).view(_E4M3)


@torch.library.custom_op("moegraph::mx_permute_quantize", mutates_args=())
def _mx_permute_quantize(
    x: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor, top_k: int, swizzled: bool
) -> tuple[Tensor, Tensor]:
    check_mx_input(x, -1)
    if uses_kernels(x):
        from moegraph.kernels import permute_quantize as kernels

        return kernels.mx_permute_quantize(x.contiguous(), inverse, offsets, top_k, swizzled=swizzled)
    token = torch.div(order, top_k, rounding_mode="floor")
    data, scale = mx_quantize(x, -1)
    scale = scale.index_select(0, token)
    scale = swizzle_row_scales(scale, offsets) if swizzled else zero_past(scale, offsets)
    return _gathered(data, token, offsets), scale


@_mx_permute_quantize.register_fake
def _(x: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor, top_k: int, swizzled: bool) -> tuple[Tensor, Tensor]:
    check_mx_input(x, -1)
    rows, d = order.shape[0], x.shape[1]
    of_scale = (
        (num_tiles(rows, offsets.shape[0]) * TILE, -(-d // TILE) * TILE // BLOCK) if swizzled else (rows, d // BLOCK)
    )
    return x.new_empty(rows, d, dtype=_E4M3), x.new_empty(of_scale, dtype=torch.uint8)


def mx_permute_quantize(
    x: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor, *, top_k: int, swizzled: bool = False
) -> tuple[Tensor, Tensor]:
    """Token rows x [T, D] bf16, fp16 or fp32 → expert-sorted (data [R, D] FP8, scale [R, D/32] uint8), blocks along D.

    Swizzled, the scale is [R', ⌈D⌉/32]. Rows past offsets[-1] have data and scale 0. Raises ValueError for another
    dtype and D not a multiple of 32.
    """
    data, scale = _mx_permute_quantize(x, order, inverse, offsets, top_k, swizzled)
    return data, scale


@torch.library.custom_op("moegraph::fp8_permute_quantize", mutates_args=())
def _fp8_permute_quantize(
    x: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor, top_k: int
) -> tuple[Tensor, Tensor]:
    fp8_format.check_fp8_input(x)
    if uses_kernels(x):
        from moegraph.kernels import permute_quantize as kernels

        return kernels.fp8_permute_quantize(x.contiguous(), inverse, offsets, top_k)
    token = torch.div(order, top_k, rounding_mode="floor")
    data, scale = fp8_format.quantize_rows(x)
    past = torch.arange(token.shape[0], dtype=torch.int32, device=x.device) >= offsets[-1]
    return _gathered(data, token, offsets), scale.index_select(0, token).masked_fill(past, 1.0)


@_fp8_permute_quantize.register_fake
def _(x: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    fp8_format.check_fp8_input(x)
    rows = order.shape[0]
    return x.new_empty(rows, x.shape[1], dtype=_E4M3), x.new_empty(rows, dtype=torch.float32)


def fp8_permute_quantize(
    x: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor, *, top_k: int
) -> tuple[Tensor, Tensor]:
    """Token rows x [T, D] bf16, fp16 or fp32 → expert-sorted (data [R, D] FP8, scale [R] fp32), one scale per row.

    Rows past offsets[-1] have data 0 and scale 1. Raises ValueError for another dtype.
    """
    data, scale = _fp8_permute_quantize(x, order, inverse, offsets, top_k)
    return data, scale


@torch.library.custom_op("moegraph::fp8_permute_quantize_blocks", mutates_args=())
def _fp8_permute_quantize_blocks(
    x: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor, top_k: int
) -> tuple[Tensor, Tensor]:
    check_rows_in_blocks(x)
    if uses_kernels(x):
        from moegraph.kernels import permute_quantize as kernels

        return kernels.blocks_permute_quantize(x.contiguous(), inverse, offsets, top_k)
    token = torch.div(order, top_k, rounding_mode="floor")
    data, scale = quantize_row_blocks(x)
    past = torch.arange(token.shape[0], dtype=torch.int32, device=x.device) >= offsets[-1]
    return _gathered(data, token, offsets), scale.index_select(1, token).masked_fill(past, 1.0)


@_fp8_permute_quantize_blocks.register_fake
def _(x: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    check_rows_in_blocks(x)
    rows, d = order.shape[0], x.shape[1]
    return x.new_empty(rows, d, dtype=_E4M3), x.new_empty(d // WIDE_BLOCK, rows, dtype=torch.float32)


def fp8_permute_quantize_blocks(
    x: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor, *, top_k: int
) -> tuple[Tensor, Tensor]:
    """Token rows x [T, D] bf16, fp16 or fp32 → expert-sorted (data [R, D] FP8, scale [D/128, R] fp32), one scale per
    128 elements of a row.

    Rows past offsets[-1] have data 0 and scale 1. Raises ValueError for another dtype and D not a multiple of 128.
    """
    data, scale = _fp8_permute_quantize_blocks(x, order, inverse, offsets, top_k)
    return data, scale
