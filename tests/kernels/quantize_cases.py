"""What quantising kernels are held against: the operators' plain formulas, on inputs with all that is awkward."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moegraph.ops import fp8_format, mx_scales
from moegraph.ops.mx_format import mx_quantize


def awkward(*shape: int, dtype: torch.dtype, subnormal: bool = True, seed: int = 0) -> Tensor:
    """Normal numbers of many sizes; a few of random bits, NaN, Inf and -0 among them; some zero rows."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    spread = 4 if dtype == torch.float16 else 30
    x *= 10.0 ** torch.randint(-spread, spread, (*shape[:-1], 1), generator=generator)
    bits = torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int64)
    few = torch.rand(shape, generator=generator)
    x = torch.where(few < 0.01, bits.to(torch.int32).view(torch.float32), x)
    for value, below in ((math.nan, 0.98), (math.inf, 0.983), (-0.0, 0.986), (0.0, 0.99)):
        x = torch.where((few > below) & (few < below + 0.001), value, x)
    x[..., ::7, :] = 0.0
    x = x.to(dtype)
    if not subnormal:
        x = torch.where(x.float().abs() < 2.0**-126, torch.zeros_like(x), x)
    return x


def mismatch(have: Tensor, want: Tensor) -> str:
    """Empty where both have the same shape, dtype and bits, NaN as any NaN of fp32."""
    if have.shape != want.shape or have.dtype != want.dtype:
        return f"{have.dtype} {tuple(have.shape)} instead of {want.dtype} {tuple(want.shape)}"
    if have.dtype == torch.float32:
        same = (have == want) | (have.isnan() & want.isnan())
    else:
        same = have.view(torch.uint8) == want.contiguous().view(torch.uint8)
    return (
        "" if same.all() else f"{int((~same).sum())} of {same.numel()} differ, first {(~same).nonzero()[:4].tolist()}"
    )


def mx_matrices(x: Tensor, swizzled: bool) -> tuple[Tensor, ...]:
    """Along rows and along columns of matrices: data and scale each."""
    (rows, row_scale), (columns, column_scale) = mx_quantize(x, -1), mx_quantize(x, -2)
    if swizzled:
        row_scale = mx_scales.swizzle_scales(row_scale)
        column_scale = mx_scales.swizzle_scales(column_scale.transpose(-1, -2))
    return rows, row_scale, columns, column_scale


def mx_ragged(x: Tensor, offsets: Tensor, swizzled: bool) -> tuple[Tensor, ...]:
    """The same of ragged rows."""
    rows, row_scale = mx_quantize(mx_scales.zero_past(x, offsets), -1)
    columns, column_scale = mx_quantize(mx_scales.pad_rows(x, offsets), -2)
    if swizzled:
        row_scale = mx_scales.swizzle_row_scales(row_scale, offsets)
        column_scale = mx_scales.swizzle_column_scales(column_scale, offsets)
    return rows, row_scale, columns, column_scale


def fp8(x: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
    """FP8 along rows, then along columns: data and scale each, and the padded offsets."""
    return *fp8_format.quantize_rows(x, offsets), *fp8_format.quantize_columns_t(x, offsets)
