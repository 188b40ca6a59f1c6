"""Quantising to FP8 with fp32 scales as operators, for Hopper's products; contracts as in `quantize`, formulas in
`fp8_format`.

Legend: R rows, R' padded rows = (ceil(R / 128) + E) · 128, K columns, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moegraph.ops import fp8_format
from moegraph.ops.mx_scales import TILE, num_tiles
from moegraph.ops.quantize import padded_ends, uses_kernels

_E4M3 = torch.float8_e4m3fn


@torch.library.custom_op("moegraph::fp8_quantize_rows", mutates_args=())
def _fp8_quantize_rows(x: Tensor, offsets: Tensor | None) -> tuple[Tensor, Tensor]:
    fp8_format.check_fp8_input(x)
    if uses_kernels(x):
        from moegraph.kernels import fp8_quantize as kernels

        return kernels.fp8_quantize_rows(x.contiguous(), offsets)
    return fp8_format.quantize_rows(x, offsets)


@_fp8_quantize_rows.register_fake
def _(x: Tensor, offsets: Tensor | None) -> tuple[Tensor, Tensor]:
    fp8_format.check_fp8_input(x)
    return x.new_empty(x.shape, dtype=_E4M3), x.new_empty(x.shape[:-1], dtype=torch.float32)


def fp8_quantize_rows(x: Tensor, offsets: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [.., K], or ragged x [R, K] with offsets [E] → (data as x, scale [..] fp32), one scale per row.

    Rows past the last offset: data 0, scale 1. Raises ValueError for another dtype.
    """
    data, scale = _fp8_quantize_rows(x, offsets)
    return data, scale


@torch.library.custom_op("moegraph::fp8_quantize_columns_t", mutates_args=())
def _fp8_quantize_columns_t(x: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    fp8_format.check_fp8_input(x)
    if uses_kernels(x):
        from moegraph.kernels import fp8_quantize as kernels

        return *kernels.fp8_quantize_columns_t(x.contiguous(), offsets), padded_ends(offsets)
    return fp8_format.quantize_columns_t(x, offsets)


@_fp8_quantize_columns_t.register_fake
def _(x: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    fp8_format.check_fp8_input(x)
    (rows, k), experts = x.shape, offsets.shape[0]
    data = x.new_empty((k, num_tiles(rows, experts) * TILE), dtype=_E4M3)
    return data, x.new_empty((experts, k), dtype=torch.float32), torch.empty_like(offsets)


def fp8_quantize_columns_t(x: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Ragged x [R, K], offsets [E] → (data [K, R'] transposed, scale [E, K] fp32, padded [E] int32).

    One scale per expert and column, what a weight gradient contracts over. Expert e's rows, padded with zeros to a
    multiple of 128, are columns padded[e-1] … padded[e] of data; behind the last, zeros. An expert without rows has
    scale 1. Raises ValueError for another dtype.
    """
    data, scale, padded = _fp8_quantize_columns_t(x, offsets)
    return data, scale, padded
