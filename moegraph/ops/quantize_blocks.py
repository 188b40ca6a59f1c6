"""Quantising to FP8 with fp32 scales in blocks, for `block_mm`: rows in 1 × 128, weights in 128 × 128.

    rows     x [R, K] with offsets [E]    data [R, K], scale [K/128, R]
    weights  x [E, N, K]                  data [E, N, K], scale [E, ⌈N/128⌉, K/128]

(DeepSeek-V3, arXiv 2412.19437, section 3.3.1.) A block's scale, its elements, zeros and what is not finite are those of
`fp8_format`, of all elements that share the scale. Square blocks make a weight and its transpose the same numbers, so
forward product and input gradient see one quantised weight. On CUDA from compute capability 8.9 on moegraph's Triton
kernels run; elsewhere the formulas below, which give the same bits. Nothing here has a gradient.

Legend: R routed rows, E experts, N and K the sizes of a weight.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moegraph.ops.fp8_format import check_fp8_input, scale_and_factor
from moegraph.ops.mx_format import magnitude_bits, to_e4m3
from moegraph.ops.mx_scales import zero_past
from moegraph.ops.quantize import uses_kernels

BLOCK = 128  # of the contraction, and of a weight's rows: what shares a scale
_E4M3 = torch.float8_e4m3fn


def _check(x: Tensor, offsets: Tensor | None) -> None:
    if x.dim() != (3 if offsets is None else 2):
        wanted = "weights [E, N, K]" if offsets is None else "rows [R, K] with offsets"
        raise ValueError(f"fp8_quantize_blocks: {list(x.shape)} is not {wanted}")
    check_rows_in_blocks(x)


def check_rows_in_blocks(x: Tensor) -> None:
    """Raises ValueError for a dtype that FP8 is not made of, and where the last axis is not whole blocks of 128."""
    check_fp8_input(x)
    if x.shape[-1] % BLOCK:
        raise ValueError(f"fp8 in blocks: {x.shape[-1]} columns are not whole blocks of {BLOCK}")


def _scale_shape(x: Tensor) -> tuple[int, ...]:
    blocks = x.shape[-1] // BLOCK
    return (blocks, x.shape[0]) if x.dim() == 2 else (x.shape[0], -(-x.shape[1] // BLOCK), blocks)


def quantize_row_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [R, K] → (data [R, K] FP8, scale [K/128, R] fp32), in plain torch."""
    blocks = x.reshape(x.shape[0], x.shape[1] // BLOCK, BLOCK)
    scale, factor = scale_and_factor(magnitude_bits(blocks).amax(-1))
    return to_e4m3(blocks.float() * factor[..., None]).flatten(1), scale.t().contiguous()


def _squares(x: Tensor) -> tuple[Tensor, Tensor]:
    experts, high, wide = _scale_shape(x)
    blocks = F.pad(x, (0, 0, 0, -x.shape[1] % BLOCK)).reshape(experts, high, BLOCK, wide, BLOCK)
    scale, factor = scale_and_factor(magnitude_bits(blocks).amax((2, 4)))
    data = to_e4m3(blocks.float() * factor[:, :, None, :, None]).flatten(3).flatten(1, 2)
    return data[:, : x.shape[1]].contiguous(), scale


@torch.library.custom_op("moegraph::fp8_quantize_blocks", mutates_args=())
def _fp8_quantize_blocks(x: Tensor, offsets: Tensor | None) -> tuple[Tensor, Tensor]:
    _check(x, offsets)
    if uses_kernels(x):
        from moegraph.kernels import fp8_quantize_blocks as kernels

        return kernels.fp8_quantize_blocks(x.contiguous(), offsets)
    return _squares(x) if offsets is None else quantize_row_blocks(zero_past(x, offsets))


@_fp8_quantize_blocks.register_fake
def _(x: Tensor, offsets: Tensor | None) -> tuple[Tensor, Tensor]:
    _check(x, offsets)
    return x.new_empty(x.shape, dtype=_E4M3), x.new_empty(_scale_shape(x), dtype=torch.float32)


def fp8_quantize_blocks(x: Tensor, offsets: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Ragged rows x [R, K] with offsets [E] → (data [R, K], scale [K/128, R]); or weights x [E, N, K] without → (data
    [E, N, K], scale [E, ⌈N/128⌉, K/128]).

    Rows past the last offset: data 0, scale 1. Raises ValueError for another dtype, other dimensions and K not a
    multiple of 128.
    """
    data, scale = _fp8_quantize_blocks(x, offsets)
    return data, scale
