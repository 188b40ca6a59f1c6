"""Quantising to MXFP8 as operators: what Blackwell's block-scaled products read, without the host waiting.

Formulas: `mx_format`, rounding `rceil`. Swizzled scales, tiles and padded rows: `mx_scales`. On CUDA, from compute
capability 8.9 on, moegraph's Triton kernels run; elsewhere the plain-torch formulas, which give the same bits. Inputs
are bf16, fp16 or fp32, data is float8_e4m3fn, scales are uint8. Nothing here has a gradient.

Ragged rows x [R, K] are sorted by expert; `offsets[E]` (int32, on the device) are the inclusive ends of the experts'
runs. Rows past `offsets[-1]` do not exist: whatever they hold, they give data 0.

What is quantised along columns has blocks that must not cross experts: ragged rows come out padded, each expert's run
starting at a multiple of 128 rows, with `padded[E]` the inclusive ends of the padded runs; zeros between and behind.

Legend: R rows, R' padded rows = (ceil(R / 128) + E) · 128, N rows of a matrix, K columns, E experts; ⌈n⌉ is n rounded
up to a multiple of 128.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moegraph.kernels.chips import card_of
from moegraph.ops.mx_format import BLOCK, check_mx_input, check_mx_scales, mx_dequantize, mx_quantize
from moegraph.ops.mx_scales import (
    TILE,
    num_tiles,
    pad_rows,
    padded_offsets,
    swizzle_column_scales,
    swizzle_row_scales,
    swizzle_scales,
    zero_past,
)

_E4M3 = torch.float8_e4m3fn


def uses_kernels(x: Tensor) -> bool:
    """Whether quantising x runs on Triton kernels: they need the instruction that rounds to E4M3."""
    card = card_of(x.device)
    return card is not None and card.capability >= 89


def _up(size: int) -> int:
    return -(-size // TILE) * TILE


def _scales(x: Tensor, *shape: int) -> Tensor:
    return x.new_empty(shape, dtype=torch.uint8)


def _fake_rows(x: Tensor, experts: int, swizzled: bool) -> tuple[Tensor, Tensor]:
    check_mx_input(x, -1)
    *lead, n, k = x.shape
    high = num_tiles(n, experts) * TILE
    scale = _scales(x, *lead, high, _up(k) // BLOCK) if swizzled else _scales(x, *lead, n, k // BLOCK)
    return x.new_empty(x.shape, dtype=_E4M3), scale


def _fake_columns(x: Tensor, experts: int, swizzled: bool) -> tuple[Tensor, Tensor]:
    check_mx_input(x, None if experts else -2)
    *lead, n, k = x.shape
    high = num_tiles(n, experts) * TILE if experts else n
    scale = _scales(x, *lead, _up(k), _up(high) // BLOCK) if swizzled else _scales(x, *lead, high // BLOCK, k)
    return x.new_empty((*lead, high, k), dtype=_E4M3), scale


def _plain_rows(x: Tensor, offsets: Tensor | None, swizzled: bool) -> tuple[Tensor, Tensor]:
    if offsets is None:
        data, scale = mx_quantize(x, -1)
        return data, swizzle_scales(scale) if swizzled else scale
    data, scale = mx_quantize(zero_past(x, offsets), -1)
    return data, swizzle_row_scales(scale, offsets) if swizzled else scale


def _plain_columns(x: Tensor, offsets: Tensor | None, swizzled: bool) -> tuple[Tensor, Tensor]:
    if offsets is None:
        data, scale = mx_quantize(x, -2)
        return data, swizzle_scales(scale.transpose(-1, -2)) if swizzled else scale
    data, scale = mx_quantize(pad_rows(x, offsets), -2)
    return data, swizzle_column_scales(scale, offsets) if swizzled else scale


def _kernel(
    x: Tensor, offsets: Tensor | None, swizzled: bool, *, rows: bool = False, columns: bool = False
) -> tuple[Tensor, ...]:
    from moegraph.kernels import mx_quantize as kernels

    found = kernels.mx_quantize(x.contiguous(), offsets, rows=rows, columns=columns, swizzled=swizzled)
    return tuple(tensor for tensor in found if tensor is not None)


def padded_ends(offsets: Tensor) -> Tensor:
    """`padded_offsets`, on CUDA in one launch."""
    if offsets.device.type != "cuda":
        return padded_offsets(offsets)
    from moegraph.kernels import padded_offsets as kernels

    return kernels.padded_offsets(offsets)


@torch.library.custom_op("moegraph::mx_quantize_rows", mutates_args=())
def _mx_quantize_rows(x: Tensor, offsets: Tensor | None, swizzled: bool) -> tuple[Tensor, Tensor]:
    check_mx_input(x, -1)
    if uses_kernels(x):
        data, scale = _kernel(x, offsets, swizzled, rows=True)
        return data, scale
    return _plain_rows(x, offsets, swizzled)


@_mx_quantize_rows.register_fake
def _(x: Tensor, offsets: Tensor | None, swizzled: bool) -> tuple[Tensor, Tensor]:
    return _fake_rows(x, 0 if offsets is None else offsets.shape[0], swizzled)


def mx_quantize_rows(x: Tensor, offsets: Tensor | None = None, *, swizzled: bool = False) -> tuple[Tensor, Tensor]:
    """x [.., N, K], or ragged x [R, K] with offsets [E] → (data as x, scale [.., N, K/32]), blocks along K.

    Swizzled, the scale is [.., ⌈N⌉, ⌈K⌉/32], and of ragged rows [R', ⌈K⌉/32].
    Raises ValueError for another dtype and K not a multiple of 32.
    """
    data, scale = _mx_quantize_rows(x, offsets, swizzled)
    return data, scale


@torch.library.custom_op("moegraph::mx_dequantize_rows", mutates_args=())
def _mx_dequantize_rows(data: Tensor, scale: Tensor) -> Tensor:
    if uses_kernels(data):
        from moegraph.kernels import mx_dequantize as kernels

        check_mx_scales(data, scale)
        return kernels.mx_dequantize(data.contiguous(), scale.contiguous())
    return mx_dequantize(data, scale)


@_mx_dequantize_rows.register_fake
def _(data: Tensor, scale: Tensor) -> Tensor:
    check_mx_scales(data, scale)
    return data.new_empty(data.shape, dtype=torch.bfloat16)


def mx_dequantize_rows(data: Tensor, scale: Tensor) -> Tensor:
    """Data [.., K] and plain scale [.., K/32] of `mx_quantize_rows` → [.., K] bf16, rounded once.

    Exact above 2^-126. Raises ValueError for shapes that do not match.
    """
    out: Tensor = _mx_dequantize_rows(data, scale)
    return out


@torch.library.custom_op("moegraph::mx_quantize_columns", mutates_args=())
def _mx_quantize_columns(x: Tensor, swizzled: bool) -> tuple[Tensor, Tensor]:
    check_mx_input(x, -2)
    if uses_kernels(x):
        data, scale = _kernel(x, None, swizzled, columns=True)
        return data, scale
    return _plain_columns(x, None, swizzled)


@_mx_quantize_columns.register_fake
def _(x: Tensor, swizzled: bool) -> tuple[Tensor, Tensor]:
    return _fake_columns(x, 0, swizzled)


def mx_quantize_columns(x: Tensor, *, swizzled: bool = False) -> tuple[Tensor, Tensor]:
    """x [.., N, K] → (data as x, scale [.., N/32, K]), blocks of 32 rows.

    Swizzled, the scale is that of the transposed matrix, [.., ⌈K⌉, ⌈N⌉/32].
    Raises ValueError for another dtype and N not a multiple of 32.
    """
    data, scale = _mx_quantize_columns(x, swizzled)
    return data, scale


@torch.library.custom_op("moegraph::mx_quantize_ragged_columns", mutates_args=())
def _mx_quantize_ragged_columns(x: Tensor, offsets: Tensor, swizzled: bool) -> tuple[Tensor, Tensor, Tensor]:
    check_mx_input(x, None)
    if uses_kernels(x):
        data, scale = _kernel(x, offsets, swizzled, columns=True)
    else:
        data, scale = _plain_columns(x, offsets, swizzled)
    return data, scale, padded_ends(offsets)


@_mx_quantize_ragged_columns.register_fake
def _(x: Tensor, offsets: Tensor, swizzled: bool) -> tuple[Tensor, Tensor, Tensor]:
    return *_fake_columns(x, offsets.shape[0], swizzled), torch.empty_like(offsets)


def mx_quantize_ragged_columns(x: Tensor, offsets: Tensor, *, swizzled: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Ragged x [R, K], offsets [E] → (data [R', K] padded, scale [R'/32, K], padded [E] int32), blocks of 32 rows.

    Swizzled, the scale is [⌈K⌉, R'/32], each expert's blocks together (`swizzle_column_scales`).
    Raises ValueError for another dtype.
    """
    data, scale, padded = _mx_quantize_ragged_columns(x, offsets, swizzled)
    return data, scale, padded


@torch.library.custom_op("moegraph::mx_quantize_both", mutates_args=())
def _mx_quantize_both(x: Tensor, swizzled: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_mx_input(x, -1)
    check_mx_input(x, -2)
    if uses_kernels(x):
        rows, row_scale, columns, column_scale = _kernel(x, None, swizzled, rows=True, columns=True)
        return rows, row_scale, columns, column_scale
    return *_plain_rows(x, None, swizzled), *_plain_columns(x, None, swizzled)


@_mx_quantize_both.register_fake
def _(x: Tensor, swizzled: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *_fake_rows(x, 0, swizzled), *_fake_columns(x, 0, swizzled)


def mx_quantize_both(x: Tensor, *, swizzled: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`mx_quantize_rows` and `mx_quantize_columns` of x [.., N, K] in one read: a weight, once per step."""
    rows, row_scale, columns, column_scale = _mx_quantize_both(x, swizzled)
    return rows, row_scale, columns, column_scale


@torch.library.custom_op("moegraph::mx_quantize_ragged_both", mutates_args=())
def _mx_quantize_ragged_both(
    x: Tensor, offsets: Tensor, swizzled: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    check_mx_input(x, -1)
    if uses_kernels(x):
        rows, row_scale, columns, column_scale = _kernel(x, offsets, swizzled, rows=True, columns=True)
        return rows, row_scale, columns, column_scale, padded_ends(offsets)
    return *_plain_rows(x, offsets, swizzled), *_plain_columns(x, offsets, swizzled), padded_ends(offsets)


@_mx_quantize_ragged_both.register_fake
def _(x: Tensor, offsets: Tensor, swizzled: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    experts = offsets.shape[0]
    return *_fake_rows(x, experts, swizzled), *_fake_columns(x, experts, swizzled), torch.empty_like(offsets)


def mx_quantize_ragged_both(
    x: Tensor, offsets: Tensor, *, swizzled: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`mx_quantize_rows` and `mx_quantize_ragged_columns` of x [R, K] in one read: an activation or its gradient.

    → (row data, row scale, column data, column scale, padded).
    """
    rows, row_scale, columns, column_scale, padded = _mx_quantize_ragged_both(x, offsets, swizzled)
    return rows, row_scale, columns, column_scale, padded
